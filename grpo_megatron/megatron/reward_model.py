"""Frozen reward model on the ranks of the trained model. Its weights are in host memory between uses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.module import Float16Module

from grpo_megatron.config.derived import scorer_config
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.forward_backward import forward_scores
from grpo_megatron.megatron.head.objectives import make_head
from grpo_megatron.megatron.head.score import load_reward_model
from grpo_megatron.megatron.layers.build import build_model, uses_transformer_engine
from grpo_megatron.megatron.memory.host import host_memory
from grpo_megatron.megatron.memory.training import unique_storages
from grpo_megatron.megatron.micro_batch import MicroBatch
from grpo_megatron.model.families import read_architecture, weight_map


class RewardModel:
    """Frozen reward model that scores samples on the ranks that train the policy.

    It has the policy's parallel sizes (TP, PP, CP, ...), but may have another architecture. All its pipeline
    stages have the same number of layers. Its weights are in device memory only while it computes scores, and
    otherwise in host memory.
    """

    def __init__(self, config: Config, tick: Callable[[], None]):
        """Build the reward model, load its weights, and move them to host memory.

        config: configuration of the run. reward.model.path is the folder of the reward model. Parallel sizes
            and most other settings are the policy's (derived.scorer_config).
        tick: called before each forward pass of a model chunk, to report progress to the hang detector.

        Raises UserError if reward.model.path cannot be read as a reward model.
        """
        path, own_config = config.reward.model.path, scorer_config(config)
        # Micro-batches are prepared for the policy's kind of layers, so use the same kind here.
        with_engine = uses_transformer_engine(config.megatron, read_architecture(config.model.path))
        arch = read_architecture(path, reward_model=True)
        chunks = build_model(arch, own_config, with_engine)
        load_reward_model(chunks, path, weight_map(arch, with_engine), config.run.seed)
        for chunk in chunks:
            chunk.register_forward_pre_hook(lambda *_: tick())
        bf16 = chunks[0].config.bf16
        self._modules = [(Float16Module(chunk.config, chunk) if bf16 else chunk).eval() for chunk in chunks]
        self._head = make_head(chunks, arch, own_config)
        weights = unique_storages(parameter.data for chunk in chunks for parameter in chunk.parameters())
        self._offloaded = [_OffloadedStorage(storage) for storage in weights.values()]

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Hold the reward model's weights in device memory inside the `with` block, then free this memory."""
        for offloaded in self._offloaded:
            offloaded.bring()
        try:
            yield
        finally:
            for offloaded in self._offloaded:
                offloaded.drop()

    def __call__(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Return the reward model's scores: one float32 tensor [S] per micro-batch of S sequences.

        The list is empty except on the last pipeline stage. All ranks must call this.

        micro_batches: micro-batches that were prepared as the policy's inputs. The reward model can use them,
            because both models have the same kind of layers (TransformerEngine's, or Megatron's local
            layers).
        """
        with self._weights_on_device():
            return forward_scores(self._modules, micro_batches, self._head)


class _OffloadedStorage:
    """Storage of frozen weights that are kept in host memory and copied to the device when they are needed.

    Creating the object copies the weights to host memory and frees their device memory. `bring` copies them
    back to the device. `drop` frees their device memory again. The host copy stays.
    """

    def __init__(self, storage: torch.UntypedStorage):
        self._storage, self._copy = storage, host_memory(storage.nbytes())
        self._copy.copy_(self._on_device())
        self.drop()

    def _on_device(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)

    def bring(self) -> None:
        self._storage.resize_(len(self._copy))
        self._on_device().copy_(self._copy, non_blocking=True)

    def drop(self) -> None:
        self._storage.resize_(0)
