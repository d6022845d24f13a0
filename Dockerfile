# The GPU stack as a container: docker build -t grpo-megatron .
# docs/slurm.md says how Apptainer, or Slurm with Pyxis and Enroot, take it; apptainer.def builds the same without Docker.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

WORKDIR /opt/grpo_megatron
COPY requirements requirements
RUN apt-get update \
    && grep -v '^#' requirements/gpu-system.txt | DEBIAN_FRONTEND=noninteractive xargs apt-get install -y --no-install-recommends \
    && rm -rf /var/lib/apt/lists/*
# What the environment follows from, and an empty package to install: a change of the code compiles nothing anew.
COPY Makefile setup.py README.md ./
RUN mkdir grpo_megatron && touch grpo_megatron/__init__.py \
    && PIP_NO_CACHE_DIR=1 make install-gpu PYTHON=python3.12 CUDA_HOME=/usr/local/cuda
COPY . .
ENV PATH=/opt/grpo_megatron/.venv/bin:$PATH
CMD ["grpo-megatron", "doctor"]
