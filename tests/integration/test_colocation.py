"""Engines and ranks that take turns on their devices: released memory, refused calls, and whole runs."""

import contextlib
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.schema import Config, ModelConfig
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.sglang.pool import EnginePool
from tests.integration.one_rank import sync_from
from tests.integration.train_runs import STEPS, arguments, metrics

pytestmark = pytest.mark.slow

TOKENS = 4096
MIB = 2**20


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose weights and KV cache (TOKENS tokens) are much larger than the noise in an engine's
    memory.
    """
    from make_tiny_model import make

    folder = tmp_path_factory.mktemp("wide") / "model"
    make(folder, hidden=512, heads=8, kv_heads=8, ffn=2048, positions=TOKENS)
    return str(folder)


@pytest.fixture
def engines(ray_here, wide, tmp_path):
    config = Config()
    config.rollout.engine = EngineConfig(dtype="float32", max_total_tokens=TOKENS, request_timeout=60)
    cluster = allocate(config, num_ranks=0, num_engines=1)
    engines = EnginePool(
        cluster,
        config.rollout,
        ModelConfig(wide),
        0,
        str(tmp_path),
        HangDetector(str(tmp_path), 600),
        shared=True,
    )
    try:
        engines.wait_until_ready()
        engines.admit()
        yield engines
    finally:
        engines.close()
        cluster.close()


def test_an_engine_gives_back_its_memory_and_then_answers_as_before(engines, wide):
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    random = np.random.default_rng(0)
    sequences = [random.integers(7, 30, 1000).tolist() for _ in range(4)]  # fill the KV cache
    before = engines.score_on_all(sequences)[0]
    full = engines.occupied()
    engines.release_memory()
    released = engines.occupied()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    kv_cache = 2 * 4 * 2 * 512 * 4 * 1000  # layers, bytes, keys and values, width, tokens
    print(
        f"occupied {full / MIB:.0f} MiB, released {released / MIB:.0f}, weights "
        f"{weights / MIB:.0f}, KV {kv_cache / MIB:.0f}"
    )
    assert full - released > 0.95 * (weights + kv_cache)
    # Nothing may use what is not there; SGLang's own scheduler would die of it.
    asleep = r"^the engines cannot generate: they have released memory; resume it and sync the weights first$"
    with pytest.raises(UserError, match=asleep):
        engines.score_on_all(sequences)
    with pytest.raises(UserError, match="the engines have released the memory of their weights; call"):
        engines.begin_update()
    engine = engines._engines[0]
    with pytest.raises(RuntimeError, match=r"has released the memory of its weights; call resume_memory"):
        ray.get(engine.begin_update.remote(False))
    engines.release_memory()
    assert engines.occupied() < 1.05 * released
    engines.resume_weights()
    engines.resume_weights()
    with sync_from(wide, model.state_dict(), engines, bucket_bytes=4 * MIB) as sync:
        sync.run()
    without_cache = engines.occupied()
    assert weights * 0.95 < without_cache - released < weights + kv_cache
    with pytest.raises(UserError, match=asleep):
        engines.score_on_all(sequences)
    with pytest.raises(
        RuntimeError, match=r"engine 0 has released the memory of its kv_cache; call resume_memory first"
    ):
        ray.get(engine.score.remote(sequences))
    engines.resume_kv_cache()
    for found, expected in zip(engines.score_on_all(sequences)[0], before, strict=True):
        np.testing.assert_array_equal(found, expected)


def drop_last_step(controller):
    """Give no token of the last step a weight in the loss, so that its optimizer steps are dropped."""
    train = controller.trainer.train

    def without_weights(step, mini_batches, coefficients, loss, phases):
        if step == STEPS:
            coefficients = [
                replace(own, weights=replace(own.weights, weight=0 * own.weights.weight), trains=False)
                for own in coefficients
            ]
        return train(step, mini_batches, coefficients, loss, phases)

    controller.trainer.train = without_weights


@pytest.fixture(scope="module")
def run(ray_here, arithmetic, tmp_path_factory):
    """A controller after its run, the parts of the run, the run's folder, and its output."""
    root = tmp_path_factory.mktemp("runs")
    changes = (
        "run.name=turns",
        "cluster.placement=colocated",
        "megatron.sleep=true",
        "megatron.data_parallel=2",
        "checkpoint.every=1",
        "checkpoint.keep=3",
        "weight_sync.probe_every=1",
        f"rollout.record={root}/rollouts",
        f"data.eval={arithmetic}/data/eval.jsonl",
        "eval.n=1",
        "ref.reset_every=1",
    )
    config = load_config(None, arguments(arithmetic, root, *changes))
    printed = io.StringIO()
    with assembled_loop(config) as (controller, parts):
        drop_last_step(controller)
        with contextlib.redirect_stdout(printed):
            parts.finish(controller.run())
        yield controller, parts, root, printed.getvalue()


def test_every_step_is_one_round_in_the_documented_order(run):
    _, _, root, printed = run
    rows = metrics(root, "turns")
    to_ranks, to_engines = ["release", "wake"], ["resume_weights", "sync", "sleep", "resume_kv_cache"]
    step = ["generate", *to_ranks, "prepare", "logprobs", "train"]
    order = [[name.removeprefix("time/") for name in row if name.startswith("time/")] for row in rows]
    order = [[name for name in names if name in (*step, *to_engines)] for names in order]
    # The ranks had the turn for a checkpoint before the second and the third step. After the third, nothing
    # had changed.
    assert order == [[*step, *to_engines], [*to_engines, *step], [*to_engines, *step]]
    assert re.findall(
        r"^memory after (\w+): [\d.]+ GiB in the fullest engine, [\d.]+ GiB in the fullest rank$",
        printed,
        re.M,
    ) == [*to_engines]


def test_memory_goes_back_and_forth(run):
    _, _, root, _ = run
    for row in metrics(root, "turns"):
        engine, rank = (
            {
                name.removeprefix("memory/after_").removesuffix(f"/{side}_gib"): value
                for name, value in row.items()
                if name.startswith("memory/after_") and name.endswith(f"/{side}_gib")
            }
            for side in ("engine", "rank")
        )
        assert (
            list(engine)
            == list(rank)
            == ["release", "wake", "resume_weights", "sync", "sleep", "resume_kv_cache"]
        )
        # What an engine of this size releases is lost in the noise of its memory. The test with `wide` shows
        # it.
        assert min(engine.values()) > 0
        assert rank["sleep"] < rank["sync"]
        assert 0 < row["memory/rank_asleep_gib"] < row["memory/rank_awake_gib"]


def test_engines_serve_the_newest_weights_whoever_had_the_turn_in_between(run):
    controller, _, root, _ = run
    rows = metrics(root, "turns")
    assert [row["actor/dropped_steps"] for row in rows] == [0, 0, 2]
    assert all(0 < row["mismatch/max"] <= 1e-4 for row in rows)
    assert all(0 <= row["sync/probe_mean"] <= row["sync/probe_limit"] for row in rows)
    replay = Replay(f"{root}/rollouts")
    samples = [[s for group in replay.read(step) for s in group.samples] for step in replay.steps]
    assert [{span.version for s in of_step for span in s.weight_spans} for of_step in samples] == [
        {1},
        {2},
        {3},
    ]
    assert (
        controller.rollouts.handover.weight_sync.version == 3
    )  # one before the first step, and one after each that was not dropped
    assert {path.name for path in (root / "turns" / "checkpoints").iterdir()} == {
        f"step_{n:08d}" for n in (1, 2, 3)
    }


def test_calls_while_the_other_side_has_the_devices_are_refused(run):
    controller, parts, _, _ = run
    sequences = [[7, 8, 9]]
    assert parts.sharing.ranks_have_devices  # the export was the last to need the ranks

    def sync():
        controller.rollouts.handover.weight_sync.run()
        with pytest.raises(UserError, match=r"^the engines cannot generate: they have released memory"):
            parts.engines.score_on_all(sequences)

    parts.sharing.to_engines(sync)
    with pytest.raises(
        RuntimeError,
        match=r"^the trainer's ranks sleep while the rollout engines use the devices that both share; put",
    ):
        parts.trainer.reset_reference()
    controller.rollouts.weights_changed()  # takes turns by itself
    assert not parts.sharing.ranks_have_devices
    assert len(parts.engines.score_on_all(sequences)[0][0]) == 2
    parts.to_ranks()
    with pytest.raises(UserError, match=r"^the engines cannot generate: they have released memory"):
        controller.rollouts.source.take(4)
