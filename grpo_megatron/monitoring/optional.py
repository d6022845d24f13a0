"""Optional listeners, for runs whose monitor.listeners names them: Weights & Biases and Prometheus."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import replace_text
from grpo_megatron.monitoring.listener import Listener
from grpo_megatron.paths import within

logger = logging.getLogger(__name__)

_PACKAGES = {"wandb": "wandb", "prometheus": "prometheus_client"}
# Seconds for which the end of a run waits for a service that does not answer.
_CLOSE_SECONDS = 30.0


def check_listeners(config: Config) -> None:
    """Check that the Python packages of all services in monitor.listeners, such as wandb, are installed.

    Raises UserError if a package is missing.
    """
    for name in config.monitor.listeners:
        if find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"monitor.listeners has {name}, but the package {_PACKAGES[name]} is not installed; run "
                f"`pip install {_PACKAGES[name]}`, or remove {name} from monitor.listeners"
            )


@contextmanager
def listening(config: Config, directory: str, resumed: bool) -> Iterator[list[Listener]]:
    """Start the listeners that monitor.listeners names, yield them, and close them after the `with` block.

    A listener passes metrics to a service, such as Weights & Biases. Raises UserError if a listener of a new
    run cannot start. A resumed run only shows a warning, and goes on without the listener. A listener that
    fails to close, or takes too long, only causes a warning.

    directory: the run's folder.
    resumed: True if the run continues from a checkpoint.
    """
    makers = {"wandb": WeightsAndBiases, "prometheus": Prometheus}
    listeners = []
    try:
        for name in dict.fromkeys(config.monitor.listeners):
            try:
                listeners.append(makers[name](config, directory))
            except UserError as error:
                if not resumed:
                    raise
                logger.warning(f"{error}; the run continues without this listener")
        yield listeners
    finally:
        for listener in listeners:
            try:
                within(_CLOSE_SECONDS, listener.close)
            except Exception as error:
                logger.warning(
                    f"{type(listener).__name__} may miss the end of this run: {type(error).__name__}: {error}"
                )


class Prometheus:
    """A Listener that serves the newest scalars to Prometheus over HTTP.

    All scalars are values of one Prometheus metric, and the scalar's name is a label, as in
    grpo_megatron_scalar{run="...", name="reward/mean"}. Names with a slash are not legal as names of
    Prometheus metrics.
    """

    def __init__(self, config: Config, directory: str):
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        monitor, self._run = config.monitor, config.run.name
        registry = CollectorRegistry()
        self._scalars = Gauge(
            "grpo_megatron_scalar", "newest value of a scalar", ["run", "name"], registry=registry
        )
        self._step = Gauge("grpo_megatron_step", "newest step", ["run"], registry=registry)
        try:
            self._server, self._thread = start_http_server(
                monitor.prometheus_port, monitor.prometheus_address, registry
            )
        except OSError as error:
            raise UserError(
                f"metrics cannot be served at monitor.prometheus_address={monitor.prometheus_address}, "
                f"monitor.prometheus_port={monitor.prometheus_port}: {error}; choose another address or port"
            ) from error

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._step.labels(self._run).set(step)
        for name, value in values.items():
            self._scalars.labels(self._run, name).set(value)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Do nothing, because Prometheus collects numbers only."""

    def text(self, step: int, name: str, text: str) -> None:
        """Do nothing, because Prometheus collects numbers only."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class WeightsAndBiases:
    """A Listener that sends scalars, histograms and texts to Weights & Biases.

    Account, server and mode (such as offline) are those of `wandb login`, or of the environment variables
    WANDB_*.
    """

    def __init__(self, config: Config, directory: str):
        import wandb

        self._wandb = wandb
        # Without a limit, wandb also waits for its server when the process ends, and no other code could
        # limit that.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(_CLOSE_SECONDS / 2))
        kept = Path(directory, "wandb_id")  # a resumed run continues its run at wandb
        try:
            if not kept.exists():
                replace_text(kept, secrets.token_hex(8))
            self._run = wandb.init(
                project=config.monitor.wandb_project,
                name=config.run.name,
                id=kept.read_text(encoding="utf-8"),
                resume="allow",
                dir=directory,
                config=asdict(config),
            )
        except Exception as error:
            # Errors of wandb, its server and its helper process have no common class.
            raise UserError(
                f"Weights & Biases cannot start: {error}; correct this, or remove wandb from "
                "monitor.listeners"
            ) from error
        # wandb's own step may only grow, but a resumed run goes back some steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._log(step, values)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._log(step, {name: self._wandb.Histogram(values)})

    def text(self, step: int, name: str, text: str) -> None:
        self._log(step, {name: self._wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
