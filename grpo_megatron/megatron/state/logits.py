"""Logits of a Megatron checkpoint, to verify a conversion between HF and Megatron checkpoints.

Training never computes all logits at once, so this is a separate, simple implementation on one rank.
"""

import tempfile

import numpy as np
import torch

from grpo_megatron.batch.layout import Layout
from grpo_megatron.config.schema import Config, MegatronConfig, Precision
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.layers.build import build_model, output_weight
from grpo_megatron.megatron.layers.packs import describe_pack
from grpo_megatron.megatron.layers.router import Routing, set_routing
from grpo_megatron.megatron.state import checkpoint
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes


@torch.no_grad()
def logits_of(folder: str, arch: Architecture, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Load a whole model in fp32 on this rank. Return its logits of all tokens, float32 [t, vocabulary].

    The function creates process groups of one rank, and destroys them at the end, so this process must have
    none before the call.

    folder: folder of the Megatron checkpoint.
    sequences: token ids of each sequence, int [length]. t is the sum of their lengths. The rows of the result
        are in the order of the sequences.
    """
    pack = Layout().pack(np.array([len(tokens) for tokens in sequences]))
    with tempfile.TemporaryDirectory() as store:
        process_groups.initialize(ParallelSizes(), 0, f"file://{store}/store", seed=0)
        try:
            chunks = build_model(arch, Config(megatron=MegatronConfig(precision=Precision.fp32)))
            checkpoint.load(folder, chunks, None)
            (model,), device = chunks, next(chunks[0].parameters()).device
            if arch.moe:
                set_routing(model, Routing.own, None)
            tokens = pack.scatter(torch.cat(sequences).numpy()).to(device)[None]
            positions = torch.from_numpy(pack.position_ids).to(device)[None]
            padding = torch.from_numpy(pack.index < 0).to(device)[None] if arch.moe else None
            packed = describe_pack(pack, device, own_attention=True)
            hidden = model.eval()(tokens, positions, None, packed_seq_params=packed, padding_mask=padding)[0]
            logits = hidden @ output_weight(model)[: arch.vocab_size].T
            order = torch.from_numpy(np.argsort(pack.index[pack.index >= 0])).to(device)
            return logits[torch.from_numpy(pack.index >= 0).to(device)][order].cpu()
        finally:
            process_groups.destroy()
