"""Functions that test_features.py runs on each rank."""

from contextlib import contextmanager

import numpy as np
import torch

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron import micro_batch
from grpo_megatron.megatron.actor import Actor
from tests.parallel import syncs
from tests.parallel.actors import micro_batches
from tests.te.training import FirstStep, first_step


def calls_of(config: Config, batch: TrainBatch, loss) -> tuple[FirstStep, dict[str, int]]:
    """Return the first step, and how often each emulated kernel was called."""
    import transformer_engine_torch

    transformer_engine_torch.calls.update(dict.fromkeys(transformer_engine_torch.calls, 0))
    return first_step(config, batch, loss, None), dict(transformer_engine_torch.calls)


@contextmanager
def real_lengths():
    """Plant a fault: attention is told where sequences end, and leaves out the rows behind them."""
    describe = micro_batch.describe_pack

    def faulty(pack, device, own_attention=True):
        packed = describe(pack, device, own_attention=own_attention)
        packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.from_numpy(pack.cu_seqlens)
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = torch.from_numpy(pack.cu_seqlens_padded)
        return packed

    micro_batch.describe_pack = faulty
    try:
        yield
    finally:
        micro_batch.describe_pack = describe


def first_step_with_real_lengths(
    config: Config, batch: TrainBatch, loss, padding_statistics: float
) -> FirstStep:
    with real_lengths():
        return first_step(config, batch, loss, None, padding_statistics)


def syncs_with_real_lengths(config: Config, batch: TrainBatch, count: int, loss) -> dict[str, list[str]]:
    with real_lengths():
        return syncs.of_passes(config, batch, count, loss)


def train_sleep_and_refer(config: Config, batch: TrainBatch, loss) -> list[dict]:
    """Check that training leaves the reference unchanged, and that making room and sleeping change no value.

    Returns the memory before both and after each.
    """
    from transformer_engine.pytorch.module import base

    actor = Actor(config)
    _, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True, max_tokens=256)

    def logprobs(reference: bool = False) -> np.ndarray:
        if not reference:
            return actor.passes.logprobs(parts)
        with actor.passes.reference():
            return actor.passes.logprobs(parts, reference=True)

    start, reports = logprobs(), []
    for _ in range(2):
        actor.passes.train_step(parts, loss, batch.num_tokens, current_is_old=True)
        policy = logprobs()
        assert np.array_equal(logprobs(reference=True), start), "training moved the reference"
        assert np.array_equal(logprobs(), policy), "the exchange changed the policy"
        assert not np.array_equal(policy, start), "nothing was trained"
        report = {"full": actor.model.memory.resident()}
        assert base._dummy_wgrads
        actor.memory.make_room()
        assert not base._dummy_wgrads, "what the backward pass left stays on the device in rollouts"
        report["roomy"] = actor.model.memory.resident()
        assert np.array_equal(logprobs(), policy), "making room changed the policy"
        reports.append(report | actor.memory.sleep())
        actor.memory.wake()
        assert np.array_equal(logprobs(), policy), "sleeping changed the policy"
    return reports
