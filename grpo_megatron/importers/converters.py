"""Functions that convert values of verl or RLinf to values of grpo_megatron, for mappings of both systems."""

from collections.abc import Callable
from typing import Any

from grpo_megatron.config.keys import value_text
from grpo_megatron.config.schema import TrainConfig
from grpo_megatron.importers.mapping import UNSET, CannotCarry, Convert, KeyMapping, Source, becomes


def choice(names: dict[str, Any], why: str = "there is no such choice here") -> Convert:
    """Return a function that converts the value of a setting by looking it up in a table.

    names: the table {value of verl or RLinf as text: value of grpo_megatron's key}. To set several keys, the
        table has a dict {key: value} in place of the value.
    why: message of the CannotCarry that the function raises for a value that is not in the table.
    """

    def convert(value: Any, source: Source) -> Any:
        if str(value) not in names:
            raise CannotCarry(f"{value}: {why}")
        return names[str(value)]

    return convert


def truth(value: Any) -> bool:
    """Convert a truth value of verl or RLinf, such as True, "true" or 0, to a bool. None is False.

    Raises CannotCarry for anything that is neither true nor false.
    """
    if isinstance(value, bool):
        return value
    named = {"true": True, "false": False, "none": False, "null": False, "1": True, "0": False}
    if str(value).lower() not in named:
        raise CannotCarry(f"{value!r} is neither true nor false")
    return named[str(value).lower()]


def fixed(
    theirs: str, values: tuple[Any, ...], why: str, ours: str | tuple[str, ...] = (), note: str = ""
) -> KeyMapping:
    """Return the mapping of a key of verl or RLinf whose meaning grpo_megatron has for some values only.

    These values ask for what grpo_megatron does anyway, so no key is set. Any other value cannot be carried
    over.

    values: the values. The first one stands for all of them in the documentation and the report.
    why: the reason why no other value can be carried over.
    ours: keys of grpo_megatron that the user may set by hand instead.
    note: text for the documentation and the report; "": `only`, and the first value.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if value not in values:
            raise CannotCarry(f"{value}: {why}")
        return {}

    return becomes(theirs, ours, convert, note or f"only {value_text(values[0])}")


def absorbed(theirs: str, note: str, default: Any = UNSET, ours: str | tuple[str, ...] = ()) -> KeyMapping:
    """Return the mapping of a key that needs no key of ours, mostly because another mapping reads it.

    note, default: as in `becomes`.
    ours: the key of grpo_megatron that the other mapping sets, for the documentation.
    """
    return becomes(theirs, ours, lambda value, source: {}, note, default)


def flag(value: Any, source: Source) -> bool:
    """Convert a setting of verl or RLinf, such as True, "true" or 0, to a bool. None is False.

    This is the function `truth` with the signature of a converter: `source` is ignored. Raises CannotCarry
    for anything that is neither true nor false.
    """
    return truth(value)


def room_for(longest: Callable[[Source], int]) -> Convert:
    """Return a function that converts the switch for dynamic batch sizes of verl or RLinf.

    grpo_megatron always packs micro-batches by tokens, so the value of the switch is ignored. The function
    makes sure that the longest sequence fits into a micro-batch. If its length exceeds the default of
    train.max_tokens_per_micro_batch, the function returns {that key: length}, else {}: no key is set.

    longest: function that returns the length of the run's longest sequence, prompt and response, in tokens.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        tokens = longest(source)
        return (
            {"train.max_tokens_per_micro_batch": tokens}
            if tokens > TrainConfig().max_tokens_per_micro_batch
            else {}
        )

    return convert


def unless_null(value: Any, source: Source) -> Any:
    """Keep the value of a setting, and convert null to {}: no key is set."""
    return {} if value is None else value


def only_where(applies: Callable[[Source], bool], names: dict[str, Any] | None = None) -> Convert:
    """Return a function that keeps the value of a setting, or converts it to {} if it has no effect.

    The function also returns {}, so that no key is set, for the value null.

    applies: function of all settings that returns True if this setting has an effect in the imported run.
    names: {value of verl or RLinf: value of grpo_megatron} of the values that have another name here.
    """

    def convert(value: Any, source: Source) -> Any:
        return (names or {}).get(value, value) if value is not None and applies(source) else {}

    return convert


def every(value: Any, source: Source) -> Any:
    """Convert an interval in steps of verl or RLinf. -1 (never) becomes 0."""
    return max(0, value) if isinstance(value, int) else value


def must_be_off(neutral: Any) -> Convert:
    """Return a function that checks that a sampling filter, such as top-p, is switched off.

    With a filter, the recorded log-probs would not be those of the distribution that is sampled from. The
    function returns `neutral` for the values `neutral` and null, and raises CannotCarry for any other value.

    neutral: the value that switches the filter off.
    """

    def convert(value: Any, source: Source) -> Any:
        if value is not None and value != neutral:
            raise CannotCarry(
                f"{value}: log-probs would not be those of the distribution that is sampled from"
            )
        return neutral

    return convert


def top_k_off(value: Any, source: Source) -> int:
    """Convert a top-k that filters nothing to -1. Raises CannotCarry for any other top-k.

    Null, 0, negative numbers, and numbers above the size of any vocabulary filter nothing.
    """
    return must_be_off(-1)(value if value is not None and 0 < value < 500_000 else -1, source)


def clip_ratios(value: Any, source: Source) -> dict[str, Any]:
    """Convert a clip ratio for both directions to {key: value} of our lower and our upper clip ratio."""
    return {"algorithm.clip_ratio_low": value, "algorithm.clip_ratio_high": value}


def chat_template_arguments(value: Any, source: Source) -> dict[str, Any]:
    """Return {"data.chat_template_args": {name: value of each key below data.apply_chat_template_kwargs}}."""
    return {"data.chat_template_args": source.below("data.apply_chat_template_kwargs")}


def run_name(value: Any, source: Source) -> str:
    """Convert the name of a run of verl or RLinf to the name of a folder: slashes become dashes.

    Raises CannotCarry if the name is missing, is no name of a folder such as `..`, or contains a $VARIABLE.
    """
    name = str(value).strip().replace("/", "-")
    if "$" in name or value is None or name in ("", ".", "..", "???"):
        raise CannotCarry("the name is not known here; set run.name=NAME")
    return name


def total_steps(value: Any, source: Source) -> dict[str, Any]:
    """Convert a number of steps to {"run.total_steps": value}; {} if it is null, 0 or negative."""
    return {"run.total_steps": value} if value is not None and value > 0 else {}


def epochs(steps: str) -> Convert:
    """Return a function that converts a number of epochs to {}: no key is set.

    grpo_megatron measures a run in steps, not epochs. If the settings do not give the number of steps too,
    the function raises CannotCarry.

    steps: key of verl or RLinf for the number of steps, such as `runner.max_steps`.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        given = source[steps]
        if isinstance(given, int) and given > 0:
            return {}
        raise CannotCarry(
            "the number of steps is not known here, because the number of prompts is not; set "
            "run.total_steps=(this many epochs * prompts / data.train_batch_size)"
        )

    return convert
