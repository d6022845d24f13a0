"""A response of a real engine that is killed goes on in another engine, against transformers."""

import asyncio
import os
import re

import numpy as np
import psutil
import pytest
import ray
from transformers import AutoModelForCausalLM

from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import ProcessLost
from grpo_megatron.sglang import actors
from grpo_megatron.sglang.request import Request
from grpo_megatron.sglang.response_log import ResponseLog
from tests.integration.test_engine import running
from tests.integration.test_engine_updates import logprobs_of

pytestmark = pytest.mark.slow

LENGTH, KILLED_AT, ROUND = 400, 100, RoundId("train", 1)


def kill(engine, title: str) -> None:
    """Kill an engine's actor, or its process with this title."""
    actor = psutil.Process(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())))
    found = [actor, *actor.children(recursive=True)]
    next(process for process in found if title in " ".join(process.cmdline())).kill()


def num_sampled(log: str, num_prompt: int) -> int:
    """Return the number of tokens of the only response that SGLang has sampled, by its log."""
    # The last token has no keys and values yet.
    return int(re.findall(r"Decode batch.* #token: (\d+)", log)[-1]) - num_prompt + 1


async def sampled(engines, title: str, request: Request):
    """Sample a response with engine 0, and kill this engine meanwhile. Engine 1 samples the rest.

    Returns the response, and the number of tokens that engine 0 has reported.
    """
    first, second = (connection.client(ROUND) for connection in engines.connections())
    log, reported = ResponseLog(), 0

    def listen(tokens):
        nonlocal reported
        log.append(tokens)
        if reported < KILLED_AT <= reported + len(tokens.ids):
            kill(engines._engines[0], title)
        reported += len(tokens.ids)

    with pytest.raises(ProcessLost, match="engine 0 died in `generate`"):
        await first.generate(log.rest_of(request), listen)
    kept, rest = reported, log.rest_of(request)
    assert len(rest.prompt_ids) == len(request.prompt_ids) + kept
    done = log.complete(await second.generate(rest, log.append))
    await second.end()
    return done, kept


# The scheduler of an actor that is killed samples further tokens, until it notices that.
@pytest.mark.parametrize(("title", "most_lost"), [("sglang::scheduler", 8), ("ray::SGLangEngine", 40)])
def test_few_tokens_are_sampled_again(ray_here, arithmetic, tmp_path, monkeypatch, title, most_lost):
    arguments_of = actors.engine_arguments

    def with_a_log_of_each_step(*arguments):
        return arguments_of(*arguments) | {"log_level": "info", "decode_log_interval": 1}

    monkeypatch.setattr(actors, "engine_arguments", with_a_log_of_each_step)
    tokenizer = PromptTokenizer(str(arithmetic / "model"))
    model = AutoModelForCausalLM.from_pretrained(arithmetic / "model").float()
    prompt_ids = tokenizer.prompt("1+2+3+4+5+6+7+8", "f:1")[1].tolist()
    request = Request((0, 0), prompt_ids, {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True})
    with running(arithmetic, tokenizer, tmp_path, num_engines=2) as (_, engines):
        done, kept = asyncio.run(sampled(engines, title, request))
    lost = num_sampled((tmp_path / "engine0.log").read_text(errors="replace"), len(prompt_ids)) - kept
    print(f"{title}: {kept} tokens kept, {lost} sampled again")
    assert kept >= KILLED_AT
    assert 0 <= lost <= most_lost
    assert done.finish_reason == "length"
    ids, found = done.response_ids.tolist(), done.logprobs
    assert len(ids) == len(found) == LENGTH
    assert np.abs(found - logprobs_of(model, prompt_ids, ids)).max() < 1e-4
    assert [(span.version, span.start, span.end) for span in done.weight_spans] == [(0, 0, LENGTH)]
