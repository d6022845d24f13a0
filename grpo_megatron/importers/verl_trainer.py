"""Mapping of verl's keys to those of grpo_megatron: cluster, checkpoints, model and Megatron layout."""

from typing import Any

from grpo_megatron.importers.converters import (
    choice,
    epochs,
    every,
    fixed,
    flag,
    run_name,
    total_steps,
    truth,
    unless_null,
)
from grpo_megatron.importers.mapping import CannotCarry, KeyMapping, Source, becomes, dropped, same, trains

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
OVERRIDE = f"{MEGATRON}.override_transformer_config"


def _gpus(value: Any, source: Source) -> dict[str, Any]:
    gpus = source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")
    sizes = [
        source.count(f"{MEGATRON}.{kind}_parallel_size")
        for kind in ("tensor_model", "pipeline_model", "context")
    ]
    share = sizes[0] * sizes[1] * sizes[2]
    engine = source.count(f"{ROLLOUT}.tensor_model_parallel_size")
    if gpus % share or gpus % engine:
        raise CannotCarry(
            f"{gpus} GPUs are not a multiple of both TP * PP * CP = {share} and the engine's TP = {engine}"
        )
    return {
        "megatron.data_parallel": gpus // share,
        "rollout.engine.num_engines": gpus // engine,
        "cluster.placement": "colocated",
    }


def _sequence_parallel(value: Any, source: Source) -> bool:
    return truth(value) and source.number(f"{MEGATRON}.tensor_model_parallel_size") > 1


def _checkpointing(value: Any, source: Source) -> dict[str, Any]:
    # This switch is for verl's FSDP actor. With Megatron the granularity decides.
    granularity = f"{OVERRIDE}.recompute_granularity"
    return {"megatron.recompute": "full"} if truth(value) and granularity not in source else {}


def _fp8(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    return {
        "megatron.precision": "fp8",
        "megatron.fp8.format": choice({"e4m3": "e4m3", "hybrid": "hybrid"})(value, source),
    }


def _offloads(section: str) -> tuple[KeyMapping, ...]:
    """Return the mappings of the switches for offloading in the section of one of verl's training engines."""
    both = "together with the rest of the trainer"
    return (
        becomes(f"{section}.param_offload", "megatron.sleep", flag, both),
        becomes(f"{section}.optimizer_offload", "optimizer.offload", flag),
    )


# Keys of the actor that change how it computes, but not the result.
_HOW = (
    "pad_to_length",
    "entropy_from_logits_chunk_size",
    "strategy",
    "use_torch_compile",
    "checkpoint.*",
    "profiler.*",
    "profile.*",
    "entropy_checkpointing",
    "entropy_from_logits_with_chunking",
    "use_prefix_grouper",
    "use_fused_kernels",
    "use_remove_padding",
)
_ADAPTER = "adapters are not carried over; set megatron.lora.* by hand, or the run is full fine-tuning"
_BY_HAND = "only 0; else set megatron.lora.* by hand"

TRAINER = (
    *(
        becomes(
            f"trainer.{key}",
            ("megatron.data_parallel", "rollout.engine.num_engines", "cluster.placement"),
            _gpus,
            default=default,
            unit="GPUs per node and nodes -> data-parallel replicas and engines",
        )
        for key, default in (("nnodes", 1), ("n_gpus_per_node", 8))
    ),
    *trains(
        becomes("trainer.total_training_steps", "run.total_steps", total_steps),
        becomes(
            "trainer.total_epochs",
            "run.total_steps",
            epochs("trainer.total_training_steps"),
            "with both, verl stops at whichever comes first",
            default=30,
        ),
        fixed(
            "trainer.resume_from_path",
            (None,),
            "verl's checkpoints cannot be resumed here; set model.path to the model in Hugging Face format",
            "run.resume",
        ),
        fixed(f"{MODEL}.lora_rank", (0, None), _ADAPTER, "megatron.lora.rank", note=_BY_HAND),
        fixed(f"{MODEL}.lora.rank", (0, None), _ADAPTER, "megatron.lora.rank", note=_BY_HAND),
        fixed(f"{MODEL}.lora_adapter_path", (None,), f"a run cannot start from an adapter; {_ADAPTER}"),
        fixed(f"{MODEL}.mtp.enable_train", (False,), "no loss on several tokens ahead"),
        dropped(f"{MODEL}.override_config.*", "the model is what its config.json says: change it there"),
        fixed(f"{MODEL}.external_lib", (None,), "the model is what its config.json says"),
        fixed(f"{MODEL}.custom_chat_template", (None,), "the template is the tokenizer's: change it there"),
        fixed(f"{MODEL}.tokenizer_path", (None,), "the tokenizer is that of model.path"),
        fixed("actor_rollout_ref.*.qat.enable", (False,), "weights are not quantized in training"),
        fixed(f"{ACTOR}.freeze_vision_tower", (False,), "only text is trained here"),
        same(
            f"{OVERRIDE}.moe_aux_loss_coeff",
            "moe.aux_loss_coeff",
            "no effect where verl switches load balancing off",
        ),
        same(f"{OVERRIDE}.moe_z_loss_coeff", "moe.z_loss_coeff"),
        becomes("actor_rollout_ref.ref.model.path", "ref.path", unless_null),
    ),
    dropped("actor_rollout_ref.*.qat.*", "belongs to qat.enable"),
    dropped(f"{MODEL}.lora*", "belongs to an adapter; see lora_rank"),
    dropped(f"{MODEL}.target_modules", "belongs to an adapter; see lora_rank"),
    dropped(f"{MODEL}.exclude_modules", "belongs to an adapter; see lora_rank"),
    becomes("trainer.experiment_name", "run.name", run_name, "a slash becomes a dash"),
    becomes("trainer.save_freq", "checkpoint.every", every, "-1 (never) is 0 here", default=-1),
    becomes("trainer.test_freq", "eval.every", every, "-1 (never) is 0 here", default=-1),
    fixed("trainer.critic_warmup", (0,), "there is no critic here"),
    dropped("trainer.resume_mode", "run.resume is auto, none, or the checkpoint to continue from"),
    dropped(
        "trainer.logger",
        "metrics go to TensorBoard and metrics.jsonl, and with monitor.listeners=[wandb] to Weights & Biases",
    ),
    becomes(
        "trainer.project_name", "monitor.wandb_project", run_name, "read only with monitor.listeners=[wandb]"
    ),
    becomes(
        "trainer.max_actor_ckpt_to_keep",
        "checkpoint.keep",
        unless_null,
        "null: 2 are kept here",
    ),
    *trains(
        fixed("trainer.val_only", (False, None), "nothing is trained then: use grpo-megatron eval"),
        fixed("trainer.v1.trainer_mode", ("sync", None), "rollout and training take turns here"),
        dropped(
            "trainer.v1.sampler.custom_sampler.*",
            "prompts come in a new order every epoch, or in that of the file",
        ),
    ),
    dropped("trainer.v1.*", "belongs to trainer.v1.trainer_mode"),
    dropped(
        "trainer.val_before_train",
        "with data.eval, an evaluation comes before the first step and after the last",
    ),
    dropped("trainer.log_val_generations", "see eval.save_samples"),
    dropped("trainer.validation_data_dir", "see eval.save_samples, which writes to the run's folder"),
    dropped("trainer.rollout_data_dir", "see rollout.record"),
    dropped("trainer.balance_batch", "samples are always shared among ranks by their tokens here"),
    dropped("trainer.esi_redundant_time", "see run.grace and run.grace_usr1"),
    dropped("trainer.default_*_dir", "a run writes into the folder run.root/run.name"),
    dropped("trainer.*", "no counterpart in how a run is done"),
    same(f"{MEGATRON}.tensor_model_parallel_size", "megatron.tensor_parallel", default=1),
    same(f"{MEGATRON}.pipeline_model_parallel_size", "megatron.pipeline_parallel", default=1),
    becomes(f"{MEGATRON}.virtual_pipeline_model_parallel_size", "megatron.virtual_pipeline", unless_null),
    same(f"{MEGATRON}.context_parallel_size", "megatron.context_parallel", default=1),
    same(f"{MEGATRON}.expert_model_parallel_size", "megatron.expert_parallel", default=1),
    becomes(f"{MEGATRON}.expert_tensor_parallel_size", "megatron.expert_tensor_parallel", unless_null),
    becomes(
        f"{MEGATRON}.sequence_parallel",
        "megatron.sequence_parallel",
        _sequence_parallel,
        "needs TP > 1",
        default=True,
    ),
    becomes(f"{MEGATRON}.use_distributed_optimizer", "megatron.distributed_optimizer", flag, default=True),
    *_offloads(MEGATRON),
    becomes("actor_rollout_ref.ref.megatron.param_offload", "ref.offload", flag),
    becomes(
        f"{OVERRIDE}.recompute_granularity",
        "megatron.recompute",
        choice({"None": "none", "full": "full", "selective": "selective"}),
    ),
    same(f"{OVERRIDE}.recompute_modules", "megatron.recompute_modules"),
    becomes(
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "megatron.recompute",
        _checkpointing,
        "true: full",
    ),
    becomes(
        f"{MEGATRON}.dtype",
        "megatron.precision",
        choice({"bfloat16": "bf16", "float32": "fp32"}),
        default="bfloat16",
    ),
    dropped(f"{MEGATRON}.grad_offload", "follows from param_offload: megatron.sleep takes gradients along"),
    *(
        becomes(
            f"{MEGATRON}.override_ddp_config.{name}",
            "megatron.overlap",
            flag,
            "one switch for both overlaps",
        )
        for name in ("overlap_grad_reduce", "overlap_param_gather")
    ),
    *trains(
        becomes(
            f"{OVERRIDE}.fp8",
            ("megatron.precision", "megatron.fp8.format"),
            _fp8,
            "e4m3, hybrid: megatron.precision=fp8 with that format",
        ),
        becomes(
            f"{OVERRIDE}.fp8_recipe",
            "megatron.fp8.recipe",
            choice({name: name for name in ("tensorwise", "delayed", "blockwise", "mxfp8")}),
            "the same names; read only with fp8",
        ),
        same(f"{OVERRIDE}.num_layers_at_start_in_bf16", "megatron.fp8.bf16_first_layers"),
        same(f"{OVERRIDE}.num_layers_at_end_in_bf16", "megatron.fp8.bf16_last_layers"),
    ),
    *(
        dropped(f"{OVERRIDE}.{name}", "set megatron.pipeline_layers by hand: the layers of each stage")
        for name in ("num_layers_in_*", "account_for_*", "pipeline_model_parallel_layout")
    ),
    dropped(f"{MEGATRON}.seed", "one seed for all: run.seed"),
    dropped(f"{MEGATRON}.*", "no counterpart: the layers are Megatron's as the model's config.json has them"),
    *_offloads(f"{ACTOR}.fsdp_config"),
    becomes("actor_rollout_ref.ref.fsdp_config.param_offload", "ref.offload", flag),
    *trains(
        fixed(
            f"{ACTOR}.fsdp_config.dtype",
            ("bfloat16", None),
            "set megatron.precision by hand: bf16 or fp32",
            "megatron.precision",
        ),
    ),
    *_offloads(f"{ACTOR}.veomni"),
    dropped(
        f"{ACTOR}.veomni.expert_parallel_size",
        "the trainer is Megatron: set megatron.expert_parallel by hand",
    ),
    *(
        dropped(f"{ACTOR}.{engine}.*", "the trainer is Megatron: see the megatron section")
        for engine in ("fsdp_config", "veomni", "torchtitan")
    ),
    dropped(
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "the trainer is Megatron: long sequences are split by megatron.context_parallel",
    ),
    becomes(f"{ACTOR}.checkpoint.async_save", "checkpoint.async_save", flag),
    dropped(
        f"{ACTOR}.checkpoint.*_contents",
        "a checkpoint holds all of it; checkpoint.export_hf writes the model in HF's form",
    ),
    dropped(f"{ACTOR}.rollout_n", "the same as rollout.n"),
    dropped(f"{ACTOR}.data_loader_seed", "one seed for all: run.seed"),
    dropped(f"{ACTOR}.calculate_entropy", "the entropy is always measured here"),
    fixed(f"{ACTOR}.calculate_sum_pi_squared", (False, None), "no estimator here reads it"),
    *(dropped(f"{ACTOR}.{name}", "changes how the trainer computes, not the result") for name in _HOW),
    *trains(dropped(f"{ACTOR}.*", "no counterpart, and it may decide what is trained")),
    dropped(
        "actor_rollout_ref.ref.*",
        "the reference has the policy's layout and ranks: see ref.path and ref.offload",
    ),
    dropped(f"{MODEL}.trust_remote_code", "code from a checkpoint is never run here"),
    dropped(f"{MODEL}.mtp.*", "belongs to mtp.enable_train"),
    dropped("actor_rollout_ref.*", "no counterpart"),
    dropped("model_engine", "the trainer is Megatron"),
    fixed(
        "skip.*.enable",
        (False,),
        "set rollout.record or rollout.replay",
        ("rollout.record", "rollout.replay"),
    ),
    dropped("skip.*", "belongs to skip.*.enable; see rollout.record and rollout.replay"),
    *trains(
        fixed("distillation.enabled", (False,), "there is no teacher here"),
    ),
    dropped("distillation.*", "belongs to distillation.enabled"),
    dropped("transfer_queue.*", "samples go from engines to ranks through Ray's object store"),
    dropped("critic.*", "GRPO has no critic"),
    dropped("global_profiler.*", "no counterpart"),
    dropped("ray_kwargs.*", "cluster.ray_address names the Ray cluster"),
    dropped("ray_init.*", "cluster.ray_address names the Ray cluster"),
)
