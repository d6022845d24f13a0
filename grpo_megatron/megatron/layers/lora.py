"""LoRA adapters (arXiv:2106.09685) for tensor-parallel layers, which compute with W + (alpha / rank) B A.

W is the frozen weight, A is `lora_a` and B is `lora_b`. In a column-parallel layer, B is split over TP by
rows. In a row-parallel layer, A is split over TP by columns. Every rank holds the whole other matrix. TP
ranks exchange only the product of the input with A, which has `rank` columns.
"""

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.layers.modules import NormOfOutput
from grpo_megatron.megatron.state.hf_weights import local_parameters, local_weights
from grpo_megatron.model.adapters import A, is_adapter
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.pieces import box


class _Adapted:
    """Base class of column-parallel and row-parallel linear layers with a LoRA adapter.

    Shapes: weight [out, in], lora_a [rank, in], lora_b [out, rank]. out and in are sizes of this TP rank's
    shard of the weight; rank is the adapter's rank.
    """

    def _add_adapter(self, lora: LoraConfig, whole: str) -> None:
        """Create the adapter's matrices lora_a and lora_b, uninitialised. The function `attach` fills them.

        whole: name of the matrix that TP does not split: "lora_a" or "lora_b".
        """
        rows, columns = self.weight.shape
        self.rank, self.alpha = lora.rank, lora.alpha
        self.lora_a = torch.nn.Parameter(self.weight.new_empty(lora.rank, columns))
        self.lora_b = torch.nn.Parameter(self.weight.new_empty(rows, lora.rank))
        # Under SP each TP rank computes the whole matrix's gradient from other tokens. With this mark,
        # finalize_model_grads sums the gradients over TP.
        getattr(self, whole).sequence_parallel = self.sequence_parallel

    def _with_adapter(self, output: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Return `output` plus the adapter's output.

        output: [..., out], the frozen layer's output.
        low: [..., rank], the product of the layer's input with lora_a.
        """
        return torch.add(output, F.linear(low, self.lora_b), alpha=self.alpha / self.rank)

    def merged_weight(self) -> torch.Tensor:
        """Return the weight plus the adapter, W + (alpha / rank) B A, rounded once: this rank's shard."""
        product = self.lora_b.float() @ self.lora_a.float()
        return product.mul_(self.alpha / self.rank).add_(self.weight).to(self.weight.dtype)

    def _mark_as_split(
        self, state: dict, name: str, axis: int, prefix: str, offsets: tuple, metadata: dict
    ) -> None:
        """Correct Megatron's checkpoint entry of an adapter matrix: the matrix is split over TP along `axis`.

        Megatron does not know the adapter, so its entry says that every TP rank has the whole matrix.

        state: result of Megatron's sharded_state_dict, {name: checkpoint entry}, changed in place.
        name: name of the matrix, "lora_a" or "lora_b".
        prefix, offsets, metadata: the arguments of sharded_state_dict.
        """
        key, groups = f"{prefix}{name}", {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        tensor = getattr(self, name)
        state[key] = make_tp_sharded_tensor_for_checkpoint(
            tensor, key, axis, prepend_offsets=offsets, **groups
        )


class AdaptedColumns(tp.ColumnParallelLinear, _Adapted):
    """Column-parallel linear layer with a LoRA adapter. It replaces Megatron's local layer."""

    def __init__(self, *args, lora: LoraConfig, **kwargs):
        super().__init__(*args, **kwargs)
        self._add_adapter(lora, whole="lora_a")

    def forward(self, input_, weight=None, runtime_gather_output=None):
        output, bias = super().forward(input_, weight, runtime_gather_output)
        low = F.linear(input_, self.lora_a)
        # In the backward pass, each rank has only the gradient through its own rows of B, so the gradients
        # are summed over TP.
        if self.sequence_parallel:
            low = tp.gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            low = tp.copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return self._with_adapter(output, low), bias

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        self._mark_as_split(state, "lora_b", 0, prefix, sharded_offsets, metadata)
        return state


class AdaptedGateUp(AdaptedColumns):
    """Linear layer with a LoRA adapter that computes the MLP's gate and up projection together.

    Each TP rank holds its rows of the gate projection, then its rows of the up projection. Checkpoints must
    know this order. Megatron's MLP describes it for weight and bias only, so this class does so for lora_b.
    """

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        key, alone = f"{prefix}lora_b", metadata.get("singleton_local_shards", False)
        state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets, alone)
        return state


class AdaptedRows(tp.RowParallelLinear, _Adapted):
    """Row-parallel linear layer with a LoRA adapter. It replaces Megatron's local layer."""

    def __init__(self, *args, lora: LoraConfig, **kwargs):
        super().__init__(*args, **kwargs)
        self._add_adapter(lora, whole="lora_b")

    def forward(self, input_):
        output, bias = super().forward(input_)
        low = F.linear(input_, self.lora_a)
        if self.sequence_parallel:
            low = tp.reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = tp.reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return self._with_adapter(output, low), bias

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        self._mark_as_split(state, "lora_a", 1, prefix, sharded_offsets, metadata)
        return state


class NormedAdaptedRows(NormOfOutput, AdaptedRows):
    """Row-parallel linear layer with a LoRA adapter, and with an RMS norm of their sum."""


def attach(chunks, entries: dict[str, Entry], seed: int) -> None:
    """Initialise all LoRA adapters of the model, and freeze all other parameters.

    lora_a is uniform in +-1 / sqrt(in) as in PEFT, with the same values in every parallel layout. lora_b is
    zero, so that the adapters do not change the model's output at first. Matrices that are split over TP are
    marked as split, as Megatron expects.

    chunks: model chunks of this rank, whose layers have the adapters already.
    entries: weight map of the adapters: {Megatron parameter name: its HF tensors, and how TP splits it}.
    seed: seed of the values of lora_a.
    """
    parameters, group = local_parameters(chunks, adapters=True), mpu.get_tensor_model_parallel_group()
    for name, parameter in parameters.items():
        entry = entries[name]
        if entry.axis is not None:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=entry.axis, stride=1)
        with torch.no_grad():
            parameter.zero_()
            if name.endswith(A):
                piece = entry.megatron_pieces(group.size(), group.rank())[0]
                whole = _first_value(entry.shapes[0], zlib.crc32(f"{seed} {name}".encode()))
                piece.of(parameter).copy_(whole[box(piece.start, piece.shape)])
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_adapter(name))
        if chunk.pre_process:
            # With recomputation, a layer's adapters get a gradient only if one of its inputs requires one.
            chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _first_value(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


class MergedWeights(Mapping):
    """Mapping {Megatron name: this rank's shard of the weight}, with LoRA adapters added to the weights.

    Weight syncs and HF exports read the weights through this mapping. An adapter is added to its weight each
    time the weight's name is looked up. The last result is cached, because a weight sync packs slices of a
    tensor and looks up the tensor's name for each slice.
    """

    def __init__(self, chunks):
        modules = [module for chunk in chunks for module in chunk.modules()]
        layers = {id(module.weight): module for module in modules if isinstance(module, _Adapted)}
        self._parameters = local_weights(chunks)
        self._layers = {name: layers[id(own)] for name, own in self._parameters.items() if id(own) in layers}
        self._kept: tuple[str, torch.Tensor | None] = ("", None)

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._layers:
            return self._parameters[name].detach()
        if self._kept[0] != name:
            self._kept = ("", None)
            self._kept = (name, self._layers[name].merged_weight())
        return self._kept[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def description(chunks) -> dict | None:
    """Describe the adapters of this rank's model chunks. Return None if there are none.

    The result is {"rank": int, "alpha": float, "layers": sorted names of adapted layers, such as
    "linear_qkv"}. Checkpoints store it, so that a resumed run can compare it with its own adapters.
    """
    found = {
        name.rsplit(".")[-1]: module
        for c in chunks
        for name, module in c.named_modules()
        if isinstance(module, _Adapted)
    }
    any_of_them = next(iter(found.values()), None)
    return any_of_them and {"rank": any_of_them.rank, "alpha": any_of_them.alpha, "layers": sorted(found)}


def check_checkpoint(folder: str, saved: dict | None, chunks) -> None:
    """Raise UserError if a checkpoint has other LoRA adapters than the model. Loading it would lose weights.

    folder: folder of the checkpoint, for the message.
    saved: result of `description` for the saved model, as stored in the checkpoint.
    chunks: model chunks of this rank.
    """
    ours = description(chunks)
    if saved != ours:
        raise UserError(
            f"{folder} was saved with {_in_words(saved)}, but this run has {_in_words(ours)}; "
            "set megatron.lora as in the run that saved the checkpoint "
            "(to start from the weights alone, use that run's hf/ as model.path)"
        )


def _in_words(saved: dict | None) -> str:
    return (
        f"adapters of rank {saved['rank']} and alpha {saved['alpha']} on {', '.join(saved['layers'])}"
        if saved
        else "no adapters"
    )
