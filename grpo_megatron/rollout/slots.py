"""Slots: how many groups may be sampled ahead of training, and which of them a step trains on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_megatron.config.rollout import Order

T = TypeVar("T")

# A step during which the trainer waited for samples for more than this share of its time ends with more
# groups in progress; any other step with fewer.
_WAITED = 0.05
# With rollout.order=window, the batches from whose groups, in the order of their start, a step takes its own.
_WINDOW = 2


@dataclass(eq=False)
class GroupSlot(Generic[T]):
    """A group from its start until a step has taken it."""

    item: T
    """What the caller keeps about the group."""
    version: int
    """`GroupSlots.version` when the group was started. None of its tokens is of older weights."""
    finished: int | None = None
    """Number of groups that had finished before this one; None while it is being sampled."""
    counts: bool = True
    """False if the group finished, but another one is to take its place in the batch."""


@dataclass(frozen=True)
class Taken(Generic[T]):
    """The groups that leave the slots with a step. Each list is in the order in which they were started."""

    batch: list[T]
    """Groups of the batch."""
    refused: list[T]
    """Finished groups in whose place others were sampled, since the step before."""
    surplus: list[T]
    """Groups that are too old for the steps to come, finished or not. Only with staleness 0."""


class GroupSlots(Generic[T]):
    """Decides when groups may be started, and puts finished groups together to batches.

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
        """Begin before the first step, without groups.

        batch_size: number P of groups of a batch.
        staleness: rollout.staleness.
        order: which of the finished groups a step takes.
        in_flight: factor of at least 1: while a batch lacks N groups, N * in_flight are sampled for it. With
            more than 1, the batch is of the groups that finish first.
        most: maximum number of groups to start for one batch, if some are refused.
        last_step: number of steps, beyond which nothing is sampled.
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
        self._asked: float | None = None  # time at which the step asked that waits for its batch
        self._last_taken = 0.0

    @property
    def items(self) -> list[T]:
        """The items of all groups that no step has taken, in the order of their start."""
        return [slot.item for slot in self._slots]

    @property
    def in_progress(self) -> int:
        """Number of groups that are being sampled."""
        return self._num_counting - self._num_finished

    @property
    def waiting(self) -> int:
        """Number of finished groups that wait for the step that takes them."""
        return self._num_finished

    def ask(self, now: float) -> None:
        """Note that a step waits for its batch. now: the time in seconds, by any clock."""
        self._asked = now

    def updated(self) -> None:
        """Note that groups which are started from now on are sampled with newer weights."""
        self.version += 1

    def room(self) -> int:
        """Return the number of groups that may be started now."""
        asked = self._asked is not None
        ahead = max(0, min(self._ahead, (self._steps_left - asked) * self._size))
        done = min(self._num_finished, self._size)
        for_batch = done + math.ceil((self._size - done) * self._in_flight) if asked else 0
        num_refused = len(self._slots) - self._num_counting
        limit = min(for_batch, self._most - num_refused) + ahead
        return max(0, int(limit) - self._num_counting)

    def start(self, item: T) -> GroupSlot[T]:
        """Start a group, for which there must be room."""
        slot = GroupSlot(item, self.version)
        self._slots.append(slot)
        self._num_counting += 1
        return slot

    def finish(self, slot: GroupSlot[T], counts: bool = True) -> None:
        """Note that a group has finished. counts: False if another one is to take its place."""
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
        """Return what the step takes that asked for its batch; None if no step asked, or it has to wait.

        The batch is smaller than the batch size only if `most` does not allow further groups.

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
        """Return the groups of the batch, or None if it is not complete.

        With another order than fifo, groups may overtake others, but not so many that the others would become
        older than the staleness: of the groups that can wait for at most k further steps, at most k batches
        may be left.
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
        """Change the number of groups that may be left when a step has its batch.

        It grows if the trainer waits for samples, and shrinks if samples wait for the trainer. Otherwise all
        samples would become as old as the staleness allows, which gains nothing if the trainer is slower.
        """
        change = math.ceil(self._size / 4)
        if now - self._asked > _WAITED * (now - self._last_taken):
            self._ahead = min(self._ahead + change, self._staleness * self._size)
        else:
            self._ahead = max(self._ahead - change, min(self._staleness, 1) * self._size)
        self._last_taken = now
