"""The driver's side of a weight sync: which syncs are full, and which reports and parameters it refuses."""

import threading
import time
from collections import defaultdict
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from grpo_megatron.cluster.processes import Calls, ProcessDied
from grpo_megatron.config.weight_sync import Transport, WeightSyncConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.weights.sync import resharding
from grpo_megatron.weights.sync.interface import EnginesLost
from grpo_megatron.weights.sync.messages import SyncKind, SyncReport
from grpo_megatron.weights.sync.plan import EngineRank, ReshardPlan
from grpo_megatron.weights.sync.receiver import WeightReceiver
from grpo_megatron.weights.sync.resharding import Resharding
from grpo_megatron.weights.sync.sender import WeightSender
from tests.unit.sync_cluster import (
    DENSE,
    engine_parameters,
    hf_tensors,
    tp2_pp2_to_two_engines,
    trainer_parameters,
)
from tests.unit.test_reshard import changed

CPU = torch.device("cpu")


def gather_futures(references, processes, call, timeout, forwarded):
    """Stand in for `cluster.processes.gather`, with futures of threads instead of Ray's references."""
    done, _ = wait(references.values(), return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return {number: future.result() for number, future in references.items()}


def outcomes_of_futures(references, processes, call, timeout, forwarded):
    """Stand in for `cluster.processes.outcomes`."""
    _, others = wait(references.values(), timeout)
    if others:
        raise ProcessLost("some do not end their call")
    return {number: future.exception() or future.result() for number, future in references.items()}


class Processes:
    """The ranks of trainer and engines as threads of this process, behind the two interfaces that the driver
    calls.

    `commands` has every command that arrived. Every report of an engine rank goes through `alter`, which a
    test changes.
    """

    def __init__(self, plan):
        self.plan, self.tensors, self.commands = plan, {}, []
        self.parameters = engine_parameters(plan)
        self.alter = lambda me, report: report
        self._sides = {}
        # Calls to a rank run one after the other, as in an actor. It may still be in a sync that has failed.
        self._turns = defaultdict(threading.Lock)
        self._threads = ThreadPoolExecutor(64)

    def _side(self, kind, setup, me):
        last = self._sides.get((kind, me))
        if last is None or last.setup != setup:
            if last:
                last.close()
            self._sides[kind, me] = kind(setup, me, CPU)
        return self._sides[kind, me]

    def close(self):
        for side in self._sides.values():
            side.close()
        self._threads.shutdown()


class Source(Processes):
    processes = property(lambda self: list(range(self.plan.layouts.sizes.world_size)))

    def send_weights(self, command):
        self.commands.append(command)
        have = trainer_parameters(self.plan, self.tensors)

        def send(rank):
            with self._turns[rank]:
                return self._side(WeightSender, command.setup, rank).send(command, have[rank])

        return Calls({rank: self._threads.submit(send, rank) for rank in self.processes})


class Target(Processes):
    processes = property(lambda self: list(range(self.plan.layouts.num_engines)))
    members, nodes = ((0, 0), (1, 0)), ()

    def lost(self, index, starts, error):
        raise error

    def receive_weights(self, command):
        return [self._threads.submit(self._engine, command, engine) for engine in self.processes]

    def _engine(self, command, engine):
        ranks = [me for me in self.plan.engine_ranks if me.engine == engine]
        reports = [self._threads.submit(self._rank, command, me) for me in ranks]
        return [report.result() for report in reports]

    def _rank(self, command, me):
        if command.kind == SyncKind.describe:
            shapes = {name: (tuple(value.shape), value.dtype) for name, value in self.parameters[me].items()}
            return SyncReport(parameters=shapes)
        with self._turns[me]:
            report = self._side(WeightReceiver, command.setup, me).receive(command, self.parameters[me])
        return self.alter(me, report)


class Driver:
    """A Resharding over shared memory, with its source and target."""

    def __init__(self, delta):
        layouts = tp2_pp2_to_two_engines(multicast=True)
        config = WeightSyncConfig(bucket_bytes=700, timeout=30, delta=delta)
        self._resharding = Resharding(layouts, config, folder="", call_timeout=60)
        plan = ReshardPlan(layouts)
        self.source, self.target, self._version = Source(plan), Target(plan), 0

    def sync(self, tensors):
        """Send these HF tensors as the next version, and return what the sync measured."""
        self.source.tensors = tensors
        measured = self._resharding.transfer(self.source, self.target, self._version + 1)
        self._version += 1
        return measured

    def use(self, transport, folder):
        config = WeightSyncConfig(bucket_bytes=700, timeout=30, delta=True, transport=transport)
        self._resharding = Resharding(self.target.plan.layouts, config, str(folder), call_timeout=60)

    def check(self, tensors):
        expected = engine_parameters(self.target.plan, tensors)
        for me, parameters in self.target.parameters.items():
            for name, value in parameters.items():
                # Padding of the vocabulary is never written, and stays NaN on both sides.
                assert torch.equal(value.nan_to_num(7.0), expected[me][name].nan_to_num(7.0)), (
                    f"{name} at {me}"
                )

    def was_full(self):
        return [command.full for command in self.source.commands]

    def close(self):
        self.source.close()
        self.target.close()
        self._resharding.close()


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(resharding, "gather", gather_futures)
    monkeypatch.setattr(resharding, "outcomes", outcomes_of_futures)
    with closing(Driver(delta=True)) as one:
        yield one


def test_deltas_are_right_when_weights_return_to_what_they_were(driver):
    """An encoder that compares with anything but what it sent last leaves the engines on B when A comes
    back.
    """
    first = hf_tensors(DENSE, 1)
    second = changed(first, 0.05, seed=2)
    third = changed(first, 0.05, seed=3)
    sizes = []
    for tensors in (first, second, first, first, third, second):
        sizes.append(driver.sync(tensors)["sent_gb"])
        driver.check(tensors)
    assert driver.was_full() == [True, *[False] * 5]
    assert max(sizes[1:]) < 0.6 * sizes[0]
    assert sizes[3] < sizes[2]


def test_engines_may_go_and_come_between_syncs(driver):
    """The plan is for the engines that take part. All ranks connect anew, and get whole weights."""
    tensors = hf_tensors(DENSE, 1)
    driver.sync(tensors)
    both, alone = driver.target, Target(replace_engines(driver.target.plan, 1))
    alone.members = ((1, 0),)
    for target, members in ((alone, alone.members), (alone, alone.members), (both, ((0, 1), (1, 0)))):
        tensors = changed(tensors, 0.05, seed=len(driver.source.commands))
        target.members = members
        driver.source.plan, driver.target = target.plan, target
        driver.sync(tensors)
        driver.check(tensors)
    assert driver.was_full() == [True, True, False, True]
    alone.close()


@pytest.mark.parametrize("transport", [Transport.shared_memory, Transport.disk])
def test_an_engine_that_dies_in_a_sync_is_lost_and_the_others_get_the_weights(
    driver, monkeypatch, tmp_path, transport
):
    """Its partners wait for it no longer than the driver needs to tell them. Then the sync is repeated."""
    driver.use(transport, tmp_path)
    lost, receive, tensors = [], WeightReceiver._load, hf_tensors(DENSE, 1)
    driver.target.lost = lambda index, starts, error: lost.append((index, starts, str(error)))
    driver.sync(tensors)
    dying = [side for (_, me), side in driver.target._sides.items() if me.engine == 1]

    def die(receiver, *arguments):
        if receiver in dying:
            raise ProcessDied("engine 1 died in `receive_weights`")
        return receive(receiver, *arguments)

    monkeypatch.setattr(WeightReceiver, "_load", die)
    tensors, started = changed(tensors, 0.05, seed=2), time.monotonic()
    with pytest.raises(EnginesLost):
        driver.sync(tensors)
    assert time.monotonic() - started < 15
    assert lost == [(1, 0, "engine 1 died in `receive_weights`")]
    both, alone = driver.target, Target(replace_engines(driver.target.plan, 1))
    alone.members, driver.source.plan, driver.target = ((0, 0),), alone.plan, alone
    driver.sync(tensors)
    driver.check(tensors)
    assert driver.was_full() == [True, False, True]
    alone.close()
    driver.target = both


@pytest.mark.parametrize("culprit", ["rank", "nobody"])
def test_a_rank_that_dies_in_a_sync_ends_the_run(driver, monkeypatch, culprit):
    """So does a process that does not end the sync when it is told to."""
    driver.target.lost = lambda *_: pytest.fail("no engine is lost")
    send = WeightSender.send
    monkeypatch.setattr(resharding, "_ABANDON_SECONDS", 0.5)

    def die(sender, *arguments):
        if culprit == "rank" and sender._rank == 1:
            raise ProcessDied("trainer rank 1 died")
        time.sleep(2 * (culprit == "nobody"))
        return send(sender, *arguments)

    monkeypatch.setattr(WeightSender, "send", die)
    if culprit == "nobody":
        driver.target.alter = lambda me, report: report

        def dead(receiver, *arguments):
            raise ProcessDied("engine 1 died")

        monkeypatch.setattr(WeightReceiver, "receive", dead)
    with pytest.raises(ProcessDied, match="rank 1 died" if culprit == "rank" else "engine 1 died"):
        driver.sync(hf_tensors(DENSE, 1))


def replace_engines(plan, count):
    return ReshardPlan(replace(plan.layouts, num_engines=count))


def test_the_sync_after_a_failed_one_is_full(driver):
    """Some engines may have the weights of the failed sync, others not, so that a delta has no common
    basis.
    """
    tensors = hf_tensors(DENSE, 1)
    driver.sync(tensors)

    def fail(me, report):
        raise RuntimeError(f"{me} is out of memory")

    driver.target.alter = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.sync(changed(tensors, 0.05, seed=2))
    driver.target.alter = lambda me, report: report
    for me, parameters in driver.target.parameters.items():
        parameters["model.norm.weight"].fill_(me.rank)
    driver.sync(tensors)
    driver.check(tensors)
    driver.sync(tensors)
    assert driver.was_full() == [True, False, True, False]


def _other_checksum(report):
    link = next(iter(report.link_checksums))
    return {**report.link_checksums, link: report.link_checksums[link] ^ 1}


def _without_a_link(report):
    return dict(list(report.link_checksums.items())[1:])


def _with_another_link(report):
    return {**report.link_checksums, "7-0.0": 1}


@pytest.mark.parametrize("alter", [_other_checksum, _without_a_link, _with_another_link])
@pytest.mark.parametrize("culprit", [EngineRank(0, 0), EngineRank(1, 1)])
def test_a_link_whose_checksum_is_not_the_senders_is_refused(driver, alter, culprit):
    """All digests of tensors may agree while a parcel is missing. The sum over the link then differs."""
    tensors = hf_tensors(DENSE, 1)
    driver.target.alter = lambda me, report: (
        replace(report, link_checksums=alter(report)) if me == culprit else report
    )
    with pytest.raises(RuntimeError, match=f"{culprit} did not load .* checksums of these links differ"):
        driver.sync(tensors)
    driver.target.alter = lambda me, report: report
    driver.sync(tensors)
    assert driver.was_full() == [True, True]


def test_a_tensor_whose_digest_differs_is_named(driver):
    driver.target.alter = lambda me, report: (
        replace(report, wrong=("model.norm.weight",)) if me.engine else report
    )
    with pytest.raises(
        RuntimeError,
        match=r"model\.norm\.weight at rank 0 of engine 1, model\.norm\.weight at rank 1 of engine 1",
    ):
        driver.sync(hf_tensors(DENSE, 1))


@pytest.mark.parametrize("alter", [{"wrong": ("model.norm.weight",)}, {"link_checksums": {}}])
def test_one_engine_of_two_with_wrong_weights_is_lost_and_the_sync_succeeds(driver, alter):
    lost = []
    driver.target.lost = lambda index, starts, error: lost.append((index, starts, str(error)))
    driver.target.members = ((4, 0), (7, 2))
    driver.target.alter = lambda me, report: replace(report, **alter) if me.engine else report
    tensors = hf_tensors(DENSE, 1)
    driver.sync(tensors)
    driver.check(tensors)
    ((*engine, text),) = lost
    assert engine == [7, 2]
    assert "engine 7" in text


def test_all_engines_with_wrong_weights_are_an_error(driver):
    driver.target.lost = lambda *_: pytest.fail("lost")
    driver.target.alter = lambda me, report: replace(report, wrong=("model.norm.weight",))
    with pytest.raises(RuntimeError, match=r"rank 0 of engine 0, .* at rank 1 of engine 1"):
        driver.sync(hf_tensors(DENSE, 1))


def test_engines_with_other_parameters_end_the_run_before_any_weight_is_sent(driver):
    """A new release of SGLang may name or divide them in another way."""
    for me, parameters in driver.target.parameters.items():
        parameters["model.renamed.weight"] = parameters.pop("model.norm.weight")
        if me.rank == 1:
            parameters["lm_head.weight"] = parameters["lm_head.weight"][:3]
    with pytest.raises(UserError) as caught:
        driver.sync(hf_tensors(DENSE, 1))
    assert driver.source.commands == []
    for part in (
        "the engines' parameters do not match the weight map in grpo_megatron/model/families (3 differ: ",
        "rank 0 of engine 0 has model.norm.weight of shape none instead of (16,)",
        "rank 0 of engine 0 has model.renamed.weight of shape (16,) instead of none",
        "rank 1 of engine 0 has lm_head.weight of shape (3, 16) instead of (",
    ):
        assert part in str(caught.value)
