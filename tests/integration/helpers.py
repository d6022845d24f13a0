"""Functions that the integration tests share. `digits` runs in reward processes."""

import os
import signal
import tempfile
import time
from functools import cache

import numpy as np

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.rewards.code import code
from grpo_megatron.rewards.terms import Setup, terms_of


def digits(prompt, response, answer, record):
    """Return the share of digits, a reward for which untrained models get different values."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def digits_unless_it_fails(prompt, response, answer, record):
    if answer == "fails":
        raise ValueError("planted")
    return digits(prompt, response, answer, record)


def runs_a_program(prompt, response, answer, record):
    """Return the reward `code`, for a program that takes a fifth of a second of CPU time."""
    program = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\nprint(4)"
    found = _code()(prompt, f"```python\n{program}\n```", '{"inputs": [""], "outputs": ["4"]}', record)
    assert found["passed"] == 1.0
    return digits(prompt, response, answer, record)


@cache
def _code():
    config = RewardConfig(function="code", timeout=120.0)
    return code(Setup(config, *terms_of(config)))


def nan_reward(prompt, response, answer, record):
    return float("nan")


def letters(text):
    """Return the ids of a text, as a tokenizer of single letters makes them."""
    return np.array([ord(c) for c in text], dtype=np.int32)


def spelled(ids):
    return "".join(map(chr, ids))


_KEPT = []


def obey(prompt, response, answer, record):
    """Do what the response says, as a reward function."""
    if response == "raise":
        raise ZeroDivisionError("planted")
    if response == "die":
        os._exit(1)
    if response == "deaf":  # as in a C extension that never returns
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)
    if response == "eat":
        return len(bytearray(10 * 2**30))
    if response == "keep":
        _KEPT.append(bytearray(100 * 2**20))
    if response == "write":
        with open(os.path.join(tempfile.gettempdir(), f"reward-{os.getpid()}"), "wb") as file:
            os.unlink(file.name)
            for _ in range(1024):
                file.write(bytes(2**20))
    if response == "shout":
        for _ in range(1024):
            print("x" * 2**20, flush=True)
    if response == "talk":
        print("x", flush=True)
    if response == "nap":
        time.sleep(1)
    return float(os.getpid()) if response == "pid" else 1.0
