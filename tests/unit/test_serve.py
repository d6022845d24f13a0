"""The wire of `grpo-megatron serve`, with a stand-in for the session: who is served, when, and how often."""

import ast
from pathlib import Path

import httpx
import numpy as np
import pytest

from grpo_megatron.serve.protobuf import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)
from grpo_megatron.serve.tenant import Tenant
from tests.tools import wait_until
from tests.unit.serving import MODEL, Client, StandIn, serving


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as server:
        yield server


def test_a_stranger_gets_401_and_nothing_else(server):
    stranger = Client(server[0], key="tml-other")
    for asked in ("GET /healthz", "POST /create_session", "GET /nothing", "POST /asample"):
        answer = stranger.http.request(*asked.split())
        assert (answer.status_code, answer.json()) == (401, {"detail": "the key is missing or wrong"})
    assert Client(server[0]).http.get("/healthz").json() == {"status": "ok"}


def test_a_step_and_its_samples(server):
    address, session = server
    client = Client(address)
    assert client.begin()["model_id"] == client.model
    assert "LoRA adapters of rank 4" in client.post("/create_session")["info_message"]
    assert client.post("/get_info", model_id=client.model)["lora_rank"] == 4
    output = client.fetch(client.train(), ForwardBackwardOutput)
    (record,) = output.loss_fn_outputs
    assert np.frombuffer(record.fields[0].value.data, np.float32).tolist() == [-1, -2, -3]
    assert {one.key: one.value for one in output.metrics} == {"loss:sum": 2.5}
    assert client.step()["metrics"] == {"optim/grad_norm": 1.5, "optim/dropped": 0}
    future = client.sample(client.sampler())
    response = client.fetch(future, SampleResponse)
    assert len(future["sample_sequence_ids"]) == len(response.sequences) == 2
    assert np.frombuffer(response.sequences[1].tokens, np.int32).tolist() == [2, 1]
    assert np.frombuffer(response.sequences[0].logprobs, np.float32).tolist() == [-0.5, -0.25]
    assert response.sequences[0].stop_reason == 1
    assert "optim_step lr=0.5 clip=0.0" in session.calls


def test_a_repeated_request_is_executed_once(server):
    address, session = server
    client = Client(address)
    client.begin()
    first = client.train(number=1)
    assert client.train(number=1) == first
    client.number = 1
    done = client.post("/optim_step", model_id=client.model, seq_id=2, adam_params={})
    assert client.post("/optim_step", model_id=client.model, seq_id=2, adam_params={}) == done
    client.fetch(done)
    assert client.fetch(done) == client.fetch(done)
    client.number = 2
    sampler = client.sampler()
    assert client.sample(sampler) == client.sample(sampler)
    client.fetch(client.sample(sampler), SampleResponse)
    assert [call.split()[0] for call in session.calls] == ["save", "forward_backward", "optim_step", "sample"]
    assert "belongs to another request" in client.post(
        "/optim_step", 422, model_id=client.model, seq_id=2, adam_params={"learning_rate": 3.0}
    )
    key = {"x-idempotency-key": "once"}
    opened = [client.http.post("/create_session", headers=key).json()["session_id"] for _ in range(2)]
    assert opened[0] == opened[1] != client.session


def test_requests_are_executed_in_the_order_of_their_numbers(server):
    address, session = server
    client = Client(address)
    client.begin()
    late = client.post("/optim_step", model_id=client.model, seq_id=3, adam_params={})
    second = client.train(number=2, loss="ppo", advantages=[0, 1, 1], logprobs=[0, -1, -1])
    assert session.calls == ["save"]
    client.fetch(client.train(number=1), ForwardBackwardOutput)
    client.fetch(second, ForwardBackwardOutput)
    assert client.fetch(late)["metrics"]
    assert [call.split()[0] for call in session.calls[1:]] == [
        "forward_backward",
        "forward_backward",
        "optim_step",
    ]
    assert session.calls[2] == "forward_backward clip"


def test_a_failed_part_of_a_batch_drops_the_step(server):
    address, session = server
    client = Client(address)
    client.begin()
    client.fetch(client.train(), ForwardBackwardOutput)
    failed = client.fetch(client.train(target_tokens=[6, 9, 8], weights=[0, 1, 1]))
    assert failed == {
        "error": "datum 0: target_tokens[1] is 9, but the next token of the input is 7; the two may differ "
        "only where the loss has the weight 0",
        "category": "user",
    }
    assert "no step was taken" in client.step()["error"]
    assert (session.weights, session.gradients) == (0, 0)
    client.fetch(client.train(), ForwardBackwardOutput)
    assert client.step()["metrics"]
    assert session.step == 1


RL = {"advantages": [0.0, 1.0, 1.0], "logprobs": [0.0, -1.0, -1.0]}
WRONG = {
    "the loss 'stable_reinforce' is not supported": {"loss": "stable_reinforce"},
    "takes the tensors target_tokens, advantages, logprobs; the datum has target_tokens, weights": {
        "loss": "importance_sampling"
    },
    "the datum has advantages, logprobs, target_tokens, weights": {
        "loss": "ppo",
        "weights": [0, 1, 1],
        **RL,
    },
    "must have one value for each of the 3 input tokens": {"weights": [1.0]},
    "datum 0: weights has a value that is NaN or infinite": {"weights": [0.0, float("nan"), 1.0]},
    "needs loss_fn_config with beta": {"loss": "dro", **RL},
    "must be on both sides of 1": {"loss": "gspo", "settings": {"clip_low_threshold": 1.1}},
    "target_tokens[0] is 0, but the next token of the input is 6": {
        "loss": "dro",
        "settings": {"beta": 0.1},
        "target_tokens": [0, 7, 8],
        **RL,
    },
    "advantages must be 0 where sequence_ratio_mask is 0": {
        "loss": "gspo",
        "sequence_ratio_mask": [0, 0, 1],
        **RL,
    },
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_data_is_named(server, says):
    client = Client(server[0])
    client.begin()
    assert says in client.fetch(client.train(**WRONG[says]))["error"]


def test_bytes_that_are_no_numbers_fail_alone(server):
    """They must not end the server."""
    client = Client(server[0])
    client.begin()
    request = ForwardBackwardRequest(model_id=client.model, seq_id=1, loss_fn="cross_entropy")
    request.data.add().model_input.add().encoded_text.tokens = b"12345"
    answer = client.http.post("/forward_backward", content=request.SerializeToString()).json()
    assert "datum 0 has 5 bytes" in client.fetch(answer)["error"]


def test_a_refused_request_takes_its_turn(server):
    """The SDK gives the next number to the next request, which would wait forever."""
    address, session = server
    client = Client(address)
    client.begin()
    client.train()
    refused = client.ask("/optim_step", adam_params={"learning_rate": -1.0})
    assert refused == {
        "error": "learning_rate: Input should be greater than or equal to 0",
        "category": "user",
    }
    assert "AdamW" in client.ask("/optim_step", optimizer_params={"type": "dimuon"})["error"]
    external = {"path": "final", "age_encryption_recipients": ["age1x"]}
    assert "does not encrypt" in client.ask("/save_weights_external", **external)["error"]
    assert client.step()["metrics"]
    path = client.ask("/save_weights_external", path="final")["path"]
    assert path == f"tinker://{client.model}/external_weights/final"
    assert Path(session.directory, "tinker", client.model, "external_weights", "final").exists()
    late = client.post("/optim_step", model_id=client.model, seq_id=0, adam_params={})
    assert "request 0 is late; the next one is" in client.fetch(late)["error"]


def test_what_is_not_supported_is_refused(server):
    client = Client(server[0])
    client.begin()
    assert "does not support GET /api/v1/checkpoints" in client.http.get("/checkpoints").json()["detail"]
    sampler = client.sampler()
    for says, body in {
        "seed": {"params": {"seed": 1}},
        "stop=": {"params": {"stop": []}},
        "topk_prompt_logprobs": {"topk_prompt_logprobs": 2},
        "something_newer": {"something_newer": {"k": 1}},
        "stable_reinforce": {"record_stability_info": True},
    }.items():
        with pytest.raises(AssertionError, match=says):
            client.sample(sampler, **body)
    prompt = {"chunks": [{"type": "image", "data": "abc"}]}
    refused = client.post(
        "/asample", 422, sampling_session_id=sampler, seq_id=0, prompt=prompt, sampling_params={}
    )
    assert refused.startswith("body.prompt.chunks.0.type: Input should be 'encoded_text'")
    other = client.post("/create_session")["session_id"]
    for says, asked in {
        MODEL: {"base_model": "other"},
        "is AdamW": {"base_model": MODEL, "optimizer_config": {"type": "dimuon", "version": 1}},
        "train_mlp=False": {"base_model": MODEL, "lora_config": {"rank": 8, "train_mlp": False}},
    }.items():
        assert says in client.post("/create_model", 422, session_id=other, model_seq_id=0, **asked)
        path = {"path": "tinker://x/weights/y", "optimizer": False}
        assert says in client.post("/load_weights", 422, session_id=other, model_seq_id=0, **path, **asked)
    assert "no weights" in client.post(
        "/create_sampling_session", 404, session_id=other, sampling_session_seq_id=0, base_model="other"
    )


def test_samples_go_together_and_a_wrong_one_fails_alone(server):
    address, session = server
    client = Client(address)
    client.begin()
    sampler = client.sampler()
    session.calls.clear()
    futures = [client.sample(sampler, i, prompt) for i, prompt in enumerate([(1,), (99,), (1, 2, 3)])]
    futures.append(client.sample(sampler, 3, n=1))
    assert "token id outside" in client.fetch(futures[1])["error"]
    for future, length in ((futures[0], 1), (futures[2], 3), (futures[3], 2)):
        response = client.fetch(future, SampleResponse)
        assert np.frombuffer(response.sequences[0].tokens, np.int32)[0] == length
    assert session.calls[-1] == "sample 1 x 1"


def test_log_probs_of_a_prompt_need_the_published_weights(server):
    client = Client(server[0])
    client.begin()
    sampler = client.sampler()
    response = client.fetch(client.sample(sampler, prompt_logprobs=True), SampleResponse)
    np.testing.assert_array_equal(np.frombuffer(response.prompt_logprobs, np.float32), [np.nan, -1])
    client.train()
    client.step()
    assert "newer" in client.fetch(client.sample(sampler, 1, prompt_logprobs=True))["error"]


def test_a_sampler_of_older_weights_is_refused_and_one_in_flight_goes_on(server):
    client = Client(server[0])
    client.begin()
    samplers = [client.sampler(), client.sampler("inflight", 1)]
    client.train()
    client.step()
    named = client.ask("/save_weights_for_sampler", path="final")["path"]
    assert "create a sampling client of them" in client.fetch(client.sample(samplers[0]))["error"]
    assert client.fetch(client.sample(samplers[1]), SampleResponse).sequences
    later = client.post(
        "/create_sampling_session", session_id=client.session, sampling_session_seq_id=2, model_path=named
    )
    assert client.fetch(client.sample(later["sampling_session_id"]), SampleResponse).sequences


def test_the_model_goes_from_one_client_to_the_next(tmp_path):
    """A lost client leaves its last saved state, and the one after it waits until then."""
    now = [0.0]
    with serving(tmp_path, clock=lambda: now[0]) as (address, session):
        first, second, third = Client(address), Client(address), Client(address)
        first.begin()
        for name in ("one", "two"):
            first.train()
            first.step()
            saved = first.ask("/save_weights", path=name)["path"]
        assert "exists already" in first.ask("/save_weights", path="two")["error"]
        first.train()
        first.step()
        first.train()
        assert (session.weights, session.gradients) == (3, 1)
        now[0] = 50.0
        second.session = second.post("/create_session")["session_id"]
        waiting = second.post(
            "/load_weights", session_id=second.session, model_seq_id=0, path=saved, optimizer=True
        )
        now[0] = 61.0
        second.model, second.number = waiting["model_id"], 0
        assert second.fetch(waiting)["path"] == saved == f"tinker://{first.model}/weights/two"
        assert (session.weights, session.gradients, session.step) == (2, 0, 2)
        assert "was lost" in first.post("/optim_step", 410, model_id=first.model, seq_id=9)
        assert first.post("/session_heartbeat", 410, session_id=first.session)
        second.train()
        second.step()
        assert session.weights == 3
        second.http.post(f"/sessions/{second.session}/finish", json={"reason": {"type": "success"}})
        # The model returns even if no client asks for it.
        wait_until(lambda: session.weights == 2, "the unsaved step is still there", 5)
        third.begin()
        assert session.weights == 0
    restarted = StandIn(tmp_path)
    Tenant(restarted)
    assert restarted.calls == ["load"]
    assert (tmp_path / "tinker" / first.model / "weights" / "one" / "weights").read_text() == "1 1"


def test_the_base_model_is_sampled_after_an_earlier_client(server):
    """The loss of unsaved steps brings back the weights of the base model, with another version."""
    address, session = server
    first, second = Client(address), Client(address)
    first.begin()
    first.train()
    first.step()
    first.sampler()
    first.http.post(f"/sessions/{first.session}/finish", json={})
    wait_until(lambda: session.weights == 0, "the unsaved step is still there", 5)
    second.begin()
    asked = {"session_id": second.session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = second.post("/create_sampling_session", **asked)["sampling_session_id"]
    assert second.fetch(second.sample(sampler), SampleResponse).sequences


def test_a_saved_state_is_loaded_with_a_new_optimizer_and_deleted(server):
    address, session = server
    first, second = Client(address), Client(address)
    first.begin()
    first.train()
    first.step()
    path = first.ask("/save_weights", path="one")["path"]
    kept = first.ask("/save_weights", path="two")["path"]
    first.http.post(f"/sessions/{first.session}/finish", json={"reason": {"type": "success"}})
    second.session = second.post("/create_session")["session_id"]
    asked = {"session_id": second.session, "model_seq_id": 0, "optimizer": False}
    assert second.fetch(second.post("/load_weights", path=path, **asked))["path"] == path
    assert (session.calls[-1], session.weights) == ("load weights", 1)
    deleted = [one.removeprefix("tinker://").replace("/", "/checkpoints/", 1) for one in (kept, path)]
    assert second.http.delete(f"/training_runs/{deleted[0]}").status_code == 204
    assert "newest state" in second.http.delete(f"/training_runs/{deleted[1]}").text
    assert second.http.delete(f"/training_runs/{deleted[0]}").status_code == 404


def test_a_client_that_goes_away_while_it_waits_ends_nothing(server):
    address, _ = server
    client = Client(address)
    client.begin()
    late = client.post("/optim_step", model_id=client.model, seq_id=2, adam_params={})
    with pytest.raises(httpx.ReadTimeout):
        client.http.post("/retrieve_future", json={"request_id": late["request_id"]}, timeout=0.3)
    client.train()
    assert client.fetch(late)["metrics"]


def test_a_first_request_that_fails_frees_the_model(server):
    client = Client(server[0])
    session = client.post("/create_session")["session_id"]
    for path, says in (
        ("tinker://other/weights/none", "no saved state"),
        ("tinker://../weights/..", "is not of the form"),
    ):
        session = client.post("/create_session")["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        assert says in client.fetch(client.post("/load_weights", **asked))["error"]
    assert client.begin()["model_id"]
    assert "has the model already" in client.begin(client.session, number=1)["error"]


def test_the_server_stays_small():
    """It has at most 900 lines of code: blank lines, comments and docstrings do not count."""
    count = 0
    for path in Path("grpo_megatron/serve").glob("*.py"):
        tree = ast.parse(path.read_text())
        bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
        texts = [one for body in bodies for one in body if _is_text(one)]
        without = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
        lines = enumerate(path.read_text().splitlines(), 1)
        count += sum(number not in without and line.strip()[:1] not in ("", "#") for number, line in lines)
    assert 600 < count <= 900


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
