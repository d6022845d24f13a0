"""Results that evaluations report and keep."""

import json
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.commands.evaluate import evaluate, table
from grpo_megatron.config.command import Command
from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.derived import evaluation_rollout
from grpo_megatron.config.load import read_config
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig, Strategy
from grpo_megatron.config.schema import Config, EvalConfig, ModelConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.sources import held_out_prompts
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.model import architecture_violations
from grpo_megatron.preflight.rules import violations
from grpo_megatron.rewards.answers import answer_finder
from grpo_megatron.rollout.evaluation import Evaluation, scalars
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.rollout.statistics import majority_reward, pass_at_k
from tests.models import random_samples, tiny_model
from tests.tools import no_file_beyond


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (5, 2), (6, 6)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "b", "a"], ["a", "a_1", "b", "a_3"]),
        (["average", "average"], ["average_0", "average_1"]),
        (["a", "a", "a_1"], ["a", "a_2", "a_1"]),
        (["a_2", "a", "a"], ["a_2", "a", "a_3"]),
        (["a", "a", "a_1", "a_1", "a"], ["a", "a_2", "a_1", "a_1_3", "a_4"]),
    ],
)
def test_data_sets_of_one_name_are_all_there(tmp_path, sources, names):
    from make_tiny_model import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path)
    files = [tmp_path / str(number) / f"{name}.jsonl" for number, name in enumerate(sources)]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(json.dumps({"prompt": str(number), "answer": "1"}))
    config = Config(data=DataConfig(eval=[str(file) for file in files], chat_template="none"))
    found = held_out_prompts(config, PromptTokenizer(str(tmp_path), config.data))
    assert [(name, prompt.text) for name, (prompt,) in found.items()] == [
        (name, str(i)) for i, name in enumerate(names)
    ]


def evaluation_of(engines, datasets, folder, show=lambda *text: None, greedy=False, n=4, **reward):
    rollout = RolloutConfig(strategy=Strategy.beam)  # of the training; evaluations sample
    config = Config(eval=EvalConfig(n=n, greedy=greedy), reward=RewardConfig(**reward), rollout=rollout)
    return Evaluation(engines, datasets, config, str(folder), show)


@pytest.mark.parametrize(
    ("answers", "rewards", "right"),
    [
        ("aab", [0.25, 0.25, 1], 0.25),
        ("bab", [1, 0, 1], 1),
        ("abba", [0.5, 0, 0, 0.5], 0.5),  # as many: the first
        ("baab", [0, 0.5, 0.5, 0], 0),
        ("-b-b-", [0, 1, 0, 1, 0], 1),  # who has no answer does not vote
        ("--", [0.125, 0], 0.125),
    ],
)
def test_the_answer_that_most_give_has_its_reward(answers, rewards, right):
    assert majority_reward([None if answer == "-" else answer for answer in answers], rewards) == right


@pytest.mark.parametrize(
    ("reward", "response", "answer"),
    [
        ({}, "so 5", None),
        ({"response_from": ["last_number"]}, "so 1,234.", "1,234"),
        ({"response_from": ["last_number"], "function": "math"}, "so 1,234.", "1234"),
        ({"response_from": ["boxed"], "function": "math"}, r"\boxed{(1,23)}", "(1,23)"),
        ({"response_from": ["boxed"], "function": "math"}, r"\boxed{( 1, 23 )}", "(1,23)"),
        ({"response_from": ["boxed"], "function": "math"}, r"\boxed{(1,234, 1.5e3)}", "(1234,1500)"),
        ({"response_from": ["boxed"], "terms": {"right": {"function": "math"}}}, r"\boxed{1{,}234}", "1234"),
        ({"response_from": ["last_number"], "function": "math"}, "pages 3-5", "5"),
        ({"response_from": ["boxed"], "function": "choice"}, r"\boxed{\text{(B) } 12}", "B"),
        ({"response_from": ["boxed"], "function": "choice"}, r"\boxed{12}", None),
        (
            {"response_from": ["boxed"], "terms": {"a": {"function": "choice", "letters": "12"}}},
            r"\boxed{2) Paris}",
            "2",
        ),
        ({"response_from": ["boxed", "hashes"]}, "#### 7 \nand", "7"),
        ({"response_from": ["boxed"]}, "7", None),
        ({"extract": "is (\\d+)"}, "a is 1, b is 2", "2"),
        ({"extract": "is|(no)"}, "it is", None),
        ({"extract": "x+"}, "x y", "x"),
    ],
)
def test_the_answer_of_a_response(reward, response, answer):
    find = answer_finder(RewardConfig(**reward))
    assert (find and find(response)) == answer


def test_the_evaluation_samples_as_its_section_says():
    training = RolloutConfig(n=8, strategy=Strategy.beam, temperature=0.7, top_p=0.9, top_k=50, stop=["x"])
    config = Config(rollout=training, eval=EvalConfig(n=2, temperature=0.0, top_p=0.5))
    found = evaluation_rollout(config)
    sampled = {"n": 2, "strategy": Strategy.sampling, "temperature": 0.0, "top_p": 0.5, "top_k": -1}
    assert found == replace(training, **sampled)
    assert found.max_response_length == training.max_response_length
    config.eval.max_response_length = 7
    assert evaluation_rollout(config) == replace(found, max_response_length=7)


class Engines:
    """Engines whose responses are the words of the prompt's text.

    A response is right if it equals the answer; the first response is the greedy one.
    """

    def generate(self, prompts, rollout, caller):
        assert rollout.strategy == Strategy.sampling
        assert caller == Caller.evaluate
        groups = []
        for prompt in prompts:
            texts = prompt.text.split()[: rollout.n]
            samples = (
                sample.with_texts(text).scored(float(text == prompt.answer), {})
                for sample, text in zip(random_samples(count=len(texts)), texts, strict=True)
            )
            groups.append(Group(0, prompt, tuple(samples)))
        return groups


def prompts(*pairs):
    return [Prompt(uid, np.array([1]), text, answer) for uid, (text, answer) in enumerate(pairs)]


def test_scores_by_data_set_and_on_average(tmp_path):
    shown = []
    datasets = {
        "easy": prompts(("1 1 2 1", "1"), ("3 4 4 3", "4")),
        "hard": prompts(("5 6 6 x", "5"), ("7 7 8 8", "9")),
    }
    evaluation = evaluation_of(
        Engines(), datasets, tmp_path, lambda *text: shown.append(text), True, response_from=["last_number"]
    )
    scores = evaluation.scores(step=3)
    easy = {"mean@4": 5 / 8, "pass@2": (1 + 5 / 6) / 2, "pass@4": 1.0, "maj@4": 0.5, "greedy": 0.5}
    hard = {"mean@4": 1 / 8, "pass@2": 0.25, "pass@4": 0.5, "maj@4": 0.0, "greedy": 0.5}
    average = {name: (easy[name] + hard[name]) / 2 for name in easy}
    assert scores == {
        "easy": pytest.approx(easy),
        "hard": pytest.approx(hard),
        "average": pytest.approx(average),
    }
    assert list(scores["easy"]) == list(easy)
    assert scalars(scores)["eval/hard/pass@2"] == pytest.approx(0.25)
    assert scalars({"easy": easy})["eval/maj@4"] == 0.5
    assert [(step, name) for step, name, _ in shown] == [
        (3, f"eval/{name}/{n}") for name in ("easy", "hard") for n in (0, 1)
    ]
    assert "response 3 of 4: reward 0" in shown[0][2]
    assert [line.split() for line in table(scores).splitlines()][::3] == [
        ["mean@4", "pass@2", "pass@4", "maj@4", "greedy"],
        ["average", "0.3750", "0.5833", "0.7500", "0.2500", "0.5000"],
    ]


def test_the_vote_is_over_what_was_scored(tmp_path):
    """A tool returned 1 in every episode, but two of the last turns say 2."""

    class Episodes(Engines):
        def generate(self, prompts, rollout, caller):
            (group,) = super().generate(prompts, rollout, caller)
            samples = (s.with_texts(f"{s.response_text} 1", s.response_text) for s in group.samples)
            return [Group(0, group.prompt, tuple(samples))]

    evaluation = evaluation_of(
        Episodes(), {"easy": prompts(("x 2 2", "2"))}, tmp_path, n=3, response_from=["last_number"]
    )
    assert evaluation.scores(0)["easy"]["maj@3"] == 1


def test_no_vote_where_no_answer_is_looked_for(tmp_path):
    datasets = {"easy": prompts(("1 1 2 1", "1"))}
    assert "maj@4" not in evaluation_of(Engines(), datasets, tmp_path).scores(0)["easy"]
    assert (
        "maj@2"
        not in evaluation_of(Engines(), datasets, tmp_path, n=2, response_from=["whole"]).scores(0)["easy"]
    )


def test_what_is_about_the_trainer_alone_is_not_looked_at():
    given = ["model.path=m", "data.eval=e.jsonl"]
    training = [
        "megatron.sequence_parallel=true",
        "train.ppo_mini_batch_size=5",
        "cluster.placement=colocated",
        "rollout.strategy=beam",
    ]
    assert violations(read_config(None, [*given, *training], Command.eval), Command.eval) == []
    assert (
        len(
            violations(
                read_config(None, [*given, "reward.answer_from=[]", "rollout.max_turns=3"], Command.eval),
                Command.eval,
            )
        )
        == 2
    )
    with pytest.raises(UserError, match=r"no value for data\.eval"):
        read_config(None, given[:1], Command.eval)


@pytest.mark.parametrize(
    "broken",
    [
        ["reward.function=mathh"],
        ["rollout.engine.max_total_tokens=20"],
        ["reward.function=code", "reward.code.preamble=import ("],
    ],
)
def test_an_evaluation_is_checked_although_the_training_replays(broken):
    """An evaluation ignores rollout.replay, but these rules did not, and the run failed later."""
    config = read_config(None, ["model.path=m", "data.eval=e.jsonl", *broken], Command.eval)
    expected = violations(config, Command.eval)
    assert len(expected) == 1
    config.rollout.replay = "r.jsonl"
    assert violations(config, Command.eval) == expected


@pytest.mark.parametrize(
    ("command", "data", "of"),
    [
        (Command.train, "data.eval=e.jsonl", ["rollout", "eval"]),
        (Command.train, "data.eval=null", ["rollout"]),
        (Command.eval, "data.eval=e.jsonl", ["eval"]),
        (Command.sft, "data.eval=e.jsonl", ["rollout"]),
    ],
)
def test_responses_are_no_longer_than_the_model_can_be(tmp_path, command, data, of):
    arch = read_architecture(tiny_model(tmp_path, "qwen3"))  # made for 256 positions
    lengths = ["data.max_prompt_length=6", "rollout.max_response_length=251", "eval.max_response_length=1000"]
    config = read_config(None, [f"model.path={tmp_path}", "data.train=d.jsonl", data, *lengths], command)
    found = [
        sentence
        for sentence in architecture_violations(config, arch, command)
        if "supports only 256 positions" in sentence
    ]
    assert [sentence.split()[2] for sentence in found] == [f"{section}.max_response_length" for section in of]


def test_a_checkpoint_of_a_run_is_converted_first(tmp_path):
    (tmp_path / "step_00000010" / "actor").mkdir(parents=True)
    config = Config(model=ModelConfig(path=f"{tmp_path}/step_00000010"))
    with pytest.raises(UserError, match=r"convert_megatron_to_hf.py .*/step_00000010 OUT_DIR --hf HF_DIR"):
        evaluate(config)


def test_samples_that_have_no_room_are_left_out(tmp_path, capsys):
    group = Group(
        0, Prompt(3, np.array([1]), "1+1", "2"), tuple(s.scored(1.0, {}) for s in random_samples(count=2))
    )
    engines = SimpleNamespace(generate=lambda prompts, rollout, caller: [group])
    evaluation = evaluation_of(engines, {"held_out": [group.prompt]}, tmp_path, n=2)
    with no_file_beyond(50):
        assert evaluation.run(1)["eval/mean@2"] == evaluation.run(2)["eval/mean@2"] == 1.0
    assert list((tmp_path / "eval").iterdir()) == []
    assert (
        capsys.readouterr().out.count("step_00000001_held_out.jsonl could not be written (File too large)")
        == 1
    )
    evaluation.run(3)
    row = json.loads((tmp_path / "eval" / "step_00000003_held_out.jsonl").read_text())
    assert (row["uid"], [response["reward"] for response in row["responses"]]) == (3, [1.0, 1.0])
