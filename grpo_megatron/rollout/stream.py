"""The stream of groups: they are sampled in a thread, and each training step takes its batch from it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_megatron.batch.sample import Group
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig
from grpo_megatron.rollout.group_round import GroupRound
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.slots import GroupSlot, GroupSlots, Taken
from grpo_megatron.samples.entries import LeftOut


@dataclass(eq=False)
class Sampled:
    """A group that a GroupStream samples for training. It has no samples until it is finished."""

    group: Group
    """The group."""
    left_out: LeftOut | None = None
    """The group's samples, and why the group is not trained on; None if it is, or is not finished yet."""


# Seconds between two checks whether engines that were lost have come back and need the weights.
_REVIVE_SECONDS = 1.0

# Function that decides whether a finished group is trained on, and sets Sampled.left_out. It returns False
# if another group takes the place of this one in the batch.
Judge = Callable[[Sampled], bool]


class GroupStream:
    """Samples groups in a thread of its own, as far ahead of the training steps as its GroupSlots allow.

    A round of the RolloutManager begins when further groups may be started. It ends when no group is being
    sampled any more. An error in the thread ends the sampling, and is raised by the next call of `take`.

    lock: protects the GroupSlots, and the source of prompts from which new groups are made
    """

    def __init__(
        self,
        manager: RolloutManager,
        start: Callable[[int], list[Group]],
        judge: Judge,
        rollout: RolloutConfig,
        slots: GroupSlots[Sampled],
    ):
        """Create a stream of groups. The first call of `take` starts the thread that samples them.

        manager: samples the groups.
        start: function that returns new groups, whose samples are still missing. Its argument is the number
            of groups. The thread calls this function, and holds the stream's `lock` during the call.
        judge: function that decides whether a finished group is trained on. If not, it sets the group's
            Sampled.left_out. It returns False if another group is to be sampled in place of this one. The
            thread calls this function.
        rollout: settings of the sampling.
        slots: decides how many groups are sampled, and which ones a step takes.
        """
        self._manager, self._start, self._judge = manager, start, judge
        self._rollout, self._slots = rollout, slots
        self.lock = threading.RLock()  # protects the slots, and all attributes below
        self._changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task | None = None
        self._chosen: Taken[Sampled] | None = None  # complete, but not handed over
        self._taken: Taken[Sampled] | None = None
        self._error: BaseException | None = None
        self._pauses, self._is_opening, self._is_closed = 0, False, False
        # Time at which the round was opened, or `take_busy` was called last within it; None without a round.
        self._since: float | None = None
        self._busy = 0.0

    def take(self, revive: Callable[[], None] = lambda: None) -> Taken[Sampled]:
        """Wait for the batch of the next training step, and return it.

        The result also has the finished groups that others have replaced, and the groups that are not needed
        any more. Raises the error that ended the sampling, if there was one.

        revive: called about every second while this method waits and no engine serves. It may sync weights,
            because no group is started meanwhile.
        """
        with self._changed:
            self._slots.ask(time.perf_counter())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
                self._thread.start()
            self._wake_up()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._taken or self._error, _REVIVE_SECONDS)
                taken, self._taken = self._taken, None
                if taken is None and self._error:
                    raise self._error
            if taken:
                return taken
            if not self._manager.num_serving:
                with self.updating(changed=False):
                    revive()

    @contextmanager
    def updating(self, changed: bool = True) -> Iterator[None]:
        """Return a context in which the engines can get weights, because no group is started within it.

        With rollout.on_update=wait, the context begins when no group is being sampled any more, or when no
        engine serves. Otherwise, groups in progress go on.

        changed: True if the weights are new. The version from which the age of groups is counted then
            increases by one. False if the engines get the weights of the last update again.
        """
        with self._changed:
            self._pauses += 1
            if self._rollout.on_update == OnUpdate.wait:
                self._wait_for_the_end()
            # The engines refuse to open a round during an update.
            self._changed.wait_for(lambda: not self._is_opening or self._error)
        try:
            yield
        finally:
            with self._changed:
                if changed:
                    self._slots.updated()
                self._pauses -= 1
                self._wake_up()

    def _wait_for_the_end(self) -> None:
        while not self._changed.wait_for(lambda: self._since is None or self._error, _REVIVE_SECONDS):
            if not self._manager.num_serving:
                return  # they serve again after the update

    def take_busy(self) -> float:
        """Return the number of seconds, since the last call, during which groups were being sampled."""
        with self.lock:
            now = time.perf_counter()
            busy = self._busy + (now - self._since if self._since else 0.0)
            self._busy, self._since = 0.0, now if self._since else None
            return busy

    def close(self) -> None:
        """Cancel the groups that are being sampled, and end the thread."""
        with self._changed:
            self._is_closed = True
            if self._main:
                self._loop.call_soon_threadsafe(self._main.cancel)
        if self._thread:
            self._thread.join()

    def _wake_up(self) -> None:
        if self._loop:
            self._loop.call_soon_threadsafe(self._woken.set)

    def _run(self) -> None:
        error: BaseException = asyncio.CancelledError()
        try:
            asyncio.run(self._sample_until_closed())
        except BaseException as raised:  # `take` raises it in the driver's thread
            error = raised
        with self._changed:
            self._error, self._since = error, None
            self._changed.notify_all()

    async def _sample_until_closed(self) -> None:
        self._woken = asyncio.Event()
        with self.lock:
            self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        over_updates = self._rollout.on_update != OnUpdate.wait
        try:
            while not self._is_closed:
                if self._begun():
                    async with self._manager.round(
                        Caller.train, self._rollout, over_updates, outlives_engines=True
                    ) as round:
                        self._opened()
                        await self._sample_in(round)
                    self._ended()
                else:
                    await self._next_change()
        finally:
            with self.lock:
                self._loop = self._main = None

    async def _next_change(self) -> None:
        await self._woken.wait()
        self._woken.clear()

    def _begun(self) -> bool:
        """Pass the batch to `take` if it is complete. Return True if a round must begin for more groups."""
        with self._changed:
            self._choose()
            self._hand_over()
            is_necessary = self._room() > 0
            if is_necessary:
                self._since, self._is_opening = time.perf_counter(), True
            return is_necessary

    def _opened(self) -> None:
        with self._changed:
            self._is_opening = False
            self._changed.notify_all()

    def _ended(self) -> None:
        with self._changed:
            self._busy += time.perf_counter() - self._since
            self._since = None
            self._hand_over()
            self._changed.notify_all()

    async def _sample_in(self, round: GroupRound) -> None:
        """Sample groups in a round, until no group is being sampled and no further one may be started.

        Groups that are not needed any more do not count. Batches that become complete meanwhile are handed
        over to `take`.
        """
        finished: list[tuple[GroupSlot[Sampled], asyncio.Task[Group]]] = []

        def note(slot: GroupSlot[Sampled], task: asyncio.Task[Group]) -> None:
            finished.append((slot, task))
            self._woken.set()

        while True:
            done, finished[:] = finished[:], []
            for slot, task in done:
                slot.item.group = task.result()
                counts = self._judge(slot.item)
                with self.lock:
                    self._slots.finish(slot, counts)
            with self._changed:
                self._choose()
                slots = self._started()
                if not self._slots.in_progress:
                    return
                self._hand_over()
            for slot in slots:
                task = round.start(slot.item.group.prompt, slot.item.group.group_id)
                task.add_done_callback(lambda task, slot=slot: note(slot, task))
            await self._next_change()

    def _room(self) -> int:
        return 0 if self._pauses or self._is_closed else self._slots.room()

    def _started(self) -> list[GroupSlot[Sampled]]:
        room = self._room()
        return [self._slots.start(Sampled(group)) for group in self._start(room)] if room else []

    def _choose(self) -> None:
        if self._chosen is None:
            self._chosen = self._slots.take(time.perf_counter())

    def _hand_over(self) -> None:
        """Pass the complete batch in `_chosen`, if there is one, to the call of `take` that waits for it."""
        if self._chosen:
            self._taken, self._chosen = self._chosen, None
            self._changed.notify_all()
