"""Rewards computed by a server and requested over HTTP."""

import asyncio
import json
import random
import re
from typing import Any
from urllib.parse import urljoin, urlsplit

from grpo_megatron.config.options import FilledText, dataclass, option
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.rewards.terms import Setup
from grpo_megatron.rewards.values import NoReward, read_reward, shown

# The user and password before the host, also in a URL without a scheme.
_USER = re.compile(r"(?:[^/?#]*//)?[^/?#]*@")
# Status codes after which the same request may succeed later.
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Maximum size of an answer in bytes. A reward with the maximum number of further numbers takes 13 KB, so even
# the answer to a large batch is far smaller.
MAX_ANSWER = 16 << 20
_READ_AT_ONCE = 1 << 16


@dataclass
class _Http:
    url: FilledText = option("", "address of the server")
    token_env: FilledText | None = option(
        None, "environment variable of the driver; its value is sent as bearer token"
    )
    batch_size: int = option(64, "maximum number of responses in one request", gt=0)
    attempts: int = option(3, "maximum number of attempts for a request", gt=0)
    attempt_timeout: float = option(8.0, "time limit of one attempt", "seconds", gt=0)
    backoff: float = option(
        0.5, "pause before the second attempt; it doubles before each further attempt", "seconds", ge=0
    )


class RewardServerError(Exception):
    """A reward server gave no valid answer. The message says why."""


class Http:
    """The reward function `http`, which asks a server for the reward of a response.

    Calls that wait at the same time are sent together, up to `batch_size` in one request. A request posts
    {"prompt": [...], "response": [...], "answer": [...], "record": [...]} as JSON. The server must answer
    {"rewards": [...]} with one entry per response: a number, or an object with the key "reward" and further
    numbers. A call raises RewardServerError if the server gives no valid answer for it.
    """

    def __init__(self, options: _Http, token: str | None):
        self._options, self._token = options, token
        self.secrets = () if options.token_env is None else (options.token_env,)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future]] = []
        self._posts: set[asyncio.Task] = set()
        self._shown = _without_secrets(options.url)

    @classmethod
    def make(cls, setup: Setup) -> "Http":
        options = setup.options(_Http)
        key, shown = f"{setup.term.key}.url", shortened(options.url.partition("?")[0])
        if _USER.match(options.url):  # checked first, because the other message shows the URL
            raise UserError(
                f"{key} must not contain a user name or password, because config.yaml would show them; set "
                "token_env to the name of an environment variable that contains a token"
            )
        try:
            parts = urlsplit(options.url)
            legal = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # the port is not a number or too large, or brackets contain no address
            legal = False
        if not legal:
            raise UserError(f"{key} must have the form http://HOST:PORT/PATH, but is {shown!r}")
        return cls(options, setup.secrets.get(options.token_env) if options.token_env else None)

    async def __call__(
        self, prompt: str, response: str, answer: str | list[str], record: dict
    ) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        row = {"prompt": prompt, "response": response, "answer": answer, "record": record}
        self._waiting.append((row, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)  # calls that arrive until then are sent together
        return await future

    def _send(self) -> None:
        """Send all waiting calls to the reward server, at most `batch_size` of them in one request."""
        size, waiting = self._options.batch_size, self._waiting
        self._waiting = []
        for start in range(0, len(waiting), size):
            task = asyncio.create_task(self._post(waiting[start : start + size]))
            self._posts.add(task)
            task.add_done_callback(self._posts.discard)

    async def _post(self, batch: list[tuple[dict[str, Any], asyncio.Future]]) -> None:
        """Request the rewards of one batch, and give each waiting call its reward or an error.

        batch: (data of a response, future of its call) for each waiting call.
        """
        body = {name: [row[name] for row, _ in batch] for name in batch[0][0]}
        try:
            rewards = await self._rewards(body, len(batch))
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), reward in zip(batch, rewards, strict=True):
            if future.done():
                continue
            try:
                future.set_result(read_reward(reward, from_json=True))
            except NoReward as error:
                future.set_exception(RewardServerError(f"{self._shown} answered {shown(reward)}; {error}"))

    async def _rewards(self, body: dict[str, list], count: int) -> list:
        """Request the rewards of one batch from the server. Try again after errors that may be temporary.

        body: JSON data of the request.
        count: number of responses in the request.

        Returns the list of rewards as the server sent it. Raises RewardServerError if no attempt succeeds, or
        if the answer does not have `count` rewards.
        """
        options = self._options
        for attempt in range(options.attempts):
            if attempt:
                # A random pause, so that the workers do not all retry at the same time.
                await asyncio.sleep(options.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            answer, problem = await self._ask(body)
            if problem is None:
                rewards = answer.get("rewards") if isinstance(answer, dict) else None
                if not isinstance(rewards, list) or len(rewards) != count:
                    raise RewardServerError(
                        f'{self._shown} must answer {{"rewards": [...]}} with {count} rewards, but sent '
                        f"{shown(answer)}"
                    )
                return rewards
        raise RewardServerError(
            f"{self._shown} returned no rewards in {options.attempts} attempts (last problem: {problem}); "
            "check that the server is running"
        )

    async def _ask(self, body: dict[str, list]) -> tuple[Any, str | None]:
        """Send one request to the server, and return (answer, problem).

        - answer: the server's answer, parsed from JSON; None if there was a problem.
        - problem: text that says why there is no answer, if a later attempt may succeed; else None.

        body: JSON data of the request.

        Raises RewardServerError if a later attempt would fail in the same way.
        """
        import aiohttp

        # Do not accept compressed answers, because they could decompress to any size.
        headers = {"Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {self._token}"} if self._token else {}
        )
        timeout = aiohttp.ClientTimeout(total=self._options.attempt_timeout)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers, auto_decompress=False) as session,
                session.post(self._options.url, json=body, allow_redirects=False) as response,
            ):
                if response.status in _BUSY:
                    return None, f"status {response.status}"
                if response.status in _REDIRECTS:
                    raise RewardServerError(
                        self._redirected(response.status, response.headers.get("Location", ""))
                    )
                if response.status != 200:
                    raise RewardServerError(
                        f"{self._shown} answered with HTTP status {response.status}; see the server's log"
                    )
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise RewardServerError(
                        f"{self._shown} sent a compressed answer ({encoding[:20]!r}); turn off compression "
                        "on the server"
                    )
                return json.loads(await self._read(response)), None
        except asyncio.TimeoutError:
            return None, f"no answer within {self._options.attempt_timeout} s"
        except aiohttp.ClientError as error:
            return None, type(error).__name__
        except (ValueError, RecursionError) as error:
            raise RewardServerError(
                f"{self._shown} sent an answer that is not valid JSON; see the server's log"
            ) from error

    def _redirected(self, status: int, location: str) -> str:
        """Return the error message for a server that redirects the request to another address.

        status: HTTP status of the server's answer.
        location: the other address, from the header of the answer.
        """
        try:
            target = shown(_without_secrets(urljoin(self._options.url, location)))
        except ValueError:
            target = "an invalid URL"
        return (
            f"{self._shown} redirects to {target} (status {status}), but redirects are not followed, "
            "because they would send the responses to another address; set url to the final address"
        )

    async def _read(self, response) -> bytes:
        """Return the body of an HTTP response. Raise RewardServerError if it exceeds MAX_ANSWER bytes."""
        found = bytearray()
        async for data in response.content.iter_chunked(_READ_AT_ONCE):
            found += data
            if len(found) > MAX_ANSWER:
                raise RewardServerError(
                    f"{self._shown} sent an answer of more than {MAX_ANSWER >> 20} MiB; answer with the "
                    "rewards only"
                )
        return bytes(found)


def _without_secrets(url: str) -> str:
    """Return a URL without the parts that may be secret (user, password and query), for messages.

    Raises ValueError if the URL is invalid.
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
