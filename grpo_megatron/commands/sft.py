"""`grpo-megatron sft`: supervised warm start before GRPO, with the trainer of `train` and another loss."""

import logging
from typing import Any

import numpy as np

from grpo_megatron.algorithm.losses import CrossEntropyLoss
from grpo_megatron.batch.examples import Example, ExampleBatch
from grpo_megatron.commands.assemble import RunContext, assemble, open_run, run_with_restarts
from grpo_megatron.commands.supervised import SupervisedTraining
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.data import EpochOrder, PromptTokenizer
from grpo_megatron.data.examples import load_examples
from grpo_megatron.preflight.check import check_start
from grpo_megatron.rollout.environments import offered_tools
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import Checkpoint, finished_result
from grpo_megatron.trainer.mini_batch import partition

logger = logging.getLogger(__name__)


def sft(config: Config, guard: Guard | None = None) -> dict[str, Any]:
    """Fine-tune a model on the prompt/response pairs of data.train, and return the result.

    With checkpoint.export_hf, the model is also exported. The result has the last step, the last loss and the
    paths of all outputs (see `Run.finish`). It is also written to result.json in the run's folder. If an
    earlier start of this command has finished the run, nothing is trained, and the result of the earlier
    start is returned. Raises Stopped if the run was asked to stop.

    guard: receives requests to stop; None: the run is never asked to stop.
    """
    if result := finished_result(config, Command.sft):
        return result
    check_start(config, Command.sft)
    tools = offered_tools(config.rollout, config.reward)  # the model also reads these before its episodes
    examples, left_out = load_examples(config, PromptTokenizer(config.model.path, config.data, tools))
    logger.info(
        f"data.train: {len(examples)} examples"
        + (f", {left_out} left out because they are too long" if left_out else "")
    )

    def attempt(context: RunContext, checkpoint: Checkpoint | None) -> dict[str, Any]:
        with assemble(context, checkpoint) as run:
            return run.finish(_Training(run, examples).train(context.guard.stop))

    order = EpochOrder.of(examples, config.run.seed, config.data.shuffle)
    with open_run(config, Command.sft, guard, lambda state: order.must_fit(state["order"])) as context:
        return run_with_restarts(context, attempt)


class _Training(SupervisedTraining[Example]):
    """Supervised fine-tuning. The loss of a step is the mean cross-entropy of its batch's response tokens."""

    loss, loss_metric = CrossEntropyLoss(), "sft/loss_per_token"
    shown_every, tokens_key = 50, "tokens"

    def streams(self, records: list[Example]) -> list[list[ExampleBatch]]:
        lengths = np.array([example.num_tokens for example in records])
        weight = 1 / max(sum(example.num_trained for example in records), 1)
        plan = partition(self.config, lengths, self.run.trainer.cost_model)
        return plan.divided(lambda part: ExampleBatch.of_examples([records[i] for i in part], weight))
