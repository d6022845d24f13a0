"""Agents that know nothing of the project but the endpoint: the official clients, two turns."""

import anthropic
import openai


def two_turns(task) -> float:
    """Ask the task's question, and then whether the answer is right. Return the share of digits."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)

    def ask(messages):
        answer = client.chat.completions.create(model=task.model, messages=messages, max_tokens=8)
        content = answer.choices[0].message.content or ""
        return content, content

    return _digits(task, ask)


def two_turns_anthropic(task) -> float:
    """Do the same as `two_turns` with Anthropic's client. The second answer is a stream."""
    client = anthropic.Anthropic(base_url=task.base_url, api_key=task.api_key)

    def ask(messages):
        asked = {"model": task.model, "messages": messages, "max_tokens": 8}
        if len(messages) == 1:
            answer = client.messages.create(**asked)
        else:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        return answer.content, "".join(block.text for block in answer.content if block.type == "text")

    return _digits(task, ask)


def _digits(task, ask) -> float:
    """Play two turns. Return the share of digits.

    ask: function that returns (content of the next message, its text) for the messages so far.
    """
    messages = list(task.messages)
    said = []
    for question in ("7?", None):
        content, text = ask(messages)
        said.append(text)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": question}]
    text = "".join(said)
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)
