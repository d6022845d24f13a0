"""What the machines of a run can do: found out on such a machine, or given as facts where another one checks."""

import re
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

# The first and the first too new release of TransformerEngine that megatron-core 0.16.1 works with.
TRANSFORMER_ENGINE_RELEASES = ((2, 9), (2, 12))

# The release of which the kernels can be emulated on a CPU, and where `make install` unpacks its wheel.
_EMULATED_RELEASE = "2.11.0"
_UNPACKED = Path(sys.prefix, "unpacked", f"transformer_engine-{_EMULATED_RELEASE}")

# The least compute capability with FP8 matrix products: Ada.
FP8_CAPABILITY = (8, 9)
# That of MXFP8 ones.
BLACKWELL = (10, 0)


def start_method() -> str:
    """Return how to start processes that use torch: `fork` where it is a CPU build, else `spawn`.

    CUDA cannot be used in a process that was forked from one that has asked for devices, and many libraries
    ask when they are imported.
    """
    import torch

    return "fork" if torch.version.cuda is None else "spawn"


@dataclass(frozen=True)
class Speed:
    """What the maker promises, without sparsity. bf16, fp8: FLOP/s of matrix products; fp8 is None where there are none.

    memory: bytes/s of the device's memory. fabric: bytes/s to other GPUs of the node, and host: to the host's memory, in each
    direction. network: bytes/s of one GPU between nodes, in the maker's own machine of such GPUs.
    """

    bf16: float
    fp8: float | None
    memory: float
    fabric: float
    host: float
    network: float


@dataclass(frozen=True)
class GPU:
    """compute_capability: CUDA's (major, minor). memory: bytes, as CUDA reports them. speed: None where it is not known."""

    compute_capability: tuple[int, int]
    memory: int
    speed: Speed | None = None


_GIB = 2**30

# By the names that configurations use. Memory is the least that CUDA was found to report of such cards, with ECC, in whole tenths of a
# GiB. Data sheets say 80 GB of a card with 84.9 * 10**9 bytes, and layouts that fit were refused. What CUDA reports of GB300 is not
# known: its memory is the data sheet's.
# Speeds are those of the data sheets "A100 Tensor Core GPU", "L40S", "H100 Tensor Core GPU" and "H200 Tensor Core GPU" (SXM; half of the
# figures with sparsity), "DGX B200" and "GB300 NVL72" (a share of the machine's); half of NVLink's, or of PCIe's, sum of both directions.
# Networks are those of DGX A100 (200 Gb/s for each GPU), DGX H100, H200 and B200 (400), and GB300 NVL72 (800). L40S has neither NVLink
# nor a machine of its own: PCIe, and 200 Gb/s.
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
    """FLOP/s in bf16 of cluster.gpu; null: of this machine's GPU. None where that is not known."""
    if gpu is None:
        import torch

        gpu = _name_in_gpus(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    known = GPUS.get(gpu)
    return known.speed.bf16 if known and known.speed else None


def _name_in_gpus(device: str) -> str | None:
    """device: as CUDA calls it, such as `NVIDIA H100 80GB HBM3`. Those for PCIe are slower than what GPUS has, but for L40S."""
    if "PCIe" in device or "NVL" in device:
        return None
    return next((name for name in GPUS if name.split("-")[0].upper() in re.split(r"[\s-]", device)), None)


@dataclass(frozen=True)
class Capabilities:
    """What is known of the machines of a run. What is not known is not held against a configuration.

    where: for messages, such as `here`. gpus: whether ranks and engines run on GPUs; None: not known.
    gpu: None if there is none, or which one is not known. transformer_engine_problem: why TransformerEngine
    cannot be used, as far as is known. nodes, gpus_per_node: None where not known.
    """

    where: str
    gpus: bool | None = None
    gpu: GPU | None = None
    transformer_engine_problem: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None

    @classmethod
    def of_this_machine(cls) -> "Capabilities":
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
        """The values of cluster.gpu, cluster.nodes and cluster.gpus_per_node, all of which may be unknown.

        gpu: `none`, a name of GPUS, or another one, of which nothing is known. TransformerEngine is taken to be installed where
        there are GPUs; a rank without it says so as it starts.
        """
        if gpu is None:
            return cls("in the cluster", nodes=nodes, gpus_per_node=gpus_per_node)
        where = f"with cluster.gpu={gpu}"
        if gpu == "none":
            return cls(where, False, None, _WITHOUT_CUDA, nodes)
        return cls(where, True, GPUS.get(gpu), None, nodes, gpus_per_node)

    def emulating(self, emulate_kernels: bool) -> "Capabilities":
        """With TransformerEngine's kernels emulated on the CPU, if that is configured: a Hopper GPU, as far as layers can tell."""
        if not emulate_kernels:
            return self
        problem = "this is for machines without a GPU" if self.gpus else emulated_transformer_engine()[1]
        return replace(self, gpu=GPUS["h100-80g"], transformer_engine_problem=problem)

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all nodes; None where not known, or where there are none."""
        return self.nodes * self.gpus_per_node if self.nodes and self.gpus_per_node else None

    @property
    def fp8_problem(self) -> str | None:
        """Why FP8 training is not possible; None if it is, as far as is known."""
        if self.transformer_engine_problem:
            return self.transformer_engine_problem
        if self.gpu is None or self.gpu.compute_capability >= FP8_CAPABILITY:
            return None
        major, minor = self.gpu.compute_capability
        return f"FP8 needs compute capability 8.9 (Ada) or 9.0 (Hopper), this GPU has {major}.{minor}"


_WITHOUT_CUDA = "TransformerEngine needs CUDA, which is not available"


def emulated_transformer_engine() -> tuple[Path, str | None]:
    """(folder with the Python of TransformerEngine, why it cannot be used or None)"""
    if not (_UNPACKED / "transformer_engine").is_dir():
        return (
            _UNPACKED,
            f"the wheel of transformer_engine {_EMULATED_RELEASE} is not unpacked in {_UNPACKED} (make install does that)",
        )
    return _UNPACKED, None


def _transformer_engine_problem(installed: str | None, gpus: bool) -> str | None:
    """installed: its version, None if it is not."""
    if installed is None:
        return "TransformerEngine is not installed"
    first, beyond = TRANSFORMER_ENGINE_RELEASES
    if not first <= release(installed) < beyond:
        return f"TransformerEngine {installed} does not fit megatron-core 0.16.1, which takes 2.9 to 2.11"
    return None if gpus else _WITHOUT_CUDA


def version(package: str) -> str | None:
    """Installed version, without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    digits = text.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)
