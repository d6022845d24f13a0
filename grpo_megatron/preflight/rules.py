"""Rules across fields. All are checked, and all violations are reported at once."""

import torch

from grpo_megatron.algorithm.advantages import GROUP_RELATIVE
from grpo_megatron.capabilities import fp8_problem, transformer_engine_problem
from grpo_megatron.config.schema import Config, LrSchedule, OldLogprobs, Precision, RoutingReplay, TransformerImpl
from grpo_megatron.megatron.spec import lr_decay_steps
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.algorithm_rules import algorithm_violations, choice, ranges
from grpo_megatron.rewards.answers import FINDERS
from grpo_megatron.rollout.environments import environment


def violations(config: Config, command: str = "train") -> list[str]:
    """Every broken rule as one sentence that names the keys; command: train or sft."""
    found = _ranges(config) + _precision(config) + ParallelSizes.from_config(config.megatron).violations()
    found += _memory(config) + _experts(config) + _optimizer(config, command)
    found += _data(config)
    if command == "train":
        found += algorithm_violations(config) + _batch_sizes(config) + _rollout(config) + _environment(config)
    return found


def _ranges(config: Config) -> list[str]:
    positive = {
        "run.total_steps": config.run.total_steps,
        "data.train_batch_size": config.data.train_batch_size,
        "data.max_prompt_length": config.data.max_prompt_length,
        "rollout.n": config.rollout.n,
        "rollout.max_response_length": config.rollout.max_response_length,
        "rollout.max_concurrency": config.rollout.max_concurrency,
        "rollout.max_turns": config.rollout.max_turns,
        "rollout.temperature": config.rollout.temperature,
        "rollout.engine.num_engines": config.rollout.engine.num_engines,
        "rollout.engine.tensor_parallel": config.rollout.engine.tensor_parallel,
        "reward.workers": config.reward.workers,
        "reward.timeout": config.reward.timeout,
        "train.ppo_epochs": config.train.ppo_epochs,
        "train.ppo_mini_batch_size": config.train.ppo_mini_batch_size,
        "train.max_tokens_per_micro_batch": config.train.max_tokens_per_micro_batch,
        "megatron.cpu_threads": config.megatron.cpu_threads,
        "optimizer.lr": config.optimizer.lr,
        "optimizer.eps": config.optimizer.eps,
        "optimizer.max_dropped_steps": config.optimizer.max_dropped_steps,
        "eval.n": config.eval.n,
        "eval.top_p": config.eval.top_p,
    }
    not_negative = {
        "optimizer.lr_warmup_steps": config.optimizer.lr_warmup_steps,
        "optimizer.lr_min": config.optimizer.lr_min,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip_grad": config.optimizer.clip_grad,
        "moe.aux_loss_coeff": config.moe.aux_loss_coeff,
        "moe.z_loss_coeff": config.moe.z_loss_coeff,
        "eval.every": config.eval.every,
        "eval.temperature": config.eval.temperature,
        "checkpoint.every": config.checkpoint.every,
    }
    return ranges(positive, not_negative)


def _precision(config: Config) -> list[str]:
    megatron = config.megatron
    problem = transformer_engine_problem()
    if megatron.precision == Precision.fp8:
        if megatron.transformer_impl == TransformerImpl.local:
            return ["megatron.precision=fp8 needs the TransformerEngine layers, but megatron.transformer_impl=local"]
        if fp8_problem():
            return [f"megatron.precision=fp8 is not possible here: {fp8_problem()}; use bf16"]
    if megatron.transformer_impl == TransformerImpl.transformer_engine and problem:
        return [f"megatron.transformer_impl=transformer_engine is not possible here: {problem}; use local or auto"]
    return []


def _memory(config: Config) -> list[str]:
    known = ("core_attn", "mlp", "layernorm", "moe", "moe_act")
    return [rule for name in config.megatron.recompute_modules for rule in choice("megatron.recompute_modules", name, known)]


def _experts(config: Config) -> list[str]:
    found = []
    if config.megatron.expert_tensor_parallel > 1 and not torch.cuda.is_available():
        found.append(
            f"megatron.expert_tensor_parallel={config.megatron.expert_tensor_parallel} needs GPUs: the collectives on CPU cannot "
            "gather unequal parts; use expert_parallel"
        )
    if config.moe.routing_replay == RoutingReplay.old_policy and config.train.old_logprobs != OldLogprobs.recompute:
        found.append(
            "moe.routing_replay=old_policy reuses the routing of the pass for the old log-probs: it needs "
            "train.old_logprobs=recompute"
        )
    return found


def _optimizer(config: Config, command: str) -> list[str]:
    optimizer = config.optimizer
    found = [
        f"optimizer.{name} must be greater than 0, is {getattr(optimizer, name)}"
        for name in ("lr_decay_steps", "wsd_decay_steps", "max_grad_norm_to_step")
        if getattr(optimizer, name) is not None and not getattr(optimizer, name) > 0
    ]
    if optimizer.lr_min > optimizer.lr > 0:
        found.append(f"optimizer.lr_min={optimizer.lr_min} is more than optimizer.lr={optimizer.lr}")
    if optimizer.lr_schedule == LrSchedule.constant:
        return found
    steps = lr_decay_steps(config, command)
    whole = f"the {steps} steps of the schedule (optimizer.lr_decay_steps; null: all optimizer steps of the run)"
    if optimizer.lr_warmup_steps > steps:
        found.append(f"optimizer.lr_warmup_steps={optimizer.lr_warmup_steps} is more than {whole}")
    elif optimizer.lr_schedule == LrSchedule.wsd:
        if optimizer.wsd_decay_steps is None:
            found.append("optimizer.lr_schedule=wsd needs optimizer.wsd_decay_steps, the length of its decay")
        elif optimizer.wsd_decay_steps + optimizer.lr_warmup_steps > steps:
            found.append(
                f"optimizer.wsd_decay_steps={optimizer.wsd_decay_steps} after "
                f"optimizer.lr_warmup_steps={optimizer.lr_warmup_steps} is more than {whole}"
            )
    return found


def _data(config: Config) -> list[str]:
    found = []
    for key, value in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        names = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(name, str) for name in names):
            found.append(f"{key} must be a file name, hf:NAME, or a list of them, is {value!r}")
    weights, sources = config.data.train_weights, config.data.train
    if weights and (not isinstance(sources, list) or len(weights) != len(sources) or min(weights) <= 0):
        found.append(f"data.train_weights={weights} must be one positive number for each source in the list data.train")
    for key in ("answer_from", "response_from"):
        for way in getattr(config.reward, key):
            found += choice(f"reward.{key}", way, FINDERS)
    if not config.reward.answer_from:
        found.append("reward.answer_from is empty; use whole to take the answer as it is")
    return found


def _batch_sizes(config: Config) -> list[str]:
    found = []
    batch, mini = config.data.train_batch_size, config.train.ppo_mini_batch_size
    if mini > 0 and batch % mini:
        found.append(f"train.ppo_mini_batch_size={mini} does not divide data.train_batch_size={batch}")
    one_step = mini == batch and config.train.ppo_epochs == 1
    if config.train.old_logprobs == OldLogprobs.current and not one_step:
        found.append(
            "train.old_logprobs=current is exact only with one optimizer step per batch: set train.ppo_epochs=1 and "
            "train.ppo_mini_batch_size = data.train_batch_size, or choose recompute or rollout"
        )
    dp = config.megatron.data_parallel
    samples = mini * config.rollout.n
    if dp > 0 and samples > 0 and (samples < dp or (not config.train.packing and samples % dp)):
        found.append(
            f"train.ppo_mini_batch_size * rollout.n = {samples} samples cannot be shared by megatron.data_parallel={dp} ranks"
            + ("" if config.train.packing else " in equal numbers, which train.packing=false needs")
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if config.train.max_tokens_per_micro_batch < longest:
        found.append(
            f"train.max_tokens_per_micro_batch={config.train.max_tokens_per_micro_batch} is less than the longest sequence, "
            f"data.max_prompt_length + rollout.max_response_length = {longest}"
        )
    return found


def _rollout(config: Config) -> list[str]:
    rollout = config.rollout
    found = choice("rollout.engine.dtype", rollout.engine.dtype, ("auto", "float32", "bfloat16", "float16"))
    if rollout.top_p != 1.0 or rollout.top_k != -1:
        found.append(
            "rollout.top_p and rollout.top_k must stay 1.0 and -1: the engine's log-probs are of the full distribution, "
            "which is then not the one that was sampled from"
        )
    if rollout.replay:
        if config.data.eval:
            found.append("rollout.replay starts no engine, so there can be no evaluation: set data.eval=null")
        if rollout.record:
            found.append("rollout.record and rollout.replay exclude each other")
    elif not config.data.train:
        found.append("data.train has no value: the file with the training prompts")
    if rollout.n == 1 and config.algorithm.adv_estimator in GROUP_RELATIVE:
        found.append("rollout.n=1 gives every sample the advantage 0; a group needs at least 2")
    return found


def _environment(config: Config) -> list[str]:
    rollout, reward = config.rollout, config.reward
    if rollout.environment is None:
        if rollout.max_turns != type(rollout)().max_turns:
            return [f"rollout.max_turns={rollout.max_turns} means nothing without rollout.environment"]
        return []
    found = environment.problems(rollout.environment)
    for name in ("function", "extract", "answer_from", "response_from"):
        if getattr(reward, name) != getattr(type(reward)(), name):
            found.append(f"reward.{name} means nothing with rollout.environment, which gives the rewards itself: leave it out")
    if config.moe.routing_replay == RoutingReplay.engine:
        found.append(
            "moe.routing_replay=engine cannot follow the several requests of an episode: with rollout.environment use off or "
            "old_policy"
        )
    return found
