"""A client of `grpo-megatron serve` with the SDK `tinker`. Raises AssertionError if the server is wrong.

python tests/integration/tinker_client.py FOLDER_OF_THE_MODEL NAME_OF_THE_MODEL
"""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
SIXTEEN = types.SamplingParams(max_tokens=8, temperature=1.0)


def fresh_logprobs(model, tokens: list[int]) -> np.ndarray:
    """Return the log-probs of tokens after the first as transformers computes them."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def datum(prompt: list[int], sequence, advantage: float, padded: int = 0) -> types.Datum:
    """Return a sampled sequence as the cookbook's loop does, whose targets within the prompt are `padded`."""
    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": [padded] * before + sequence.tokens,
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def sampled(sampler, prompts) -> list[tuple[list[int], types.SampledSequence]]:
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 3, SIXTEEN) for prompt in prompts]
    pairs = zip(prompts, futures, strict=True)
    return [(prompt, one) for prompt, future in pairs for one in future.result().sequences]


def must_be_near(found, expected, tolerance=TOLERANCE) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.abs(found - expected).max() < tolerance, np.abs(found - expected).max()


def must_be_of(samples, output: types.ForwardBackwardOutput) -> None:
    """Check that the log-probs of a result are those with which the samples were sampled."""
    for (_, one), outputs in zip(samples, output.loss_fn_outputs, strict=True):
        must_be_near(outputs["logprobs"].tolist()[-len(one.tokens) :], one.logprobs)


def step(client: tinker.TrainingClient, lr: float = 0.0, clip: float = 0.0) -> float:
    """Take an optimizer step, and return the gradient norm. With lr=0, no weight changes."""
    params = types.AdamParams(learning_rate=lr, grad_clip_norm=clip)
    metrics = client.optim_step(params).result().metrics
    assert metrics["optim/dropped"] == 0
    return metrics["optim/grad_norm"]


def with_mask(one: types.Datum) -> types.Datum:
    """Return a datum with the mask that the loss gspo needs: the tokens that were sampled."""
    mask = [float(value != 0) for value in one.loss_fn_inputs["advantages"].data]
    return replace(one, loss_fn_inputs=one.loss_fn_inputs | {"sequence_ratio_mask": mask})


def check_losses(client: tinker.TrainingClient, samples, data: list[types.Datum]) -> None:
    """Compare losses with their definitions. At the weights that sampled, every ratio is 1."""
    total = sum((-1) ** i * 0.5 * len(one.tokens) for i, (_, one) in enumerate(samples))
    scored = sum((-1) ** i * 0.5 * sum(one.logprobs) for i, (_, one) in enumerate(samples))
    values = {"importance_sampling": -total, "ppo": -total, "gspo": -total, "cispo": -scored}
    for loss, expected in values.items():
        given = [with_mask(one) for one in data] if loss == "gspo" else data
        for output in (client.forward(given, loss).result(), client.forward_backward(given, loss).result()):
            assert math.isclose(output.metrics["loss:sum"], expected, rel_tol=1e-3, abs_tol=1e-3)
            must_be_of(samples, output)
    # The gradients of the four are the same. Without a limit, the norm is that of their sum.
    norm = step(client)
    client.forward_backward(data, "importance_sampling")
    alone = step(client)
    assert math.isclose(norm, 4 * alone, rel_tol=1e-3)
    assert alone > 0


def check_dro(client: tinker.TrainingClient, tokens: list[int]) -> None:
    """Compare the loss dro with its definition, where the log-probs of the sampler were half as large."""
    read, targets = types.ModelInput.from_ints(tokens[:-1]), tokens[1:]
    whole = types.Datum(model_input=read, loss_fn_inputs={"target_tokens": targets})
    logp = np.array(client.forward([whole], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist())
    given = {"target_tokens": targets, "logprobs": (logp / 2).tolist(), "advantages": [0.5] * len(targets)}
    one = types.Datum(model_input=read, loss_fn_inputs=given)
    loss = client.forward_backward([one], "dro", {"beta": 0.2}).result().metrics["loss:sum"]
    assert math.isclose(loss, -(0.5 * logp - 0.1 * (logp / 2) ** 2).sum(), rel_tol=1e-4)
    assert step(client) > 0


def check_refusals(client: tinker.TrainingClient) -> None:
    """Ask for what the server does not have. Later requests are answered all the same."""
    with pytest.raises(tinker.RequestFailedError, match="learning_rate: Input should be greater"):
        client.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    with pytest.raises(tinker.RequestFailedError, match="does not encrypt"):
        client.save_weights_external("export", age_encryption_recipients=["age1x"]).result()
    with pytest.raises(tinker.NotFoundError, match="does not support GET /api/v1/training_runs"):
        tinker.RestClient().list_training_runs().result()
    assert client.save_weights_external("export").result().path.endswith("/external_weights/export")


def check_step(client: tinker.TrainingClient, base, sampler, samples, data: list[types.Datum]) -> None:
    """Train on the samples, and compare what sampling clients of the old and the new weights give."""
    client.forward_backward(data, "importance_sampling")
    step(client, lr=0.01)
    after = client.forward(data, "importance_sampling").result()
    gains = [
        (-1) ** i * (sum(outputs["logprobs"].tolist()[-len(one.tokens) :]) - sum(one.logprobs))
        for i, ((_, one), outputs) in enumerate(zip(samples, after.loss_fn_outputs, strict=True))
    ]
    assert sum(gains) > 0.1, gains
    prompts = [prompt for prompt, _ in samples[::3]]
    prompt, one = sampled(sampler, prompts)[0]  # the engines still have the weights that were published
    must_be_near(one.logprobs, fresh_logprobs(base, prompt + one.tokens)[len(prompt) - 1 :])
    newer = client.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="create a sampling client of them"):
        sampled(sampler, prompts[:1])
    new = sampled(newer, prompts)
    again = [datum(prompt, one, 1.0) for prompt, one in new]
    must_be_of(new, client.forward(again, "importance_sampling").result())


def check_own_loss(client: tinker.TrainingClient, tokens: list[int]) -> None:
    """Compare a function as the loss, which the SDK turns into weights, with the same loss by its name."""
    read, targets = types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}
    whole = [types.Datum(model_input=read, loss_fn_inputs=targets)]
    own = client.forward_backward_custom(whole, lambda data, logprobs: (-logprobs[0].sum(), {})).result()
    norm = step(client)
    entropy = client.forward_backward(whole, "cross_entropy").result()
    assert math.isclose(own.metrics["loss:sum"], entropy.metrics["loss:sum"], rel_tol=1e-4)
    assert math.isclose(norm, step(client, clip=0.1), rel_tol=1e-3)


def main(folder: str, name: str) -> None:
    service = tinker.ServiceClient()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    client = service.create_lora_training_client(base_model=name, rank=32).result()
    assert client.get_info().model_data.model_name == name
    sampler = client.save_weights_and_get_sampling_client().result()
    samples = sampled(sampler, [[7 + i, 8, 9 + i] for i in range(4)])
    for prompt, one in samples:
        must_be_near(one.logprobs, fresh_logprobs(base, prompt + one.tokens)[len(prompt) - 1 :])
    tokens = samples[0][0] + samples[0][1].tokens
    found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert found[0] is None
    must_be_near(found[1:], fresh_logprobs(base, tokens))
    saved = client.save_state("start").result().path
    data = [datum(prompt, one, advantage=(-1) ** i * 0.5) for i, (prompt, one) in enumerate(samples)]
    check_refusals(client)
    check_losses(client, samples, data)
    check_dro(client, tokens)
    check_step(client, base, sampler, samples, data)
    check_own_loss(client, tokens)
    service.close("success").result()
    # The saved state, in a client of its own.
    service = tinker.ServiceClient()
    client = service.create_training_client_from_state_with_optimizer(saved).result()
    must_be_of(samples, client.forward(data, "importance_sampling").result())
    service.close("success").result()
    print("all is as it must be")


if __name__ == "__main__":
    main(*sys.argv[1:])
