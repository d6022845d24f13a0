# Everything is installed into .venv in this folder; a second call reuses it.
# The pinned CPU stack exists for Python 3.11 (SGLang wants at least that, torchvision 0.16 at most).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# For pip, such as --extra-index-url of an index with CPU builds of torch.
PIP_FLAGS ?=
PIP = $(BIN)/python -m pip install -q $(PIP_FLAGS)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := $(wildcard requirements/*.txt) setup.py Makefile

# Where it is set, every one of the many processes would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test test-all lint bench clean

install: $(STAMP)

$(STAMP): $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "Python 3.11 is needed, $(PYTHON) is another; call make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first: anything that asks for another build of it would pull gigabytes.
	$(PIP) torch==2.13.0
	$(PIP) -r requirements/cpu.txt -r requirements/test.txt
	$(PIP) --no-deps -r requirements/cpu-no-deps.txt
	$(PIP) --no-deps --no-build-isolation -e .
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
	$(BIN)/lint-imports --no-cache

bench: install
	for file in schedule logprob train_step memory loop learning; do $(BIN)/python benchmarks/$$file.py || exit 1; done

clean:
	rm -rf runs .pytest_cache .ruff_cache
