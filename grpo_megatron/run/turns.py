"""Device sharing between engines and the trainer's ranks: one ring of transitions, and memory after each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

from grpo_megatron.monitoring.monitor import Monitor

_GIB = 2**30


class State(Enum):
    """Contents of the shared devices. The value describes them in messages."""

    serving = "engines serve, ranks sleep"
    vacant = "engines have given back weights and KV cache, ranks sleep"
    training = "ranks are awake, engines have given back weights and KV cache"
    filling = "ranks are awake, engines have room for weights, but no KV cache"
    filled = "ranks are awake, engines have the newest weights, but no KV cache"
    leaving = "ranks sleep, engines have the newest weights, but no KV cache"


class Transition(NamedTuple):
    """A transition that is allowed only in the state `before`."""

    name: str
    before: State
    after: State


# The transitions form one ring. Weights are copied from memory to memory, so both sides must hold them at the
# same time, but no more than them. Therefore the KV cache is released before the ranks wake, and comes back
# when they sleep.
RING = (
    Transition("release", State.serving, State.vacant),
    Transition("wake", State.vacant, State.training),
    Transition("resume_weights", State.training, State.filling),
    Transition("sync", State.filling, State.filled),
    Transition("sleep", State.filled, State.leaving),
    Transition("resume_kv_cache", State.leaving, State.serving),
)
_BY_NAME = {transition.name: transition for transition in RING}


class SharingEngines(Protocol):
    """Engines that share devices. Implemented by sglang.pool.EnginePool."""

    def release_memory(self) -> None: ...

    def resume_weights(self) -> None: ...

    def resume_kv_cache(self) -> None: ...

    def occupied(self) -> int: ...


class SharingRanks(Protocol):
    """Ranks that share devices. Implemented by trainer.policy.PolicyTrainer."""

    def wake(self) -> None: ...

    def make_room(self) -> None: ...

    def sleep(self) -> dict[str, float]: ...

    def occupied(self) -> int: ...


class Turns:
    """Device sharing. It begins when the engines are up and the ranks have not started.

    Each transition is a phase of the monitor, and raises RuntimeError if it is not the next one.

    metrics: memory in GiB after each transition, of the fullest engine and the fullest rank. The first round
        is also shown as text.
    """

    def __init__(self, engines: SharingEngines, monitor: Monitor):
        self._engines, self._monitor = engines, monitor
        self._ranks: SharingRanks | None = None
        self.state = State.serving
        self.metrics: dict[str, float] = {}

    def release(self) -> None:
        """Have the engines release the memory of their weights and KV cache."""
        with self._transition("release"):
            self._engines.release_memory()

    def started(self, ranks: SharingRanks) -> None:
        """Take note that the ranks are up, which is the first `wake`."""
        with self._transition("wake"):
            self._ranks = ranks

    def wake(self) -> None:
        with self._transition("wake"):
            self._ranks.wake()

    def resume_weights(self) -> None:
        """Have the engines allocate memory for weights again, which `sync` must fill."""
        with self._transition("resume_weights"):
            # Memory is fullest here. Release what training has left, such as FP8 copies of the weights,
            # before the engines' weights come.
            self._ranks.make_room()
            self._engines.resume_weights()

    def sync(self, run: Callable[[], None]) -> None:
        """Call `run`, which copies the trainer's weights into the engines."""
        with self._transition("sync"):
            run()

    def sleep(self) -> None:
        with self._transition("sleep"):
            self.metrics |= self._ranks.sleep()

    def resume_kv_cache(self) -> None:
        """Have the engines allocate an empty KV cache, so that they serve again."""
        with self._transition("resume_kv_cache"):
            self._engines.resume_kv_cache()

    def to_ranks(self) -> None:
        """Go from generation to training. Does nothing if the ranks have the devices already."""
        if self.state != State.training:
            self.release()
            self.wake()

    def to_engines(self, sync: Callable[[], None]) -> None:
        """Go from training to generation.

        sync: see `sync`. It is required, because the engines have released their weights.
        """
        self.resume_weights()
        self.sync(sync)
        self.sleep()
        self.resume_kv_cache()

    @contextmanager
    def _transition(self, name: str) -> Iterator[None]:
        wanted = _BY_NAME[name]
        if self.state != wanted.before:
            follows = next(transition.name for transition in RING if transition.before == self.state)
            raise RuntimeError(f"`{name}` is out of order: {self.state.value}, and `{follows}` is next")
        with self._monitor.phases(name):
            yield
        self.state = wanted.after
        self._measure(name)

    def _measure(self, name: str) -> None:
        engine, rank = self._engines.occupied() / _GIB, self._ranks.occupied() / _GIB if self._ranks else 0.0
        found = {f"memory/after_{name}/engine_gib": engine, f"memory/after_{name}/rank_gib": rank}
        if not self.metrics.keys() >= found.keys():
            self._monitor.say(
                f"memory after {name}: {engine:.3f} GiB in the fullest engine, {rank:.3f} GiB in the fullest "
                "rank"
            )
        self.metrics |= found
