"""Settings of the MCP servers that rollout.tools names. No server is started here."""

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.tool_environment import ToolEnvironment
from grpo_megatron.rollout.tool_servers.settings import tool_servers

TIMEOUT = 20.0  # reward.timeout: a call may take 8 s


def program(**options):
    return {"command": ["my-server"]} | options


def test_what_a_tool_names():
    named = {"search": program(prefix="web_")}
    texts = ["mcp:search", "python", "mcp:https://example.org/mcp", "mcp:uvx 'my server' --fast"]
    search, far, command = tool_servers(texts, named, 8.0)
    assert (search.settings.command, search.settings.prefix) == (["my-server"], "web_")
    assert far.settings.url == "https://example.org/mcp"
    assert command.settings.command == ["uvx", "my server", "--fast"]
    assert [one.is_shared for one in (search, far, command)] == [True] * 3


@pytest.mark.parametrize(
    ("names", "servers", "says"),
    [
        (["mcp:nothing-here --fast"], {}, "there is no program 'nothing-here' on this machine"),
        (["mcp:nothing-here"], {}, "no program .nothing-here., and no server rollout.mcp.nothing-here"),
        (["mcp:"], {}, "must name a server of rollout.mcp, a URL or a command"),
        (["mcp:'"], {}, "cannot be split into words"),
        (["python"], {"x": program()}, "rollout.mcp.x is not used; add mcp:x to rollout.tools"),
        (["mcp:x"], {"x": {}}, "rollout.mcp.x must have either command or url"),
        (["mcp:x"], {"x": program(url="http://a")}, "rollout.mcp.x must have either command or url"),
        (["mcp:x"], {"x": "uvx server"}, "rollout.mcp.x must have options, such as"),
        (
            ["mcp:x"],
            {"x": program(toolz=[])},
            r"rollout.mcp.x: unknown option 'toolz'; did you mean 'tools'\?",
        ),
        (
            ["mcp:x"],
            {"x": program(headers={"a": "b"})},
            "rollout.mcp.x.headers has an effect only with rollout.mcp.x.url",
        ),
        (
            ["mcp:x"],
            {"x": {"url": "http://a", "env": {"a": "b"}}},
            "rollout.mcp.x.env has an effect only with rollout.mcp.x.command",
        ),
        (
            ["mcp:x"],
            {"x": program(timeout=9)},
            r"rollout.mcp.x.timeout=9 must be at most 0.4 \* reward.timeout, here 8 s",
        ),
    ],
)
def test_wrong_settings_start_no_server(names, servers, says):
    with pytest.raises(UserError, match=says):
        assert ToolEnvironment(names, RewardConfig(timeout=TIMEOUT), servers).tools is None


def test_a_variable_that_is_not_set_is_reported_before_a_server_is_started(monkeypatch):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    for server in (program(pass_env=["MY_TOKEN"]), {"url": "http://127.0.0.1:1", "token_env": "MY_TOKEN"}):
        with pytest.raises(UserError, match=r"variable MY_TOKEN, which rollout.mcp.x needs, is not set"):
            assert ToolEnvironment(["mcp:x"], RewardConfig(), {"x": server}).tools is None
