"""A server of OpenEnv for tests: it asks for a sum until it hears it.

python openenv_sums.py PORT
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    number: int


class Question(Observation):
    text: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, a=1, b=2, **_):
        self._sum = a + b
        return Question(text=f"{a}+{b}?")

    def step(self, action, timeout_s=None, **_):
        right = action.number == self._sum
        return Question(text="right" if right else "no", done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Sums, Answer, Question, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
