"""Detection of pickled weights. They are refused, because loading a pickle can run arbitrary code."""

from pathlib import Path

_HF = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_LEGACY_MEGATRON = "mp_rank_[0-9]*"


def pickled_weights(folder: str | Path) -> str | None:
    """Return an error text about the pickled weights in a folder; None if the folder has no pickled weights.

    The text also says how to convert the weights safely. It begins with a verb ("contains ..." or "stores
    ..."), so that the caller can put the name of the folder before it.
    """
    root = Path(folder)
    legacy = sorted(
        path for depth in ("", "*/") for path in root.glob(depth + _LEGACY_MEGATRON) if path.is_dir()
    )
    if legacy:
        return (
            f"contains {legacy[0].relative_to(root)}/, a checkpoint in Megatron-LM's legacy format with one "
            "pickle per rank; to convert it, run Megatron-LM's training script in the layout that saved the "
            "checkpoint, with --load, --ckpt-convert-format torch_dist and --ckpt-convert-save OUT, then use "
            "OUT/iter_XXXXXXX"
        )
    pickles = sorted(path.name for pattern in _HF for path in root.glob(pattern))
    if pickles:
        return (
            f"stores its weights in a pickle ({pickles[0]}), which can run arbitrary code when it is loaded; "
            "if you trust the source, convert the weights to safetensors once, with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(OUT)"
        )
    return None
