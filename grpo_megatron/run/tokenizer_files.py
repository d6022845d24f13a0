"""The files that decide which tokens a text becomes, and whether they have changed since a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from grpo_megatron.config.schema import Config
from grpo_megatron.files import reading
from grpo_megatron.run.manifest import record_of

# Files of a model's folder that transformers reads for a tokenizer and its chat template.
_PATTERNS = (
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template*", "*.model", "*.tiktoken"),
)


def tokenizer_digests(config: Config) -> dict[str, str]:
    """Return {file: digest} of the tokenizer's files in model.path, and of data.chat_template.

    Raises UserError if one of them cannot be read.
    """
    files = {path.name: path for pattern in _PATTERNS for path in Path(config.model.path).glob(pattern)}
    files["data.chat_template"] = Path(config.data.chat_template)
    digests = {}
    for name, path in files.items():
        if path.is_file():
            with reading(path):
                digests[name] = record_of(path).digest
    return digests


def tokenizer_changes(saved: Mapping[str, str] | None, config: Config) -> str:
    """Return a warning that names the files that have changed since a checkpoint; "" if there are none.

    saved: what `tokenizer_digests` returned for the checkpoint; None for one of an earlier version.
    config: the configuration of the run that continues.
    """
    if saved is None:
        return ""
    now = tokenizer_digests(config)
    changed = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    if not changed:
        return ""
    return (
        f"files of the tokenizer or chat template have changed since the checkpoint: {', '.join(changed)}; "
        "unless texts become the same tokens as before, go back to the earlier files, or start a new run"
    )
