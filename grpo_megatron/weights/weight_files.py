"""Functions that find the safetensors files of an HF folder, and report other weight files beside them."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import read_object
from grpo_megatron.model.gguf_advice import gguf_advice
from grpo_megatron.paths import file_problem, is_absent
from grpo_megatron.weights.pickled import pickled_weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMED = 5  # maximum number of files or tensors that a message names


def some(names: list[str], separator: str = ", ") -> str:
    """Return the first five names as text for a message, such as "a, b, c, d, e (and 3 more)".

    Names of more than 150 characters are shortened.
    """
    more = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    return separator.join(shortened(name, 150) for name in names[:_NAMED]) + more


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file, and return the safetensors library's handle that reads its tensors.

    Raises UserError if the file is missing, unreadable, truncated or in another format.
    """
    if problem := file_problem(path):
        raise UserError(f"{path} {problem}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({shortened(error, 200)}); it is truncated or not a safetensors "
            "file; copy or download it again"
        ) from error


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Return {tensor name: path of the safetensors file that contains it} for an HF folder.

    The names come from the index, or from model.safetensors if there is no index.

    Raises UserError if there are no weights, if a file is missing or damaged, or if a file lacks a tensor
    that the index lists. Raises UserError also if the folder has two sets of weights, such as
    model.safetensors beside the files of an index. transformers and SGLang could then load different sets, so
    trainer and engine would have different models.
    """
    if is_absent(folder / INDEX):
        if is_absent(folder / SINGLE):
            raise UserError(f"{folder} {_without_weights(folder)}")
        found = dict.fromkeys(open_safetensors(folder / SINGLE).keys(), folder / SINGLE)
        _refuse_second_set(folder, found)
        return found
    promised = _read_index(folder / INDEX)
    missing = sorted({name for name in promised.values() if is_absent(folder / name)})
    if SINGLE not in promised.values() and not is_absent(folder / SINGLE):
        stale = (
            f"; the index lists files that are missing ({some(missing)}), so it is probably from another "
            "export"
            if missing
            else ""
        )
        raise UserError(
            f"{folder} contains two sets of weights: {SINGLE} and the {len(set(promised.values()))} files "
            f"that {INDEX} lists{stale}. "
            f"Move one set out of the folder: {SINGLE}, or {INDEX} and its files"
        )
    if missing:
        raise UserError(
            f"{folder} is incomplete: {INDEX} lists files that are missing ({some(missing)}); copy or "
            "download the checkpoint again"
        )
    found = {tensor: folder / name for tensor, name in promised.items()}
    present = {path: set(open_safetensors(path).keys()) for path in sorted(set(found.values()))}
    for tensor, path in found.items():
        if tensor not in present[path]:
            raise UserError(
                f"{path}: tensor {shortened(tensor)} is missing, although {INDEX} lists it; copy or download "
                "the checkpoint again"
            )
    return found


def names_in_files(folder: Path) -> set[str]:
    """Return the names of all tensors of an HF folder, or an empty set if the folder has no safetensors.

    Unlike `files_of_tensors`, this does not check the files. Raises UserError if the index is damaged, or
    model.safetensors without an index.
    """
    if not is_absent(folder / INDEX):
        return set(_read_index(folder / INDEX))
    return set() if is_absent(folder / SINGLE) else set(open_safetensors(folder / SINGLE).keys())


def weights_beside(folder: Path, found: dict[str, Path]) -> str | None:
    """Return a message that names the unread weight files in a folder; None if every weight file is read.

    Weight files are safetensors files and pickles (pytorch_model*.bin).

    folder: an HF checkpoint folder.
    found: {tensor name: path of its file}, the result of `files_of_tensors`.
    """
    read = {path.name for path in found.values()}
    others = sorted(
        path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern)
    )
    others = [name for name in others if name not in read]
    if not others:
        return None
    what = SINGLE if read == {SINGLE} else f"the {len(read)} files that {INDEX} lists"
    return f"{folder}: the weights are read from {what}, not from {some(others)} in the same folder"


def _read_index(index: Path) -> dict[str, str]:
    """Return {tensor: file name} from an index file. Raises UserError if the file is not a valid index."""
    promised = read_object(index).get("weight_map")
    if not isinstance(promised, dict):
        raise UserError(f"{index}: weight_map must be an object that maps tensors to file names")
    for tensor, name in promised.items():
        if not isinstance(name, str):
            raise UserError(
                f"{index}: weight_map.{shortened(tensor)} must be a file name, but is {shortened(repr(name))}"
            )
    return promised


def _refuse_second_set(folder: Path, found: dict[str, Path]) -> None:
    """Raise UserError if another safetensors file in the folder has tensors that model.safetensors also has.

    The check is for a folder without an index. SGLang reads all safetensors files of such a folder, and uses
    the last copy of a tensor that it reads.

    found: {tensor name: path of model.safetensors} of all tensors in model.safetensors.
    """
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != SINGLE and not found.keys().isdisjoint(open_safetensors(path).keys()):
            raise UserError(
                f"{folder} contains two sets of weights: {SINGLE} and {path.name} have the same tensors, and "
                f"there is no {INDEX} that says which to read. Move one of them out of the folder"
            )


def _without_weights(folder: Path) -> str:
    if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
        return f"contains {some(shards)} but not {INDEX}, which lists their tensors; copy or download {INDEX}"
    return (
        pickled_weights(folder)
        or gguf_advice(folder)
        or f"contains neither {INDEX} nor {SINGLE}; give the folder of a complete HF checkpoint"
    )
