"""Environments for the tests. They are light, because they run in processes of their own."""

import asyncio
import os
import random
import signal
import sys
import time

import numpy as np

from grpo_megatron.rollout.environments import StepResult, environment

AB = 500  # one token for "ab", which can also be written as two


def encode(text):
    return np.array([AB if piece == "ab" else ord(piece) for piece in _pieces(text)], dtype=np.int32)


def _pieces(text):
    head, *others = text.split("ab")
    return [*head, *(piece for other in others for piece in ("ab", *other))]


def decode(ids):
    return "".join("ab" if token == AB else chr(token) for token in ids)


@environment("counting")
class Counting:
    """Answers `<turn>:<state>;` to every turn, with reward 0.5, until it reads `end`."""

    def __init__(self, prompt):
        self.prompt, self.turns = prompt, 0

    async def reset(self, seed):
        self.state = random.Random(seed).randint(0, 10**9)
        await asyncio.sleep(0)
        return self.prompt.fields.get("first")

    async def step(self, response):
        self.turns += 1
        seen = {"state": self.state, "pid": os.getpid(), "one": 1}
        return StepResult(f"{self.turns}:ab;", 0.5, response.endswith("end"), seen)


class Closing:
    """Records in the record's file that it was closed, and after how many steps.

    Fails, hangs or dies as the record says.
    """

    def __init__(self, prompt):
        self.file, self.order, self.steps = prompt.fields["file"], prompt.fields.get("do", ""), 0
        if self.order == "made to raise":
            raise ZeroDivisionError("planted")

    async def reset(self, seed):
        if self.order == "reset and raise":
            raise ZeroDivisionError("planted")

    async def step(self, response):
        self.steps += 1
        if response == "raise":
            raise ZeroDivisionError("planted")
        if response == "sleep":
            time.sleep(30)
        return StepResult("?", 1.0, response == "end")

    async def close(self):
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"{self.steps};")
        if self.order == "raise at the end":
            raise ZeroDivisionError("planted at the end")
        while self.order == "spin at the end":
            pass


class Obedient:
    """Does what it is told: by the record's field `do` when it is made or reset, by the response in a
    step.
    """

    def __init__(self, prompt):
        self.order = prompt.fields.get("do", "")
        self.obey(self.order if self.order.startswith("made") else "")

    def reset(self, seed):
        return self.obey(self.order) if self.order.startswith("reset") else None

    async def step(self, response):
        if response == "await":
            await asyncio.sleep(60)
        return self.obey(response)

    def obey(self, order):
        if order.endswith("raise"):
            raise ZeroDivisionError("planted")
        if order == "exit":
            sys.exit(3)
        if order == "die":
            os._exit(1)
        if order == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if order in ("sleep", "deaf"):
            time.sleep(60)
        while order == "spin":
            pass
        return {
            "text": "good",
            "nothing": None,
            "reset number": 7,
            "bad observation": StepResult(observation=b"bytes"),
            "bad reward": StepResult(reward="high"),
            "nan": StepResult(reward=float("nan")),
            "bad done": StepResult(done="no"),
            "bad component": StepResult(components={"x": "many"}),
        }.get(order, StepResult("fine", 1.0))
