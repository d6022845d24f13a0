"""A server of `grpo-megatron serve` with a stand-in for its session, and a client, for tests of the wire."""

import os
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np

from grpo_megatron.api import ForwardBackward, StepOutcome
from grpo_megatron.batch.sample import Sample
from grpo_megatron.errors import UserError
from grpo_megatron.serve.clients import Clients
from grpo_megatron.serve.command import listening
from grpo_megatron.serve.protobuf import (
    FLOAT32,
    INT64,
    ForwardBackwardRequest,
)
from grpo_megatron.serve.server import ServerState
from grpo_megatron.serve.tenant import Tenant

KEY = "tml-key"
MODEL = "Qwen/Qwen3-8B"


class StandIn:
    """Records the calls of a Session, and answers with numbers that tell the weights apart.

    weights: number of optimizer steps that have changed them
    calls: names of the methods that were called
    """

    def __init__(self, directory):
        self.directory = str(directory)
        self.weights = self.version = self.step = self.gradients = 0
        self.calls, self.published = [], 0

    def save(self):
        self.calls.append("save")
        folder = f"{self.directory}/checkpoints/step_{self.step:08d}"
        os.makedirs(folder)
        with open(f"{folder}/weights", "w") as file:
            file.write(f"{self.weights} {self.step}")
        return folder

    def load(self, folder, moments):
        self.calls.append("load" if moments else "load weights")
        with open(f"{folder}/weights") as file:
            self.weights, self.step = map(int, file.read().split())
        self.publish()

    def save_hf(self, folder):
        self.calls.append("save_hf")
        os.makedirs(folder)

    def discard_gradients(self):
        self.gradients = 0

    def publish(self):
        self.version += self.published != self.weights
        self.published = self.weights
        return self.version

    def forward_backward(self, data, loss):
        self.calls.append(f"forward_backward {loss.algorithm.surrogate}")
        self.gradients += 1
        return ForwardBackward(self.log_probs([one.tokens for one in data]), {"actor/loss": 2.5})

    def log_probs(self, sequences):
        return [np.append(0, -np.arange(1, len(one))).astype(np.float32) for one in sequences]

    def optim_step(self, adam):
        if not self.gradients:
            raise UserError("optim_step needs gradients")
        self.calls.append(f"optim_step lr={adam.lr} clip={adam.clip_grad}")
        self.weights, self.step, self.gradients = self.weights + 1, self.step + 1, 0
        return StepOutcome(grad_norm=1.5, lr=adam.lr, dropped=False)

    def sample(self, prompts, n, **settings):
        self.calls.append(f"sample {len(prompts)} x {n}")
        if any(99 in prompt for prompt in prompts):
            raise UserError("prompt 0 has a token id outside of 0..98")
        return [[self._response(prompt) for _ in range(n)] for prompt in prompts]

    def _response(self, prompt):
        ids = np.array([len(prompt), self.published], np.int32)
        logprobs = np.array([-0.5, -0.25], np.float32)
        return Sample.of(0, 0, np.array(prompt, np.int32), ids, np.ones(2, bool), logprobs, "length")


class Client:
    """A client of the server, which waits for each answer."""

    def __init__(self, address, key=KEY):
        self.http = httpx.Client(base_url=f"{address}/api/v1", headers={"x-api-key": key}, timeout=60)

    def post(self, verb, status=200, /, **body):
        answer = self.http.post(verb, json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["detail"]

    def fetch(self, future, kind=None):
        while True:
            answer = self.http.post("/retrieve_future", json={"request_id": future["request_id"]})
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return kind.FromString(answer.content) if kind else answer.json()

    def begin(self, session=None, number=0):
        self.session = session or self.post("/create_session", tags=[])["session_id"]
        created = self.post(
            "/create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=MODEL,
            lora_config={"rank": 8},
        )
        self.model, self.number = created["model_id"], 0
        return self.fetch(created)

    def ask(self, verb, /, **body):
        self.number += 1
        return self.fetch(self.post(verb, model_id=self.model, seq_id=self.number, **body))

    def train(self, number=None, loss="cross_entropy", forward_only=False, settings=None, **tensors):
        """Send a request to forward_backward. Return its future."""
        if number is None:
            self.number += 1
        request = ForwardBackwardRequest(
            model_id=self.model, seq_id=number or self.number, loss_fn=loss, forward_only=forward_only
        )
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
        datum.model_input.add().encoded_text.tokens = np.array([7], np.int32).tobytes()
        for key, value in (settings or {}).items():
            request.loss_fn_config.add(key=key).value.number = value
        given = {"target_tokens": [6, 7, 8]} | (tensors or {"weights": [0.0, 1.0, 1.0]})
        for name, values in given.items():
            of_tokens = name == "target_tokens"
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dense = np.array(values, np.int64 if of_tokens else np.float32).tobytes()
            tensor.dtype, tensor.shape[:] = INT64 if of_tokens else FLOAT32, [len(values)]
        answer = self.http.post("/forward_backward", content=request.SerializeToString())
        assert answer.status_code == 200, answer.text
        return answer.json()

    def step(self, lr=0.5):
        return self.ask("/optim_step", adam_params={"learning_rate": lr})

    def sampler(self, kind="snapshot", number=0):
        answer = self.ask("/save_weights_for_sampler", sampling_session_seq_id=number, kind=kind)
        return answer["sampling_session_id"]

    def sample(self, sampler, number=0, prompt=(1, 2), n=2, **others):
        return self.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=number,
            num_samples=n,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={"max_tokens": 4, "temperature": 1.0} | others.pop("params", {}),
            **others,
        )


@contextmanager
def serving(folder, lost_after=60.0, clock=time.monotonic):
    """Yield (address, session, clients), with the requests executed in another thread."""
    session = StandIn(folder)
    tenant = Tenant(session)
    clients = Clients(tenant, lost_after, clock)
    done = threading.Event()

    def work():
        while not done.is_set():
            tenant.work(0.05)

    worker = threading.Thread(target=work)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        state = ServerState(tenant, clients, MODEL, lora_rank=4, longest=64)
        with listening(listener, state, KEY):
            worker.start()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", session
            finally:
                done.set()
                worker.join()
