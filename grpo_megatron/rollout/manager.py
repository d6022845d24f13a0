"""RolloutManager: prompts in, groups of scored samples out."""

import contextlib
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import ray

from grpo_megatron.batch import Group, Prompt, Sample
from grpo_megatron.cluster.processes import fetch, gather
from grpo_megatron.errors import UserError
from grpo_megatron.rewards import RewardWorkers
from grpo_megatron.rewards.workers import RewardTask
from grpo_megatron.rollout.engine import Completion, Request

# How long one poll may wait in the engine. Only bounds how late a dead-lock is noticed.
_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature 0: greedy."""

    n: int
    temperature: float
    max_response_length: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0  # below 1 only where nothing is trained on the samples

    def parameters(self) -> dict:
        """SGLang's sampling parameters."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1,
            "max_new_tokens": self.max_response_length,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
        }


class RolloutManager:
    """Keeps the engines busy, scores samples as they end, and puts groups together again."""

    def __init__(self, engines: list, who: dict, config, rewards: RewardWorkers, decode):
        """engines, who: of `start_engines`; config: config.schema.RolloutConfig; decode: ids -> text."""
        self._engines = engines
        self._who = who
        self._config = config
        self._rewards = rewards
        self._decode = decode
        self._next_group = 0
        self.weight_version = 0

    def wait_until_ready(self) -> None:
        self._on_all("ready", timeout=self._config.engine.start_timeout)

    def _on_all(self, method: str, *args, timeout: float | None = None) -> dict:
        calls = {index: getattr(engine, method).remote(*args) for index, engine in enumerate(self._engines)}
        return gather(calls, self._who, timeout)

    # -- generation ---------------------------------------------------------------------------

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Group]:
        """`sampling.n` scored samples for each prompt, groups in the order of the prompts.

        Blocks until all are done. Raises UserError if an engine dies or nothing finishes for
        rollout.engine.request_timeout seconds.
        """
        parameters = sampling.parameters()
        keys = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        # Samples of one group go to one engine, whose prefix cache then holds the prompt.
        queues = [deque() for _ in self._engines]
        for p, s in keys:
            queues[p % len(queues)].append(Request((p, s), prompts[p].ids.tolist(), parameters))
        samples: dict[tuple[int, int], Sample] = {}
        scoring = []
        for completions in self._run(queues):
            finished = {c.key: self._sample(prompts[c.key[0]], sampling.n, c) for c in completions}
            tasks = [_task(prompts[p], sample) for (p, _), sample in finished.items()]
            scoring.append((finished, self._rewards.submit(tasks)))
        for finished, future in scoring:
            for (key, sample), score in zip(finished.items(), self._rewards.result(future), strict=True):
                samples[key] = sample.scored(*score)
        groups = [
            Group(self._next_group + p, prompt, tuple(samples[p, s] for s in range(sampling.n)))
            for p, prompt in enumerate(prompts)
        ]
        self._next_group += len(prompts)
        return groups

    def _run(self, queues: list[deque]):
        """Feed each engine its queue, at most max_concurrency at a time; yields what finishes."""
        running = [0] * len(queues)
        polls: dict = {}
        last_progress = time.monotonic()
        while any(queues) or any(running):
            for index, (engine, queue) in enumerate(zip(self._engines, queues, strict=True)):
                room = self._config.max_concurrency - running[index]
                if queue and room > 0:
                    batch = [queue.popleft() for _ in range(min(room, len(queue)))]
                    running[index] += len(batch)
                    # Not waited for: if it fails, the poll below reports the same engine.
                    engine.submit.remote(batch)
                if running[index] and index not in polls.values():
                    polls[engine.poll.remote(_POLL_SECONDS)] = index
            ready, _ = ray.wait(list(polls), num_returns=1)
            index = polls.pop(ready[0])
            completions: list[Completion] = fetch(ready[0], *self._who[index])
            if completions:
                last_progress = time.monotonic()
                running[index] -= len(completions)
                yield completions
            elif time.monotonic() - last_progress > self._config.engine.request_timeout:
                raise UserError(
                    f"no sample finished for {self._config.engine.request_timeout:.0f} s with {sum(running)} in flight; "
                    f"see {', '.join(log for _, log in self._who.values())}"
                )

    def _sample(self, prompt: Prompt, n: int, completion: Completion) -> Sample:
        p, s = completion.key
        if completion.finish_reason == "abort":
            raise UserError(f"the engine aborted a request (prompt record {prompt.uid}); see the engine's log")
        stale = {span.version for span in completion.weight_spans} - {self.weight_version}
        if stale:
            raise UserError(
                f"the engine answered with weight version {sorted(stale)}, the trainer's is {self.weight_version}: "
                "an update did not reach it; see the engine's log"
            )
        return Sample(
            group_id=self._next_group + p,
            trajectory_id=(self._next_group + p) * n + s,
            prompt_ids=prompt.ids,
            response_ids=completion.response_ids,
            loss_mask=np.ones(len(completion.response_ids), dtype=np.bool_),
            rollout_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            weight_spans=completion.weight_spans,
            response_text=self._decode(completion.response_ids),
            routing=_whole_routing(completion.routing),
        )

    # -- weights ------------------------------------------------------------------------------

    def update_weights(self, buckets, version: int) -> None:
        """Load new weights into all engines; buckets: iterable of references to weights.buckets.Bucket.

        One update session per engine. Samples made from now on carry `version`. Raises if an
        engine refuses any part; its weights are then undefined and the run must end.
        """
        self._on_all("begin_update")
        for bucket in buckets:
            self._on_all("load_bucket", bucket)
        self._on_all("end_update", version)
        self.weight_version = version

    def state_dict(self) -> dict:
        """No sample is kept between steps, so only the counters."""
        return {"next_group": self._next_group, "weight_version": self.weight_version}

    def load_state_dict(self, state: dict) -> None:
        self._next_group, self.weight_version = state["next_group"], state["weight_version"]

    def close(self) -> None:
        for engine in self._engines:
            # Asked first, so that SGLang ends its children; one that is dead already ended them.
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(engine.shutdown.remote(), timeout=20)
            ray.kill(engine)


def _whole_routing(routing: np.ndarray | None) -> np.ndarray | None:
    """With a row for the last token, which the engine sampled but never computed.

    Nothing depends on it: the last position predicts nothing, and no other attends to it.
    """
    if routing is None:
        return None
    anything = np.broadcast_to(np.arange(routing.shape[2], dtype=routing.dtype), (1, *routing.shape[1:]))
    return np.concatenate([routing, anything])


def _task(prompt: Prompt, sample: Sample) -> RewardTask:
    return RewardTask(prompt.uid, prompt.text, sample.response_text, prompt.answer, prompt.fields)
