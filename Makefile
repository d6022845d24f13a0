# Everything is installed into .venv in this folder; a second call reuses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := $(wildcard requirements/*.txt) setup.py Makefile

.PHONY: install quickstart test test-all lint bench clean

install: $(STAMP)

$(STAMP): $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else f"Python 3.10 to 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}; call make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first: anything that asks for another build of it would pull gigabytes.
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -r requirements/cpu.txt -r requirements/test.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements/cpu-no-deps.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

quickstart: install
	$(BIN)/python tools/quickstart.py

test: install lint
	$(BIN)/python -m pytest

test-all: install lint
	$(BIN)/python -m pytest -m "slow or not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: install
	$(BIN)/python benchmarks/train_step.py

clean:
	rm -rf runs .pytest_cache .ruff_cache
