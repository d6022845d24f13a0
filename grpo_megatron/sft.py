"""`grpo-megatron sft`: supervised warm start. The same actor step, with another loss."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from grpo_megatron.algorithm.losses import CrossEntropyLoss
from grpo_megatron.batch import CostModel, Sample, Schedule, TrainBatch, token_weights
from grpo_megatron.checkpoints import Checkpoints, actor_folder, read_state
from grpo_megatron.cluster.actor_group import ActorGroup
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.schema import Config
from grpo_megatron.controller import partition
from grpo_megatron.data import EpochOrder, PromptTokenizer, as_list, prompt_text, read_records
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.metrics import to_floats
from grpo_megatron.monitor import Monitor
from grpo_megatron.run_folder import open_run_folder
from grpo_megatron.train import actor_spec, check_model


def load_examples(config: Config, tokenizer: PromptTokenizer) -> list[Sample]:
    """Prompt/response pairs as samples; every response ends with the end-of-sequence token."""
    data = config.data
    end = tokenizer.tokenizer.eos_token_id
    if end is None:
        raise UserError(f"{config.model.path}: the tokenizer has no end-of-sequence token, which must close every response")
    examples = []
    longest = config.rollout.max_response_length
    records = [
        (f"{source}: record {number}", record)
        for source in as_list(data.train)
        for number, record in enumerate(read_records(source, [data.prompt_key, data.response_key]))
    ]
    for number, (where, record) in enumerate(records):
        prompt = tokenizer.encode(prompt_text(record, tokenizer, data, where))
        if not isinstance(record[data.response_key], str):
            raise UserError(
                f"{where}: field {data.response_key!r} must be a string, is {str(record[data.response_key])[:60]!r}"
            )
        response = np.append(tokenizer.encode(record[data.response_key]), np.int32(end))
        if len(prompt) > data.max_prompt_length or len(response) > longest:
            raise UserError(
                f"{where} has {len(prompt)} prompt and {len(response)} response tokens, more than "
                f"data.max_prompt_length={data.max_prompt_length} or rollout.max_response_length={longest}"
            )
        examples.append(
            Sample(
                group_id=number,
                trajectory_id=number,
                prompt_ids=prompt,
                response_ids=response,
                loss_mask=np.ones(len(response), dtype=np.bool_),
                rollout_logprobs=np.zeros(len(response), dtype=np.float32),
                finish_reason="stop",
            )
        )
    return examples


def sft(config: Config) -> dict:
    """Fine-tune on prompt/response pairs and export the model; returns what came out."""
    started = time.perf_counter()
    check_model(config)
    state = read_state(config.run.resume)
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
