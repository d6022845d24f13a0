"""The built-in rewards for choices, form, length, comparison within the group, and a server."""

import asyncio
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rewards import RewardWorkers, resolve_reward, resolve_rewards
from grpo_megatron.rewards.base import read_secrets
from grpo_megatron.rewards.scoring import Failed, RewardTask, Scorer, ScorerSpec
from tests.unit.toy_environments import decode, encode


def value(function, response, answer="", tokens=None, components=None, **args):
    reward = resolve_rewards(RewardConfig(terms={"right": {"function": "exact_match"}, "own": {"function": function, **args}}))[
        1
    ]
    optional = {"tokens": tokens, "components": components}
    given = {name: optional[name] for name in reward.wants - {"args"}}
    return reward.function(prompt="", response=response, answer=answer, record={}, **given)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("so it is\n(C).", "C"),
        ("A is wrong, so the answer is (B)", "B"),
        ("Answer: **D**", "D"),
        ("The answer is A. No, the answer is B.", "B"),
        (r"the answer is A, \boxed{C}", "C"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{12}", None),
        ("I like A and B", None),
        ("the answer is Apple", None),
        ("", None),
    ],
)
def test_choice(response, letter):
    assert [value("choice", response, answer) for answer in "ABCD"] == [float(answer == letter) for answer in "ABCD"]


def test_choice_of_places_and_letters():
    assert value("choice", r"answer is A \boxed{B}", "A", response_from=["boxed"]) == 0.0
    assert value("choice", r"answer is A \boxed{\text{(B) } 12}", "B", response_from=["boxed"]) == 1.0
    assert value("choice", "answer is 2", ["1", "2"], letters="123") == 1.0
    with pytest.raises(ValueError, match="has none of the letters"):
        value("choice", "A", "Paris")


@pytest.mark.parametrize(
    ("response", "expected"),
    [("12\n", 1.0), ("1\n2", 1.0), ("12 x", 0.0), ("", 0.0)],
)
def test_regex(response, expected):
    assert value("regex", response, pattern=r"\d.?\d") == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think>a</think><answer>c</answer>", 1.0),
        ("<think>a</think> so <answer>c</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>c</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("a</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>c", 0.0),
    ],
)
def test_format(response, expected):
    assert value("format", response) == expected


def test_format_of_a_long_response_takes_no_time():
    """Something stands between its tags. It took the square of the length, half a minute for this one, which reward.timeout ends."""
    start = time.monotonic()
    assert value("format", f"<think>{'a b ' * 20000}</think> so <answer>1</answer>") == 0.0
    assert time.monotonic() - start < 15


def test_format_with_other_tags():
    assert value("format", "a</think><answer>c</answer>", opened=True) == 1.0
    assert value("format", "<a>1</a>", tags=["a"]) == 1.0


@pytest.mark.parametrize(("tokens", "both", "one"), [(100, 1, 1), (50, 0.5, 1), (0, 0, 1), (150, 0.5, 0.5), (250, 0, 0)])
def test_linear_length(tokens, both, one):
    assert value("linear_length", "", tokens=tokens, target=100, width=100) == both
    assert value("linear_length", "", tokens=tokens, target=100, width=100, shorter_is_free=True) == one


@pytest.mark.parametrize("tokens", [0, 1, 250, 500, 999])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_cosine_length(tokens, right):
    """arXiv:2502.03373 section 3.2."""
    at_zero, at_end = (2.0, 1.0) if right else (-10.0, 0.0)
    expected = at_end + 0.5 * (at_zero - at_end) * (1 + math.cos(tokens * math.pi / 1000))
    args = {"right_short": 2, "right_long": 1, "wrong_short": -10, "wrong_long": 0, "exceeded": -10}
    args |= {"right": "right", "longest": 1000, "components": {"right": right}}
    assert value("cosine_length", "", tokens=tokens, **args) == pytest.approx(expected)
    assert value("cosine_length", "", tokens=1000, **args) == -10


def group(function, tokens, rights, **args):
    components = [{"right": right} for right in rights]
    reward = resolve_rewards(RewardConfig(terms={"right": {"function": "exact_match"}, "own": {"function": function, **args}}))[
        1
    ]
    return reward.function(prompt="", responses=[""] * len(tokens), answer="", record={}, tokens=tokens, components=components)


def test_group_length():
    """arXiv:2501.12599 section 2.3.3."""
    assert group("group_length", [10, 30, 20, 50], [1, 1, 0, 0], right="right") == [0.5, 0.0, 0.0, -0.5]
    assert group("group_length", [10, 10], [1, 0], right="right") == [0.0, 0.0]


def test_rank():
    assert group("rank", [30, 10, 20], [1, 0, 1]) == [0.0, 1.0, 0.5]
    assert group("rank", [10, 10, 20], [1, 0, 1], largest_first=True) == [0.25, 0.25, 1.0]
    assert group("rank", [30, 10, 20, 5], [1, 0, 1, 1], among="right") == [0.0, 0.0, 0.5, 1.0]
    assert group("rank", [30, 10], [1, 0], among="right") == [1.0, 0.0]
    assert group("rank", [30, 10], [0, 0], among="right") == [0.0, 0.0]
    assert group("rank", [30, 10, 5], [0, 2, 2], by="right", largest_first=True) == [0.0, 0.75, 0.75]


# -- a server


class Server:
    """Answers with the lengths of the responses, after what it is told to do first: one word for each request."""

    def __init__(self):
        server, self.asked, self.todo = self, [], []

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
                answer = {"rewards": [{"reward": len(text), "upper": text.isupper()} for text in body["response"]]}
                texts = {"garbage": "<html>", "few": '{"rewards": []}'}
                self.send_response(int(todo) if todo.isdecimal() else 200)
                self.end_headers()
                self.wfile.write(texts.get(todo, json.dumps(answer)).encode())

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/score?key=hidden"
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
        ("500", "gave no rewards in 3 attempts; the last one: status 500", 3),
        ("403", "answered with status 403", 1),
        ("garbage", "answered what is no JSON", 1),
        ("few", r'answered no {"rewards": [...]} of 1 rewards', 1),
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
    assert "s3cret" not in repr(ScorerSpec(RewardConfig(function="http", args=args), decode, {"MY_TOKEN": "s3cret"}))
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(UserError, match="environment variable MY_TOKEN, which a reward of this run asks for, is not set"):
        RewardWorkers(RewardConfig(function="http", args=args), decode, [])


@pytest.mark.parametrize("value", ["s3cret\nX-Other: 1", "s3cret\x7f", "s3crét"])
def test_a_token_that_no_header_can_hold_is_refused_at_the_start(server, monkeypatch, value):
    rewards = resolve_rewards(RewardConfig(function="http", args={"url": server.url, "token_env": "MY_TOKEN"}))
    monkeypatch.setenv("MY_TOKEN", value)
    with pytest.raises(UserError, match=r"MY_TOKEN, .* which no HTTP header can hold; set it to the token alone") as found:
        read_secrets(rewards)
    assert "s3cr" not in str(found.value)


def test_the_newline_of_a_file_is_no_part_of_a_token(server, monkeypatch):
    rewards = resolve_rewards(RewardConfig(function="http", args={"url": server.url, "token_env": "MY_TOKEN"}))
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
    scorer = Scorer(RewardConfig(function="http", args={"url": server.url, "token_env": "T"}), decode, {"T": "s3cret"})
    (found,) = scorer.work([RewardTask(7, "p", encode("x"), "a", {})], 1.0)
    assert "s3cret" not in found.why
