"""Check after a weight sync: trainer and engines must compute the same log-probs for fixed token sequences.

The checksums of a weight sync show only that the bytes arrived. This check also finds an engine that uses the
bytes wrongly, for example because the weight map is wrong.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.config.engine import Quantization
from grpo_megatron.config.schema import Config, Precision
from grpo_megatron.sglang.arguments import engine_dtype
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.mini_batch import partition
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.weights.stored import read_stored

# Trainer and engine agree if their log-probs differ by at most this many times the effect of the trainer's
# own rounding. The engine's kernels sum in another order and round at other places, such as logits in bf16.
_TOLERANCE = 20
# If either side multiplies in FP8, its rounding outweighs these differences: sound engines were at 0.2 to 0.7
# times the effect of the trainer's own rounding.
_FP8_TOLERANCE = 2
TRAINER_DTYPES = {
    Precision.fp32: torch.float32,
    Precision.bf16: torch.bfloat16,
    Precision.fp8: torch.float8_e4m3fn,
}


def tolerance(dtype: torch.dtype) -> int:
    """Return the limit on the difference of trainer's and engine's log-probs, as a multiple of a unit.

    The unit is the mean absolute change of the trainer's log-probs when rounding errors of `dtype` are added
    to the output of every layer.

    dtype: the coarser one of the dtypes in which trainer and engines multiply matrices.
    """
    return _FP8_TOLERANCE if dtype == torch.float8_e4m3fn else _TOLERANCE


def served_dtype(config: Config) -> tuple[torch.dtype, str]:
    """Return the dtype of the engines' matrix products, and the configuration key that sets this dtype.

    The key, such as "rollout.engine.dtype", is for messages.
    """
    engine = config.rollout.engine
    if engine.quantization == Quantization.fp8:
        return torch.float8_e4m3fn, "rollout.engine.quantization"
    if read_stored(Path(config.model.path)).block:
        return torch.float8_e4m3fn, "model.path"
    return getattr(torch, engine_dtype(engine, config.model.path)), "rollout.engine.dtype"


class WeightProbe:
    """Compares the log-probs of trainer and engines after a weight sync, on fixed token sequences.

    Trainer and engines may share GPUs, so the comparison has two steps. Call `ask_trainer` while the trainer
    has the GPUs. Then call `ask_engines` when the engines serve again.
    """

    def __init__(
        self, trainer: PolicyTrainer, engines: EnginePool, sequences: list[np.ndarray], config: Config
    ):
        """Divide the probe sequences among the trainer's replicas, and choose the limit of the differences.

        sequences: token ids of each probe sequence, int [n] with n > 1. There must be enough sequences to
            divide them among the replicas (see mini_batch.enough).
        """
        self._trainer, self._engines = trainer, engines
        self._sequences = sequences
        lengths = np.array([len(sequence) for sequence in sequences])
        self._plan = partition(config, lengths, trainer.cost_model)
        # The coarser dtype of the engines' and the trainer's.
        self._dtype = max(
            served_dtype(config)[0],
            TRAINER_DTYPES[config.megatron.precision],
            key=lambda dtype: torch.finfo(dtype).eps,
        )
        self._tolerance = tolerance(self._dtype)

    def ask_trainer(self) -> None:
        """Compute the trainer's log-probs of the probe sequences, and the limit of the engines' deviation.

        Log-probs and limit are kept for the next call of `ask_engines`.
        """
        self._expected = self._logprobs(None)
        self._limit = self._tolerance * float(np.abs(self._logprobs(self._dtype) - self._expected).mean())

    def ask_engines(self) -> dict[str, float]:
        """Compare the log-probs of every engine with those that `ask_trainer` has computed.

        Returns {"probe_mean": mean absolute difference, in nats, of the worst engine, "probe_limit": limit of
        this difference}, or {} if no engine serves any more. Raises RuntimeError if an engine exceeds the
        limit or returns NaN. Raises UserError if the engines accept no requests.
        """
        expected, limit = self._expected, self._limit
        scored = self._engines.score_on_all([ids.tolist() for ids in self._sequences])
        found = {
            engine: float(np.abs(np.concatenate(scores) - expected).mean())
            for engine, scores in scored.items()
        }
        if not found:  # all engines have been lost since the sync
            return {}
        worst = max(found, key=lambda engine: (np.isnan(found[engine]), found[engine]))
        if not found[worst] <= limit:
            raise RuntimeError(
                f"after the weight sync, engine {worst} gives the probe prompts log-probs that differ from "
                f"the trainer's by {found[worst]:.3g} on average (limit {limit:.3g}, {self._tolerance} "
                "times the effect of the trainer's own rounding), although the checksums of all weights "
                "agree. Either a layer of the engine computes something different, or the weight map is "
                "wrong; run `grpo-megatron selftest` to find the cause"
            )
        return {"probe_mean": found[worst], "probe_limit": limit}

    def _logprobs(self, rounding: torch.dtype | None) -> np.ndarray:
        """Return the trainer's log-probs of all probe tokens at temperature 1, float32 [n].

        The n tokens are those of all probe sequences, one sequence after the other. The first token of each
        sequence is left out, because it has no log-prob.

        rounding: dtype whose rounding errors are simulated in every layer. None: nothing is simulated.
        """

        def make(part: Sequence[int]) -> TokenStream:
            return TokenStream.of([self._sequences[i] for i in part])

        return np.concatenate(
            [found[:-1, 0] for found in self._trainer.probe(self._plan, make, 1.0, rounding)]
        )
