"""Slots: how many groups may be sampled ahead of training, and which of them a step trains on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_megatron.config.rollout import Order

T = TypeVar("T")

# If the trainer waited for samples for more than this share of a step, more groups are sampled ahead
# afterwards, otherwise fewer.
_WAITED = 0.05
# With rollout.order=window, a step chooses its groups among the oldest _WINDOW * batch_size groups.
_WINDOW = 2


@dataclass(eq=False)
class GroupSlot(Generic[T]):
    """A group that is being sampled or waits for training, from its start until a training step takes it."""

    item: T
    """The object that the user of GroupSlots keeps for the group."""
    version: int
    """`GroupSlots.version` when the group was started. No token of the group is from older weights."""
    finished: int | None = None
    """Number of groups that had finished before this one; None while it is being sampled."""
    counts: bool = True
    """False if the group has finished, but another group is to take its place in the batch."""


@dataclass(frozen=True)
class Taken(Generic[T]):
    """The groups that leave GroupSlots when a training step takes its batch.

    T is the type of the object that the user of GroupSlots keeps for each group. Each list has the order in
    which its groups were started.
    """

    batch: list[T]
    """Groups of the batch."""
    refused: list[T]
    """Groups that finished since the last batch, but do not count: others were started in their place."""
    surplus: list[T]
    """Groups that would be too old for the next step, finished or not. Empty if staleness is above 0."""


class GroupSlots(Generic[T]):
    """Decides when groups may be started, and puts finished groups together to batches.

    This class only keeps accounts: GroupStream samples the groups. It is not thread-safe; GroupStream.lock
    protects it. T is the type of the object that the user keeps for each group.

    After a step has taken its batch, at most staleness * batch_size groups are left, and a further batch_size
    may be started when the next step asks for its batch. So each group can be trained before the weights have
    changed more than `staleness` times since its start, and none has to be discarded for its age.

    version: number of changes of the weights so far, as `updated` counts them
    """

    def __init__(
        self,
        batch_size: int,
        staleness: int = 0,
        order: Order = Order.fifo,
        in_flight: float = 1.0,
        most: float = math.inf,
        last_step: float = math.inf,
    ):
        """Create the slots for the first training step. No group has been started yet.

        batch_size: number of groups of a batch.
        staleness: how often the weights may change between a group's start and its training, at most.
        order: which of the finished groups a step takes.
        in_flight: factor of at least 1: while a batch lacks N groups, N * in_flight are sampled for it. With
            more than 1, `order` is ignored, and a step takes the groups that finish first.
        most: maximum number of groups to start for one batch. Groups that do not count, and are replaced by
            others, are included.
        last_step: number of batches that will be taken. No group is started for a later batch.
        """
        self._size, self._staleness, self._in_flight, self._most = batch_size, staleness, in_flight, most
        self._order = order if in_flight == 1 else Order.ready
        self._steps_left = last_step
        self.version = 0
        self._slots: list[GroupSlot[T]] = []  # in the order of their start
        self._num_counting = self._num_finished = 0  # finished: those that count
        self._num_ended = 0
        # The batch cannot be complete before this is True for `_num_lacking` further groups that finish.
        # Without it, thousands of groups would be looked at whenever one finishes.
        self._waits_for: Callable[[GroupSlot[T]], bool] | None = None
        self._num_lacking = 0
        self._ahead = min(staleness, 1) * batch_size  # groups that may be left when a step has its batch
        self._asked: float | None = None  # time of `ask` by the step that waits; None: no step waits
        self._last_taken = 0.0

    @property
    def items(self) -> list[T]:
        """Objects that `start` got for the groups that no step has taken yet, in the order of the calls."""
        return [slot.item for slot in self._slots]

    @property
    def in_progress(self) -> int:
        """Number of groups that are being sampled."""
        return self._num_counting - self._num_finished

    @property
    def waiting(self) -> int:
        """Number of finished groups that no step has taken yet, without those that filters have dropped."""
        return self._num_finished

    def ask(self, now: float) -> None:
        """Note that a training step waits for its batch. now: the time in seconds, by any clock."""
        self._asked = now

    def updated(self) -> None:
        """Note that the engines have new weights: add 1 to `version`."""
        self.version += 1

    def room(self) -> int:
        """Return the number of further groups that may be started now."""
        asked = self._asked is not None
        ahead = max(0, min(self._ahead, (self._steps_left - asked) * self._size))
        done = min(self._num_finished, self._size)
        for_batch = done + math.ceil((self._size - done) * self._in_flight) if asked else 0
        num_refused = len(self._slots) - self._num_counting
        limit = min(for_batch, self._most - num_refused) + ahead
        return max(0, int(limit) - self._num_counting)

    def start(self, item: T) -> GroupSlot[T]:
        """Add a group whose sampling starts now, and return its slot. `room` must have allowed this group.

        item: object that the caller keeps for the group.
        """
        slot = GroupSlot(item, self.version)
        self._slots.append(slot)
        self._num_counting += 1
        return slot

    def finish(self, slot: GroupSlot[T], counts: bool = True) -> None:
        """Note that a group has finished. counts: False if another group is to replace it in the batch."""
        slot.finished, slot.counts = self._num_ended, counts
        self._num_ended += 1
        if counts:
            self._num_finished += 1
        else:
            self._num_counting -= 1
        if self._waits_for:
            self._num_lacking -= self._waits_for(slot)
            if not counts or not self._num_lacking:
                self._waits_for = None

    def take(self, now: float) -> Taken[T] | None:
        """Take the batch for the step that called `ask`, and return the groups that leave the slots.

        The result is None if no step waits, or if the batch is not complete yet. The batch is smaller than
        the batch size only if the constructor's `most` allows no further groups.

        now: the time in seconds, by the clock of `ask`.
        """
        if self._asked is None:
            return None
        chosen = self._chosen()
        if chosen is None:
            if self.in_progress or self.room():
                return None
            chosen = [slot for slot in self._slots if slot.counts]
        batch = set(chosen)
        left = [slot for slot in self._slots if slot.counts and slot not in batch]
        taken = Taken(
            [slot.item for slot in self._slots if slot in batch],
            [slot.item for slot in self._slots if not slot.counts],
            [] if self._staleness else [slot.item for slot in left],
        )
        self._slots = left if self._staleness else []
        self._num_counting = len(self._slots)
        self._num_finished = sum(slot.finished is not None for slot in self._slots)
        self._pace(now)
        self._steps_left -= 1
        self._asked = self._waits_for = None
        return taken

    def _chosen(self) -> list[GroupSlot[T]] | None:
        """Return the groups of the batch, or None if the batch is not complete.

        Unless the order is fifo, a group may overtake groups that were started earlier. The overtaken groups
        must not become older than the staleness allows. So for each k below the staleness, at most k batches
        may be left of the groups that can wait for at most k further steps.

        If certain groups must finish before the batch can be complete, `_waits_for` becomes a function that
        returns True for them, and `_num_lacking` the number of them that must finish.
        """
        if self._num_finished < self._size or self._waits_for:
            return None
        slots = [slot for slot in self._slots if slot.counts]
        if self._order == Order.fifo:
            first = next((slot for slot in slots[: self._size] if slot.finished is None), None)
            if first:
                self._waits_for, self._num_lacking = lambda slot: slot is first, 1
                return None
            return slots[: self._size]
        within = slots if self._order == Order.ready else slots[: _WINDOW * self._size]
        done = [slot for slot in within if slot.finished is not None]
        if self._order == Order.ready:
            done.sort(key=lambda slot: slot.finished)
        chosen: list[GroupSlot[T]] = []
        for can_wait in range(self._staleness):
            oldest = self.version - self._staleness + can_wait
            num_old = sum(slot.version <= oldest for slot in slots)
            must = max(0, num_old - can_wait * self._size - len(chosen))
            already = set(chosen)
            found = [slot for slot in done if slot.version <= oldest and slot not in already][:must]
            if len(found) < must:
                self._waits_for = lambda slot, oldest=oldest: slot.version <= oldest
                self._num_lacking = must - len(found)
                return None
            chosen += found
        already = set(chosen)
        chosen += [slot for slot in done if slot not in already][: self._size - len(chosen)]
        if len(chosen) < self._size:
            self._waits_for, self._num_lacking = set(within).__contains__, self._size - len(chosen)
            return None
        return chosen

    def _pace(self, now: float) -> None:
        """Change `_ahead`, the number of groups that may be in progress or wait when a step has its batch.

        The number grows if the trainer had to wait for samples, and shrinks otherwise. If it were always the
        maximum, all samples would become as old as the staleness allows, which gains nothing if the trainer
        is slower than the engines.

        now: time at which the step takes its batch.
        """
        change = math.ceil(self._size / 4)
        if now - self._asked > _WAITED * (now - self._last_taken):
            self._ahead = min(self._ahead + change, self._staleness * self._size)
        else:
            self._ahead = max(self._ahead - change, min(self._staleness, 1) * self._size)
        self._last_taken = now
