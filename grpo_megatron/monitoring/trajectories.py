"""Trajectories as the report shows them: trees of texts, in the rows of texts.jsonl."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_megatron.files import float_or_nan


@dataclass(frozen=True)
class ShownCall:
    """A tool call that the model wrote.

    name: name of the tool
    arguments: the arguments as JSON
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ShownToken:
    """A token for which the log-probs of engine and trainer differ much."""

    node: int
    """Number of the node that the token is in."""
    position: int
    """Index of the token in its sequence."""
    engine: float
    """The engine's log-prob of the token, in nats."""
    trainer: float
    """The trainer's log-prob of the token, in nats."""
    before: str
    """Text before the token."""
    token: str
    """Text of the token."""
    after: str
    """Text after the token."""
    version: int | None
    """Version of the weights that sampled the token; None: unknown."""

    @property
    def difference(self) -> float:
        """|delta|: absolute difference of both log-probs."""
        return abs(self.trainer - self.engine)


@dataclass(frozen=True)
class ShownNode:
    """A node of a trajectory's tree: the prompt, a turn of the model, or a text that it read after a turn."""

    number: int
    """Place of the node in the whole tree, depth first, from 0. Nodes that are left out have numbers, too."""
    parent: int | None
    """Number of the node that this one follows; None: no node."""
    depth: int
    """Number of branchings before the node."""
    kind: str
    """"prompt", "read" or "written" (by the model)."""
    roles: list[str]
    """Roles of the messages in the text, as far as their headers are known. Empty for a turn of the model."""
    tokens: int
    """Number of tokens."""
    trained: int
    """Number of tokens that the loss mask lets train."""
    text: str
    """The text, with special tokens. The middle of a long text is left out."""
    versions: list[list[int]] = field(default_factory=list)
    """[version of the weights, number of tokens that it sampled], in order."""
    calls: list[ShownCall] = field(default_factory=list)
    """Tool calls in a turn."""


@dataclass(frozen=True)
class ShownTrajectory:
    """A trajectory with its rewards, its tree, and the tokens that engine and trainer disagree about."""

    reasons: list[str]
    """Why the trajectory is shown, such as "best reward"."""
    sample: int
    """Id of the trajectory, the same as in the ledger."""
    prompt: int
    """uid of the prompt."""
    answer: str
    """The reference answer."""
    reward: float
    """The reward; NaN if there is none."""
    components: dict[str, float]
    """{name: value} of the reward's components."""
    finish_reason: str
    """Why generation ended."""
    version: int | None
    """Version of the trained weights, from which ages are computed; None: unknown."""
    turns: int
    """Number of turns of the model."""
    paths: int
    """Number of sequences of the trajectory."""
    tokens: int
    """Number of tokens of the tree, in which a shared beginning counts once."""
    trained: int
    """Number of tokens that the loss mask lets train."""
    nodes: list[ShownNode]
    """The nodes, depth first."""
    num_nodes: int
    """Number of nodes of the tree. If it is larger than len(nodes), nodes in the middle are left out."""
    unread_paths: int
    """Number of sequences that are not in the tree, because the trajectory has too many tokens."""
    compared: str
    """Tokens whose log-probs were compared: "all" trained ones, the "worst" of the step, or "none"."""
    worst: list[ShownToken]
    """The compared tokens that differ most, the worst first."""

    @property
    def calls(self) -> int:
        """Number of tool calls in the nodes that are shown."""
        return sum(len(node.calls) for node in self.nodes)

    @property
    def versions(self) -> list[int]:
        """Versions of the weights that sampled the shown turns, the oldest first."""
        return sorted({version for node in self.nodes for version, _ in node.versions})

    def row(self) -> dict[str, Any]:
        """Return the trajectory as values for JSON."""
        return asdict(self)


def trajectory_of(row: dict[str, Any]) -> ShownTrajectory:
    """Return the trajectory of a row that ShownTrajectory.row made.

    Raises TypeError, KeyError or ValueError if the row is damaged or of a later version.
    """
    nodes = [
        ShownNode(**{**node, "calls": [ShownCall(**call) for call in node["calls"]]}) for node in row["nodes"]
    ]
    worst = [
        ShownToken(**{**one, "engine": float_or_nan(one["engine"]), "trainer": float_or_nan(one["trainer"])})
        for one in row["worst"]
    ]
    return ShownTrajectory(**{**row, "reward": float_or_nan(row["reward"]), "nodes": nodes, "worst": worst})


@dataclass(frozen=True)
class TrajectoryOfStep:
    """A trajectory of a training step.

    step: index of the step
    shown: the trajectory
    """

    step: int
    shown: ShownTrajectory

    @property
    def anchor(self) -> str:
        """Name of the trajectory's place in an HTML page."""
        return anchor_of(self.step, self.shown.sample)


def anchor_of(step: int, sample: int) -> str:
    """Return the name of a trajectory's place in an HTML page."""
    return f"step-{step}-sample-{sample}"


def trajectories_of(rows: Sequence[dict[str, Any]]) -> list[TrajectoryOfStep]:
    """Return the trajectories in rows of texts.jsonl, in order. Other rows and damaged ones are left out."""
    found = []
    for row in rows:
        if "trajectory" in row:
            try:
                found.append(TrajectoryOfStep(row["step"], trajectory_of(row["trajectory"])))
            except (TypeError, KeyError, ValueError, AttributeError):
                continue
    return found
