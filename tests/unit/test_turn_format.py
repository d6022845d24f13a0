"""TurnFormat: turns are read in the model's own format, and go on after exactly what the engine has seen."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_megatron.batch.written_turn import read_text
from grpo_megatron.data import PromptTokenizer
from tests.unit.chat_templates import QWEN3, TEMPLATES, save_tokenizer

# Special tokens of Qwen3's tokenizer, besides those that begin and end a message.
QWEN3_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWER = {"role": "tool", "tool_call_id": "call00000", "content": "3"}

# As in gpt-oss and MiniMax: a tool may answer only after a call, and its answer has the name of the tool.
# A turn with calls has another end.
STRICT = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% set ns = namespace(name=none) %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if ns.name is none %}{{ raise_exception('a tool answers without a call') }}{% endif %}"
    "<tool>{{ ns.name }}:{{ m.content }}<end>"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set ns.name = c.function.name %}"
    "{{ c.function.name }}!{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_calls %}<call>{% else %}<end>{% endif %}"
    "{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As in Laguna and Granite: a line break before the end of a turn.
BROKEN_LINE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As in newer models of Mistral, whose format no renderer knows.
MISTRAL = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}<end>{% endif %}{% endfor %}"
)


def qwen3(folder, template=QWEN3):
    """Return a PromptTokenizer with the special tokens of Qwen3 and this template."""
    save_tokenizer(folder, "qwen3", QWEN3_TAGS)
    (folder / "chat_template.jinja").write_text(template)
    return PromptTokenizer(str(folder))


def of_template(folder, template):
    """Return a PromptTokenizer with this template, in which a full stop and a line break are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({one: at for at, one in enumerate([*alphabet, ".Ċ"])}, [(".", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<end>", "<call>", "<user>", "<assistant>", "<tool>", "<pad>"]
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return PromptTokenizer(str(folder))


def ids_of(tokenizer, text):
    return tokenizer.encode(text).tolist()


@pytest.mark.parametrize(
    ("changed", "into", "name", "continues"),
    [
        ("", "", "qwen3", True),
        # Answers of tools in another form: the turns are Qwen3's, what stands between them is not.
        ("<tool_response>\\n", "<tool_response>", "qwen3", False),
        # Calls in a form that is nobody's.
        ('"arguments": ', '"input": ', None, None),
    ],
)
def test_a_renderer_is_used_for_what_the_template_proves(tmp_path, changed, into, name, continues):
    """The package looks for the name of a repository. A template that was changed gives another text."""
    assert changed in QWEN3
    found = qwen3(tmp_path, QWEN3.replace(changed, into) if changed else QWEN3).turn_format.renderer
    assert (found and found.name, found and found.continues) == (name, continues)


def test_a_template_without_tools_has_no_renderer(tmp_path):
    save_tokenizer(tmp_path, "chatml", QWEN3_TAGS)
    assert "tools" not in TEMPLATES["chatml"]
    assert PromptTokenizer(str(tmp_path)).turn_format.renderer is None


@pytest.mark.parametrize("with_renderer", [True, False])
def test_a_turn_goes_on_alike_with_a_renderer_and_with_the_template(tmp_path, with_renderer):
    tokenizer = qwen3(tmp_path)
    if not with_renderer:
        tokenizer.turn_format.renderer = None
    read = ids_of(tokenizer, "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n")
    wrote = 'I see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    known = [*read, *ids_of(tokenizer, wrote)]
    ids = tokenizer.turn_format.continued(known, [ANSWER], TOOLS, len(read), [CALL])
    assert ids[: len(known)] == known
    assert tokenizer.decode_all(np.array(ids[len(known) :])) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    cut = [*read, *ids_of(tokenizer, "I see")]  # at the limit: the end of the turn is added
    ids = tokenizer.turn_format.continued(cut, [ANSWER], TOOLS, len(read))
    assert ids[: len(cut)] == cut
    assert tokenizer.decode_all(np.array(ids[len(cut) :])).startswith("<|im_end|>\n<|im_start|>user\n")


def test_a_renderer_that_changes_a_token_is_not_believed(tmp_path, monkeypatch):
    """Other stacks trust that what comes next begins with what was sampled."""
    tokenizer = qwen3(tmp_path)
    renderer = tokenizer.turn_format.renderer
    bridge = renderer._renderer.bridge_to_next_turn

    def changed(read, *rest, **options):
        return bridge([*read[:-1], 7], *rest, **options)

    read, wrote = ids_of(tokenizer, "<|im_start|>assistant\n"), ids_of(tokenizer, "3<|im_end|>")
    right = tokenizer.turn_format.continued([*read, *wrote], [ANSWER], TOOLS, len(read))
    monkeypatch.setattr(renderer._renderer, "bridge_to_next_turn", changed)
    assert renderer.continued(read, wrote, [ANSWER], TOOLS) is None
    assert tokenizer.turn_format.continued([*read, *wrote], [ANSWER], TOOLS, len(read)) == right


def test_a_tool_answers_after_the_call_that_the_model_wrote(tmp_path):
    """The template was shown the tool's answer after a turn without a call, at which such templates fail."""
    tokenizer = of_template(tmp_path, STRICT)
    assert tokenizer.turn_format.renderer is None
    known = ids_of(tokenizer, '<user>a<end><assistant>so add!{"a": 1}<call>')
    ids = tokenizer.turn_format.continued(known, [ANSWER], TOOLS, 5, [CALL])
    assert ids[: len(known)] == known
    assert tokenizer.decode_all(np.array(ids[len(known) :])) == "<tool>add:3<end><assistant>"


def test_the_end_of_a_turn_is_found_in_the_tokens_of_the_model(tmp_path):
    """A line break before the end may be one token with the text: the end was then written twice."""
    tokenizer = of_template(tmp_path, BROKEN_LINE)
    known = ids_of(tokenizer, "<user>a\n<end>\n<assistant>So be it.\n<end>")
    assert tokenizer.decode_all(np.array(known[-2:])) == ".\n<end>"
    ids = tokenizer.turn_format.continued(known, [{"role": "user", "content": "b"}])
    assert ids[: len(known)] == known
    assert tokenizer.decode_all(np.array(ids[len(known) :])) == "\n<user>b\n<end>\n<assistant>"


def test_calls_that_no_renderer_reads_are_read_by_a_detector_of_sglang(tmp_path):
    """SGLang leaves out calls of unknown tools, and a malformed call with the text around it."""
    tokenizer = of_template(tmp_path, MISTRAL)
    turns = tokenizer.turn_format
    assert (turns.renderer, turns.detector.name) == (None, "mistral")

    def turn(text, tools=TOOLS):
        return turns.written_turn(np.array(ids_of(tokenizer, text)), ids_of(tokenizer, "[/INST]"), tools)

    found = turn('so [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]subtract[ARGS]{"b": 2}<end>')
    assert [(call.name, call.arguments) for call in found.calls] == [
        ("add", {"a": 1}),
        ("subtract", {"b": 2}),
    ]
    assert (found.content, found.reasoning, found.is_cut) == ("so", None, False)
    for text, tools in (("so [TOOL_CALLS]add[ARGS]{", TOOLS), ('[TOOL_CALLS]add[ARGS]{"a": 1}', None)):
        assert (turn(text, tools).content, turn(text, tools).calls) == (text, ())


def test_calls_in_a_format_of_nobody_stay_in_the_text(tmp_path):
    tokenizer = of_template(tmp_path, STRICT)
    assert (tokenizer.turn_format.renderer, tokenizer.turn_format.detector) == (None, None)
    written = np.array(ids_of(tokenizer, 'so add!{"a": 1}<end>'))
    turn = tokenizer.turn_format.written_turn(written, [], TOOLS)
    assert (turn.content, turn.calls) == ('so add!{"a": 1}', ())


CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "read", "content", "reasoning", "calls"),
    [
        (f"so {CALLS}", "", "so", None, 1),
        (f"so {CALLS} and {CALLS} done", "", "so  and  done", None, 2),
        (f"<think>a {CALLS}</think>\n\n3", "", "3", f"a {CALLS}", 0),
        ("a</think>3", "<think>\n", "3", "a", 0),
        ("a", "<think>\n", "", "a", None),
        (f"<think>a {CALLS}", "", "", f"a {CALLS}", None),
        ("3 </tool_call>", "", "3 </tool_call>", None, 0),
    ],
)
def test_the_format_of_hermes_is_read_where_there_is_no_renderer(text, read, content, reasoning, calls):
    """Another stack's parser dropped the text before a call, and called what was only thought of.

    calls: number of calls; None if the turn is cut off in its reasoning.
    """
    turn = read_text(text, read, [1, 2], has_tools=True)
    assert (turn.content, turn.reasoning, turn.is_cut) == (content, reasoning, calls is None)
    assert len(turn.call_messages) == (calls or 0)
    assert read_text(text, read, [1, 2], has_tools=False).calls == ()


def test_calls_have_ids_that_come_back_with_the_same_tokens():
    """Some templates show the ids to the model, so random ids would make episodes differ from run to run."""
    first, again, other = (read_text(CALLS * 2, "", ids, True).calls for ids in ([1, 2], [1, 2], [1, 3]))
    assert [call.id for call in first] == [call.id for call in again]
    assert len({call.id for call in (*first, *other)}) == 4
    assert all(len(call.id) == 9 and call.id.isalnum() for call in first)
