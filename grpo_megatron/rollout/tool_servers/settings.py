"""Settings of MCP servers, which the entries `mcp:...` of rollout.tools name."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from enum import Enum
from typing import Any

from grpo_megatron.config.options import FilledText, dataclass, option
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rewards.base import read_variables
from grpo_megatron.rewards.terms import read_options

PREFIX = "mcp:"
# Maximum start time in a worker. Cluster code gives the whole process of a worker 120 s to start.
_LONGEST_START = 100


class ServedTo(str, Enum):
    shared = "shared"
    episode = "episode"


@dataclass
class ServerSettings:
    """Options of `rollout.mcp.NAME`. Exactly one of `command` and `url` is set."""

    command: list[FilledText] = option(
        [], "Program and arguments of a server that speaks on stdin and stdout."
    )
    url: FilledText | None = option(None, "URL of a server that speaks streamable HTTP.")
    env: dict[str, str] = option({}, "Environment variables of the program, besides PATH, HOME and the like.")
    pass_env: list[FilledText] = option([], "Environment variables of the driver that the program also gets.")
    headers: dict[str, str] = option({}, "Further headers of HTTP requests.")
    token_env: FilledText | None = option(None, "Environment variable of the driver with a bearer token.")
    tools: list[FilledText] = option([], "Tools that the model may call. []: all tools of the server.")
    prefix: str = option("", "Text before the names of the tools, as the model sees them.")
    timeout: float | None = option(None, "Maximum time of a call. null: 0.4 * reward.timeout.", gt=0)
    start_timeout: float = option(60.0, "Maximum time of a start.", gt=0, le=_LONGEST_START)
    session: ServedTo = option(
        ServedTo.shared,
        "Who shares a session with the server. shared: all episodes of a worker. episode: each has its own.",
    )


@plain_dataclass(frozen=True)
class ToolServer:
    """An MCP server that rollout.tools names.

    name: entry of rollout.tools without `mcp:`
    settings: how to start or reach the server
    """

    name: str
    settings: ServerSettings

    @property
    def setting(self) -> str:
        """Configuration key and value that name the server, for messages."""
        return f"rollout.tools={PREFIX}{self.name}"

    @property
    def target(self) -> str:
        """Command or URL of the server, for messages."""
        return self.settings.url or shlex.join(self.settings.command)

    @property
    def is_shared(self) -> bool:
        return self.settings.session == ServedTo.shared

    def variables(self) -> dict[str, str]:
        """Read the environment variables that the server needs, and return {variable: its value}.

        Raises UserError if a variable is not set, or if a token cannot be part of an HTTP header.
        """
        whose = f"rollout.mcp.{self.name}"
        for name in self.settings.pass_env:
            if name not in os.environ:
                raise UserError(
                    f"the environment variable {name}, which {whose} needs, is not set; set it before you "
                    "start the run"
                )
        token = self.settings.token_env
        return {name: os.environ[name] for name in self.settings.pass_env} | read_variables(
            [token] if token else [], whose
        )


def call_seconds(reward: RewardConfig) -> float:
    """Return the time limit in seconds of a tool call, and of the start of the last call of a turn.

    A call that starts at the end of this time may take as long again. The remaining 20 % of reward.timeout
    are for its sandbox to start and end.
    """
    return 0.4 * reward.timeout


def tool_servers(tools: Sequence[str], named: Mapping[str, Any], seconds: float) -> list[ToolServer]:
    """Return the MCP servers that rollout.tools names, in its order.

    `mcp:TEXT` is the server `rollout.mcp.TEXT` if there is one, else the server at a URL, else the server
    that a command starts.

    tools: rollout.tools.
    named: rollout.mcp.
    seconds: largest allowed time limit of a call.

    Raises UserError if a setting is wrong, or if rollout.tools does not name a server of rollout.mcp.
    """
    settings = {str(name): _settings(str(name), entry, seconds) for name, entry in named.items()}
    used = [entry.removeprefix(PREFIX).strip() for entry in tools if entry.startswith(PREFIX)]
    for name in settings:
        if name not in used:
            raise UserError(
                f"rollout.mcp.{name} is not used; add {PREFIX}{name} to rollout.tools, or delete it"
            )
    return [ToolServer(text, settings.get(text) or _unnamed(text)) for text in used]


def _unnamed(text: str) -> ServerSettings:
    if text.startswith(("http://", "https://")):
        return ServerSettings(url=text)
    setting = f"rollout.tools={PREFIX}{text}"
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{setting}: the command cannot be split into words: {error}") from error
    if not command:
        raise UserError(f"{setting} must name a server of rollout.mcp, a URL or a command")
    return ServerSettings(command=command)


def _settings(name: str, entry: Any, seconds: float) -> ServerSettings:
    key = f"rollout.mcp.{name}"
    if not isinstance(entry, dict):
        raise UserError(
            f"{key} must have options, such as {{command: [uvx, my-server]}} or {{url: http://...}}"
        )
    read = read_options(ServerSettings, entry, key)
    if bool(read.command) == bool(read.url):
        raise UserError(f"{key} must have either command or url")
    lost = ("headers", "token_env") if read.command else ("env", "pass_env")
    for option_name in lost:
        if getattr(read, option_name):
            needed = "url" if read.command else "command"
            raise UserError(f"{key}.{option_name} has an effect only with {key}.{needed}")
    if read.timeout is not None and read.timeout > seconds:
        raise UserError(
            f"{key}.timeout={read.timeout:g} must be at most 0.4 * reward.timeout, here {seconds:g} s, so "
            "that a turn with two calls ends in time; increase reward.timeout"
        )
    return read


def server_variables(rollout: RolloutConfig, reward: RewardConfig) -> dict[str, str]:
    """Read the environment variables that the run's MCP servers need, and return {variable: its value}.

    Raises UserError if a variable is not set, or if a token cannot be part of an HTTP header.
    """
    if rollout.environment != "tools":
        return {}
    servers = tool_servers(rollout.tools, rollout.mcp, call_seconds(reward))
    return {name: value for server in servers for name, value in server.variables().items()}
