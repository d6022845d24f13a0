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

    The length of a trajectory of several sequences is that of the longest, which reaches rollout.max_response_length first.
    longest: rollout.max_response_length; config: config.schema.OverlongBufferConfig, length 0: nothing is done.
    """
    if not config.length:
        return groups

    def shaped(group: Group) -> Group:
        samples, asked = [], len(group.prompt.ids)
        for sequences in group.trajectories:
            length = max(sample.num_tokens for sample in sequences) - asked
            penalty = overlong_penalty(length, longest, config.length, config.penalty)
            samples += [
                s.scored(s.reward + penalty, s.reward_components | {"overlong_penalty": penalty})
                for s in sequences
            ]
        return replace(group, samples=tuple(samples))

    return [shaped(group) for group in groups]
