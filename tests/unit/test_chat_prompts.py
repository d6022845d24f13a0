"""Prompts in well-known chat templates: begun turns, BOS tokens, suffixes, and settings without an effect."""

import json

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptTokenizer, load_prompts
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import check
from grpo_megatron.rollout.history import AppendedHistory, TemplateHistory
from tests.unit.chat_templates import PAD, TEMPLATES, save_tokenizer

ASKED = {"role": "user", "content": "1+1?"}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in TEMPLATES}


def refused(folder, prompt="1", **data):
    with pytest.raises(UserError) as caught:
        PromptTokenizer(folder, DataConfig(**data)).prompt(prompt, "f:1")
    return str(caught.value)


def text_of(tokenizer, prompt):
    """Return the text that the model reads for a prompt."""
    return tokenizer.prompt(prompt, "f:1")[0]


# --- a prompt that ends with a begun turn of the assistant


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("begun", ["It is", "It is ", "The answer:\n", "<tool>\n\n", "", "\tx"])
def test_a_begun_turn_is_continued_as_it_was_begun(folders, kind, begun):
    """The turn used to be closed, and a new one opened behind it.

    Some templates would strip its white space.
    """
    tokenizer = PromptTokenizer(folders[kind])
    text, ids = tokenizer.prompt([ASKED, said(begun)], "f:1")
    before = text_of(tokenizer, [ASKED])
    space = " " if kind == "mistral" and begun and not begun[0].isspace() else ""
    assert text == f"{before}{space}{begun}"
    assert tokenizer.decode_all(ids) == text


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("<think>\nLet me", "<think>\nLet me"),
        ("<think>Let me", "<think>\nLet me"),
        ("<think>", "<think>\n"),
        ("<think>\n\nLet", "<think>\n\nLet"),
        ("Let me", "<think>\nLet me"),
    ],
)
def test_a_tag_that_the_template_begins_turns_with_is_there_once(folders, begun, expected):
    assert text_of(PromptTokenizer(folders["r1"]), [ASKED, said(begun)]).endswith(f"<|Assistant|>{expected}")


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (
            [ASKED, said(None, reasoning_content="hm")],
            "ends with an assistant message that has reasoning_content",
        ),
        (
            [ASKED, said("", tool_calls=[{"name": "add", "arguments": {}}])],
            "ends with an assistant message that has tool_calls",
        ),
        ([said("It is")], "contains only an assistant message"),
        ([ASKED, said(None)], "message 1 of the prompt has no content"),
    ],
)
def test_a_turn_that_cannot_be_continued_is_refused(folders, prompt, complaint):
    assert complaint in refused(folders["qwen3"], prompt)


def prompt_of(tokenizer, chat):
    text, ids = tokenizer.prompt(chat, "f:1")
    return Prompt(7, ids, text, "x", messages=tokenizer.messages(chat))


@pytest.mark.parametrize("history", [AppendedHistory, TemplateHistory])
def test_an_episode_goes_on_within_a_begun_turn(folders, history):
    tokenizer = PromptTokenizer(folders["llama3"])
    prompt = prompt_of(tokenizer, [ASKED, said("It is ")])
    played = history(prompt, tokenizer)
    assert played.begin("") == prompt.ids.tolist()
    ids = [*prompt.ids.tolist(), *tokenizer.encode("2<|eot_id|>").tolist()]
    again = played.go_on(ids, "2", [{"role": "user", "content": "Sure?"}])
    assert tokenizer.decode_all(np.array(again)) == text_of(
        tokenizer, [ASKED, said("It is 2"), {"role": "user", "content": "Sure?"}]
    )
    with pytest.raises(
        UserError, match="record 7: the prompt ends with the beginning of an assistant message"
    ):
        history(prompt, tokenizer).begin([{"role": "user", "content": "Look"}])


@pytest.mark.parametrize("history", [AppendedHistory, TemplateHistory])
def test_an_episode_keeps_the_tools_of_its_record(folders, history):
    tokenizer = PromptTokenizer(folders["qwen3"])
    tools = [{"type": "function", "function": {"name": "add"}}]
    text, ids = tokenizer.prompt([ASKED], "f:1", tools)
    prompt = Prompt(7, ids, text, "x", messages=[ASKED], tools=tools)
    read = history(prompt, tokenizer).begin([{"role": "tool", "content": "2"}])
    assert '"name": "add"' in tokenizer.decode_all(np.array(read))


# --- what stands before texts


@pytest.mark.parametrize(
    ("around", "prompt", "expected"),
    [
        ("<s> $A", "<s>[INST] 1 [/INST]", "<s>[INST] 1 [/INST]"),
        ("<s> $A", "[INST] 1 [/INST]", "<s>[INST] 1 [/INST]"),
        ("<s> $A </s>", "<s>1", "<s>1"),
        ("<s> $A </s>", "1", "<s>1"),
        ("[INST] <s> $A", "[INST]<s>1", "[INST]<s>1"),
        ("[INST] <s> $A", "<s>1", "[INST]<s><s>1"),
        ("$A </s>", "<s>1", "<s>1"),
        ("$A", "1", "1"),
    ],
)
def test_what_a_tokenizer_puts_before_texts_is_there_once(tmp_path, around, prompt, expected):
    """A prompt that a template was applied to before has its BOS already, and used to get another."""
    tokenizer = PromptTokenizer(
        save_tokenizer(tmp_path, "mistral", around=around), DataConfig(chat_template="none")
    )
    text, ids = tokenizer.prompt(prompt, "f:1")
    assert (text, tokenizer.decode_all(ids)) == (prompt, expected)


@pytest.mark.parametrize("kind", ["chatml", "qwen3", "llama3", "mistral", "deepseek", "r1"])
def test_a_prompt_that_went_through_the_template_before_is_refused(folders, kind):
    tokenizer = PromptTokenizer(folders[kind])
    for prompt in (text_of(tokenizer, "1+1?"), [{"role": "user", "content": text_of(tokenizer, "1+1?")}]):
        message = refused(folders[kind], prompt)
        assert "a chat template has already been applied to the prompt" in message
    assert text_of(
        PromptTokenizer(folders[kind], DataConfig(chat_template="none")), text_of(tokenizer, "1+1?")
    ) == text_of(tokenizer, "1+1?")


# --- settings that had no effect


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("1", "<|im_start|>user\n1=?<|im_end|>"),
        ([{"role": "user", "content": "1"}], "<|im_start|>user\n1=?<|im_end|>"),
        ([{"role": "user", "content": [{"type": "text", "text": "1"}]}], "<|im_start|>user\n1=?<|im_end|>"),
        (
            [{"role": "user", "content": "1"}, said("So ")],
            "<|im_start|>user\n1=?<|im_end|>\n<|im_start|>assistant\nSo ",
        ),
        (
            [ASKED, said("2"), {"role": "user", "content": "1"}],
            "2<|im_end|>\n<|im_start|>user\n1=?<|im_end|>",
        ),
        (json.dumps([{"role": "user", "content": "1"}]), "<|im_start|>user\n1=?<|im_end|>"),
    ],
)
def test_a_suffix_is_appended_once_to_every_kind_of_prompt(folders, tmp_path, prompt, asked):
    """The suffix, which asks for the form of the answer, used to be appended only to strings."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    data = DataConfig(prompt_suffix="=?")
    [prompt], _ = load_prompts(f"{tmp_path}/p.jsonl", PromptTokenizer(folders["chatml"], data), data)
    assert asked in prompt.text
    assert prompt.text.count("=?") == 1


def test_a_suffix_that_has_no_place_is_refused(folders):
    system = [{"role": "system", "content": "1"}]
    assert "has no user message to which data.prompt_suffix" in refused(
        folders["chatml"], system, prompt_suffix="?"
    )


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "1"}]',
        ' [{"content": "1", "role": "user"}]\n',
        '[{"role": "user", "content": [{"type": "text", "text": "1"}], "name": null}]',
        json.dumps([{"role": "user", "content": "1"}], indent=1),
    ],
)
def test_messages_as_json_text_are_messages(folders, text):
    """Their JSON used to be put into one user message."""
    tokenizer = PromptTokenizer(folders["chatml"])
    assert text_of(tokenizer, text) == text_of(tokenizer, "1")
    assert "the prompt is a list of chat messages, but data.chat_template=none" in refused(
        folders["chatml"], text, chat_template="none"
    )


def test_texts_that_only_look_like_messages_stay_texts(folders):
    tokenizer = PromptTokenizer(folders["chatml"])
    for text in (
        "[1, 2] role?",
        '[{"name": "role"}]',
        "[role",
        '["role"]',
        '{"role": "user", "content": "1"}',
        '[{"role": ',
        "[]",
    ):
        assert text_of(tokenizer, text) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert "a list of messages in Python syntax" in refused(folders["chatml"], str([ASKED]))


@pytest.mark.parametrize(
    ("kind", "arguments", "unread"),
    [
        ("chatml", {"enable_thinking": False}, "enable_thinking"),
        ("llama3", {"enable_thinking": False}, "enable_thinking"),
        ("qwen3", {"thinking": False}, "thinking"),
        ("qwen3", {"enable_thinking": True, "reasoning_effort": "low"}, "reasoning_effort"),
        ("mistral", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("qwen3", {"ns": 1}, "ns"),
    ],
)
def test_an_argument_that_the_template_never_reads_is_refused(folders, kind, arguments, unread):
    message = refused(folders[kind], chat_template_args=arguments)
    assert f"data.chat_template_args: the chat template does not use {unread}; remove this setting" in message
    assert "the template uses " in message


def test_arguments_of_a_template_with_tags_that_transformers_adds(folders, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if loop.index > limit %}{% break %}{% endif %}{{ m.content }}"
        "{% generation %}{{ extra }}{% endgeneration %}{% endfor %}"
    )
    data = {"chat_template": f"{tmp_path}/t.jinja"}
    args = {"limit": 1, "extra": "!"}
    assert (
        text_of(
            PromptTokenizer(folders["chatml"], DataConfig(**data, chat_template_args=args)), [ASKED, ASKED]
        )
        == "1+1?!"
    )
    assert "does not use loop; remove" in refused(folders["chatml"], **data, chat_template_args={"loop": 1})


def test_a_system_prompt_that_the_template_drops_is_refused(folders):
    assert "data.system_prompt has no effect" in refused(folders["deepseek"], system_prompt="Be brief.")
    assert "only user, assistant and tool" in refused(folders["mistral"], system_prompt="Be brief.")
    assert "Be brief." in text_of(
        PromptTokenizer(folders["llama3"], DataConfig(system_prompt="Be brief.")), "1"
    )


# --- the vocabulary


@pytest.mark.parametrize("kind", ["chatml", "llama3", "mistral"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, kind):
    """Its last tokens have no row in the embedding. A run used to end when the first of them came."""
    known = len(PromptTokenizer(save_tokenizer(tmp_path / "m", kind)).tokenizer)
    for missing in (1, 5, 100):
        folder = save_tokenizer(tmp_path / "m", kind, tokens_of_model=known - missing)
        for template in ("tokenizer", "none"):
            message = refused(folder, chat_template=template)
            assert (
                f"the tokenizer has {known} tokens, but the model has only {known - missing} "
                "(vocab_size of its config.json)" in message
            )
    for more in (0, 1, 1000):  # embeddings are padded to convenient sizes
        PromptTokenizer(save_tokenizer(tmp_path / "m", kind, tokens_of_model=known + more))


def test_added_tokens_count_by_their_ids(tmp_path):
    folder = save_tokenizer(tmp_path, "chatml", special=["<a>", "<b>"])
    known = len(PromptTokenizer(folder).tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": known}))
    PromptTokenizer(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<late>"])
    tokenizer.save_pretrained(folder)
    assert f"the tokenizer has {known + 1} tokens, but the model has only {known}" in refused(folder)
    assert "cannot embed '<late>'" in refused(folder)


def test_check_names_a_tokenizer_that_is_too_large(tmp_path):
    from make_tiny_model import make

    make(tmp_path / "m", hidden=64, ffn=128)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    tokenizer.add_tokens([PAD])
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    [violation] = check(None, [f"model.path={tmp_path}/m", f"data.train={tmp_path}/p.jsonl"]).violations
    assert f"cannot embed '{PAD}'" in violation
