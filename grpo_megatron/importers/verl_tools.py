"""Conversion of verl's tool configurations: MCP servers become rollout.mcp and rollout.tools."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from grpo_megatron.importers.converters import truth
from grpo_megatron.importers.mapping import CannotCarry, Source
from grpo_megatron.importers.verl_trainer import ROLLOUT

TOOL_FILES = tuple(
    f"{section}.{name}"
    for section in (f"{ROLLOUT}.multi_turn", "data")
    for name in ("tool_config_path", "function_tool_path")
)
_SET = "set rollout.environment=tools and rollout.tools=[module:function, mcp:SERVER]"
_SECRET = re.compile(r"(?i)key|token|secret|password|authorization")
_OTHER_TURNS = (
    "several turns without tools need rollout.environment=module:class or rollout.agent; write one of them"
)


def is_off(source: Source) -> bool:
    """Return True if verl's run says that it has one turn only."""
    switch = f"{ROLLOUT}.multi_turn.enable"
    return switch in source and not truth(source[switch])


def has_turns(value: Any, source: Source) -> dict[str, Any]:
    """Convert a switch for several turns. The keys that name the tools report the tools."""
    if value in (None, False) or is_off(source) or any(source[key] for key in TOOL_FILES):
        return {}
    raise CannotCarry(_OTHER_TURNS)


def other_turns(value: Any, source: Source) -> dict[str, Any]:
    """Convert a key that names a loop or an interaction of verl, which have no counterpart."""
    if value is None or is_off(source):
        return {}
    raise CannotCarry(_OTHER_TURNS)


def functions(value: Any, source: Source) -> dict[str, Any]:
    """Convert function_tool_path, a Python file whose functions could be tools here."""
    if value is None or is_off(source):
        return {}
    raise CannotCarry(
        f"{value}: set rollout.environment=tools, and name each function of this file in rollout.tools, as "
        "module:function"
    )


def tools(value: Any, source: Source) -> dict[str, Any]:
    """Convert tool_config_path, a YAML file of tools. MCP servers are carried over, if the file is here."""
    if value is None or is_off(source):
        return {}
    servers: dict[str, dict[str, Any]] = {}
    try:
        for tool in _read(value, yaml.safe_load)["tools"]:
            if "mcp" not in tool:
                raise CannotCarry(
                    f"{value}: {tool['class_name']} is a Python class; write a function for it, and {_SET}"
                )
            servers |= _servers(tool["mcp"])
    except (KeyError, TypeError) as error:
        raise CannotCarry(f"{value} is no tool configuration of verl; {_SET}") from error
    return {
        "rollout.environment": "tools",
        "rollout.tools": [f"mcp:{name}" for name in servers],
        "rollout.mcp": servers,
    }


def _read(path: str, parse: Any) -> Any:
    """Return the content of a file. Raises CannotCarry if it is not in the working directory."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CannotCarry(
            f"{path} cannot be read here ({error}); start this tool where verl is started, or {_SET}"
        ) from error


def _servers(mcp: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return rollout.mcp for the servers of a tool of the kind `mcp`."""
    path, wanted = mcp["mcp_servers_config_path"], list(mcp.get("tool_selected_list") or [])
    given = _read(path, json.loads)["mcpServers"]
    if wanted and len(given) > 1:
        raise CannotCarry(
            f"tool_selected_list does not say which of the servers {', '.join(given)} has which tool; set "
            "rollout.mcp.NAME.tools"
        )
    return {"_".join(name.split()): _server(name, one, wanted) for name, one in given.items()}


def _server(name: str, given: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Return the options of a server. Keys and tokens are left out: they would be copied into every run."""
    headers, env = given.get("headers") or {}, given.get("env") or {}
    if "auth_token" in given or str(given.get("url")).rstrip("/").endswith("/sse"):
        raise CannotCarry(
            f"the server {name} speaks SSE, but servers must speak streamable HTTP here; set "
            "rollout.tools=[mcp:NAME] and rollout.mcp.NAME={url: ..., token_env: VARIABLE}"
        )
    if any(map(_SECRET.search, headers)):
        raise CannotCarry(
            f"the server {name} gets a token; set rollout.tools=[mcp:NAME] and rollout.mcp.NAME={{url: ..., "
            "token_env: VARIABLE}"
        )
    if "url" in given:
        options = {"url": given["url"], "headers": headers}
    else:
        options = {
            "command": [given["command"], *given.get("args", [])],
            "env": {key: text for key, text in env.items() if not _SECRET.search(key)},
            "pass_env": [key for key in env if _SECRET.search(key)],
        }
    return {key: option for key, option in (options | {"tools": wanted}).items() if option}
