"""Evaluation on held-out prompts: mean@k, unbiased pass@k and maj@k, per data set and averaged."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, with_texts_here
from grpo_megatron.config.derived import evaluation_rollout
from grpo_megatron.config.reward import OnFailure
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, not_written, replace_text
from grpo_megatron.logs import Rarely
from grpo_megatron.monitoring.samples import chosen, group_text
from grpo_megatron.rewards.answers import answer_finder
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.statistics import majority_reward, pass_rates

logger = logging.getLogger(__name__)

# {data set: {metric: score}}. The entry AVERAGE is the mean over several data sets.
Scores = dict[str, dict[str, float]]
AVERAGE = "average"
# Function that generates scored responses to prompts, as RolloutManager.generate does.
Generate = Callable[[list[Prompt], RolloutConfig], list[Group]]


@dataclass
class Drawn:
    """The responses to the held-out prompts of one data set."""

    sampled: list[Group]
    """A group with eval.n sampled responses for each prompt."""
    greedy: list[Group]
    """A group with one greedily decoded response for each prompt. Empty unless eval.greedy is set."""
    failed: int
    """Number of responses, sampled and greedy, whose reward or environment failed."""


class Evaluation:
    """Evaluates the model: generates and scores responses to all held-out prompts of each data set."""

    def __init__(
        self,
        manager: RolloutManager,
        datasets: dict[str, list[Prompt]],
        config: Config,
        directory: str,
        show: Callable[[int, str, str], None],
        score: Callable[[list[Group]], list[Group]] | None = None,
    ):
        """Prepare evaluations on held-out prompts.

        manager: generates the responses and scores them with the reward functions.
        datasets: {name of a data set: its prompts}.
        config: configuration of the run. Its section `eval` configures the evaluation.
        directory: folder of the run. Samples are saved in its subfolder `eval`.
        show: function that displays samples to the user. Its arguments are step, name and text.
        score: function that returns groups with the scores of a reward model. None if there is no such model.
            An evaluation calls it once, after all generation, because it may need the engines' GPUs.
        """
        self._manager, self._show, self._score = manager, show, score
        self.datasets = datasets
        self._config, self._shown = config.eval, config.monitor
        self._find_answer = answer_finder(config.reward)
        self._counts_failures = config.reward.on_failure != OnFailure.error
        self._directory, self._warn = Path(directory) / "eval", Rarely(logger, once=True)
        self._sampled = evaluation_rollout(config)
        self._greedy = replace(self._sampled, n=1, temperature=0.0, top_p=1.0)

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the current weights, and return {"eval/METRIC": score} for the logs.

        With several data sets, the keys are "eval/DATASET/METRIC". A metric is, for example, "mean@8" or
        "pass@4"; `scores` lists all.

        step: number of training steps done so far, for the names of saved samples.
        """
        return scalars(self.scores(step))

    def scores(self, step: int) -> Scores:
        """Evaluate the current weights, and return {data set: {metric: score}}.

        If there are several data sets, the mean over them is added under the name AVERAGE. n is eval.n, the
        number of samples per prompt. The metrics are:

        - "mean@n": mean reward of the samples.
        - "pass@k" for k = 2, 4, 8 and so on up to n: estimated probability that at least one of k samples of
          a prompt has a reward of at least eval.pass_reward.
        - "maj@n": reward of the most frequent answer among a prompt's n samples, as the mean over prompts.
          It exists only if n > 2, and if reward.response_from or reward.extract defines what an answer is.
        - "greedy": mean reward with greedy decoding. It exists only with eval.greedy.
        - "failed": number of samples, including greedy ones, whose reward or environment failed. It exists
          unless reward.on_failure=error. With reward.on_failure=leave_out, failed samples count in no other
          metric.

        step: number of training steps done so far, for the names of saved samples.

        Raises UserError if rewards or environments failed for all samples of a data set and
        reward.on_failure=leave_out. Raises the errors of RolloutManager.generate.
        """
        return self.scored(step, self.draw(partial(self._manager.generate, caller=Caller.evaluate)))

    def scored(self, step: int, drawn: dict[str, Drawn]) -> Scores:
        """Compute the metrics of responses, and return {data set: {metric: score}}.

        `scores` lists the metrics. If there is a reward model, the ranks first score the responses with it.
        The responses are saved and shown as configured (eval.save_samples, monitor.samples_every).

        step: number of training steps of the weights that have generated the responses.
        drawn: {name of a data set: its responses}, as `draw` returns it.
        """
        drawn = self._with_model_scores(drawn)
        scores = {name: self._dataset(step, name, of_set) for name, of_set in drawn.items()}
        if len(scores) > 1:
            # If samples are left out, a data set may have no prompt with enough samples for pass@k.
            metrics = dict.fromkeys(metric for values in scores.values() for metric in values)
            scores[AVERAGE] = {
                metric: float(np.mean([values[metric] for values in scores.values() if metric in values]))
                for metric in metrics
            }
        return scores

    def _dataset(self, step: int, name: str, drawn: Drawn) -> dict[str, float]:
        """Compute the metrics of one data set, and save and show its samples as configured.

        name: name of the data set.
        drawn: the scored responses to the data set's prompts.

        Returns {metric: score}.
        """
        sampled = drawn.sampled
        if self._find_answer or self._config.save_samples or self._shown.samples_every:
            sampled = with_texts_here(sampled)
        scores = self._scores(sampled)
        if drawn.greedy:
            scores["greedy"] = _mean_reward(drawn.greedy)
        if self._counts_failures:
            scores["failed"] = float(drawn.failed)
        if self._config.save_samples:
            self._save(step, name, sampled)
        if self._shown.samples_every:
            for index, group in enumerate(chosen(sampled, self._shown.sample_groups)):
                self._show(step, f"eval/{name}/{index}", group_text(group, self._shown.sample_characters))
        return scores

    def draw(self, generate: Generate) -> dict[str, Drawn]:
        """Generate the responses to the prompts of all data sets, without the scores of a reward model.

        This method may run in another thread than the other methods.

        generate: function that generates the responses and scores them with the reward functions. Its
            arguments are the prompts and the sampling settings. It returns a group for each prompt.

        Returns {name of a data set: its responses}. Raises UserError if rewards or environments failed for
        all samples of a data set and reward.on_failure=leave_out.
        """
        return {name: self._draw(name, prompts, generate) for name, prompts in self.datasets.items()}

    def _with_model_scores(self, drawn: dict[str, Drawn]) -> dict[str, Drawn]:
        """Return the responses with the scores of the reward model; unchanged if there is no such model.

        drawn: {name of a data set: its responses}.
        """
        if self._score is None:
            return drawn
        scored = iter(
            self._score([group for both in drawn.values() for group in [*both.sampled, *both.greedy]])
        )
        return {
            name: Drawn(
                [next(scored) for _ in both.sampled], [next(scored) for _ in both.greedy], both.failed
            )
            for name, both in drawn.items()
        }

    def _draw(self, name: str, prompts: list[Prompt], generate: Generate) -> Drawn:
        """Generate the responses to the prompts of one data set, without the scores of a reward model.

        With reward.on_failure=leave_out, groups whose samples all failed are removed. Raises UserError if no
        group of sampled responses is left.

        name: name of the data set, for the error message.
        generate: function that generates the responses, see `draw`.
        """
        every = generate(prompts, self._sampled)
        greedy = generate(prompts, self._greedy) if self._config.greedy else []
        failed = sum(group.failed for group in [*every, *greedy])
        failed += sum(
            sequences[0].reward_failed for group in [*every, *greedy] for sequences in group.trajectories
        )
        sampled = [group for group in every if group.samples]
        if not sampled:
            raise UserError(
                f"the evaluation of {name} has no samples left, because rewards or environments failed for "
                f"all samples of its {len(prompts)} prompts and reward.on_failure=leave_out removes them; "
                "see the messages above for the cause"
            )
        return Drawn(sampled, [group for group in greedy if group.samples], failed)

    def _scores(self, groups: list[Group]) -> dict[str, float]:
        n = self._sampled.n
        scores = {f"mean@{n}": _mean_reward(groups)}
        scores |= pass_rates(groups, self._config.pass_reward)
        if self._find_answer and n > 2:  # two samples have no majority
            scores[f"maj@{n}"] = float(np.mean([self._majority(group) for group in groups]))
        return scores

    def _majority(self, group: Group) -> float:
        return majority_reward(
            [self._answer(sequences[-1]) for sequences in group.trajectories], group.rewards
        )

    def _answer(self, sample: Sample) -> str | None:
        """Return the answer that a sample's text contains, for maj@n.

        The result is None if the text contains no answer, or if the reward of the sample failed.
        """
        if sample.reward_failed:  # the text may be what made the reward fail
            return None
        # Text of tools from earlier turns of an episode is not the model's answer.
        return self._find_answer(sample.response_text if sample.scored_text is None else sample.scored_text)

    def _save(self, step: int, name: str, groups: list[Group]) -> None:
        """Write the samples to eval/step_00000010_NAME.jsonl in the run's folder, one line per prompt.

        If the file cannot be written, for example because the disk is full, a warning is logged once, and the
        run goes on.
        """
        path = self._directory / f"step_{step:08d}_{name}.jsonl"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(_line(group) for group in groups))
        except OSError as error:
            self._warn(not_written(path, error, "evaluation samples are not saved, and the run continues"))


def _mean_reward(groups: list[Group]) -> float:
    """Return the mean over prompts of each prompt's mean reward. Groups may differ in size."""
    return float(np.mean([np.mean(group.rewards) for group in groups]))


def _line(group: Group) -> str:
    """Return a prompt and its responses as one line of JSON, for the file of saved samples."""
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
    """Convert scores for the logs: return {"eval/METRIC": score}.

    If there are several data sets, the keys are "eval/DATASET/METRIC".

    scores: {data set: {metric: score}}.
    """
    alone = len(scores) == 1
    return {
        f"eval/{metric}" if alone else f"eval/{name}/{metric}": value
        for name, values in scores.items()
        for metric, value in values.items()
    }
