"""The prompt tokenizer: turns the prompts of records into text and token ids, with a chat template if set."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.decoder import Decoder, end_tokens
from grpo_megatron.data.messages import chat_in_text, chat_messages
from grpo_megatron.data.model_tokenizer import load_tokenizer, vocab_size
from grpo_megatron.data.template_choice import chosen_template
from grpo_megatron.data.turn_format import Tools, TurnFormat
from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError


class PromptTokenizer:
    """The tokenizer of prompts, which turns a record's prompt into text and token ids.

    It follows data.chat_template. A prompt has one of these forms:

    - A string with a chat template: the string is the user's message, and the generation prompt is added.
    - A string without a chat template: the model continues the text. The tokenizer's own prefix (BOS) is put
      before it, but no end token is put after it.
    - A list of messages, or a string that contains such a list as JSON: a chat. It needs a chat template.
    - A list of integers: token ids, used unchanged.

    tokenizer: the tokenizer, an object of transformers.
    vocab_size: number of tokens in the model's vocabulary.
    template: the chat template; None if data.chat_template=none.
    turn_ends: ids of the tokens by which the chat template ends a turn of the model.
    decoder: function that converts ids to text. It can be sent to other processes.
    turn_format: reads the model's turns in a chat, and continues the chat after them.
    """

    def __init__(self, model_path: str, data: DataConfig | None = None, tools: Sequence[dict[str, Any]] = ()):
        """Load the tokenizer in a model's folder, and check that it fits the settings.

        data: section `data` of the configuration, with chat template, system prompt and suffix. None means
            the defaults.
        tools: JSON schemas of the functions that the model may call in every prompt. The template shows them
            to the model.

        Raises UserError if the tokenizer cannot be used, or if the settings contradict it.
        """
        data = data or DataConfig()
        self.tokenizer = load_tokenizer(model_path)
        self.vocab_size = vocab_size(model_path, self.tokenizer)
        self._system, self._suffix = data.system_prompt, data.prompt_suffix
        self.template = chosen_template(model_path, self.tokenizer, data, tools)
        self._prefix = self._prefix_ids()
        # SentencePiece tokenizers put a space before a text, but not before a part inside a text.
        self._depends_on_text_before = self._behind("\n", "a") != self._ids("a")
        if self.template and self._system is not None:
            self._check_system_prompt()
        self.turn_ends = self._turn_end_of_template()
        self.decoder = Decoder(self.tokenizer, {*self.turn_ends, *end_tokens(self.tokenizer, model_path)})
        self.turn_format = TurnFormat(self.tokenizer, self.template, self.decoder)

    def prompt(self, prompt: Any, where: str, tools: Tools = None) -> tuple[str, np.ndarray]:
        """Return (text, ids) of a prompt: its text, and its token ids, int32 [P] with P > 0.

        The text is what the model reads: the rendered chat, the plain text with the configured suffix, or the
        decoded token ids.

        prompt: text, a list of messages, or a list of token ids.
        where: place of the record, for error messages.
        tools: JSON schemas of the tools that the record offers to the model.

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
        return text, self._not_empty(self._encode_with_prefix(text), text, where)

    def chat_prompt(
        self, messages: list[dict[str, Any]], where: str, tools: Tools = None
    ) -> tuple[str, np.ndarray]:
        """Return (text, ids) of a prompt that is a chat: the rendered text, and its int32 [P] ids with P > 0.

        messages: the chat as the method `messages` returned it, with system prompt and suffix.
        where: place of the record, for error messages.
        tools: JSON schemas of the tools that the record offers to the model.

        Raises UserError if the prompt cannot be used.
        """
        text = self._needed_template().prompt(messages, where, tools)
        if not text.strip():
            raise UserError(
                f"{where}: the prompt is empty after the chat template was applied; change data.chat_template"
            )
        self._refuse_rendered(messages, text, where)
        return text, self._not_empty(self.encode(text), text, where)

    def messages(self, prompt: Any, where: str = "the prompt") -> list[dict[str, Any]] | None:
        """Return the chat messages that a prompt consists of, with the system prompt and the suffix added.

        prompt: text, a list of messages, or a list of token ids.
        where: name or place of the prompt in error messages.

        Returns None if the prompt is not a chat: for token ids, and for plain text if there is no chat
        template. Raises UserError if the prompt is empty or invalid, or if it is a chat but there is no chat
        template.
        """
        if _are_ids(prompt):
            return None
        given = prompt
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError(f"{where}: the prompt is empty; correct or remove the record")
            given = chat_in_text(prompt, where)
            if given is None and not self.template:
                return None
            given = given or [{"role": "user", "content": prompt}]
        messages = self.chat_messages(given, where)
        if not self.template:
            raise UserError(
                f"{where}: the prompt is a list of chat messages, but data.chat_template=none; give a "
                "string or token ids, or set data.chat_template=tokenizer or data.chat_template=FILE"
            )
        if self._system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._system})
        return self._with_suffix(messages, where) if self._suffix else messages

    def chat_messages(self, given: Any, where: str) -> list[dict[str, Any]]:
        """Check chat messages, and return them in the form that the chat template expects.

        Some clients write `developer` for the role `system`. Templates that do not know it leave out such
        messages, or show the model a role that it has never seen. So it becomes `system`.

        given: list of messages.
        where: place of the messages, for error messages.

        Raises UserError if a message is invalid.
        """
        messages = chat_messages(given, where)
        if self.template is None or self.template.knows_developer:
            return messages
        return [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]

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
        """Return the text of a chat of complete messages, plus the beginning of the model's next turn.

        If the last message is the assistant's, the model begins a new turn after it. With `prompt`, the model
        would continue the message.

        where: name or place of the chat in error messages.
        tools: JSON schemas of the tools that the model may call.

        Raises UserError if there is no chat template, or if the chat cannot be rendered.
        """
        return self._needed_template().render(messages, where, tools)

    def after_response(self) -> np.ndarray:
        """Return the int32 ids that follow a response in a finished conversation.

        With a chat template, they are the tokens that the template puts after an assistant message. Without
        one, they are the tokenizer's end token, or nothing if the tokenizer has no end token.
        """
        if self.template:
            return self.encode(self.template.shape.tail)
        end = self.tokenizer.eos_token_id
        return np.array([] if end is None else [end], dtype=np.int32)

    def closing(self, text: str, is_closed: bool, where: str) -> np.ndarray:
        """Return the int32 ids with which the model has to end its turn.

        text: text that the model writes to end the turn, such as `<|im_end|>`. May be empty.
        is_closed: True if `text` ends the turn. If False, the tokenizer's end token is appended.
        where: place of the record, for error messages.

        Raises UserError if an end token is needed but the tokenizer has none.
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
        """Return the int32 token ids of exactly this text, without adding special tokens."""
        return np.array(self._ids(text), dtype=np.int32)

    def encode_behind(self, before: str, text: str) -> np.ndarray:
        """Return the int32 ids of a text that follows the text `before`.

        They may differ from the ids of the text alone, because SentencePiece tokenizers put a space before a
        text that nothing precedes.
        """
        return np.array(
            self._behind(before, text) if self._depends_on_text_before else self._ids(text), dtype=np.int32
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _behind(self, before: str, text: str) -> list[int]:
        head, both = self._ids(before), self._ids(before + text)
        return both[len(head) :] if both[: len(head)] == head else self._ids(text)

    def _prefix_ids(self) -> list[int]:
        """Return the ids of the tokens that the tokenizer puts before every text, such as BOS."""
        alone, whole = self._ids("0"), self.tokenizer.encode("0")
        starts = [n for n in range(len(whole)) if whole[n : n + len(alone)] == alone]
        return whole[: starts[0]] if alone and starts else []

    def _encode_with_prefix(self, text: str) -> np.ndarray:
        ids = self._ids(text)
        if ids[: len(self._prefix)] != self._prefix:
            ids = [*self._prefix, *ids]
        return np.array(ids, dtype=np.int32)

    def _not_empty(self, ids: np.ndarray, text: str, where: str) -> np.ndarray:
        if not len(ids):
            raise UserError(f"{where}: the prompt has no tokens: {shown(text)}; correct or remove the record")
        return ids

    def _refuse_rendered(self, messages: list[dict[str, Any]], text: str, where: str) -> None:
        """Raise UserError if a chat template was already applied to the first user message of a chat.

        This is assumed if the message begins with the same added token as the rendered chat, such as
        `<|im_start|>`.

        text: the chat as rendered from `messages`.
        where: place of the record, for error messages.
        """
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

    def _turn_end_of_template(self) -> tuple[int, ...]:
        """Return (id,) of the token by which the chat template ends a turn of the model, or ().

        This token may differ from the tokenizer's end token. The result is () if there is no template, if the
        template fails for a trial chat, or if the template ends turns without an added token, such as with a
        line break.
        """
        try:
            shape = self.template.shape if self.template else None
        except UserError:
            return ()  # reported where the turn shape is needed; not every run needs finished turns
        return tuple(self._ids(shape.closing)[-1:]) if shape and shape.is_closed else ()

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            raise UserError(
                "messages need a chat template, but data.chat_template=none; set it to tokenizer or a file"
            )
        return self.template

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of int32 token ids, without end and padding tokens.

        Worker processes get the attribute `decoder` instead, which loads faster than this object.
        """
        return self.decoder(ids)

    def decode_all(self, ids: np.ndarray) -> str:
        """Return the text of int32 token ids, including all special tokens."""
        return self.decoder.whole(ids.tolist())


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)
