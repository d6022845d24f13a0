"""The text of a model's output, as rewards, tools and records get it."""

import asyncio
import json
import pickle

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rewards.scoring import RewardTask, ScorerSpec
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.tool_environment import ToolEnvironment
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines, manager_of
from tests.unit.chat_templates import PAD, TEMPLATES, save_tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "\\boxed{", "####"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_tokenizer(tmp_path_factory.mktemp(kind), kind, special=TAGS) for kind in TEMPLATES}


def written(tokenizer, text):
    ids = tokenizer.encode(text)
    assert any(number in tokenizer.tokenizer.all_special_ids for number in ids.tolist())
    return ids


def score(folder, response, answer, **reward):
    """Return the reward of a response, which reaches the worker as token ids."""
    tokenizer = PromptTokenizer(folder)
    scorer = pickle.loads(pickle.dumps(ScorerSpec(RewardConfig(**reward), tokenizer.decoder)))()
    [found] = scorer.work([RewardTask(0, "1+1?", written(tokenizer, response), answer, {})], 10.0)
    return found


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>1</think><answer>2</answer>", {"terms": {"form": {"function": "format"}}}),
        ("<think>1</think> <answer>2</answer>", {"function": "format"}),
        ("so <answer>2</answer>", {"function": "exact_match", "extract": "<answer>(.*?)</answer>"}),
        ("<answer>2</answer>", {"function": "regex", "args": {"pattern": "<answer>[0-9]</answer>"}}),
        ("so #### 2", {"function": "exact_match", "response_from": ["hashes"]}),
        ("so \\boxed{2}", {"function": "math"}),
    ],
)
def test_rewards_see_tags_that_are_special_tokens(folders, response, reward):
    """They used to be removed with the end tokens, so that no response had the requested form."""
    for end in ("", "<|im_end|>", "<|endoftext|>", f"<|im_end|>{PAD}{PAD}"):
        found = score(folders["chatml"], response + end, "2", **reward)
        assert found.text == response
        assert next(iter(found.components.values())) == 1.0


def test_tools_see_calls_whose_tags_are_special_tokens(folders):
    tokenizer = PromptTokenizer(folders["qwen3"])
    call = json.dumps({"name": "calculator", "arguments": {"expression": "6*7"}})
    environment = ToolEnvironment(["examples.calculator:calculator"], RewardConfig())(
        Prompt(7, np.array([1]), "", "")
    )
    text = tokenizer.decode(written(tokenizer, f"<think>6*7</think><tool_call>{call}</tool_call><|im_end|>"))
    answer = asyncio.run(environment.step(text))
    assert ([message["content"] for message in answer.observation], answer.done) == (["42"], False)
    only_thought = written(tokenizer, f"<think><tool_call>{call}</tool_call></think>42<|im_end|>")
    assert asyncio.run(environment.step(tokenizer.decode(only_thought))).done


@pytest.mark.parametrize(
    ("kind", "ids", "expected"),
    [
        ("chatml", "2<|im_end|>", "2"),
        ("chatml", "2<|endoftext|>", "2"),
        ("chatml", f"2<|im_end|>{PAD}", "2"),
        ("chatml", "2<|im_end|>\n<|im_start|>user\nSure?<|im_end|>", "2\n<|im_start|>user\nSure?"),
        ("llama3", "2<|eot_id|>", "2"),
        ("llama3", "2<|end_of_text|>", "2"),
        ("mistral", "[TOOL_CALLS][]</s>", "[TOOL_CALLS][]"),
        ("deepseek", "<|tool_call|>add<|end_of_sentence|>", "<|tool_call|>add"),
        ("plain", "<answer>2</answer><|endoftext|>", "<answer>2</answer>"),
    ],
)
@pytest.mark.parametrize("is_fast", [True, False])
def test_only_end_and_padding_tokens_are_left_out(folders, monkeypatch, kind, ids, expected, is_fast):
    if not is_fast:  # as for tokenizers of transformers that decode in Python
        monkeypatch.setattr("grpo_megatron.data.decoder._decodes_like_backend", lambda tokenizer: False)
    tokenizer = PromptTokenizer(folders[kind])
    assert tokenizer.decode(written(tokenizer, ids)) == expected


def test_end_tokens_that_the_model_states(folders, tmp_path):
    """Llama's generation_config.json has three.

    An ordinary token that is listed by mistake stays in the text.
    """
    folder = save_tokenizer(tmp_path, "llama3", special=TAGS)
    ids = PromptTokenizer(folder).encode("2<|eom_id|>")
    assert PromptTokenizer(folder).decode(ids) == "2<|eom_id|>"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids.tolist()}))
    assert PromptTokenizer(folder).decode(ids) == "2"
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": int(ids[-1]), "pad_token_id": int(ids[0])})
    )
    assert PromptTokenizer(folder).decode(ids) == "2"
    assert PromptTokenizer(folder, DataConfig(chat_template="none")).decode(ids) == "2"


def test_every_other_token_is_in_the_text(folders):
    for folder in folders.values():
        tokenizer = PromptTokenizer(folder)
        for number in tokenizer.tokenizer.all_special_ids:
            text = tokenizer.decode(np.array([number]))
            is_end = text == ""
            token = tokenizer.tokenizer.convert_ids_to_tokens(number)
            assert is_end == (
                token in (PAD, tokenizer.tokenizer.eos_token, tokenizer.template.shape.closing)
            ), token


class Engine(FakeEngines):
    """An engine that records the parameters of its requests. Each response is one end token."""

    def __init__(self):
        super().__init__()
        self.parameters = []

    async def generate(self, request, listener=None):
        self.parameters.append(request.sampling)
        return Completion(
            request.key, np.array([1], np.int32), np.zeros(1, np.float32), "stop", (WeightSpan(0, 0, 1),)
        )


class Rewards:
    async def score(self, prompt, sample):
        return sample.scored(0.0, {})

    async def score_group(self, prompt, samples):
        return tuple(samples)


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("plain", None),
    ],
)
def test_responses_end_where_the_template_ends_turns(folders, kind, end):
    """A base model's files name another end token, so that engines did not stop at the one that was
    learned.
    """
    tokenizer = PromptTokenizer(folders[kind])
    for template, ends in (("tokenizer", [end] if end else []), ("none", [])):
        engine, own = Engine(), PromptTokenizer(folders[kind], DataConfig(chat_template=template))
        manager = manager_of(engine, SingleTurn(Rewards()), own.turn_ends)
        asked = Prompt(0, np.array([1], np.int32), "", "")
        manager.generate([asked], RolloutConfig(n=1, max_response_length=3, stop_token_ids=[7]))
        expected = sorted({7, *(tokenizer.tokenizer.convert_tokens_to_ids(token) for token in ends)})
        assert [parameters["stop_token_ids"] for parameters in engine.parameters] == [expected]
