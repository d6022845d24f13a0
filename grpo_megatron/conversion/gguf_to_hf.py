"""Conversion of a GGUF file to an HF checkpoint: dequantised weights, config.json, and the tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from tqdm import tqdm

from grpo_megatron.conversion.partial_folder import refuse_existing, refuse_unfinished
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import json_text, writing
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.paths import folder_problem
from grpo_megatron.weights import hf_writer
from grpo_megatron.weights.gguf_file import GGUFFile

# tokenizer.ggml.pre names the rule that splits a text into words before merging. Listed are the rules that
# transformers knows for the models that can be converted, and one (_SMOLLM) that this module adds.
_SMOLLM = "smollm"
_KNOWN_SPLITS = (
    "default",
    "gpt-2",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "qwen2",
    "deepseek-r1-qwen",
    "tekken",
    _SMOLLM,
)


def gguf_to_hf(source: str, target: str, dtype: torch.dtype, tokenizer: str | None = None) -> int:
    """Convert a model from a GGUF file (llama.cpp) to an HF checkpoint. Return its number of parameters.

    source: path of the GGUF file.
    target: folder of the HF checkpoint. It must be empty or absent.
    dtype: dtype of the written tensors.
    tokenizer: folder with an HF tokenizer to use instead of the tokenizer in the file.

    The files are written to the folder `target`.partial, which is renamed to `target` at the end. If
    `target`.partial exists before, its content is deleted. After an error, the folder is deleted too.

    Raises UserError if the file is damaged, or if its model or tokenizer cannot be converted. Raises
    UserError also if `target` is not empty, if `target`.partial belongs to an unfinished conversion of
    another kind, or if the files cannot be written.
    """
    refuse_existing(target)
    partial = f"{target}.partial"
    refuse_unfinished(partial)
    file = GGUFFile(source)
    with writing(partial):
        hf_writer.start(partial, target, source)
        try:
            _write_companions(file, partial, dtype, tokenizer)
            arch = read_architecture(partial)
            hf_writer.finish(partial, _write_tensors(file, partial, arch, dtype), target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return sum(entry.numel for entry in weight_map(arch).values() if entry.exported)


def _write_tensors(
    file: GGUFFile, folder: str, arch: Architecture, dtype: torch.dtype
) -> list[tuple[str, dict[str, int]]]:
    """Write all tensors of the model into `folder`, as shards of at most 1 GiB.

    Return [(file name of the shard, {tensor name: bytes})], from which the checkpoint's index is made.

    arch: architecture of the model, whose tensors the file must have.
    dtype: dtype of the written tensors.

    Raises UserError if a tensor is missing or has the wrong shape, or if the file has further tensors.
    """
    writer = hf_writer.HFWriter(folder, "0", max_shard_bytes=2**30)
    shapes = hf_shapes(weight_map(arch))
    for name, shape in tqdm(shapes.items(), desc=file.path, unit="tensor", disable=None):
        values = file.read(name, arch)
        if values.shape != shape:
            raise UserError(
                f"{file.path}: {name} has shape {tuple(values.shape)}, but the metadata requires {shape}; "
                "use the model's HF checkpoint"
            )
        writer.add(name, values.to(dtype))
    if file.unread:
        raise UserError(
            f"{file.path} contains tensors that do not belong to a {arch.family} model "
            f"({', '.join(file.unread[:5])}); use the model's HF checkpoint"
        )
    return writer.close()


def _write_companions(file: GGUFFile, folder: str, dtype: torch.dtype, tokenizer: str | None) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into `folder`.

    dtype: dtype of the written weights, for config.json.
    tokenizer: folder with an HF tokenizer to use instead of the tokenizer in the GGUF file.

    Raises UserError if the metadata cannot be converted, or if the folder `tokenizer` has no tokenizer.
    """
    config = file.config() | {"dtype": str(dtype).removeprefix("torch.")}
    Path(folder, "config.json").write_text(json_text(config, indent=2), encoding="utf-8")
    if tokens := file.special_tokens():
        Path(folder, "generation_config.json").write_text(json_text(tokens, indent=2), encoding="utf-8")
    if tokenizer is None:
        _make_tokenizer(file).save_pretrained(folder)
        return
    if problem := folder_problem(tokenizer):
        raise UserError(f"{tokenizer} {problem}; --tokenizer must be a folder with an HF tokenizer")
    found = [
        path for path in Path(tokenizer).iterdir() if path.suffix in (".json", ".jinja", ".model", ".txt")
    ]
    copied = [
        path
        for path in found
        if path.name not in ("config.json", "generation_config.json") and "index" not in path.name
    ]
    if not any(path.name.startswith(("tokenizer", "vocab")) for path in copied):
        raise UserError(
            f"{tokenizer} contains no tokenizer; --tokenizer must be a folder with an HF tokenizer"
        )
    for path in copied:
        shutil.copyfile(path, Path(folder, path.name))


def _make_tokenizer(file: GGUFFile):
    """Return the GGUF file's tokenizer and chat template as a transformers tokenizer.

    Raises UserError if transformers cannot read the tokenizer, or if the tokenizer splits a text into words
    by a rule (tokenizer.ggml.pre) that is not supported.
    """
    from transformers import AutoTokenizer

    split = file.value("tokenizer.ggml.pre") or "default"
    if split not in _KNOWN_SPLITS:
        raise UserError(
            f"{file.path}: the tokenizer's pre-tokenizer {shortened(split)} is not supported; give the "
            "folder of the model's HF tokenizer with --tokenizer"
        )
    path = Path(file.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # transformers raises whatever the file's metadata leads to
        raise UserError(
            f"{file.path}: transformers cannot read the tokenizer ({shortened(error, 200)}); give the folder "
            "of the model's HF tokenizer with --tokenizer"
        ) from error
    if template := file.value("tokenizer.chat_template"):
        tokenizer.chat_template = template
    return _corrected(file, tokenizer)


def _corrected(file: GGUFFile, tokenizer):
    """Return a copy of a tokenizer without the errors that transformers 5.19 makes when it reads a GGUF file.

    Added tokens with ids beyond the vocabulary are removed. For SmolLM, the splitting of numbers into digits
    is added. If the file requires a BOS token before each text, the copy adds the token.

    tokenizer: the tokenizer that transformers has read from the file.
    """
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # transformers adds GPT-2's <|endoftext|> to every GPT-2 tokenizer. If the file lacks that token, its id
    # lies beyond the vocabulary.
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    count = len(file.value("tokenizer.ggml.tokens"))
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < count]
    backend = Tokenizer.from_str(json_text(described))
    if file.value("tokenizer.ggml.pre") == _SMOLLM:  # transformers does not split numbers into digits first
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    names = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    bos = names.get("bos_token")
    if file.value("tokenizer.ggml.add_bos_token") and bos and backend.encode("a").tokens[:1] != [bos]:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=tokenizer.chat_template, **names)
