"""A trajectory under construction: what the model reads and writes, as the sequences to train on."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.sglang.request import Completion

# Function that asks the engine for the model's next turn. Its arguments: the token ids to continue, the
# maximum number of new tokens, routed=number of leading token ids whose MoE experts are known already, and
# part=number of the request in the episode, because several requests may be in progress.
Respond = Callable[..., Awaitable[Completion]]


@dataclass(frozen=True)
class Episode:
    """Parameters of one episode: its prompt, its ids, its token limit and its initial state."""

    prompt: Prompt
    """The prompt that the model reads first."""
    group_id: int
    """Id of the group that the episode's samples belong to. A group is all trajectories of one prompt."""
    trajectory_id: int
    """Id of the episode's trajectory. All samples of the episode have this id."""
    limit: int
    """Maximum number of tokens after the prompt, written by the model or by the environment."""
    state: tuple[int, ...]
    """Seed of the environment's initial state. Episodes with equal seeds start in the same state."""


class Node:
    """A node of a trajectory's tree: tokens that follow those of its parent.

    The path of a node is the tokens of all nodes from the root to it: one sequence as the model read it, with
    the turns that the model wrote.

    ids: the tokens that this node adds to its parent's path
    turn: the completion that wrote the tokens; None if the model only read them
    length: number of tokens of the path
    """

    def __init__(self, parent: "Node | None", ids: list[int], turn: Completion | None = None):
        self.parent, self.ids, self.turn = parent, ids, turn
        self.length = len(ids) + (parent.length if parent else 0)
        self.children: list[Node] = []
        if parent:
            parent.children.append(self)

    def path(self) -> "list[Node]":
        """Return the nodes from the root to this node."""
        nodes = [self]
        while parent := nodes[-1].parent:
            nodes.append(parent)
        return nodes[::-1]

    def path_ids(self) -> list[int]:
        """Return the token ids of the path."""
        return list(chain.from_iterable(node.ids for node in self.path()))

    @property
    def routing(self) -> list[np.ndarray]:
        """Experts that the engine reported for the turns of the path (Completion.routing), in their order."""
        turns = [node.turn for node in self.path() if node.turn]
        return [turn.routing for turn in turns if turn.routing is not None]

    @property
    def routed(self) -> int:
        """Number of leading tokens of the path for which the engine has reported the MoE experts.

        The engine need not report them again. The last token of a turn is not among them: the engine chooses
        a token's experts in the forward pass that reads the token, and no pass of the turn has read the last
        one. 0 if no experts are reported.
        """
        return sum(map(len, self.routing))


class Trajectory:
    """The tokens of an episode under construction, as a tree. Most episodes have a single path.

    If the input of a turn does not start with all tokens of an earlier path, the tree branches: the input
    follows the deepest node whose path it starts with, or begins a path of its own. So every turn comes after
    exactly the tokens that the model read for it. A turn is added only when it is complete.
    """

    def __init__(self, episode: Episode):
        self._episode = episode
        self._root = Node(None, [])
        self._ids: list[int] = episode.prompt.ids.tolist()
        self._prompt = Node(self._root, list(self._ids))
        self._turns: list[Node] = []  # in the order in which the model wrote them

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def ids(self) -> list[int]:
        """Token ids that the model reads before its next turn, including the prompt. Do not modify the list.

        After `write`, they end with the turn that was written.
        """
        return self._ids

    @property
    def room(self) -> int:
        """Number of tokens that the turn after `ids` may have."""
        return self.room_after(len(self._ids))

    def room_after(self, length: int) -> int:
        """Return how many tokens of the episode's token limit are left after `length` tokens."""
        return len(self._episode.prompt.ids) + self._episode.limit - length

    @property
    def routed(self) -> int:
        """Number of leading tokens of `ids` for which the engine has reported the MoE experts."""
        return self.known(self._ids).routed

    def known(self, ids: list[int]) -> Node:
        """Return the deepest node whose path `ids` starts with."""
        found, waiting = self._root, [self._root]
        while waiting:
            node = waiting.pop()
            found = max(found, node, key=lambda one: one.length)
            waiting += [child for child in node.children if ids[node.length : child.length] == child.ids]
        return found

    def read(self, ids: list[int]) -> bool:
        """Set the tokens that the model reads before its next turn. Return True if there is room for a turn.

        If the episode's token limit leaves no token for the next turn, nothing changes, and the result is
        False.

        ids: all token ids that the model reads before its next turn.
        """
        if self.room_after(len(ids)) <= 0:
            return False
        self._ids = list(ids)
        return True

    def write(self, turn: Completion) -> None:
        """Add a turn that the model generated after reading `ids`."""
        self.add(self._ids, turn, self.known(self._ids))
        self._ids = [*self._ids, *turn.response_ids.tolist()]

    def add(self, ids: list[int], turn: Completion, known: Node) -> Node:
        """Add a turn that the model generated, and return its node.

        Several turns may be generated at the same time.

        ids: all token ids that the model read before the turn.
        known: `known(ids)` when the engine was asked. The engine has reported the experts of all tokens after
            those of `known.routed`, so the turn must not follow a node that was added since.
        """
        rest = ids[known.length :]
        read = Node(known, rest) if rest else known
        self._turns.append(Node(read, turn.response_ids.tolist(), turn))
        return self._turns[-1]

    def samples(self, finish_reason: str) -> tuple[Sample, ...]:
        """Return the paths as Samples with this finish reason, but without rewards and texts.

        Each path ends with a turn that no other turn follows. Tokens that were read after it, for a turn that
        failed, are left out. A turn that several paths share is trained in the first of them only.
        """
        followed = {node for turn in self._turns for node in turn.parent.path()}
        samples, trained = [], set()
        for end in self._turns:
            if end not in followed:
                path = end.path()
                own = {node for node in path if node.turn} - trained
                trained |= own
                samples.append(self._sample(path, own, finish_reason))
        return tuple(samples)

    def last_turn(self) -> Sample:
        """Return the last turn alone as a Sample, for a reward function that scores only this turn.

        Its prompt is all that the model read before the turn.
        """
        *read, last = self._turns[-1].path()
        return Sample.of(
            group_id=self._episode.group_id,
            trajectory_id=self._episode.trajectory_id,
            prompt_ids=_tokens(read),
            response_ids=last.turn.response_ids,
            loss_mask=np.ones(len(last.ids), dtype=np.bool_),
            rollout_logprobs=last.turn.logprobs,
            finish_reason=last.turn.finish_reason,
            weight_spans=last.turn.weight_spans,
        )

    def _sample(self, path: list[Node], trained: set[Node], finish_reason: str) -> Sample:
        """Return a path as a Sample.

        The response begins with the first node in `trained`. A first observation that follows the prompt
        belongs to the response, too.
        """
        first = next(index for index, node in enumerate(path) if node in trained)
        if self._turns[0] in trained and self._prompt in path:
            first = path.index(self._prompt) + 1
        prompt, response = path[:first], path[first:]
        spans = [
            replace(span, start=start + span.start, end=start + span.end)
            for node in response
            if node in trained
            for start in [node.length - len(node.ids) - prompt[-1].length]
            for span in node.turn.weight_spans
        ]
        logprobs = [
            node.turn.logprobs if node in trained else np.zeros(len(node.ids), np.float32)
            for node in response
        ]
        return Sample.of(
            group_id=self._episode.group_id,
            trajectory_id=self._episode.trajectory_id,
            prompt_ids=_tokens(prompt),
            response_ids=_tokens(response),
            loss_mask=np.concatenate([np.full(len(node.ids), node in trained) for node in response]),
            rollout_logprobs=np.concatenate(logprobs),
            finish_reason=finish_reason,
            weight_spans=tuple(spans),
            routing=_whole_routing(path[-1].routing),
            turns=len(trained),
        )


def _tokens(nodes: list[Node]) -> np.ndarray:
    """Return the token ids of consecutive nodes, int32."""
    return np.array(list(chain.from_iterable(node.ids for node in nodes)), dtype=np.int32)


def _whole_routing(parts: list[np.ndarray]) -> np.ndarray | None:
    """Return the MoE experts of a sequence, [tokens, layers, experts per token], or None if `parts` is empty.

    The engine reports no experts for the last token, because no forward pass has read this token. A row of
    arbitrary experts is added for it. The row has no effect, because the last position predicts nothing.

    parts: for each turn, the experts that the engine reported (Completion.routing), in order.
    """
    if not parts:
        return None
    rows = parts[0]
    anything = np.broadcast_to(np.arange(rows.shape[2], dtype=rows.dtype), (1, *rows.shape[1:]))
    return np.concatenate([*parts, anything])
