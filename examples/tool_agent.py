"""An agent with a tool, as anyone writes it with OpenAI's client. Nothing in it is made for training.

    TASK="3745?" OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/tool_agent.py

The question asks for the entry of a table. Only the tool knows the table.
"""

import hashlib
import json
import os

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Return the entry of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def entry(key: str) -> str:
    """Return the three digits in the table at this key."""
    return f"{int(hashlib.sha256(key.encode()).hexdigest(), 16) % 1000:03}"


def answer_of(question: str) -> str | None:
    """Ask the model, and answer its calls of the tool until it makes none. Return its last message."""
    client = openai.OpenAI()
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        said = client.chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "gpt-5"), messages=messages, tools=[TOOL]
        ).choices[0]
        messages.append(said.message.model_dump(exclude_none=True))
        if not said.message.tool_calls:
            return said.message.content
        for call in said.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            found = entry(str(arguments.get("key"))) if call.function.name == "get" else "no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return None


if __name__ == "__main__":
    print(answer_of(os.environ["TASK"]))
