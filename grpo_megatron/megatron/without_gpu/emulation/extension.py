"""Replacement for `transformer_engine_torch`, the compiled extension of TransformerEngine 2.11, on a CPU.

Its enumerations have the values of the real ones. Its functions are the emulated kernels. Any other name can
be imported too, but raises NotImplementedError when it is called.
"""

import enum
import importlib.machinery
import sys
import types
from collections.abc import Callable

_QKV_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD"
)


def _numbered(name: str, members: str, first: int = 0) -> type[enum.IntEnum]:
    return enum.IntEnum(name, members.split(), start=first)


def _prefixed(name: str, members: str, first: int = 0) -> type[enum.IntEnum]:
    return _numbered(name, " ".join(f"NVTE_{member}" for member in members.split()), first)


DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
MaskType = _prefixed(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
FusedAttentionBackend = _prefixed(
    "NVTE_Fused_Attn_Backend", "No_Backend F16_max512_seqlen F16_arbitrary_seqlen FP8", first=-1
)
QKVFormat = _prefixed("NVTE_QKV_Format", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD")
BlockScaleFormat = _numbered("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT")

_ENUMERATIONS = (
    DType,
    MaskType,
    FusedAttentionBackend,
    QKVFormat,
    BlockScaleFormat,
    _numbered(
        "FP8FwdTensors",
        " ".join(f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")),
    ),
    _numbered(
        "FP8BwdTensors", " ".join(f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT"))
    ),
    _numbered("CommOverlapType", "RS AG"),
    _prefixed("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI"),
    _prefixed("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX"),
    _prefixed("NVTE_QKV_Layout", _QKV_LAYOUTS),
)


class _Missing:
    """Placeholder for a function or class that is not emulated. Calling it raises NotImplementedError."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is not emulated on a CPU; use a machine with a GPU")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class MissingModule(types.ModuleType):
    """Placeholder for a module that is imported but not used.

    The constructor registers the module in sys.modules. Every name can be read from the module, but raises
    NotImplementedError when it is called.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class Extension(MissingModule):
    """Module that is imported in place of `transformer_engine_torch`, TransformerEngine's compiled extension.

    functions: {name in the extension: emulated function}.
    calls: {name of an emulated function: number of its calls}. Tests read this to see which kernels ran.
    """

    def __init__(self, functions: dict[str, Callable]):
        super().__init__("transformer_engine_torch")
        self.calls = dict.fromkeys(functions, 0)
        for enumeration in _ENUMERATIONS:
            setattr(self, enumeration.__name__, enumeration)
        # These names occur only in annotations, and as base classes of classes that are not used here.
        for name in (
            "CommOverlapCore",
            "CommOverlapBase",
            "CommOverlap",
            "CommOverlapP2P",
            "CommOverlapHelper",
            "FP8TensorMeta",
        ):
            setattr(self, name, type(name, (), {}))
        self.get_cublasLt_version = lambda: 130000
        self.get_cudnn_version = lambda: 91500
        self.get_num_cublas_streams = lambda: 4
        for name, function in functions.items():
            setattr(self, name, self._counted(name, function))
        self.__all__ = [name for name in vars(self) if not name.startswith("_") and name != "calls"]

    def _counted(self, name: str, function: Callable) -> Callable:
        def counted(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        return counted
