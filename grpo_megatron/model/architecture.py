"""The architecture of a model: the dimensions in its config.json, and values computed from them."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.model.rope_scaling import Scaling, Yarn

# Epsilon of the RMS norms on latents (see Latent). The models' own code does not use rms_norm_eps there.
LATENT_NORM_EPS = 1e-6
# Factor in the sigmoid of gpt-oss's activation (see MoE.swiglu_limit). SGLang has this number built in.
SWIGLU_ALPHA = 1.702


@dataclass(frozen=True)
class MoE:
    """Settings of the router and of the experts in a model's mixture-of-experts layers.

    The router scores all experts for each token, and sends the token to the `top_k` best experts.
    """

    num_experts: int
    """Number of routed experts in a layer."""
    top_k: int
    """Number of routed experts for each token."""
    ffn_hidden_size: int
    """Intermediate size of one expert."""
    normalize: bool
    """True if the weights of the chosen experts are scaled to sum to 1."""
    layers: tuple[bool, ...]
    """One item per layer: True for a layer with experts, False for one with a dense MLP."""
    shared_ffn_hidden_size: int = 0
    """Intermediate size of all shared experts together; 0: no shared experts."""
    sigmoid: bool = False
    """True if scores are the sigmoid of the router's logits, False if they are the softmax."""
    correction_bias: bool = False
    """True if a bias per expert is added to the scores when experts are chosen. The bias does not change the
    weights with which the experts' outputs are summed."""
    groups: int | None = None
    """Number of groups into which the experts are divided; None: no groups."""
    top_groups: int | None = None
    """Number of groups from which a token's experts may come. A group is rated by the sum of its two best
    scores."""
    weight_factor: float = 1.0
    """Factor by which the weights of the chosen experts are multiplied."""
    shared_gate: bool = False
    """True if a gate, the sigmoid of one number per token, multiplies the output of the shared experts."""
    swiglu_limit: float | None = None
    """If set, the experts have gpt-oss's activation, and this is the limit of its inputs. None: they have
    SwiGLU."""

    @property
    def index_dtype(self) -> np.dtype:
        """The smallest integer dtype that holds an expert's index, and that torch can compute with."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)

    def routed(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Convert indices of layers among all layers to their indices among the layers with experts.

        layers: indices among all layers of the model. Layers without experts are left out of the result.
        """
        numbers = np.cumsum(self.layers) - 1
        return tuple(int(numbers[layer]) for layer in layers if self.layers[layer])


@dataclass(frozen=True)
class Latent:
    """Dimensions of multi-head latent attention (arXiv:2405.04434).

    Queries, keys and values are projected up from latents, which are smaller vectors.
    """

    query_rank: int | None
    """Size of the queries' latent; None: queries are projected directly, without a latent."""
    kv_rank: int
    """Size of the latent of keys and values."""
    plain_dim: int
    """Channels of a query or key head without rotary embedding."""
    rotated_dim: int
    """Channels of a query or key head with rotary embedding. All heads share this part of the key."""
    value_dim: int
    """Channels of a value head."""
    interleaved: bool = True
    """True if the two channels of a rotation are neighbours, False if they are rotated_dim / 2 apart."""


@dataclass(frozen=True)
class DeltaNet:
    """Dimensions of gated delta networks (arXiv:2412.06464), which replace attention in some of the layers.

    Queries, keys and values are convolved over the last tokens of their sequence. Each value head has a state
    of key_dim * value_dim numbers.
    """

    key_heads: int
    """Number of query heads, and of key heads."""
    value_heads: int
    """Number of value heads, a multiple of `key_heads`. Value heads next to each other share a key head."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    kernel: int
    """Number of tokens that the convolution sees."""
    layers: tuple[bool, ...]
    """One item per layer: True for a gated delta network, False for attention."""

    @property
    def key_rows(self) -> int:
        """Channels of all query heads together, and of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        """Channels of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def state_products(self) -> int:
        """Multiplications per token with the states of all heads, which are read twice and written once."""
        return 3 * self.value_rows * self.key_dim

    @property
    def attention_interval(self) -> int:
        """Number of layers up to and including the first one with attention.

        If every n-th layer has attention, this is n.
        """
        return (*self.layers, False).index(False) + 1


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer, as read from its config.json. Sizes are in elements."""

    family: str
    """Name of the model family, such as `qwen2`."""
    num_layers: int
    """Number of transformer layers. Layers for multi-token prediction are not counted, because they are not
    loaded."""
    hidden_size: int
    """Channels of the hidden states."""
    ffn_hidden_size: int
    """Intermediate size of a dense MLP."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key heads, and of value heads."""
    head_dim: int
    """Channels of a query or key head."""
    vocab_size: int
    """Number of rows of the embedding in the checkpoint."""
    max_positions: int
    """Context length: length of the longest supported sequence, in tokens."""
    rope_theta: float
    """Base of the rotary embedding's frequencies."""
    rope_scaling: Scaling
    """Scaling of the rotary embedding's frequencies; None: they are not scaled."""
    norm_eps: float
    """Epsilon of the RMS norms."""
    qk_norm: bool
    """True if queries and keys are normalised (RMS norm)."""
    qkv_bias: bool
    """True if the projections of queries, keys and values have a bias."""
    tied_embeddings: bool
    """True if the output projection uses the weight of the token embedding."""
    dtype: torch.dtype
    """Dtype of the weights in the checkpoint."""
    moe: MoE | None = None
    """Router and experts; None: every MLP is dense."""
    latent: Latent | None = None
    """Dimensions of latent attention; None: ordinary attention with grouped queries."""
    rotary_share: float = 1.0
    """Fraction of a head's channels that is rotated, from the first channel on. Not used with `latent`."""
    joint_qk_norm: bool = False
    """True if `qk_norm` normalises all heads of a token together, False if it normalises each head."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer's attention: a token sees itself and the window - 1 tokens before it.
    None: all tokens before it. Empty: no layer has a window."""
    delta: DeltaNet | None = None
    """Dimensions of gated delta networks; None: every layer has attention."""
    output_gate: bool = False
    """True if the attention's output is multiplied by the sigmoid of a gate, which has a channel for each
    channel of the queries and is projected together with them."""
    zero_centred_norms: bool = False
    """True if the RMS norms multiply by 1 + weight instead of by the weight."""
    engine_has_windows: bool = False
    """True if SGLang computes the sliding windows of this family."""
    local_rope_theta: float | None = None
    """Base of the rotary embedding in layers with a sliding window, where frequencies are not scaled; None:
    all layers have the same rotary embedding."""
    query_scalar: float | None = None
    """Number whose inverse root is the factor of the attention scores; None: `head_dim`."""
    output_norms: bool = False
    """True if the outputs of attention and MLP are normalised (RMS norm) before they are added to
    the residual stream."""
    gelu: bool = False
    """True if the MLPs have GELU, in its tanh approximation, in place of SiLU."""
    embedding_factor: float = 1.0
    """Factor by which the token embeddings are multiplied."""
    sinks: bool = False
    """True if each query head has a sink: a trained number that is one more score in the softmax over the
    attention scores, of a key without a value (arXiv:2309.17453)."""
    linear_bias: bool = False
    """True if the attention's output projection, the router and the experts have biases."""
    scalar_head: bool = False
    """True for a reward model: a score head [1, hidden_size] replaces the output projection."""

    def as_reward_model(self) -> "Architecture":
        """Return a copy for a reward model, whose head has one output instead of one per vocabulary entry.

        This head is never tied to the embedding.
        """
        return replace(self, scalar_head=True, tied_embeddings=False)

    @property
    def has_head_norms(self) -> bool:
        """True if queries and keys have a norm that normalises each head separately."""
        return self.qk_norm and not self.joint_qk_norm

    @property
    def needs_local_layers(self) -> bool:
        """True if Megatron's local layers must compute the model, because TransformerEngine's layers cannot.

        They have no gated delta networks, no norms of outputs, and no packed sequences with sinks.
        """
        return self.delta is not None or self.sinks or self.output_norms

    @property
    def num_recurrent(self) -> int:
        """Number of layers that are gated delta networks. All other layers have attention."""
        return sum(self.delta.layers) if self.delta else 0

    @property
    def longest_within_windows(self) -> int:
        """Length of the longest sequence in which no sliding window hides a token.

        Engines and TransformerEngine's layers compute no sliding windows, so they get no longer sequences.
        Models with `engine_has_windows`, which need local layers, are an exception.
        """
        if self.engine_has_windows:
            return self.max_positions
        return min([self.max_positions, *(window for window in self.windows if window)])

    def padded_vocab_size(self, tp: int) -> int:
        """Return the number of rows of Megatron's embedding: `vocab_size` rounded up to a multiple of `tp`.

        Each of the `tp` tensor-parallel ranks then has an equal share of the rows.
        """
        return padded_to(self.vocab_size, tp)

    def rope_frequencies(self, window: int | None = None) -> torch.Tensor:
        """Return the frequencies of RoPE (arXiv:2104.09864), float32 [rotated channels / 2].

        The frequencies are in radians per position, and already scaled as `rope_scaling` says.

        window: sliding window of the layer, which may have a rotary embedding of its own; None: it has none.
        """
        is_local = window is not None and self.local_rope_theta is not None
        theta, scaling = (self.local_rope_theta, None) if is_local else (self.rope_theta, self.rope_scaling)
        rotated = self.latent.rotated_dim if self.latent else int(self.head_dim * self.rotary_share)
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        frequencies = 1.0 / (theta**exponents)
        return frequencies if scaling is None else scaling.scaled(frequencies, theta)

    @property
    def rope_factor(self) -> float:
        """Factor by which the cosines and sines of the rotary embedding are multiplied."""
        scaling = self.rope_scaling
        if not isinstance(scaling, Yarn):
            return 1.0
        return scaling.derived_cos_factor if scaling.attention_factor is None else scaling.attention_factor

    @property
    def softmax_factor(self) -> float:
        """Factor by which the attention scores are multiplied, in addition to 1 / sqrt(head_dim)."""
        if self.query_scalar is not None:
            return math.sqrt(self.head_dim / self.query_scalar)
        return self.rope_scaling.score_factor if self.latent and isinstance(self.rope_scaling, Yarn) else 1.0

    @property
    def num_outputs(self) -> int:
        """Number of rows of the output projection: 1 for a reward model, otherwise the vocabulary size."""
        return 1 if self.scalar_head else self.vocab_size

    @property
    def cost_model(self) -> CostModel:
        """Compute cost of a forward pass, in FLOPs per token and per visible (query, key) pair.

        A multiply-add counts as two FLOPs. The scheduler balances micro-batches over ranks by this cost, and
        the planner computes times from it. A backward pass costs a multiple.

        The cost per token covers the attention projections, the MLP and the output projection. In layers with
        experts, the MLP is the router, top_k experts and the shared experts. The cost per pair covers the
        attention itself. A gated delta network has no pairs; its cost per token also covers the state, which
        is read twice and written once. Norms, rotary embedding, softmax and convolution are left out.
        """
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        attention = self.num_layers - self.num_recurrent
        windows = Counter(window for window in self.windows if window is not None)
        weights = self.num_layers * mlp + attention * self._attention_weights()
        weights += self.num_recurrent * self._delta_weights() + self.hidden_size * self.num_outputs
        if self.moe is not None:
            ffn = self.moe.top_k * self.moe.ffn_hidden_size + self.moe.shared_ffn_hidden_size
            router = self.moe.num_experts + self.moe.shared_gate
            weights += sum(self.moe.layers) * (self.hidden_size * (router + 3 * ffn) - mlp)
        # Each (query, key) pair costs their dot product, and the value times its probability.
        channels = self.head_dim + (self.latent.value_dim if self.latent else self.head_dim)
        pair = 2.0 * self.num_heads * channels
        return CostModel(
            per_token=2.0 * weights,
            per_pair=(attention - windows.total()) * pair,
            windows=tuple((window, layers * pair) for window, layers in windows.items()),
        )

    def _attention_weights(self) -> int:
        """Return the number of elements of the weights of one layer's attention projections."""
        if self.latent is None:
            heads = 2 * (self.num_heads + self.num_kv_heads) + self.output_gate * self.num_heads
            return self.hidden_size * self.head_dim * heads
        latent, queries = self.latent, self.num_heads * self.head_dim
        down = latent.kv_rank + latent.rotated_dim + (latent.query_rank or 0)
        up = latent.kv_rank * self.num_heads * (latent.plain_dim + latent.value_dim)
        up += queries * (latent.query_rank or self.hidden_size)
        return self.hidden_size * (down + self.num_heads * latent.value_dim) + up

    def _delta_weights(self) -> int:
        """Return the number of multiplications per token of one gated delta network, without convolution."""
        if self.delta is None:
            return 0
        delta = self.delta
        projected = 2 * delta.key_rows + 3 * delta.value_rows + 2 * delta.value_heads
        return self.hidden_size * projected + delta.state_products
