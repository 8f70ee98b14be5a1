# make demo    set up, then fine-tune the carried model on the carried data and watch it learn
# make test    set up, then the whole suite but the slow tests; test-fast: what neither starts a process nor trains,
#              under a minute; test-slow: all of it
# make test-kills fuzz     a campaign that kills a real process at drawn instants and goes on: KILLS=300 SEED=0, ten minutes
# make fuzz          inputs that nobody wrote, through every reader: INPUTS=100000 SEED=0
# make test-distributed  runs of four processes: DDP, FSDP2, and DeepSpeed where it is installed
# make test-avx2  the tests of the arithmetic again, as on a processor without AVX512 and without products of bfloat16
# make test-web  the page in a browser
# make check   format, lint, types, architecture: seconds
# make wheel   build the wheel, install it into an empty environment elsewhere, run the demo from there
# make bench   burnish beside its peers, into docs/benchmarks.md; WHAT="train start" for parts, WHAT=all for all
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_WAIT_POLICY := PASSIVE

.PHONY: test-web demo test test-avx2 test-kills test-fast test-slow check format wheel bench clean

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
	  tests/ops tests/optim tests/core/test_loop.py tests/engine/test_engines.py tests/app/test_every_key.py \
	  -k "not cast_linear and (not every_key or fp16 or bf16)"

test-slow: $(DEV)
	$(BIN)/python -m pytest -m "slow or not slow and not distributed" -n 2 --dist loadfile

# The page in Chromium, as the system's packages have it; BURNISH_BROWSER=required fails where there is none.
test-web: $(DEV)
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[browser]"
	$(BIN)/python -m pytest tests/web tests/browser -m "slow or not slow"

test-kills: $(DEV)
	$(BIN)/python tests/kills.py --kills $(or $(KILLS),300) --seed $(or $(SEED),0)

fuzz: $(DEV)
	$(BIN)/python tests/fuzz.py --inputs $(or $(INPUTS),100000) --seed $(or $(SEED),0)

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

wheel: $(DEV)
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

bench: $(READY)
	$(BIN)/python bench/run.py $(WHAT)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf demo-run demo-dpo-run build dist .mypy_cache .ruff_cache .pytest_cache

# torch goes first and by its exact version, so that nothing later asks the index for another build of it.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; a minute or two) ..."
	@$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[serve]"
	@touch $@

$(DEV): $(READY)
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@
