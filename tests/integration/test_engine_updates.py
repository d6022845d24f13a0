"""Requests to a real engine over an update of its weights, against transformers."""

import time
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from transformers import AutoConfig

from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.config.rollout import OnUpdate
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.sglang.request import Request
from tests.integration.one_rank import sync_from
from tests.integration.test_engine import answered, random_model, requests_of, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(arithmetic):
    return PromptTokenizer(str(arithmetic / "model"))


@pytest.fixture(scope="module")
def engines(ray_here, arithmetic, tokenizer, tmp_path_factory):
    with running(arithmetic, tokenizer, tmp_path_factory.mktemp("logs")) as (_, engines):
        yield engines


def sampled_over_an_update(engines, path, weights, prompt_ids, on_update, caches):
    """Sample with the first weights, and update to the second ones while four responses are sampled.

    A fifth request arrives after the update. caches: names of the prefix caches of old and new requests.

    Returns the completions, and the version of the second weights.
    """
    engine, sampling = engines._engines[0], {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
    short, version = sampling | {"max_new_tokens": 20}, engines.weight_version
    engines._config = replace(engines._config, on_update=on_update)
    old, new = (sync_from(path, one.state_dict(), engines) for one in weights)
    with old as first, new as second:
        first.load_state_dict({"version": version})
        first.run()
        second.load_state_dict({"version": version + 1})
        round = RoundId(f"{on_update.value} {caches}", 1)
        ray.get(engine.submit.remote(round, [Request((2, 0), prompt_ids, short, cache=caches[0])]))
        answered(engine, round, 1)  # its prompt is in the prefix cache from now on
        asked = [Request((0, index), prompt_ids, sampling, cache=caches[0]) for index in range(4)]
        ray.get(engine.submit.remote(round, asked))
        time.sleep(0.3)
        second.run()
        ray.get(engine.submit.remote(round, [Request((1, 0), prompt_ids, short, cache=caches[1])]))
        return answered(engine, round, 5), version + 2


@torch.no_grad()
def logprobs_of(model, prompt_ids, response_ids):
    """Return transformers' log-probs of a response, float64 [R]."""
    ids = torch.tensor([*prompt_ids, *response_ids])
    logp = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
    return logp[len(prompt_ids) - 1 : -1].gather(1, ids[len(prompt_ids) :, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("on_update", "caches"),
    [(OnUpdate.go_on, ("", "")), (OnUpdate.keep, ("a", "b")), (OnUpdate.keep, ("", ""))],
    ids=["continue", "keep", "keep in one cache"],
)
def test_responses_go_on_over_an_update(engines, tokenizer, arithmetic, on_update, caches):
    """Rule R10: the log-probs of each span are those of its weights, as if it was scored anew.

    With `keep`, only the keys and values are old. Rule R8: another stack served prefixes that were up to 17
    steps old. The bug is planted in the last case: new requests share the prefix cache of old ones.
    """
    config = AutoConfig.from_pretrained(arithmetic / "model")
    weights = [random_model(config, seed) for seed in (21, 22)]
    prompt_ids = tokenizer.prompt("1+2+3+4+5+6+7+8", "f:1")[1].tolist()
    path = str(arithmetic / "model")
    done, newest = sampled_over_an_update(engines, path, weights, prompt_ids, on_update, caches)
    differences = {"old": [], "new": [], "late": []}
    for completion in done:
        ids, found = completion.response_ids.tolist(), completion.logprobs
        assert len(ids) == len(found)
        assert completion.finish_reason == "length"
        expected = [logprobs_of(one, prompt_ids, ids) for one in weights]
        if completion.key == (1, 0):
            (span,) = completion.weight_spans
            assert (span.version, span.end) == (newest, 20)
            differences["late"].append(np.abs(found - expected[1]).max())
            continue
        first, second = completion.weight_spans
        assert (first.version, second.version, second.end) == (newest - 1, newest, 400)
        assert 0 < first.end == second.start < 400
        differences["old"].append(np.abs(found - expected[0])[: first.end].max())
        differences["new"].append(np.abs(found - expected[1])[first.end :].max())
    largest = {name: max(values) for name, values in differences.items()}
    print(on_update.value, caches, largest)
    assert largest["old"] < 1e-4
    assert (largest["new"] < 1e-4) == (on_update == OnUpdate.go_on)
    assert (largest["late"] < 1e-4) == (caches != ("", "") or on_update == OnUpdate.go_on)


def test_a_request_that_arrives_in_an_update_is_answered_after_it(engines):
    engine, round = engines._engines[0], RoundId("within an update", 1)
    engines.begin_update()
    ray.get(engine.submit.remote(round, requests_of(3)))
    assert ray.get(engine.poll.remote(round, 0.5)) == []
    engines.end_update(engines.weight_version + 1)
    for completion in answered(engine, round, 12):
        assert {span.version for span in completion.weight_spans} == {engines.weight_version}
