"""Everything that this package needs of SGLang, against the Python code of the CPU and the GPU stack's
release.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.config.engine import EngineConfig, KVCacheDtype, Quantization
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.rollout.groups import sampling_parameters
from grpo_megatron.sglang.arguments import engine_arguments, node_arguments
from tests.tools import unpacked

pytestmark = pytest.mark.slow

COMMON = [
    "abort_request",
    "async_generate",
    "continue_generation",
    "flush_cache",
    "freeze_gc",
    "load_lora_adapter_from_tensors",
    "pause_generation",
    "release_memory_occupation",
    "resume_memory_occupation",
    "shutdown",
    "update_weights_from_tensor",
]
NEWER = ["begin_weight_update", "end_weight_update", "update_weight_version"]


def asked_of(release: Path | None, model: str, **changes) -> dict:
    """Return the output of tests/integration/sglang_release.py.

    release: an unpacked wheel; None: the installed release.
    changes: changes to the arguments.
    """
    everything = EngineConfig(
        tensor_parallel=16,
        expert_parallel=8,
        data_parallel_attention=4,
        kv_cache_dtype=KVCacheDtype.fp8_e4m3,
        max_total_tokens=4096,
    )
    other = EngineConfig(kv_cache_dtype=KVCacheDtype.fp8_e5m2, quantization=Quantization.fp8)
    arguments = [
        engine_arguments(
            everything, ModelConfig(model, fp32_head=True), 1, needs_tokenizer=False, gpu=True, routing=True
        )
        | node_arguments(1, 2, "10.0.0.1:20000")
        | changes,
        engine_arguments(
            other,
            ModelConfig(model),
            1,
            needs_tokenizer=True,
            gpu=True,
            routing=False,
            lora=LoraConfig(rank=4),
        ),
    ]
    if release is None:
        arguments.append(
            engine_arguments(
                EngineConfig(), ModelConfig(model), 1, needs_tokenizer=False, gpu=False, routing=True
            )
            | {"attention_backend": "torch_native"}  # the platform registers its own
        )
    sampling = sampling_parameters(RolloutConfig(stop=["x"], stop_token_ids=[3]))
    path = [str(folder) for folder in (release, Path.cwd()) if folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/integration/sglang_release.py"],
        input=json.dumps({"arguments": arguments, "sampling": sampling | {"max_new_tokens": 8}}),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# In `make test`, engines run with it.
def test_the_release_of_the_cpu_stack(arithmetic):
    found = asked_of(None, str(arithmetic / "model"))
    assert found["problems"] == []
    assert found["calls"] == sorted(COMMON + NEWER)
    assert found["knows_spans"]


def test_the_release_of_the_gpu_stack(arithmetic):
    release = unpacked("sglang==0.5.17")
    found = asked_of(release, str(arithmetic / "model"))
    assert found["version"].startswith(str(release))
    assert found["problems"] == []
    assert found["calls"] == sorted([*COMMON, "_update_weight_version_if_provided"])
    assert not found["knows_spans"]


def test_what_a_release_does_not_have_is_found(arithmetic):
    changes = {"attn_dp_size": 2, "kv_cache_dtype": "fp8", "ep_size": "eight"}
    problems = asked_of(unpacked("sglang==0.5.17"), str(arithmetic / "model"), **changes)["problems"]
    assert [problem.split(":")[0].split(" [")[0] for problem in problems] == [
        "ep_size='eight'",
        "kv_cache_dtype='fp8' is not among",
        "no argument attn_dp_size",
    ]
