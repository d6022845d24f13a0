"""An agent that knows nothing of the project but the endpoint: OpenAI's official client, two turns."""

import openai


def two_turns(task) -> float:
    """Ask the task's question, and then whether the answer is right. Return the share of digits."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    said = []
    for question in ("7?", None):
        answer = client.chat.completions.create(model=task.model, messages=messages, max_tokens=8)
        content = answer.choices[0].message.content or ""
        said.append(content)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": question}]
    text = "".join(said)
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)
