"""A program that uses openai-agents. It knows nothing of the project: its environment names the endpoint."""

import json
import os
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

# As its documentation says for other providers.
set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


adder = Agent(
    name="adder",
    instructions="1+1=2",
    model=os.environ["OPENAI_MODEL"],
    model_settings=ModelSettings(max_tokens=8),
    tools=[add],
)
first = Runner.run_sync(adder, json.load(sys.stdin)["messages"][-1]["content"])
again = [*first.to_input_list(), {"role": "user", "content": "7?"}]
said = str(Runner.run_sync(adder, again).final_output)
print(json.dumps({"reward": sum(letter.isdigit() for letter in said) / max(len(said), 1)}))
