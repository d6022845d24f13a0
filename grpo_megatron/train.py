"""`grpo-megatron train`: puts a run together from its configuration, runs it, cleans up."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from grpo_megatron.batch import Prompt
from grpo_megatron.checkpoints import Checkpoints, actor_folder, read_state
from grpo_megatron.cluster.actor_group import ActorGroup
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.rules import lr_decay_steps
from grpo_megatron.config.schema import Config, RoutingReplay
from grpo_megatron.controller import Controller
from grpo_megatron.data import PromptSource, PromptTokenizer, as_list, load_prompts
from grpo_megatron.errors import UserError
from grpo_megatron.evaluation import Evaluation
from grpo_megatron.megatron.architecture import Architecture, read_architecture
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.monitor import Monitor
from grpo_megatron.rollout.engine import start_engines
from grpo_megatron.rollout.episodes import make_episodes
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.source import EngineRollouts, ReplayedRollouts
from grpo_megatron.run_folder import open_run_folder
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint


def check_model(config: Config) -> Architecture:
    """What can be wrong with model and layout, found before any process starts."""
    arch = read_architecture(config.model.path)
    broken = ParallelSizes.from_config(config.megatron).violations(arch)
    if broken:
        raise UserError(f"the layout does not fit {config.model.path}:\n" + "\n".join(f"  - {rule}" for rule in broken))
    engine_tp = config.rollout.engine.tensor_parallel
    if arch.num_heads % engine_tp:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine_tp} does not divide the {arch.num_heads} attention heads of {config.model.path}"
        )
    if arch.family == "qwen3_moe" and not all(arch.moe.layers) and not config.rollout.replay:
        raise UserError(
            f"{config.model.path} has layers without experts (mlp_only_layers, decoder_sparse_step), which SGLang's Qwen3-MoE ignores: "
            "it would generate with uninitialised weights"
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > arch.max_positions:
        raise UserError(
            f"data.max_prompt_length + rollout.max_response_length = {longest}, but {config.model.path} is made for "
            f"{arch.max_positions} positions"
        )
    for path in {config.model.path, config.ref.path} - {None}:
        HFCheckpoint(path)
    return arch


def actor_spec(config: Config, with_reference: bool, command: str = "train") -> ActorSpec:
    """command: train or sft, by which the length of the learning-rate schedule is known."""
    return ActorSpec(
        model_path=config.model.path,
        sizes=ParallelSizes.from_config(config.megatron),
        optimizer=replace(config.optimizer, lr_decay_steps=lr_decay_steps(config, command)),
        precision=config.megatron.precision,
        transformer_impl=config.megatron.transformer_impl,
        distributed_optimizer=config.megatron.distributed_optimizer,
        overlap=config.megatron.overlap,
        recompute=config.megatron.recompute,
        recompute_modules=tuple(config.megatron.recompute_modules),
        moe=config.moe,
        temperature=config.rollout.temperature,
        with_reference=with_reference,
        reference_path=config.ref.path,
        reference_offload=config.ref.offload,
        offload_folder=config.megatron.offload_folder,
        pack_tokens=config.train.max_tokens_per_micro_batch * config.megatron.context_parallel
        if config.train.constant_length_packs
        else 0,
    )


def training_prompts(config: Config, tokenizer: PromptTokenizer) -> PromptSource:
    sources, uid = [], 0
    for source in as_list(config.data.train):
        prompts, counts = load_prompts(source, tokenizer, config.data, uid)
        uid += len(prompts) + counts["skipped"]
        sources.append(prompts)
        changed = ", ".join(f"{count} {what} for their length" for what, count in counts.items() if count)
        print(f"{source}: {len(prompts)} prompts" + (f" ({changed})" if changed else ""), flush=True)
    return PromptSource(sources, config.run.seed, config.data.shuffle, config.data.train_weights)


def held_out_prompts(config: Config, tokenizer: PromptTokenizer) -> dict[str, list[Prompt]]:
    """{name of the data set: its prompts}; a name that occurs twice gets a number."""
    datasets: dict[str, list[Prompt]] = {}
    for source in as_list(config.data.eval):
        prompts, counts = load_prompts(source, tokenizer, config.data)
        if any(counts.values()):
            print(f"{source}: {counts['skipped']} skipped and {counts['truncated']} truncated for their length", flush=True)
        name = prompts[0].source
        datasets[name if name not in datasets else f"{name}_{len(datasets)}"] = prompts
    return datasets


@contextmanager
def assembled(config: Config, controller_class: type[Controller] = Controller) -> Iterator[Controller]:
    """A run put together and ready to train: its engines, ranks and reward processes are up within this context."""
    started = time.perf_counter()
    check_model(config)
    state = read_state(config.run.resume)
    resumed = state["step"] if state else 0
    tokenizer = PromptTokenizer(config.model.path)
    replay = config.rollout.replay
    prompts = None if replay else training_prompts(config, tokenizer)
    held_out = held_out_prompts(config, tokenizer)
    sizes = ParallelSizes.from_config(config.megatron)
    with ExitStack() as cleanup:
        episodes = make_episodes(config, tokenizer)
        cleanup.callback(episodes.close)
        directory = open_run_folder(config, resumed)
        logs = f"{directory}/logs"
        monitor = Monitor(directory, config.run.total_steps, resumed)
        cleanup.callback(monitor.close)
        num_engines = 0 if replay else config.rollout.engine.num_engines
        monitor.say(f"run folder {directory}; starting {sizes.world_size} trainer ranks and {num_engines} engines")
        cluster = allocate(config, sizes.world_size, num_engines)
        cleanup.callback(cluster.close)
        # Engines are slow to start: they do so while the ranks build the model.
        if replay:
            rollouts = ReplayedRollouts(replay)
        else:
            # A resumed run must not draw the random numbers of its first steps again.
            seed = config.run.seed + 1000 * resumed
            routing = config.moe.routing_replay == RoutingReplay.engine
            engines, who = start_engines(cluster, config.rollout, config.model.path, seed, logs, routing)
            manager = RolloutManager(engines, who, config.rollout, episodes)
            rollouts = EngineRollouts(manager, config, resumed)
        cleanup.callback(rollouts.close)
        with_reference = config.algorithm.needs_reference
        actor = ActorGroup(cluster, actor_spec(config, with_reference), config.megatron, config.run.seed, logs)
        cleanup.callback(actor.close)
        if not replay:
            manager.wait_until_ready()
        evaluation = Evaluation(held_out, config, directory) if held_out else None
        saver = Checkpoints(f"{directory}/checkpoints", config.checkpoint.every)
        controller = controller_class(config, actor, rollouts, prompts, evaluation, saver, monitor, tokenizer.decode_all)
        if state:
            actor.load_checkpoint(actor_folder(config.run.resume))
            controller.load_state_dict(state)
        monitor.say(f"everything is up after {time.perf_counter() - started:.1f} s")
        yield controller


def train(config: Config) -> dict:
    """Run GRPO; returns (and writes to result.json in the run's folder) what came out."""
    started = time.perf_counter()
    with assembled(config) as controller:
        directory = controller.monitor.directory
        result = controller.run()
        if config.checkpoint.export_hf:
            result["model"] = f"{directory}/hf"
            controller.actor.save_hf(result["model"])
        result["phases"] = controller.monitor.phases.total
        result["run_dir"] = directory
        result["tensorboard"] = controller.monitor.tensorboard_dir
    result["wall_seconds"] = time.perf_counter() - started
    Path(f"{directory}/result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    return result
