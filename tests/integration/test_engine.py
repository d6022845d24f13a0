"""A real SGLang engine behind Ray, against transformers."""

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.cluster.worker_pool import worker_places
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import BeamConfig, RolloutConfig, Strategy
from grpo_megatron.config.schema import Config, ModelConfig
from grpo_megatron.config.weight_sync import WeightSyncConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.rewards import RewardWorkers
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.sglang.request import Request
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind
from grpo_megatron.weights.sync.plan import Layouts
from grpo_megatron.weights.sync.resharding import Resharding
from tests.integration.one_rank import sync_from
from tests.models import transformers_beams, transformers_logprobs
from tests.rollouts import manager_of

pytestmark = pytest.mark.slow

PROMPTS = ["12+34", "77-19", "5", "10+10"]


@pytest.fixture(scope="module")
def model(arithmetic):
    return AutoModelForCausalLM.from_pretrained(arithmetic / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(arithmetic):
    return PromptTokenizer(str(arithmetic / "model"))


@contextmanager
def running(arithmetic, tokenizer, logs, num_engines=1, **engine):
    """Yield a RolloutManager over real engines, and the engines."""
    config = Config()
    config.rollout.engine = EngineConfig(dtype="float32", max_total_tokens=4096, request_timeout=60, **engine)
    config.rollout.max_concurrency = 6  # fewer than the tests ask for at a time
    config.rollout.stop = ["7"]  # the engine then has a tokenizer, which stop strings need
    cluster = allocate(config, num_ranks=0, num_engines=num_engines)
    reward = RewardConfig(function="tests.integration.helpers:digits")
    rewards = RewardWorkers(reward, tokenizer.decoder, worker_places(cluster.nodes, 1, str(logs)))
    engines = EnginePool(
        cluster,
        config.rollout,
        ModelConfig(str(arithmetic / "model")),
        0,
        str(logs),
        HangDetector(str(logs), 600),
    )
    try:
        engines.wait_until_ready()
        engines.admit()
        yield manager_of(engines, SingleTurn(rewards)), engines
    finally:
        engines.close()
        rewards.close()
        cluster.close()


@pytest.fixture(scope="module")
def rollouts(ray_here, arithmetic, tokenizer, tmp_path_factory):
    with running(arithmetic, tokenizer, tmp_path_factory.mktemp("logs")) as pair:
        yield pair


@pytest.fixture
def manager(rollouts):
    return rollouts[0]


@pytest.fixture
def engines(rollouts):
    return rollouts[1]


def prompts(tokenizer):
    return [Prompt(uid, tokenizer.prompt(text, "f:1")[1], text, "0") for uid, text in enumerate(PROMPTS)]


def all_samples(groups):
    return [sample for group in groups for sample in group.samples]


def largest_difference(groups, model, temperature):
    batch = TrainBatch.from_samples(all_samples(groups))
    hf = transformers_logprobs(model, batch, temperature)
    return np.abs(batch.rollout_logp - hf)[batch.loss_mask].max()


@torch.no_grad()
def greedy(model, prompt, length):
    ids = prompt.ids.tolist()
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[len(prompt.ids) :]


def test_groups_come_back_in_order_with_exact_logprobs(manager, tokenizer, model):
    asked = prompts(tokenizer)
    groups = manager.generate(asked, RolloutConfig(n=5, temperature=0.8, max_response_length=12))
    assert [group.prompt.uid for group in groups] == [0, 1, 2, 3]
    assert len({group.group_id for group in groups}) == 4
    samples = all_samples(groups)
    assert len(samples) == len({sample.trajectory_id for sample in samples}) == 20
    assert len({tuple(s.arrays.response_ids) for s in groups[0].samples}) > 1
    assert largest_difference(groups, model, 0.8) <= 1e-5
    for group in groups:
        for sample in group.samples:
            assert np.array_equal(sample.arrays.prompt_ids, group.prompt.ids)
            text = tokenizer.decode(sample.arrays.response_ids)
            assert sample.response_text == text
            assert sample.reward == sum(c.isdigit() for c in text) / max(1, len(text))


def test_beam_groups_are_those_of_transformers(manager, tokenizer, model):
    asked, beam, end = prompts(tokenizer), BeamConfig(), model.config.eos_token_id
    beams = RolloutConfig(n=3, max_response_length=8, strategy=Strategy.beam)
    groups = manager.generate(asked, beams)
    for prompt, group in zip(asked, groups, strict=True):
        sequences, scores = transformers_beams(model, prompt.ids.tolist(), 3, (end,), 8, beam)
        assert [sample.arrays.response_ids.tolist() for sample in group.samples] == sequences
        assert [sample.arrays.rollout_logprobs.mean() for sample in group.samples] == pytest.approx(
            scores, abs=1e-5
        )
    warm = manager.generate(asked, replace(beams, temperature=0.7))
    assert largest_difference(warm, model, 0.7) <= 1e-5


def test_a_round_that_ends_early_aborts_what_runs_and_what_waits(manager, tokenizer, model):
    """Afterwards the engine serves as before."""
    sampling = RolloutConfig(n=4, max_response_length=120)

    async def first() -> list[Group]:
        async with manager.round(Caller.train, sampling) as round:
            started = list(map(round.start, prompts(tokenizer) * 2, manager.take_ids(8)))
            done, running = await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            assert running
            return [task.result() for task in done]

    groups = asyncio.run(first())
    assert all(len(group.samples) == 4 for group in groups)
    assert largest_difference(groups, model, 1.0) <= 1e-5
    again = manager.generate(prompts(tokenizer), replace(sampling, max_response_length=12))
    assert min(group.group_id for group in again) > max(group.group_id for group in groups)
    assert largest_difference(again, model, 1.0) <= 1e-5


def requests_of(length):
    """Return requests whose SGLang ids have different digits only in their last two places."""
    sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    return [Request((0, sample), [1, 2, 3], sampling) for sample in range(12)]


def answered(engine, round, count):
    """Return this many completions of a round."""
    done = []
    while len(done) < count:
        done += ray.get(engine.poll.remote(round, 5.0))
    return done


def number_of_requests(engine):
    return ray.get(engine.__ray_call__.remote(lambda actor: len(actor._control._manager.rid_to_state)))


def test_an_engine_ends_the_requests_of_one_round_only(engines):
    """The other round has requests with the same keys."""
    engine, ended, kept = engines._engines[0], RoundId("one", 1), RoundId("two", 1)
    ray.get([engine.submit.remote(round, requests_of(150)) for round in (ended, kept)])
    ray.get(engine.end.remote(ended), timeout=30)
    assert number_of_requests(engine) == 12
    done = answered(engine, kept, 12)
    assert sorted(completion.key for completion in done) == [(0, sample) for sample in range(12)]
    assert {completion.finish_reason for completion in done} == {"length"}
    assert ray.get(engine.poll.remote(ended, 60.0), timeout=30) is None


def test_requests_that_sglang_has_not_begun_end_too(engines):
    """An abort would not reach them while SGLang is paused."""

    def paused(actor, is_paused):  # in a thread of its own
        call = actor._control.pause(keep_cache=True) if is_paused else actor._control.resume()
        asyncio.run_coroutine_threadsafe(call, actor._control._manager.event_loop).result(timeout=60)

    engine, round = engines._engines[0], RoundId("paused", 1)
    ray.get(engine.__ray_call__.remote(paused, True))
    ray.get(engine.submit.remote(round, requests_of(150)))
    ray.get(engine.end.remote(round), timeout=30)
    assert number_of_requests(engine) == 0
    ray.get(engine.__ray_call__.remote(paused, False))


def test_a_round_that_was_not_ended_ends_with_the_next_of_its_caller(engines):
    engine, lost, following = engines._engines[0], RoundId("lost", 1), RoundId("lost", 2)
    ray.get(engine.submit.remote(lost, requests_of(300)))
    ray.get(engine.submit.remote(following, requests_of(2)))
    assert {len(done.response_ids) for done in answered(engine, following, 12)} == {2}
    assert ray.get(engine.poll.remote(lost, 60.0), timeout=30) is None
    ray.get(engine.end.remote(following), timeout=30)
    assert number_of_requests(engine) == 0


def test_how_responses_end(manager, engines, tokenizer, model):
    asked = prompts(tokenizer)
    seven, end = tokenizer.encode("7")[0], model.config.eos_token_id
    template_ends_turns = manager_of(engines, manager._samplers[0]._episodes, turn_ends=(int(seven),))
    ends, plain = set(), RolloutConfig(n=8, max_response_length=30)
    for used, sampling in (
        (manager, plain),
        (manager, replace(plain, stop=["7"])),
        (manager, replace(plain, stop_token_ids=[int(seven)])),
        (template_ends_turns, plain),
    ):
        for sample in all_samples(used.generate(asked, sampling)):
            last = sample.arrays.response_ids[-1]
            if sample.finish_reason == "length":
                assert len(sample.arrays.response_ids) == 30
                assert end not in sample.arrays.response_ids
                continue
            assert sample.finish_reason == "stop"
            stops = {end} if (used, sampling) == (manager, plain) else {end, seven}
            assert last in stops
            assert not stops & set(sample.arrays.response_ids[:-1].tolist())
            ends.add(int(last))
    assert ends == {end, seven}


def check_update(manager, engines, tokenizer, model, model_path):
    """Check that greedy decoding and log-probs follow the weights through an update, like transformers'."""
    asked = prompts(tokenizer)
    sampling = RolloutConfig(n=1, temperature=0.0, max_response_length=10)

    def responses(groups):
        return [group.samples[0].arrays.response_ids.tolist() for group in groups]

    before = manager.generate(asked, sampling)
    assert responses(before) == [greedy(model, prompt, 10) for prompt in asked]
    assert {span.version for s in all_samples(before) for span in s.weight_spans} == {0}
    other = random_model(model.config, 11)
    with sync_from(model_path, other.state_dict(), engines) as sync:
        sync.load_state_dict({"version": 40})
        sync.run()
        assert sync.version == 41
    after = manager.generate(asked, sampling)
    assert responses(after) == [greedy(other, prompt, 10) for prompt in asked]
    assert responses(after) != responses(before)
    for sample in all_samples(after):
        assert [(s.version, s.start, s.end) for s in sample.weight_spans] == [
            (41, 0, len(sample.arrays.response_ids))
        ]
    sampled = manager.generate(asked, RolloutConfig(n=4, max_response_length=10))
    assert largest_difference(sampled, other, 1.0) <= 1e-5


def test_an_engine_follows_the_weights_through_an_update(manager, engines, tokenizer, model, arithmetic):
    check_update(manager, engines, tokenizer, model, str(arithmetic / "model"))


def check_no_names_of_shared_files(engines, kinds):
    """Check that no mapped file has a name in /dev/shm, where a SIGKILL would leave it.

    kinds: kinds of files that SGLang's processes map there.
    """
    mapped = set()
    for engine in engines._engines:
        for child in psutil.Process(ray.get(engine.ready.remote()).pid).children(recursive=True):
            words = Path(f"/proc/{child.pid}/maps").read_text().split()
            mapped |= {word for word in words if word.startswith("/dev/shm/sgl")}
    assert {
        kind for kind in ("sgl_shm_mq_", "sglang_loads_") if any(kind in path for path in mapped)
    } == kinds
    assert not [path for path in mapped if os.path.exists(path)]


def test_the_number_of_requests_follows_the_kv_cache(engines, tokenizer):
    """The cache has room for about a quarter of the requests. The others wait here, and not in the engine."""
    (connection,) = engines.connections()
    many = replace(connection, config=replace(connection.config, max_concurrency=64))
    prompt = tokenizer.prompt(PROMPTS[0], "f:1")[1].tolist()
    lengths = [40 + 37 * number % 200 for number in range(160)]
    limits = []

    async def sampled(client, number: int) -> int:
        sampling = {"max_new_tokens": lengths[number], "ignore_eos": True}
        completion = await client.generate(Request((number, 0), prompt, sampling))
        limits.append(client.limit.limit)
        return len(completion.response_ids)

    async def main() -> list[int]:
        with engines.admission.round(Caller.train.value) as round:
            client = many.client(round)
            found = await asyncio.gather(*(sampled(client, number) for number in range(len(lengths))))
            await client.end()
            return found

    assert asyncio.run(main()) == lengths
    assert limits[0] == 64
    assert 5 < min(limits) < 40, limits


def test_an_engine_keeps_no_name_of_a_file_that_its_processes_share(engines):
    check_no_names_of_shared_files(engines, {"sglang_loads_"})


def test_two_engines_with_two_tensor_parallel_ranks_each(ray_here, arithmetic, tokenizer, model, tmp_path):
    with running(arithmetic, tokenizer, tmp_path, num_engines=2, tensor_parallel=2) as (manager, engines):
        check_no_names_of_shared_files(engines, {"sgl_shm_mq_", "sglang_loads_"})
        check_update(manager, engines, tokenizer, model, str(arithmetic / "model"))


def random_model(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_an_engine_that_nobody_admitted_says_so_at_once(engines, tokenizer):
    engine = engines._engines[0]
    assert ray.get(engine.reset.remote())
    round = RoundId("not admitted", 1)
    ray.get(engine.submit.remote(round, [Request((0, 0), [1, 2], {"max_new_tokens": 2})]))
    with pytest.raises(RuntimeError, match="engine 0 cannot serve"):
        ray.get(engine.poll.remote(round, 5.0))
    engines.begin_update()
    engines.end_update(engines.weight_version + 1)
    assert len(engines.score_on_all([[1, 2, 3]])[0][0]) == 2


def test_an_update_the_engine_refuses_is_an_error(engines):
    command = SyncCommand(SyncKind.describe, 1, setup=None)
    with pytest.raises(
        UserError, match=r"engine 0 rejected update_weights_from_tensor: .*begin_weight_update"
    ):
        # Outside an update, which the pool does not allow.
        ray.get(engines._engines[0].receive_weights.remote(command.to_engine(0)))


def test_an_engine_that_is_not_in_fp8_as_planned_is_refused(engines, tmp_path):
    from make_tiny_model import make

    make(tmp_path, hidden=256, ffn=512, heads=8, kv_heads=8)  # of whole blocks, as the engine's model is not
    layouts = Layouts(read_architecture(str(tmp_path)), ParallelSizes(), EngineLayout(1, fp8=True), 1)
    resharding = Resharding(layouts, WeightSyncConfig(), folder="", call_timeout=60.0)
    engines.begin_update()
    with pytest.raises(UserError, match=r"parameters do not match the weight map .*so no weights were sent"):
        resharding.transfer(None, engines, 1)
    engines.end_update(engines.weight_version + 1)
    resharding.close()


def test_an_engine_that_dies_is_named(manager, engines, tokenizer):
    """Must be the last test in this file, because the engine is gone afterwards."""
    process = psutil.Process(ray.get(engines._engines[0].ready.remote()).pid)
    scheduler = next(
        child for child in process.children(recursive=True) if "scheduler" in " ".join(child.cmdline())
    )
    threading.Timer(1.0, os.kill, (scheduler.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    asked = prompts(tokenizer) * 60  # more than an engine finishes in a second
    with pytest.raises(ProcessDied, match=r"engine 0 died in `generate`.*; its log is .*engine0.log"):
        manager.generate(asked, RolloutConfig(n=8, max_response_length=200))
    assert time.monotonic() - start < 180
