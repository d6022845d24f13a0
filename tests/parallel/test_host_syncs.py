"""The host does not wait for the device once per micro-batch."""

from dataclasses import replace

import pytest

from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.config.algorithm import MismatchConfig, MismatchCorrection, MismatchRejection
from grpo_megatron.config.schema import RefConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.host_syncs import difference
from tests.models import tiny_model
from tests.parallel import syncs
from tests.parallel.test_invariance import FULL_KL, OPTIMIZER, TOKEN, make_batch

CORRECTION = Correction.from_config(
    MismatchConfig(correction=MismatchCorrection.seq_tis, rejection=MismatchRejection.seq_max_k2)
)
LOSSES = {
    "token": TOKEN,
    "sequence": replace(
        TOKEN,
        algorithm=replace(TOKEN.algorithm, ratio_level="sequence", clip_ratio_c=3.0),
        correction=CORRECTION,
    ),
    "full kl": FULL_KL,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


# On TransformerEngine's layers `make test` has it in tests/gpu.
@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "sizes", [ParallelSizes(), ParallelSizes(tp=2, sequence_parallel=True)], ids=["one", "tp2sp"]
)
def test_no_micro_batch_makes_the_host_wait(ranks, model, sizes, loss):
    batch = make_batch(0)
    config = actor_config(
        model,
        sizes,
        OPTIMIZER,
        with_reference=LOSSES[loss].needs_full_kl,
        ref=RefConfig(hidden_gib=1e4 / 2**30),
    )
    one, three = (ranks.run(syncs.of_passes, sizes, config, batch, count, LOSSES[loss]) for count in (1, 3))
    for fewer, more in zip(one, three, strict=True):
        assert {name: difference(fewer[name], more[name]) for name in more} == {name: [] for name in more}
    # The values are read once, and counted.
    assert len([text for text in three[0]["log-probs"] if "Tensor.cpu" in text]) == 1
    assert len([text for text in three[0]["training"] if "Tensor.cpu" in text]) == 1
