"""What a model is: the dimensions that its config.json states, and what follows from them."""

import math
from dataclasses import dataclass, replace

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.schedule import CostModel

# Of the norms of latents (see Latent): the models' own code does not take rms_norm_eps there.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Yarn:
    """YaRN's frequency scaling (arXiv:2309.00071), with the two factors that DeepSeek adds to it.

    Frequencies that turn more than `beta_fast` times within the original positions are kept, those below `beta_slow` turns
    are divided by `factor`. cos_factor: of cosines and sines. softmax_factor: of the scores.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    cos_factor: float = 1.0
    softmax_factor: float = 1.0

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """frequencies: float32 [d / 2], unscaled."""
        d = 2 * len(frequencies)

        def channel(turns: float) -> float:
            return d * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = (
            max(math.floor(channel(self.beta_fast)), 0),
            min(math.ceil(channel(self.beta_slow)), d - 1),
        )
        ramp = (torch.arange(d // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        ramp = ramp.clamp(0.0, 1.0)
        return ramp * frequencies / self.factor + (1 - ramp) * frequencies


@dataclass(frozen=True)
class MoE:
    """Experts of the layers that have them; the router takes the top_k of its scores.

    ffn_hidden_size: of one expert. normalize: the chosen weights are scaled to sum to 1.
    layers: True for layers with experts, False for those with a dense MLP.
    shared_ffn_hidden_size: of the experts that every token goes to, all of them together, 0: there are none.
    sigmoid: the scores are sigmoids of the logits, else their softmax. correction_bias: the choice, but not the weights, is
    made by scores plus a bias of each expert. groups, top_groups: only experts of the best groups are chosen, a
    group counted by the sum of its two best; None: of all. weight_factor: the weights are multiplied by it.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    normalize: bool
    layers: tuple[bool, ...]
    shared_ffn_hidden_size: int = 0
    sigmoid: bool = False
    correction_bias: bool = False
    groups: int | None = None
    top_groups: int | None = None
    weight_factor: float = 1.0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434): queries, keys and values are projected up from latents.

    query_rank: of the queries' latent, None: they have none. kv_rank: of that of keys and values. plain_dim, rotated_dim:
    channels of a query's or key's head without and with position; the latter are one key for all heads. value_dim: of a
    value's head. interleaved: the two channels of a rotation stand side by side, else half a head apart.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    interleaved: bool = True


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer. Sizes in elements, theta in radians per position.

    max_positions: the longest sequence the model is defined for here; where config.json sets a
    sliding window, that window, within which the window makes no difference. head_dim: of a query's and key's head.
    rotary_share: of its channels, the first ones, are rotated; with latent attention, see Latent instead.
    prediction_layers: that many further layers of the checkpoint predict tokens beyond the next one; they are left out.
    scalar_head: it is a reward model, with one row [1, hidden_size] in place of the output projection.
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
    rope_scaling: RopeScaling | Yarn | None
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    tied_embeddings: bool
    dtype: torch.dtype
    moe: MoE | None = None
    latent: Latent | None = None
    rotary_share: float = 1.0
    prediction_layers: int = 0
    scalar_head: bool = False

    def as_reward_model(self) -> "Architecture":
        """The same decoder with a scalar head, which is never tied to the embedding."""
        return replace(self, scalar_head=True, tied_embeddings=False)

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding on the Megatron side: every TP rank holds equally many."""
        return padded_to(self.vocab_size, tp)

    def rope_frequencies(self) -> torch.Tensor:
        """Inverse frequencies of the rotary embedding, float32 [rotated channels / 2] (arXiv:2104.09864).

        With `rope_scaling` as in Llama 3.1: wavelengths beyond original / low are divided by the
        factor, those below original / high are kept, and between them the two are interpolated.
        """
        rotated = self.latent.rotated_dim if self.latent else int(self.head_dim * self.rotary_share)
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        frequencies = 1.0 / (self.rope_theta**exponents)
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if isinstance(scaling, Yarn):
            return scaling.scaled(frequencies, self.rope_theta)
        wavelength = 2 * math.pi / frequencies
        share = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        share = share.clamp(0.0, 1.0)
        return (1 - share) * frequencies / scaling.factor + share * frequencies

    @property
    def rope_factor(self) -> float:
        """What cosines and sines of the rotary embedding are multiplied by."""
        return self.rope_scaling.cos_factor if isinstance(self.rope_scaling, Yarn) else 1.0

    @property
    def softmax_factor(self) -> float:
        """What the scores of attention are multiplied by, besides 1 / sqrt(head_dim)."""
        return self.rope_scaling.softmax_factor if isinstance(self.rope_scaling, Yarn) else 1.0

    @property
    def num_outputs(self) -> int:
        """Rows of the output projection."""
        return 1 if self.scalar_head else self.vocab_size

    @property
    def cost_model(self) -> CostModel:
        """FLOPs of a forward pass, two per multiply-add; a backward pass costs the same in proportion.

        Per token: the projections of attention, the MLP (router, top_k and shared experts in layers that have them) and the
        vocabulary head (a quarter of the weights of a 0.5B model). Norms, rotary embedding and softmax are left out.
        """
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        weights = self.num_layers * (self._attention_weights() + mlp) + self.hidden_size * self.num_outputs
        if self.moe is not None:
            ffn = self.moe.top_k * self.moe.ffn_hidden_size + self.moe.shared_ffn_hidden_size
            weights += sum(self.moe.layers) * (self.hidden_size * (self.moe.num_experts + 3 * ffn) - mlp)
        # A pair: the product of query and key, and the key's value times its probability.
        pair = self.head_dim + (self.latent.value_dim if self.latent else self.head_dim)
        return CostModel(per_token=2.0 * weights, per_pair=2.0 * self.num_layers * self.num_heads * pair)

    def _attention_weights(self) -> int:
        """Elements of one layer's projections."""
        if self.latent is None:
            return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        latent, queries = self.latent, self.num_heads * self.head_dim
        down = latent.kv_rank + latent.rotated_dim + (latent.query_rank or 0)
        up = latent.kv_rank * self.num_heads * (latent.plain_dim + latent.value_dim)
        up += queries * (latent.query_rank or self.hidden_size)
        return self.hidden_size * (down + self.num_heads * latent.value_dim) + up
