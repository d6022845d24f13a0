"""`grpo-megatron selftest` finds nothing in a correct run, and names each planted fault."""

import itertools
import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.cli import main
from grpo_megatron.commands.selftest import as_json, investigate, selftest_config
from grpo_megatron.commands.selftest_verdict import Verdict
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.files import json_text
from grpo_megatron.megatron.state.hf_weights import local_parameters
from grpo_megatron.preflight.check import load_config

pytestmark = pytest.mark.slow

STEPS = 2


@pytest.fixture(scope="module")
def arguments(ray_here, arithmetic, tmp_path_factory) -> list[str]:
    """Arguments of a run whose model is surer of its words than a random one."""
    import shutil

    folder = tmp_path_factory.mktemp("selftest")
    shutil.copytree(arithmetic / "model", folder / "model")
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] *= 15
    save_file(weights, path, {"format": "pt"})
    return [
        f"run.root={folder}",
        f"model.path={folder}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        "data.max_prompt_length=16",
        "data.train_batch_size=24",
        "rollout.n=8",
        "rollout.max_response_length=16",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=16384",
        "reward.function=tests.integration.helpers:digits",
        "reward.workers=1",
        "train.ppo_mini_batch_size=24",
        "megatron.precision=fp32",
    ]


@pytest.fixture(scope="module")
def controller(arguments):
    config = load_config(None, [*arguments, "run.name=planted"])
    with assembled_loop(selftest_config(config, STEPS)) as (controller, run):
        controller.engines = run.engines
        yield controller


@pytest.fixture
def verdict(controller):
    def run():
        return investigate(controller, controller.engines, STEPS)

    return run


def test_a_sound_run(verdict):
    found = verdict()
    assert found.passed, found.text()
    assert len(found.mean) == STEPS
    assert max(found.mean) < found.limit < 1e-4
    assert abs(found.sampling_z) < 6
    assert "engine and trainer agree" in found.text()


def sample_otherwise(controller, monkeypatch, **changes):
    """Have the engines sample otherwise than the trainer believes."""
    stream = controller.rollouts.source._stream
    monkeypatch.setattr(stream, "_rollout", replace(stream._rollout, **changes))


def test_another_temperature(controller, verdict, monkeypatch):
    sample_otherwise(controller, monkeypatch, temperature=0.8)
    (found,) = verdict().explanations
    assert found.startswith("temperature:")
    assert "at 0.8;" in found


def test_top_p(controller, verdict, monkeypatch):
    """SGLang's log-probs are those of the whole distribution. Only the samples themselves reveal top-p."""
    sample_otherwise(controller, monkeypatch, top_p=0.7)
    found = verdict()
    assert max(found.mean) < found.limit
    assert [text.split(":")[0] for text in found.explanations] == ["top-p"]


def change_samples(controller, monkeypatch, change):
    """Apply `change` to each sample after it was drawn."""
    taken = controller.rollouts.source.take

    def take(step, revive):
        rollout = taken(step, revive)
        return replace(
            rollout,
            groups=[replace(group, samples=tuple(map(change, group.samples))) for group in rollout.groups],
        )

    monkeypatch.setattr(controller.rollouts.source, "take", take)


def test_log_probs_of_a_cut_distribution(controller, verdict, monkeypatch):
    """Simulates an engine that renormalises the nucleus."""
    rng = np.random.default_rng(1)

    def cut(sample):
        shares = rng.uniform(0.8, 1, len(sample.arrays.response_ids))
        return sample.with_arrays(
            rollout_logprobs=(sample.arrays.rollout_logprobs - np.log(shares)).astype("f4")
        )

    change_samples(controller, monkeypatch, cut)
    assert verdict().explanations[0].startswith("top-p:")


def test_token_ids_changed_after_sampling(controller, verdict, monkeypatch):
    """Tokenizing the response's text again has such an effect. Here two neighbours are exchanged."""

    def exchange(sample):
        ids = sample.arrays.response_ids.copy()
        ids[1:3] = ids[2:0:-1] if len(ids) > 2 else ids[1:3]
        return sample.with_arrays(response_ids=ids)

    change_samples(controller, monkeypatch, exchange)
    (found,) = verdict().explanations
    assert found.startswith("tokenizer:")


@contextmanager
def intercepted(controller, monkeypatch, fault):
    """Replace each weight sync by `fault(transfer, number of the sync)`, where `transfer` does the real one.

    The engines take the result for a sync.
    """
    real, count = controller.rollouts.handover.weight_sync._resharding, itertools.count()

    class Intercepted:
        def transfer(self, source, target, version):
            fault(lambda: real.transfer(source, target, version), next(count))
            return {}

    with monkeypatch.context() as patch:
        patch.setattr(controller.rollouts.handover.weight_sync, "_resharding", Intercepted())
        yield


def test_an_engine_one_version_behind(controller, verdict, monkeypatch):
    """Every update brings the weights of the one before.

    With learning rate 0, weights only change where the self-test scales them.
    """
    weights = controller.trainer.weights
    scale = weights.scale
    factor = {"now": 1.0, "sent": 1.0}

    def counted(by):
        scale(by)
        factor["now"] *= by

    def send_those_before(transfer, number):
        change = factor["sent"] / factor["now"]
        scale(change)
        transfer()
        scale(1 / change)
        factor["sent"] = factor["now"]

    monkeypatch.setattr(weights, "scale", counted)
    with intercepted(controller, monkeypatch, send_those_before):
        (found,) = verdict().explanations
    assert found.startswith("weight version: a sync of different weights")


def test_weights_that_came_late(controller, verdict, monkeypatch):
    """The first update after the start is lost, but acknowledged."""
    controller.trainer.weights.scale(2.0)
    controller.rollouts.weights_changed()
    controller.trainer.weights.scale(0.5)

    with intercepted(controller, monkeypatch, lambda transfer, number: transfer() if number else None):
        (found,) = verdict().explanations
    assert found.startswith("weight version: the mismatch of step 1 is gone")


def test_a_tensor_that_never_arrives(controller, verdict, monkeypatch):
    """The rank sends zeros in its place, so that digests agree."""
    (rank,) = controller.trainer.ranks.group._workers

    def exchange(worker, value):  # runs in the rank's process; returns the value before
        parameter = local_parameters(worker._target.model.chunks)["decoder.layers.0.mlp.linear_fc2.weight"]
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(torch.zeros_like(before) if value is None else value)
        return before

    def without_it(transfer, number):
        own = ray.get(rank.__ray_call__.remote(exchange, None))
        transfer()
        ray.get(rank.__ray_call__.remote(exchange, own))

    with intercepted(controller, monkeypatch, without_it):
        (found,) = verdict().explanations
    assert found.startswith("unknown:")
    assert "model/families" in found
    assert verdict().passed  # and the engine is whole again


def test_a_version_tag_of_old(controller, verdict, monkeypatch):
    """SGLang reports a sample's weight version, and that report is believed.

    Samples are left in the engine, so that only the next test may use it.
    """

    class OneVersionAhead:
        """The engines, as if the trainer had synced once more."""

        def __getattr__(self, name):
            value = getattr(controller.engines, name)
            return value + 1 if name == "weight_version" else value

    monkeypatch.setattr(controller.rollouts.source._manager, "_engines", OneVersionAhead())
    (found,) = verdict().explanations
    assert found.startswith("weight version: the engine answered with weight version")


def test_nothing_outlives_the_process_of_an_engine(controller):
    (engine,) = controller.engines._engines
    process = psutil.Process(ray.get(engine.ready.remote()).pid)
    children = process.children(recursive=True)
    assert len(children) > 2
    process.kill()
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_an_engine_in_bf16_by_the_command(arguments, capfd):
    status = main(["selftest", *arguments, "run.name=bf16", "rollout.engine.dtype=bfloat16"])
    assert status == 1
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert not report["passed"]
    (found,) = report["explanations"]
    assert found.startswith("precision: the engine computes in bfloat16")
    assert "the trainer in float32" in found
    assert torch.finfo(torch.float32).eps < report["limit"] < min(report["mean"])


def test_what_was_not_measured_is_null():
    found = json.loads(json_text(as_json(Verdict(explanations=["weight version: old"]))))
    assert (found["passed"], found["limit"], found["sampling_z"]) == (False, None, None)


def test_a_replay_has_no_engine(arguments, capsys):
    assert main(["selftest", *arguments, "run.name=replay", "rollout.replay=x.jsonl"]) == 2
    assert "rollout.replay runs no engine" in capsys.readouterr().err
