"""Rewards that depend on the length of a response, added where training begins (not in the evaluation)."""

from dataclasses import replace

from grpo_megatron.batch.sample import Group


def overlong_penalty(length: int, longest: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13), in [-penalty, 0].

    0 up to longest - buffer tokens, from there linearly down to -penalty at longest tokens and beyond.
    """
    return penalty * min(0.0, max(-1.0, (longest - buffer - length) / buffer))


def shape_overlong(groups: list[Group], longest: int, config) -> list[Group]:
    """The groups with the penalty added to each reward, and as its component `overlong_penalty`.

    longest: rollout.max_response_length; config: config.schema.OverlongBufferConfig, length 0: nothing is done.
    """
    if not config.length:
        return groups

    def shaped(sample):
        penalty = overlong_penalty(len(sample.response_ids), longest, config.length, config.penalty)
        return sample.scored(sample.reward + penalty, sample.reward_components | {"overlong_penalty": penalty})

    return [replace(group, samples=tuple(map(shaped, group.samples))) for group in groups]
