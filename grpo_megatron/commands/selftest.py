"""`grpo-megatron selftest`: checks whether engine and trainer agree on the probability of tokens.

It runs the training loop with learning rate 0. The weights never change, so the difference between the
log-probs of engine and trainer (the mismatch) must stay as small in every step as rounding makes it. The
engines start from random weights, so that all their weights come through the weight sync. If the mismatch is
too large, the self-test looks for the cause. It reports a cause only if changing this cause, and nothing
else, removes the mismatch (or, for precision, produces a mismatch of that size).
"""

from dataclasses import replace
from pathlib import Path

from grpo_megatron.commands.selftest_investigation import Investigation, Tokens
from grpo_megatron.commands.selftest_verdict import Verdict
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.algorithm import MismatchAction, MismatchConfig
from grpo_megatron.config.engine import LoadFormat
from grpo_megatron.config.rollout import DynamicSamplingConfig, Strategy
from grpo_megatron.config.schema import CheckpointConfig, Config, EvalConfig, LrSchedule, OldLogprobs
from grpo_megatron.controller import Controller
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.groups import StaleWeights
from grpo_megatron.run.guard import Guard
from grpo_megatron.sglang.pool import EnginePool


def selftest_config(config: Config, steps: int) -> Config:
    """Return a training run's configuration, changed for a self-test, with learning rate 0.

    run.name gets the suffix `_selftest`, and the self-test never resumes. The engines start with random
    weights. All features are off that would cost time, bias the measurement or end the run too early, such as
    evaluations, filters, checkpoints and the limit of the mismatch. Raises UserError if the run replays
    recorded rollouts, because there is then no engine to compare with.

    config: configuration of the training run.
    steps: number of training steps that the self-test makes.
    """
    if config.rollout.replay:
        raise UserError(
            "selftest compares an engine with the trainer, but rollout.replay runs no engine; leave "
            "rollout.replay out"
        )
    engine = replace(config.rollout.engine, load_format=LoadFormat.dummy, max_engines=None)
    optimizer = replace(config.optimizer, lr_min=0.0, lr_schedule=LrSchedule.constant, lr_warmup_steps=0)
    optimizer.lr = 0.0  # set here, because the schema refuses a user's 0
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}_selftest", total_steps=steps, resume="none"),
        data=replace(config.data, eval=None),
        # Beam search finds likelier responses than sampling does, which would be taken for a fault.
        rollout=replace(
            config.rollout,
            engine=engine,
            record=None,
            dynamic_sampling=DynamicSamplingConfig(),
            strategy=Strategy.sampling,
        ),
        optimizer=optimizer,
        # Keep every sample. A choice by outcome would bias the statistics of the sampling.
        algorithm=replace(config.algorithm, filters=[]),
        mismatch=MismatchConfig(action=MismatchAction.off),
        train=replace(config.train, old_logprobs=OldLogprobs.recompute),
        eval=EvalConfig(),
        # The check of weights after a sync would end the run before the cause is found.
        weight_sync=replace(config.weight_sync, probe_every=0),
        checkpoint=CheckpointConfig(minutes=0, at_end=False, export_hf=False),
    )


def investigate(controller: Controller, engines: EnginePool, steps: int) -> Verdict:
    """Measure the mismatch between the log-probs of engines and trainer, and look for its cause.

    controller: training loop of the self-test, before its first step.
    engines: the engines that the loop samples with.
    steps: number of training steps to measure, with learning rate 0.

    Returns the result of the self-test. If the loop refuses samples because engines generated them with old
    weights (StaleWeights), the result reports this as the cause. Raises UserError for a failure that has
    nothing to do with a mismatch.
    """
    try:
        controller.rollouts.start()
        trained = [
            # At once, because the ranks forget a step's log-probs in the next step.
            Tokens.of(controller.train_step(controller.loop.begin_step()), controller.trainer)
            for _ in range(steps)
        ]
        return Investigation(controller, engines, trained).run()
    except StaleWeights as error:
        return Verdict(explanations=[f"weight version: {error}"])


def selftest(config: Config, steps: int = 3, guard: Guard | None = None) -> Verdict:
    """Test whether engines and trainer of a training run give tokens the same log-probs.

    The result is returned, and written to selftest.json in the folder of the self-test.

    config: configuration of the training run that is to be checked.
    steps: number of training steps that the self-test makes, with learning rate 0.
    guard: receives requests to stop; None: the run is never asked to stop.
    """
    with assembled_loop(selftest_config(config, steps), guard) as (controller, run):
        verdict = investigate(controller, run.engines, steps)
        Path(f"{run.directory}/selftest.json").write_text(
            json_text(as_json(verdict), indent=2), encoding="utf-8"
        )
    return verdict


def as_json(verdict: Verdict) -> dict:
    """Return the content of selftest.json: the verdict's fields, and "passed".

    Values that were not measured are NaN in this dict, and null in the file.
    """
    return {"passed": verdict.passed, **vars(verdict)}
