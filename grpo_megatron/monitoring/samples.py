"""Groups of samples as text for people, and as distributions."""

from collections.abc import Sequence

import numpy as np

from grpo_megatron.batch.sample import Group
from grpo_megatron.batch.train_batch import TrainBatch


def group_text(group: Group, characters: int) -> str:
    """The prompt, and each response with its reward; characters: the most shown of any of them."""
    parts = [f"=== prompt {group.prompt.uid}", _shortened(group.prompt.text, characters)]
    if group.prompt.answer is not None:
        parts += ["=== reference answer", _shortened(str(group.prompt.answer), characters)]
    for number, sample in enumerate(group.samples, start=1):
        components = "".join(f", {name} {value:.4g}" for name, value in sorted(sample.reward_components.items()))
        parts += [
            f"=== response {number} of {len(group.samples)}: reward {sample.reward:.4g}{components}; "
            f"{len(sample.response_ids)} tokens, {sample.finish_reason}",
            _shortened(sample.response_text, characters),
        ]
    return "\n".join(parts)


def _shortened(text: str, most: int) -> str:
    """The beginning and the end, which has the answer."""
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]}\n[... {len(text) - 2 * kept} characters ...]\n{text[-kept:]}"


def chosen(groups: Sequence[Group], number: int) -> list[Group]:
    """That many groups, those whose rewards differ first: they are what the step learns from."""
    return sorted(groups, key=lambda group: len(set(group.rewards)) == 1)[:number]


def distributions(groups: Sequence[Group], batches: Sequence[TrainBatch]) -> dict[str, np.ndarray]:
    """Rewards and response lengths of all samples, and the advantages of all trained tokens; what is empty is left out."""
    samples = [sample for group in groups for sample in group.samples]
    found = {
        "reward/samples": np.array([sample.reward for sample in samples], dtype=np.float64),
        "response/lengths": np.array([len(sample.response_ids) for sample in samples]),
    }
    if groups:
        found["actor/advantages"] = np.concatenate([batch.advantage[batch.loss_mask] for batch in batches])
    return {name: values for name, values in found.items() if len(values)}
