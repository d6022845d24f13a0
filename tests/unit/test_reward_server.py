"""The reward `http`: its requests to a server, and the answers that it accepts."""

import asyncio
import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rewards import RewardWorkers, resolve_reward, resolve_rewards
from grpo_megatron.rewards.base import read_secrets
from grpo_megatron.rewards.remote import MAX_ANSWER
from grpo_megatron.rewards.scoring import Failed, RewardTask, Scorer, ScorerSpec
from tests.unit.toy_environments import decode, encode


class Server:
    """Answers with the lengths of the responses, unless `todo` has something else for the next request."""

    def __init__(self):
        server, self.asked, self.todo, self.written = self, [], [], 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((body, self.headers.get("Authorization")))
                todo = server.todo.pop(0) if server.todo else "answer"
                if todo == "drop":
                    self.connection.close()
                    return
                if todo == "sleep":
                    time.sleep(1.5)
                status, _, location = todo.partition(" to ")
                self.send_response(int(status) if status.isdecimal() else 200)
                if location:
                    self.send_header("Location", location)
                if todo == "compressed":
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.answer(todo, body["response"])

            def answer(self, todo, responses):
                answer = {
                    "rewards": [{"reward": len(text), "upper": int(text.isupper())} for text in responses]
                }
                texts = {"garbage": "<html>", "few": '{"rewards": []}', "deep": "[" * 10**5}
                text = todo if todo.startswith("{") else texts.get(todo, json.dumps(answer))
                self.wfile.write(gzip.compress(text.encode()) if todo == "compressed" else text.encode())
                while todo == "endless":
                    try:
                        self.wfile.write(b" " * (1 << 16))
                        server.written += 1 << 16
                    except OSError:
                        return

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/score?key=hidden"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server():
    one = Server()
    yield one
    one.close()


def asked(server, *responses, secrets=None, timeout=20.0, **args):
    args = {"url": server.url, "backoff": 0.01} | args
    scorer = ScorerSpec(RewardConfig(function="http", args=args, timeout=timeout), decode, secrets or {})()
    tasks = [RewardTask(7, "p", encode(text), "a", {"id": number}) for number, text in enumerate(responses)]
    return scorer.work(tasks, 100.0)


def test_a_server_gets_batches(server):
    found = asked(server, "one", "FOUR", *["x"] * 5, batch_size=3)
    assert [one.components["reward"] for one in found] == [3, 4, 1, 1, 1, 1, 1]
    assert [one.components["upper"] for one in found][:2] == [0, 1]
    bodies = sorted((body for body, _ in server.asked), key=lambda body: body["record"][0]["id"])
    assert [len(body["response"]) for body in bodies] == [3, 3, 1]
    assert bodies[0] == {
        "prompt": ["p"] * 3,
        "response": ["one", "FOUR", "x"],
        "answer": ["a"] * 3,
        "record": [{"id": 0}, {"id": 1}, {"id": 2}],
    }
    assert server.asked[0][1] is None


@pytest.mark.parametrize("todo", ["503", "429", "drop", "sleep"])
def test_a_request_is_tried_again(server, todo):
    server.todo = [todo, todo]
    (found,) = asked(server, "one", attempt_timeout=1.0 if todo == "sleep" else 10.0)
    assert found.components["reward"] == 3
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("todo", "says", "requests"),
    [
        ("500", "returned no rewards in 3 attempts (last problem: status 500)", 3),
        ("403", "answered with HTTP status 403", 1),
        ("garbage", "sent an answer that is not valid JSON", 1),
        ("deep", "sent an answer that is not valid JSON", 1),
        ("few", r'must answer {"rewards": [...]} with 1 rewards, but sent {', 1),
        ("endless", "sent an answer of more than 16 MiB", 1),
        ("compressed", "sent a compressed answer ('gzip'); turn off compression", 1),
        ("301", "redirects to 'http://127.0.0.1:", 1),
        (
            "307 to //10.0.0.1/other?key=hidden",
            "redirects to 'http://10.0.0.1/other' (status 307), but redirects are not followed",
            1,
        ),
        ("307 to http://[bad/", "redirects to an invalid URL", 1),
    ],
)
def test_a_server_that_gives_no_rewards_is_a_failed_reward(server, todo, says, requests):
    server.todo = [todo] * 9
    (found,) = asked(server, "one", attempts=3)
    assert isinstance(found, Failed)
    assert says in found.why
    assert "hidden" not in found.why
    assert len(server.asked) == requests


def test_a_server_that_is_too_slow(server):
    server.todo = ["sleep"]
    (found,) = asked(server, "one", timeout=0.5)
    assert "took longer than reward.timeout=0.5 s" in found.why


def test_a_token_is_sent_and_shown_nowhere(server, monkeypatch):
    args = {"url": server.url, "token_env": "MY_TOKEN"}
    asked(server, "one", secrets={"MY_TOKEN": "s3cret"}, token_env="MY_TOKEN")
    assert server.asked[0][1] == "Bearer s3cret"
    assert "s3cret" not in repr(
        ScorerSpec(RewardConfig(function="http", args=args), decode, {"MY_TOKEN": "s3cret"})
    )
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(
        UserError, match="environment variable MY_TOKEN, which a reward of this run needs, is not set"
    ):
        RewardWorkers(RewardConfig(function="http", args=args), decode, [])


@pytest.mark.parametrize("value", ["s3cret\nX-Other: 1", "s3cret\x7f", "s3crét"])
def test_a_token_that_no_header_can_hold_is_refused_at_the_start(server, monkeypatch, value):
    rewards = resolve_rewards(
        RewardConfig(function="http", args={"url": server.url, "token_env": "MY_TOKEN"})
    )
    monkeypatch.setenv("MY_TOKEN", value)
    with pytest.raises(
        UserError,
        match=r"MY_TOKEN, .* so it cannot be sent in an HTTP header; set the variable to the token alone",
    ) as found:
        read_secrets(rewards)
    assert "s3cr" not in str(found.value)


def test_the_newline_of_a_file_is_no_part_of_a_token(server, monkeypatch):
    rewards = resolve_rewards(
        RewardConfig(function="http", args={"url": server.url, "token_env": "MY_TOKEN"})
    )
    monkeypatch.setenv("MY_TOKEN", "s3cret\n")
    asked(server, "one", secrets=read_secrets(rewards), token_env="MY_TOKEN")
    assert server.asked[0][1] == "Bearer s3cret"
    monkeypatch.setenv("MY_TOKEN", "\n")
    with pytest.raises(UserError, match="is not set"):
        read_secrets(rewards)


def test_a_server_may_be_asked_in_one_event_loop_after_another(server):
    reward = resolve_reward(RewardConfig(function="http", args={"url": server.url}))
    for _ in range(2):
        assert asyncio.run(reward("p", "four", "a", {}))["reward"] == 4


def test_the_scorer_names_no_secret(server):
    server.todo = ["403"]
    scorer = Scorer(
        RewardConfig(function="http", args={"url": server.url, "token_env": "T"}), decode, {"T": "s3cret"}
    )
    (found,) = scorer.work([RewardTask(7, "p", encode("x"), "a", {})], 1.0)
    assert "s3cret" not in found.why


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(server, status):
    """Responses used to be sent to whatever host a server redirected to."""
    other = Server()
    try:
        server.todo = [f"{status} to http://user:hidden@127.0.0.1:{other.port}/next?key=hidden"]
        (found,) = asked(server, "one")
    finally:
        other.close()
    assert f"redirects to 'http://127.0.0.1:{other.port}/next' (status {status})" in found.why
    assert "set url to the final address" in found.why
    assert "hidden" not in found.why
    assert other.asked == []


def test_an_answer_without_end_is_not_read(server):
    """384 MiB used to be read in 4 s, and more until attempt_timeout."""
    server.todo = ["endless"]
    (found,) = asked(server, "one")
    assert "sent an answer of more than 16 MiB" in found.why
    assert server.written < MAX_ANSWER + (16 << 20)  # what is on the way between the two


def test_a_large_answer_is_read(server):
    rewards = [{"reward": 1} | {f"{'x' * 97}{number}": 0.123456789012345678 for number in range(100)}] * 64
    server.todo = [json.dumps({"rewards": rewards})]
    found = asked(server, *["x"] * 64)
    assert [one.components["reward"] for one in found] == [1.0] * 64


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ('"1.0"', "answered '1.0'; the reward must be a number"),
        ("true", "answered True; the reward must be a number"),
        ("null", "answered None; the reward must be a number"),
        ("[1.0]", "the reward must be a number"),
        ("NaN", "the reward must be finite"),
        ("1e999", "the reward must be finite"),
        ("-Infinity", "the reward must be finite"),
        ("1" * 400, "the reward must be finite, and at most 1e+30 in absolute value"),
        ('{"score": 1}', "it must return a number, or a dict with 'reward'"),
        ('{"reward": "1"}', "the reward must be a number"),
        ('{"reward": 1, "right": true}', "'right' must be a number, but is True of type bool"),
        ('{"reward": 1, "parts": {"form": 1}}', "'parts' must be a number, but is {'form': 1} of type dict"),
        ('{"reward": 1, "\\u001b[2J": 1}', r"must be 1 to 100 printable characters, but is '\x1b[2J'"),
        ('{"reward": 1, "\\ud800": 1}', r"must be 1 to 100 printable characters, but is '\ud800'"),
        ('{"reward": 1, "": 1}', "must be 1 to 100 printable characters, but is ''"),
        (
            json.dumps({"reward": 1} | dict.fromkeys(map(str, range(100_000)), 1)),
            "at most 100 numbers in addition to the reward, not 100000",
        ),
    ],
)  # fmt: skip
def test_what_is_no_reward_costs_its_own_sample(server, reward, says):
    """Texts, truth values and 100,000 names were accepted, and a number of 400 digits raised
    OverflowError.
    """
    server.todo = [f'{{"rewards": [1, {reward}, 2]}}']
    before, failed, after = asked(server, "a", "b", "c")
    assert (before.components, after.components) == ({"reward": 1.0}, {"reward": 2.0})
    assert isinstance(failed, Failed)
    assert says in failed.why
    assert len(failed.why) < 600
    assert failed.why.isprintable()
