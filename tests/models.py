"""Tiny random HF checkpoints and batches, made by the tests that use them."""

import numpy as np
import torch

from grpo_megatron.batch import Sample, TrainBatch


def tiny_qwen3(folder, vocab_size=61, tied=False, seed=0, dtype=torch.float32, **changes):
    """A random Qwen3 checkpoint: head_dim differs from hidden/heads, weights large enough to matter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones at first, which hides a norm that is not loaded
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def random_samples(count=12, vocab_size=61, seed=0, group_size=4, longest=40) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = rng.integers(1, longest // 2, size=2)
        mask = rng.random(response) < 0.9
        mask[0] = True
        samples.append(
            Sample(
                group_id=i // group_size,
                trajectory_id=i,
                prompt_ids=rng.integers(3, vocab_size, prompt).astype(np.int32),
                response_ids=rng.integers(3, vocab_size, response).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=-rng.random(response).astype(np.float32) * 4,
                finish_reason="stop",
                reward=float(rng.integers(0, 2)),
            )
        )
    return samples


def random_batch(**kwargs) -> TrainBatch:
    return TrainBatch.from_samples(random_samples(**kwargs))


@torch.no_grad()
def transformers_logprobs(model, batch: TrainBatch, temperature: float = 1.0) -> np.ndarray:
    """float32 [T], one sequence at a time."""
    out = np.zeros(batch.num_tokens, np.float32)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0] / temperature
        logp = torch.log_softmax(logits.double(), -1)
        out[start:end] = logp.gather(1, torch.from_numpy(batch.target[start:end]).long()[:, None])[:, 0]
    return out
