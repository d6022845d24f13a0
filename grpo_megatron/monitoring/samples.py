"""Conversion of groups of samples into texts for people and into values for histograms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.sample import Group


def group_text(group: Group, characters: int) -> str:
    """Return a text that shows a group: the prompt, its reference answer, and all responses with rewards.

    characters: largest number of characters shown of the prompt, of the answer, and of each response.
    """
    parts = [f"=== prompt {group.prompt.uid}", shortened_middle(group.prompt.text, characters)]
    if group.prompt.answer is not None:
        parts += ["=== reference answer", shortened_middle(str(group.prompt.answer), characters)]
    trajectories = group.trajectories
    for position, sequences in enumerate(trajectories, start=1):
        sample, tokens = sequences[0], sum(sample.num_written for sample in sequences)
        components = "".join(
            f", {name} {value:.4g}" for name, value in sorted(sample.reward_components.items())
        )
        parts += [
            f"=== response {position} of {len(trajectories)}: reward {sample.reward:.4g}{components}; "
            f"{tokens} tokens, {sample.finish_reason}",
            shortened_middle("\n".join(sample.response_text for sample in sequences), characters),
        ]
    return "\n".join(parts)


def shortened_middle(text: str, most: int) -> str:
    """Return a text without its middle part if it has more than `most` characters, else unchanged.

    The first and the last `most` / 2 characters are kept. In a response, the answer is usually at the end.
    """
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]}\n[... {len(text) - 2 * kept} characters ...]\n{text[-kept:]}"


def chosen(groups: Sequence[Group], count: int) -> list[Group]:
    """Choose at most `count` groups to show to the user. Groups of unequal rewards come first.

    GRPO learns nothing from a group whose responses all have the same reward, because their advantages are 0.
    """
    return sorted(groups, key=lambda group: len(set(group.rewards)) == 1)[:count]


@dataclass(frozen=True)
class TrainedOn:
    """The sequences that a step trained on, from which the monitor computes throughput and histograms."""

    lengths: np.ndarray
    """int64 [S]. Number of tokens of each sequence."""
    epochs: int = 1
    """How often the step trained on each sequence."""
    groups: Sequence[Group] = ()
    """The groups of samples, some of which are shown as text. Empty in supervised training."""
    advantages: np.ndarray | None = None
    """float64 [n]. Mean advantage of each sequence with a trained token. None in supervised training."""


def distributions(trained_on: TrainedOn) -> dict[str, np.ndarray]:
    """Return the values for the histograms of a step, as {name: array [n]}, without empty arrays.

    "reward/samples" has the reward of each trajectory, "response/lengths" the number of tokens that the model
    wrote in it, and "actor/advantages" the advantages of the trained sequences.
    """
    groups = trained_on.groups
    lengths = [sum(s.num_written for s in sequences) for group in groups for sequences in group.trajectories]
    found = {
        "reward/samples": np.array(
            [reward for group in groups for reward in group.rewards], dtype=np.float64
        ),
        "response/lengths": np.array(lengths),
    }
    if trained_on.advantages is not None:
        found["actor/advantages"] = trained_on.advantages
    return {name: values for name, values in found.items() if len(values)}
