"""Requests that a session refuses before it asks ranks or engines, with stand-ins for both."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.api import Session
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError


class Engines:
    """Keeps what it is asked."""

    def generate(self, prompts, rollout):
        self.asked, self.rollout = prompts, rollout
        return []


@pytest.fixture
def session():
    """A session of a model with 64 positions and 99 tokens."""
    session = Session.__new__(Session)
    session.longest, session._vocab_size, session._manager = 64, 99, Engines()
    session.tokenizer = SimpleNamespace(prompt=lambda prompt, where: (str(prompt), np.array(prompt)))
    session._handover = SimpleNamespace(to_engines=lambda: None)
    session._run = SimpleNamespace(sharing=None, monitor=SimpleNamespace(phases=lambda name: nullcontext()))
    rollout = RolloutConfig(n=2, max_response_length=8)
    session.config = SimpleNamespace(rollout=rollout, megatron=SimpleNamespace(sleep=False))
    return session


def test_a_prompt_that_is_too_long_is_named(session):
    """The engine's error, an exception of SGLang, did not say what to do."""
    session.sample([[5] * 56])
    session.sample([[5] * 60], max_tokens=4)
    with pytest.raises(UserError, match=r"^prompt 1 has 57 tokens, .* 64 positions, which leave 56 beside"):
        session.sample([[5], [5] * 57])
    with pytest.raises(UserError, match="lower max_tokens"):
        session.sample([[5]], max_tokens=64)


@pytest.mark.parametrize(
    "prompt", [[5, 6], (5, 6), np.array([5, 6]), list(np.array([5, 6])), np.arange(5, 7)]
)
def test_token_ids_may_be_numbers_of_numpy(session, prompt):
    session.sample([prompt], n=3, temperature=0.5, top_p=0.9)
    [asked] = session._manager.asked
    assert asked.text == "[5, 6]"
    rollout = session._manager.rollout
    assert (rollout.n, rollout.max_response_length, rollout.temperature, rollout.top_p) == (3, 8, 0.5, 0.9)


def test_tokens_that_the_model_does_not_have_are_refused(session):
    for prompt, says in (([], "has 0 tokens"), ([99], "outside of 0..98"), ([-1], "outside of 0..98")):
        with pytest.raises(UserError, match=f"prompt 0 .*{says}"):
            session.sample([prompt])
