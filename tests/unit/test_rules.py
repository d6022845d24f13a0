"""The rules as data: each names the keys that it reads, and each can be broken."""

import dataclasses

import pytest

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.command import Command
from grpo_megatron.config.load import known_keys, read_config
from grpo_megatron.model.architecture import MoE
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.cluster_rules import CLUSTER, known_capabilities
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.preflight.rule import COMMANDS
from grpo_megatron.preflight.rules import all_rules, violations
from tests.unit.test_parallel_sizes import ARCH

NEEDED = ["model.path=m", "data.train=d.jsonl"]
ENVIRONMENT = "rollout.environment=tests.unit.toy_environments:Counting"
EIGHT = ["cluster.gpu=h100-80g", "cluster.nodes=1", "cluster.gpus_per_node=8"]

# One configuration for each rule that breaks it.
BROKEN = {
    "something_is_filtered": ["rollout.dynamic_sampling.enabled=true"],
    "disk_has_a_folder": ["weight_sync.transport=disk"],
    "hangs_are_found_first": ["cluster.hang_timeout=1800"],
    "delta_has_engines_that_keep_weights": ["cluster.placement=colocated", "weight_sync.delta=true"],
    "mini_batch_divides": ["train.ppo_mini_batch_size=5"],
    "current_logprobs_are_of_one_step": ["train.old_logprobs=current", "train.ppo_epochs=2"],
    "samples_can_be_shared": ["megatron.data_parallel=3", "train.packing=false"],
    "examples_can_be_shared": ["megatron.data_parallel=64"],
    "pairs_can_be_shared": ["megatron.data_parallel=64"],
    "reward_model_is_somewhere": ["reward.function=model"],
    "an_evaluation_has_no_reward_model": ["reward.function=model", "reward.model.path=r"],
    "dynamic_sampling_has_its_rewards": [
        "reward.function=model",
        "reward.model.path=r",
        "rollout.dynamic_sampling.enabled=true",
        "algorithm.filters=[nonzero_variance]",
    ],
    "recorded_samples_have_rewards": [
        "reward.function=model",
        "reward.model.path=r",
        "rollout.record=s.jsonl",
    ],
    "longest_pair_fits": ["train.max_tokens_per_micro_batch=2047"],
    "reward_models_are_trained_whole": ["megatron.lora.rank=4"],
    "longest_sequence_fits": ["train.max_tokens_per_micro_batch=1023"],
    "fp32_has_its_layers": ["megatron.precision=fp32", "megatron.transformer_impl=transformer_engine"],
    "delayed_is_for_all_layers": [
        "megatron.precision=fp8",
        "megatron.fp8.recipe=delayed",
        "megatron.fp8.bf16_last_layers=1",
    ],
    "delayed_recomputes_whole_layers": [
        "megatron.precision=fp8",
        "megatron.fp8.recipe=delayed",
        "megatron.recompute=selective",
        "megatron.recompute_modules=[layernorm]",
    ],
    "fp8_has_its_layers": ["megatron.precision=fp8", "megatron.transformer_impl=local"],
    "adapters_have_targets": ["megatron.lora.rank=4", "megatron.lora.targets=[]"],
    "fused_targets_go_together": ["megatron.lora.rank=4", "megatron.lora.targets=[q_proj,v_proj]"],
    "adapters_have_local_layers": ["megatron.lora.rank=4", "megatron.transformer_impl=transformer_engine"],
    "old_routing_has_its_pass": ["moe.routing_replay=old_policy", "train.old_logprobs=rollout"],
    "lr_falls": ["optimizer.lr_min=1"],
    "wsd_has_a_decay": ["optimizer.lr_schedule=wsd"],
    "schedule_of_train_fits": [
        "optimizer.lr_schedule=cosine",
        "optimizer.lr_warmup_steps=201",
        "train.ppo_epochs=2",
    ],
    "schedule_of_sft_fits": [
        "optimizer.lr_schedule=wsd",
        "optimizer.wsd_decay_steps=101",
        "train.ppo_epochs=2",
    ],
    "training_data_is_named": ["data.train=[d.jsonl,5]"],
    "held_out_data_is_named": ["data.eval={a: 1}"],
    "weights_match_the_sources": ["data.train_weights=[1.0,2.0]"],
    "examples_have_no_weights": ["data.train=[a.jsonl,b.jsonl]", "data.train_weights=[1.0,2.0]"],
    "there_are_prompts": ["data.train=null"],
    "answers_are_somewhere": ["reward.answer_from=[]"],
    "extract_has_its_reward": ["reward.extract=a", "reward.function=math"],
    "rewards_are_known": ["reward.terms={right: {function: mathh}}"],
    "a_right_program_passes": ["reward.function=code", "reward.code.preamble=import ("],
    "terms_or_one_function": ["reward.terms={right: {function: math}}", "reward.function=math"],
    "failure_value_is_used": ["reward.failure_value=-1"],
    "smaller_groups_can_be_shared": [
        "reward.on_failure=leave_out",
        "train.packing=false",
        "megatron.data_parallel=2",
    ],
    "programs_end_before_the_reward": ["reward.function=code", "reward.code.limits.seconds=30"],
    "sampling_is_of_the_full_distribution": ["rollout.top_k=20"],
    "replay_has_no_evaluation": ["rollout.replay=r.jsonl", "data.eval=e.jsonl"],
    "replay_is_not_recorded": ["rollout.replay=r.jsonl", "rollout.record=s.jsonl"],
    "turns_have_an_environment": ["rollout.max_turns=3"],
    "beams_are_of_one_turn": ["rollout.strategy=beam", "rollout.stop=[a]"],
    "beam_settings_have_their_strategy": ["rollout.beam.length_penalty=0"],
    "environment_is_known": ["rollout.environment=frozen_lake"],
    "environment_gives_the_rewards": [ENVIRONMENT, "reward.function=math"],
    "settings_have_their_environment": [ENVIRONMENT, "rollout.tools=[]"],
    "template_history_has_its_template": [ENVIRONMENT, "rollout.history=template", "data.chat_template=none"],
    "gpus_per_node_means_something": ["cluster.gpu=none", "cluster.gpus_per_node=8"],
    "fp8_can_run": ["megatron.precision=fp8", "cluster.gpu=a100-80g"],
    "transformer_engine_can_run": ["megatron.transformer_impl=transformer_engine", "cluster.gpu=none"],
    "emulation_is_possible": ["megatron.emulate_kernels=true", "cluster.gpu=h100-80g"],
    "mxfp8_has_its_gpu": ["megatron.precision=fp8", "megatron.fp8.recipe=mxfp8", "cluster.gpu=h200"],
    "experts_activations_have_their_layers": [
        "megatron.recompute=selective",
        "megatron.recompute_modules=[moe_act]",
        "megatron.transformer_impl=local",
    ],
    "ranks_and_engines_fit": [*EIGHT, "megatron.data_parallel=8"],
    "ranks_fit": [*EIGHT, "megatron.data_parallel=16"],
    "tensor_parallel_is_within_a_node": ["cluster.gpus_per_node=8", "megatron.tensor_parallel=16"],
    "engines_fit_nodes": ["cluster.gpus_per_node=8", "rollout.engine.tensor_parallel=12"],
    "kv_cache_in_fp8_has_gpus": ["rollout.engine.kv_cache_dtype=fp8_e4m3", "cluster.gpu=none"],
    "engines_compute_in_fp8": ["rollout.engine.quantization=fp8", "cluster.gpu=b200"],
    "scales_of_the_cache_are_not_random": [
        "rollout.engine.quantization=fp8",
        "rollout.engine.load_format=dummy",
    ],
    "data_parallel_attention_has_gpus": [
        "rollout.engine.tensor_parallel=2",
        "rollout.engine.data_parallel_attention=2",
        "cluster.gpu=none",
    ],
    "engines_load_what_is_evaluated": ["rollout.engine.load_format=dummy"],
    "engines_alone_fit": ["rollout.engine.num_engines=9", *EIGHT],
    "longest_request_fits": ["rollout.engine.max_total_tokens=8"],
    "engine_ranks_divide": ["rollout.engine.tensor_parallel=4", "rollout.engine.expert_parallel=3"],
    "sequence_parallel_has_ranks": ["megatron.sequence_parallel=true"],
    "virtual_pipeline_has_stages": ["megatron.virtual_pipeline=2"],
    "pipeline_layers_are_complete": ["megatron.pipeline_parallel=2", "megatron.pipeline_layers=[4,4,4]"],
    "experts_divide_a_stage": ["megatron.expert_parallel=2"],
    "heads_divide": ["megatron.tensor_parallel=8"],
    "kv_heads_divide": ["megatron.tensor_parallel=3"],
    "qkv_rows_divide": ["megatron.tensor_parallel=7"],
    "intermediate_size_divides": ["megatron.tensor_parallel=5"],
    "hidden_size_divides": ["megatron.tensor_parallel=7", "megatron.sequence_parallel=true"],
    "chunks_hold_all_layers": ["megatron.pipeline_parallel=5"],
    "there_are_experts": ["megatron.expert_parallel=2", "megatron.data_parallel=2"],
    "expert_parallel_divides": ["megatron.expert_parallel=4", "megatron.data_parallel=4"],
    "experts_size_divides": ["megatron.expert_tensor_parallel=3", "megatron.data_parallel=3"],
    "experts_with_tp_need_sp": ["megatron.tensor_parallel=2"],
    "estimator_is_known": ["algorithm.adv_estimator=gae"],
    "surrogate_is_known": ["algorithm.surrogate=ppo"],
    "filters_are_known": ["algorithm.filters=[hard]"],
    "groups_can_be_compared": ["rollout.n=1"],
    "overlong_buffer_is_within_the_response": ["reward.overlong_buffer.length=513"],
    "sequence_sum_has_its_weights": ["algorithm.ratio_level=sequence_sum"],
    "reinforce_has_no_ratio": ["algorithm.surrogate=reinforce", "algorithm.ratio_level=sequence"],
    "dual_clip_has_its_loss": ["algorithm.clip_ratio_c=3", "algorithm.surrogate=cispo"],
    "early_stop_has_a_ratio": ["algorithm.early_stop_imp_ratio=5", "train.old_logprobs=current"],
    "entropy_floor_has_a_bonus": ["algorithm.entropy_floor=1"],
    "unbiased_kl_has_its_estimator": ["algorithm.kl_loss_unbiased=true"],
    "kl_in_reward_is_known_in_time": ["algorithm.use_kl_in_reward=true", "train.old_logprobs=current"],
    "adaptive_kl_has_its_kl": ["algorithm.kl_ctrl.type=adaptive"],
    "there_is_a_reference_to_reset": ["ref.reset_every=5"],
    "mismatch_is_weighted_once": ["mismatch.correction=tis", "train.old_logprobs=rollout"],
    "bounds_have_a_correction": ["mismatch.ratio_high=3"],
    "bounds_are_in_order": ["mismatch.correction=icepop", "mismatch.ratio_low=3", "mismatch.ratio_high=2"],
    "bounds_have_a_rejection": ["mismatch.rejection_high=3"],
    "kl_rejection_has_its_bound": ["mismatch.rejection=token_k3"],
    "rejection_bounds_are_in_order": [
        "mismatch.rejection=seq_ratio",
        "mismatch.rejection_low=3",
        "mismatch.rejection_high=2",
    ],
    "renormalize_has_a_mask": ["mismatch.renormalize=true"],
    "renormalize_knows_in_time": [
        "mismatch.renormalize=true",
        "mismatch.rejection=seq_ratio",
        "train.old_logprobs=rollout",
    ],
    "sequence_sum_has_one_factor": [
        "algorithm.ratio_level=sequence_sum",
        "algorithm.loss_agg_mode=group-sum",
        "mismatch.correction=tis",
    ],
    "threshold_has_an_action": ["mismatch.action=off", "mismatch.threshold=0.5"],
}

EXPERTS = dataclasses.replace(
    ARCH, moe=MoE(num_experts=6, top_k=2, ffn_hidden_size=100, normalize=True, layers=(True,) * 12)
)
OF_EXPERTS = ("expert_parallel_divides", "experts_size_divides", "experts_with_tp_need_sp")

# The keys that the fields of ParallelSizes are.
SIZE_KEYS = {
    "tp": "megatron.tensor_parallel",
    "pp": "megatron.pipeline_parallel",
    "dp": "megatron.data_parallel",
    "cp": "megatron.context_parallel",
    "sequence_parallel": "megatron.sequence_parallel",
    "vpp": "megatron.virtual_pipeline",
    "ep": "megatron.expert_parallel",
    "etp": "megatron.expert_tensor_parallel",
    "pipeline_layers": "megatron.pipeline_layers",
}


class Noted:
    """A section of the configuration that records which of its keys are read."""

    def __init__(self, section, prefix: str, read: set[str]):
        self._section, self._prefix, self._read = section, prefix, read

    def __getattr__(self, name: str):
        value = getattr(self._section, name)
        if dataclasses.is_dataclass(value):
            return Noted(value, f"{self._prefix}{name}.", self._read)
        if f"{self._prefix}{name}" in known_keys():
            self._read.add(f"{self._prefix}{name}")
        return value


class NotedSizes(ParallelSizes):
    """Parallel sizes that record which of them are read."""

    def __getattribute__(self, name: str):
        if name in SIZE_KEYS:
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(SIZE_KEYS[name])
        return object.__getattribute__(self, name)


def config_that_breaks(rule):
    return read_config(None, [*NEEDED, *BROKEN[rule.name]], Command.train)


def ask(rule) -> tuple[list[str], set[str] | None]:
    """Return (the rule's messages about the configuration that breaks it, the keys that it read)."""
    config, read = config_that_breaks(rule), set()
    if rule in SIZES.rules + SIZES_OF_MODEL.rules:
        sizes = NotedSizes.from_config(config.megatron)
        subject = (sizes,) if rule in SIZES.rules else (sizes, EXPERTS if rule.name in OF_EXPERTS else ARCH)
        vars(sizes)["read"] = read  # from_config has read them all
        return list(rule.check(*subject)), read
    noted = Noted(config, "", read)
    subject = (noted, known_capabilities(config)) if rule in CLUSTER.rules else (noted,)
    return list(rule.check(*subject)), read


def by_name(rule) -> str:
    return rule.name


def test_the_table_has_every_rule_once():
    assert sorted(BROKEN) == sorted(rule.name for rule in all_rules())


@pytest.mark.slow_but(40)
@pytest.mark.parametrize("rule", all_rules(), ids=by_name)
def test_a_rule_can_be_broken_and_names_its_keys(rule):
    assert rule.keys
    assert set(rule.keys) <= set(known_keys())
    assert rule.says.endswith(".")
    sentences, _ = ask(rule)
    assert sentences
    for sentence in sentences:
        assert any(key in sentence for key in rule.keys), sentence


@pytest.mark.slow_but(20)
@pytest.mark.parametrize("rule", all_rules(), ids=by_name)
def test_a_rule_reads_no_key_that_it_does_not_name(rule):
    """Otherwise it would be asked when that key is out of its limits, and `config explain` would not know
    of it.
    """
    _, read = ask(rule)
    # ParallelSizes takes all sizes from the configuration, whichever of them are asked for.
    assert read <= set(rule.keys) | set(
        SIZE_KEYS.values() if rule not in SIZES.rules + SIZES_OF_MODEL.rules else ()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [rule for rule in all_rules() if rule not in SIZES_OF_MODEL.rules], ids=by_name
)
def test_a_broken_rule_is_reported_by_the_commands_it_is_for(rule):
    config = config_that_breaks(rule)
    for command in COMMANDS:
        reported = set(ask(rule)[0]) <= set(violations(config, command))
        assert reported == (command in rule.commands)


def test_no_rule_holds_against_a_cluster_of_which_nothing_is_known():
    config = read_config(
        None, [*NEEDED, "megatron.precision=fp8", "megatron.tensor_parallel=64"], Command.train
    )
    assert violations(config, capabilities=Capabilities("somewhere")) == []
    assert violations(config, capabilities=known_capabilities(config)) != []
