"""Capabilities of a run's machines: GPUs, their memory and speed, FP8, and the number of nodes.

Checks of a configuration and the planner use this module. `Capabilities.of_this_machine` examines the
machine that the process runs on. `Capabilities.of_facts` takes values of the configuration instead, so that a
configuration can be checked on another machine.
"""

import re
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

# The oldest release of TransformerEngine that megatron-core 0.16.1 works with, and the first that is too new.
TRANSFORMER_ENGINE_RELEASES = ((2, 9), (2, 12))

# The release whose kernels can be emulated on a CPU, and where `make install` unpacks its wheel.
_EMULATED_RELEASE = "transformer_engine-2.11.0"
_UNPACKED = Path(sys.prefix, "unpacked", _EMULATED_RELEASE)

# The lowest compute capability with FP8 matrix products: Ada.
FP8_CAPABILITY = (8, 9)
# The lowest compute capability with MXFP8 matrix products.
BLACKWELL = (10, 0)


def start_method() -> str:
    """Return the multiprocessing start method for processes that use torch.

    It is `fork` if torch is a CPU build. Otherwise it is `spawn`: a process cannot use CUDA if its parent
    asked for CUDA devices before the fork, and many libraries ask for them when they are imported.
    """
    import torch

    return "fork" if torch.version.cuda is None else "spawn"


@dataclass(frozen=True)
class Speed:
    """Peak speeds of a GPU by its data sheet: dense matrix products (FLOP/s), memory and links (bytes/s)."""

    bf16: float
    """FLOP/s of bf16 matrix products."""
    fp8: float | None
    """FLOP/s of FP8 matrix products; None if the GPU does not support FP8."""
    memory: float
    """Bytes/s of the GPU's own memory."""
    fabric: float
    """Bytes/s between GPUs of a node (NVLink or PCIe), in each direction."""
    host: float
    """Bytes/s between the GPU and the host's memory, in each direction."""
    network: float
    """Bytes/s of the network between nodes, per GPU, in the maker's own machine (DGX)."""


@dataclass(frozen=True)
class GPU:
    """Properties of a GPU model.

    compute_capability: CUDA's (major, minor)
    memory: size of the GPU's memory in bytes, as CUDA reports it
    speed: peak speeds; None if they are not known
    """

    compute_capability: tuple[int, int]
    memory: int
    speed: Speed | None = None


_GIB = 2**30

# The keys are the names that configurations use.
# Memory is the smallest value that CUDA was seen to report for such cards with ECC, in tenths of a GiB. The
# data sheets say 80 GB for a card with 84.9 * 10**9 bytes. With that number, the planner refused layouts that
# fit. What CUDA reports for GB300 is not known, so its memory is that of the data sheet.
# Speeds are from the data sheets "A100 Tensor Core GPU", "L40S", "H100 Tensor Core GPU" and "H200 Tensor Core
# GPU" (SXM; half of the figures with sparsity), "DGX B200" and "GB300 NVL72" (one GPU's share of the
# machine). `fabric` and `host` are half of the figures for NVLink or PCIe, which are sums of both directions.
# Networks are those of DGX A100 (200 Gb/s for each GPU), of DGX H100, H200 and B200 (400), and of GB300 NVL72
# (800). L40S has neither NVLink nor a machine of its own: its values are PCIe and 200 Gb/s.
GPUS = {
    "a100-40g": GPU((8, 0), int(39.3 * _GIB), Speed(312e12, None, 1.555e12, 300e9, 32e9, 25e9)),
    "a100-80g": GPU((8, 0), int(79.1 * _GIB), Speed(312e12, None, 2.039e12, 300e9, 32e9, 25e9)),
    "l40s": GPU((8, 9), int(44.3 * _GIB), Speed(362e12, 733e12, 0.864e12, 32e9, 32e9, 25e9)),
    "h100-80g": GPU((9, 0), int(79.1 * _GIB), Speed(989e12, 1979e12, 3.35e12, 450e9, 64e9, 50e9)),
    "h200": GPU((9, 0), int(139.7 * _GIB), Speed(989e12, 1979e12, 4.8e12, 450e9, 64e9, 50e9)),
    "b200": GPU((10, 0), int(178.3 * _GIB), Speed(2250e12, 4500e12, 7.7e12, 900e9, 64e9, 50e9)),
    "gb300": GPU((10, 3), 279 * 10**9, Speed(2500e12, 5000e12, 8.0e12, 900e9, 450e9, 100e9)),
}


def peak_flops(gpu: str | None) -> float | None:
    """Return the peak FLOP/s of a GPU for dense bf16 matrix products; None if not known.

    The monitor computes the FLOPs utilisation from this number.

    gpu: value of cluster.gpu, such as `h100-80g`; None: the GPU of this machine.
    """
    if gpu is None:
        import torch

        gpu = _name_in_gpus(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    known = GPUS.get(gpu)
    return known.speed.bf16 if known and known.speed else None


def _name_in_gpus(device: str) -> str | None:
    """Return the key of a GPU model in the table GPUS, such as `h200`; None if the table lacks the model.

    Use the result only to look up the speed of matrix products, because the size of the memory is ignored:
    the result for every A100 is `a100-40g`. A device with PCIe or NVL in its name may be slower than the
    model in the table, so its result is None.

    device: name that CUDA reports for the GPU, such as `NVIDIA H100 80GB HBM3`.
    """
    if "PCIe" in device or "NVL" in device:
        return None
    return next((name for name in GPUS if name.split("-")[0].upper() in re.split(r"[\s-]", device)), None)


@dataclass(frozen=True)
class Capabilities:
    """Known facts about a run's machines, such as GPU model and number of nodes, to check configurations.

    If a fact is not known, the checks that need it accept the configuration.
    """

    where: str
    """Words for error messages that say which machines these are, such as `here` or `in the Ray cluster`."""
    gpus: bool | None = None
    """True if ranks and engines run on GPUs, False if they run on CPUs; None: not known."""
    gpu: GPU | None = None
    """The model of GPU; None if there is none or the model is not known."""
    transformer_engine_problem: str | None = None
    """Reason why TransformerEngine cannot be used; None if it can be used, as far as is known."""
    nodes: int | None = None
    """Number of nodes; None: not known."""
    gpus_per_node: int | None = None
    """Number of GPUs of each node; None: not known, or there are none."""

    @classmethod
    def of_this_machine(cls) -> "Capabilities":
        """Examine this machine, and return its capabilities: one node, with the GPU model of device 0.

        The speeds of the GPU are not known (GPU.speed is None).
        """
        import torch

        gpus = torch.cuda.is_available()
        gpu = None
        if gpus:
            properties = torch.cuda.get_device_properties(0)
            gpu = GPU((properties.major, properties.minor), properties.total_memory)
        installed = version("transformer_engine") or version("transformer-engine")
        problem = _transformer_engine_problem(installed, gpus)
        return cls(
            "here", gpus, gpu, problem, nodes=1, gpus_per_node=torch.cuda.device_count() if gpus else None
        )

    @classmethod
    def of_facts(cls, gpu: str | None, nodes: int | None, gpus_per_node: int | None) -> "Capabilities":
        """Return the capabilities of a cluster that this process cannot examine, from the configuration.

        If the cluster has GPUs, TransformerEngine is assumed to be installed. If that is wrong, the ranks
        report an error when they start.

        gpu: value of cluster.gpu: `none`, a model such as `h200`, or the name of another GPU, about which
            nothing else is known; None: not known.
        nodes: value of cluster.nodes; None: not known.
        gpus_per_node: value of cluster.gpus_per_node; None: not known.
        """
        if gpu is None:
            return cls("in the cluster", nodes=nodes, gpus_per_node=gpus_per_node)
        where = f"with cluster.gpu={gpu}"
        if gpu == "none":
            return cls(where, False, None, _WITHOUT_CUDA, nodes)
        return cls(where, True, GPUS.get(gpu), None, nodes, gpus_per_node)

    def emulating(self, emulate_kernels: bool) -> "Capabilities":
        """Return the capabilities that a run has if TransformerEngine's kernels are emulated on the CPU.

        The emulation is for tests without a GPU. The result differs from `self` in two fields. `gpu` is an
        H100. `transformer_engine_problem` is None, unless the machine has a GPU, or the unpacked wheel of
        TransformerEngine is missing, which the emulation needs.

        emulate_kernels: value of megatron.emulate_kernels. If it is False, the result is `self`.
        """
        if not emulate_kernels:
            return self
        problem = (
            "kernels are emulated only on machines without a GPU; set megatron.emulate_kernels=false"
            if self.gpus
            else emulated_transformer_engine()[1]
        )
        return replace(self, gpu=GPUS["h100-80g"], transformer_engine_problem=problem)

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs on all nodes; None if it is not known or there are none."""
        return self.nodes * self.gpus_per_node if self.nodes and self.gpus_per_node else None

    @property
    def fp8_problem(self) -> str | None:
        """Reason why FP8 training is not possible, as text; None if it is possible, as far as is known."""
        if self.transformer_engine_problem:
            return self.transformer_engine_problem
        if self.gpu is None or self.gpu.compute_capability >= FP8_CAPABILITY:
            return None
        major, minor = self.gpu.compute_capability
        return f"FP8 needs compute capability 8.9 (Ada) or higher, but this GPU has {major}.{minor}"


_WITHOUT_CUDA = "TransformerEngine needs CUDA, which is not available"


def emulated_transformer_engine() -> tuple[Path, str | None]:
    """Find the unpacked wheel of TransformerEngine. The emulation of kernels on a CPU uses its Python code.

    Returns (folder, problem). folder: the folder into which `make install` unpacks the wheel. problem: an
    error message if the folder does not contain the wheel, else None.
    """
    if not (_UNPACKED / "transformer_engine").is_dir():
        return (
            _UNPACKED,
            f"the wheel of {_EMULATED_RELEASE} is not unpacked in {_UNPACKED}; run `make install`",
        )
    return _UNPACKED, None


def _transformer_engine_problem(installed: str | None, gpus: bool) -> str | None:
    """Return the reason why TransformerEngine cannot be used, as text; None if it can be used.

    installed: version of the installed TransformerEngine; None if it is not installed.
    gpus: True if CUDA is available.
    """
    if installed is None:
        return "TransformerEngine is not installed"
    first, beyond = TRANSFORMER_ENGINE_RELEASES
    if not first <= release(installed) < beyond:
        return (
            f"TransformerEngine {installed} does not work with megatron-core 0.16.1, which needs 2.9 to 2.11"
        )
    return None if gpus else _WITHOUT_CUDA


def version(package: str) -> str | None:
    """Return the installed version of a package without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    """Return up to three numbers of a version, to compare versions: (2, 11, 0) for `2.11.0rc1+cu128`."""
    parts = text.split("+")[0].split(".")[:3]
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in parts)
