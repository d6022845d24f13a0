"""Operations on a RolloutManager and its engines, which tests try in many orders."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.sglang.pool import EnginePool

# The answer of a prompt whose reward fails.
FAILS = "fails"
# Samples of a group; requests of a client that are in flight at a time; tokens of short and long responses.
N, CONCURRENCY, SHORT, LONG = 2, 4, 4, 40
# Seconds until an operation is taken for one that waits forever.
LIMIT = 60.0


def all_orders(names: Sequence[str], length: int) -> list[str]:
    """Return a sequence in which every order of `length` names, repetitions included, occurs exactly once.

    It has len(names) ** length + length - 1 names (a de Bruijn sequence, made by Martin's greedy algorithm:
    always append the last name that does not repeat an order).
    """
    sequence, seen = [names[0]] * (length - 1), set()
    while True:
        recent = sequence[len(sequence) - length + 1 :]
        following = next((name for name in reversed(names) if (*recent, name) not in seen), None)
        if following is None:
            return sequence
        seen.add((*recent, following))
        sequence.append(following)


class Interrupting:
    """A sampler that acts like another one, and sends this process a Ctrl-C while its first group runs."""

    def __init__(self, sampler):
        self._sampler, self.begin, self.end = sampler, sampler.begin, sampler.end

    async def sample(self, round, request, listener):
        running = asyncio.ensure_future(self._sampler.sample(round, request, listener))
        if request.key == 0:
            await asyncio.sleep(0.02)
            signal.raise_signal(signal.SIGINT)
        return await running


class Operations:
    """The operations. Each checks that what it does has worked, and that nothing of another one is in it."""

    NAMES = (
        "generate",
        "abort",
        "fail",
        "interrupt",
        "evaluate_beside",
        "update",
        "update_within_a_round",
        "sleep_and_wake",
        "end_twice",
    )

    def __init__(
        self,
        manager: RolloutManager,
        engines: EnginePool,
        prompts: list[Prompt],
        sync: Callable[[], None],
        late: Callable[[RoundId], list],
        left: Callable[[], int],
    ):
        """Find what the engines answer to each prompt by itself.

        prompts: five or more prompts. The reward of the last one fails. Of the others, four are used whose
            answers differ from the beginning.
        sync: fills the engines with the weights again, after they slept.
        late: ends a round twice, sends it a request nevertheless, and returns the results of its polls.
        left: returns the number of requests that the engines still have.
        """
        self._manager, self._engines, self._sync, self._late, self._left = manager, engines, sync, late, left
        *candidates, self._failing = prompts
        self._alone = {}
        for prompt in candidates:
            # Each in a round of its own, in which its answer cannot be another one's.
            (group,) = manager.generate([prompt], self._config(SHORT))
            ids = group.samples[0].arrays.response_ids.tolist()
            if ids not in self._alone.values():
                self._alone[prompt.uid] = ids
        self._prompts = [prompt for prompt in candidates if prompt.uid in self._alone][:4]
        assert len(self._prompts) == 4, self._alone

    def run_all_orders(self, length: int) -> None:
        """Run operations one after the other, so that every order of `length` of them occurs."""
        done = []
        for name in all_orders(self.NAMES, length):
            done.append(name)
            with _limited(" → ".join(done[-length - 2 :])):
                getattr(self, name)()
                assert self._left() == 0, done[-length - 2 :]

    def _config(self, length: int) -> RolloutConfig:
        return RolloutConfig(n=N, temperature=0.0, max_response_length=length)

    def _check(self, groups: list[Group], prompts: list[Prompt], versions: Iterable[int] = ()) -> None:
        """Check that groups are the answers to prompts. versions: those that are possible; (): the newest."""
        versions = set(versions) or {self._engines.weight_version}
        assert [group.prompt.uid for group in groups] == [prompt.uid for prompt in prompts]
        for prompt, group in zip(prompts, groups, strict=True):
            assert len(group.samples) == N
            for sample in group.samples:
                assert sample.arrays.prompt_ids.tolist() == prompt.ids.tolist()
                assert sample.arrays.response_ids.tolist() == self._alone[prompt.uid]
                assert {span.version for span in sample.weight_spans} <= versions

    def generate(self) -> None:
        self._check(self._manager.generate(self._prompts[:3], self._config(SHORT)), self._prompts[:3])

    def abort(self) -> None:
        """End a round while two of its three groups are sampled."""

        async def first() -> list[Group]:
            async with self._manager.round(Caller.train, self._config(SHORT)) as round:
                tasks = list(map(round.start, self._prompts[:3], self._manager.take_ids(3)))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for refused in (self._engines.begin_update, self._engines.release_memory):
                    with pytest.raises(UserError, match=r"the engines cannot .* during a round of `train`"):
                        refused()
                with pytest.raises(UserError, match="a round of `train` is in"):
                    await asyncio.to_thread(self.generate)
                return [task.result() for task in done]

        groups = asyncio.run(first())
        self._check(groups, [group.prompt for group in groups])

    def update_within_a_round(self) -> None:
        """Begin an update while requests run, send further ones, and end it. The weights stay the same."""
        before = self._engines.weight_version

        async def sampled() -> list[Group]:
            async with self._manager.round(Caller.train, self._config(SHORT), over_updates=True) as round:
                started = [round.start(self._prompts[0], *self._manager.take_ids(1))]
                await asyncio.sleep(0.002)
                with pytest.raises(UserError, match="the engines cannot release memory during a round"):
                    self._engines.release_memory()
                await asyncio.to_thread(self._engines.begin_update)
                started += map(round.start, self._prompts[1:3], self._manager.take_ids(2))
                await asyncio.sleep(0.02)
                await asyncio.to_thread(self._engines.end_update, before + 1)
                return await asyncio.gather(*started)

        groups = asyncio.run(sampled())
        self._check(groups, self._prompts[:3], {before, before + 1})

    def fail(self) -> None:
        with pytest.raises(UserError, match="planted"):
            self._manager.generate([self._failing, *self._prompts], self._config(LONG))

    def interrupt(self) -> None:
        samplers = {sampler: Interrupting(sampler) for sampler in self._manager._samplers}
        manager = RolloutManager(self._engines, [samplers[one] for one in self._manager._samplers])
        with pytest.raises(KeyboardInterrupt):
            manager.generate(self._prompts, self._config(LONG))

    def evaluate_beside(self) -> None:
        """Evaluate in another thread, with other prompts and the same keys of requests."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(
                self._manager.generate, self._prompts[1:], self._config(SHORT), Caller.evaluate
            )
            groups = self._manager.generate(self._prompts[:3], self._config(SHORT))
            others = other.result()
        self._check(groups, self._prompts[:3])
        self._check(others, self._prompts[1:])
        assert len({group.group_id for group in (*groups, *others)}) == len(groups) + len(others)

    def _is_refused(self, because: str) -> None:
        for call in (self.generate, lambda: self._engines.score_on_all([[1, 2]])):
            with pytest.raises(UserError, match=f"^the engines cannot generate: {because}"):
                call()

    def update(self) -> None:
        self._engines.begin_update()
        self._is_refused("a weight update has begun")
        for refused in (self._engines.begin_update, self._engines.release_memory):
            with pytest.raises(UserError, match="a weight update has begun and has not ended"):
                refused()
        self._engines.end_update(self._engines.weight_version + 1)

    def sleep_and_wake(self) -> None:
        """Do everything twice."""
        engines = self._engines
        for _ in range(2):
            engines.release_memory()
        self._is_refused("they have released memory")
        with pytest.raises(UserError, match="released the memory of their weights"):
            engines.begin_update()
        for _ in range(2):
            engines.resume_weights()
        for _ in range(2):
            self._sync()
        self._is_refused("they have released memory")
        for _ in range(2):
            engines.resume_kv_cache()

    def end_twice(self) -> None:
        for caller in Caller:
            with self._engines.admission.round(caller.value) as round:
                assert set(self._late(round)) == {None}


@contextmanager
def _limited(what: str):
    """Interrupt the main thread if the context takes longer than LIMIT seconds, and fail the test then."""
    over = threading.Event()

    def interrupt() -> None:
        over.set()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(LIMIT, interrupt)
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        timer.cancel()
    assert not over.is_set(), f"{what}: not done after {LIMIT:.0f} s"
