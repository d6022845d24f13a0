"""Context of a section: the device, the sizes, and the reporting of figures."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.load import read_config
from grpo_megatron.config.weight_sync import WeightSyncConfig
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.planner.activations import head_bytes, kept_activations, working_activations
from grpo_megatron.planner.memory import RANK_CONTEXT, RESERVE
from grpo_megatron.planner.states import training_states
from on_gpu.device import Cpu, Cuda, Device

_MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work in all sections."""

    tokens: int = 8192
    """Tokens of a micro-batch, and of a long sequence."""
    micro_batches: int = 2
    """Micro-batches of a training step."""
    repeats: int = 3
    """Timed repetitions."""
    products: tuple[int, ...] = (4096, 8192, 12288, 16384)
    """Widths of the square matrix products."""
    copied: int = 4 << 30
    """Bytes of the copy within the device."""
    layers: int = 8
    """Layers of the model in the sections export, handover, sleep and repeat."""
    head: tuple[int, int, int] = (8192, 4096, 151936)
    """Tokens, channels and words of the head."""
    bucket: int = WeightSyncConfig().bucket_bytes
    """Bytes of a bucket in which weights travel."""
    prompts: int = 32
    """Prompts of a step of the whole loop."""
    response: int = 512
    """Longest response of the whole loop, in tokens."""


DRY = Sizes(
    tokens=512,
    micro_batches=1,
    repeats=1,
    products=(64, 128),
    copied=1 << 20,
    layers=2,
    head=(64, 32, 512),
    bucket=64 << 10,
    prompts=2,
    response=16,
)
# The sizes of matrices are multiples of 128, the block of the blockwise recipe.
_DRY_MODEL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Options:
    """Options of a benchmark run.

    trained: folder of an HF model with trained weights, or None.
    peak_flops: bf16 rate that the section `peak` measured, in FLOP/s. None: it was not measured.
    """

    dry_run: bool
    trained: str | None = None
    peak_flops: float | None = None


class Bench:
    def __init__(self, options: Options, send: Callable[[dict], None]):
        """Create the context of a section.

        send: called with all figures so far whenever there are new ones, so that a section that fails keeps
            them.
        """
        self.options = options
        self.device: Device = Cpu() if options.dry_run else Cuda()
        self.sizes = DRY if options.dry_run else Sizes()
        self.here = Capabilities.of_this_machine().emulating(options.dry_run)
        self.figures: dict = {}
        self._send = send

    def report(self, **figures) -> None:
        self.figures |= figures
        self._send(self.figures)

    def share_of_peak(self, flops: float, seconds: float) -> float | None:
        peak = self.options.peak_flops
        return flops / seconds / peak if peak else None

    @contextmanager
    def model(self, name: str, layers: int | None = None) -> Iterator[str]:
        """Yield a folder with the config.json of a model in configs/models, without weights.

        layers: number of layers, if it is to differ from the model's own.
        """
        changes = {"num_hidden_layers": layers} if layers else {}
        config = json.loads((_MODELS / name / "config.json").read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            config |= changes | (_DRY_MODEL if self.options.dry_run else {})
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield folder

    def fitting_layers(self, name: str) -> int:
        """Return how many of the model's layers can be trained in FP8 on this device without recomputation.

        RESERVE, a twentieth of the memory, is left for what the estimate does not cover, such as
        fragmentation.
        """
        with self.model(name) as folder:
            changes = ["megatron.precision=fp8", f"train.max_tokens_per_micro_batch={self.sizes.tokens}"]
            config, whole = read_config(None, [f"model.path={folder}", *changes]), read_architecture(folder)
        for layers in range(whole.num_layers, 1, -1):
            arch = replace(whole, num_layers=layers)
            (state,) = training_states(arch, config.megatron)
            active = (
                kept_activations(arch, config, 0)
                + working_activations(arch, config, 0)
                + head_bytes(arch, config)
            )
            if sum(astuple(state)) + active + RANK_CONTEXT <= (1 - RESERVE) * self.device.capacity:
                return layers
        return 1


def parameters(arch: Architecture) -> int:
    return sum(int(np.prod(shape)) for shape in hf_shapes(weight_map(arch)).values())


def random_weights(tensors: dict[str, torch.Tensor], seed: int = 0) -> None:
    """Fill matrices as models are initialised, and norms with ones.

    With zeros, matrix products would be faster than a model's.
    """
    generators = {}
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor.fill_(1.0)
            continue
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        tensor.normal_(0, 0.02, generator=generators[tensor.device])
