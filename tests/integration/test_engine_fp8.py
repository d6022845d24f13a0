"""Real engines in FP8 behind real trainer ranks: what they hold, what they compute, how far from the trainer."""

import asyncio
import json
from contextlib import contextmanager

import numpy as np
import pytest
import ray
import torch

from grpo_megatron.cli import main
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.errors import UserError
from grpo_megatron.model.block_scaled import engine_entries
from grpo_megatron.model.entries import EngineLayout, engine_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from grpo_megatron.preflight.load import load_config
from grpo_megatron.sglang import pool
from grpo_megatron.sglang.arguments import engine_environment
from grpo_megatron.sglang.weight_door import by_value
from grpo_megatron.weights.fp8_blocks import quantise
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.integration.test_train import arguments, metrics

LOOK, SWAP = (f"tests.integration.engine_door.{name}" for name in ("parameters", "swap_halves"))
FP8_ENGINE = ("rollout.engine.dtype=bfloat16", "rollout.engine.quantization=fp8")
FP8_TRAINER = (
    "megatron.precision=fp8",
    "megatron.fp8.recipe=blockwise",
    "megatron.emulate_kernels=true",
    "train.max_tokens_per_micro_batch=256",
)


@pytest.fixture(scope="module")
def blocks(arithmetic, tmp_path_factory):
    """As `arithmetic`, with a model whose matrices are of whole blocks on one rank and on two, and whose layers change log-probs."""
    from make_tiny_model import make
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("blocks")
    make(root / "model", hidden=256, ffn=512, heads=8, kv_heads=8, seed=3)
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)
    model.save_pretrained(root / "model")
    (root / "data").symlink_to(arithmetic / "data")
    return root


@contextmanager
def loop(root, run_root, *changes):
    with assembled_loop(load_config(None, [*arguments(root, run_root, *FP8_ENGINE, *changes), "run.name=fp8"])) as pair:
        yield pair


@pytest.fixture
def with_doors(monkeypatch):
    """Engines let the tests look at their parameters."""
    made = pool.engine_arguments

    def arguments_with_doors(*args):
        found = made(*args)
        return found | {"custom_weight_loader": [*found["custom_weight_loader"], LOOK, SWAP]}

    monkeypatch.setattr(pool, "engine_arguments", arguments_with_doors)


def call(engines, door, argument, tp):
    """Have each rank of the only engine run a function of tests.integration.engine_door within a session."""

    def ask(actor, payload):  # in a thread of its own
        async def look():
            await actor._control.begin_weight_update()
            answer = await actor._control.call_loader(payload, tp, door)
            await actor._control.end_weight_update()
            return answer

        return asyncio.run_coroutine_threadsafe(look(), actor._control._manager.event_loop).result(timeout=60)

    (engine,) = engines._engines
    success, message = ray.get(engine.__ray_call__.remote(ask, by_value(argument)))
    assert success, message


def held(engines, path, tp):
    """[{name: parameter} of each rank]"""
    call(engines, LOOK, str(path), tp)
    return [torch.load(f"{path}.{rank}") for rank in range(tp)]


def check(model, layout, rank, own):
    """A rank's parameters against the checkpoint, whose matrices are quantised as wholes."""
    entries = engine_entries(weight_map(read_architecture(model)).values(), layout)
    of_model = {name: tuple(value.shape) for name, value in own.items() if not name.endswith((".k_scale", ".v_scale"))}
    assert of_model == engine_shapes(entries, layout)
    checkpoint = HFCheckpoint(model)
    for entry in entries:
        for piece in entry.engine_pieces(layout, rank):
            if entry.engine_dtype is None:
                whole = checkpoint.read(piece.hf).bfloat16()
            else:
                whole = quantise(checkpoint.read(piece.hf.removesuffix("_scale_inv")))[entry.engine_dtype == torch.float32]
            found, wanted = piece.of(own[entry.engine]), whole[box(piece.start, piece.shape)]
            assert found.dtype == wanted.dtype
            assert torch.equal(found.float(), wanted.float()), piece


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_holds_the_quantised_checkpoint_and_serves(ray_here, blocks, tmp_path, with_doors, tp):
    layouts = f"megatron.tensor_parallel={tp}", f"rollout.engine.tensor_parallel={tp}"
    with loop(blocks, tmp_path, *layouts) as (controller, run):
        controller.sync_weights()
        probe = controller.weight_sync.metrics
        ranks = held(run.engines, tmp_path / "held", tp)
        result = controller.run()
    for rank, own in enumerate(ranks):
        check(str(blocks / "model"), EngineLayout(tp, fp8=True), rank, own)
    assert 0.02 < probe["sync/probe_mean"] < 0.5 * probe["sync/probe_limit"]
    assert result["tokens"] > 0


def test_the_probe_sees_a_layer_that_computes_something_else(ray_here, blocks, tmp_path, with_doors):
    """The fault: half of the first layer's output projection is where the other half should be. No weight has another value."""
    with loop(blocks, tmp_path) as (controller, run):
        controller.sync_weights()
        call(run.engines, SWAP, "model.layers.0.self_attn.o_proj", 1)
        probe = controller.weight_sync._probe
        probe.ask_trainer()
        with pytest.raises(RuntimeError, match="log-probs that differ from the trainer's"):
            probe.ask_engines()


def test_an_engine_that_is_not_in_fp8_is_refused(ray_here, blocks, tmp_path, monkeypatch):
    made = pool.engine_arguments
    monkeypatch.setattr(pool, "engine_arguments", lambda *args: made(*args) | {"json_model_override_args": "{}"})
    with loop(blocks, tmp_path) as (controller, _), pytest.raises(UserError, match="an engine in FP8 takes no others"):
        controller.sync_weights()


def of_trainer(x, weight):
    """bfloat16 [tokens, out] of TransformerEngine's layer, blockwise."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    layer = te.Linear(weight.shape[1], len(weight), bias=False, params_dtype=torch.bfloat16, device="cpu")
    layer.weight.data.copy_(weight)
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        return layer(x)


@ray.remote
def of_engine(x, weight):
    """The same of SGLang's layer."""
    import sglang.srt.model_executor.model_runner  # noqa: F401 - as in the engine: selects the platform
    from sglang.srt.layers.quantization import fp8_utils

    from grpo_megatron.sglang import cpu_fp8

    cpu_fp8.register()
    layer = fp8_utils.dispatch_w8a8_block_fp8_linear([128, 128], act_scale_ue8m0=True)
    values, scales = quantise(weight)
    return layer(x, values, [128, 128], scales)


def test_a_layer_is_the_same_in_trainer_and_engine(ray_here, te_ranks):
    torch.manual_seed(0)
    x = (torch.randn(48, 384) * torch.logspace(-3, 3, 48)[:, None]).bfloat16()
    weight = torch.randn(256, 384).bfloat16()
    (ours,) = te_ranks.run(of_trainer, ParallelSizes(), x, weight)
    environment = engine_environment(EngineConfig(), gpu=False)
    theirs = ray.get(of_engine.options(num_cpus=0, runtime_env={"env_vars": environment}).remote(x, weight))
    exact = x.double() @ weight.double().t()
    rounding = (theirs - exact).abs().mean() / exact.abs().mean()
    assert 0.01 < rounding < 0.1
    # But for the order of sums in float32, which may be rounded to another bfloat16 number.
    np.testing.assert_allclose(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)
    assert (ours == theirs).float().mean() > 0.999


@pytest.mark.slow
def test_mismatch_of_fp8_and_bf16_engines_with_an_fp8_trainer(ray_here, blocks, tmp_path):
    """An FP8 engine is nearer to an FP8 trainer than one in bf16."""
    means = {}
    for quantization in ("none", "fp8"):
        changes = *FP8_TRAINER, f"rollout.engine.quantization={quantization}", f"run.name={quantization}"
        assert main(["train", *arguments(blocks, tmp_path, *FP8_ENGINE, *changes)]) == 0
        means[quantization] = [row["mismatch/mean"] for row in metrics(tmp_path, quantization)]
    print(json.dumps(means))
    assert len(means["none"]) == len(means["fp8"]) == 3
    assert max(means["fp8"]) < 0.8 * min(means["none"])
