"""`grpo-megatron sft`: supervised warm start. The same actor step, with another loss."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

from grpo_megatron.algorithm.losses import CrossEntropyLoss
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.schedule import CostModel, Schedule
from grpo_megatron.batch.token_weights import token_weights
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.schema import Config
from grpo_megatron.data import EpochOrder, PromptTokenizer
from grpo_megatron.data.examples import load_examples
from grpo_megatron.megatron.spec import actor_spec
from grpo_megatron.metrics import to_floats
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.model import check_model
from grpo_megatron.run.checkpoints import Checkpoints, actor_folder, read_state
from grpo_megatron.run.folder import open_run_folder
from grpo_megatron.run.monitor import Monitor
from grpo_megatron.trainer.mini_batch import partition
from grpo_megatron.trainer.policy import ActorGroup


def sft(config: Config) -> dict:
    """Fine-tune on prompt/response pairs and export the model; returns what came out."""
    started = time.perf_counter()
    check_model(config)
    state = read_state(config.run.resume, "sft")
    step = state["step"] if state else 0
    examples = load_examples(config, PromptTokenizer(config.model.path))
    order = EpochOrder(len(examples), config.run.seed, config.data.shuffle)
    directory = open_run_folder(config, step)
    sizes = ParallelSizes.from_config(config.megatron)
    metrics: dict[str, float] = {}
    tokens = 0
    with ExitStack() as cleanup:
        monitor = Monitor(directory, config.run.total_steps, step)
        cleanup.callback(monitor.close)
        monitor.say(f"run folder {directory}; starting {sizes.world_size} trainer ranks")
        cluster = allocate(config, sizes.world_size, 0)
        cleanup.callback(cluster.close)
        spec = actor_spec(config, with_reference=False, command="sft")
        actor = ActorGroup(cluster, spec, config.megatron, config.run.seed, f"{directory}/logs")
        cleanup.callback(actor.close)
        saver = Checkpoints(f"{directory}/checkpoints", config.checkpoint.every)
        if state:
            actor.load_checkpoint(actor_folder(config.run.resume))
            order.load_state_dict(state["order"])
        while step < config.run.total_steps:
            step += 1
            monitor.start_step()
            with monitor.phases("prepare"):
                batch, plan = next_batch(config, examples, order, actor.cost_model)
            with monitor.phases("train"):
                metrics = to_floats(actor.train_step(batch, plan, CrossEntropyLoss(), key=(step, 0)))
            tokens += batch.num_tokens
            scalars = monitor.finish_step(step, metrics, batch.num_tokens)
            if step == 1 or step % 50 == 0 or step == config.run.total_steps:
                monitor.line(step, scalars, {"sft/loss_per_token": "loss", "actor/grad_norm": "grad norm"})
            if saver.due(step):
                saver.save(step, actor, {"step": step, "order": order.state_dict()})
        result = {"loss": metrics.get("sft/loss_per_token"), "tokens": tokens, "run_dir": directory}
        if config.checkpoint.export_hf:
            result["model"] = f"{directory}/hf"
            actor.save_hf(result["model"])
        result["phases"] = monitor.phases.total
    result["wall_seconds"] = time.perf_counter() - started
    Path(f"{directory}/result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    return result


def next_batch(config: Config, examples: list[Sample], order: EpochOrder, cost_model: CostModel) -> tuple[TrainBatch, Schedule]:
    """The next data.train_batch_size examples as one optimizer step, weighted to the mean over tokens."""
    batch = TrainBatch.from_samples([examples[i] for i in order.take(config.data.train_batch_size)])
    batch.weight = token_weights(batch, "token-mean", config.rollout.max_response_length)
    plan = partition(config, batch.lengths, cost_model)
    return batch, plan
