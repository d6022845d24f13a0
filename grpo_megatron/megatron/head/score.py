"""Head of a reward model: the score of a sequence is w . (hidden state of its last token), with w [1, h].

As in transformers' *ForSequenceClassification, the hidden state is taken after the final norm.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from grpo_megatron.batch.layout import on_device
from grpo_megatron.megatron.micro_batch import MicroBatch
from grpo_megatron.megatron.state.hf_weights import load_hf
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.families.blocks import SCALAR_HEAD
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint


class ScoreOutput(MegatronModule):
    """Output layer of a reward model, which returns its input, the hidden states [t, 1, h], unchanged.

    The layer holds the weight w [1, h] with which ScoreHead computes scores. Every TP rank holds all of w.
    """

    def __init__(self, config):
        super().__init__(config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_, None


def put_scalar_head(model) -> None:
    """Turn a GPTModel into a reward model in place. Call this before weights are loaded.

    A ScoreOutput replaces the output projection, so the model returns hidden states [1, t, h].
    """
    model.output_layer = ScoreOutput(model.config)


def load_reward_model(chunks, folder: str, entries: dict[str, Entry], seed: int) -> None:
    """Fill the parameters of a reward model from an HF checkpoint.

    folder: checkpoint of a reward model or of a language model. A language model has no score head, so the
        reward model's score head then gets random values.
    entries: weight map of the reward model: {Megatron parameter name: description of its HF tensors}.
    seed: seed of the random values.

    Raises UserError if the checkpoint's names, shapes or types of tensors differ from the weight map.
    """
    has_head = read_architecture(folder).scalar_head
    load_hf(chunks, HFCheckpoint(folder), entries, left_out=() if has_head else (SCALAR_HEAD,))
    if not has_head and chunks[-1].post_process:
        _initialise(chunks[-1].output_layer.weight, seed)


@torch.no_grad()
def _initialise(weight: torch.Tensor, seed: int) -> None:
    """Fill `weight` [1, h] with random values of mean 0 and variance 1 / (h + 1) (arXiv:2009.01325).

    The distribution is normal. The values are the same in every parallel layout.
    """
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(values / (weight.shape[1] + 1) ** 0.5)


@dataclass(frozen=True)
class ScoreHead:
    """Head of a reward model: computes the score of each sequence from its last token's hidden state.

    weight: function that returns the head's weight w, [1, h].
    sequence_parallel: True if hidden states are split over the TP ranks.
    """

    weight: Callable[[], torch.Tensor]
    sequence_parallel: bool

    def __call__(self, hidden: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the scores of the micro-batch's S sequences, float32 [S], equal on every TP and CP rank.

        hidden: last hidden states [1, t, h]; with sequence parallelism [1, t / tp, h].

        A score's gradient flows into w and into the hidden state of the sequence's last token, only on the CP
        rank that holds this token. Training sums gradients over CP ranks, so the total gradient is exact.
        """
        pack = micro_batch.pack
        rows, sequences = pack.last_tokens(mpu.get_tensor_model_parallel_rank())
        own = (
            on_device(torch.from_numpy(rows), hidden.device),
            on_device(torch.from_numpy(sequences), hidden.device),
        )
        last = hidden.new_zeros(pack.num_sequences, hidden.shape[-1]).index_copy(
            0, own[1], hidden[0].index_select(0, own[0])
        )
        if self.sequence_parallel:
            # Every TP rank now has the same last states, so also the same gradient of w: no sum over TP.
            last = tensor_parallel.reduce_from_tensor_model_parallel_region(last)
        scores = (last.float() * self.weight().float()).sum(1)
        return pack.sum_over_context(scores, mpu.get_context_parallel_group()) + (scores - scores.detach())
