"""`grpo-megatron eval`: evaluates a model on held-out prompts, with engines only."""

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.commands.assemble import RunContext, open_run, run_with_restarts
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.sources import held_out_prompts
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, replace_text
from grpo_megatron.logs import table_text
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.preflight.check import check_start
from grpo_megatron.rollout.environments import offered_tools
from grpo_megatron.rollout.episodes import record_check
from grpo_megatron.rollout.evaluation import Evaluation, Scores, scalars
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.worker import RolloutWorkers
from grpo_megatron.run.checkpoints import ACTOR
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import RESULT, Checkpoint

logger = logging.getLogger(__name__)


def evaluation_config(config: Config) -> Config:
    """Return a training run's configuration, changed for an evaluation, which runs engines only.

    run.name gets the suffix `_eval`. The evaluation thus has its own folder, and the training run can still
    be continued. The evaluation never resumes. The engines have devices of their own, because there are no
    trainer ranks, and no further engines join. Raises UserError if model.path is a run's checkpoint, which
    engines cannot load.
    """
    path = config.model.path
    if Path(path, ACTOR).is_dir():
        raise UserError(
            f"model.path={path} is a checkpoint of a run, but engines need an HF folder; convert it with "
            f"`python tools/convert_megatron_to_hf.py {path} OUT_DIR --hf HF_DIR` (HF_DIR is the model that "
            "the run started from), or use the folder hf/ of the run if the run is finished"
        )
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}_eval", total_steps=1, resume="none"),
        cluster=replace(config.cluster, placement=Placement.separate),
        rollout=replace(config.rollout, engine=replace(config.rollout.engine, max_engines=None)),
    )


def evaluate(config: Config, guard: Guard | None = None) -> dict[str, Any]:
    """Sample responses to all prompts of data.eval, score them, and return the result.

    The result has "model", "scores" ({data set: {metric: value}}), "run_dir" and "tensorboard" (folders), and
    "wall_seconds". It is also written to result.json in the evaluation's folder, and the scores are logged.
    If a process is lost, the evaluation starts again, at most run.max_restarts times.

    guard: receives requests to stop; None: the run is never asked to stop.
    """
    config = evaluation_config(config)
    check_start(config, Command.eval)
    tokenizer = PromptTokenizer(config.model.path, config.data, offered_tools(config.rollout, config.reward))
    held_out = held_out_prompts(config, tokenizer, record_check(config))

    def attempt(context: RunContext, checkpoint: Checkpoint | None) -> dict[str, Any]:
        with ExitStack() as cleanup:
            workers = RolloutWorkers(
                config, context.cluster, context.engines, context.logs, context.hang_detector
            )
            cleanup.callback(workers.close)
            monitor = Monitor(context.directory, config, context.status, listeners=context.listeners)
            cleanup.callback(monitor.close)
            monitor.open()
            context.hang_detector.tell_spans(monitor.timeline.add)
            context.engines.wait_until_ready()
            context.engines.admit()
            workers.wait_until_ready()
            logger.info(f"startup took {time.perf_counter() - context.started:.1f} s")
            manager = RolloutManager(context.engines, workers.samplers)
            evaluation = Evaluation(manager, held_out, config, context.directory, monitor.text)
            with monitor.phases("evaluate"):
                scores = evaluation.scores(step=0)
            monitor.evaluated(0, scalars(scores))
            logger.info(table(scores))
            result = {"model": config.model.path, "scores": scores, "run_dir": context.directory}
            result |= {
                "tensorboard": monitor.tensorboard_dir,
                "wall_seconds": time.perf_counter() - context.started,
            }
            replace_text(Path(context.directory, RESULT), json_text(result, indent=2))
            context.hang_detector.flush()  # to the timeline, before the monitor is closed
            return result

    with open_run(config, Command.eval, guard) as context:
        return run_with_restarts(context, attempt)


def table(scores: Scores) -> str:
    """Return the scores of an evaluation as a text table: a row for each data set, a column for each metric.

    `-` means that a data set does not have the metric.
    """
    metrics = list(dict.fromkeys(metric for values in scores.values() for metric in values))
    rows = [["", *metrics]]
    rows += [
        [name, *(f"{values[metric]:.4f}" if metric in values else "-" for metric in metrics)]
        for name, values in scores.items()
    ]
    return table_text(rows)
