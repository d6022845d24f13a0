"""Weights & Biases and Prometheus, where their packages are installed; and what is said where they are not."""

import socket
import time
import urllib.request
from importlib.util import find_spec

import numpy as np
import pytest

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring import optional
from grpo_megatron.monitoring.optional import check_listeners, make_listeners


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
    with pytest.raises(UserError, match=f"monitor.listeners has {name}, which needs the package no_such_{package}"):
        check_listeners(configured(name))


@pytest.mark.skipif(not find_spec("prometheus_client"), reason="prometheus_client is not installed")
def test_prometheus_gets_the_newest_scalars(tmp_path):
    config = configured("prometheus")
    (listener,) = make_listeners(config, str(tmp_path))
    address = f"http://127.0.0.1:{config.monitor.prometheus_port}/metrics"
    try:
        for step in (1, 2):
            listener.scalars(step, {"reward/mean": step / 4, "eval/pass@2": 1.0})
            listener.histogram(step, "reward/samples", np.ones(3))
            listener.text(step, "samples/0", "text")
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        assert r'grpo_megatron_scalar{name="reward/mean",run="a \"run\""} 0.5' in lines
        assert r'grpo_megatron_scalar{name="eval/pass@2",run="a \"run\""} 1.0' in lines
        assert r'grpo_megatron_step{run="a \"run\""} 2.0' in lines
        with pytest.raises(UserError, match=f"prometheus_port={config.monitor.prometheus_port}.*choose others"):
            make_listeners(config, str(tmp_path))
    finally:
        listener.close()
    # Nothing is left: the port is free again, as a restart within the run needs it.
    make_listeners(config, str(tmp_path))[0].close()


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = configured("wandb")
    (listener,) = make_listeners(config, str(tmp_path))
    listener.scalars(1, {"reward/mean": 0.25})
    listener.histogram(1, "reward/samples", np.arange(4.0))
    listener.text(1, "samples/0", "<b>text</b>")
    listener.close()
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
    make_listeners(config, str(tmp_path))[0].close()
    assert len({path.name.split("-")[-1] for path in tmp_path.glob("wandb/offline-run-*")}) == 1
