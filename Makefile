# make demo    set up, then fine-tune the carried model on the carried data and watch it learn
# make test    set up, then the whole suite but the slow tests
# make check   format, lint, types, architecture: seconds
# make bench   burnish beside its peers, into docs/benchmarks.md; WHAT="train start" for parts, WHAT=all for all
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-slow check format bench clean

demo: $(READY)
	@$(BIN)/burnish demo

test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(DEV)
	$(BIN)/python -m pytest -m "slow or not slow" -n 2 --dist loadfile

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: $(READY)
	$(BIN)/python bench/run.py $(WHAT)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf demo-run build dist .mypy_cache .ruff_cache .pytest_cache

# torch goes first and by its exact version, so that nothing later asks the index for another build of it.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; a minute or two) ..."
	@$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

$(DEV): $(READY)
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@
