"""Input and scores of a reward model beside the policy. tests/parallel covers its computation."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.arrays import reading_forbidden, values_of
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.config.command import Command
from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.conversations import conversations_of, same_tokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.check import check
from grpo_megatron.preflight.model import model_violations
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.reward_model_input import RewardModelInput
from grpo_megatron.trainer.scoring import ModelRewards
from tests.models import tiny_model

OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save(folder: Path, kind: str, template: str | None = None, reward_model: bool = True) -> str:
    from make_tiny_model import make_tokenizer

    tiny_model(folder, "qwen3", vocab_size=320)
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if reward_model:
        config |= {
            "architectures": ["Qwen3ForSequenceClassification"],
            "id2label": {"0": "reward"},
            "pad_token_id": 0,
        }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "policy": save(root / "policy", "characters", reward_model=False),
        "same": save(root / "same", "characters"),
        "other": save(root / "other", "bytes", OTHER_TEMPLATE),
    }


class Ranks:
    """Stands in for the ranks: records its input, and scores a sequence by its length."""

    def __init__(self, sizes: ParallelSizes = ParallelSizes(), score=float):
        self.sizes, self._score, self.ids = sizes, score, []

    def score_stored(self, plan, handles) -> np.ndarray:
        every = sorted(i for rank in range(self.sizes.dp) for i in plan.sequences(rank))
        assert every == list(range(len(handles)))
        self.ids = values_of(handles)
        return np.array([self._score(len(ids)) for ids in self.ids], np.float32)

    def read(self, tokenizer) -> list[str]:
        return [tokenizer.decode_all(ids) for ids in self.ids]


class Scoring:
    """Scores groups as a run does: a worker puts their conversations together, and ranks score them."""

    def __init__(self, config: Config, ranks: Ranks):
        rewards = SimpleNamespace(score_group=self._unchanged)
        self.model_input = RewardModelInput(config)
        self._episodes = SingleTurn(rewards, self.model_input)
        self._score = ModelRewards(config, ranks, ranks_turn=lambda: None)

    @staticmethod
    async def _unchanged(prompt, samples):
        return samples

    def __call__(self, groups: list[Group]) -> list[Group]:
        completed = [
            replace(group, samples=asyncio.run(self._episodes.complete(group.prompt, group.samples)))
            for group in groups
        ]
        with reading_forbidden():
            return self._score(completed)


def setup(folders, which: str, ranks: Ranks, *overrides: str) -> tuple[Scoring, PromptTokenizer]:
    changes = [
        f"model.path={folders['policy']}",
        "data.train=d.jsonl",
        "train.max_tokens_per_micro_batch=64",
        *overrides,
    ]
    config = read_config(None, [*changes, "reward.function=model", f"reward.model.path={folders[which]}"])
    conversations = conversations_of(folders[which], folders["policy"], config.data)
    return Scoring(config, ranks), conversations.tokenizer


def groups(folders, said="1+1", responses=("2<eos>", "3")) -> list[Group]:
    tokenizer = PromptTokenizer(folders["policy"])
    text, ids = tokenizer.prompt(said, "here")
    samples = []
    for response in responses:
        written = tokenizer.encode(response)
        samples.append(
            Sample.of(
                group_id=0,
                trajectory_id=len(samples),
                prompt_ids=ids,
                response_ids=written,
                loss_mask=np.ones(len(written), bool),
                rollout_logprobs=np.zeros(len(written), np.float32),
                finish_reason="stop",
                response_text=tokenizer.decode(written),
                reward_components={"other": 1.0},
            )
        )
    return [Group(0, Prompt(0, ids, text, "2", messages=tokenizer.messages(said)), tuple(samples))]


def test_with_the_same_tokenizer_tokens_are_read_as_they_were_sampled(folders):
    ranks = Ranks()
    score, tokenizer = setup(folders, "same", ranks)
    before = groups(folders)
    (group,) = score(before)
    assert ranks.read(tokenizer) == ["<user>1+1<assistant>2<eos>", "<user>1+1<assistant>3<eos>"]
    assert group.rewards == [7.0, 7.0]
    assert [sample.conversation for sample in group.samples] == [None, None]  # so that it can be freed
    assert [sample.reward_components for sample in group.samples] == [{"other": 1.0, "model": 7.0}] * 2
    assert [sample.arrays.response_ids.tolist() for sample in group.samples] == [
        s.arrays.response_ids.tolist() for s in before[0].samples
    ]


def test_with_another_tokenizer_the_text_is_read_in_its_own_template(folders):
    ranks = Ranks()
    score, tokenizer = setup(folders, "other", ranks)
    score(groups(folders))
    assert ranks.read(tokenizer) == ["[user]1+1|[assistant]2|", "[user]1+1|[assistant]3|"]
    assert not same_tokenizer(folders["policy"], folders["other"])


FILE_TEMPLATE = "{% for m in messages %}({{ style }}{{ m['content'] }}){% endfor %}"


@pytest.mark.parametrize(
    ("which", "reads"), [("other", "[user]1+1|[assistant]2|"), ("same", "<user>1+1<assistant>2)")]
)
def test_a_template_file_is_the_policys(folders, tmp_path, which, reads):
    """A reward model that reads the policy's tokens has what that template puts behind a response."""
    (tmp_path / "t.jinja").write_text(FILE_TEMPLATE)
    ranks, changes = (
        Ranks(),
        [f"data.chat_template={tmp_path}/t.jinja", "data.chat_template_args={style: '7'}"],
    )
    score, tokenizer = setup(folders, which, ranks, *changes)
    score(groups(folders, responses=("2",)))
    assert ranks.read(tokenizer) == [reads]


def test_a_reward_model_with_another_tokenizer_needs_a_template(folders, tmp_path):
    from make_tiny_model import make_tokenizer

    (tmp_path / "t.jinja").write_text(FILE_TEMPLATE)
    tokenizer, folder = make_tokenizer("bytes"), tmp_path / "bare"
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    for template in ("tokenizer", f"{tmp_path}/t.jinja"):
        data = DataConfig(chat_template=template)
        with pytest.raises(
            UserError, match=r"^reward\.model\.path: .*bare: .* no chat template, .* put .*template\.jinja"
        ):
            conversations_of(str(folder), folders["policy"], data)
    conversations_of(str(folder), folders["policy"], DataConfig(chat_template="none"))
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    read = conversations_of(str(folder), folders["policy"], data).tokenizer.prompt("1+1", "f:1")[0]
    assert read == "[user]1+1|[assistant]"


def test_prompts_of_token_ids_have_no_text_for_another_tokenizer(folders):
    score, _ = setup(folders, "other", Ranks())
    with pytest.raises(UserError, match="prompt consists of token ids"):
        score(groups(folders, said=[7, 8]))
    setup(folders, "same", Ranks())[0](groups(folders, said=[7, 8]))


def test_a_policy_that_says_nothing_is_scored_too(folders):
    """A response that is only the end token has no text for another tokenizer.

    It has no token if that end token counts as padding.
    """
    ranks = Ranks()
    score, tokenizer = setup(folders, "other", ranks)
    score(groups(folders, responses=("<eos>", "3")))
    assert ranks.read(tokenizer) == ["[user]1+1|[assistant]|", "[user]1+1|[assistant]3|"]
    score, tokenizer = setup(folders, "same", ranks)
    score.model_input._conversations.pad = tokenizer.tokenizer.eos_token_id
    score(groups(folders, responses=("<eos>", "3")))
    assert ranks.read(tokenizer) == ["<user>1+1<assistant>", "<user>1+1<assistant>3"]


def test_what_is_too_long_loses_its_beginning(folders):
    ranks = Ranks()
    score, tokenizer = setup(folders, "same", ranks, "train.max_tokens_per_micro_batch=6")
    score(groups(folders, responses=("2", "23456789")))
    assert ranks.read(tokenizer) == ["1+1<assistant>2<eos>", "56789<eos>"]


@pytest.mark.parametrize("packing", ["true", "false"])
def test_fewer_samples_than_replicas_need(folders, packing):
    ranks = Ranks(ParallelSizes(dp=3))
    score, _ = setup(folders, "same", ranks, "megatron.data_parallel=3", f"train.packing={packing}")
    (group,) = score(groups(folders, responses=("2", "34")))
    assert group.rewards == [7.0, 8.0]
    assert len(ranks.ids) == 3


def test_a_score_that_is_no_number_ends_the_run(folders):
    score, _ = setup(folders, "same", Ranks(score=lambda length: np.nan))
    with pytest.raises(UserError, match="2 of 2 samples as NaN or infinity"):
        score(groups(folders))


# --- before anything starts


def violations(folders, path: str, *overrides: str, command: Command = Command.train) -> list[str]:
    changes = [
        f"model.path={folders['policy']}",
        "data.train=d.jsonl",
        "data.max_prompt_length=16",
        "rollout.max_response_length=16",
    ]
    config = read_config(None, [*changes, "reward.function=model", f"reward.model.path={path}", *overrides])
    return model_violations(config, read_architecture(config.model.path), command)


def test_a_language_model_is_no_reward_model(folders):
    (sentence,) = violations(folders, folders["policy"])
    assert "is a language model, not a reward model; train a reward model from it with" in sentence
    # Other commands may share the configuration, and do not load the reward model.
    assert violations(folders, folders["policy"], command=Command.sft) == []
    assert violations(folders, folders["policy"], command=Command.eval) == []


def test_a_reward_model_that_does_not_divide(folders, tmp_path):
    tiny_model(tmp_path, "qwen3", vocab_size=320, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "reward"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = violations(folders, str(tmp_path), "megatron.pipeline_parallel=2", "data.train_batch_size=32")
    assert any(
        "does not fit the parallel sizes in megatron.*" in sentence and "layers" in sentence
        for sentence in found
    )
    assert any("missing: score.weight" in sentence for sentence in found)  # of a language model's weights


def test_a_classifier_of_two_labels_is_no_reward_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(
        UserError, match=r"a reward model must have one label, but id2label or num_labels sets 2"
    ):
        read_architecture(str(tmp_path))


def test_a_family_without_a_class_in_transformers_is_refused(tmp_path):
    tiny_model(tmp_path, "glm4_moe")
    config = read_config(None, [f"model.path={tmp_path}", "data.train=d.jsonl"], Command.reward_model)
    found = model_violations(config, read_architecture(str(tmp_path)), Command.reward_model)
    assert any("a glm4_moe reward model could not be exported" in sentence for sentence in found)


def test_a_reward_model_writes_nothing(folders):
    config = read_config(None, [f"model.path={folders['same']}", "data.train=d.jsonl"])
    for command in (Command.train, Command.sft, Command.eval):
        found = model_violations(config, read_architecture(folders["same"]), command)
        assert any(f"`{command}` cannot use it" in sentence for sentence in found)


def test_its_tokenizer_is_looked_at_where_the_policy_is_here(folders):
    arguments = ["data.train=d.jsonl", "reward.function=model", f"reward.model.path={folders['other']}"]
    what = f"tokenizer of reward.model.path {folders['other']}"
    assert what in check(None, [*arguments, f"model.path={folders['policy']}"]).checked
    (sentence,) = [
        one for one in check(None, [*arguments, "model.path=elsewhere"]).not_checked if one.startswith(what)
    ]
    assert "model.path, which is not a folder here" in sentence
