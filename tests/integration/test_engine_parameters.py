"""The engine's side of every weight map, against the parameters of a real SGLang engine."""

import json
import os
from pathlib import Path

import pytest
import ray
import torch

from grpo_megatron.cluster.processes import redirect_output
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.model.entries import EngineLayout, engine_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.preflight.model import ATTENTION_GROUPS
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment
from tests.models import FAMILIES, tiny_model

LOADER = "tests.integration.engine_loaders.describe"


@ray.remote(num_cpus=0)
class Engine:
    def __init__(self, arguments, log):
        redirect_output(log)
        import sglang

        self._engine = sglang.Engine(**{**arguments, "custom_weight_loader": [LOADER]})

    async def describe(self, path, tp):
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self._engine.tokenizer_manager
        await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None)
        tensor = torch.tensor(list(path.encode()), dtype=torch.uint8)
        payloads = [MultiprocessingSerializer.serialize([("path", tensor)]) for _ in range(tp)]
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False
        )
        return await manager.update_weights_from_tensor(request, None)

    def shutdown(self):
        self._engine.shutdown()


def parameters_of_an_engine(model, layout, path):
    """Return {name: shape} of each TP rank, as a list."""
    config = EngineConfig(
        dtype="float32",
        tensor_parallel=layout.tp,
        expert_parallel=layout.ep,
        data_parallel_attention=layout.attention_dp,
        max_total_tokens=1024,
    )
    environment = engine_environment(config, gpu=False) | {"PYTHONPATH": os.getcwd()}
    arguments = engine_arguments(
        config, ModelConfig(model), 0, needs_tokenizer=False, gpu=False, routing=False
    )
    log = f"{path}.log"
    engine = Engine.options(runtime_env={"env_vars": environment}).remote(arguments, log)
    try:
        success, message = ray.get(engine.describe.remote(str(path), layout.tp), timeout=240)
        assert success, message
        ray.get(engine.shutdown.remote(), timeout=30)
    except ray.exceptions.RayActorError:  # what the loader raises ends the engine
        pytest.fail(Path(log).read_text(encoding="utf-8")[-3000:])
    finally:
        ray.kill(engine)
    return [json.loads(path.with_name(f"{path.name}.{rank}").read_text()) for rank in range(layout.tp)]


def planned(model, layout):
    return engine_shapes(weight_map(read_architecture(model)).values(), layout)


EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
# SGLang's models with experts do not tie embeddings: preflight/model.py refuses them.
CASES = [("qwen3_moe", False, EngineLayout()), ("qwen3", True, EngineLayout())]
CASES += [(family, False, EngineLayout(2)) for family in FAMILIES]
CASES += [(family, False, EngineLayout(2, ep=2)) for family in EXPERTS]
CASES += [(family, False, EngineLayout(2, attention_dp=2)) for family in ATTENTION_GROUPS]
CASES += [("glm4_moe", False, EngineLayout(4, ep=2, attention_dp=2))]


# In `make test`, test_engine_fp8.py compares every parameter of an engine.
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied", "layout"), CASES)
def test_the_plan_names_every_parameter_of_the_engine(ray_here, tmp_path, family, tied, layout):
    # On a CPU, SGLang pads MLPs whose width on a rank is no multiple of 32, and KV heads if there are fewer
    # than ranks.
    changes = {"intermediate_size": 128}
    if "moe_intermediate_size" in FAMILIES[family][1]:
        changes |= {"moe_intermediate_size": 32 * max(2, layout.tp)}
    if layout.tp == 4:
        changes |= {"num_key_value_heads": 4}
    if family == "qwen3_moe":  # in SGLang it has experts in every layer
        changes |= {"mlp_only_layers": []}
    if family == "mixtral":  # in SGLang its heads divide the hidden size
        changes |= {"head_dim": None}
    model = tiny_model(tmp_path / "model", family, tied, **changes)
    expected = planned(model, layout)
    for shapes in parameters_of_an_engine(model, layout, tmp_path / "shapes"):
        assert {name: tuple(shape) for name, shape in shapes.items()} == expected
