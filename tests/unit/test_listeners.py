"""Weights & Biases and Prometheus, if their packages are installed, and the messages if they are not."""

import socket
import threading
import time
import urllib.request
from importlib.util import find_spec

import numpy as np
import pytest

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring import optional
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.optional import check_listeners, listening
from grpo_megatron.monitoring.status import StatusFile


def configured(*listeners: str) -> Config:
    config = Config()
    config.model.path, config.run.name, config.monitor.listeners = "m", 'a "run"', list(listeners)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        config.monitor.prometheus_port = free.getsockname()[1]
    return config


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("prometheus", "prometheus_client")])
def test_a_package_that_is_missing_is_named_before_anything_starts(name, package, monkeypatch):
    check_listeners(configured())
    monkeypatch.setitem(optional._PACKAGES, name, f"no_such_{package}")
    with pytest.raises(
        UserError, match=f"monitor.listeners has {name}, but the package no_such_{package} is not installed"
    ):
        check_listeners(configured(name))


class Service:
    """A listener of a service that accepts one listener at a time."""

    def __init__(self, config: Config, directory: str):
        if self.taken:
            raise UserError("the service cannot be reached")
        self.taken.append(self)
        self.told, self.closed = [], 0

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.told.append((step, values))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(Service, "taken", [], raising=False)
    monkeypatch.setattr(optional, "Prometheus", Service)
    return Service


def test_a_listener_that_cannot_start_ends_a_new_run_and_no_resumed_one(service, tmp_path, capsys):
    config = configured("prometheus")
    service.taken.append("by somebody else")
    with pytest.raises(UserError, match="cannot be reached"), listening(config, str(tmp_path), resumed=False):
        pass
    with listening(config, str(tmp_path), resumed=True) as listeners:
        assert listeners == []
    assert (
        capsys.readouterr().out == "the service cannot be reached; the run continues without this listener\n"
    )


def test_restarts_keep_the_listeners(service, tmp_path):
    """A monitor is made for each attempt. A service that could not be reached again used to end the run."""
    config = configured("prometheus")
    with (
        StatusFile(str(tmp_path), "run", 4) as status,
        listening(config, str(tmp_path), resumed=False) as listeners,
    ):
        for attempt in (1, 2):
            monitor = Monitor(str(tmp_path), config, status, listeners=listeners)
            monitor.open()
            monitor.evaluated(attempt, {"eval/greedy": 0.5})
            monitor.close()
        (listener,) = listeners
        assert listener.closed == 0
    assert [step for step, _ in listener.told] == [1, 2]
    assert listener.closed == 1


def test_a_service_that_does_not_end_is_left_alone(service, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(optional, "_CLOSE_SECONDS", 0.1)
    answered = threading.Event()
    monkeypatch.setattr(service, "close", lambda self: answered.wait(60))
    try:
        with listening(configured("prometheus"), str(tmp_path), resumed=False):
            pass
        assert (
            capsys.readouterr().out
            == "Service may miss the end of this run: TimeoutError: no result within 0 s\n"
        )
    finally:
        answered.set()
    service.taken.clear()

    def refuse(self):
        raise ConnectionError("gone")

    monkeypatch.setattr(service, "close", refuse)
    with listening(configured("prometheus"), str(tmp_path), resumed=False):
        pass
    assert capsys.readouterr().out == "Service may miss the end of this run: ConnectionError: gone\n"


@pytest.mark.skipif(not find_spec("prometheus_client"), reason="prometheus_client is not installed")
def test_prometheus_gets_the_newest_scalars(tmp_path):
    config = configured("prometheus")
    address = f"http://127.0.0.1:{config.monitor.prometheus_port}/metrics"
    with listening(config, str(tmp_path), resumed=False) as (listener,):
        for step in (1, 2):
            listener.scalars(step, {"reward/mean": step / 4, "eval/pass@2": 1.0})
            listener.histogram(step, "reward/samples", np.ones(3))
            listener.text(step, "samples/0", "text")
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        assert r'grpo_megatron_scalar{name="reward/mean",run="a \"run\""} 0.5' in lines
        assert r'grpo_megatron_scalar{name="eval/pass@2",run="a \"run\""} 1.0' in lines
        assert r'grpo_megatron_step{run="a \"run\""} 2.0' in lines
        with (
            pytest.raises(
                UserError,
                match=f"prometheus_port={config.monitor.prometheus_port}.*choose another address or port",
            ),
            listening(config, str(tmp_path), resumed=False),
        ):
            pass
    # Nothing is left: the port is free again.
    with listening(config, str(tmp_path), resumed=False) as listeners:
        assert len(listeners) == 1


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = configured("wandb")
    with listening(config, str(tmp_path), resumed=False) as (listener,):
        listener.scalars(1, {"reward/mean": 0.25})
        listener.histogram(1, "reward/samples", np.arange(4.0))
        listener.text(1, "samples/0", "<b>text</b>")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # wandb's own process writes, after finish() too.
    end = time.monotonic() + 60
    while b"samples/0" not in (logged := file.read_bytes()):
        assert time.monotonic() < end
        time.sleep(0.1)
    for item in (b"reward/mean", b"0.25", b"reward/samples"):
        assert item in logged
    assert [page.read_text() for page in tmp_path.glob("wandb/offline-run-*/files/media/html/**/*.html")] == [
        "<pre>&lt;b&gt;text&lt;/b&gt;</pre>"
    ]
    # The same run there after a resume here.
    with listening(config, str(tmp_path), resumed=True):
        pass
    assert len({path.name.split("-")[-1] for path in tmp_path.glob("wandb/offline-run-*")}) == 1
