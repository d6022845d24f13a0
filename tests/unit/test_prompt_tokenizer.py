"""Prompts in every form that people use, as text and tokens."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from grpo_megatron.config.data import DataConfig, OverlongPrompts
from grpo_megatron.config.load import read_config
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import Config, ModelConfig
from grpo_megatron.data import PromptTokenizer, load_prompts
from grpo_megatron.data.examples import load_examples
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import check
from tests.models import tiny_qwen3

THINKING = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}#{% endif %}"
)


def save(folder, kind="characters", around=None, template=True):
    """Write a tokenizer.

    around: what it puts around texts, such as `<bos> $A`.
    """
    from make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer(kind)
    if around:
        special = [
            (token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>") if token in around
        ]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=special)
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return save(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tokenizer without a chat template and with a BOS token before texts, like Llama's."""
    return save(tmp_path_factory.mktemp("base"), around="<bos> $A", template=False)


def tokens(tokenizer, ids):
    return tokenizer.tokenizer.convert_ids_to_tokens(ids.tolist())


def refused(model, config, prompt="1+1"):
    with pytest.raises(UserError) as caught:
        PromptTokenizer(model, config).prompt(prompt, "f:1")
    return str(caught.value)


def test_a_base_models_prompts_are_what_its_tokenizer_makes_of_the_text(base):
    tokenizer = PromptTokenizer(base, DataConfig(chat_template="none"))
    text, ids = tokenizer.prompt("1+1=", "f:1")
    assert text == "1+1="
    assert ids.tolist() == tokenizer.tokenizer("1+1=")["input_ids"]
    assert tokens(tokenizer, ids) == ["<bos>", "1", "+", "1", "="]
    # What follows a prompt, such as an observation, gets no BOS of its own.
    assert tokens(tokenizer, tokenizer.encode("1+1=")) == ["1", "+", "1", "="]


@pytest.mark.parametrize(
    ("around", "expected"),
    [("<bos> $A <eos>", ["<bos>", "1"]), ("$A <eos>", ["1"]), ("$A", ["1"])],
)
def test_a_prompt_never_ends_with_the_end_token(tmp_path, around, expected):
    tokenizer = PromptTokenizer(save(tmp_path, around=around), DataConfig(chat_template="none"))
    assert tokens(tokenizer, tokenizer.prompt("1", "f:1")[1]) == expected


def test_a_template_alone_decides_about_special_tokens(tmp_path):
    tokenizer = PromptTokenizer(save(tmp_path, around="<bos> $A"))
    assert tokens(tokenizer, tokenizer.prompt("1", "f:1")[1]) == ["<user>", "1", "<assistant>"]


def test_a_tokenizer_without_a_template_says_what_to_set(base):
    message = refused(base, DataConfig())
    assert message.startswith(f"{base}: the tokenizer has no chat template")
    assert "data.chat_template=none" in message
    assert "Jinja" in message


def test_a_template_of_ones_own_and_its_arguments(base, tmp_path):
    (tmp_path / "t.jinja").write_text(THINKING)
    config = DataConfig(chat_template=f"{tmp_path}/t.jinja", system_prompt="7")
    assert PromptTokenizer(base, config).prompt("1", "f:1")[0] == "[system]7[user]1[assistant]"
    config.chat_template_args = {"enable_thinking": False, "add_generation_prompt": False}
    assert PromptTokenizer(base, config).prompt("1", "f:1")[0] == "[system]7[user]1#"


def test_template_arguments_on_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "data: {train: a, chat_template_args: {enable_thinking: true, style: short}}"
    )
    arguments = ["model.path=m", "data.chat_template_args.enable_thinking=false"]
    config = read_config(str(tmp_path / "c.yaml"), arguments)
    assert config.data.chat_template_args == {"enable_thinking": False, "style": "short"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"chat_template": "Tokenizer"},
            "data.chat_template=Tokenizer: there is no such file; give the path of a template "
            "file, or set data.chat_template=tokenizer",
        ),
        ({"chat_template": "none", "system_prompt": "s"}, "data.system_prompt needs a chat template"),
        (
            {"chat_template": "none", "chat_template_args": {"a": 1}},
            "data.chat_template_args needs a chat template",
        ),
        ({"chat_template_args": {"tokenize": True}}, "data.chat_template_args cannot contain tokenize"),
        # They would hide those of the environment from the model.
        ({"chat_template_args": {"tools": []}}, "data.chat_template_args cannot contain tools, because"),
    ],
)
def test_settings_that_do_not_go_together(chat, settings, complaint):
    assert complaint in refused(chat, DataConfig(**settings))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("", "is an empty file"),
        ("{% for %}", "the chat template is not valid Jinja: TemplateSyntaxError"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "f:1: the chat template failed: TemplateError: roles must alternate",
        ),
        ("{{ messages[7]['content'] + 1 }}", "f:1: the chat template failed: UndefinedError"),
        (" {# nothing #} \n", "f:1: the prompt is empty"),
    ],
)
def test_templates_that_make_no_prompt(chat, tmp_path, template, complaint):
    (tmp_path / "t.jinja").write_text(template)
    assert complaint in refused(chat, DataConfig(chat_template=f"{tmp_path}/t.jinja"))


def test_a_prompt_of_token_ids_is_taken_as_it_is(chat, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": [3, 8, 9, 4], "answer": "1"}\n')
    config = DataConfig()
    [prompt], _ = load_prompts(str(tmp_path / "p.jsonl"), PromptTokenizer(chat, config), config)
    assert prompt.ids.tolist() == [3, 8, 9, 4]
    assert prompt.ids.dtype == "int32"
    assert prompt.text == "<user>12<assistant>"


def test_ids_beyond_the_models_vocabulary(chat, tmp_path):
    known = len(PromptTokenizer(chat).tokenizer)
    assert (
        f"f:1: token id {known} of the prompt is outside the model's vocabulary (0 to {known - 1}"
        in refused(chat, None, [1, known])
    )
    assert "token id -1" in refused(chat, None, [-1])
    assert "data.system_prompt cannot be applied" in refused(chat, DataConfig(system_prompt="7"), [1])
    assert "data.prompt_suffix cannot be applied" in refused(chat, DataConfig(prompt_suffix="=?"), [1])
    # The model decides, not the tokenizer: here it has a row more than the tokenizer has tokens.
    folder = tmp_path / "m"
    shutil.copytree(chat, folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": known + 1}))
    assert PromptTokenizer(str(folder)).prompt([known], "f:1")[1].tolist() == [known]


def message(content, **other):
    return [{"role": "user", "content": content, **other}]


def test_parts_of_a_message_that_are_text_are_joined(chat):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2", "image": None}]
    assert PromptTokenizer(chat).prompt(message(parts, name=None), "f:1")[0] == "<user>1+2<assistant>"


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "the prompt is empty"),
        (" \n\t", "the prompt is empty"),
        ([], "the prompt is an empty list"),
        (
            5,
            "the prompt must be a string, a list of messages with role and content, or "
            "a list of token ids, but it is 5",
        ),
        ({"role": "user", "content": "1"}, "the prompt must be a string"),
        (["1", "2"], "the prompt must be a string"),
        ([1, 2.5], "the prompt must be a string"),
        ([True, False], "the prompt must be a string"),
        ([{"content": "1"}], "message 0 of the prompt has no role (its keys are ['content']); add one"),
        ([{"role": None, "content": "1"}], "message 0 of the prompt has no role"),
        ([{"role": "user"}], "message 0 of the prompt has no content"),
        (message(7), "message 0 of the prompt has the content 7, which is not text"),
        (
            message([{"type": "image_url", "image_url": "x"}]),
            "message 0 of the prompt has a part of type 'image_url'; only text can be used",
        ),
        (message([{"type": "text"}]), "message 0 of the prompt has a part of type 'text'"),
        (message(["1"]), "message 0 of the prompt has a part of type '1'"),
    ],
)
def test_prompts_that_are_none(chat, prompt, complaint):
    assert refused(chat, None, prompt).startswith(f"f:1: {complaint}")


def test_messages_need_a_template(base):
    assert "a list of chat messages, but data.chat_template=none" in refused(
        base, DataConfig(chat_template="none"), message("1")
    )


def test_a_folder_without_a_tokenizer(tmp_path):
    """The library makes an empty tokenizer of it, which turns every prompt into no token at all."""
    model = tiny_qwen3(tmp_path / "m")
    for template in ("tokenizer", "none"):
        assert "has no tokenizer" in refused(str(model), DataConfig(chat_template=template))
    assert "is not a folder; it must be a model folder with a tokenizer" in refused(
        str(tmp_path / "nothing"), None
    )
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in refused(str(model), None)


def test_a_checkpoints_code_is_not_run(tmp_path, monkeypatch):
    """A user at a terminal used to be asked whether to run it, by transformers, once in each process."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder, ran = Path(save(tmp_path / "model")), tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Anything: ...")
    config = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "code.Anything"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert PromptTokenizer(str(folder)).prompt("1+1", "f:1")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    code = {"auto_map": {"AutoTokenizer": ["code.Anything", None]}, "tokenizer_class": "Anything"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | code))
    assert "the tokenizer is Python code in the checkpoint" in refused(str(folder), None)
    assert not ran.exists()


def test_a_prompt_without_a_token_is_refused(tmp_path):
    """The tokenizer drops all of its characters. An engine must never get an empty prompt."""
    from tokenizers import Regex, normalizers

    folder = save(tmp_path, template=False)
    tokenizer = PromptTokenizer(folder, DataConfig(chat_template="none"))
    tokenizer.tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("x"), "")
    assert len(tokenizer.prompt("x1", "f:1")[1]) == 1
    with pytest.raises(UserError, match="f:1: the prompt has no tokens: 'xx'"):
        tokenizer.prompt("xx", "f:1")


def test_examples_use_the_same_prompts_and_end_their_responses(base, tmp_path):
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": [8, 9], "response": "3"}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(chat_template="none", train=[f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"])
    config = Config(model=ModelConfig(path=base), data=data, rollout=RolloutConfig(max_response_length=2))
    tokenizer = PromptTokenizer(base, data)
    examples, left_out = load_examples(config, tokenizer)
    assert left_out == 0
    assert len(examples) == 4
    assert tokens(tokenizer, examples[2].prompt_ids) == ["<bos>", "1", "+", "1", "="]
    assert tokens(tokenizer, examples[2].response_ids) == ["2", "<eos>"]
    assert examples[3].prompt_ids.tolist() == [8, 9]
    (tmp_path / "b.jsonl").write_text(
        '{"prompt": "1", "response": "2"}\n{"prompt": "1", "response": "234"}\n'
    )
    with pytest.raises(UserError, match=r"b.jsonl:2 has 2 prompt and 4 response tokens, more than"):
        load_examples(config, tokenizer)
    config.data.overlong_prompts = OverlongPrompts.skip
    examples, left_out = load_examples(config, tokenizer)
    assert len(examples) == 3
    assert left_out == 1
    (tmp_path / "b.jsonl").write_text('{"prompt": "1", "response": "234"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl: no examples are left because all 1 are too long"):
        load_examples(config, tokenizer)
    config.data.overlong_prompts, data.max_prompt_length = OverlongPrompts.truncate_left, 2
    with pytest.raises(
        UserError, match=r"b\.jsonl:1 has 2 prompt and 4 response tokens"
    ):  # a response is never cut
        load_examples(config, tokenizer)
    (tmp_path / "b.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    examples, left_out = load_examples(config, tokenizer)
    assert tokens(tokenizer, examples[2].prompt_ids) == ["1", "="]
    assert left_out == 0
    (tmp_path / "b.jsonl").write_text('{"prompt": "1", "response": ["2"]}\n')
    with pytest.raises(
        UserError, match=r"b.jsonl:1: field 'response' must be a string, or a list .*, but is \['2'\]"
    ):
        load_examples(config, tokenizer)


def test_check_names_a_tokenizer_without_a_template_once(tmp_path):
    from make_tiny_model import make

    make(tmp_path / "m", hidden=64, ffn=128)
    (tmp_path / "m" / "chat_template.jinja").unlink()
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    given = [f"model.path={tmp_path}/m", f"data.train={tmp_path}/p.jsonl", f"data.eval={tmp_path}/p.jsonl"]
    report = check(None, given)
    [violation] = report.violations
    assert "no chat template; set data.chat_template=none" in violation
    assert f"fields of data.train {tmp_path}/p.jsonl" in report.checked
    report = check(None, [*given, "data.chat_template=none"])
    assert not report.violations
    assert f"data.eval {tmp_path}/p.jsonl" in report.checked
