"""Which passes the reference's log-probs come from, with ranks that answer at once, late, or in the order of their choice."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from grpo_megatron.batch import CostModel, Sample, TrainBatch
from grpo_megatron.config.load import load_config
from grpo_megatron.mini_batch import MiniBatch, partition
from grpo_megatron.reference import Reference

CAP = 64


@dataclass
class Ranks:
    """Stands for ActorGroup. The log-prob of a target is a number that tells token, target and sequence apart."""

    slow: int = 0  # how many questions it takes until a pass is ready
    cost_model: CostModel = CostModel(1.0, 0.0)
    ahead: list[int] = field(default_factory=list)  # tokens of each pass
    after: list[int] = field(default_factory=list)
    in_flight: int = 0

    @staticmethod
    def value(batch: TrainBatch) -> np.ndarray:
        return -(batch.tokens + 100.0 * batch.target + 1e4 * batch.trajectory_id[batch.sequence_id]).astype(np.float32)

    def logprobs(self, batch, plan, reference, key=None, keep_hidden=False):
        assert reference
        assert sorted(np.concatenate([plan.sequences(dp) for dp in range(len(plan.micro_batches))])) == list(
            range(batch.num_sequences)
        )
        self.after.append(batch.num_tokens)
        return self.value(batch)

    def start_logprobs(self, batch, plan, reference):
        assert reference
        assert not self.in_flight
        assert all(rank and all(rank) for rank in plan.micro_batches)
        self.ahead.append(batch.num_tokens)
        self.in_flight, questions, ranks = 1, itertools.count(), self

        class Pending:
            def ready(self):
                return next(questions) >= ranks.slow

            def result(self):
                ranks.in_flight = 0
                return ranks.value(batch)

        return Pending()


def config(*changes: str):
    return load_config(
        None,
        [
            "model.path=m",
            "data.train=d.jsonl",
            "algorithm.use_kl_loss=true",
            "ref.ahead=true",
            "data.train_batch_size=16",
            "rollout.n=2",
            "train.ppo_mini_batch_size=8",
            "data.max_prompt_length=16",
            "rollout.max_response_length=48",
            f"train.max_tokens_per_micro_batch={CAP}",
            *changes,
        ],
    )


def samples(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt, response = rng.integers(1, 9), rng.integers(1, 30)
        made.append(
            Sample(
                group_id=i,
                trajectory_id=i,
                prompt_ids=rng.integers(0, 50, prompt).astype(np.int32),
                response_ids=rng.integers(0, 50, response).astype(np.int32),
                loss_mask=np.ones(response, dtype=np.bool_),
                rollout_logprobs=np.zeros(response, dtype=np.float32),
                finish_reason="stop",
            )
        )
    return made


@pytest.mark.parametrize("slow", [0, 3, 1000])
@pytest.mark.parametrize(
    "changes",
    [(), ("megatron.data_parallel=2",), ("megatron.data_parallel=4", "train.packing=false")],
    ids=["dp1", "dp2", "dp4_unpacked"],
)
def test_every_target_gets_its_own_log_prob(changes, slow):
    """Samples finish in another order than they are trained in; one mini-batch after the other."""
    configured, ranks, made = config(*changes), Ranks(slow), samples(16)
    reference = Reference(configured, ranks, keep_hidden=False)
    for step in (1, 2):
        finished = reference.start_step()
        for i in np.random.default_rng(step).permutation(16):
            finished(made[i])
        for number, part in enumerate((made[:8], made[8:])):
            batch = TrainBatch.from_samples(part)
            mini = MiniBatch(batch, partition(configured, batch.lengths, ranks.cost_model), (step, number))
            reference.fill(mini)
            np.testing.assert_array_equal(batch.ref_logp, Ranks.value(batch))
    share = reference.metrics()["ref/ahead_share"].result()
    assert 0 < share <= 1
    assert not ranks.in_flight
    assert ranks.ahead
    if slow == 1000:  # never ready before the end: one pass ahead in each step
        assert len(ranks.ahead) == 2
        assert share < 0.6


def test_without_it_all_is_computed_afterwards():
    configured, ranks = config("ref.ahead=false"), Ranks()
    reference = Reference(configured, ranks, keep_hidden=False)
    assert reference.start_step() is None
    batch = TrainBatch.from_samples(samples(8))
    reference.fill(MiniBatch(batch, partition(configured, batch.lengths, ranks.cost_model), (1, 0)))
    np.testing.assert_array_equal(batch.ref_logp, Ranks.value(batch))
    assert ranks.after == [batch.num_tokens]
    assert not ranks.ahead
    assert reference.metrics() == {}


def test_no_pass_where_no_kl_needs_one():
    configured, ranks = config("ref.ahead=false", "algorithm.use_kl_loss=false"), Ranks()
    batch = TrainBatch.from_samples(samples(8))
    Reference(configured, ranks, keep_hidden=False).fill(
        MiniBatch(batch, partition(configured, batch.lengths, ranks.cost_model), (1, 0))
    )
    assert not ranks.after
    assert not batch.ref_logp.any()
