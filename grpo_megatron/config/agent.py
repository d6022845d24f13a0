"""The section `rollout.agent` of the configuration."""

from enum import Enum

from grpo_megatron.config.options import FilledText, PathText, dataclass, option

# Value of rollout.agent.address: each node's own address in the Ray cluster.
NODE = "node"


class AgentIsolation(str, Enum):
    full = "full"
    none = "none"


@dataclass
class AgentConfig:
    function: FilledText | None = option(
        None,
        "Your own agent, as module:function (docs/agents.md). rollout.agent=module:function is short for it.",
    )
    command: FilledText | None = option(
        None,
        "Your own agent, as a shell command that is run for each episode (docs/agents.md).",
    )
    isolation: AgentIsolation = option(
        AgentIsolation.full,
        "What a command can reach. full: the endpoint, its own folder, agent.files, Python and /usr. none: "
        "whatever the run can, with the run's environment variables.",
    )
    files: list[PathText] = option(
        [],
        "Files and folders that a command may read, such as its program. Its folder has links to them.",
    )
    address: FilledText = option(
        "127.0.0.1",
        "Address on which the endpoint of each node listens, and which agents get. node: the node's address"
        " in the Ray cluster, for agents in containers or on other hosts. Requests are not encrypted.",
    )
    memory_mib: int = option(
        4096, "Private memory of each process of a command, with isolation=full.", "MiB", ge=64
    )
    processes: int = option(
        64, "Maximum number of processes of a command, with isolation=full.", ge=2, le=4096
    )
    files_mib: int = option(
        64, "Data that a command may write into its folder, with isolation=full.", "MiB", gt=0
    )

    @property
    def is_set(self) -> bool:
        """True if agents play the episodes."""
        return self.function is not None or self.command is not None
