"""Slots of groups: in simulated runs, no group is too old, none is lost, and the run goes on."""

import heapq
import itertools
import random
from collections import Counter

import pytest

from grpo_megatron.config.rollout import Order
from grpo_megatron.rollout.slots import GroupSlots


class Simulated:
    """A run with engines that sample each group for some time, and a trainer that takes the same time for
    each step.

    batches: numbers of the groups of each step
    ages: for each group that was trained, how often the weights had changed since its start
    waits: seconds that each step waited for its batch
    refused, surplus: numbers of the groups that no step trained on
    most_left: largest number of groups that were left when a step had its batch
    """

    def __init__(self, slots, seconds, train=1.0, concurrency=10**6, refuse=0.0):
        """Set up the run.

        seconds: time of each group. Group i takes the i-th, and after the last comes the first again.
        train: time of a step.
        concurrency: number of groups that the engines sample at a time.
        refuse: share of the groups that are refused.
        """
        self.slots, self.seconds, self.train = slots, seconds, train
        self.concurrency, self.refuse = concurrency, refuse
        self.batches, self.ages, self.waits = [], [], []
        self.refused, self.surplus, self.most_left = [], [], 0

    def run(self, steps: int) -> "Simulated":
        slots, now, number, events, queue = self.slots, 0.0, 0, [], []
        rng = random.Random(1)
        for _ in range(steps):
            asked = now
            slots.ask(now)
            ready = None  # time at which the trainer is done
            while True:
                for _ in range(slots.room()):
                    queue.append((number, slots.start((number, slots.version))))
                    number += 1
                while queue and len(events) < self.concurrency:
                    one, slot = queue.pop(0)
                    heapq.heappush(events, (now + self.seconds[one % len(self.seconds)], one, slot))
                if ready is None and (taken := slots.take(now)):
                    self._note(taken)
                    if taken.surplus:
                        events, queue = [], []
                    self.waits.append(now - asked)
                    ready = now + self.train
                    continue
                if ready is not None and (not events or events[0][0] > ready):
                    break
                assert events, "the run does not go on"
                now, _, slot = heapq.heappop(events)
                slots.finish(slot, rng.random() >= self.refuse)
            now = ready
            slots.updated()
        return self

    def _note(self, taken) -> None:
        self.batches.append([number for number, _ in taken.batch])
        self.ages += [self.slots.version - version for _, version in taken.batch]
        self.refused += [number for number, _ in taken.refused]
        self.surplus += [number for number, _ in taken.surplus]
        self.most_left = max(self.most_left, len(self.slots.items))


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def heavy_tailed(seed: int, count: int = 997) -> list[float]:
    rng = random.Random(seed)
    return [rng.lognormvariate(0.0, 1.3) / 4 for _ in range(count)]


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_no_group_is_too_old_and_none_is_lost(order, staleness, seed):
    """Rule R0: slots are charged at the start of a group and freed when a step takes it. Another stack had
    1,536 groups in flight for batches of 8, and dropped finished ones as too old.
    """
    rng = random.Random(seed)
    batch, refuse = rng.randint(1, 9), rng.choice([0.0, 0.0, 0.4])
    run = Simulated(
        GroupSlots(batch, staleness, order),
        heavy_tailed(seed),
        train=rng.choice([0.01, 0.3, 1.0, 5.0]),
        concurrency=rng.choice([2, batch, 10**6]),
        refuse=refuse,
    ).run(60)
    assert max(run.ages) <= staleness
    assert [len(one) for one in run.batches] == [batch] * 60
    assert run.most_left <= staleness * batch
    assert not run.surplus
    left = [number for number, _ in run.slots.items]
    seen = Counter([*flat(run.batches), *run.refused, *left])
    assert set(seen) == set(range(len(seen))), "a group is missing"
    assert set(seen.values()) == {1}
    for one in run.batches:
        assert one == sorted(one)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_fifo_takes_groups_in_the_order_of_their_start(staleness):
    run = Simulated(GroupSlots(4, staleness), heavy_tailed(3)).run(30)
    assert flat(run.batches) == list(range(4 * 30))


def test_with_a_window_a_straggler_does_not_hold_up_the_step():
    """The straggler may be trained three steps after its start, the staleness, and not later."""
    seconds = [0.1] * 997
    seconds[17] = 3.5
    steps = {}
    for order in Order:
        run = Simulated(GroupSlots(4, 3, order), seconds, train=1.0).run(20)
        steps[order] = next(step for step, batch in enumerate(run.batches) if 17 in batch)
        assert max(run.ages) <= 3
        assert max(run.waits[1:]) < (3.0 if order == Order.fifo else 2.0), (order, run.waits)
    assert steps[Order.fifo] < steps[Order.window]


def test_short_responses_are_preferred_only_by_the_order_ready():
    """Half of the groups are short. Steps must not prefer them, because lengths are learned, too."""
    seconds = [0.1, 1.0] * 500
    short = {}
    for order in Order:
        run = Simulated(GroupSlots(8, 4, order), seconds, train=0.2, concurrency=16).run(12)
        # Groups that are trained early, in relation to the order of their start.
        early = [number for step, batch in enumerate(run.batches) for number in batch if number // 8 > step]
        short[order] = sum(number % 2 == 0 for number in early)
    assert short[Order.fifo] == 0
    assert short[Order.window] < short[Order.ready]


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("order", list(Order))
def test_samples_stay_young_where_the_trainer_is_the_bottleneck(staleness, order):
    """Trap: with a full quota all samples are as old as the bound, which gains nothing."""
    run = Simulated(GroupSlots(8, staleness, order), [0.05] * 100, train=1.0).run(60)
    assert sum(run.ages) / len(run.ages) <= 1.1
    assert max(run.waits[1:]) == 0


def test_a_larger_staleness_and_a_window_fill_the_tail_of_a_batch_where_sampling_is_the_bottleneck():
    def waited(staleness: int, order: Order = Order.fifo) -> float:
        return sum(Simulated(GroupSlots(8, staleness, order), heavy_tailed(5), train=0.1).run(120).waits)

    assert waited(1) < 0.75 * waited(0)
    assert waited(4) < 0.8 * waited(1)
    assert waited(4, Order.window) < 0.85 * waited(4)


def test_nothing_is_sampled_beyond_the_last_step():
    for staleness in (0, 1, 3):
        run = Simulated(GroupSlots(4, staleness, last_step=10), heavy_tailed(2), train=3.0).run(10)
        assert flat(run.batches) == list(range(40))
        assert not run.slots.items


def test_groups_in_flight_beyond_a_batch_are_surplus_only_without_staleness():
    run = Simulated(GroupSlots(4, in_flight=2.0), heavy_tailed(1), refuse=0.3).run(20)
    assert [len(one) for one in run.batches] == [4] * 20
    assert run.surplus
    assert set(run.ages) == {0}
    assert not run.slots.items


def test_a_batch_is_short_when_no_further_group_may_be_started():
    for staleness in (0, 2):
        slots = GroupSlots(4, staleness, most=10)
        slots.ask(0.0)
        started = []
        while room := slots.room():
            new = [slots.start(len(started) + index) for index in range(room)]
            started += new
            for slot in new:
                slots.finish(slot, counts=slot.item == 1)
        taken = slots.take(0.0)
        assert taken.batch == [1]
        assert len(taken.refused) == len(started) - 1 <= 10 + 4 * staleness
        if not staleness:
            assert len(started) == 10
