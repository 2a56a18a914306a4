# Every target sets up .venv by itself: .venv/.ready holds what Kilter needs to run, .venv/.ready-demo
# adds what the demo needs, .venv/.ready-dev what tests, lint and benchmarks need. All are made again when
# pyproject.toml or constraints.txt change; when nothing changed they cost nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready-demo
	@$(BIN)/python examples/demo.py

# Two files at a time: where ranks wait for each other, cores would be idle.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

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

$(VENV)/.ready-demo: $(VENV)/.ready
	@echo "Adding what the demo needs to $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "Adding the tools for tests to $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[structured,data,tensorboard,rl,ray,dev]'
	@touch $@
