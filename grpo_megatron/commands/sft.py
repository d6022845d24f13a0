"""`grpo-megatron sft`: supervised warm start before GRPO, with the trainer of `train` and another loss."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from grpo_megatron.algorithm.losses import CrossEntropyLoss
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.schedule import CostModel, Schedule
from grpo_megatron.batch.token_weights import token_weights
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.commands.assemble import Run, Site, assemble, open_site, persist
from grpo_megatron.config.schema import Config
from grpo_megatron.data import EpochOrder, PromptTokenizer
from grpo_megatron.data.examples import load_examples
from grpo_megatron.metrics import to_floats
from grpo_megatron.monitoring.terminal import say
from grpo_megatron.preflight.check import check_start
from grpo_megatron.rollout.environments import offered_tools
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import Checkpoint, finished_result
from grpo_megatron.run.stop import StopRequest
from grpo_megatron.trainer.mini_batch import partition

# Number of steps between two lines on the terminal.
_SHOWN_EVERY = 50


def sft(config: Config, guard: Guard | None = None) -> dict[str, Any]:
    """Fine-tune on the prompt/response pairs of data.train, export the model, and return the result.

    guard: receives requests to stop; None: one that never ends the run.

    If an earlier start of this command has finished the run, its result is returned. Raises Stopped if the
    run was asked to stop.
    """
    if result := finished_result(config, "sft", say):
        return result
    check_start(config, "sft")
    tools = offered_tools(config.rollout, config.reward)  # the model also reads these before its episodes
    examples, left_out = load_examples(config, PromptTokenizer(config.model.path, config.data, tools))
    say(
        f"data.train: {len(examples)} examples"
        + (f", {left_out} left out because they are too long" if left_out else "")
    )

    def attempt(site: Site, checkpoint: Checkpoint | None) -> dict[str, Any]:
        with assemble(site, checkpoint) as run:
            return run.finish(_run(run, examples, site.guard.stop))

    order = EpochOrder.of(examples, config.run.seed, config.data.shuffle)
    with open_site(config, "sft", guard, lambda state: order.must_fit(state["order"])) as site:
        return persist(site, attempt)


def _run(run: Run, examples: Sequence[Sample], stop: StopRequest) -> dict[str, Any]:
    """Train until step run.total_steps, with log lines and checkpoints.

    Returns a dict with the last step, the last loss, and the number of tokens of all steps.
    """
    config = run.config
    order = EpochOrder.of(examples, config.run.seed, config.data.shuffle)
    if run.state:
        order.load_state_dict(run.state["order"])
    tokens, last = run.state["tokens"] if run.state else 0, config.run.total_steps
    loss = run.state.get("loss") if run.state else None  # missing in checkpoints of earlier versions
    for step in range(run.resumed + 1, last + 1):
        stop.step = step
        run.monitor.start_step(step)
        with run.monitor.phases("prepare"):
            batch, plan = next_batch(config, examples, order, run.trainer.cost_model)
        with run.monitor.phases("train"):
            metrics = to_floats(run.trainer.train_step(batch, plan, CrossEntropyLoss(), key=(step, 0)))
        tokens += batch.num_tokens
        loss = metrics["sft/loss_per_token"]
        scalars = run.monitor.finish_step(step, metrics, [batch])
        if step in (1, last) or step % _SHOWN_EVERY == 0:
            run.monitor.line(step, scalars)
        state = partial(_state, step, order, tokens, loss)
        if stop.is_made:
            stop.leave(run.saver, state)
        with run.monitor.phases("checkpoint"):
            run.saver.after_step(state() if run.saver.is_due(step, last=step == last) else None)
    return {"step": max(run.resumed, last), "loss": loss, "tokens": tokens}


def _state(step: int, order: EpochOrder, tokens: int, loss: float) -> dict[str, Any]:
    return {"step": step, "order": order.state_dict(), "tokens": tokens, "loss": loss}


def next_batch(
    config: Config, examples: Sequence[Sample], order: EpochOrder, cost_model: CostModel
) -> tuple[TrainBatch, Schedule]:
    """Return the next data.train_batch_size examples as one optimizer step.

    Returns (batch, schedule): the batch has token weights that make the loss the mean over its tokens. The
    schedule says how the batch is split among the ranks.
    """
    batch = TrainBatch.from_samples([examples[i] for i in order.take(config.data.train_batch_size)])
    batch.weight = token_weights(batch, "token-mean", config.rollout.max_response_length)
    plan = partition(config, batch.lengths, cost_model)
    return batch, plan
