"""Weights of the trained model on one rank: weight sync, export, and changes and checks of their values."""

from collections.abc import Mapping

import torch

from grpo_megatron.megatron.layers.lora import MergedWeights
from grpo_megatron.megatron.state import export
from grpo_megatron.megatron.state.hf_weights import local_parameters, local_weights
from grpo_megatron.megatron.trained_model import TrainedModel
from grpo_megatron.model.adapters import Content
from grpo_megatron.weights.sync.messages import SyncCommand, SyncReport
from grpo_megatron.weights.sync.sender import WeightSender, sender_for


class RankWeights:
    """Sends, exports, changes and checks the weights of one rank. All ranks must call each method."""

    def __init__(self, model: TrainedModel):
        self._model = model
        self._sender: WeightSender | None = None

    def send(self, command: SyncCommand) -> SyncReport:
        """Send this rank's weights to the rollout engines, as the driver's command says.

        Connections to the engines stay open for the next weight sync, unless the next command has another
        setup. Returns this rank's report on the sync.
        """
        model = self._model
        with model.settled_weights(), torch.no_grad():
            with_te = model.transformer_engine
            self._sender = sender_for(command.setup, self._sender, model.rank.rank, model.device, with_te)
            return self._sender.send(command, self._sent(command), model.heartbeat.tick)

    def _sent(self, command: SyncCommand) -> Mapping[str, torch.Tensor]:
        """Return the weights that a command asks for, {Megatron name: this rank's shard}."""
        content, chunks = command.setup.layouts.content, self._model.chunks
        if content == Content.merged:
            return MergedWeights(chunks)
        return (
            local_parameters(chunks, adapters=True) if content == Content.adapter else local_weights(chunks)
        )

    def save_hf(self, folder: str, dtype: torch.dtype | None = None) -> None:
        """Write the current weights as an HF checkpoint. All ranks must call this.

        dtype: dtype of the written tensors. None: dtype of the parameters.

        Raises UserError on all ranks if any rank cannot write its files.
        """
        model = self._model
        with model.settled_weights():
            dtype = dtype or model.params_dtype
            export.save_hf(
                model.chunks, model.entries, model.config, model.arch, folder, dtype, model.adapters
            )

    def reset_reference(self) -> None:
        """Replace the reference weights by the policy's current weights. All ranks must call this.

        Raises RuntimeError if the run has no reference model.
        """
        model, reference = self._model, self._model.require_reference()
        model.until_saved(weights_only=True)  # the checkpoint's weights include the reference's
        with model.settled_weights():
            reference.take_current()

    def scale(self, factor: float, share: float = 1.0) -> None:
        """Multiply every parameter by `factor`, so that a test of weight syncs has changed weights to send.

        All ranks must call this. The optimizer's separate master weights (of bf16 parameters) do not change,
        so the next optimizer step undoes the multiplication.

        share: fraction of the elements to multiply, chosen at random. If it is below 1, data-parallel
            replicas may have different weights afterwards, so do not train with them.
        """
        self._model.until_saved(weights_only=True)
        with self._model.settled_weights(), torch.no_grad():
            for parameter in (p for chunk in self._model.chunks for p in chunk.parameters()):
                if share == 1.0:
                    parameter.mul_(factor)
                else:
                    parameter.mul_(torch.where(torch.rand_like(parameter) < share, factor, 1.0))

    def broken(self) -> list[str]:
        """Return the names of this rank's parameters that contain NaN or infinity.

        All ranks must call this.
        """
        with self._model.settled_weights():
            named = [item for chunk in self._model.chunks for item in chunk.named_parameters()]
            return [name for name, parameter in named if not parameter.isfinite().all()]
