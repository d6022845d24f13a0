"""Prompts: records through the chat template into tokens, and the order they are handed out in."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.schema import OverlongPrompts
from grpo_megatron.data.records import read_records
from grpo_megatron.errors import UserError


class PromptTokenizer:
    """Chat messages (or a plain string, taken as the user's message) -> prompt tokens.

    The tokenizer's own chat template is used, with the generation prompt.
    """

    def __init__(self, model_path: str):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        if not self.tokenizer.chat_template:
            raise UserError(f"{model_path}: the tokenizer has no chat template, which prompts need")

    def text(self, prompt: str | list[dict[str, str]], system: str | None = None) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None and (not messages or messages[0].get("role") != "system"):
            messages.insert(0, {"role": "system", "content": system})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids; the template has put in whatever special tokens it wants."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def decode_all(self, ids: np.ndarray) -> str:
        """Special tokens too."""
        return self.tokenizer.decode(ids.tolist())


def as_list(value: Any) -> list[str]:
    """data.train and data.eval: one source, or a list of them."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def prompt_text(record: dict[str, Any], tokenizer: PromptTokenizer, config, where: str) -> str:
    """The templated prompt of a record; config: config.schema.DataConfig."""
    prompt = record[config.prompt_key]
    if isinstance(prompt, str):
        prompt = f"{prompt}{config.prompt_suffix}"
    elif not (isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)):
        raise UserError(
            f"{where}: field {config.prompt_key!r} must be a string or a list of messages with role and content, "
            f"is {str(prompt)[:60]!r}"
        )
    return tokenizer.text(prompt, config.system_prompt)


def load_prompts(source: str, tokenizer: PromptTokenizer, config, first_uid: int = 0) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of one source, tokenized, and how many were skipped or truncated for their length.

    config: config.schema.DataConfig. uid counts records from first_uid. Raises UserError for an
    overlong prompt under data.overlong_prompts=error, and if none is left.
    """
    prompts, counts = [], {"skipped": 0, "truncated": 0}
    name = re.sub(r"[^\w.-]+", "_", Path(source).stem)  # becomes part of file names and metric tags
    for number, record in enumerate(read_records(source, [config.prompt_key, config.answer_key])):
        where = f"{source}: record {number}"
        text = prompt_text(record, tokenizer, config, where)
        ids = tokenizer.encode(text)
        if len(ids) > config.max_prompt_length:
            if config.overlong_prompts == OverlongPrompts.error:
                raise UserError(
                    f"{where} has {len(ids)} tokens, more than data.max_prompt_length={config.max_prompt_length}; raise that, "
                    "or set data.overlong_prompts to skip or truncate_left"
                )
            if config.overlong_prompts == OverlongPrompts.skip:
                counts["skipped"] += 1
                continue
            counts["truncated"] += 1
            ids = ids[-config.max_prompt_length :]
        fields = {key: value for key, value in record.items() if key not in (config.prompt_key, config.answer_key)}
        prompts.append(Prompt(first_uid + number, ids, text, str(record[config.answer_key]), fields, name))
    if not prompts:
        raise UserError(f"{source}: no prompt is left, all {counts['skipped']} are longer than data.max_prompt_length")
    return prompts, counts


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
        return {"epoch": self.epoch, "position": self.position, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict) -> None:
        saved = (state["size"], state["seed"], state["shuffle"])
        if saved != (self.size, self.seed, self.shuffle):
            raise UserError(
                "the checkpoint's data had {} records, seed {} and shuffle={}, now {}, {} and {}; the order of the rest of the "
                "epoch would be another".format(*saved, self.size, self.seed, self.shuffle)
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._make_order()


class PromptSource:
    """Hands out the training prompts of one or several sources; the orders are its state.

    Without weights all sources form one data set, each prompt once per epoch. With weights every
    source has its own order and supplies its share of what is handed out, to within one prompt.
    """

    def __init__(self, sources: list[list[Prompt]], seed: int, shuffle: bool, weights: list[float] | None = None):
        if weights:
            self._sources, total = sources, sum(weights)
            self._shares = [weight / total for weight in weights]
        else:
            self._sources, self._shares = [[prompt for source in sources for prompt in source]], [1.0]
        self._orders = [EpochOrder(len(source), seed + i, shuffle) for i, source in enumerate(self._sources)]
        self._taken = [0] * len(self._sources)

    def next(self, count: int) -> list[Prompt]:
        handed_out = []
        for _ in range(count):
            total = sum(self._taken) + 1
            behind = [share * total - taken for share, taken in zip(self._shares, self._taken, strict=True)]
            source = behind.index(max(behind))
            self._taken[source] += 1
            handed_out.append(self._sources[source][self._orders[source].take(1)[0]])
        return handed_out

    @property
    def epoch(self) -> int:
        """Of the source that is furthest."""
        return max(order.epoch for order in self._orders)

    def state_dict(self) -> dict:
        return {"orders": [order.state_dict() for order in self._orders], "taken": self._taken}

    def load_state_dict(self, state: dict) -> None:
        if len(state["orders"]) != len(self._orders):
            raise UserError(f"the checkpoint's data had {len(state['orders'])} sources, now {len(self._orders)}")
        for order, saved in zip(self._orders, state["orders"], strict=True):
            order.load_state_dict(saved)
        self._taken = list(state["taken"])
