# Everything is installed into .venv in this folder; a second call reuses it.
# The first that runs and is new enough for SGLang: a version manager's stand-in may exist for a Python that it lacks.
RIGHT_PYTHON = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(RIGHT_PYTHON)' 2>/dev/null && echo $$p && break; done)
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
	@$(or $(PYTHON),false) -c '$(RIGHT_PYTHON)' || { echo "Python 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# In one call, so that nothing can exchange torch for a build that another package asks for.
	$(PIP) -r requirements/cpu.txt -r requirements/test.txt
	$(PIP) --no-deps -r requirements/cpu-no-deps.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -W ignore -c 'import torchvision' || { echo "torch and torchvision do not fit: install both from one index (PIP_FLAGS)" >&2; exit 1; }
	# Beside the environment, not in it; nothing but some tests needs them.
	$(BIN)/python tools/unpack_wheels.py requirements/unpacked.txt $(VENV)/unpacked -- $(PIP_FLAGS)
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
	for file in schedule logprob train_step memory exchange checkpoint loop learning convert reshard; do $(BIN)/python benchmarks/$$file.py || exit 1; done

clean:
	rm -rf runs .pytest_cache .ruff_cache
