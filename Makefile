# Every target sets up .venv by itself: .venv/.ready holds what Kilter needs to run,
# .venv/.ready-dev adds what tests, lint and benchmarks need. Both are made again when
# pyproject.toml or constraints.txt change; when nothing changed they cost nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready
	@echo "$$ kilter pull smollm2-135m"
	@$(BIN)/kilter pull smollm2-135m
	@echo '$$ kilter chat smollm2-135m -p "What is the capital of France?"'
	@$(BIN)/kilter chat smollm2-135m -p "What is the capital of France?"

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.ready-dev
	$(BIN)/python -m bench.foundation

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# torch goes in first and alone, held by the constraint: were it chosen together with packages
# that ask for a newer one, pip could settle on another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (torch and a few small packages; a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Kilter needs Python 3.11 or newer; this is %s. Run make PYTHON=python3.11, say." % sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "Adding the tools for tests to $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[structured,data,tensorboard,rl,ray,dev]'
	@touch $@
