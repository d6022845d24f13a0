"""Renderers of the package `renderers`: turns of each family are read, and continued token by token."""

import random

import pytest
from renderers.base import RENDERER_REGISTRY, _populate_registry
from renderers.configs import _config_class_for
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_megatron.batch.written_turn import WrittenCall
from grpo_megatron.data.renderer import TurnRenderer
from grpo_megatron.data.renderer_trials import TOOLS

_populate_registry()
# The package's own fallback has no format, and gpt-oss needs a vocabulary that is downloaded.
FAMILIES = sorted(RENDERER_REGISTRY.keys() - {"default", "gpt-oss"})
# Formats whose turns have one call at most, and either a call or text.
ONE_CALL = {"llama-3"}
ASKED, AGAIN = {"role": "user", "content": "Add 1 and 2."}, {"role": "user", "content": "Once more."}


class ByteTokenizer(PreTrainedTokenizerFast):
    """A tokenizer of bytes that learns each special token that a renderer asks for."""

    def convert_tokens_to_ids(self, tokens):
        for token in [tokens] if isinstance(tokens, str) else tokens:
            self.learn(token)
        return super().convert_tokens_to_ids(tokens)

    def encode(self, text, **options):
        # Renderers ask for some special tokens by encoding them.
        if " " not in text and ((text.startswith("<") and text.endswith(">")) or "DSML" in text):
            self.learn(text)
        return super().encode(text, **options)

    def learn(self, token):
        if not self.is_made and token not in self.get_vocab():
            self.add_special_tokens(
                {"additional_special_tokens": [AddedToken(token, normalized=False)]}, False
            )

    is_made = False


def renderer_of(name):
    """Return a TurnRenderer of this name, and the renderer of the package."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = ByteTokenizer(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>")
    config = _config_class_for(name)(thinking_retention="all")
    made = RENDERER_REGISTRY[name](tokenizer, config)
    tokenizer.is_made = True
    return TurnRenderer(name, made, tokenizer, keeps_rest=name != "deepseek-v4"), made


def turn_of(made, chat, turn, *following):
    """Return (ids that the model reads, ids that it writes) for a turn, as the renderer renders them.

    following: messages after the turn. In some formats, the model ends its turn with the beginning of these.
    """
    read = made.render_ids(chat, tools=TOOLS, add_generation_prompt=True)
    whole = made.render_ids([*chat, turn], tools=TOOLS)
    more = made.render_ids([*chat, turn, *following], tools=TOOLS)
    same = next((at for at, pair in enumerate(zip(read, whole, strict=False)) if len({*pair}) > 1), len(read))
    stops = set(made.get_stop_token_ids())
    if not stops & set(whole[same:]):
        whole.append(next(token for token in more[same:] if token in stops))
    end = next(at for at in range(same, len(whole)) if whole[at] in stops)
    return whole[:same], whole[same : end + 1]


def called(name, **arguments):
    """Return a tool call as a message has it. Its id is in the format in which Kimi's models write ids."""
    return WrittenCall(name, arguments, f"functions.{name}:0").message


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_goes_on_after_exactly_what_the_engine_has_seen(name):
    """Other stacks lose the text before a call, and write a turn with calls again in other tokens."""
    found, made = renderer_of(name)
    said = "" if name in ONE_CALL else "Let me see."
    turn = {"role": "assistant", "content": said, "tool_calls": [called("add", a=1, b=2)]}
    answer = {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "the sum is 3"}
    read, wrote = turn_of(made, [ASKED], turn, answer)

    first = found.turn(wrote, read, TOOLS)
    assert [(call.name, call.arguments) for call in first.calls] == [("add", {"a": 1, "b": 2})]
    assert (first.content, first.reasoning or "", first.is_cut) == (said, "", False)
    assert found.turn(wrote, read, []).calls == ()  # no tool was offered, so it is text
    assert "add" in found.turn(wrote, read, []).content

    ids = found.continued(read, wrote, [answer], TOOLS)
    assert ids[: len(read) + len(wrote)] == [*read, *wrote]
    assert "the sum is 3" in made._tokenizer.decode(ids[len(read) + len(wrote) :])

    thought = {"role": "assistant", "content": "It is 3.", "reasoning_content": "so"}
    plain_read, plain = turn_of(made, [ASKED], thought, AGAIN)
    second = found.turn(plain, plain_read, TOOLS)
    assert (second.content, second.calls) == ("It is 3.", ())
    more = found.continued(ids, plain, [AGAIN], TOOLS)
    assert more[: len(ids) + len(plain)] == [*ids, *plain]
    assert made._tokenizer.decode(more[len(ids) + len(plain) :]).count("Once more.") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_closes_a_turn_that_was_cut_off(name):
    """The model wrote no end of its turn. It is added, as something that the model only read."""
    found, made = renderer_of(name)
    read, plain = turn_of(made, [ASKED], {"role": "assistant", "content": "It is 3."}, AGAIN)
    cut = plain[:-2]
    ids = found.continued(read, cut, [AGAIN], TOOLS)
    assert ids[: len(read) + len(cut)] == [*read, *cut]
    assert set(ids[len(read) + len(cut) :][:3]) & set(made.get_stop_token_ids())


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - ONE_CALL))
def test_several_calls_and_values_of_each_family(name):
    found, made = renderer_of(name)
    text = 'so "it" is\n<b>'
    calls = [called("add", a=-1, b=20), called("say", text=text)]
    answers = [{"role": "tool", "tool_call_id": call["id"], "name": "x", "content": "3"} for call in calls]
    read, wrote = turn_of(made, [ASKED], {"role": "assistant", "content": "", "tool_calls": calls}, *answers)
    turn = found.turn(wrote, read, TOOLS)
    assert [(call.name, call.arguments) for call in turn.calls] == [
        ("add", {"a": -1, "b": 20}),
        ("say", {"text": text}),
    ]
    assert len({call.id for call in turn.calls}) == 2
    assert turn.content == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_a_model_writes_is_read_and_never_changed(name):
    """A policy in training writes anything: tags in a wrong order, calls that end nowhere."""
    found, made = renderer_of(name)
    tokens, chance = list(made._tokenizer.added_tokens_decoder), random.Random(0)
    said = "" if name in ONE_CALL else "Let me see."
    turn = {"role": "assistant", "content": said, "tool_calls": [called("add", a=1, b=2)]}
    answer = {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "3"}
    read, wrote = turn_of(made, [ASKED], turn, answer)
    continued = 0
    for _ in range(30):
        ids = list(wrote)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(ids))
            ids[at : at + chance.choice([0, 1, 5])] = [chance.choice(tokens)]
        assert isinstance(found.turn(ids, read, TOOLS).content, str)
        after = found.continued(read, ids, [AGAIN], TOOLS)
        assert after is None or after[: len(read) + len(ids)] == [*read, *ids]
        continued += after is not None
    assert continued


@pytest.mark.parametrize(
    ("written", "content", "problem"),
    [
        ("a<tool_call>{</tool_call>", "a<tool_call>{</tool_call>", "the call is malformed (invalid json)"),
        (
            'a<tool_call>{"name": "add"',
            'a<tool_call>{"name": "add"',
            "the call is malformed (unclosed block)",
        ),
        (
            'a<tool_call>{"name": "add", "arguments": [1]}</tool_call>b',
            'a<tool_call>{"name": "add", "arguments": [1]}</tool_call>b',
            "the call is malformed (ok)",
        ),
    ],
)
def test_a_malformed_call_stays_in_the_text(written, content, problem):
    found, made = renderer_of("qwen3")
    ids = made._tokenizer.encode(written, add_special_tokens=False)
    turn = found.turn(ids, [0], TOOLS)
    assert (turn.text, turn.call_messages) == (content, [])
    assert [call.problem for call in turn.calls] == [problem]


def test_text_behind_a_call_is_kept():
    """The package leaves out what the model writes between and after its calls."""
    found, made = renderer_of("qwen3")
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    ids = made._tokenizer.encode(f"one {call} two {call} three<|im_end|>", add_special_tokens=False)
    turn = found.turn(ids, [0], TOOLS)
    assert (turn.content, len(turn.call_messages)) == ("one\ntwo\nthree", 2)


@pytest.mark.parametrize(
    ("before", "written", "reasoning", "is_cut"),
    [
        ("", "<think>hm</think>3<|im_end|>", "hm", False),
        ("<think>", "hm</think>3<|im_end|>", "hm", False),
        ("<think>", "for long", "for long", True),
        ("", "<think>for long <tool_call>", "for long", False),  # a call ends the reasoning
        ("", "3<|im_end|>", None, False),
    ],
)
def test_reasoning_that_has_no_end_is_noticed(before, written, reasoning, is_cut):
    found, made = renderer_of("qwen3")
    encode = made._tokenizer.encode
    read = encode(f"<|im_start|>assistant\n{before}", add_special_tokens=False)
    turn = found.turn(encode(written, add_special_tokens=False), read, TOOLS)
    assert (turn.reasoning, turn.is_cut) == (reasoning, is_cut)
    assert not (is_cut and (turn.content or turn.calls))
