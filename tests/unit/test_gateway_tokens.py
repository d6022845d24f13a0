"""Sessions of the gateway: each trained token stands after exactly the tokens that the engine has read."""

import asyncio

import numpy as np
import pytest

from grpo_megatron.data import PromptTokenizer
from tests.unit.chat_templates import QWEN3, save_tokenizer
from tests.unit.test_gateway import ADD, ask, served, tokens_of, user
from tests.unit.test_trajectories import Writer, ids_of, prompt_of
from tests.unit.test_turn_format import QWEN3_TAGS

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with the template of Qwen3, which drops the reasoning of turns before the last question."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, "qwen3", QWEN3_TAGS)
    (folder / "chat_template.jinja").write_text(QWEN3)
    return PromptTokenizer(str(folder))


class Model(Writer):
    """Writes given turns, texts or token ids, and records how many tokens each may have."""

    def __init__(self, tokenizer, *turns):
        super().__init__([ids_of(tokenizer, turn) if isinstance(turn, str) else turn for turn in turns])
        self.limits = []

    async def __call__(self, ids, most, routed=0, part=0):
        self.limits.append(most)
        return await super().__call__(ids, most, routed)


def check_exact(samples, model):
    """Check that the samples have each token that the model wrote once, after what it had read for it."""
    wanted = [
        (context + own[:place], token, logprob)
        for context, own, logprobs in model.requests
        for place, (token, logprob) in enumerate(zip(own, logprobs.tolist(), strict=True))
    ]
    found = []
    for sample in samples:
        ids, asked = tokens_of(sample), len(sample.arrays.prompt_ids)
        for place in np.flatnonzero(sample.arrays.loss_mask).tolist():
            logprob = float(sample.arrays.rollout_logprobs[place])
            found.append((ids[: asked + place], ids[asked + place], logprob))
    assert sorted(found) == sorted(wanted)


def played(tokenizer, model, conversation, **options):
    """Return the samples of a session, for which `conversation(client)` makes the requests."""

    async def main():
        async with served(tokenizer, model, **options) as (client, session, *_):
            await conversation(client)
            return session.trajectory.samples("stop")

    samples = asyncio.run(main())
    check_exact(samples, model)
    return samples


def said(answer):
    """Return an answer as a message that a client sends back, without its reasoning."""
    message = answer.choices[0].message.model_dump(exclude_none=True)
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def test_a_turn_keeps_its_tokens_after_a_tool_call(tokenizer):
    """Other stacks tokenize the text of a turn again, with other tokens than the model chose.

    Planted: `continued` encoded the decoded turn again.
    """
    odd = [*ids_of(tokenizer, "caf"), ids_of(tokenizer, "é")[0]]  # half of a character
    model = Model(tokenizer, [*odd, *ids_of(tokenizer, f"{CALL}<|im_end|>")], "3<|im_end|>")

    async def conversation(client):
        first = await ask(client, [user("ask")], tools=[ADD])
        call = first.choices[0].message.tool_calls[0]
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        await ask(client, [user("ask"), said(first), answer], tools=[ADD])

    (sample,) = played(tokenizer, model, conversation)
    assert sample.turns == 2


def test_what_was_thought_in_earlier_turns_is_read_again(tokenizer):
    """The template drops it. Another stack trained it as read, though the engine had not read it.

    Planted: the history was rendered by the template, and the turn was added after the earlier path.
    """
    model = Model(tokenizer, "<think>\nhm\n</think>\n\none<|im_end|>", "two<|im_end|>", "three<|im_end|>")

    async def conversation(client):
        first = said(await ask(client, [user("ask")]))
        await ask(client, [user("ask"), first, user("b")])
        # The client has edited its history, which is rendered as a whole: without what was thought.
        await ask(client, [user("asked"), first, user("b")])

    samples = played(tokenizer, model, conversation)
    assert [sample.turns for sample in samples] == [2, 1]
    read = [tokenizer.decode_all(np.array(context)) for context, *_ in model.requests]
    assert ["hm" in text for text in read] == [False, True, False]


def test_an_edited_turn_of_the_model_is_not_trained(tokenizer):
    """A turn that the client wrote itself is read, but no token of it is the model's."""
    model = Model(tokenizer, "one<|im_end|>", "two<|im_end|>")

    async def conversation(client):
        await ask(client, [user("ask")])
        await ask(client, [user("ask"), {"role": "assistant", "content": "uno"}, user("b")])

    assert [sample.turns for sample in played(tokenizer, model, conversation)] == [1, 1]


def test_a_later_turn_gets_only_the_tokens_that_are_left(tokenizer):
    """Another stack gave each turn the whole budget again, so that a response exceeded it.

    Planted: the limit was counted from what the turn had read.
    """
    model = Model(tokenizer, "one<|im_end|>", "two<|im_end|>")

    async def conversation(client):
        first = said(await ask(client, [user("ask")]))
        await ask(client, [user("ask"), first, user("b")])

    played(tokenizer, model, conversation, limit=100)
    asked = len(model.requests[0][0])
    assert asked == len(prompt_of(tokenizer).ids)
    assert model.limits == [100, asked + 100 - len(model.requests[1][0])]
    assert model.limits[1] < 100


def test_a_renderer_and_the_template_agree_in_a_whole_session(tokenizer, tmp_path):
    """Bridged by the renderer, or by the template alone: the engine reads the same."""
    save_tokenizer(tmp_path, "qwen3", QWEN3_TAGS)
    alone = PromptTokenizer(str(tmp_path))
    alone.turn_format.renderer = None
    assert tokenizer.turn_format.renderer.continues

    async def conversation(client):
        first = await ask(client, [user("ask")], tools=[ADD])
        message = first.choices[0].message
        assert (message.content, [call.function.name for call in message.tool_calls]) == (
            "so",
            ["add", "add"],
        )
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
        history = [user("ask"), said(first), *answers]
        second = await ask(client, history, tools=[ADD])
        await ask(client, [*history, said(second), user("Thanks")], tools=[ADD])

    read = []
    for one in (tokenizer, alone):
        model = Model(
            one,
            f"<think>\nhm\n</think>\n\nso\n{CALL}\n{CALL}<|im_end|>",
            "<think>\n3\n</think>\n\nIt is 3.<|im_end|>",
            "You are welcome.<|im_end|>",
        )
        (sample,) = played(one, model, conversation, limit=2000)
        assert sample.turns == 3
        read.append([context for context, *_ in model.requests])
    assert read[0] == read[1]


def test_a_turn_that_the_template_cannot_continue_begins_a_branch(tmp_path):
    """A guess would be read by the engine, and shown to no one."""
    save_tokenizer(tmp_path, "qwen3")
    # The template changes what the model wrote.
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content | replace('--', '') | trim }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = PromptTokenizer(str(tmp_path))
    model = Model(tokenizer, "--one<|im_end|>", "two<|im_end|>")

    async def conversation(client):
        first = said(await ask(client, [user("ask")]))
        await ask(client, [user("ask"), first, user("b")])

    samples = played(tokenizer, model, conversation)
    assert [sample.turns for sample in samples] == [1, 1]
    assert tokenizer.decode_all(np.array(model.requests[1][0])) == (
        "<|im_start|>ask<|im_end|><|im_start|>one<|im_end|><|im_start|>b<|im_end|><|im_start|>"
    )
