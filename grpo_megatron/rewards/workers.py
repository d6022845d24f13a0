"""Rewards in processes of their own, while generation goes on."""

import math
import multiprocessing
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from grpo_megatron.errors import UserError
from grpo_megatron.rewards.base import resolve_reward, time_limit

_reward = None  # set once per worker process by _initialize
_settings = None


# What a worker may take to start: a spawned interpreter and the reward's imports.
_START_SECONDS = 120.0


@dataclass(frozen=True)
class RewardTask:
    """What a reward function gets to see. uid: of the prompt, for error messages."""

    uid: int
    prompt: str
    response: str
    answer: str
    record: dict


class RewardWorkers:
    """A pool of reward processes; config: config.schema.RewardConfig.

    The function is resolved here first, so that a wrong name fails before any work is done.
    """

    def __init__(self, config):
        resolve_reward(config)
        self._name, self._timeout = config.function, config.timeout
        self._unfinished, self._lock = 0, threading.Lock()
        self._pool = ProcessPoolExecutor(
            max_workers=config.workers,
            # Not fork: this process has Ray's threads, and a forked lock stays locked forever.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_initialize,
            initargs=(config,),
        )

    def submit(self, tasks: list[RewardTask]) -> Future:
        """A future of [(reward, components)] for the tasks, in order; see `result`."""
        try:
            future = self._pool.submit(_score_all, tasks)
        except BrokenProcessPool as error:
            raise self._died() from error
        self._count(len(tasks))
        future.add_done_callback(lambda _: self._count(-len(tasks)))
        return future

    def _count(self, change: int) -> None:
        with self._lock:
            self._unfinished += change

    def _died(self) -> UserError:
        return UserError(f"reward {self._name}: a reward process died (out of memory, or it called exit)")

    def result(self, future: Future) -> list[tuple[float, dict[str, float]]]:
        """Wait for `submit`'s future. Raises UserError for a reward that failed or is not a number.

        The wait is bounded by the time limits of everything queued: the limit inside a worker
        interrupts Python, but not a C extension that never returns.
        """
        limit = self._timeout * max(1, self._unfinished) + _START_SECONDS
        try:
            return future.result(timeout=limit)
        except BrokenProcessPool as error:
            raise self._died() from error
        except FutureTimeout as error:
            self._kill()
            raise UserError(
                f"reward {self._name} did not return within reward.timeout={self._timeout} s, and cannot be interrupted"
            ) from error

    def _kill(self) -> None:
        for process in list((self._pool._processes or {}).values()):
            process.kill()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._kill()  # nobody waits for a result any more


def _initialize(config) -> None:
    global _reward, _settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which closes the pool
    _reward = resolve_reward(config)
    _settings = (config.function, config.timeout)


def _score_all(tasks: list[RewardTask]) -> list[tuple[float, dict[str, float]]]:
    return [_score(task) for task in tasks]


def _score(task: RewardTask) -> tuple[float, dict[str, float]]:
    name, timeout = _settings
    failed = f"reward {name} failed on record {task.uid} (response {task.response[:80]!r})"
    try:
        # Interrupts Python code; the function runs in the main thread of this process.
        with time_limit(timeout) as limit:
            value = _reward(prompt=task.prompt, response=task.response, answer=task.answer, record=task.record)
    except Exception as error:
        raise UserError(f"{failed}: {type(error).__name__}: {error}") from error
    if limit.reached:
        raise UserError(f"{failed}: took longer than reward.timeout={timeout} s")
    components = dict(value) if isinstance(value, dict) else {"reward": value}
    try:
        reward = float(components.pop("reward"))
        components = {key: float(number) for key, number in components.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"reward {name} returned {value!r} for record {task.uid}; it must return a number, or a dict with 'reward'"
        ) from error
    if not math.isfinite(reward):
        raise UserError(
            f"reward {name} returned {reward} for record {task.uid} (response {task.response[:80]!r}); it must be finite"
        )
    return reward, components
