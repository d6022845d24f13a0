"""Supervised training learns exactly the tokens that the assistant writes, as its template shows them."""

import json

import pytest

from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import Config, ModelConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.conversations import Conversations
from grpo_megatron.data.examples import load_examples
from grpo_megatron.data.preferences import load_pairs
from grpo_megatron.errors import UserError
from tests.unit.chat_templates import TEMPLATES, save_tokenizer

ASKED = {"role": "user", "content": "1+1?"}
ID = "call00001"
TOOL = {"role": "tool", "tool_call_id": ID, "name": "add", "content": "2"}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def called(content, arguments):
    return said(
        content,
        tool_calls=[{"id": ID, "type": "function", "function": {"name": "add", "arguments": arguments}}],
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in TEMPLATES}


def marked(tokenizer, example):
    """Return the response with [[...]] around each part that is learned."""
    text, before = "", False
    for number, learned in zip(example.response_ids.tolist(), example.loss_mask.tolist(), strict=True):
        text += {(False, True): "[[", (True, False): "]]"}.get(
            (before, learned), ""
        ) + f"{tokenizer.tokenizer.decode([number])}"
        before = learned
    return text + "]]" * before


def learned(folder, record, tmp_path, **data):
    """Return (prompt, response with marks) of one record."""
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    data = DataConfig(train=f"{tmp_path}/r.jsonl", **data)
    config = Config(model=ModelConfig(path=folder), data=data, rollout=RolloutConfig(max_response_length=500))
    tokenizer = PromptTokenizer(folder, data)
    [example], _ = load_examples(config, tokenizer)
    return tokenizer.decode_all(example.prompt_ids), marked(tokenizer, example)


THOUGHT = "<think>\n\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERED = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("kind", "response", "expected"),
    [
        # Strings are what the model writes, closed as the template closes turns.
        ("chatml", "4", "[[4<|im_end|>]]"),
        ("qwen3", "<think>\nhm\n</think>\n\n4", "[[<think>\nhm\n</think>\n\n4<|im_end|>]]"),
        ("llama3", "4", "[[4<|eot_id|>]]"),
        ("mistral", "4", "[[ 4</s>]]"),
        ("deepseek", "<think>hm</think>4", "[[<think>hm</think>4<|end_of_sentence|>]]"),
        ("r1", "<think>\nhm</think>4", "[[hm</think>4<|end_of_sentence|>]]"),
        ("r1", "hm</think>4", "[[hm</think>4<|end_of_sentence|>]]"),
        ("plain", "4", "[[4<|endoftext|>]]"),
        ("chatml", "4<|im_end|>", "[[4<|im_end|>]]"),
        ("qwen3", "4<|im_end|>\n", "[[4<|im_end|>]]"),
        ("mistral", "4</s>", "[[ 4</s>]]"),
        ("plain", "4<|endoftext|>", "[[4<|endoftext|>]]"),
        # Messages are rendered by the template.
        ("qwen3", [said("4", reasoning_content="2+2")], "[[<think>\n2+2\n</think>\n\n4<|im_end|>]]"),
        ("qwen3", [said(None, reasoning_content="2+2")], "[[<think>\n2+2\n</think>\n\n<|im_end|>]]"),
        ("qwen3", [said("4")], f"[[{THOUGHT}4<|im_end|>]]"),
        ("llama3", [said(" 4\n")], "[[4<|eot_id|>]]"),
        (
            "chatml",
            [said([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}])],
            "[[42<|im_end|>]]",
        ),
        ("chatml", [said("4", name="Ada", weight=1)], "[[4<|im_end|>]]"),
        ("chatml", [said("4", tool_calls=[], reasoning_content=None)], "[[4<|im_end|>]]"),
        ("qwen3", [called(None, {"a": 1})], f"[[{THOUGHT}{CALL}<|im_end|>]]"),
        (
            "qwen3",
            [called("Look:", '{"a": 1}'), TOOL, said("2")],
            f"[[{THOUGHT}Look:\n{CALL}<|im_end|>]]{ANSWERED}[[{THOUGHT}2<|im_end|>]]",
        ),
        (
            "llama3",
            [called(None, '{"a": 1}'), TOOL, said("2")],
            '[[{"name": "add", "parameters": {"a": 1}}<|eom_id|>]]'
            "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[2<|eot_id|>]]",
        ),
        (
            "mistral",
            [called("", {"a": None}), TOOL, said("2")],
            '[[[TOOL_CALLS][{"name": "add", "arguments": {"a": '
            "null}}]</s>]][TOOL_RESULTS]2[/TOOL_RESULTS][[ 2</s>]]",
        ),
        (
            "deepseek",
            [called("", {"a": 1}), TOOL, said("2")],
            "[[<|tool_call|>add\n"
            '{"a": 1}<|end_of_sentence|>]]<|tool_output|>2<|Assistant|>[[2<|end_of_sentence|>]]',
        ),
        # The template drops the thinking of the first turn before the second; an episode keeps it.
        (
            "qwen3",
            [said("4", reasoning_content="a"), ASKED, said("2", reasoning_content="b")],
            "[[<think>\na\n</think>\n\n4<|im_end|>]]\n<|im_start|>user\n1+1?<|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\nb\n</think>\n\n2<|im_end|>]]",
        ),
        (
            "plain",
            [said("4"), ASKED, said("2")],
            "[[4<|endoftext|>]]\n### user: 1+1?\n### assistant: [[2<|endoftext|>]]",
        ),
        ("chatml", json.dumps([said("4"), ASKED, said("2")]), None),
    ],
)
def test_the_assistants_tokens_are_learned(folders, tmp_path, kind, response, expected):
    """Reasoning and tool calls used to be dropped, so that empty turns were trained.

    Turns ended with a wrong token.
    """
    prompt, found = learned(folders[kind], {"prompt": [ASKED], "response": response}, tmp_path)
    if expected is None:  # as JSON text
        expected = learned(folders[kind], {"prompt": [ASKED], "response": json.loads(response)}, tmp_path)[1]
    assert found == expected
    assert "1+1?" in prompt


@pytest.mark.parametrize("kind", ["llama3", "mistral", "deepseek", "chatml"])
def test_a_chat_that_is_learned_has_the_tokens_of_the_template(folders, tmp_path, kind):
    """The parts are tokenized one by one. Together they are what the template makes of the whole chat."""
    chat = [ASKED, said("2"), {"role": "user", "content": "Sure?"}, said("Yes")]
    prompt, found = learned(folders[kind], {"prompt": chat[:1], "response": chat[1:]}, tmp_path)
    whole = PromptTokenizer(folders[kind]).template.render(chat, "f:1", generation=False)
    assert prompt + found.replace("[[", "").replace("]]", "") == whole.rstrip("\n")


@pytest.mark.parametrize(
    ("kind", "response", "complaint"),
    [
        (
            "chatml",
            [said("4", reasoning_content="2+2")],
            "has reasoning_content, which the chat template leaves out",
        ),
        ("chatml", [said("4", reasoning="2+2")], "has reasoning, which the chat template leaves out"),
        ("qwen3", [said("4", thinking="2+2")], "has thinking, which the chat template leaves out"),
        ("chatml", [called(None, {"a": 1})], "has tool_calls, which the chat template leaves out"),
        ("plain", [called("", {}), TOOL, said("2")], "has tool_calls, which the chat template leaves out"),
        (
            "llama3",
            [said("", function_call={"name": "add", "arguments": "{}"})],
            "has function_call, which the chat template",
        ),
        (
            "deepseek",
            [called("Look:", {"a": 1}), TOOL, said("2")],
            "has tool_calls, which the chat template leaves out",
        ),
        (
            "deepseek",
            [said("<think>hm</think>4")],
            "the chat template drops part of an assistant message's content",
        ),
        (
            "r1",
            [said("4")],
            "renders the prompt differently when the assistant's message follows",
        ),
        ("llama3", [called(None, "not JSON")], "the arguments of a tool call are 'not JSON'"),
        ("llama3", [said(None, tool_calls="?")], "has the tool_calls '?'; they must be a list of objects"),
        ("llama3", [said(None, tool_calls=[{"id": "1"}])], "has a tool call without a name"),
        ("chatml", [said(None)], "field 'response': message 0 of the response has no content"),
        ("chatml", [said("4"), ASKED], "whose first and last message are the assistant's"),
        ("chatml", "[{'role': 'assistant', 'content': '4'}]", "is a list of messages in Python syntax"),
    ],
)
def test_what_a_template_cannot_show_is_refused(folders, tmp_path, kind, response, complaint):
    with pytest.raises(UserError, match=r"r\.jsonl:1: field 'response'") as caught:
        learned(folders[kind], {"prompt": [ASKED], "response": response}, tmp_path)
    assert complaint in str(caught.value)


def test_a_template_argument_that_contradicts_the_response_is_refused(folders, tmp_path):
    record = {"prompt": [ASKED], "response": [said("4", reasoning_content="2+2")]}
    with pytest.raises(
        UserError, match="renders the prompt differently when the assistant's message follows"
    ):
        learned(folders["qwen3"], record, tmp_path, chat_template_args={"enable_thinking": False})
    record["response"] = [said("4")]
    prompt, found = learned(folders["qwen3"], record, tmp_path, chat_template_args={"enable_thinking": False})
    assert prompt.endswith(f"<|im_start|>assistant\n{THOUGHT}")
    assert found == "[[4<|im_end|>]]"


def test_a_begun_turn_is_finished_by_the_response(folders, tmp_path):
    for response in ("2", [said("2")]):
        record = {"prompt": [ASKED, said("It is ")], "response": response}
        prompt, found = learned(folders["llama3"], record, tmp_path)
        assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\nIt is ")
        assert found == "[[2<|eot_id|>]]"


def test_tools_of_a_record_are_shown_to_the_model(folders, tmp_path):
    """A column of tools used not to be read, so that calls were learned without the tools that they call."""
    record = {"prompt": [ASKED], "response": [called(None, {"a": 1})], "tools": [SCHEMA]}
    for tools in ([SCHEMA], json.dumps([SCHEMA])):
        prompt, found = learned(folders["qwen3"], {**record, "tools": tools}, tmp_path)
        assert prompt.startswith(f"<|im_start|>system\n# Tools\n{json.dumps(SCHEMA)}\n")
        assert found == f"[[{THOUGHT}{CALL}<|im_end|>]]"
    for tools in (None, [], ""):
        assert "# Tools" not in learned(folders["qwen3"], {**record, "tools": tools}, tmp_path)[0]
    assert "# Tools" not in learned(folders["qwen3"], record, tmp_path, tools_key=None)[0]
    renamed = {**record, "functions": record["tools"], "tools": None}
    assert "# Tools" in learned(folders["qwen3"], renamed, tmp_path, tools_key="functions")[0]


@pytest.mark.parametrize(
    ("kind", "tools", "complaint"),
    [
        (
            "llama3",
            [SCHEMA],
            "the record offers tools (data.tools_key), which the chat template does not show to the model",
        ),
        ("qwen3", ["add"], "field 'tools' must be a list of JSON schemas"),
        ("qwen3", "add", "field 'tools' must be a list of JSON schemas"),
        ("qwen3", {"add": 1}, "field 'tools' must be a list of JSON schemas"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused(folders, tmp_path, kind, tools, complaint):
    with pytest.raises(UserError) as caught:
        learned(folders[kind], {"prompt": [ASKED], "response": "4", "tools": tools}, tmp_path)
    assert complaint in str(caught.value)


def test_tools_of_the_environment_and_of_a_record_are_not_mixed(folders):
    tokenizer = PromptTokenizer(folders["qwen3"], tools=[SCHEMA])
    assert "# Tools" in tokenizer.prompt("1+1?", "f:1")[0]
    with pytest.raises(UserError, match=r"the record .* and the environment both offer tools"):
        tokenizer.prompt("1+1?", "f:1", [SCHEMA])


def test_a_response_behind_a_prompt_that_is_no_chat(folders, tmp_path):
    """Contents of messages follow each other unchanged, as in an episode with such a prompt."""
    record = {"prompt": "1+1=", "response": [said("2"), {"role": "tool", "content": "!"}, said("3")]}
    assert learned(folders["chatml"], record, tmp_path, chat_template="none") == (
        "1+1=",
        "[[2<|endoftext|>]]![[3<|endoftext|>]]",
    )
    record["response"] = [called("2", {})]
    with pytest.raises(
        UserError, match="has a message with tool_calls, which only a chat template can render"
    ):
        learned(folders["chatml"], record, tmp_path, chat_template="none")


def test_tokenizers_that_put_a_space_before_texts(tmp_path):
    """The response used to be tokenized like a text of its own, with a space that the model does not
    write.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: number for number, token in enumerate(["<s>", "</s>", "▁", *"0123456789+=?|", "▁4", "▁2"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "4"), ("▁", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}|{% endif %}"
    )
    fast.save_pretrained(tmp_path)
    tokenizer = PromptTokenizer(str(tmp_path))
    (tmp_path / "r.jsonl").write_text('{"prompt": "2+2=?", "response": "4"}\n')
    config = Config(model=ModelConfig(path=str(tmp_path)), data=DataConfig(train=f"{tmp_path}/r.jsonl"))
    [example], _ = load_examples(config, tokenizer)
    assert tokenizer.tokenizer.convert_ids_to_tokens(example.response_ids.tolist()) == ["4", "</s>"]
    assert tokenizer.tokenizer.convert_ids_to_tokens(tokenizer.encode("4").tolist()) == ["▁4"]


def test_a_response_that_nothing_can_close_is_refused(folders, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["plain"])
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(
        UserError, match="must end with an end token, but neither the chat template nor the tokenizer has one"
    ):
        learned(str(tmp_path / "m"), {"prompt": [ASKED], "response": "4"}, tmp_path)


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "deepseek"])
def test_preferred_responses_have_their_calls(folders, tmp_path, kind):
    """Reward models, too, used to be trained only on the content."""
    record = {"chosen": [ASKED, called(None, {"a": 1})], "rejected": [ASKED, said("3")]}
    (tmp_path / "p.jsonl").write_text(json.dumps(record) + "\n")
    tokenizer = PromptTokenizer(folders[kind])
    [pair], _ = load_pairs(f"{tmp_path}/p.jsonl", Conversations(tokenizer, None), DataConfig(), 200)
    assert '{"a": 1}' in tokenizer.decode_all(pair.chosen.response_ids)
    assert tokenizer.decode_all(pair.rejected.response_ids).startswith("3")
    assert pair.chosen.prompt_ids.tolist() == pair.rejected.prompt_ids.tolist()
