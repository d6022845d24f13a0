"""Gated delta networks over packs of sequences, and the gated attention of models that have them.

Parameters, their division over TP and their checkpoint state are those of Megatron's classes. Megatron's own
gated delta network refuses packs of sequences.
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention

from grpo_megatron.megatron.layers import delta_rule, fused_delta_rule
from grpo_megatron.megatron.layers.head_exchange import HeadExchange
from grpo_megatron.megatron.layers.packs import PackedSequences
from grpo_megatron.megatron.release import GatedDeltaNet, split_tensor_factory

# Names of the input projection's sections in checkpoints, as Megatron writes them for its weight.
_SECTIONS = ["query", "key", "value", "z", "beta", "alpha"]


class GatedNorm(torch.nn.Module):
    """RMS norm of each head, multiplied by the silu of a gate. It is computed in float32.

    The constructor takes the arguments that Megatron passes to a layer's norm.
    """

    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        # Each TP rank has other heads, so its gradient is a summand. Megatron adds up marked gradients, but
        # only under SP.
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x [..., hidden_size], normalised and gated, in its dtype. gate has the shape of x."""
        weight = self.weight
        if not weight.sequence_parallel:
            weight = copy_to_tensor_model_parallel_region(weight)
        normed = F.rms_norm(x.float(), weight.shape, weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)


class DeltaNetLayer(GatedDeltaNet):
    """Gated delta network (arXiv:2412.06464) with Megatron's parameters, over packs of sequences.

    Under CP, ranks exchange heads for tokens (HeadExchange), so that convolution and delta rule see whole
    sequences.

    forward: takes hidden states [t, 1, h], under sequence parallelism [t / tp, 1, h]. Returns (output of the
        same shape, None).
    """

    def __init__(self, config, submodules, layer_number: int, pg_collection, **unused):
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection)
        self.exchange = HeadExchange(pg_collection.cp)
        self.recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(self, hidden_states, attention_mask, packed_seq_params=None, **unused):
        projected = self.in_proj(hidden_states)[0].squeeze(1)

        def core(projected):
            # Megatron's recomputation passes only tensors, so the rest comes from the enclosing scope.
            return self._core(projected, packed_seq_params)

        if self.recomputes_core and self.training:
            mixed = tensor_parallel.checkpoint(core, False, projected)
        else:
            mixed = core(projected)
        return self.out_proj(mixed[:, None])

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None, tp_group=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata, tp_group)
        key = f"{prefix}in_proj.lora_b"
        if key in state:
            # The adapter's rows have the weight's sections. Megatron describes only the weight's.
            keys, values, heads = self._sections()
            rows, names = [keys, keys, values, values, heads, heads], _SECTIONS
            state[key] = split_tensor_factory(state[key], rows, names, 0)
        return state

    def _sections(self) -> tuple[int, int, int]:
        """Return this TP rank's number of key channels, value channels and value heads."""
        return tuple(n // self.tp_size for n in (self.qk_dim, self.v_dim, self.num_value_heads))

    def _core(self, projected: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return the gated outputs of this TP rank's heads, [t, value heads * value_head_dim].

        projected: output of the input projection for this CP rank's t tokens of the pack. Its channels are
            queries, keys, values, gates, betas and alphas.
        """
        keys, values, heads = self._sections()
        mixed, gate, beta, alpha = projected.split([2 * keys + values, values, heads, heads], dim=-1)
        # From here on, tensors have all CP ranks' tokens, and this CP rank's share of the heads.
        exchange, sections, chunks = self.exchange, (keys, keys, values), packed.chunks()
        mixed, beta, alpha = exchange.to_heads(
            [(mixed, sections), (beta, (heads,)), (alpha, (heads,))], packed
        )
        convolution = exchange.share(self.conv1d.weight.squeeze(1), sections)
        rate, bias = (exchange.share(x, (heads,)).float() for x in (self.A_log, self.dt_bias))
        kernels = fused_delta_rule if fused_delta_rule.fits(mixed) else delta_rule
        mixed = kernels.causal_convolution(mixed, convolution, chunks)
        query, key, value = mixed.split([size // exchange.size for size in sections], dim=-1)
        # Computed in float32, as in the engines.
        log_decay = -rate.exp() * F.softplus(alpha.float() + bias)
        output = kernels.gated_delta_rule(
            query.unflatten(-1, (-1, self.key_head_dim)),
            key.unflatten(-1, (-1, self.key_head_dim)),
            value.unflatten(-1, (-1, self.value_head_dim)),
            log_decay,
            beta.float().sigmoid(),
            chunks,
        )
        output = exchange.to_tokens(output.flatten(1), packed).unflatten(-1, (-1, self.value_head_dim))
        return self.out_norm(output, gate.view(output.shape)).flatten(1)


class GatedAttention(SelfAttention):
    """Megatron's self-attention with an output gate, also if there are more TP ranks than KV heads.

    Such ranks share a KV head and its query heads. Megatron takes a rank's own query heads from them, but not
    their gates.
    """

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x times the sigmoid of its gate, computed in float32, in the dtype of x.

        x: [t, 1, heads * d], output of this rank's query heads.
        gate: [t, 1, heads, d]; [t, 1, heads of all ranks that share the KV head, d] if several do.
        """
        heads = x.shape[-1] // gate.shape[-1]
        share = self.pg_collection.tp.rank() % (gate.shape[2] // heads)
        gate = gate[:, :, share * heads : (share + 1) * heads].flatten(2)
        return (x * gate.float().sigmoid()).to(x.dtype)
