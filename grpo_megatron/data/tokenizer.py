"""The prompt tokenizer.

It turns the prompts of records into text and token ids, with the chat template if there is one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.decoder import Decoder, end_tokens
from grpo_megatron.data.messages import chat_in_text, chat_messages
from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError
from grpo_megatron.files import read_object

FROM_TOKENIZER, NO_TEMPLATE = "tokenizer", "none"
# Arguments of apply_chat_template that change the form of its result, not the text. data.chat_template_args
# may not set them.
_OURS = (
    "conversation",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "continue_final_message",
)
_STAND_IN = "-- the model's turn --"

Tools = list[dict[str, Any]] | None


class PromptTokenizer:
    """The tokenizer of prompts. It follows data.chat_template and accepts these forms of a prompt:

    - A string with a chat template: the string is the user's message, and the generation prompt is added.
    - A string without a chat template: the model continues the text. The tokenizer's own prefix (BOS) is put
      before it, but no end token is put after it.
    - A list of messages, or a string that contains such a list as JSON: a chat. It needs a chat template.
    - A list of integers: token ids, used unchanged.
    """

    def __init__(self, model_path: str, data: DataConfig | None = None, tools: Sequence[dict[str, Any]] = ()):
        """Load the tokenizer of a model folder and check the settings against it.

        data: section `data` of the configuration, for chat template, system prompt and suffix. None means the
            defaults.
        tools: JSON schemas of the functions that the model may call in every prompt. The template shows them.

        Raises UserError if the tokenizer cannot be used, or if the settings contradict it.
        """
        data = data or DataConfig()
        self.tokenizer = load_tokenizer(model_path)
        self.vocab_size = _vocab_size(model_path, self.tokenizer)
        self._system, self._suffix = data.system_prompt, data.prompt_suffix
        self.template = _template(model_path, self.tokenizer, data, tools)
        self._beginning = self._put_before_texts()
        # SentencePiece tokenizers put a space before a text, but not before a part inside a text.
        self._depends_on_text_before = self._behind("\n", "a") != self._ids("a")
        if self.template and self._system is not None:
            self._check_system_prompt()
        self.turn_ends = self._ends_of_template()
        self.decoder = Decoder(self.tokenizer, {*self.turn_ends, *end_tokens(self.tokenizer, model_path)})

    def prompt(self, prompt: Any, where: str, tools: Tools = None) -> tuple[str, np.ndarray]:
        """Return (text, ids) of a prompt. The ids are int32 [P], P > 0.

        where: place of the record, named in error messages.
        tools: JSON schemas of the tools that the record offers.

        Raises UserError if the prompt cannot be used.
        """
        if _are_ids(prompt):
            return self._given_ids(prompt, where, tools)
        messages = self.messages(prompt, where)
        if messages is not None:
            return self.chat_prompt(messages, where, tools)
        if tools:
            raise UserError(
                f"{where}: the record offers tools (data.tools_key), which need a chat template, but "
                "data.chat_template=none; set data.tools_key=null, or use a template"
            )
        text = f"{prompt}{self._suffix}"
        return text, self._some(self._encode_with_beginning(text), text, where)

    def chat_prompt(
        self, messages: list[dict[str, Any]], where: str, tools: Tools = None
    ) -> tuple[str, np.ndarray]:
        """Return (text, int32 ids) of a prompt that is a chat. messages: what `self.messages` returned."""
        text = self._needed_template().prompt(messages, where, tools)
        if not text.strip():
            raise UserError(f"{where}: the prompt is empty after the chat template was applied")
        self._must_be_plain(messages, text, where)
        return text, self._some(self.encode(text), text, where)

    def text(self, prompt: Any, where: str = "the prompt") -> str:
        """Return the text of a prompt as it is tokenized. prompt: text, list of messages or token ids."""
        return self.prompt(prompt, where)[0]

    def messages(self, prompt: Any, where: str = "the prompt") -> list[dict[str, Any]] | None:
        """Return the messages of a prompt, with the system prompt and the suffix added.

        Returns None for token ids, and for plain text if there is no chat template.
        """
        if _are_ids(prompt):
            return None
        given = prompt
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError(f"{where}: the prompt is empty")
            given = chat_in_text(prompt, where)
            if given is None and not self.template:
                return None
            given = given or [{"role": "user", "content": prompt}]
        messages = chat_messages(given, where)
        if not self.template:
            raise UserError(
                f"{where}: the prompt is a list of chat messages, but data.chat_template=none; give a "
                "string or token ids, or set data.chat_template=tokenizer or data.chat_template=FILE"
            )
        if self._system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._system})
        return self._with_suffix(messages, where) if self._suffix else messages

    def _with_suffix(self, messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not asked:
            raise UserError(
                f"{where}: the prompt has no user message to which data.prompt_suffix could be appended; "
                "add one, or remove data.prompt_suffix"
            )
        last = messages[asked[-1]]
        messages[asked[-1]] = {**last, "content": f"{last['content']}{self._suffix}"}
        return messages

    def chat(self, messages: list[dict[str, Any]], where: str = "the prompt", tools: Tools = None) -> str:
        """Return the text of a chat whose last message is complete, plus the beginning of the next turn."""
        return self._needed_template().render(messages, where, tools)

    def after_turn(self, messages: list[dict[str, Any]], tools: Tools = None) -> np.ndarray:
        """Return the int32 ids from the end of one turn of the model to the beginning of its next turn.

        They contain the first turn's end token and `messages`, the messages between the two turns.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}, *messages]
        _, found, behind = self.chat(chat, "an observation", tools).partition(_STAND_IN)
        if not found:
            raise UserError(
                "the chat template changes the model's turns, so nothing can be appended to them; set "
                "rollout.history=template"
            )
        return self.encode(behind)

    def continued(self, ids: list[int], messages: list[dict[str, Any]], tools: Tools = None) -> list[int]:
        """Return `ids` plus all tokens up to the beginning of the model's next turn.

        ids: token ids of a chat, which end with a turn of the model.
        messages: messages that follow this turn, such as an environment's answer.
        """
        behind, shape = self.after_turn(messages, tools).tolist(), self._needed_template().shape
        end = self._ids(shape.closing) if shape.is_closed else behind[:1]
        # The model usually wrote the end of its turn itself. Then it is not added again.
        is_written = end == behind[: len(end)] == ids[len(ids) - len(end) :]
        return [*ids, *(behind[len(end) :] if is_written else behind)]

    def after_response(self) -> np.ndarray:
        """Return the int32 ids that follow a response in a finished conversation.

        Without a chat template, this is the tokenizer's end token, if it has one.
        """
        if self.template:
            return self.encode(self.template.shape.tail)
        end = self.tokenizer.eos_token_id
        return np.array([] if end is None else [end], dtype=np.int32)

    def closing(self, text: str, is_closed: bool, where: str) -> np.ndarray:
        """Return the int32 ids of `text`, which ends a turn of the model.

        text, is_closed: `closing` and `is_closed` of the turn (see chat_template.Turn). If `is_closed` is
            False, the tokenizer's end token is added.
        """
        end = self.tokenizer.eos_token_id
        if is_closed:
            return self.encode(text)
        if end is None:
            raise UserError(
                f"{where}: every response must end with an end token, but neither the chat template nor the "
                "tokenizer has one; set eos_token in the model's tokenizer_config.json"
            )
        return np.append(self.encode(text), np.int32(end))

    def encode(self, text: str) -> np.ndarray:
        """Return the int32 ids of exactly this text, without adding special tokens."""
        return np.array(self._ids(text), dtype=np.int32)

    def encode_behind(self, before: str, text: str) -> np.ndarray:
        """Return the int32 ids that the tokenizer gives `text` if the text `before` stands before it."""
        return np.array(
            self._behind(before, text) if self._depends_on_text_before else self._ids(text), dtype=np.int32
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _behind(self, before: str, text: str) -> list[int]:
        head, both = self._ids(before), self._ids(before + text)
        return both[len(head) :] if both[: len(head)] == head else self._ids(text)

    def _put_before_texts(self) -> list[int]:
        """Return the token ids that the tokenizer puts before every text, such as BOS."""
        alone, whole = self._ids("0"), self.tokenizer.encode("0")
        starts = [n for n in range(len(whole)) if whole[n : n + len(alone)] == alone]
        return whole[: starts[0]] if alone and starts else []

    def _encode_with_beginning(self, text: str) -> np.ndarray:
        ids = self._ids(text)
        if ids[: len(self._beginning)] != self._beginning:
            ids = [*self._beginning, *ids]
        return np.array(ids, dtype=np.int32)

    def _some(self, ids: np.ndarray, text: str, where: str) -> np.ndarray:
        if not len(ids):
            raise UserError(f"{where}: the prompt has no tokens: {shown(text)}")
        return ids

    def _must_be_plain(self, messages: list[dict[str, Any]], text: str, where: str) -> None:
        """Raise UserError if the first user message begins as if a template was already applied to it."""
        first = next((token for token in self.template.added_tokens if text.startswith(token)), None)
        asked = next((message["content"] for message in messages if message["role"] == "user"), None)
        if first and asked and asked.lstrip().startswith(first):
            raise UserError(
                f"{where}: a chat template has already been applied to the prompt, because it begins with "
                f"{first!r}; set data.chat_template=none, or give prompts without a template"
            )

    def _given_ids(self, ids: list[int], where: str, tools: Tools) -> tuple[str, np.ndarray]:
        wrong = [token_id for token_id in ids if not 0 <= token_id < self.vocab_size]
        if wrong:
            raise UserError(
                f"{where}: token id {shown(wrong[0])} of the prompt is outside the model's vocabulary (0 to "
                f"{self.vocab_size - 1})"
            )
        for key, value in (
            ("system_prompt", self._system),
            ("prompt_suffix", self._suffix or None),
            ("tools_key", tools),
        ):
            if value is not None:
                raise UserError(
                    f"{where}: data.{key} cannot be applied to token ids; remove it, or give text or messages"
                )
        array = np.array(ids, dtype=np.int32)
        return self.decode_all(array), array

    def _check_system_prompt(self) -> None:
        asked = {"role": "user", "content": "?"}
        try:
            with_it = self.chat([{"role": "system", "content": self._system}, asked])
            without = self.chat([asked])
        except UserError:
            return  # reported with the first record, for which the template may work
        if with_it == without:
            raise UserError(
                "data.system_prompt has no effect, because the chat template drops system messages; remove it"
            )

    def _ends_of_template(self) -> tuple[int, ...]:
        """Return (id,) of the token by which the template ends a turn, which need not be the tokenizer's.

        The result is () if the template ends turns without an added token, such as with a line break.
        """
        try:
            shape = self.template.shape if self.template else None
        except UserError:
            return ()  # reported where the turn shape is needed; not every run needs finished turns
        return tuple(self._ids(shape.closing)[-1:]) if shape and shape.is_closed else ()

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            raise UserError("messages need a chat template, but data.chat_template=none")
        return self.template

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of int32 ids without end and padding tokens. Worker processes use `decoder`."""
        return self.decoder(ids)

    def decode_all(self, ids: np.ndarray) -> str:
        """Return the text of int32 ids, including all special tokens."""
        return self.tokenizer.decode(ids.tolist())


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)


def load_tokenizer(model_path: str):
    """Load the tokenizer of a model folder with transformers. Raises UserError if the folder has none."""
    from transformers import AutoTokenizer

    if not Path(model_path).is_dir():
        raise UserError(f"{model_path} is not a folder; it must be a model folder with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # the library raises many kinds of errors
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{model_path}: the tokenizer cannot be loaded ({type(error).__name__}: {reason}); copy the "
            "model's tokenizer files into this folder again"
        ) from error
    # If a folder has no tokenizer files, the library creates an empty tokenizer of the model's type.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"{model_path} has no tokenizer (tokenizer.json, or another tokenizer file); copy the tokenizer "
            "files of the model into this folder"
        )
    return tokenizer


def _vocab_size(model_path: str, tokenizer) -> int:
    """Return the vocabulary size of the model, or of the tokenizer if the folder contains no model.

    A model may have more tokens than its tokenizer, because embeddings are padded to convenient sizes. Raises
    UserError if it has fewer.
    """
    needed = max(tokenizer.get_vocab().values()) + 1
    config = Path(model_path) / "config.json"
    size = read_object(config).get("vocab_size", needed) if config.is_file() else needed
    if needed > size:
        beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= size)
        names = ", ".join(repr(token) for _, token in beyond[:5]) + (", ..." if len(beyond) > 5 else "")
        raise UserError(
            f"{model_path}: the tokenizer has {needed} tokens, but the model has only {size} (vocab_size of "
            f"its config.json), so it cannot embed {names}; use the tokenizer that belongs to the model, or "
            "enlarge the model's embedding with resize_token_embeddings"
        )
    return size


def _template(
    model_path: str, tokenizer, data: DataConfig, tools: Sequence[dict[str, Any]]
) -> ChatTemplate | None:
    """Return the chat template that data.chat_template selects; None for data.chat_template=none.

    Raises UserError if the template is missing or unreadable, or if settings contradict each other.
    """
    text = _template_text(model_path, tokenizer, data)
    return (
        None
        if data.chat_template == NO_TEMPLATE
        else ChatTemplate(tokenizer, text, data.chat_template_args, tools)
    )


def _template_text(model_path: str, tokenizer, data: DataConfig) -> str | None:
    """Return the text of the template file that data.chat_template names; None for `tokenizer` and `none`.

    Raises UserError if settings contradict each other, or if the file or the tokenizer's template is missing.
    """
    name = data.chat_template
    ours = sorted(set(_OURS) & set(data.chat_template_args))
    if ours:
        raise UserError(
            f"data.chat_template_args cannot contain {', '.join(ours)}, because the program passes these to "
            "the template itself; remove them"
        )
    if name == NO_TEMPLATE:
        for key, value in (
            ("system_prompt", data.system_prompt),
            ("chat_template_args", data.chat_template_args or None),
        ):
            if value is not None:
                raise UserError(f"data.{key} needs a chat template, but data.chat_template=none; remove it")
        return None
    if name == FROM_TOKENIZER:
        if not tokenizer.chat_template:
            raise UserError(
                f"{model_path}: the tokenizer has no chat template; set data.chat_template=none to use "
                "prompts as they are (for a base model), or set it to a file with a Jinja template"
            )
        return None
    if not Path(name).is_file():
        raise UserError(
            f"data.chat_template={name}: there is no such file; give the path of a template file, or set "
            "data.chat_template=tokenizer or data.chat_template=none"
        )
    try:
        template = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={name} cannot be read: {error}") from error
    if not template.strip():
        raise UserError(f"data.chat_template={name} is an empty file")
    return template
