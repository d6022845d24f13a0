# The GPU stack as a container: docker build -t grpo-megatron .
# README.md says how Apptainer, or Slurm with enroot and pyxis, take it.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# ibverbs and rdmacm: NCCL over InfiniBand. numa: SGLang's kernels.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ibverbs-providers iproute2 libibverbs1 libnuma1 librdmacm1t64 \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/grpo_megatron
# What the environment follows from, and an empty package to install: a change of the code compiles nothing anew.
COPY Makefile setup.py README.md ./
COPY requirements requirements
RUN mkdir grpo_megatron && touch grpo_megatron/__init__.py \
    && PIP_NO_CACHE_DIR=1 make install-gpu PYTHON=python3.12 CUDA_HOME=/usr/local/cuda
COPY . .
ENV PATH=/opt/grpo_megatron/.venv/bin:$PATH
CMD ["grpo-megatron", "doctor"]
