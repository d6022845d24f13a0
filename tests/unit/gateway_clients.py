"""The official clients of the gateway's chat protocols, behind one interface, for tests of both."""

import json
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState


@dataclass
class Said:
    """A turn of the model, as a client has read it.

    text: its text, without thinking
    calls: [(id, name, arguments)]
    reason: why it ended, in the words of the protocol
    message: the turn as a message of the history, as agents usually make it
    """

    text: str
    calls: list[tuple[str, str, dict]]
    reason: str
    message: dict[str, Any]


class Client:
    """A client that is closed at the end of an `async with`.

    client: the official client
    """

    client: Any

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.client.close()


class ChatClient(Client):
    """OpenAI's client."""

    errors, httpx = openai, httpx
    path = "/v1/chat/completions"
    tool_reason, cut_reason = "tool_calls", "length"

    def __init__(self, url: str, key: str, **options):
        self.client = openai.AsyncOpenAI(base_url=url, api_key=key, **{"max_retries": 0} | options)

    async def ask(self, messages: list[dict], stream: bool = False, **options) -> Said:
        if not stream:
            done = await self.client.chat.completions.create(model="m", messages=messages, **options)
            message, reason = done.choices[0].message, done.choices[0].finish_reason
        else:
            state = ChatCompletionStreamState()
            chunks = await self.client.chat.completions.create(
                model="m", messages=messages, stream=True, **options
            )
            async for chunk in chunks:
                state.handle_chunk(chunk)
            choice = state.get_final_completion().choices[0]
            message, reason = choice.message, choice.finish_reason
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        ]
        kept = {"role", "content", "tool_calls"}
        return Said(message.content or "", calls, reason, message.model_dump(include=kept, exclude_none=True))

    @staticmethod
    def body(text: str, **more: Any) -> dict:
        return {"model": "m", "messages": [{"role": "user", "content": text}]} | more

    @staticmethod
    def tool(name: str) -> dict:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    @staticmethod
    def results(results: dict[str, str]) -> list[dict]:
        """Return the messages with the results of calls. results: {id of the call: result}."""
        return [
            {"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results.items()
        ]


class MessagesClient(Client):
    """Anthropic's client."""

    errors, httpx = anthropic, httpx2
    path = "/v1/messages"
    tool_reason, cut_reason = "tool_use", "max_tokens"

    def __init__(self, url: str, key: str, **options):
        self.client = anthropic.AsyncAnthropic(base_url=url, api_key=key, **{"max_retries": 0} | options)

    async def ask(self, messages: list[dict], stream: bool = False, **options) -> Said:
        options = {"max_tokens": 200} | options
        if not stream:
            done = await self.client.messages.create(model="m", messages=messages, **options)
        else:
            async with self.client.messages.stream(model="m", messages=messages, **options) as events:
                done = await events.get_final_message()
        text = "".join(block.text for block in done.content if block.type == "text")
        calls = [(block.id, block.name, block.input) for block in done.content if block.type == "tool_use"]
        blocks = [block.model_dump(exclude_none=True) for block in done.content if block.type != "thinking"]
        return Said(text, calls, done.stop_reason, {"role": "assistant", "content": blocks})

    @staticmethod
    def body(text: str, **more: Any) -> dict:
        return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 200} | more

    @staticmethod
    def tool(name: str) -> dict:
        return {"name": name, "input_schema": {"type": "object"}}

    @staticmethod
    def results(results: dict[str, str]) -> list[dict]:
        """Return the message with the results of calls. results: {id of the call: result}."""
        blocks = [
            {"type": "tool_result", "tool_use_id": call_id, "content": text}
            for call_id, text in results.items()
        ]
        return [{"role": "user", "content": blocks}]
