from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="grpo-megatron",
    version="0.1.0",
    description=(
        "GRPO post-training: Megatron-core trains, SGLang generates, Ray places; "
        "on GPU clusters and on a laptop CPU."
    ),
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["grpo_megatron", "grpo_megatron.*"]),
    package_data={"grpo_megatron": ["presets/*.yaml", "monitoring/report/templates/*", "importers/*.sh"]},
    # The versions of torch and SGLang differ between CPU and GPU machines and are pinned in
    # requirements/; here is only what every machine needs.
    install_requires=[
        "megatron-core>=0.16.1,!=0.17.*,!=0.18.*,<0.20",  # the tested ones: 0.16.1, and 0.19.2 of STACK=next
        "filelock>=4.0",  # lock of a run's folder
        "omegaconf>=2.3",
        "jinja2>=3.1",  # grpo-megatron report
        "ray>=2.40",
        "renderers==0.1.12",  # formats of turns and tool calls; we use what it does not promise to keep
        "ruamel.yaml>=0.18",
        "tensorboard>=2.16",
        "transformers>=5.0",
        "safetensors>=0.5",
        "gguf>=0.17",  # tools/convert_gguf_to_hf.py
        "math-verify>=0.8",
        "numpy",
        "protobuf>=5",  # grpo-megatron serve
        "pydantic>=2.11",
        "psutil",  # megatron-core imports it without declaring it
        "tqdm",
        "xxhash",  # digests of checkpoints
        "zstandard",  # weight_sync.delta
    ],
    extras_require={
        "data": ["pyarrow", "datasets"],
        "gymnasium": ["gymnasium>=1.0"],  # rollout.environment=gymnasium
        "mcp": ["mcp>=2.0"],  # rollout.tools=[mcp:...]
        "plot": ["matplotlib"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-instafail",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "pyarrow",
            "datasets",
        ],
    },
    entry_points={
        "console_scripts": ["grpo-megatron = grpo_megatron.cli:main"],
        # SGLang looks here for platforms it does not ship; selected by SGLANG_PLATFORM=grpo_cpu.
        "sglang.srt.platforms": ["grpo_cpu = grpo_megatron.sglang.without_gpu.platform:activate"],
    },
)
