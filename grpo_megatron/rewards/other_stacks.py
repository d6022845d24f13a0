"""Detection of reward functions written for other RL stacks, with advice on how to call them from here."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Stack:
    """Another RL stack, whose reward functions are recognized by the names of their parameters.

    name: name of the stack.
    parameters: names of parameters. A function that has all of them was probably written for this stack.
    result: Python expression that computes a reward of this project by calling such a function. The
        function's name is put in the place of {f}.
    """

    name: str
    parameters: frozenset[str]
    result: str


# The first match counts, so entries with more parameters come first.
_STACKS = (
    _Stack(
        "verl",
        frozenset({"data_source", "solution_str", "ground_truth"}),
        "{f}(data_source=record.get('data_source'), solution_str=response, ground_truth=answer, "
        "extra_info=record.get('extra_info'))",
    ),
    _Stack(
        "verl", frozenset({"solution_str", "ground_truth"}), "{f}(solution_str=response, ground_truth=answer)"
    ),
    _Stack(
        "AReaL",
        frozenset({"completions", "prompt_ids", "completion_ids"}),
        "{f}(prompt, response, None, None, answer=answer, **record)",
    ),
    _Stack(
        "OpenRLHF",
        frozenset({"queries", "prompts"}),
        "float({f}([prompt + response], [prompt], [answer])['rewards'][0])",
    ),
    _Stack(
        "TRL",
        frozenset({"completions"}),
        "{f}(prompts=[prompt], completions=[response], answer=[answer])[0]",
    ),
    _Stack(
        "slime",
        frozenset({"args", "sample"}),
        "await {f}(None, Sample(prompt=prompt, response=response, label=answer))",
    ),
)


def hint(function: str, parameters: Iterable[str]) -> str:
    """Return advice on how to use a reward function that was written for another RL stack.

    The advice is the end of an error message. It is "" if the parameters match no known stack.

    function: name of the reward function.
    parameters: names of the function's parameters, by which the stack is recognized.
    """
    for stack in _STACKS:
        if stack.parameters <= set(parameters):
            result = stack.result.format(f=function)
            definition = "async def" if result.startswith("await") else "def"
            return (
                f". It has the parameters of a reward function for {stack.name}; use a function that calls "
                f"it instead: {definition} reward(prompt, response, answer, record): return {result}"
            )
    return ""
