"""SGLang's class for Gemma 3 text models, changed so that it loads checkpoints with a vision model.

Written for SGLang 0.5.17 and 0.5.23.
"""

from collections.abc import Iterable

import torch
from sglang.srt.models import gemma3_causal

from grpo_megatron.weights.stored_names import GEMMA, MODEL


class Gemma3ForCausalLM(gemma3_causal.Gemma3ForCausalLM):
    """Gemma 3 text model, which skips the tensors of a checkpoint's vision model."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights of the language model, and return the names of the parameters that got them.

        weights: (name in the files, tensor) of all tensors.
        """
        return super().load_weights(
            (MODEL + name.removeprefix(GEMMA.language), tensor)
            for name, tensor in weights
            if name.startswith(GEMMA.language)
        )


EntryClass = Gemma3ForCausalLM
