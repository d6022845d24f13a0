"""Rules across fields. All are checked, and all violations are reported at once."""

from grpo_megatron.algorithm.kl import KL_TYPES
from grpo_megatron.batch.weights import LOSS_AGG_MODES
from grpo_megatron.config.schema import Config, OldLogprobs, Precision, TransformerImpl
from grpo_megatron.doctor import fp8_problem, transformer_engine_problem
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.rewards.answers import FINDERS


def violations(config: Config, command: str = "train") -> list[str]:
    """Every broken rule as one sentence that names the keys; command: train or sft."""
    found = _ranges(config) + _precision(config) + ParallelSizes.from_config(config.megatron).violations()
    found += _data(config)
    if command == "train":
        found += _algorithm(config) + _batch_sizes(config) + _rollout(config)
    return found


def _ranges(config: Config) -> list[str]:
    positive = {
        "run.total_steps": config.run.total_steps,
        "data.train_batch_size": config.data.train_batch_size,
        "data.max_prompt_length": config.data.max_prompt_length,
        "rollout.n": config.rollout.n,
        "rollout.max_response_length": config.rollout.max_response_length,
        "rollout.max_concurrency": config.rollout.max_concurrency,
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
        "eval.n": config.eval.n,
        "eval.top_p": config.eval.top_p,
    }
    not_negative = {
        "optimizer.lr_warmup_steps": config.optimizer.lr_warmup_steps,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip_grad": config.optimizer.clip_grad,
        "algorithm.clip_ratio_low": config.algorithm.clip_ratio_low,
        "algorithm.clip_ratio_high": config.algorithm.clip_ratio_high,
        "eval.every": config.eval.every,
        "eval.temperature": config.eval.temperature,
        "checkpoint.every": config.checkpoint.every,
    }
    found = [f"{key} must be greater than 0, is {value}" for key, value in positive.items() if not value > 0]
    found += [f"{key} must not be negative, is {value}" for key, value in not_negative.items() if not value >= 0]
    return found


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
            found += _choice(f"reward.{key}", way, FINDERS)
    if not config.reward.answer_from:
        found.append("reward.answer_from is empty; use whole to take the answer as it is")
    return found


def _choice(key: str, value: str, choices) -> list[str]:
    return [] if value in choices else [f"{key}={value} is unknown; choose one of {', '.join(choices)}"]


def _algorithm(config: Config) -> list[str]:
    algorithm = config.algorithm
    found = _choice("algorithm.adv_estimator", algorithm.adv_estimator, ("grpo",))
    found += _choice("algorithm.loss_agg_mode", algorithm.loss_agg_mode, LOSS_AGG_MODES)
    found += _choice("algorithm.kl_loss_type", algorithm.kl_loss_type, KL_TYPES)
    found += _choice("rollout.engine.dtype", config.rollout.engine.dtype, ("auto", "float32", "bfloat16", "float16"))
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
    found = []
    rollout = config.rollout
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
    if rollout.n == 1 and config.algorithm.adv_estimator == "grpo":
        found.append("rollout.n=1 gives every sample the advantage 0; a group needs at least 2")
    return found
