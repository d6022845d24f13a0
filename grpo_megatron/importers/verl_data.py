"""verl's keys of the prompts and the reward, and ours."""

from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Convert,
    Source,
    becomes,
    choice,
    dropped,
    elsewhere,
    flag,
    only,
    same,
    trains,
    truth,
    unless_null,
)

BUFFER = "reward_model.overlong_buffer"
DAPO_BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"


def _train_files(value: Any, source: Source) -> dict[str, Any]:
    # Where the records of verl's own preprocessing have it.
    return {"data.train": value, "data.answer_key": "reward_model.ground_truth"}


def _truncation(value: Any, source: Source) -> str:
    if truth(source["data.filter_overlong_prompts"]):
        return "skip"
    return choice({"error": "error", "left": "truncate_left"}, "prompts are only shortened from the left here")(value, source)


def _filter(value: Any, source: Source) -> dict[str, Any]:
    return {"data.overlong_prompts": "skip"} if truth(value) else {}


def _overlong_length(buffer: str) -> Convert:
    def convert(value: Any, source: Source) -> int:
        return value if truth(source[f"{buffer}.enable"]) else 0

    return convert


def _overlong_end(value: Any, source: Source) -> dict[str, Any]:
    """The length the buffer ends at, which here is always that of the longest response."""
    if value is not None and truth(source[f"{DAPO_BUFFER}.enable"]) and value != source["data.max_response_length"]:
        raise CannotCarry("reward.overlong_buffer ends at rollout.max_response_length")
    return {}


_BY_HAND = "set reward.function=module:function; its arguments are prompt, response, answer, record"


def _template_arguments(value: Any, source: Source) -> dict[str, Any]:
    return {"data.chat_template_args": source.below("data.apply_chat_template_kwargs")}


DATA = (
    *trains(
        becomes(
            "data.train_files",
            ("data.train", "data.answer_key"),
            _train_files,
            "the reference answer is reward_model.ground_truth of the records, as verl's own preprocessing writes them",
        ),
        same("data.prompt_key", "data.prompt_key", default="prompt"),
        same("data.max_prompt_length", "data.max_prompt_length", default=512),
        same("data.max_response_length", "rollout.max_response_length", default=512),
        becomes("data.truncation", "data.overlong_prompts", _truncation, "left: truncate_left", default="error"),
        becomes("data.filter_overlong_prompts", "data.overlong_prompts", _filter, "true: skip", default=False),
        becomes("data.shuffle", "data.shuffle", flag, default=True),
        dropped("data.image_key", "only text is trained on here"),
        dropped("data.video_key", "only text is trained on here"),
        dropped("data.sampler.*", "prompts come in a new order every epoch, or in that of the file (data.shuffle)"),
        dropped("data.custom_cls.*", "records are read as they are: write them to a file in the form you want"),
        dropped("data.datagen.*", "records are read as they are: write them to a file in the form you want"),
        becomes("data.apply_chat_template_kwargs.*", "data.chat_template_args", _template_arguments),
        becomes("data.tool_config_path", (), only((None,), "tools belong to an environment: rollout.environment"), "only null"),
        becomes("data.max_samples", (), only((-1, None), "all records are used: write those you want to a file"), "only -1"),
        becomes(
            "data.train_max_samples", (), only((-1, None), "all records are used: write those you want to a file"), "only -1"
        ),
    ),
    same("data.val_files", "data.eval"),
    becomes("data.seed", "run.seed", unless_null("run.seed")),
    dropped("data.reward_fn_key", "one reward function for all records here"),
    dropped("data.*", "no counterpart in how prompts are read"),
)

REWARD = (
    *trains(
        becomes(
            "reward_model.reward_manager",
            "reward.function",
            lambda value, source: only(("naive", "dapo", "batch"), _BY_HAND)(value, source),
            "naive, batch and dapo score by the data_source of a record",
        ),
        becomes("reward_model.enable", "reward.function", only((False,), "a reward function may call a model"), "only false"),
        becomes("custom_reward_function.path", "reward.function", only((None,), _BY_HAND), "a function of yours"),
        dropped("reward_model.sandbox_fusion.*", "a reward function may call a sandbox"),
        dropped("reward_model.reward_loop*", _BY_HAND),
        becomes(f"{DAPO_BUFFER}.enable", (), elsewhere, "read with overlong_buffer_cfg.len", default=False),
        becomes(f"{DAPO_BUFFER}.len", "reward.overlong_buffer.length", _overlong_length(DAPO_BUFFER)),
        same(f"{DAPO_BUFFER}.penalty_factor", "reward.overlong_buffer.penalty"),
        becomes("reward_model.reward_kwargs.max_resp_len", (), _overlong_end, "only data.max_response_length"),
        becomes(f"{BUFFER}.enable", (), elsewhere, "read with overlong_buffer.len", default=False),
        becomes(f"{BUFFER}.len", "reward.overlong_buffer.length", _overlong_length(BUFFER)),
        same(f"{BUFFER}.penalty_factor", "reward.overlong_buffer.penalty"),
    ),
    dropped("custom_reward_function.*", "belongs to custom_reward_function.path"),
    dropped(f"{DAPO_BUFFER}.log", "the mean reward is logged with the punishment in it"),
    *trains(dropped("reward_model.reward_kwargs.*", _BY_HAND), dropped("reward.*", _BY_HAND)),
    dropped(
        "reward_model.*", "belongs to a reward model or to how rewards are computed; see reward_model.enable, reward.workers"
    ),
)
