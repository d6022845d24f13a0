"""Advice for users who name a GGUF file, the format of llama.cpp, as their model.

grpo_megatron does not load GGUF files. tools/convert_gguf_to_hf.py converts them to an HF checkpoint.
"""

from pathlib import Path


def gguf_advice(path: str | Path) -> str | None:
    """Return advice on converting a model if `path` is a GGUF file or a folder of GGUF files, else None.

    The advice continues an error message that begins with the path. It names the files and the conversion
    command. The result is None for a folder that also has safetensors files, because nothing needs to be
    converted there, and for a path that cannot be read.
    """
    root = Path(path)
    try:
        if root.suffix == ".gguf" and root.is_file():
            files = [root]
        else:
            files = [] if any(root.glob("*.safetensors*")) else sorted(root.glob("*.gguf"))
    except (OSError, ValueError):
        return None  # the caller reports what is wrong with the path
    if not files:
        return None
    what = (
        "is a GGUF file"
        if files[0] == root
        else f"contains only GGUF files ({', '.join(file.name for file in files[:5])})"
    )
    return (
        f"{what}; convert it to an HF checkpoint with `python tools/convert_gguf_to_hf.py {files[0]} "
        "OUT_DIR`, and use OUT_DIR instead"
    )
