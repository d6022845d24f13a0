"""Accuracy on held-out prompts: mean@k, unbiased pass@k and maj@k, per data set and on average."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.config.reward import OnFailure
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.json_files import json_text
from grpo_megatron.monitoring.samples import chosen, group_text
from grpo_megatron.monitoring.terminal import say
from grpo_megatron.paths import replace_text
from grpo_megatron.rewards.answers import answer_finder
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.source import training_sampling
from grpo_megatron.rollout.statistics import majority_reward, pass_rates

# By data set, and AVERAGE over several, by metric.
Scores = dict[str, dict[str, float]]
AVERAGE = "average"


@dataclass
class _Drawn:
    """The groups of a data set, sampled and decoded greedily. failed: how many samples of both failed."""

    sampled: list[Group]
    greedy: list[Group]
    failed: int


class Evaluation:
    """Samples every held-out prompt with the evaluation's own parameters and scores the responses."""

    def __init__(
        self,
        manager: RolloutManager,
        datasets: dict[str, list[Prompt]],
        config: Config,
        directory: str,
        show: Callable[[int, str, str], None],
        score: Callable[[list[Group]], list[Group]] | None = None,
    ):
        """datasets: by name; directory: of the run, for the samples. show: takes step, name and text of what people shall see. score:
        gives groups their rewards; None: they come with them.

        It is called once, when everything is generated: it may need the engines' devices.
        """
        self._manager, self._show, self._score = manager, show, score
        self.datasets = datasets
        self._config, self._shown = config.eval, config.monitor
        self._find_answer = answer_finder(config.reward)
        self._counts_failures = config.reward.on_failure != OnFailure.error
        self._directory, self._said = Path(directory) / "eval", False
        training = training_sampling(config.rollout)
        length = config.eval.max_response_length or training.max_response_length
        common = replace(training, max_response_length=length, same_states=True, beam=None)
        self._sampled = replace(
            common, n=config.eval.n, temperature=config.eval.temperature, top_p=config.eval.top_p
        )
        self._greedy = replace(common, n=1, temperature=0.0)

    def run(self, step: int) -> dict[str, float]:
        """`scores` as scalars."""
        return scalars(self.scores(step))

    def scores(self, step: int) -> Scores:
        """{data set: {"mean@n", "pass@k" for k = 2, 4, .. n, "maj@n", "greedy"}}, and the mean over data sets if there are several.

        mean@n: mean reward of n samples per prompt; a sample passes if its reward reaches eval.pass_reward. maj@n: mean reward of
        the answer that most of the n samples give, where reward.response_from or reward.extract says what a response's answer is.

        "failed": how many samples failed, unless reward.on_failure=error. What is left out of its group counts nowhere else.
        """
        scores = {name: self._dataset(step, name, drawn) for name, drawn in self._drawn().items()}
        if len(scores) > 1:
            # Where samples are left out, a data set may have no prompt with as many as pass@k needs.
            metrics = dict.fromkeys(metric for values in scores.values() for metric in values)
            scores[AVERAGE] = {
                metric: float(np.mean([values[metric] for values in scores.values() if metric in values]))
                for metric in metrics
            }
        return scores

    def _dataset(self, step: int, name: str, drawn: _Drawn) -> dict[str, float]:
        scores = self._scores(drawn.sampled)
        if drawn.greedy:
            scores["greedy"] = _mean_reward(drawn.greedy)
        if self._counts_failures:
            scores["failed"] = float(drawn.failed)
        if self._config.save_samples:
            self._save(step, name, drawn.sampled)
        if self._shown.samples_every:
            for number, group in enumerate(chosen(drawn.sampled, self._shown.sample_groups)):
                self._show(step, f"eval/{name}/{number}", group_text(group, self._shown.sample_characters))
        return scores

    def _drawn(self) -> dict[str, _Drawn]:
        """Return what was drawn of each data set, scored; nothing is decoded greedily unless configured."""
        drawn = {name: self._draw(name, prompts) for name, prompts in self.datasets.items()}
        if self._score is None:
            return drawn
        scored = iter(
            self._score([group for both in drawn.values() for group in [*both.sampled, *both.greedy]])
        )
        return {
            name: _Drawn(
                [next(scored) for _ in both.sampled], [next(scored) for _ in both.greedy], both.failed
            )
            for name, both in drawn.items()
        }

    def _draw(self, name: str, prompts: list[Prompt]) -> _Drawn:
        """Return groups without those of which every sample failed, with reward.on_failure=leave_out."""
        every = self._manager.generate(prompts, self._sampled)
        greedy = self._manager.generate(prompts, self._greedy) if self._config.greedy else []
        failed = sum(group.failed for group in [*every, *greedy])
        failed += sum(
            sequences[0].reward_failed for group in [*every, *greedy] for sequences in group.trajectories
        )
        sampled = [group for group in every if group.samples]
        if not sampled:
            raise UserError(
                f"the evaluation of {name} has no reward: reward.on_failure=leave_out leaves none of its {len(prompts)} prompts a sample; "
                "the messages above say what failed"
            )
        return _Drawn(sampled, [group for group in greedy if group.samples], failed)

    def _scores(self, groups: list[Group]) -> dict[str, float]:
        n = self._sampled.n
        scores = {f"mean@{n}": _mean_reward(groups)}
        scores |= pass_rates(groups, self._config.pass_reward)
        if self._find_answer and n > 2:  # of two, neither is a majority
            scores[f"maj@{n}"] = float(np.mean([self._majority(group) for group in groups]))
        return scores

    def _majority(self, group: Group) -> float:
        return majority_reward(
            [self._answer(sequences[-1]) for sequences in group.trajectories], group.rewards
        )

    def _answer(self, sample: Sample) -> str | None:
        if sample.reward_failed:  # its text may be what made it fail
            return None
        # What tools had said in an episode before is no answer of the model's.
        return self._find_answer(sample.response_text if sample.scored_text is None else sample.scored_text)

    def _save(self, step: int, name: str, groups: list[Group]) -> None:
        """One line per prompt: eval/step_00000010_NAME.jsonl in the run's folder.

        Samples are worth less than the run: what cannot be written, such as to a full disk, is said once and left out.
        """
        path = self._directory / f"step_{step:08d}_{name}.jsonl"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(_line(group) for group in groups))
        except OSError as error:
            if not self._said:
                self._said = True
                say(
                    f"{path} could not be written ({error.strerror}); samples of evaluations are left out, the run goes on"
                )


def _mean_reward(groups: list[Group]) -> float:
    """Return the mean over prompts of the mean over their samples, of which some may be left out."""
    return float(np.mean([np.mean(group.rewards) for group in groups]))


def _line(group: Group) -> str:
    prompt = group.prompt
    responses = [
        {
            "text": "\n".join(sample.response_text for sample in sequences),
            "reward": sequences[0].reward,
            "tokens": sum(sample.num_written for sample in sequences),
            "finish_reason": sequences[0].finish_reason,
        }
        for sequences in group.trajectories
    ]
    line = {"uid": prompt.uid, "prompt": prompt.text, "answer": prompt.answer, "responses": responses}
    return json_text(line, ensure_ascii=False) + "\n"


def scalars(scores: Scores) -> dict[str, float]:
    """{"eval/METRIC"}; with several data sets {"eval/NAME/METRIC"}."""
    alone = len(scores) == 1
    return {
        f"eval/{metric}" if alone else f"eval/{name}/{metric}": value
        for name, values in scores.items()
        for metric, value in values.items()
    }
