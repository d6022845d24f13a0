"""Keys of verl's and RLinf's current schemas are carried over, or named with a true reason.

The lists hold facts about keys of verl (1dda039b, August 2026) and RLinf (a3816b59, August 2026).
"""

import re

import pytest

from grpo_megatron.config.load import known_keys
from grpo_megatron.importers import RLINF, SYSTEMS, VERL, Settings, import_settings

ACTOR, ROLLOUT, MEGATRON = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.actor.megatron",
)
OPTIM, OVERRIDE = f"{ACTOR}.optim", f"{MEGATRON}.override_transformer_config"
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"

VERL_CARRIED = [
    ({f"{ACTOR}.router_replay.mode": "R3"}, {"moe.routing_replay": "engine"}),
    ({f"{MEGATRON}.router_replay.mode": "R3"}, {"moe.routing_replay": "engine"}),
    ({f"{MEGATRON}.router_replay.mode": "R2"}, {"moe.routing_replay": "old_policy"}),
    ({f"{MEGATRON}.router_replay.mode": "disabled"}, {"moe.routing_replay": "off"}),
    ({f"{ACTOR}.veomni.router_replay.mode": "R3"}, {"moe.routing_replay": "engine"}),
    (
        {f"{ACTOR}.router_replay.mode": "disabled", f"{MEGATRON}.router_replay.mode": "R3",
         f"{ACTOR}.veomni.router_replay.mode": None},
        {"moe.routing_replay": "engine"},
    ),
    ({f"{ROLLOUT}.quantization": "fp8"}, {"rollout.engine.quantization": "fp8"}),
    ({f"{ROLLOUT}.quantization": None}, {"rollout.engine.quantization": "none"}),
    (
        {f"{ROLLOUT}.tensor_model_parallel_size": 8, f"{ROLLOUT}.expert_parallel_size": 4},
        {"rollout.engine.expert_parallel": 4},
    ),
    (
        {f"{ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype": "fp8_e5m2"},
        {"rollout.engine.kv_cache_dtype": "fp8_e5m2"},
    ),
    ({f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype": "fp8"}, {"rollout.engine.kv_cache_dtype": "fp8_e4m3"}),
    ({f"{ROLLOUT}.engine_kwargs.sglang.disable_radix_cache": True}, {"rollout.engine.prefix_cache": False}),
    (
        {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 2048},
        {"weight_sync.bucket_bytes": 2**31},
    ),
    ({f"{ROLLOUT}.multi_turn.max_assistant_turns": 5}, {"rollout.max_turns": None}),
    (
        {f"{OVERRIDE}.fp8": "hybrid", f"{OVERRIDE}.fp8_recipe": "blockwise"},
        {"megatron.precision": "fp8", "megatron.fp8.format": "hybrid", "megatron.fp8.recipe": "blockwise"},
    ),
    ({f"{OVERRIDE}.fp8": "e4m3"}, {"megatron.precision": "fp8", "megatron.fp8.format": "e4m3"}),
    ({f"{OVERRIDE}.num_layers_at_end_in_bf16": 2}, {"megatron.fp8.bf16_last_layers": 2}),
    ({f"{MEGATRON}.override_ddp_config.overlap_grad_reduce": True}, {"megatron.overlap": True}),
    ({f"{ACTOR}.veomni.optimizer_offload": True}, {"optimizer.offload": True}),
    ({f"{ACTOR}.checkpoint.async_save": True}, {"checkpoint.async_save": True}),
    ({"trainer.max_actor_ckpt_to_keep": 5}, {"checkpoint.keep": 5}),
    ({"trainer.project_name": "mine"}, {"monitor.wandb_project": "mine"}),
    ({f"{OPTIM}.override_optimizer_config.adam_eps": 1e-5}, {"optimizer.eps": 1e-5}),
    (
        {f"{OPTIM}.lr_decay_style": "WSD", f"{OPTIM}.lr_wsd_decay_steps": 30,
         f"{OPTIM}.lr_wsd_decay_style": "exponential"},
        {"optimizer.lr_schedule": "wsd", "optimizer.wsd_decay_steps": 30,
         "optimizer.wsd_decay_style": "exponential"},
    ),
    ({f"{OPTIM}.lr_wsd_decay_style": "exponential"}, {"optimizer.wsd_decay_style": None}),
    (
        {f"{OPTIM}.lr": 2e-6, f"{OPTIM}.lr_scheduler_type": "cosine", f"{OPTIM}.min_lr_ratio": 0.1},
        {"optimizer.lr_min": 2e-7},
    ),
    (
        {f"{BUFFER}.enable": True, f"{BUFFER}.len": 128, f"{BUFFER}.penalty_factor": 0.5,
         "reward.reward_kwargs.max_resp_len": 512},
        {"reward.overlong_buffer.length": 128, "reward.overlong_buffer.penalty": 0.5},
    ),
]  # fmt: skip


def imported(system, values):
    """Import these values in an otherwise legal run, whose steps and reward are given unless it has its
    own.
    """
    start = (
        {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8}
        if system is VERL
        else {"reward.reward_type": "math"}
    )
    given = {} if any(key.startswith("reward") for key in values) else {"reward.function": "math"}
    return import_settings(system, Settings(start | values), given | {"run.total_steps": 9})


def carried(system, theirs, ours):
    """Check that `theirs` becomes `ours`, where None is a key that is not set, with nothing to accept."""
    result = imported(system, theirs)
    assert {key: result.values.get(key) for key in ours} == ours
    assert [line for line in result.changes_training if not line.startswith("reward: ")] == []
    assert result.unknown == []


@pytest.mark.parametrize(("theirs", "ours"), VERL_CARRIED)
def test_a_key_of_verl_that_has_a_counterpart_is_carried_over(theirs, ours):
    """`actor.megatron.router_replay.mode=R3` used to be reported as "decided here", and was lost."""
    carried(VERL, theirs, ours)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"data.system_prompt": "Think."}, {"data.system_prompt": "Think."}),
        ({"data.use_chat_template": False}, {"data.chat_template": "none"}),
        (
            {"data.apply_chat_template_kwargs.enable_thinking": False},
            {"data.chat_template_args": {"enable_thinking": False}},
        ),
        ({"actor.model.expert_tensor_parallel_size": 2}, {"megatron.expert_tensor_parallel": 2}),
        ({"actor.model.virtual_pipeline_model_parallel_size": 2}, {"megatron.virtual_pipeline": 2}),
        ({"actor.model.moe_aux_loss_coeff": 0.001}, {"moe.aux_loss_coeff": 0.001}),
        ({"actor.model.model_path": "/m"}, {"model.path": "/m"}),
        ({"actor.model.model_path": "/m", "rollout.model.model_path": "/m"}, {"model.path": "/m"}),
        ({"actor.fsdp_config.gradient_checkpointing": True}, {"megatron.recompute": "full"}),
        ({"actor.enable_offload": True}, {"megatron.sleep": True}),
        ({"actor.megatron.distributed_timeout_minutes": 20}, {"megatron.collective_timeout": 1200}),
        ({"actor.optim.overlap_param_gather": True}, {"megatron.overlap": True}),
        ({"actor.optim.optimizer_cpu_offload": True}, {"optimizer.offload": True}),
        ({"actor.optim.min_lr": 1e-7, "actor.lr_sched.lr_decay_style": "cosine"}, {"optimizer.lr_min": 1e-7}),
        (
            {"actor.lr_sched.lr_decay_style": "WSD", "actor.lr_sched.lr_wsd_decay_iters": 9},
            {"optimizer.wsd_decay_steps": 9},
        ),
        ({"rollout.model.precision": "bf16"}, {"rollout.engine.dtype": "bfloat16"}),
        ({"rollout.vllm.enable_prefix_caching": False}, {"rollout.engine.prefix_cache": False}),
        (
            {"rollout.sglang.enable_ep_moe": True, "rollout.tensor_parallel_size": 4},
            {"rollout.engine.expert_parallel": 4},
        ),
        ({"runner.logger.project_name": "mine"}, {"monitor.wandb_project": "mine"}),
    ],
)
def test_a_key_of_rlinf_that_has_a_counterpart_is_carried_over(theirs, ours):
    carried(RLINF, theirs, ours)


@pytest.mark.parametrize(
    ("system", "key", "value", "says"),
    [
        (VERL, f"{ROLLOUT}.data_parallel_size", 4, "set rollout.engine.tensor_parallel to this product"),
        (VERL, f"{ROLLOUT}.expert_parallel_size", 64, "TP * DP in verl"),
        (VERL, f"{ROLLOUT}.pipeline_model_parallel_size", 2, "no pipeline stages"),
        (VERL, f"{ROLLOUT}.nnodes", 2, "cluster.placement=separate"),
        (VERL, f"{ROLLOUT}.agent.num_workers", 4, "reward.workers"),
        (VERL, f"{ROLLOUT}.prometheus.enable", True, "monitor.listeners=[prometheus]"),
        (VERL, f"{ROLLOUT}.checkpoint_engine.backend", "nccl", "weight_sync.transport"),
        (VERL, f"{ROLLOUT}.val_kwargs.top_k", 20, "no top-k"),
        (VERL, f"{OVERRIDE}.num_layers_in_first_pipeline_stage", 11, "megatron.pipeline_layers"),
        (VERL, f"{MEGATRON}.seed", 7, "run.seed"),
        (VERL, "trainer.logger", ["console", "wandb"], "monitor.listeners=[wandb]"),
        (VERL, "trainer.log_val_generations", 10, "eval.save_samples"),
        (VERL, "trainer.rollout_data_dir", "/x", "rollout.record"),
        (VERL, "trainer.esi_redundant_time", 60, "run.grace"),
        (VERL, "reward.num_workers", 4, "reward.workers"),
        (VERL, "reward_model.num_workers", 4, "reward.workers"),
        (VERL, "reward.sandbox_fusion.memory_limit_mb", 512, "reward.code.limits"),
        (VERL, "skip.rollout.enable", True, "rollout.replay"),
        (VERL, "model_engine", "megatron", "the trainer is Megatron"),
        (RLINF, "runner.logger.logger_backends", ["wandb"], "monitor.listeners=[wandb]"),
        (RLINF, "rollout.validate_weight", True, "weight_sync.probe_every"),
        (RLINF, "rollout.seed", 1, "run.seed"),
    ],
)
def test_a_key_that_is_not_carried_over_names_what_serves_its_purpose(system, key, value, says):
    result = imported(system, {key: value})
    (line,) = (line for line in result.not_carried if line.startswith(f"{key}="))
    assert says in line
    assert not result.unknown


@pytest.mark.parametrize(
    ("system", "key", "value", "says"),
    [
        (VERL, f"{MEGATRON}.qat.enable", True, "not quantized"),
        (VERL, f"{ACTOR}.fsdp_config.qat.enable", True, "not quantized"),
        (VERL, f"{ROLLOUT}.quantization", "torchao", "fp8"),
        (VERL, f"{ROLLOUT}.response_length", 64, "a different limit"),
        (VERL, f"{ACTOR}.fsdp_config.dtype", "float16", "megatron.precision"),
        (VERL, f"{OPTIM}.optimizer", "muon", "AdamW"),
        (VERL, f"{OPTIM}.exp_avg_dtype", "bf16", "float32"),
        (VERL, f"{OPTIM}.lr_warmup_init", 1e-7, "begins at 0"),
        (VERL, "trainer.val_only", True, "grpo-megatron eval"),
        (VERL, "trainer.v1.trainer_mode", "separate_async", "take turns"),
        (VERL, "data.gen_batch_size", 64, "over_sampling"),
        (VERL, "distillation.enabled", True, "no teacher"),
        (VERL, "reward.custom_reward_function.path", "r.py", "module:function"),
        (VERL, "reward.reward_manager.name", "prime", "module:function"),
        (VERL, "reward.reward_model.enable", True, "reward.model.path"),
        (VERL, "reward.sandbox_fusion.url", "u", "reward.function=code"),
        (RLINF, "actor.optim.fp16", True, "no fp16"),
        (RLINF, "actor.fsdp_config.mixed_precision.param_dtype", "fp16", "no fp16"),
        (RLINF, "actor.optim.optimizer", "muon", "AdamW"),
        (RLINF, "algorithm.max_num_gen_batches", 3, "rollout.dynamic_sampling"),
        (RLINF, "algorithm.max_resample", 3, "rollout.dynamic_sampling"),
        (RLINF, "algorithm.use_critic", True, "no critic"),
        (RLINF, "rollout.custom_chat_template", "{% %}", "data.chat_template=FILE"),
        (RLINF, "actor.lr_sched.weight_decay_incr_style", "cosine", "constant"),
    ],
)
def test_a_key_that_trains_something_else_must_be_accepted(system, key, value, says):
    result = imported(system, {key: value})
    assert any(line.startswith(f"{key}=") and says in line for line in result.changes_training), (
        result.report()
    )


# Defaults of theirs, which Hydra writes beside a run's log, and which change nothing.
HARMLESS = {
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.dro_beta": None,
    f"{ACTOR}.rollout_n": 8,
    f"{ACTOR}.calculate_entropy": False,
    f"{ACTOR}.calculate_sum_pi_squared": False,
    f"{ACTOR}.data_loader_seed": 42,
    f"{ACTOR}.pad_to_length": False,
    f"{ACTOR}.qat.enable": False,
    f"{ACTOR}.qat.mode": "w4a16",
    f"{OPTIM}.optimizer": "adam",
    f"{OPTIM}.lr_warmup_init": 0.0,
    f"{OPTIM}.weight_decay_incr_style": "constant",
    f"{OPTIM}.lr_wsd_decay_style": "exponential",
    f"{OPTIM}.use_checkpoint_opt_param_scheduler": False,
    f"{OPTIM}.main_grads_dtype": "fp32",
    f"{OPTIM}.muon_momentum": 0.95,
    f"{OPTIM}.optimizer_impl": "torch.optim",
    f"{OPTIM}.min_lr_ratio": 0.0,
    f"{OPTIM}.num_cycles": 0.5,
    f"{OPTIM}.zero_indexed_step": True,
    f"{OPTIM}.warmup_style": None,
    f"{OPTIM}._target_": "verl.workers.config.McoreOptimizerConfig",
    "algorithm._target_": "verl.trainer.config.AlgoConfig",
    "algorithm.use_pf_ppo": False,
    "algorithm.pf_ppo.weight_pow": 2.0,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.filter_groups.max_inflight_gen_batches": 1,
    "reward.num_workers": 8,
    "reward.custom_reward_function.path": None,
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_manager.source": "register",
    "reward.reward_manager.name": "naive",
    "reward.reward_manager.module.path": None,
    "reward.reward_manager.module.name": "custom_reward_manager",
    "reward.reward_model.enable": False,
    "reward.reward_model.rollout.top_k": -1,
    "reward.sandbox_fusion.url": None,
    "reward.sandbox_fusion.max_concurrent": 64,
    "distillation.enabled": False,
    "distillation.distillation_loss.topk": 32,
    "transfer_queue.enable": False,
    "skip.rollout.enable": False,
    "trainer.val_only": False,
    "trainer.v1.trainer_mode": "sync",
}


def test_what_the_schema_has_by_default_needs_no_acceptance():
    carried(VERL, HARMLESS, {})


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_reason_hides_behind_a_decision_and_each_names_keys_that_exist(name):
    """A reason such as "decided here" does not say what to set. A key that a reason names must exist."""
    sections = {key.partition(".")[0] for key in known_keys()} - {"data", "rollout", "algorithm", "reward"}
    for entry in SYSTEMS[name].entries:
        assert "decided here" not in entry.note, entry.theirs
        for key in re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w.*])", entry.note):
            if key.partition(".")[0] in sections:
                assert key in known_keys(), (entry.theirs, key)
