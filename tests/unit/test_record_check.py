"""Records that a reward cannot score are found when data is loaded, by `train`, `eval` and `config check`."""

import json

import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.commands.train import _Data
from grpo_megatron.config.load import read_config
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import check
from grpo_megatron.rewards.scoring import Failed, RewardTask, Scored, Scorer
from grpo_megatron.rollout.environments import StepResult, environment
from tests.models import tiny_model

SUMS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
# reward options, a record that can be scored, one that cannot, what is said of it
BAD = [
    (
        ["reward.function=code"],
        {"answer": "assert f() == 1"},
        {"answer": "assert f( == 1"},
        "neither Python code nor JSON with inputs and outputs",
    ),
    (
        ["reward.function=code"],
        {"answer": json.dumps(SUMS)},
        {"answer": json.dumps(SUMS | {"outputs": []})},
        "as many inputs as outputs",
    ),
    (
        ["reward.function=code"],
        {"answer": json.dumps(SUMS)},
        {"answer": json.dumps(SUMS)[:-3]},
        "neither Python code nor",
    ),
    (
        ["reward.terms.right.function=code"],
        {"answer": ["assert f() == 1"]},
        {"answer": ["assert f() == 1"], "test_imports": [5]},
        "TypeError",
    ),
    (
        ["reward.answer_from=[hashes]"],
        {"answer": "so #### 5"},
        {"answer": "so 5"},
        r"reward.answer_from=\['hashes'\]",
    ),
    (
        ["reward.function=math", "reward.answer_from=[boxed]"],
        {"answer": "\\boxed{5}"},
        {"answer": ""},
        r"reward.answer_from",
    ),
    (["reward.function=choice"], {"answer": "B"}, {"answer": "Z"}, "'Z' contains none of the letters"),
]  # fmt: skip
each = pytest.mark.parametrize(("options", "good", "bad", "says"), BAD)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder, "qwen3", vocab_size=320)
    make_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def arguments(model, folder, *records, key="data.train") -> list[str]:
    lines = [json.dumps({"prompt": "1+1"} | record) for record in records]
    (folder / "p.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "sound.jsonl").write_text(lines[0] + "\n")
    files = {"data.train": folder / "sound.jsonl"} | {key: folder / "p.jsonl"}
    return [f"model.path={model}", *(f"{name}={file}" for name, file in files.items())]


@pytest.mark.slow_but(4)
@each
@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_record_that_cannot_be_scored_is_named_before_a_run(model, tmp_path, options, good, bad, says, key):
    given = [*arguments(model, tmp_path, good, bad, key=key), *options]
    with pytest.raises(UserError, match=rf"p\.jsonl:2: reward .*cannot score this record: .*{says}") as found:
        _Data(read_config(None, given))
    assert "correct or remove the record, or set reward.on_failure=value " in str(found.value)
    assert str(found.value) in check(None, given).violations
    _Data(read_config(None, [*given, "reward.on_failure=value"]))
    _Data(read_config(None, [*arguments(model, tmp_path, good, key=key), *options]))


@each
def test_what_is_refused_would_have_failed_when_it_was_drawn(options, good, bad, says):
    scorer = Scorer(
        read_config(None, ["model.path=m", "data.train=d", *options]).reward, lambda ids: "The answer is (A)"
    )
    records = [record | {"test_imports": record.get("test_imports", [])} for record in (good, bad)]
    found = scorer.work([RewardTask(7, "p", [], record.pop("answer"), record) for record in records], 100.0)
    assert [type(one) for one in found] == [Scored, Failed]


@environment("asks nothing of records")
class AsksNothing:
    def __init__(self, prompt: Prompt):
        pass

    def reset(self, seed: int) -> None:
        return None

    def step(self, response: str) -> StepResult:
        return StepResult(done=True)


def test_rewards_that_are_not_asked_check_nothing(model, tmp_path):
    given = arguments(model, tmp_path, {"answer": "B"}, {"answer": ""})
    with pytest.raises(UserError, match="cannot score"):
        _Data(read_config(None, [*given, "rollout.environment=tools"]))
    _Data(read_config(None, [*given, "rollout.environment=asks nothing of records"]))


def test_long_prompts_that_are_left_out_are_not_asked_about(model, tmp_path):
    given = arguments(model, tmp_path, {"answer": "B"}, {"answer": "", "prompt": "1" * 100})
    _Data(read_config(None, [*given, "data.max_prompt_length=50", "data.overlong_prompts=skip"]))
    with pytest.raises(UserError, match="cannot score"):
        _Data(read_config(None, [*given, "data.max_prompt_length=200"]))
