# make demo    set up, then fine-tune the bundled model on the bundled data
# make test    set up, then run the tests without the slow ones; test-fast: no processes and no training, under a minute;
#              test-slow: all tests
# make test-kills fuzz     kill a training process at random moments and resume it: KILLS=300 SEED=0, ten minutes
# make fuzz          random inputs for every reader: INPUTS=100000 SEED=0
# make test-distributed  runs with four processes: DDP, FSDP2, and DeepSpeed if it is installed
# make test-avx2  numerical tests as on a processor without AVX512 and bfloat16 matrix products
# make test-web  tests of the web UI in a browser
# make test-llama  exported GGUF files in llama.cpp, which is built into .venv-llama once (half an hour on a slow core)
# make check   format, lint, types, architecture: seconds
# make wheel   build the wheel, install it into an empty environment, run the demo from there
# make parity  update the tables of docs/parity*.md by comparing with transformers and TRL; WHAT="peer_methods" for parts
# make docs    docs/ as a site in site/; a broken link fails
# make bench   compare burnish with other libraries, into docs/benchmarks.md; WHAT="train start" for parts, WHAT=all for all
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_WAIT_POLICY := PASSIVE
# Tests start burnish often: without bytecode files, each process compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test-web test-llama docs demo test test-avx2 test-kills test-fast test-slow check format wheel parity bench clean

demo: $(READY)
	@$(BIN)/burnish demo

test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: $(DEV)
	$(BIN)/python -m pytest -m "not slow and not run and not distributed" -n 2 --dist worksteal

test-distributed: $(DEV)
	$(BIN)/python -m pytest -m distributed tests

# Without test_cast_linear, which spends minutes in emulated bfloat16.
test-avx2: $(DEV)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -n 2 -m "not slow and not distributed" \
	  tests/kernels tests/optim tests/loop/test_loop.py tests/parallel/test_backends.py tests/run/test_every_key.py \
	  -k "not cast_linear and (not every_key or fp16 or bf16)"

test-slow: $(DEV)
	$(BIN)/python -m pytest -m "slow or not slow and not distributed" -n 2 --dist loadfile

# Tests of the web UI in the system's Chromium; with BURNISH_BROWSER=required they fail if it is missing.
test-web: $(DEV)
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[browser]"
	$(BIN)/python -m pytest tests/web tests/browser -m "slow or not slow"

test-llama: $(DEV)
	@test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@.venv-llama/bin/pip install --quiet -c constraints.txt cmake llama-cpp-python numpy
	$(BIN)/python -m pytest -m slow tests/export/test_llama_cpp.py

test-kills: $(DEV)
	$(BIN)/python tests/kills.py --kills $(or $(KILLS),300) --seed $(or $(SEED),0)

fuzz: $(DEV)
	$(BIN)/python tests/fuzz.py --inputs $(or $(INPUTS),100000) --seed $(or $(SEED),0)

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_attribute_names.py
	@if command -v tsc >/dev/null; then tsc -p jsconfig.json; else echo "tsc is not installed: the types of the web UI were not checked"; fi
	@if command -v prettier >/dev/null; then prettier --check src/burnish/serve/page/static tests/web/scripts; fi

wheel: $(DEV)
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

parity: $(DEV)
	$(BIN)/python scripts/make_parity.py $(WHAT)

docs: $(READY)
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python bench/run.py $(WHAT)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf demo-run demo-dpo-run build dist .mypy_cache .ruff_cache .pytest_cache

# torch is installed first and by its exact version, so that later steps do not replace its build.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; a minute or two) ..."
	@$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[serve]"
	@touch $@

$(DEV): $(READY)
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@
