"""The engine's side of every weight map, against the parameters of a real SGLang engine."""

import contextlib
import json
import os
from pathlib import Path

import pytest
import ray
import torch

from grpo_megatron.cluster.processes import redirect_output
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.model.engine_entries import engine_entries, engine_shapes
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.preflight.engine_model import ATTENTION_GROUPS
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment
from tests.models import ALL_FAMILIES, FAMILIES, HYBRIDS, SERVED, tiny_model

LOADER = "tests.integration.engine_loaders.describe"


@ray.remote(num_cpus=0)
class Engine:
    """An engine that loads one model after the other, so that each layout starts an engine only once."""

    def __init__(self, arguments, log):
        redirect_output(log)
        import sglang

        self._engine = sglang.Engine(**{**arguments, "custom_weight_loader": [LOADER]})

    async def describe(self, model, path, tp):
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self._engine.tokenizer_manager
        await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None)
        request = json.dumps({"model": model, "path": path}).encode()
        tensor = torch.tensor(list(request), dtype=torch.uint8)
        payloads = [MultiprocessingSerializer.serialize([("request", tensor)]) for _ in range(tp)]
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False
        )
        answer = await manager.update_weights_from_tensor(request, None)
        await manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None)
        return answer

    def shutdown(self):
        self._engine.shutdown()


def model_of(folder, family, tied, layout):
    # On a CPU, SGLang pads MLPs whose width on a rank is no multiple of 32, and KV heads if there are fewer
    # than ranks.
    changes = {"intermediate_size": 128}
    if "moe_intermediate_size" in ALL_FAMILIES[family][1]:
        changes |= {"moe_intermediate_size": 32 * max(2, layout.tp)}
    if "shared_expert_intermediate_size" in ALL_FAMILIES[family][1]:
        changes |= {"shared_expert_intermediate_size": 64}
    if layout.tp == 4:
        changes |= {"num_key_value_heads": 4}
    if family == "qwen3_moe":  # in SGLang it has experts in every layer
        changes |= {"mlp_only_layers": []}
    changes |= SERVED.get(family, {})
    if family == "mixtral":  # in SGLang its heads divide the hidden size
        changes |= {"head_dim": None}
    model = tiny_model(folder, family, tied, **changes)
    if family in HYBRIDS:  # an engine that starts with such a model gets this from engine_arguments
        path, every = Path(model, "config.json"), read_architecture(model).delta.attention_interval
        path.write_text(json.dumps(json.loads(path.read_text()) | {"full_attention_interval": every}))
    return model


EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "minimax_m2")
LAYOUTS = {
    "one": EngineLayout(),
    "tp2": EngineLayout(2),
    "sinks": EngineLayout(2),
    "ep2": EngineLayout(2, ep=2),
    "dp2": EngineLayout(2, attention_dp=2),
    "tp4": EngineLayout(4, ep=2, attention_dp=2),
}
STARTED_WITH = {
    "one": "qwen3_moe",
    "tp2": "llama3",
    "sinks": "gpt_oss",  # its engine has another attention backend
    "ep2": "mixtral",
    "dp2": "deepseek_v3",
    "tp4": "glm4_moe",
}
# SGLang's models with experts do not tie embeddings: preflight/model.py refuses them.
CASES = [("one", "qwen3_moe", False), ("one", "qwen3", True)]
CASES += [("tp2", family, False) for family in FAMILIES | HYBRIDS]
CASES += [("tp2", "gemma3", True), ("sinks", "gpt_oss", False)]
CASES += [("ep2", family, False) for family in EXPERTS]
CASES += [("dp2", family, False) for family in ATTENTION_GROUPS]
CASES += [("tp4", "glm4_moe", False)]


@pytest.fixture(scope="module")
def engine_of(ray_here, tmp_path_factory):
    """Function that returns an engine in a layout, and the file with its output.

    The engine stays until another layout is asked for. A parametrized fixture would start one for each case.
    """
    current = {}

    def stop():
        for actor, _ in current.values():
            with contextlib.suppress(ray.exceptions.RayActorError):
                ray.get(actor.shutdown.remote(), timeout=30)
            ray.kill(actor)
        current.clear()

    def engine(layout: str):
        if layout not in current:
            stop()
            current[layout] = started(layout, tmp_path_factory.mktemp("engine"))
        return current[layout]

    yield engine
    stop()


def started(layout, folder):
    """Start an engine. Return the actor and the file with its output."""
    sizes = LAYOUTS[layout]
    config = EngineConfig(
        dtype="float32",
        tensor_parallel=sizes.tp,
        expert_parallel=sizes.ep,
        data_parallel_attention=sizes.attention_dp,
        max_total_tokens=1024,
    )
    model = model_of(folder / "model", STARTED_WITH[layout], False, sizes)
    environment = engine_environment(config, gpu=False) | {"PYTHONPATH": os.getcwd()}
    arguments = engine_arguments(
        config, ModelConfig(model), 0, needs_tokenizer=False, gpu=False, routing=False
    )
    actor = Engine.options(runtime_env={"env_vars": environment}).remote(arguments, str(folder / "log"))
    return actor, folder / "log"


# In `make test`, test_engine_fp8.py compares every parameter of an engine.
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "family", "tied"), CASES)
def test_the_plan_names_every_parameter_of_the_engine(engine_of, tmp_path, layout, family, tied):
    actor, log = engine_of(layout)
    sizes = LAYOUTS[layout]
    model = model_of(tmp_path / "model", family, tied, sizes)
    try:
        success, message = ray.get(
            actor.describe.remote(model, str(tmp_path / "shapes"), sizes.tp), timeout=240
        )
    except ray.exceptions.RayActorError:  # what the loader raises ends the engine
        pytest.fail(log.read_text(encoding="utf-8")[-3000:])
    assert success, message
    entries = engine_entries(weight_map(read_architecture(model)).values(), sizes)
    expected = engine_shapes(entries, sizes)
    for rank in range(sizes.tp):
        shapes = json.loads((tmp_path / f"shapes.{rank}").read_text())
        assert {name: tuple(shape) for name, shape in shapes.items()} == expected
