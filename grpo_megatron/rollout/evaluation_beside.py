"""EvaluationBeside: evaluates weights on some engines, while training goes on with the other engines."""

import logging
import threading
from collections.abc import Sequence
from functools import partial

from grpo_megatron.errors import ProcessLost
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rollout.evaluation import Drawn, Evaluation, scalars
from grpo_megatron.rollout.group_round import Sampler
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.sglang.held import HeldEngines

logger = logging.getLogger(__name__)


class EvaluationBeside:
    """Evaluates weights while training goes on (eval.beside), on engines that keep these weights meanwhile.

    One evaluation runs at a time. A thread generates the responses. All public methods must be called in the
    driver's main thread, which also updates the engines' weights. `report` computes the scores in the main
    thread, including those of a reward model.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        engines: HeldEngines,
        samplers: Sequence[Sampler],
        monitor: Monitor,
        last_step: int,
    ):
        """Prepare evaluations beside training. `begin` begins one.

        evaluation: generates the responses to the held-out prompts, and computes their scores.
        engines: chooses engines for an evaluation, and lets them keep their weights until it has ended.
        samplers: for each engine of the pool, the sampler that sends requests to it.
        monitor: gets the scores.
        last_step: number of training steps of the run.
        """
        self._evaluation, self._engines = evaluation, engines
        self._manager = RolloutManager(engines, samplers)
        self._monitor, self._last_step = monitor, last_step
        self._step: int | None = None  # of the evaluation in progress
        self._drawn: dict[str, Drawn] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> bool:
        """Begin to evaluate the engines' current weights. There must be no evaluation in progress.

        step: number of training steps done so far.

        Returns True if an evaluation has begun. Later calls of `report` pass its scores to the monitor.
        Returns False if the caller has to evaluate on all engines instead: before the first step and after
        the last one, and, with a warning, if only one engine serves.
        """
        if not 0 < step < self._last_step:
            return False
        if not self._engines.hold():
            logger.warning(
                f"the evaluation after {step} steps interrupts training, because only one engine serves"
            )
            return False
        self._step, self._drawn, self._error = step, {}, None
        self._thread = threading.Thread(target=self._draw, name="evaluation beside training", daemon=True)
        self._thread.start()
        return True

    def _draw(self) -> None:
        generate = partial(self._manager.generate, caller=Caller.evaluate_beside)
        try:
            self._drawn = self._evaluation.draw(generate)
        except BaseException as error:  # `report` raises it in the caller's thread
            self._error = error

    def report(self, now: int, wait: bool = False) -> bool:
        """Pass the scores of an evaluation that has ended to the monitor, and release the engines it used.

        The scores are logged under the step whose weights were evaluated. "eval/steps_late" is the number of
        steps that were trained since.

        now: number of training steps done so far.
        wait: True to wait until the evaluation in progress has ended.

        Returns True if engines were released. The caller must then sync the newest weights to these engines.
        Returns False, and does nothing, if there is no evaluation, or if it has not ended and `wait` is
        False. Raises the error of the evaluation. If all its engines have been lost, a warning is logged
        instead.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return False
        self._thread.join()
        step, self._step, self._thread = self._step, None, None
        drawn, self._drawn = self._drawn, {}
        is_lost = isinstance(self._error, ProcessLost) and not self._engines.serving
        version = self._engines.weight_version
        self._engines.release()
        if is_lost:
            logger.warning(
                f"the evaluation after {step} steps has no scores, because all engines with the weights of "
                f"that step have been lost: {self._error}"
            )
            return True
        if self._error:
            raise self._error
        scores = scalars(self._evaluation.scored(step, drawn))
        about = {"eval/weight_version": float(version), "eval/steps_late": float(now - step)}
        self._monitor.evaluated(step, scores | about)
        return True

    def close(self) -> None:
        """Abort the evaluation in progress, if there is one, and log a warning that it has no scores.

        Do not use this object afterwards.
        """
        if self._thread:
            self._manager.abort()
            self._thread.join()
            self._thread = None
            logger.warning(f"the evaluation after {self._step} steps was aborted, so it has no scores")

    @property
    def step(self) -> int | None:
        """Number of training steps done when the evaluation began that `report` has not reported yet.

        None: there is no such evaluation.
        """
        return self._step
