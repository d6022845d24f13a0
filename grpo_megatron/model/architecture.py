"""What a model is: the dimensions that its config.json states, and what follows from them."""

import math
from dataclasses import dataclass

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.schedule import CostModel


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class MoE:
    """Experts of the layers that have them; the router takes the top_k of a softmax.

    ffn_hidden_size: of one expert. normalize: the chosen weights are scaled to sum to 1.
    layers: True for layers with experts, False for those with a dense MLP.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    normalize: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer. Sizes in elements, theta in radians per position.

    max_positions: the longest sequence the model is defined for here; where config.json sets a
    sliding window, that window, within which the window makes no difference.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    tied_embeddings: bool
    dtype: torch.dtype
    moe: MoE | None = None

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding on the Megatron side: every TP rank holds equally many."""
        return padded_to(self.vocab_size, tp)

    def rope_frequencies(self) -> torch.Tensor:
        """Inverse frequencies of the rotary embedding, float32 [head_dim / 2] (arXiv:2104.09864).

        With `rope_scaling` as in Llama 3.1: wavelengths beyond original / low are divided by the
        factor, those below original / high are kept, and between them the two are interpolated.
        """
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        wavelength = 2 * math.pi / frequencies
        share = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        share = share.clamp(0.0, 1.0)
        return (1 - share) * frequencies / scaling.factor + share * frequencies

    @property
    def cost_model(self) -> CostModel:
        """FLOPs of a forward pass, two per multiply-add; a backward pass costs the same in proportion.

        Per token: the projections of attention, the MLP (router and top_k experts in layers that have them) and the
        vocabulary head (a quarter of the weights of a 0.5B model). Norms, rotary embedding and softmax are left out.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        weights = self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size
        if self.moe is not None:
            experts = self.hidden_size * (self.moe.num_experts + 3 * self.moe.top_k * self.moe.ffn_hidden_size)
            weights += sum(self.moe.layers) * (experts - mlp)
        # A pair: the product of query and key, and the key's value times its probability.
        return CostModel(per_token=2.0 * weights, per_pair=4.0 * self.num_layers * self.num_heads * self.head_dim)
