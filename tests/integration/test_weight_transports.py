"""Weights from real trainer ranks to real engines over every transport, and faults on the way."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import ray

from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.preflight.check import load_config
from grpo_megatron.weights.sync.sync import WeightSync
from tests.integration.train_runs import arguments


@contextmanager
def loop(arithmetic, root, *changes):
    """Yield (controller, run) with everything started, before the first sync."""
    config = load_config(None, [*arguments(arithmetic, root, *changes), "run.name=sync"])
    with assembled_loop(config) as pair:
        yield pair


def largest_mismatch(controller) -> float:
    """Return the largest mismatch of log-probs after a sync.

    The probe raises beyond 20 times the rounding.
    """
    weight_sync(controller)._syncs = 0
    controller.rollouts.weights_changed()
    return weight_sync(controller).metrics["sync/probe_mean"]


def weight_sync(controller) -> WeightSync:
    return controller.rollouts.handover.weight_sync


def refuses_to_serve(engines):
    for engine in engines._engines:
        with pytest.raises(RuntimeError, match="cannot serve, because its weights have not been compared"):
            ray.get(engine.score.remote([[1, 2, 3]]))


@pytest.mark.slow
def test_shared_memory_from_two_stages_and_back_to_the_weights_before(ray_here, arithmetic, tmp_path):
    with loop(arithmetic, tmp_path, "megatron.pipeline_parallel=2", "weight_sync.delta=true") as (
        controller,
        run,
    ):
        refuses_to_serve(run.engines)  # before its first sync
        assert largest_mismatch(controller) < 1e-5
        full = weight_sync(controller).metrics["sync/sent_gb"]
        assert largest_mismatch(controller) < 1e-5  # nothing has changed
        assert weight_sync(controller).metrics["sync/sent_gb"] < 0.02 * full
        run.trainer.weights.scale(2.0)
        assert largest_mismatch(controller) < 1e-5
        verify(controller, run)
        run.trainer.weights.scale(0.5)  # the engines have other weights now, and that is found
        with pytest.raises(
            RuntimeError,
            match=r"digests differ for model.embed_tokens.weight at rank 0 of engine 0",
        ):
            verify(controller, run)
        refuses_to_serve(run.engines)


def verify(controller, run):
    """Compare the digests, without a transfer, in a session of their own."""
    resharding = weight_sync(controller)._resharding
    run.engines.begin_update()
    resharding.verify(run.trainer.weights, run.engines, weight_sync(controller).version)
    run.engines.end_update(weight_sync(controller).version)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["groups", "disk"])
def test_other_transports_into_two_engines(ray_here, arithmetic, tmp_path, transport):
    changes = [
        f"weight_sync.transport={transport}",
        "rollout.engine.num_engines=2",
        "megatron.tensor_parallel=2",
    ]
    if transport == "disk":
        changes.append(f"weight_sync.folder={tmp_path}/weights")
    with loop(arithmetic, tmp_path, *changes) as (controller, run):
        assert largest_mismatch(controller) < 1e-5
        run.trainer.weights.scale(2.0)
        assert largest_mismatch(controller) < 1e-5
    assert not os.path.exists(f"{tmp_path}/weights/sync")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "groups"])
def test_into_engines_with_two_tensor_parallel_ranks(ray_here, arithmetic, tmp_path, transport):
    changes = [
        f"weight_sync.transport={transport}",
        "rollout.engine.tensor_parallel=2",
        "megatron.tensor_parallel=2",
    ]
    with loop(arithmetic, tmp_path, *changes) as (controller, run):
        assert largest_mismatch(controller) < 1e-5
        run.trainer.weights.scale(2.0)
        assert largest_mismatch(controller) < 1e-5


def one_sync_takes_seconds(controller):
    """Use very small buckets, so that a sync takes seconds. A first sync opens all connections."""
    resharding = weight_sync(controller)._resharding
    resharding._setup = replace(resharding._setup, bucket_bytes=100)


def kill_in_the_next_sync(controller, run, victim):
    """Kill rank 1 of the trainer, or engine 1, in the midst of the next sync."""
    one_sync_takes_seconds(controller)
    controller.rollouts.weights_changed()  # connects everything
    started = time.monotonic()
    controller.rollouts.weights_changed()
    seconds = time.monotonic() - started
    assert seconds > 0.5
    process = {
        "trainer": run.trainer.ranks.group.ranks[1].pid,
        "engine": scheduler_of(run.engines._engines[1]),
    }[victim]
    threading.Timer(seconds / 3, os.kill, (process, signal.SIGKILL)).start()


TWO_ENGINES = ("megatron.pipeline_parallel=2", "rollout.engine.num_engines=2")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_an_engine_that_dies_in_mid_sync_is_lost_alone(ray_here, arithmetic, tmp_path, transport):
    changes = [f"weight_sync.transport={transport}", *TWO_ENGINES]
    changes += [f"weight_sync.folder={tmp_path}/weights"] if transport == "disk" else []
    with loop(arithmetic, tmp_path, *changes) as (controller, run):
        kill_in_the_next_sync(controller, run, "engine")
        version = run.engines.weight_version
        run.trainer.weights.scale(2.0)
        controller.rollouts.weights_changed()
        assert run.engines.weight_version == version + 1
        assert run.engines.serving == {0: 0}
        assert largest_mismatch(controller) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "victim"), [("shared_memory", "trainer"), ("groups", "trainer"), ("groups", "engine")]
)
def test_a_death_in_mid_sync_leaves_no_engine_serving(ray_here, arithmetic, tmp_path, transport, victim):
    with loop(arithmetic, tmp_path, f"weight_sync.transport={transport}", *TWO_ENGINES) as (controller, run):
        kill_in_the_next_sync(controller, run, victim)
        version = run.engines.weight_version
        with pytest.raises((ProcessDied, RuntimeError)) as caught:
            controller.rollouts.weights_changed()
        assert {"trainer": "trainer rank 1", "engine": "engine 1"}[victim] in str(caught.value)
        assert run.engines.weight_version == version
        alive = run.engines._engines[:1] if victim == "engine" else run.engines._engines
        for engine in alive:
            with pytest.raises(RuntimeError, match="cannot serve"):
                ray.get(engine.score.remote([[1, 2, 3]]), timeout=30)


def scheduler_of(engine) -> int:
    children = psutil.Process(ray.get(engine.ready.remote()).pid).children(recursive=True)
    return next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))
