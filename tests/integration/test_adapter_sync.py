"""Adapters that travel alone to real engines, which apply them to their own weights."""

import json
import time

import numpy as np
import psutil
import pytest
import ray
from make_tiny_model import make
from safetensors.torch import load_file, save_file

from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.preflight.check import load_config
from grpo_megatron.sglang import actors
from grpo_megatron.weights.fp8_blocks import quantise, settings
from tests.integration.one_rank import sync_from
from tests.integration.test_engine import running
from tests.integration.train_runs import arguments, metrics
from tests.parallel.test_weights import read_all

pytestmark = pytest.mark.slow

ADAPTER = ("run.name=alone", "megatron.lora.rank=4", "weight_sync.lora=adapter")
SEQUENCES = [[3, 9, 4, 12, 7, 5], [11, 2, 8, 6]]


def loop(arithmetic, root, *changes):
    return assembled_loop(load_config(None, [*arguments(arithmetic, root, *ADAPTER, *changes)]))


def test_adapters_alone_equal_merged_weights(ray_here, arithmetic, tmp_path):
    changes = ["megatron.tensor_parallel=2", "rollout.engine.tensor_parallel=2", "weight_sync.probe_every=1"]
    with loop(arithmetic, tmp_path, *changes) as (controller, run):
        controller.run()
        alone = run.engines.score_on_all(SEQUENCES)[0]
        run.trainer.weights.save_hf(str(tmp_path / "hf"))
    rows = metrics(tmp_path, "alone")
    assert all(0 < row["mismatch/max"] <= 1e-4 for row in rows)
    adapter = load_file(tmp_path / "hf/adapter/adapter_model.safetensors")
    size = sum(tensor.nbytes for tensor in adapter.values())
    assert all(row["sync/sent_gb"] <= 1.05e-9 * size for row in rows)
    before, after = read_all(arithmetic / "model"), read_all(tmp_path / "hf")
    # Without the adapters, log-probs are others.
    assert max(float((before[name] - after[name]).abs().max()) for name in before) > 1e-3
    with (
        running(arithmetic, PromptTokenizer(str(arithmetic / "model")), tmp_path) as (_, engines),
        sync_from(str(arithmetic / "model"), after, engines) as sync,
    ):
        base = engines.score_on_all(SEQUENCES)[0]
        sync.run()
        merged = engines.score_on_all(SEQUENCES)[0]
    for one, same, other in zip(alone, merged, base, strict=True):
        np.testing.assert_allclose(one, same, atol=1e-5)
        assert np.abs(one - other).max() > 1e-3


def another_model(monkeypatch, path):
    """Make engines load another model than the trainer."""
    made = actors.engine_arguments
    monkeypatch.setattr(actors, "engine_arguments", lambda *args: made(*args) | {"model_path": str(path)})


def test_engines_with_another_base_are_noticed(ray_here, arithmetic, tmp_path, monkeypatch):
    make(tmp_path / "other", hidden=64, ffn=128, seed=4)
    another_model(monkeypatch, tmp_path / "other")
    with (
        loop(arithmetic, tmp_path) as (controller, _),
        pytest.raises(
            RuntimeError, match=r"belong to other weights than the engines have: the digests differ"
        ),
    ):
        controller.rollouts.start()


def test_an_engine_that_comes_back_gets_the_adapter(ray_here, arithmetic, tmp_path):
    with loop(arithmetic, tmp_path, "rollout.engine.num_engines=2", "run.total_steps=1") as (controller, run):
        controller.run()
        psutil.Process(ray.get(run.engines._engines[1].ready.remote()).pid).kill()
        controller.rollouts.weights_changed()  # notices it
        assert run.engines.serving == {0: 0}
        deadline = time.monotonic() + 300
        while 1 not in run.engines.membership.in_updates:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        controller.rollouts.weights_changed()
        assert run.engines.serving == {0: 0, 1: 1}
        first, second = run.engines.score_on_all(SEQUENCES).values()
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def in_fp8(folder):
    """Quantise the linear layers of a model, as in published FP8 checkpoints: scales are no powers of two."""
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        elements, scales = quantise(tensors[name])
        tensors |= {name: elements, f"{name}_scale_inv": 1.1 * scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fp8 = {"quantization_config": settings(["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config | fp8))


@pytest.mark.parametrize("case", ["experts", "fp8", "fp8_checkpoint"])
def test_other_engines_serve_adapters(ray_here, arithmetic, experts, tmp_path, case):
    """Adapters of attention layers beside experts, and on weights that only the engine has in FP8."""
    changes = ["weight_sync.probe_every=1", "run.total_steps=2"]
    if case == "experts":
        root, limit = experts, 1e-4
        changes.append("megatron.lora.targets=[q_proj,k_proj,v_proj,o_proj]")
    else:
        root, limit = tmp_path / "blocks", 0.5
        make(root / "model", hidden=256, ffn=512, heads=8, kv_heads=8, seed=3)
        (root / "data").symlink_to(arithmetic / "data")
        changes += [
            "rollout.engine.dtype=bfloat16",
            "rollout.engine.quantization=fp8",
            "mismatch.action=warn",
        ]
    with loop(root, tmp_path, *changes) as (controller, _):
        controller.run()
    rows = metrics(tmp_path, "alone")
    assert all(0 < row["mismatch/max"] <= limit for row in rows)
    assert rows[-1]["sync/probe_mean"] <= rows[-1]["sync/probe_limit"]
