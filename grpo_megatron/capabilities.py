"""What this machine can do. Asked on the machine that will do it, or where a check is made on its behalf."""

from importlib import metadata


def version(package: str) -> str | None:
    """Installed version, without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    digits = text.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)


def transformer_engine_problem() -> str | None:
    """Why FP8 training and the TransformerEngine layers are not possible here; None if they are."""
    have = version("transformer_engine") or version("transformer-engine")
    if have is None:
        return "TransformerEngine is not installed"
    if not (2, 9) <= release(have) < (2, 12):
        return f"TransformerEngine {have} does not fit megatron-core 0.16.1, which takes 2.9 to 2.11"
    import torch

    if not torch.cuda.is_available():
        return "TransformerEngine needs CUDA, which is not available"
    return None


def fp8_problem() -> str | None:
    """Why FP8 training is not possible here; None if it is."""
    problem = transformer_engine_problem()
    if problem:
        return problem
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9 (Ada) or 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
    return None
