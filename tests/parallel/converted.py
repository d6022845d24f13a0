"""Functions that the tests of conversion run on ranks. They must be importable by the pool."""

import torch

from grpo_megatron.megatron.layers.build import build_model
from grpo_megatron.megatron.state import checkpoint
from grpo_megatron.megatron.state.hf_weights import local_parameters
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.configs import actor_config


def load_and_save(sizes: ParallelSizes, hf: str, source: str, target: str) -> None:
    """Load the shards of `source` into a model like a trainer, and save them again in this layout."""
    chunks = build_model(read_architecture(hf), actor_config(hf, sizes))
    checkpoint.load(source, chunks, None)
    checkpoint.save(target, chunks, None).finish()


def compare_with_mbridge(hf: str, converted: str) -> dict[str, list[str]]:
    """Compare a converted checkpoint's parameters with what mbridge makes of the HF tensors.

    Returns {"compared": number of parameters, "different": those that differ}.
    """
    from mbridge import AutoBridge

    arch, source = read_architecture(hf), HFCheckpoint(hf)
    chunks = build_model(arch, actor_config(hf))
    checkpoint.load(converted, chunks, None)
    bridge = AutoBridge.from_pretrained(hf, dtype=torch.float32)
    ours = local_parameters(chunks)
    compared, different = [], []
    # mbridge names parameters as TransformerEngine's layers do.
    for name, theirs in zip(weight_map(arch), weight_map(arch, transformer_engine=True), strict=True):
        if name not in ours:
            continue  # the output layer of tied embeddings
        before, experts, after = theirs.partition("mlp.experts.local_experts.")
        if experts:  # grouped experts, whose number is at the end
            number, _, rest = after.partition(".")
            theirs = f"{before}mlp.experts.{rest}{number}"
        tensors = [source.read(hf_name) for hf_name in bridge._weight_name_mapping_mcore_to_hf(theirs)]
        compared.append(name)
        if not torch.equal(bridge._weight_to_mcore_format(theirs, tensors), ours[name]):
            different.append(name)
    return {"compared": compared, "different": different}
