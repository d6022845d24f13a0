"""Trajectories for the report: which ones of a step are kept, and how their tokens become trees of texts."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from grpo_megatron.algorithm.mismatch import CONTEXT, Decode, WorstToken
from grpo_megatron.batch.arrays import SampleArrays
from grpo_megatron.batch.path_tree import Listed, TokenPath, path_tree
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.written_turn import WrittenTurn, read_text
from grpo_megatron.files import json_text
from grpo_megatron.monitoring.samples import shortened_middle
from grpo_megatron.monitoring.trajectories import ShownCall, ShownNode, ShownToken, ShownTrajectory

BEST, WORST, MISMATCH = "best reward", "worst reward", "largest mismatch"
# Number of trajectories that are shown of a step, and bytes that are fetched for each of their tokens: its id
# and mask, and the log-probs of engine and trainer.
MOST_TRAJECTORIES, BYTES_PER_TOKEN = 3, 13
# Limits of one trajectory, so that neither the driver nor the page gets slow: tokens that are fetched, nodes
# that are kept, and how many times as long as one text all texts together may be.
MOST_TOKENS, MOST_NODES, MOST_TEXTS = 2**18, 200, 60
_LEAST_CHARACTERS, _ANSWER_CHARACTERS = 100, 400
_MOST_WORST = 10
# Headers of messages in common chat templates, and the tag in which some of them put the result of a tool.
_HEADER = re.compile(
    r"<\|(?:im_start|start_header_id|start)\|>(\w+)|<start_of_turn>(\w+)|<\|(system|user|assistant|tool)\|>"
    r"|<[|\uff5c](User|Assistant)[|\uff5c]>|\[(INST)\]|<(tool)_response>"
)
_ROLES = {"inst": "user", "model": "assistant"}


@dataclass(frozen=True)
class TracedSequence:
    """One sequence of a trajectory, with its tokens: P of the prompt, and R of the response."""

    sample: Sample
    """The sequence as the driver has it."""
    ids: np.ndarray
    """int32 [P + R]. Token ids."""
    loss_mask: np.ndarray
    """bool [R]. True for trained tokens."""
    engine: np.ndarray
    """float32 [R]. Log-probs of the engine."""
    trainer: np.ndarray | None
    """float32 [R]. Log-probs of the trainer for trained tokens; None: not kept."""

    @classmethod
    def of_columns(
        cls,
        sample: Sample,
        tokens: np.ndarray,
        loss_mask: np.ndarray,
        rollout_logp: np.ndarray,
        old_logp: np.ndarray,
        is_known: bool,
    ) -> "TracedSequence":
        """Return a sequence, given its part of columns of TrainBatch, [P + R] each.

        is_known: False if the column old_logp does not have the trainer's log-probs.
        """
        # The first response token is predicted at the last prompt position.
        response = slice(sample.num_prompt - 1, -1)
        trainer = old_logp[response] if is_known else None
        return cls(sample, tokens, loss_mask[response], rollout_logp[response], trainer)

    @classmethod
    def of_sample(cls, sample: Sample, arrays: SampleArrays) -> "TracedSequence":
        """Return a sequence without log-probs of the trainer, given its arrays, as a recording has them."""
        ids = np.concatenate([arrays.prompt_ids, arrays.response_ids])
        return cls(sample, ids, arrays.loss_mask, arrays.rollout_logprobs, None)

    @property
    def path(self) -> TokenPath:
        """The sequence for `path_tree`."""
        written, first = np.zeros(len(self.ids), bool), self.sample.num_prompt
        written[first:] = self.loss_mask
        for span in self.sample.weight_spans:
            written[first + span.start : first + span.end] = True
        return TokenPath(self.ids, written, first)

    def is_trained(self, position: int) -> bool:
        """Return True if the token at a position is trained on."""
        place = position - self.sample.num_prompt
        return place >= 0 and bool(self.loss_mask[place])

    def version(self, position: int) -> int | None:
        """Return the version of the weights that sampled the token at a position; None: unknown."""
        place = position - self.sample.num_prompt
        return next((own.version for own in self.sample.weight_spans if own.start <= place < own.end), None)

    def versions(self, start: int, end: int) -> list[list[int]]:
        """Return [version, number of tokens] of the tokens that were sampled from `start` to `end`."""
        first = self.sample.num_prompt
        spans = [
            [span.version, min(first + span.end, end) - max(first + span.start, start)]
            for span in self.sample.weight_spans
        ]
        return [span for span in spans if span[1] > 0]


def chosen_trajectories(groups: Sequence[Group], worst: Sequence[WorstToken]) -> dict[int, list[str]]:
    """Choose the trajectories of a step that the report shows. Return {trajectory_id: reasons}.

    They are one of the best reward, one of the worst reward, and the one with the token that engine and
    trainer disagree about most. If several have the best or worst reward, those of groups with unequal
    rewards come first, because the policy learns from them, and then the smallest id.

    worst: the step's tokens with the largest mismatch, the worst first.
    """
    rated = [
        (one[0].reward, len(set(group.rewards)) > 1, -one[0].trajectory_id)
        for group in groups
        for one in group.trajectories
        if one[0].reward is not None and one[0].reward == one[0].reward  # NaN is no reward
    ]
    found: dict[int, list[str]] = {}
    if rated:
        found.setdefault(-max(rated)[2], []).append(BEST)
        lowest = max(rated, key=lambda one: (-one[0], *one[1:]))
        if lowest[0] != max(rated)[0]:
            found.setdefault(-lowest[2], []).append(WORST)
    known = {sample.trajectory_id for group in groups for sample in group.samples}
    for token in worst[:1]:
        if token.trajectory_id in known:
            found.setdefault(token.trajectory_id, []).append(MISMATCH)
    return found


def within_limit(sequences: Sequence[Sample]) -> int:
    """Return how many of a trajectory's first sequences are shown: those of MOST_TOKENS, and at least one."""
    ends = np.cumsum([sample.num_tokens for sample in sequences])
    return max(1, int(np.searchsorted(ends, MOST_TOKENS, side="right")))


@dataclass(frozen=True)
class TreePainter:
    """Turns the tokens of trajectories into trees of texts."""

    decode: Decode
    """Converts token ids to text, with special tokens."""
    characters: int
    """Largest number of characters of a node's text. The middle of a longer one is left out."""
    version: int | None = None
    """Version of the trained weights; None: unknown."""
    worst: Sequence[WorstToken] = ()
    """The step's tokens with the largest mismatch, for trajectories without log-probs of the trainer."""
    to_sample: Callable[[int], int] = int
    """Converts a trajectory_id to the id of the sample in the ledger."""

    def trajectories(
        self, groups: Sequence[Group], traced: Sequence[TracedSequence], reasons: dict[int, list[str]]
    ) -> list[ShownTrajectory]:
        """Return the trajectories of some sequences, in the order of the groups.

        groups: all groups of the step.
        traced: sequences of some trajectories of the groups.
        reasons: {trajectory_id: why the trajectory is shown}.
        """
        found: dict[int, list[TracedSequence]] = {}
        for one in traced:
            found.setdefault(one.sample.trajectory_id, []).append(one)
        return [
            self.trajectory(
                group, own, reasons.get(sequences[0].trajectory_id, ()), len(sequences) - len(own)
            )
            for group in groups
            for sequences in group.trajectories
            if (own := found.get(sequences[0].trajectory_id))
        ]

    def trajectory(
        self, group: Group, traced: Sequence[TracedSequence], reasons: Sequence[str], unread: int = 0
    ) -> ShownTrajectory:
        """Return a trajectory as the report shows it.

        group: the group of the trajectory.
        traced: sequences of the trajectory, at least one.
        reasons: why the trajectory is shown.
        unread: number of further sequences, which are left out.
        """
        listed, first = path_tree([one.path for one in traced]), traced[0].sample
        kept = list(enumerate(listed))
        if len(kept) > MOST_NODES:
            kept = kept[: MOST_NODES // 2] + kept[-MOST_NODES // 2 :]
        characters = min(self.characters, max(_LEAST_CHARACTERS, MOST_TEXTS * self.characters // len(kept)))
        is_known = all(one.trainer is not None for one in traced)
        found = _compared(traced) if is_known else _reported(traced, self.worst)
        worst = [self._token(listed, traced, one) for one in found]
        answer = group.prompt.answer
        return ShownTrajectory(
            reasons=list(reasons),
            sample=self.to_sample(first.trajectory_id),
            prompt=group.prompt.uid,
            answer=shortened_middle("" if answer is None else str(answer), _ANSWER_CHARACTERS),
            reward=float("nan") if first.reward is None else float(first.reward),
            components={name: float(value) for name, value in sorted(first.reward_components.items())},
            finish_reason=first.finish_reason,
            version=self.version,
            turns=sum(one.node.is_written for one in listed),
            paths=len(traced) + unread,
            tokens=sum(one.node.end - one.node.start for one in listed),
            trained=sum(int(one.loss_mask.sum()) for one in traced),
            nodes=[self._node(number, one, traced, characters) for number, one in kept],
            num_nodes=len(listed),
            unread_paths=unread,
            compared="all" if is_known else "worst" if worst else "none",
            worst=worst,
        )

    def _node(
        self, number: int, listed: Listed, traced: Sequence[TracedSequence], characters: int
    ) -> ShownNode:
        node = listed.node
        own = traced[node.path]
        text, first = self.decode(own.ids[node.start : node.end]), own.sample.num_prompt
        read_as = "prompt" if listed.parent is None else "read"
        begun = self.decode(own.ids[max(node.start - 8, 0) : node.start])
        written = read_text(text, begun, [], has_tools=True) if node.is_written else None
        return ShownNode(
            number=number,
            parent=listed.parent,
            depth=listed.depth,
            kind="written" if node.is_written else read_as,
            roles=[] if node.is_written else _roles(text),
            tokens=node.end - node.start,
            trained=int(own.loss_mask[max(node.start - first, 0) : max(node.end - first, 0)].sum()),
            text=shortened_middle(text, characters),
            versions=own.versions(node.start, node.end) if node.is_written else [],
            calls=list(_calls(written, characters)) if written else [],
        )

    def _token(
        self, listed: Sequence[Listed], traced: Sequence[TracedSequence], found: "_Disagreement"
    ) -> ShownToken:
        one, position = traced[found.path], found.position
        edges = [max(0, position - CONTEXT), position, position + 1, position + 1 + CONTEXT // 2]
        before, token, after = (self.decode(one.ids[start:end]) for start, end in pairwise(edges))
        node = next(
            number
            for number, own in enumerate(listed)
            if own.node.path == found.path and own.node.start <= position < own.node.end
        )
        version = one.version(position)
        return ShownToken(node, position, found.engine, found.trainer, before, token, after, version)


class _Disagreement(NamedTuple):
    """A trained token whose log-probs differ.

    path, position: index of its sequence, and its index in the sequence
    engine, trainer: both log-probs
    """

    path: int
    position: int
    engine: float
    trainer: float


def _compared(traced: Sequence[TracedSequence]) -> list[_Disagreement]:
    """Return the trained tokens whose log-probs differ most between engine and trainer, the worst first."""
    found = []
    for path, one in enumerate(traced):
        difference = np.where(one.loss_mask, np.abs(one.trainer - one.engine), 0)
        difference = np.where(np.isnan(difference), np.inf, difference)
        for i in np.argsort(-difference, kind="stable")[:_MOST_WORST].tolist():
            token = _Disagreement(
                path, one.sample.num_prompt + i, float(one.engine[i]), float(one.trainer[i])
            )
            found.append((float(difference[i]), token))
    found.sort(key=lambda one: -one[0])
    return [token for difference, token in found[:_MOST_WORST] if difference > 0]


def _reported(traced: Sequence[TracedSequence], worst: Sequence[WorstToken]) -> list[_Disagreement]:
    """Return those of the step's worst tokens that are in a trajectory.

    traced: sequences of the trajectory.
    """
    return [
        _Disagreement(path, token.position, token.engine, token.trainer)
        for token in worst
        for path, one in enumerate(traced)
        if token.trajectory_id == one.sample.trajectory_id and len(one.ids) == token.length
        if one.ids[token.position] == token.token and one.is_trained(token.position)
    ]


def _roles(text: str) -> list[str]:
    """Return the roles of the messages in a text that the model read, as far as their headers are known.

    A header of the assistant at the end begins the model's own turn, and is left out.
    """
    found = [next(filter(None, match.groups())).lower() for match in _HEADER.finditer(text)]
    roles = [_ROLES.get(name, name) for name in found]
    return roles[:-1] if roles[-1:] == ["assistant"] else roles


def _calls(turn: WrittenTurn, characters: int) -> Iterator[ShownCall]:
    """Yield the tool calls of a turn. There are none if one of them is malformed.

    characters: largest number of characters of the arguments.
    """
    for call in turn.call_messages:
        function = call["function"]
        arguments = json_text(function["arguments"], indent=2, ensure_ascii=False)
        yield ShownCall(function["name"], shortened_middle(arguments, characters))
