"""Tool use: the model calls functions, reads their results, and answers in its last turn.

A tool is a function with type hints and a docstring that describes the function and its arguments (`Args:`).
The schema for the chat template is made from these. The function is called with the arguments that the model
gives, and may return anything that str() can convert. Further tools are those of MCP servers.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.written_turn import WrittenCall, WrittenTurn, read_text
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.sandbox import CodeConfig
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.plugins import Call, Registry
from grpo_megatron.rollout.environments import StepResult
from grpo_megatron.rollout.tool_servers.calls import RunningServer, difference, list_tools, start
from grpo_megatron.rollout.tool_servers.settings import PREFIX, call_seconds, tool_servers
from grpo_megatron.sandbox.run import required_containment
from grpo_megatron.sandbox.tool import run_python, without_middle

tool = Registry("tool", "rollout.tools", ("python", "mcp:SERVER"))

# Maximum number of characters of a result, without the note about what is left out. A tool that prints
# endlessly would fill the model's context.
_LONGEST = 4000


class ToolCalls:
    """An environment (rollout.environment=tools) that runs the tool calls in each turn of the model.

    An object plays one episode, which ends with the first turn that contains no call. The reward components
    `tool_calls` and `failed_tool_calls` count all calls and the failed calls.
    """

    def __init__(
        self, tools: dict[str, Callable[..., Any]], seconds: float, servers: Sequence[RunningServer] = ()
    ):
        """Begin an episode in which the model may call tools.

        tools: {name: function} of the tools that the model may call. Results of async functions are awaited.
        seconds: time for the calls of a turn. After this time, no further call of the turn is started.
        servers: MCP servers that serve only this episode.
        """
        self._tools, self._seconds, self._servers = tools, seconds, servers

    def reset(self, seed: int) -> None:
        return None

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def step(self, response: str, written: WrittenTurn | None = None) -> StepResult:
        """Run the tool calls of a turn, and return their results as messages.

        response: text of the turn.
        written: the parts of the turn, in the model's own format. None: the text has the format of Hermes.
        """
        written = written or read_text(response, "", response.encode(), has_tools=True)
        answers, failed, end = [], 0, time.monotonic() + self._seconds
        for call in written.calls:
            try:
                answer = await self._run(call, end)
            except UserError:
                raise  # the machine's fault, from which the model cannot learn
            except Exception as error:  # the model's fault; it may do better next time
                failed += 1
                answer = (
                    f"error: {error}"
                    if isinstance(error, ValueError)
                    else f"error: {type(error).__name__}: {error}"
                )
            message = {"role": "tool", "content": without_middle(answer, _LONGEST)}
            # Only where the turn has the call can a template know its id.
            answers.append(message | ({"tool_call_id": call.id} if written.call_messages else {}))
        components = {"tool_calls": len(answers), "failed_tool_calls": failed}
        return StepResult(answers, done=not answers, components=components)

    async def _run(self, call: WrittenCall, end: float) -> str:
        """Run one tool call and return its result as text.

        Raises ValueError if the call is malformed or comes too late. Errors of the tool are passed on.

        end: value of time.monotonic() after which the call comes too late.
        """
        if time.monotonic() > end:
            raise ValueError("there is no time left for this call in this turn")
        if call.problem:
            raise ValueError(call.problem)
        if not isinstance(call.name, str) or call.name not in self._tools:
            raise ValueError(f"there is no tool {call.name!r}; the tools are {', '.join(self._tools)}")
        if not isinstance(call.arguments, dict):
            raise ValueError("arguments must be a JSON object")
        result = self._tools[call.name](**call.arguments)
        return str(await result if inspect.isawaitable(result) else result)


class ToolEnvironment:
    """Makes the environments for rollout.environment=tools. Calling it returns one episode's environment."""

    asks_reward_function = reads_calls = True

    def __init__(self, names: Sequence[str], reward: RewardConfig, mcp: Mapping[str, Any] | None = None):
        """Look up the functions of the tools, and check that the model can call them.

        No MCP server is started: `tools` and `start` do that.

        names: names of the tools (rollout.tools).
        reward: the configuration's section `reward`, whose time limit and sandbox settings also apply to the
            tools.
        mcp: options of the MCP servers (rollout.mcp).

        Raises UserError if a name is unknown, if a function cannot be a tool, if this machine cannot isolate
        the programs of the tool `python`, or if the options of an MCP server are wrong.
        """
        self._seconds = call_seconds(reward)
        own = [name for name in names if not name.startswith(PREFIX)]
        found = [_python(reward.code, self._seconds) if name == "python" else tool.get(name) for name in own]
        for name, function in zip(own, found, strict=True):
            _check_tool(f"rollout.tools={name}", function)
        self._functions = {function.__name__: function for function in found}
        if len(self._functions) != len(found):
            raise UserError(
                f"rollout.tools={list(names)}: two functions have the same name, so the model cannot tell "
                "them apart; rename one"
            )
        self._servers = tool_servers(names, mcp or {}, self._seconds)
        self._shared: list[RunningServer] = []
        # Servers that each episode starts for itself, as listed in this process.
        self._of_episodes: list[RunningServer] = []

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, which the chat template shows to the model.

        The first call in a process starts the MCP servers, and ends them when they have listed their tools.

        Raises UserError if a function has no type hints, if its docstring does not describe an argument, if
        an MCP server cannot be used, or if two tools have the same name.
        """
        listed = list_tools(self._servers)
        offered = dict.fromkeys(self._functions, "a function")
        for server, schemas in zip(self._servers, listed, strict=True):
            for name in (schema["function"]["name"] for schema in schemas):
                if name in offered:
                    raise UserError(
                        f"{server.setting} has a tool {name}, which {offered[name]} is called too, so the "
                        "model cannot tell them apart; set prefix or tools of a server in rollout.mcp"
                    )
                offered[name] = server.setting
        return [*self._schemas(), *(schema for schemas in listed for schema in schemas)]

    def _schemas(self) -> list[dict[str, Any]]:
        from transformers.utils import get_json_schema

        try:
            return [get_json_schema(function) for function in self._functions.values()]
        except Exception as error:  # the library raises its own kinds of errors
            raise UserError(
                "rollout.tools: a tool must have type hints and a docstring that describes its arguments: "
                f"{error}"
            ) from error

    def start(self, offered: Sequence[dict[str, Any]] | None) -> None:
        """Start the MCP servers in the process that plays episodes.

        offered: schemas of the tools that prompts show to the model. None: they are not compared.

        Raises UserError if a server cannot be used, or if the tools here differ from `offered`.
        """
        running = [RunningServer(server, self._seconds) for server in self._servers]
        start(running)
        schemas = [schema for server in running for schema in server.schemas]
        functions = [schema for schema in offered or () if schema["function"]["name"] in self._functions]
        if offered is not None and (problem := difference(offered, [*functions, *schemas])):
            named = ", ".join(server.setting for server in self._servers)
            raise UserError(f"{named}: on this node, the server {problem}")
        self._shared = [server for server in running if server.server.is_shared]
        self._of_episodes = [server for server in running if not server.server.is_shared]

    def __call__(self, prompt: Prompt) -> ToolCalls:
        own = [RunningServer(server.server, self._seconds, server.schemas) for server in self._of_episodes]
        tools = self._functions | {
            name: partial(_call_server, server, name)
            for server in [*self._shared, *own]
            for name in server.names
        }
        return ToolCalls(tools, self._seconds, own)


async def _call_server(server: RunningServer, name: str, /, **arguments: Any) -> str:
    return await server.call(name, arguments)


def _check_tool(setting: str, function: Callable) -> None:
    """Raise UserError if a tool has no `__name__`, is async, or needs arguments without keywords.

    A function whose signature Python cannot read is accepted here.

    setting: configuration key and value that name the tool, for the error message.
    """
    if not hasattr(function, "__name__"):
        raise UserError(
            f"{setting}: {shortened(repr(function))} has no name by which the model could call it; a tool "
            "must be a named function"
        )
    try:
        arguments = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return  # its schema cannot be made either, which is reported then
    problem = Call(keywords=arguments).problem(function)
    if problem:
        raise UserError(f"{setting}: the tool {problem}")


def _python(options: CodeConfig, seconds: float) -> Callable[[str], str]:
    """Return the built-in tool `python`, a function that runs a Python program in the sandbox.

    options: isolation and limits of the sandbox.
    seconds: time limit of a program.

    Raises UserError if this machine cannot isolate programs as `options` require.
    """
    required_containment(options.isolation)

    def python(code: str) -> str:
        """Run a Python program. The answer is what it prints.

        Args:
            code: The program, which prints its results.
        """
        try:
            return run_python(code, options.limits, options.isolation, _LONGEST, seconds)
        except (RuntimeError, OSError) as error:
            raise UserError(f"the tool python could not run a program: {error}") from error

    return python
