"""Prompts from JSONL files."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batch import Prompt
from grpo_megatron.errors import UserError


def read_jsonl(path: str, required: list[str]) -> list[dict[str, Any]]:
    """All records of a JSONL file, every one checked. Raises UserError naming file and line."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path} does not exist")
    records = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: expected an object, got {type(record).__name__}")
            for key in required:
                if key not in record:
                    raise UserError(f"{path}:{number}: field {key!r} is missing; the record has {', '.join(map(repr, record))}")
            records.append(record)
    if not records:
        raise UserError(f"{path} has no records")
    return records


class PromptTokenizer:
    """Chat messages (or a plain string, taken as the user's message) -> prompt tokens.

    The tokenizer's own chat template is used, with the generation prompt.
    """

    def __init__(self, model_path: str):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        if not self.tokenizer.chat_template:
            raise UserError(f"{model_path}: the tokenizer has no chat template")

    def text(self, prompt: str | list[dict[str, str]]) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids; the template has put in whatever special tokens it wants."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def load_prompts(path: str, tokenizer: PromptTokenizer, config) -> list[Prompt]:
    """All prompts of a file, tokenized; config: config.schema.DataConfig. uid: the record's number."""
    records = read_jsonl(path, [config.prompt_key, config.answer_key])
    prompts = []
    for uid, record in enumerate(records):
        text = tokenizer.text(record[config.prompt_key])
        ids = tokenizer.encode(text)
        if len(ids) > config.max_prompt_length:
            raise UserError(
                f"{path}: record {uid} has {len(ids)} tokens, more than data.max_prompt_length={config.max_prompt_length}; "
                "raise that, or remove the record"
            )
        fields = {key: value for key, value in record.items() if key not in (config.prompt_key, config.answer_key)}
        prompts.append(Prompt(uid, ids, text, str(record[config.answer_key]), fields))
    return prompts


class EpochOrder:
    """Endless indices 0..size-1, each once per epoch; the order depends on seed and epoch alone."""

    def __init__(self, size: int, seed: int, shuffle: bool):
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch, self.position = 0, 0
        self._order = self._make_order()

    def _make_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._make_order()
            part = self._order[self.position : self.position + count - len(taken)]
            self.position += len(part)
            taken += part.tolist()
        return taken

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict) -> None:
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise UserError(
                f"the checkpoint's data had {state['size']} records and seed {state['seed']}, now {self.size} and {self.seed}; "
                "the order of the rest of the epoch would be another"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._make_order()


class PromptSource:
    """Hands out the training prompts; epoch and position are its state."""

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool):
        self.prompts = prompts
        self._order = EpochOrder(len(prompts), seed, shuffle)

    def next(self, count: int) -> list[Prompt]:
        return [self.prompts[i] for i in self._order.take(count)]

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def state_dict(self) -> dict:
        return self._order.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._order.load_state_dict(state)
