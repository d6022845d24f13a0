"""`grpo-megatron train`: puts a run together from its configuration, runs it, cleans up."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.schema import Config, RoutingReplay
from grpo_megatron.controller import Controller
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.sources import held_out_prompts, training_prompts
from grpo_megatron.megatron.spec import actor_spec
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.model import check_model
from grpo_megatron.rollout.episodes import make_episodes
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.source import EngineRollouts, ReplayedRollouts
from grpo_megatron.run.checkpoints import Checkpoints, actor_folder, read_state
from grpo_megatron.run.folder import open_run_folder
from grpo_megatron.run.monitor import Monitor
from grpo_megatron.sglang.engine import start_engines
from grpo_megatron.trainer.policy import ActorGroup


@contextmanager
def assembled(config: Config, controller_class: type[Controller] = Controller) -> Iterator[Controller]:
    """A run put together and ready to train: its engines, ranks and reward processes are up within this context."""
    started = time.perf_counter()
    check_model(config)
    state = read_state(config.run.resume, "train")
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
