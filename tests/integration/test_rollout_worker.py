"""A real rollout worker, whose sampler makes samples without engines: where their arrays go."""

import resource
from dataclasses import replace

import numpy as np
import pytest
import ray

from grpo_megatron.batch.arrays import reading_forbidden, values_of
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Conversation, Sample, with_texts_here
from grpo_megatron.batch.train_batch import TrainBatch, fetched_batches
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.cluster.processes import Process
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.recording.record import Recorder
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.rollout.sample_store import StoredValue
from grpo_megatron.rollout.worker import RolloutWorker
from tests.rollouts import FakeEngines

MOST_BYTES = 2**20  # that the worker can write to a file


class WithoutEngines:
    """Stands in for the GroupSampler. A prompt's answer is the number of tokens of its responses."""

    async def begin(self, round): ...

    async def end(self, round): ...

    def close(self): ...

    async def sample(self, round, request, listener):
        return tuple(
            replace(made(request.prompt, member), conversation=Conversation.of(request.prompt.ids + member))
            for member in range(2)
        )


def made(prompt: Prompt, member: int) -> Sample:
    count, draw = int(prompt.answer), np.random.default_rng([prompt.uid, member])
    return Sample.of(
        group_id=prompt.uid,
        trajectory_id=2 * prompt.uid + member,
        prompt_ids=prompt.ids,
        response_ids=draw.integers(0, 99, count).astype(np.int32),
        loss_mask=np.ones(count, bool),
        rollout_logprobs=-draw.random(count).astype(np.float32),
        finish_reason="stop",
        routing=draw.integers(0, 64, (len(prompt.ids) + count, 2, 4)).astype(np.int16),
        reward=float(member),
        response_text=f"response {member}",
    )


def build() -> WithoutEngines:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, resource.RLIM_INFINITY))
    return WithoutEngines()


@pytest.fixture
def manager(ray_here, tmp_path):
    place = Place(Process("worker", f"{tmp_path}/worker.log"), ray.get_runtime_context().get_node_id())
    worker = RolloutWorker(place, build, HangDetector(str(tmp_path), 600), layers=((1,), (0,)))
    ray.get(worker.started)
    engines = FakeEngines()
    engines.serving = {0: 0, 1: 0}
    yield RolloutManager(engines, [worker, worker])
    worker.close()


def prompts(tokens: int) -> list[Prompt]:
    return [Prompt(uid, np.arange(3 + uid, dtype=np.int32), "", str(tokens)) for uid in range(3)]


def test_a_worker_writes_its_samples_and_the_driver_reads_none(manager, tmp_path, capsys):
    recorder = Recorder(str(tmp_path / "r"), manager)
    with reading_forbidden():
        groups = manager.generate(prompts(50), RolloutConfig(n=2))
        recorder.write(1, groups)
        recorder.write(2, manager.generate(prompts(MOST_BYTES), RolloutConfig(n=2)))
        assert "step 2 is missing from the recording" in capsys.readouterr().out
        recorder.write(3, groups[:1])
    replay = Replay(str(tmp_path / "r"))
    assert replay.steps == [1, 3]
    assert len(list((tmp_path / "r").iterdir())) == 5
    for group, prompt in zip(replay.read(1), prompts(50), strict=True):
        for member, sample in enumerate(group.samples):
            expected = made(prompt, member)
            assert replace(sample, handle=None, texts=None) == replace(expected, handle=None, texts=None)
            assert sample.response_text == f"response {member}"
            for name, array in vars(expected.arrays).items():
                assert np.array_equal(getattr(sample.arrays, name), array), name


def test_arrays_texts_and_conversations_are_objects_of_their_own(manager):
    """So a rank, and the driver, fetch no more than they need. The driver has one reference for a group."""
    with reading_forbidden():
        groups = manager.generate(prompts(50), RolloutConfig(n=2))
        texts = [sample.response_text for group in with_texts_here(groups) for sample in group.samples]
    assert texts == ["response 0", "response 1"] * 3
    samples = [sample for group in groups for sample in group.samples]
    handles = [one for s in samples for one in (s.handle, s.texts, s.conversation.handle)]
    assert {type(handle) for handle in handles} == {StoredValue}
    assert len({handle.group for handle in handles}) == 3
    assert len({ray.get(handle.group)[handle.index] for handle in handles}) == 3 * len(samples)
    found = values_of([sample.conversation.handle for sample in samples])
    for sample, ids in zip(samples, found, strict=True):
        expected = np.arange(3 + sample.group_id) + sample.trajectory_id % 2
        assert np.array_equal(ids, expected)
        assert sample.conversation.num_tokens == len(expected)
    whole = TrainBatch.from_samples(samples).routing
    made_here = [made(prompt, member) for prompt in prompts(50) for member in range(2)]
    assert np.array_equal(whole, np.concatenate([sample.arrays.routing for sample in made_here]))
    for stage, layer in enumerate((1, 0)):
        (batch,) = fetched_batches([samples], stage)
        assert np.array_equal(batch.routing, whole[:, [layer]])
