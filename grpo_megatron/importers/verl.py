"""verl's keys (`python3 -m verl.trainer.main_ppo key=value ...`) and ours."""

from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Source,
    System,
    becomes,
    choice,
    dropped,
    elsewhere,
    flag,
    only,
    room_for,
    same,
    trains,
    truth,
)
from grpo_megatron.importers.verl_correction import CORRECTION, ROLLOUT_CORRECTION, bypasses
from grpo_megatron.importers.verl_data import DATA, REWARD
from grpo_megatron.importers.verl_findings import findings, refusal
from grpo_megatron.importers.verl_trainer import ACTOR, MODEL, ROLLOUT, TRAINER

ESTIMATORS = {name: name for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")} | {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
LOSS_MODES = {
    "vanilla": {"algorithm.surrogate": "clip", "algorithm.ratio_level": "token"},
    "gspo": {
        "algorithm.surrogate": "clip",
        "algorithm.ratio_level": "sequence",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"algorithm.surrogate": "cispo", "algorithm.ratio_level": "token"},
    "gpg": {"algorithm.surrogate": "reinforce", "algorithm.ratio_level": "token"},
}
AGGREGATION = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")}


def _clip(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.clip_ratio_low": value, "algorithm.clip_ratio_high": value}


def _longest(source: Source) -> int:
    return source.number("data.max_prompt_length") + source.number("data.max_response_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source[f"{ACTOR}.use_dynamic_bsz"]):
        raise CannotCarry(f"means nothing to verl without {ACTOR}.use_dynamic_bsz")
    # With CP, theirs may be shorter than a sequence, which is then spread over the ranks.
    return {"train.max_tokens_per_micro_batch": max(int(value), _longest(source))}


def _micro_batch(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    if truth(source[f"{ACTOR}.use_dynamic_bsz"]):
        raise CannotCarry(f"means nothing to verl with {ACTOR}.use_dynamic_bsz")
    return {"train.max_tokens_per_micro_batch": int(value) * _longest(source)}


def _validation(value: Any, source: Source) -> dict[str, Any]:
    if truth(value):
        return {"eval.temperature": source.number(f"{ROLLOUT}.val_kwargs.temperature"), "eval.greedy": False}
    return {"eval.temperature": 0.0, "eval.n": 1, "eval.greedy": False}


def _discounting(estimators: tuple[str, ...], why: str):
    """For gamma and lam, which only some of verl's estimators read."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if value != 1 and source["algorithm.adv_estimator"] in estimators:
            raise CannotCarry(f"{value}: {why}")
        return {}

    return convert


def _filter_groups(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.filters": ["nonzero_variance"], "rollout.dynamic_sampling.enabled": True} if truth(value) else {}


def _generated_batches(value: Any, source: Source) -> dict[str, Any]:
    """0: as many as it takes."""
    if not truth(source["algorithm.filter_groups.enable"]):
        return {}
    return {"rollout.dynamic_sampling.max_batches": float(value) or 10000.0}


def _off_is(neutral: Any, why: str):
    """Only the neutral value: another one would sample from another distribution than the log-probs are of."""

    def convert(value: Any, source: Source) -> Any:
        if value is not None and value != neutral:
            raise CannotCarry(f"{value}: {why}")
        return neutral

    return convert


def _turns(value: Any, source: Source) -> dict[str, Any]:
    switch = f"{ROLLOUT}.multi_turn.enable"
    if value in (None, False) or (switch in source and not truth(source[switch])):
        return {}
    raise CannotCarry("several turns and tools are a Python class of yours here: write one and set rollout.environment")


def _replay(value: Any, source: Source) -> str:
    return choice({"disabled": "off", "R2": "old_policy", "R3": "engine"})(value, source)


def _loss_mode(source: Source) -> str:
    """What decides the policy loss in verl: in bypass mode it overwrites loss_mode with that mode's own loss_type."""
    if not bypasses(source):
        return str(source[f"{ACTOR}.policy_loss.loss_mode"])
    return {"ppo_clip": "vanilla", "reinforce": "gpg"}.get(source[f"{CORRECTION}.loss_type"], "unknown")


def _loss(value: Any, source: Source) -> dict[str, Any]:
    return choice(LOSS_MODES, "no such policy loss here")(_loss_mode(source), source)


def _aggregation(value: Any, source: Source) -> Any:
    ours = choice(AGGREGATION)(value, source)
    if _loss_mode(source) != "gspo" or ours == "seq-mean-token-mean":
        return ours
    if truth(source[f"{ACTOR}.use_kl_loss"]) or source.number(f"{ACTOR}.entropy_coeff"):
        raise CannotCarry("verl's gspo takes seq-mean-token-mean and this one for KL and entropy; here one serves all three")
    return {}


def _scale_factor(value: Any, source: Source) -> dict[str, Any]:
    if value is None or source[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return {}
    if source.number(f"{ACTOR}.loss_scale_factor") != source.number("data.max_response_length"):
        raise CannotCarry(
            "seq-mean-token-sum-norm divides by rollout.max_response_length here; the whole gradient has another scale"
        )
    return {}


_PER_GPU = (
    "this limit on padded rectangles becomes a limit on packed tokens; what a micro-batch holds does not change the loss here"
)

ALGORITHM = (
    becomes(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        choice(ESTIMATORS, "no such estimator here (no critic)"),
        "grpo_vectorized: grpo, rloo_vectorized: rloo; gpg has another alpha; a group of one has the advantage 0 here",
        default="gae",
    ),
    becomes("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo", flag, default=True),
    becomes("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", flag, default=False),
    same("algorithm.kl_penalty", "algorithm.kl_penalty", default="kl"),
    same("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type", default="fixed"),
    same("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef", default=0.001),
    same("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl", default=0.1),
    same("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.horizon", default=10000),
    becomes(
        "algorithm.gamma",
        (),
        _discounting(("gae", "reinforce_plus_plus", "remax"), "advantages here are not discounted"),
        "only 1 where the estimator reads it (gae, reinforce_plus_plus, remax)",
    ),
    becomes(
        "algorithm.lam", (), _discounting(("gae",), "there is no critic here"), "only 1 where the estimator reads it (gae)"
    ),
    becomes(
        "algorithm.filter_groups.enable",
        ("algorithm.filters", "rollout.dynamic_sampling.enabled"),
        _filter_groups,
        "true: nonzero_variance, of the reward that is trained with, and new prompts for the groups that go",
    ),
    becomes(
        "algorithm.filter_groups.max_num_gen_batches",
        "rollout.dynamic_sampling.max_batches",
        _generated_batches,
        "0, as many as it takes, is 10000 here",
    ),
    dropped("algorithm.filter_groups.*", "the reward that is trained with is what a group is judged by"),
    *ROLLOUT_CORRECTION,
)

LOSS = (
    becomes(
        f"{ACTOR}.clip_ratio",
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        _clip,
        "the files verl ships set clip_ratio_low and clip_ratio_high to 0.2 themselves, and those win: set alone, clip_ratio may "
        "have had no effect there",
    ),
    same(f"{ACTOR}.clip_ratio_low", "algorithm.clip_ratio_low", default=0.2),
    same(f"{ACTOR}.clip_ratio_high", "algorithm.clip_ratio_high", default=0.2),
    becomes(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.clip_ratio_c",
        lambda value, source: value if _loss_mode(source) == "vanilla" else None,
        "verl always applies dual clip; here null, the default, is off",
        default=3.0,
    ),
    becomes(
        f"{ACTOR}.policy_loss.loss_mode",
        ("algorithm.surrogate", "algorithm.ratio_level", "algorithm.loss_agg_mode"),
        _loss,
        "vanilla: clip of the token's ratio; gspo: clip of the sequence's, with seq-mean-token-mean whatever loss_agg_mode says; "
        "cispo; gpg: reinforce; bypass_mode puts its own loss_type in its place",
        default="vanilla",
    ),
    becomes(
        f"{ACTOR}.loss_agg_mode",
        "algorithm.loss_agg_mode",
        _aggregation,
        "the mean is over the whole optimizer step here, never over a micro-batch or a rank; gspo does not read it; before "
        "February 2026 verl's seq-mean-token-sum-norm was not divided by the number of trajectories",
        default="token-mean",
    ),
    becomes(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_loss", flag, default=False),
    same(f"{ACTOR}.kl_loss_coef", "algorithm.kl_loss_coef", default=0.001),
    same(
        f"{ACTOR}.kl_loss_type",
        "algorithm.kl_loss_type",
        "the same names; full is computed here (the exact KL over the vocabulary)",
        default="low_var_kl",
    ),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coeff", default=0),
    dropped(f"{ACTOR}.policy_loss.*", "belongs to losses that are not here (clip-cov, kl-cov)"),
    becomes(
        f"{ACTOR}.loss_scale_factor",
        (),
        _scale_factor,
        "seq-mean-token-sum-norm divides by rollout.max_response_length here; not set, verl divides by the width of the padded "
        "response tensor",
    ),
)

BATCH = (
    *trains(
        same("data.train_batch_size", "data.train_batch_size", default=1024),
        same(
            f"{ACTOR}.ppo_mini_batch_size",
            "train.ppo_mini_batch_size",
            "prompts in both (verl multiplies by rollout.n itself); must divide data.train_batch_size here",
            default=256,
        ),
        same(f"{ACTOR}.ppo_epochs", "train.ppo_epochs", default=1),
        same(f"{ROLLOUT}.n", "rollout.n", default=1),
    ),
    becomes(
        f"{ACTOR}.use_dynamic_bsz",
        "train.max_tokens_per_micro_batch",
        room_for(_longest),
        "micro-batches are always packed by tokens here, at least as many as the longest sequence has",
        default=False,
    ),
    becomes(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "train.max_tokens_per_micro_batch",
        _micro_batch,
        _PER_GPU,
        unit="sequences per GPU -> tokens",
    ),
    becomes(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "train.max_tokens_per_micro_batch",
        _dynamic_tokens,
        "per CP rank in both; at least the longest sequence here",
    ),
    dropped(f"{ACTOR}.ppo_micro_batch_size", "deprecated there; use the one per GPU"),
    dropped(
        "*micro_batch_size*",
        "one partition into micro-batches serves every pass over a step (train.max_tokens_per_micro_batch)",
    ),
    dropped(
        "*max_token_len*", "one partition into micro-batches serves every pass over a step (train.max_tokens_per_micro_batch)"
    ),
    dropped("*log_prob_use_dynamic_bsz", "micro-batches are always packed by tokens here"),
    becomes(f"{ACTOR}.shuffle", (), only((False,), "the order within a step is that of the batch here"), "only false"),
)

ENGINE = (
    *trains(
        same(f"{MODEL}.path", "model.path"),
        same(f"{ROLLOUT}.temperature", "rollout.temperature", default=1.0),
        becomes(
            f"{ROLLOUT}.top_p",
            "rollout.top_p",
            _off_is(1, "log-probs would be of another distribution than the one sampled from"),
            "only 1: see rollout.top_k",
            default=1.0,
        ),
        becomes(
            f"{ROLLOUT}.top_k",
            "rollout.top_k",
            lambda value, source: _off_is(-1, "log-probs would be of another distribution than the one sampled from")(
                value if value is not None and 0 < value < 500_000 else -1, source
            ),
            "only -1 (off), as are 0 and numbers above any vocabulary",
            default=-1,
        ),
        becomes(f"{ROLLOUT}.do_sample", (), only((True,), "training samples are never greedy here"), "only true"),
        becomes(
            f"{ROLLOUT}.ignore_eos", (), only((False, None), "a response ends at the model's end token here"), "only false"
        ),
        becomes(f"{ROLLOUT}.repetition_penalty", (), only((1, None), "would be another distribution"), "only 1"),
        becomes(f"{ROLLOUT}.over_sample_rate", (), only((0, None), "every sample of a step is waited for here"), "only 0"),
        becomes(f"{ROLLOUT}.quantization", (), only((None,), "engines run the weights that are trained"), "only null"),
        becomes(f"{ROLLOUT}.multi_turn.enable", "rollout.environment", _turns, "only false; else a class of yours"),
        becomes(f"{ROLLOUT}.multi_turn.tool_config_path", "rollout.environment", _turns, "a class of yours"),
        becomes(f"{ROLLOUT}.multi_turn.interaction_config_path", "rollout.environment", _turns, "a class of yours"),
        becomes(
            f"{ROLLOUT}.agent.default_agent_loop",
            "rollout.environment",
            lambda value, source: {} if value == "single_turn_agent" else _turns(value, source),
            "only single_turn_agent; else a class of yours",
        ),
        becomes(f"{ROLLOUT}.agent.agent_loop_config_path", "rollout.environment", _turns, "a class of yours"),
        becomes(
            f"{ACTOR}.router_replay.mode",
            "moe.routing_replay",
            _replay,
            "disabled: off, R2: old_policy, R3: engine",
        ),
    ),
    dropped(f"{ACTOR}.router_replay.*", "routing is replayed within a step, never from a file"),
    dropped(f"{ROLLOUT}.enable_rollout_routing_replay", "follows from moe.routing_replay=engine (router_replay.mode=R3)"),
    dropped(f"{ROLLOUT}.multi_turn.*", "what a turn is, an environment says: rollout.environment, rollout.max_turns"),
    dropped(f"{ROLLOUT}.calculate_log_probs", "the engine's log-probs are always recorded here"),
    same(f"{ROLLOUT}.enable_prefix_caching", "rollout.engine.prefix_cache"),
    same(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.engine.tensor_parallel", default=2),
    same(f"{ROLLOUT}.gpu_memory_utilization", "rollout.engine.mem_fraction", default=0.5),
    same(f"{ROLLOUT}.max_num_seqs", "rollout.engine.max_running_requests", default=1024),
    same(f"{ROLLOUT}.dtype", "rollout.engine.dtype", default="bfloat16"),
    becomes(
        f"{ROLLOUT}.load_format",
        "rollout.engine.load_format",
        lambda value, source: "dummy" if str(value).startswith("dummy") else "auto",
        "dummy, dummy_megatron, …: dummy; all others: auto",
    ),
    becomes(f"{ROLLOUT}.name", (), only(("sglang",), "the engine is always SGLang here"), "any engine there is SGLang here"),
    same(f"{ROLLOUT}.val_kwargs.n", "eval.n", default=1),
    same(f"{ROLLOUT}.val_kwargs.top_p", "eval.top_p", default=1.0),
    becomes(f"{ROLLOUT}.val_kwargs.temperature", "eval.temperature", elsewhere, "read with do_sample", default=0),
    becomes(
        f"{ROLLOUT}.val_kwargs.do_sample",
        ("eval.temperature", "eval.n", "eval.greedy"),
        _validation,
        "false: greedy, one sample",
        default=False,
    ),
    dropped(f"{ROLLOUT}.*", "has no counterpart: how the engine is run is decided here"),
    dropped("actor_rollout_ref.hybrid_engine", "always true in verl's GRPO; here cluster.placement"),
)

VERL = System(
    "verl",
    trains(*ALGORITHM, dropped("algorithm.*", "no such part of the algorithm here"), *LOSS)
    + BATCH
    + DATA
    + REWARD
    + ENGINE
    + TRAINER,
    findings,
    refusal,
)
