"""The rules as data: each names the keys that it reads, and each can be broken."""

import dataclasses
from functools import cache

import pytest

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.command import Command
from grpo_megatron.config.load import known_keys, read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.model.architecture import DeltaNet, MoE
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.cluster_rules import CLUSTER, known_capabilities
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.preflight.rule import COMMANDS, at_most, divides, excludes, needs, only_with
from grpo_megatron.preflight.rules import all_rules, violations
from tests.unit.test_parallel_sizes import ARCH

NEEDED = ["model.path=m", "data.train=d.jsonl"]
ENVIRONMENT = "rollout.environment=tests.unit.toy_environments:Counting"
AGENT = "rollout.agent=tests.integration.agents:two_turns"
EIGHT = ["cluster.gpu=h100-80g", "cluster.nodes=1", "cluster.gpus_per_node=8"]

# Configurations that break rules, each another one; together they break all.
BROKEN = [
    ["rollout.dynamic_sampling.enabled=true"],
    ["weight_sync.transport=disk"],
    ["cluster.hang_timeout=1800"],
    ["cluster.placement=colocated", "weight_sync.delta=true"],
    ["train.ppo_mini_batch_size=5"],
    ["train.old_logprobs=current", "train.ppo_epochs=2"],
    ["megatron.data_parallel=3", "train.packing=false"],
    ["megatron.data_parallel=64"],
    ["megatron.data_parallel=64"],
    ["reward.function=model"],
    ["reward.function=model", "reward.model.path=r"],
    [
        "reward.function=model",
        "reward.model.path=r",
        "rollout.dynamic_sampling.enabled=true",
        "algorithm.filters=[nonzero_variance]",
    ],
    [
        "reward.function=model",
        "reward.model.path=r",
        "rollout.record=s.jsonl",
    ],
    ["run.root=runs", "run.name=mine", "rollout.record=runs/./mine"],
    ["train.max_tokens_per_micro_batch=2047"],
    ["megatron.lora.rank=4"],
    ["train.max_tokens_per_micro_batch=1023"],
    ["megatron.precision=fp32", "megatron.transformer_impl=transformer_engine"],
    [
        "megatron.precision=fp8",
        "megatron.fp8.recipe=delayed",
        "megatron.fp8.bf16_last_layers=1",
    ],
    [
        "megatron.precision=fp8",
        "megatron.fp8.recipe=delayed",
        "megatron.recompute=selective",
        "megatron.recompute_modules=[layernorm]",
    ],
    ["megatron.precision=fp8", "megatron.transformer_impl=local"],
    ["megatron.lora.rank=4", "megatron.lora.targets=[]"],
    ["megatron.lora.rank=4", "megatron.lora.targets=[q_proj,v_proj]"],
    ["megatron.lora.rank=4", "megatron.transformer_impl=transformer_engine"],
    ["moe.routing_replay=old_policy", "train.old_logprobs=rollout"],
    ["optimizer.lr_min=1"],
    ["optimizer.lr_schedule=wsd"],
    [
        "optimizer.lr_schedule=cosine",
        "optimizer.lr_warmup_steps=201",
        "train.ppo_epochs=2",
    ],
    [
        "optimizer.lr_schedule=wsd",
        "optimizer.wsd_decay_steps=101",
        "train.ppo_epochs=2",
    ],
    ["data.train=[d.jsonl,5]"],
    ["data.eval={a: 1}"],
    ["data.train_weights=[1.0,2.0]"],
    ["data.train=[a.jsonl,b.jsonl]", "data.train_weights=[1.0,2.0]"],
    ["data.train=null"],
    ["reward.answer_from=[]"],
    ["reward.extract=a", "reward.function=math"],
    ["reward.terms={right: {function: mathh}}"],
    ["reward.function=code", "reward.code.preamble=import ("],
    ["reward.terms={right: {function: math}}", "reward.function=math"],
    ["reward.failure_value=-1"],
    [
        "reward.on_failure=leave_out",
        "train.packing=false",
        "megatron.data_parallel=2",
    ],
    ["reward.function=code", "reward.code.limits.seconds=30"],
    ["rollout.top_k=20"],
    ["rollout.temperature=0"],
    ["rollout.replay=r.jsonl", "data.eval=e.jsonl"],
    ["rollout.replay=r.jsonl"],
    ["moe.routing_replay=engine"],
    ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=full"],
    ["rollout.replay=r.jsonl", "rollout.record=s.jsonl"],
    ["rollout.staleness=1", "cluster.placement=colocated", "train.old_logprobs=rollout"],
    ["rollout.staleness=1"],
    ["eval.beside=true", "rollout.engine.num_engines=2"],
    ["eval.beside=true", "rollout.staleness=1", "train.old_logprobs=rollout"],
    ["eval.engines=2"],
    ["rollout.engine.max_engines=2", "rollout.engine.num_engines=3"],
    ["rollout.engine.max_engines=2", "cluster.placement=colocated"],
    ["rollout.engine.max_engines=2", "weight_sync.transport=shared_memory"],
    ["rollout.staleness=1", "train.old_logprobs=rollout", "mismatch.action=stop"],
    ["rollout.staleness=2", "train.old_logprobs=rollout", "algorithm.surrogate=reinforce"],
    ["rollout.staleness=1", "train.old_logprobs=rollout", "rollout.replay=r", "data.eval=null"],
    [
        "rollout.staleness=1",
        "train.old_logprobs=rollout",
        "rollout.dynamic_sampling.over_sampling=2",
        "rollout.dynamic_sampling.enabled=true",
        "algorithm.filters=[nonzero_variance]",
    ],
    ["rollout.order=window"],
    ["rollout.on_update=continue"],
    ["data.chat_template_args={tools: []}"],
    ["rollout.max_turns=3"],
    ["rollout.episode_timeout=60"],
    ["rollout.strategy=beam", "rollout.stop=[a]"],
    ["rollout.beam.length_penalty=0"],
    ["rollout.environment=frozen_lake"],
    [ENVIRONMENT, "reward.function=math"],
    ["rollout.verifiers.python=p"],
    ["rollout.environment=verifiers:x", "rollout.history=template"],
    ["rollout.agent=no_such_agent"],
    ["rollout.agent.command=ls", "rollout.agent.files=[no_such_file]"],
    ["rollout.agent.processes=3"],
    ["rollout.agent.command=ls", "rollout.agent.address=node"],
    [AGENT, "rollout.agent.address=0.0.0.0"],
    [AGENT, "rollout.agent.command=ls"],
    [AGENT, ENVIRONMENT],
    [AGENT, "data.chat_template=none"],
    [AGENT, "rollout.strategy=beam"],
    [ENVIRONMENT, "rollout.tools=[]"],
    [ENVIRONMENT, "rollout.mcp={x: {command: [my-server]}}"],
    [ENVIRONMENT, "rollout.history=template", "data.chat_template=none"],
    ["cluster.gpu=none", "cluster.gpus_per_node=8"],
    ["megatron.precision=fp8", "cluster.gpu=a100-80g"],
    ["megatron.transformer_impl=transformer_engine", "cluster.gpu=none"],
    ["megatron.emulate_kernels=true", "cluster.gpu=h100-80g"],
    ["megatron.precision=fp8", "megatron.fp8.recipe=mxfp8", "cluster.gpu=h200"],
    [
        "megatron.recompute=selective",
        "megatron.recompute_modules=[moe_act]",
        "megatron.transformer_impl=local",
    ],
    [
        "megatron.recompute=selective",
        "megatron.recompute_modules=[layernorm]",
        "cluster.gpu=none",
    ],
    [*EIGHT, "megatron.data_parallel=8"],
    [*EIGHT, "megatron.data_parallel=16"],
    ["cluster.gpus_per_node=8", "megatron.tensor_parallel=16"],
    ["cluster.gpus_per_node=8", "rollout.engine.tensor_parallel=12"],
    ["rollout.engine.kv_cache_dtype=fp8_e4m3", "cluster.gpu=none"],
    ["rollout.engine.quantization=fp8", "cluster.gpu=b200"],
    [
        "rollout.engine.quantization=fp8",
        "rollout.engine.load_format=dummy",
    ],
    [
        "rollout.engine.tensor_parallel=2",
        "rollout.engine.data_parallel_attention=2",
        "cluster.gpu=none",
    ],
    ["rollout.engine.load_format=dummy"],
    ["rollout.engine.num_engines=9", *EIGHT],
    ["rollout.engine.max_total_tokens=8"],
    ["rollout.engine.tensor_parallel=4", "rollout.engine.expert_parallel=3"],
    ["megatron.sequence_parallel=true"],
    ["megatron.virtual_pipeline=2"],
    ["megatron.pipeline_parallel=2", "megatron.pipeline_layers=[4,4,4]"],
    ["megatron.expert_parallel=2"],
    ["megatron.tensor_parallel=8"],
    ["megatron.context_parallel=8"],
    ["megatron.tensor_parallel=3"],
    ["megatron.tensor_parallel=7"],
    ["megatron.tensor_parallel=5"],
    ["megatron.tensor_parallel=7", "megatron.sequence_parallel=true"],
    ["megatron.pipeline_parallel=5"],
    ["megatron.expert_parallel=2", "megatron.data_parallel=2"],
    ["megatron.expert_parallel=4", "megatron.data_parallel=4"],
    ["megatron.expert_tensor_parallel=3", "megatron.data_parallel=3"],
    ["megatron.tensor_parallel=2"],
    ["algorithm.adv_estimator=gae"],
    ["algorithm.adv_estimator=tests.unit.broken_rules:beside_the_reference"],
    ["algorithm.surrogate=ppo"],
    ["algorithm.filters=[hard]"],
    ["rollout.n=1"],
    ["reward.overlong_buffer.length=513"],
    ["algorithm.ratio_level=sequence_sum"],
    ["algorithm.surrogate=reinforce", "algorithm.ratio_level=sequence"],
    ["algorithm.clip_ratio_c=3", "algorithm.surrogate=cispo"],
    ["algorithm.early_stop_imp_ratio=5", "train.old_logprobs=current"],
    ["algorithm.entropy_floor=1"],
    ["algorithm.kl_loss_unbiased=true"],
    ["algorithm.use_kl_in_reward=true", "train.old_logprobs=current"],
    ["algorithm.kl_ctrl.type=adaptive"],
    ["ref.reset_every=5"],
    ["mismatch.correction=tis", "train.old_logprobs=rollout"],
    ["mismatch.ratio_high=3"],
    ["mismatch.correction=icepop", "mismatch.ratio_low=3", "mismatch.ratio_high=2"],
    ["mismatch.rejection_high=3"],
    ["mismatch.rejection=token_k3"],
    [
        "mismatch.rejection=seq_ratio",
        "mismatch.rejection_low=3",
        "mismatch.rejection_high=2",
    ],
    ["mismatch.renormalize=true"],
    [
        "mismatch.renormalize=true",
        "mismatch.rejection=seq_ratio",
        "train.old_logprobs=rollout",
    ],
    [
        "algorithm.ratio_level=sequence_sum",
        "algorithm.loss_agg_mode=group-sum",
        "mismatch.correction=tis",
    ],
    ["mismatch.action=off", "mismatch.threshold=0.5"],
    ["megatron.lora.rank=4", "megatron.precision=fp8"],
    ["rollout.gymnasium.id=CartPole-v1"],
    ["rollout.history=template", "data.overlong_prompts=truncate_left"],
    [ENVIRONMENT, "rollout.strategy=beam"],
    ["rollout.strategy=beam", "moe.routing_replay=engine"],
    ["reward.terms={a: {function: model}, b: {function: model}}", "reward.model.path=r"],
    [ENVIRONMENT, "reward.function=model", "reward.model.path=r"],
    ["rollout.engine.data_parallel_attention=2"],
    ["megatron.expert_tensor_parallel=3", "megatron.tensor_parallel=7", "megatron.data_parallel=3"],
    ["weight_sync.folder=shared"],
    ["weight_sync.lora=adapter"],
    ["megatron.lora.rank=4", "weight_sync.lora=adapter", "cluster.placement=colocated"],
    ["megatron.lora.rank=4", "weight_sync.lora=adapter", "rollout.engine.data_parallel_attention=2"],
    ["mismatch.rejection=token_k3", "mismatch.rejection_low=0.0", "mismatch.rejection_high=1"],
]

EXPERTS = dataclasses.replace(
    ARCH,
    moe=MoE(
        num_experts=6,
        top_k=2,
        ffn_hidden_size=100,
        shared_ffn_hidden_size=100,
        normalize=True,
        layers=(True,) * 12,
    ),
    joint_qk_norm=True,
)
HYBRID = dataclasses.replace(
    ARCH,
    delta=DeltaNet(
        key_heads=4, value_heads=8, key_dim=16, value_dim=16, kernel=4, layers=(True, True, False) * 4
    ),
)
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


@cache
def broken_configs() -> list[Config]:
    return [read_config(None, [*NEEDED, *overrides], Command.train) for overrides in BROKEN]


def messages(rule, config, read=None) -> list[str]:
    """Return the rule's messages about a configuration.

    read: set to which the keys that the rule reads are added; None: they are not needed.
    """
    if rule in SIZES.rules + SIZES_OF_MODEL.rules:
        sizes = NotedSizes.from_config(config.megatron)
        vars(sizes)["read"] = set() if read is None else read  # from_config has read them all
        if rule in SIZES.rules:
            return rule.violations(sizes)
        return next(
            (found for arch in (ARCH, EXPERTS, HYBRID) if (found := rule.violations(sizes, arch))), []
        )
    noted = config if read is None else Noted(config, "", read)
    capabilities = [known_capabilities(config)] if rule in CLUSTER.rules else []
    return rule.violations(noted, *capabilities)


@cache
def breaking(rule) -> Config:
    """Return a configuration that breaks the rule."""
    return next(config for config in broken_configs() if messages(rule, config))


def name(rule) -> str:
    return rule.says[:60]


def test_every_configuration_breaks_a_rule():
    for overrides, config in zip(BROKEN, broken_configs(), strict=True):
        assert any(messages(rule, config) for rule in all_rules()), overrides


@pytest.mark.slow_but(40)
@pytest.mark.parametrize("rule", all_rules(), ids=name)
def test_a_rule_can_be_broken_and_names_its_keys(rule):
    assert rule.keys
    assert set(rule.keys) <= set(known_keys())
    assert rule.says.endswith(".")
    for sentence in messages(rule, breaking(rule)):
        assert any(key in sentence for key in rule.keys), sentence


@pytest.mark.slow_but(20)
@pytest.mark.parametrize("rule", all_rules(), ids=name)
def test_a_rule_reads_no_key_that_it_does_not_name(rule):
    """Otherwise it would be asked when that key is refused, and `config explain` would not know of it."""
    read = set()
    messages(rule, breaking(rule), read)
    # ParallelSizes takes all sizes from the configuration, whichever of them are asked for.
    assert read <= set(rule.keys) | set(
        SIZE_KEYS.values() if rule not in SIZES.rules + SIZES_OF_MODEL.rules else ()
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in all_rules() if rule not in SIZES_OF_MODEL.rules], ids=name)
def test_a_broken_rule_is_reported_by_the_commands_it_is_for(rule):
    config = breaking(rule)
    for command in COMMANDS:
        reported = set(messages(rule, config)) <= set(violations(config, command))
        assert reported == (command in rule.commands)


def test_a_message_names_the_values_that_break_the_rule():
    config = read_config(None, [*NEEDED, "rollout.max_turns=3", "moe.routing_replay=engine"], Command.train)
    assert only_with("rollout.max_turns", "rollout.environment").violations(config) == [
        "rollout.max_turns has an effect only with rollout.environment (rollout.max_turns=3)"
    ]
    assert needs("moe.routing_replay!=off", "eval.n=1|2 and data.shuffle=true", "why").violations(config) == [
        "moe.routing_replay!=off needs eval.n=1|2 and data.shuffle=true: why (eval.n=4, data.shuffle=true)"
    ]
    assert needs("rollout.environment", "eval.n=1").violations(config) == []
    assert excludes("rollout.n=8", "rollout.replay or rollout.max_turns=3").violations(config) != []
    assert excludes("rollout.n=8", "rollout.replay and rollout.max_turns=3").violations(config) == []
    assert divides("rollout.max_turns", "rollout.n").violations(config) != []
    assert at_most("rollout.max_turns", "rollout.n").violations(config) == []


def test_no_rule_holds_against_a_cluster_of_which_nothing_is_known():
    config = read_config(
        None, [*NEEDED, "megatron.precision=fp8", "megatron.tensor_parallel=64"], Command.train
    )
    assert violations(config, capabilities=Capabilities("somewhere")) == []
    assert violations(config, capabilities=known_capabilities(config)) != []
