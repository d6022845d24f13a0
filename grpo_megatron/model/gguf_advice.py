"""GGUF files, the format of llama.cpp, are not loaded: a tool converts them once to an HF checkpoint."""

from pathlib import Path


def gguf_advice(path: str | Path) -> str | None:
    """The end of a sentence that says which GGUF file `path` is or holds and how to convert it; None if there is none.

    A folder counts only if it holds no safetensors: many published folders have GGUF files beside them.
    """
    root = Path(path)
    try:
        if root.suffix == ".gguf" and root.is_file():
            files = [root]
        else:
            files = [] if any(root.glob("*.safetensors*")) else sorted(root.glob("*.gguf"))
    except (OSError, ValueError):
        return None  # the caller's own message says what is wrong with the path
    if not files:
        return None
    what = (
        "is a GGUF file"
        if files[0] == root
        else f"holds GGUF files only ({', '.join(file.name for file in files[:5])})"
    )
    return f"{what}; convert it to an HF checkpoint by `python tools/convert_gguf_to_hf.py {files[0]} OUT_DIR`, and name OUT_DIR instead"
