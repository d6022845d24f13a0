"""Mapping of RLinf's keys to those of grpo_megatron: run, data, rollout, and the whole mapping RLINF.

RLinf's settings are the YAML of one of its reasoning tasks.
"""

import re
from typing import Any

from grpo_megatron.importers.converters import (
    absorbed,
    chat_template_arguments,
    choice,
    epochs,
    every,
    fixed,
    flag,
    room_for,
    run_name,
    total_steps,
    truth,
)
from grpo_megatron.importers.mapping import (
    CannotCarry,
    Finding,
    Source,
    System,
    becomes,
    dropped,
    same,
    trains,
)
from grpo_megatron.importers.rlinf_actor import ACTOR, NO_FP16
from grpo_megatron.importers.rlinf_algorithm import ALGORITHM, MEMORY, MODEL, PENALTIES
from grpo_megatron.importers.rlinf_sampling import SAMPLING
from grpo_megatron.importers.settings import Settings


def _paths(value: Any, source: Source) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _template(value: Any, source: Source) -> str:
    return "tokenizer" if truth(value) else "none"


def _engine_experts(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"rollout.engine.expert_parallel": source.count("rollout.tensor_parallel_size")}
        if truth(value)
        else {}
    )


def _response_length(value: Any, source: Source) -> int:
    return source.number("runner.seq_length") - source.number("data.max_prompt_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source["runner.enable_dynamic_batch_size"]):
        raise CannotCarry("RLinf ignores this without runner.enable_dynamic_batch_size")
    return {"train.max_tokens_per_micro_batch": max(int(value), int(source.number("runner.seq_length")))}


RUN = (
    becomes(
        "runner.seq_length",
        "rollout.max_response_length",
        _response_length,
        unit="tokens of prompt and response -> tokens of the response",
    ),
    becomes(
        "runner.enable_dynamic_batch_size",
        "train.max_tokens_per_micro_batch",
        room_for(lambda source: source.number("runner.seq_length")),
        "always by tokens",
        default=False,
    ),
    becomes("runner.max_tokens_per_mbs", "train.max_tokens_per_micro_batch", _dynamic_tokens),
    *trains(
        becomes("runner.max_steps", "run.total_steps", total_steps, "with -1, max_epochs decides"),
        becomes(
            "runner.max_epochs", "run.total_steps", epochs("runner.max_steps"), "read unless max_steps is set"
        ),
        fixed(
            "runner.resume_dir",
            (None,),
            "RLinf's checkpoints cannot be resumed here; set model.path to the model in Hugging Face format",
            "run.resume",
        ),
    ),
    becomes("runner.val_check_interval", "eval.every", every, "-1 (never) is 0 here"),
    becomes("runner.save_interval", "checkpoint.every", every, "-1 (never) is 0 here"),
    becomes("runner.experiment_name", "run.name", run_name, "a slash becomes a dash"),
    absorbed("runner.task_type", "only reasoning tasks are imported"),
    becomes(
        "runner.logger.project_name",
        "monitor.wandb_project",
        run_name,
        "read only with monitor.listeners=[wandb]",
    ),
    dropped(
        "runner.logger.*",
        "metrics go to TensorBoard and metrics.jsonl, and with monitor.listeners=[wandb] to Weights & Biases",
    ),
    dropped("runner.output_dir", "a run writes into the folder run.root/run.name"),
    dropped("runner.*", "no counterpart in how a run is done"),
    *trains(
        same("data.rollout_batch_size", "data.train_batch_size", "prompts in both"),
        same("data.max_prompt_length", "data.max_prompt_length"),
    ),
    becomes(
        "data.filter_prompt_by_length",
        "data.overlong_prompts",
        lambda value, source: "skip" if truth(value) else "error",
        "true: skip",
        default=False,
    ),
    same("data.prompt_key", "data.prompt_key"),
    same("data.answer_key", "data.answer_key"),
    becomes("data.shuffle", "data.shuffle", flag),
    same("data.seed", "run.seed"),
    becomes("data.train_data_paths", "data.train", _paths),
    becomes("data.val_data_paths", "data.eval", _paths),
    *trains(
        same("data.system_prompt", "data.system_prompt"),
        becomes("data.use_chat_template", "data.chat_template", _template, "false: none"),
        becomes("data.apply_chat_template_kwargs.*", "data.chat_template_args", chat_template_arguments),
        fixed(
            "rollout.custom_chat_template",
            (None,),
            "write it to a file and set data.chat_template=FILE",
            "data.chat_template",
        ),
    ),
    dropped("data.*", "no counterpart in how prompts are read"),
    *trains(same("rollout.model_dir", "model.path"), same("rollout.model.model_path", "model.path")),
    same("rollout.gpu_memory_utilization", "rollout.engine.mem_fraction"),
    same("rollout.tensor_parallel_size", "rollout.engine.tensor_parallel"),
    same("rollout.max_running_requests", "rollout.engine.max_running_requests"),
    fixed(
        "rollout.rollout_backend",
        ("sglang",),
        "the engine is always SGLang here",
        note="whatever the value, the engine is SGLang here",
    ),
    becomes(
        "rollout.recompute_logprobs",
        "train.old_logprobs",
        lambda value, source: "recompute" if truth(value) else "rollout",
        "false: the engine's log-probs are the old policy's",
    ),
    becomes(
        "rollout.model.precision",
        "rollout.engine.dtype",
        choice({"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "32": "float32"}, NO_FP16),
    ),
    same("rollout.vllm.enable_prefix_caching", "rollout.engine.prefix_cache"),
    fixed("rollout.pipeline_parallel_size", (1, None), "an engine has no pipeline stages here"),
    becomes(
        "rollout.sglang.enable_ep_moe",
        "rollout.engine.expert_parallel",
        _engine_experts,
        "true: as many parts as there are TP ranks",
    ),
    dropped("rollout.seed", "one seed for all: run.seed"),
    dropped("rollout.return_logprobs", "the engine's log-probs are always recorded here"),
    dropped("rollout.validate_weight*", "see weight_sync.probe_every"),
    dropped("rollout.*", "no counterpart among the options of the engine"),
    dropped("reward.*", "belongs to RLinf's own rewards: see reward.function and reward.args"),
    dropped(
        "cluster.*",
        "set megatron.data_parallel and rollout.engine.num_engines for the GPUs "
        "you have, and cluster.placement",
    ),
    dropped("critic.*", "GRPO has no critic"),
    dropped("inference.*", "the trainer's own ranks compute log-probs"),
    dropped("hydra.*", "no counterpart"),
    absorbed("defaults", "names base configurations that are not read"),
)


def _refusal(source: Source, settings: Settings) -> str | None:
    task = settings.values.get("runner.task_type")
    if task in (None, "reasoning", "math"):
        return None
    return (
        f"runner.task_type={task}: only RLinf's reasoning tasks can be imported (reinforcement learning of "
        "a language model on text)"
    )


def _findings(source: Source, settings: Settings) -> list[Finding]:
    """Return the differences between what an RLinf run trains and what the imported run trains.

    Possible differences are a model for images, a base configuration that was not read, and a missing reward
    or number of steps. A value that cannot be carried over is left out, because the mapping of its key
    reports it.
    """
    found = []
    for key in ("rollout.model.model_type", f"{MODEL}.model_type"):
        value = settings.values.get(key)
        if isinstance(value, str) and re.search(r"(?i)(?<![a-z])(vl|vla|vlm|omni)(?![a-z])", value):
            found.append(Finding(f"{key}={value}: this is a model for images, but only text is trained here"))
    bases = settings.values.get("defaults")
    for base in bases if isinstance(bases, list) else []:
        name = str(base)
        if isinstance(base, dict):
            name = ", ".join(f"{part}={value}" for part, value in base.items())
        # The base file of a training engine changes how things are computed, not what is trained. `_self_` is
        # the file itself.
        if not re.match(r"override hydra/|_self_|.*(hybrid_engines|training_backend)/", name):
            found.append(
                Finding(
                    f"defaults: {name}: this base configuration was not read; put its settings into the file"
                )
            )
    if "reward.reward_type" not in settings.values:
        found.append(Finding("reward: none is given; set reward.function", ("reward.function",)))
    if not {"runner.max_epochs", "runner.max_steps"} & settings.values.keys():
        found.append(
            Finding(
                "run.total_steps: the file does not say how long the run is; set run.total_steps",
                ("run.total_steps",),
            )
        )
    return found


RLINF = System("RLinf", ALGORITHM + SAMPLING + MEMORY + PENALTIES + RUN + ACTOR, _findings, _refusal)
