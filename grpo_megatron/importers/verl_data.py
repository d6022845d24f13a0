"""Mapping of verl's keys to those of grpo_megatron: prompts and reward."""

from typing import Any

from grpo_megatron.importers.converters import (
    absorbed,
    chat_template_arguments,
    choice,
    fixed,
    flag,
    truth,
    unless_null,
)
from grpo_megatron.importers.mapping import (
    UNSET,
    CannotCarry,
    Convert,
    KeyMapping,
    Source,
    becomes,
    dropped,
    same,
    trains,
)
from grpo_megatron.importers.verl_tools import functions, tools

BUFFER = "reward_model.overlong_buffer"
_ALL_RECORDS = "all records are used: write those you want to a file"


def _train_files(value: Any, source: Source) -> dict[str, Any]:
    # The records that verl's own preprocessing writes have the answer at this key.
    return {"data.train": value, "data.answer_key": "reward_model.ground_truth"}


def _truncation(value: Any, source: Source) -> str:
    if truth(source["data.filter_overlong_prompts"]):
        return "skip"
    return choice(
        {"error": "error", "left": "truncate_left"}, "prompts are only shortened from the left here"
    )(value, source)


def _filter(value: Any, source: Source) -> dict[str, Any]:
    return {"data.overlong_prompts": "skip"} if truth(value) else {}


def _overlong_length(buffer: str) -> Convert:
    def convert(value: Any, source: Source) -> int:
        return value if truth(source[f"{buffer}.enable"]) else 0

    return convert


def _overlong_end(buffer: str) -> Convert:
    """Return a function that checks the length at which verl's overlong buffer ends.

    The buffer is the range of response lengths in which the reward is reduced. In grpo_megatron the buffer
    always ends at the maximum response length. If verl's buffer is enabled and ends elsewhere, the function
    raises CannotCarry. Otherwise the function returns {}: no key is set.

    buffer: name of verl's section with the settings of the buffer.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if (
            value is not None
            and truth(source[f"{buffer}.enable"])
            and value != source["data.max_response_length"]
        ):
            raise CannotCarry("reward.overlong_buffer always ends at rollout.max_response_length here")
        return {}

    return convert


def _drawn(value: Any, source: Source) -> dict[str, Any]:
    if value not in (None, source["data.train_batch_size"]):
        raise CannotCarry(
            "set rollout.dynamic_sampling.over_sampling, or data.train_batch_size if no groups are filtered"
        )
    return {}


_BY_HAND = "set reward.function=module:function; its arguments are prompt, response, answer, record"


DATA = (
    *trains(
        becomes(
            "data.train_files",
            ("data.train", "data.answer_key"),
            _train_files,
            "the answer is reward_model.ground_truth, where verl's preprocessing writes it",
        ),
        same("data.prompt_key", "data.prompt_key", default="prompt"),
        same("data.max_prompt_length", "data.max_prompt_length", default=512),
        same("data.max_response_length", "rollout.max_response_length", default=512),
        becomes(
            "data.truncation", "data.overlong_prompts", _truncation, "left: truncate_left", default="error"
        ),
        becomes(
            "data.filter_overlong_prompts", "data.overlong_prompts", _filter, "true: skip", default=False
        ),
        becomes("data.shuffle", "data.shuffle", flag, default=True),
        dropped("data.image_key", "only text is trained here"),
        dropped("data.video_key", "only text is trained here"),
        dropped(
            "data.sampler.*", "prompts come in a new order every epoch, or in that of the file (data.shuffle)"
        ),
        dropped(
            "data.custom_cls.*", "records are read as they are: write them to a file in the form you want"
        ),
        dropped("data.datagen.*", "records are read as they are: write them to a file in the form you want"),
        becomes("data.apply_chat_template_kwargs.*", "data.chat_template_args", chat_template_arguments),
        becomes(
            "data.tool_config_path",
            ("rollout.tools", "rollout.mcp", "rollout.environment"),
            tools,
            "as actor_rollout_ref.rollout.multi_turn.tool_config_path",
        ),
        fixed("data.max_samples", (-1, None), _ALL_RECORDS),
        fixed("data.train_max_samples", (-1, None), _ALL_RECORDS),
        becomes(
            "data.gen_batch_size",
            "rollout.dynamic_sampling.over_sampling",
            _drawn,
            "only data.train_batch_size",
        ),
        fixed("data.tokenizer", (None,), "the tokenizer is that of model.path"),
        becomes(
            "data.function_tool_path",
            ("rollout.tools", "rollout.environment"),
            functions,
            "name each function, as module:function",
        ),
    ),
    fixed("data.val_max_samples", (-1, None), _ALL_RECORDS),
    same("data.val_files", "data.eval"),
    becomes("data.seed", "run.seed", unless_null),
    dropped("data.reward_fn_key", "one reward function for all records here"),
    dropped("data.*", "no counterpart in how prompts are read"),
)


_SANDBOX = "programs run in a sandbox on the node here: reward.function=code"


def _reward_sections(old: bool) -> tuple[str, str, str, str, str]:
    """Return the names of the keys or sections in which verl configures five parts of the reward.

    The parts are, in this order: the reward manager, the reward function, the sandbox, the arguments of the
    reward manager, and the reward model.

    old: True for the names that verl used until the end of 2025, False for the names since then.
    """
    if old:
        return (
            "reward_model.reward_manager",
            "custom_reward_function",
            "sandbox_fusion",
            "reward_model.reward_kwargs",
            "reward_model",
        )
    return (
        "reward.reward_manager.name",
        "reward.custom_reward_function",
        "reward.sandbox_fusion",
        "reward.reward_kwargs",
        "reward.reward_model",
    )


def _reward_entries(old: bool) -> tuple[KeyMapping, ...]:
    """Return the mappings of verl's reward keys to keys of grpo_megatron.

    old: True for the names that verl used until the end of 2025, False for the names since then.
    """
    manager, function, sandbox, kwargs, model = _reward_sections(old)
    buffer = f"{kwargs}.overlong_buffer_cfg"
    return (
        *trains(
            fixed(
                manager,
                ("naive", "dapo", "batch", None),
                _BY_HAND,
                "reward.function",
                note="naive, batch and dapo score by the data_source of a record",
            ),
            fixed(
                f"{model}.enable",
                (False, None),
                "set reward.function=model with reward.model.path, or a function that asks a server",
                ("reward.function", "reward.model.path"),
            ),
            fixed(
                f"{function}.path",
                (None,),
                _BY_HAND,
                "reward.function",
                note="only null; else set reward.function=module:function",
            ),
            fixed(f"{sandbox}.url", (None,), _SANDBOX, "reward.function"),
            absorbed(
                f"{buffer}.enable", "read with overlong_buffer_cfg.len", default=UNSET if old else False
            ),
            becomes(f"{buffer}.len", "reward.overlong_buffer.length", _overlong_length(buffer)),
            same(f"{buffer}.penalty_factor", "reward.overlong_buffer.penalty"),
            becomes(f"{kwargs}.max_resp_len", (), _overlong_end(buffer), "only data.max_response_length"),
        ),
        dropped(f"{function}.name", f"belongs to {function}.path"),
        dropped(f"{sandbox}.*", f"belongs to {sandbox}.url; see reward.code.limits"),
        dropped(f"{buffer}.log", "the logged reward includes the punishment"),
        dropped(
            f"{model.removesuffix('.reward_model')}.num_workers",
            "see reward.workers, which counts processes on each node",
        ),
        *trains(dropped(f"{function}.*", _BY_HAND), dropped(f"{kwargs}.*", _BY_HAND)),
    )


REWARD = (
    *_reward_entries(old=False),
    *_reward_entries(old=True),
    *trains(
        fixed("reward.reward_manager.source", ("register", None), _BY_HAND, "reward.function"),
        fixed("reward.reward_manager.module.path", (None,), _BY_HAND, "reward.function"),
        fixed("reward_model.sandbox_fusion.url", (None,), _SANDBOX, "reward.function"),
        dropped("reward_model.reward_loop*", _BY_HAND),
        absorbed(f"{BUFFER}.enable", "read with overlong_buffer.len", default=False),
        becomes(f"{BUFFER}.len", "reward.overlong_buffer.length", _overlong_length(BUFFER)),
        same(f"{BUFFER}.penalty_factor", "reward.overlong_buffer.penalty"),
    ),
    dropped("reward.reward_manager.module.*", "belongs to reward_manager.module.path"),
    dropped("reward.reward_model.*", "belongs to reward.reward_model.enable"),
    *trains(dropped("reward.*", _BY_HAND)),
    dropped("reward_model.*", "belongs to reward_model.enable"),
)
