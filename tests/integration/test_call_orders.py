"""All orders of public calls, in pairs and triples, against a real engine and its rollout worker."""

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.load import read_config
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.groups import Caller, GroupRequest
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.worker import RolloutWorkers
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.sglang.request import Request
from tests.call_orders import CONCURRENCY, FAILS, Operations
from tests.integration.one_rank import sync_from

# In `make test`, tests/unit/test_call_orders.py tries all pairs without SGLang.
pytestmark = pytest.mark.slow

PROMPTS = ["12+34", "77-19", "5", "10+10", "99", "1-1", "6+0+6", "80", "2", "31+7", "44-4", "3+4"]


def requests_left(engine) -> int:
    """Return how many requests an engine's actor has, or SGLang's part of it."""
    return len(engine._control._manager.rid_to_state) + engine._rounds.running


class Late:
    """Calls of a round that arrive after its end, at the engine and at the worker."""

    def __init__(self, engines, workers, prompt):
        self._engine, self._worker = engines._engines[0], workers.samplers[0]._actor
        self._prompt = prompt

    def __call__(self, round):
        requests = [Request((0, 0), self._prompt.ids.tolist(), {"max_new_tokens": 2})]
        groups = [GroupRequest(0, 0, 0, self._prompt)]
        found = []
        for actor, items in ((self._worker, groups), (self._engine, requests)):
            ray.get([actor.end.remote(round), actor.end.remote(round)])
            ray.get(actor.submit.remote(round, items))
            found.append(ray.get(actor.poll.remote(round, 0.01)))
        return found


@pytest.fixture(scope="module")
def operations(ray_here, arithmetic, tmp_path_factory):
    path, logs = str(arithmetic / "model"), str(tmp_path_factory.mktemp("logs"))
    changes = (
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=4096",
        f"rollout.max_concurrency={CONCURRENCY}",
        "reward.function=tests.integration.helpers:digits_unless_it_fails",
        "reward.workers=1",
    )
    config = read_config(None, [f"model.path={path}", f"data.train={arithmetic}/data/train.jsonl", *changes])
    tokenizer, detector = PromptTokenizer(path), HangDetector(logs, 600)
    prompts = [
        Prompt(uid, tokenizer.prompt(text, "f:1")[1], text, FAILS if text == PROMPTS[-1] else "0")
        for uid, text in enumerate(PROMPTS)
    ]
    cluster = allocate(config, num_ranks=0, num_engines=1)
    engines = EnginePool(cluster, config.rollout, config.model, 0, logs, detector, shared=True)
    workers = RolloutWorkers(config, cluster, engines, logs, detector)
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    try:
        engines.wait_until_ready()
        workers.wait_until_ready()
        engines.admit()
        with sync_from(path, weights, engines) as sync:

            def left():
                return ray.get(engines._engines[0].__ray_call__.remote(requests_left))

            late = Late(engines, workers, prompts[0])
            manager = RolloutManager(engines, workers.samplers)
            yield Operations(manager, engines, prompts, sync.run, late, left)
            for _ in range(2):
                workers.close()
                engines.close()
            check_stopped(manager, engines, prompts)
    finally:
        workers.close()
        engines.close()
        cluster.close()


def check_stopped(manager, engines, prompts):
    """Check that all calls after the stop end with the same message."""
    for call in (
        lambda: manager.generate(prompts, RolloutConfig(n=1)),
        lambda: manager.generate(prompts, RolloutConfig(n=1), Caller.evaluate),
        lambda: engines.score_on_all([[1, 2, 3]]),
        engines.begin_update,
        engines.release_memory,
        engines.resume_kv_cache,
    ):
        with pytest.raises(UserError, match="they have been stopped; start a new run"):
            call()


def test_no_order_of_two_or_three_calls_does_harm(operations):
    operations.run_all_orders(3)
