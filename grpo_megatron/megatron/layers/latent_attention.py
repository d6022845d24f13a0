"""Multi-head latent attention (DeepSeek, arXiv:2405.04434, section 2.1) over packs of sequences.

It works with Megatron's local layers and with TransformerEngine's.

It replaces Megatron's own class for two reasons. With Megatron's local layers, the gradient of the key
channels that all heads share misses the heads of other tensor-parallel ranks. And its rotary embedding of
packs reads the lengths of all sequences from the device in every layer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from grpo_megatron.megatron.layers.attention import rotate
from grpo_megatron.megatron.layers.modules import RMSNorm
from grpo_megatron.model.architecture import LATENT_NORM_EPS, Architecture


@dataclass(frozen=True)
class LatentAttentionParts:
    """Classes of LatentAttention's submodules: TransformerEngine's, or those for Megatron's local layers.

    column_parallel, row_parallel: classes of the tensor-parallel linear layers.
    core: class that computes attention from query, key and value. It must not apply a rotary embedding.
    """

    column_parallel: type
    row_parallel: type
    core: Any


class _Replicated(torch.nn.Linear):
    """Linear layer without bias that is not split over TP: every TP rank holds the whole weight.

    Under sequence parallelism each rank applies the layer to its own tokens.
    """

    def __init__(self, config, rows: int, columns: int):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(columns, rows, bias=False, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Leave the weight uninitialised, because its values come from the checkpoint."""


class LatentAttention(MegatronModule):
    """Multi-head latent attention (MLA): keys, values and optionally queries come from low-rank latents.

    The rotary embedding applies to a few channels only. All heads share the rotated channels of the key.

    forward: takes hidden states [t, 1, h], under sequence parallelism [t / tp, 1, h]. Returns (output of the
        same shape, None).

    The constructor takes the arguments that Megatron's transformer layer passes to its attention. Parameters
    have the names of Megatron's MLASelfAttention.
    """

    def __init__(
        self,
        config,
        submodules: LatentAttentionParts,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        arch: Architecture,
        **unused,
    ):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.latent, heads = arch.latent, arch.num_heads
        self.rope_frequencies, self.rope_factor = arch.rope_frequencies(), arch.rope_factor
        self.recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

        def column_parallel(columns: int, rows: int):
            plain = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
            method = config.init_method
            return submodules.column_parallel(
                columns, rows, config=config, init_method=method, tp_group=self.tp_group, **plain
            )

        if self.latent.query_rank is None:
            self.linear_q_proj = column_parallel(arch.hidden_size, heads * arch.head_dim)
        else:
            self.linear_q_down_proj = _Replicated(config, self.latent.query_rank, arch.hidden_size)
        # Created right after the queries' down projection, because weight syncs send both in one bucket.
        kv_rows = self.latent.kv_rank + self.latent.rotated_dim
        self.linear_kv_down_proj = _Replicated(config, kv_rows, arch.hidden_size)
        if self.latent.query_rank is not None:
            self.q_layernorm = RMSNorm(config, self.latent.query_rank, eps=LATENT_NORM_EPS)
            self.linear_q_up_proj = column_parallel(self.latent.query_rank, heads * arch.head_dim)
        self.kv_layernorm = RMSNorm(config, self.latent.kv_rank, eps=LATENT_NORM_EPS)
        self.linear_kv_up_proj = column_parallel(
            self.latent.kv_rank, heads * (self.latent.plain_dim + self.latent.value_dim)
        )
        self.core_attention = self._make_core(submodules, layer_number, cp_comm_type, pg_collection, arch)
        self.linear_proj = submodules.row_parallel(
            heads * self.latent.value_dim,
            arch.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _make_core(self, submodules, layer_number, cp_comm_type, pg_collection, arch: Architecture):
        """Return the module that computes attention from query, key and value of this TP rank's heads."""
        return submodules.core(
            config=self.config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=arch.softmax_factor / math.sqrt(arch.head_dim),
            k_channels=arch.head_dim,
            v_channels=self.latent.value_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def forward(self, hidden_states, attention_mask, packed_seq_params=None, **unused):
        query, key, value = self._projected(hidden_states, packed_seq_params)

        def attend(query, key, value):
            # Megatron's recomputation passes only tensors, so the rest comes from the enclosing scope.
            return self.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=AttnMaskType.causal,
                packed_seq_params=packed_seq_params,
            )

        if self.recomputes_core and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            attended = attend(query, key, value)
        return self.linear_proj(attended.reshape(attended.shape[0], 1, -1))

    def _projected(self, hidden, packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (query, key, value) of this TP rank's heads, with the rotary embedding applied.

        - query, key: [t, heads, plain_dim + rotated_dim]. Only the last rotated_dim channels are rotated.
        - value: [t, heads, value_dim].

        hidden: hidden states [t, 1, h]; under sequence parallelism [t / tp, 1, h].
        packed: PackedSequences, which has the tokens' positions in their sequences.
        """
        latent = self.latent
        if latent.query_rank is None:
            query = self.linear_q_proj(hidden)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))[0]
        latents, shared = self.linear_kv_down_proj(hidden).split([latent.kv_rank, latent.rotated_dim], dim=-1)
        pair = self.linear_kv_up_proj(self.kv_layernorm(latents))[0]
        # The heads of all TP ranks use the shared channels, so their gradient is the sum over TP ranks.
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        query = query.view(len(query), -1, latent.plain_dim + latent.rotated_dim)
        pair = pair.view(len(pair), query.shape[1], -1)
        plain, turned = query.split([latent.plain_dim, latent.rotated_dim], dim=-1)
        key, value = pair.split([latent.plain_dim, latent.value_dim], dim=-1)
        rotation = packed.rotation(self.rope_frequencies, query.dtype, self.rope_factor)
        turned, shared = (rotate(self._ordered_for_rotation(x), rotation) for x in (turned, shared))
        query = torch.cat([plain, turned], dim=-1)
        key = torch.cat([key, shared.expand(-1, key.shape[1], -1)], dim=-1)
        return query, key, value.contiguous()

    def _ordered_for_rotation(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., d] with its channels in the order that `rotate` expects.

        `rotate` rotates channel i together with channel i + d / 2. Models with latent.interleaved rotate
        adjacent channels together, so their channels are reordered. Other models' channels stay as they are.
        """
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.latent.interleaved else x
