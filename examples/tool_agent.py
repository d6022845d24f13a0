"""An agent with a tool, which speaks OpenAI's protocol in plain HTTP. Nothing in it is made for training.

    TASK="3745?" OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/tool_agent.py

The question asks for the entry of a table. Only the tool knows the table.
"""

import hashlib
import json
import os
import urllib.request

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


def completion(messages: list[dict]) -> dict:
    """Return the model's next message."""
    body = {"model": os.environ.get("OPENAI_MODEL", "gpt-5"), "messages": messages, "tools": [TOOL]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def answer_of(question: str) -> str | None:
    """Ask the model, and answer its calls of the tool until it makes none. Return its last message."""
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        said = completion(messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return said["content"]
        for call in said["tool_calls"]:
            function = call["function"]
            key = str(json.loads(function["arguments"]).get("key"))
            found = entry(key) if function["name"] == "get" else "no such tool"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return None


if __name__ == "__main__":
    print(answer_of(os.environ["TASK"]))
