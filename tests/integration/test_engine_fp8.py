"""Real FP8 engines behind real trainer ranks: their parameters, their results, and the mismatch to the
trainer.
"""

import asyncio
import json
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import ray
import torch

from grpo_megatron.cli import main
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.controller import Controller
from grpo_megatron.errors import UserError
from grpo_megatron.model.block_scaled import scales
from grpo_megatron.model.engine_entries import engine_entries, engine_shapes
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from grpo_megatron.preflight.check import load_config
from grpo_megatron.sglang import actors
from grpo_megatron.sglang.arguments import engine_environment
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.sglang.weight_receiver import KV_SCALES, as_named_tensors
from grpo_megatron.weights.fp8_blocks import quantise
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.integration.train_runs import arguments, metrics
from tests.models import tiny_model
from tests.ranks import rank_pool

LOOK, SWAP = (f"tests.integration.engine_loaders.{name}" for name in ("parameters", "swap_halves"))
FP8_ENGINE = ("rollout.engine.dtype=bfloat16", "rollout.engine.quantization=fp8")
FP8_TRAINER = (
    "megatron.precision=fp8",
    "megatron.fp8.recipe=blockwise",
    "megatron.emulate_kernels=true",
    "train.max_tokens_per_micro_batch=256",
)


@pytest.fixture(scope="module")
def blocks(arithmetic, tmp_path_factory):
    """The same as `arithmetic`, with another model.

    Its matrices consist of whole blocks on one rank and on two, and its layers have an effect on log-probs.
    """
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


@pytest.fixture(scope="module")
def experts(arithmetic, tmp_path_factory):
    """A function that makes the same for a family with four experts.

    Each expert's weights are twice those of the expert before it.
    """
    from make_tiny_model import make_tokenizer
    from transformers import AutoModelForCausalLM

    def make(family):
        root, tokenizer = tmp_path_factory.mktemp(family), make_tokenizer()
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
        widths = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
        changes = {"num_hidden_layers": 2, "mlp_only_layers": [], "initializer_range": 0.05}
        tiny_model(root / "model", family, vocab_size=len(tokenizer), **heads, **widths, **changes)
        model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [experts, out, in]
                parameter.data.mul_(torch.tensor([0.25, 0.5, 1.0, 2.0])[:, None, None])
            parameter.data.copy_(parameter.bfloat16())  # so that a trainer in bf16 has the same
        model.save_pretrained(root / "model")
        tokenizer.save_pretrained(root / "model")
        (root / "data").symlink_to(arithmetic / "data")
        return root

    return make


@contextmanager
def loop(root, run_root, *changes):
    with assembled_loop(
        load_config(None, [*arguments(root, run_root, *FP8_ENGINE, *changes), "run.name=fp8"])
    ) as pair:
        yield pair


@dataclass(frozen=True)
class Synced:
    """One engine after its first weight sync."""

    model: str
    """Folder of the model."""
    layout: EngineLayout
    """The engine's layout."""
    controller: Controller
    """The run's controller."""
    engines: EnginePool
    """The pool with the engine."""
    probe: dict[str, float]
    """Scalars of the weight probe."""


TP2 = "megatron.tensor_parallel=2", "megatron.sequence_parallel=true", "rollout.engine.tensor_parallel=2"
EP2 = (
    "megatron.data_parallel=2",
    "megatron.expert_parallel=2",
    "rollout.engine.tensor_parallel=2",
    "rollout.engine.expert_parallel=2",
)
# Families whose KV cache has scales in an engine in FP8, in both pinned releases of SGLang.
SCALED_CACHES = {"llama", "mixtral", "qwen2"}
CASES = {
    "dense": (None,),
    "qwen3_moe": ("qwen3_moe",),
    "dense_tp2": (None, *TP2),
    "qwen3_moe_tp2": ("qwen3_moe", *TP2),
    # Routing follows FP8's rounding, so that the trainer has to round alike, with TransformerEngine's grouped
    # experts.
    "mixtral": ("mixtral", *FP8_TRAINER),
    "glm4_moe_ep2": ("glm4_moe", *EP2),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in CASES.items()],
)
def synced(ray_here, blocks, experts, request, tmp_path_factory):
    """An engine after its first weight sync, whose parameters the tests can read."""
    family, *layouts = request.param
    root, made = experts(family) if family else blocks, actors.engine_arguments

    def with_loaders(*args):
        found = made(*args)
        return found | {"custom_weight_loader": [*found["custom_weight_loader"], LOOK, SWAP]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors, "engine_arguments", with_loaders)
        with loop(root, tmp_path_factory.mktemp("runs"), *layouts) as (controller, run):
            controller.rollouts.start()
            probe = controller.rollouts.handover.weight_sync.metrics
            layout = EngineLayout.from_config(run.config.rollout.engine)
            yield Synced(str(root / "model"), layout, controller, run.engines, probe)


def call(engines, loader, argument, tp):
    """Have each rank of the only engine run a function of engine_loaders.py within a session."""

    def ask(actor, payload):  # in a thread of its own
        async def look():
            await actor._control.begin_weight_update()
            answer = await actor._control.call_loader(payload, tp, loader)
            await actor._control.end_weight_update()
            return answer

        return asyncio.run_coroutine_threadsafe(look(), actor._control._manager.event_loop).result(timeout=60)

    (engine,) = engines._engines
    success, message = ray.get(engine.__ray_call__.remote(ask, as_named_tensors(argument)))
    assert success, message


def held(engines, path, tp):
    """Return the parameters of each rank: [{name: parameter}]."""
    call(engines, LOOK, str(path), tp)
    return [torch.load(f"{path}.{rank}") for rank in range(tp)]


def check(model, layout, rank, own):
    """Compare a rank's parameters with the checkpoint, whose matrices are quantised as wholes."""
    entries = engine_entries(weight_map(read_architecture(model)).values(), layout)
    of_cache = {name: value for name, value in own.items() if name.rpartition(".")[2] in KV_SCALES}
    # SGLang gives scales to the KV cache of some families.
    assert bool(of_cache) == (read_architecture(model).family in SCALED_CACHES)
    assert all(torch.equal(scale, torch.ones(())) for scale in of_cache.values())
    of_model = {name: tuple(value.shape) for name, value in own.items() if name not in of_cache}
    assert of_model == engine_shapes(entries, layout)
    checkpoint = HFCheckpoint(model)
    for entry in entries:
        for piece in entry.engine_pieces(layout, rank):
            found = piece.of(own[entry.engine])
            if entry.engine_dtype is None:
                whole = checkpoint.read(piece.hf).to(found.dtype)  # float32 for some routers
            else:
                whole = quantise(checkpoint.read(piece.hf.removesuffix("_scale_inv")))[
                    entry.engine_dtype == torch.float32
                ]
            wanted = whole[box(piece.start, piece.shape)]
            assert found.dtype == wanted.dtype
            assert torch.equal(found.float(), wanted.float()), piece


def test_an_engine_holds_the_quantised_checkpoint(synced, tmp_path):
    for rank, own in enumerate(held(synced.engines, tmp_path / "held", synced.layout.tp)):
        check(synced.model, synced.layout, rank, own)
    print(json.dumps(synced.probe))
    assert 0.02 < synced.probe["sync/probe_mean"] < 0.5 * synced.probe["sync/probe_limit"]


def test_it_serves(synced):
    assert synced.controller.run()["tokens"] > 0


def test_the_probe_sees_a_layer_that_computes_something_else(synced):
    """The planted fault swaps the halves of output projections' rows, or of the experts' scales.

    No weight changes its value.
    """
    entries = weight_map(read_architecture(synced.model)).values()
    matrices = {entry for entry in entries if entry.expert} or {
        entry for entry in entries if "linear_proj" in entry.megatron
    }
    swapped = {scales(entry).engine for entry in matrices} | {
        entry.engine for entry in matrices if not entry.expert
    }
    synced.controller.rollouts.weights_changed()
    call(synced.engines, SWAP, sorted(swapped), synced.layout.tp)
    probe = synced.controller.rollouts.handover.weight_sync._probe
    probe.ask_trainer()
    with pytest.raises(RuntimeError, match="log-probs that differ from the trainer's") as raised:
        probe.ask_engines()
    print(raised.value)


@pytest.mark.slow
def test_an_engine_that_is_not_in_fp8_is_refused(ray_here, blocks, tmp_path, monkeypatch):
    made = actors.engine_arguments
    monkeypatch.setattr(
        actors, "engine_arguments", lambda *args: made(*args) | {"json_model_override_args": "{}"}
    )
    with (
        loop(blocks, tmp_path) as (controller, _),
        pytest.raises(UserError, match=r"in torch\.bfloat16 instead of torch\.float8_e4m3fn"),
    ):
        controller.rollouts.start()


def of_trainer(x, weight):
    """Return the result of TransformerEngine's blockwise layer, bfloat16 [tokens, out]."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    layer = te.Linear(weight.shape[1], len(weight), bias=False, params_dtype=torch.bfloat16, device="cpu")
    layer.weight.data.copy_(weight)
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        return layer(x)


@ray.remote
def of_engine(x, weight):
    """Return the result of SGLang's layer."""
    import sglang.srt.model_executor.model_runner  # noqa: F401 - as in the engine: selects the platform
    from sglang.srt.layers.quantization import fp8_utils

    from grpo_megatron.sglang.without_gpu import fp8_layers

    fp8_layers.register()
    layer = fp8_utils.dispatch_w8a8_block_fp8_linear([128, 128], act_scale_ue8m0=True)
    values, scales = quantise(weight)
    return layer(x, values, [128, 128], scales)


@pytest.mark.slow
def test_a_layer_is_the_same_in_trainer_and_engine(ray_here):
    torch.manual_seed(0)
    x = (torch.randn(48, 384) * torch.logspace(-3, 3, 48)[:, None]).bfloat16()
    weight = torch.randn(256, 384).bfloat16()
    with rank_pool(emulate_kernels=True) as pool:
        (ours,) = pool.run(of_trainer, ParallelSizes(), x, weight)
    environment = engine_environment(EngineConfig(), gpu=False)
    theirs = ray.get(of_engine.options(num_cpus=0, runtime_env={"env_vars": environment}).remote(x, weight))
    exact = x.double() @ weight.double().t()
    rounding = (theirs - exact).abs().mean() / exact.abs().mean()
    assert 0.01 < rounding < 0.1
    # But for the order of sums in float32, which may be rounded to another bfloat16 number.
    np.testing.assert_allclose(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)
    assert (ours == theirs).float().mean() > 0.999


@ray.remote
def experts_of_engine(x, gate_up, down, weights, chosen):
    """Return the result of SGLang's experts, [tokens, h].

    gate_up, down: matrices [experts, out, in].
    chosen: each token's experts, [tokens, 2].
    """
    import sglang.srt.model_executor.model_runner  # noqa: F401 - as in the engine: selects the platform
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo, fused_experts_none_to_triton
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from grpo_megatron.sglang.without_gpu import fp8_layers

    fp8_layers.register()
    stacks = [
        [torch.stack(of) for of in zip(*map(quantise, matrices), strict=True)] for matrices in (gate_up, down)
    ]
    (w13_weight, w13_scale), (w2_weight, w2_scale) = stacks
    held = TritonMoeQuantInfo(
        w13_weight,
        w2_weight,
        use_fp8_w8a8=True,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        block_shape=[128, 128],
    )
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, chosen, None))
    return fused_experts_none_to_triton(dispatched, held, MoeRunnerConfig(activation="silu")).hidden_states


def as_fp8(values):
    """Return the values in float64 with the rounding of SGLang's kernel for experts.

    Each 128 elements of a row have one scale, the largest of them over 448.
    """
    groups = values.double().view(len(values), -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).view(values.shape)


def block_values(matrix):
    elements, scales = quantise(matrix)
    return elements.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.slow
def test_experts_are_as_they_are_defined(ray_here):
    """The expected values are computed token by token in float64, with the intended roundings.

    One of the last token's experts belongs to another rank.
    """
    torch.manual_seed(1)
    x = (torch.randn(24, 256) * torch.logspace(-2, 2, 24)[:, None]).bfloat16()
    gate_up, down = (torch.randn(3, *shape).bfloat16() / 16 for shape in ((256, 256), (256, 128)))
    weights = torch.rand(24, 2)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(24)]).int()
    chosen[-1, 0] = -1
    environment = engine_environment(EngineConfig(), gpu=False)
    task = experts_of_engine.options(num_cpus=0, runtime_env={"env_vars": environment})
    found = ray.get(task.remote(x, gate_up, down, weights, chosen))
    expected, exact = torch.zeros(2, 24, 256, dtype=torch.float64)
    for token in range(24):
        row = x[token : token + 1]
        for weight, number in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            if number < 0:
                continue
            gate, up = (as_fp8(row) @ block_values(gate_up[number]).t()).bfloat16().double().chunk(2, -1)
            inner = (torch.nn.functional.silu(gate) * up).bfloat16()
            expected[token] += weight * (as_fp8(inner) @ block_values(down[number]).t())[0]
            gate, up = (row.double() @ gate_up[number].double().t()).chunk(2, -1)
            exact[token] += weight * ((torch.nn.functional.silu(gate) * up) @ down[number].double().t())[0]
    scale = exact.abs().mean(1, keepdim=True)
    assert 0.01 < ((found - exact).abs() / scale).mean() < 0.1
    # The remaining difference is rounding to bfloat16, which moves an FP8 element here and there by one step.
    assert ((found - expected).abs() / scale).mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, "qwen3_moe"])
def test_mismatch_of_fp8_and_bf16_engines_with_an_fp8_trainer(ray_here, blocks, experts, tmp_path, family):
    """An FP8 engine is nearer to an FP8 trainer than a bf16 engine is, in each step.

    Both differences grow as the large first gradients move the weights.
    """
    root = experts(family) if family else blocks
    means = {}
    for quantization in ("none", "fp8"):
        changes = *FP8_TRAINER, f"rollout.engine.quantization={quantization}", f"run.name={quantization}"
        assert main(["train", *arguments(root, tmp_path, *FP8_ENGINE, *changes)]) == 0
        means[quantization] = [row["mismatch/mean"] for row in metrics(tmp_path, quantization)]
    print(json.dumps(means))
    assert len(means["none"]) == len(means["fp8"]) == 3
    assert all(fp8 < 0.8 * bf16 for fp8, bf16 in zip(means["fp8"], means["none"], strict=True))
