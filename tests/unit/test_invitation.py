"""The file with which other jobs add nodes to a run."""

import os
import stat
from types import SimpleNamespace

import pytest

from grpo_megatron.cluster import invitation as module
from grpo_megatron.cluster.invitation import VARIABLE, invitation
from grpo_megatron.errors import UserError


@pytest.fixture(autouse=True)
def ray_runs(monkeypatch):
    context = SimpleNamespace(gcs_address="10.0.0.7:20030")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")


def test_only_the_user_can_read_it_while_the_run_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "join"
    monkeypatch.setenv(VARIABLE, str(path))
    before = os.umask(0)
    try:
        with invitation():
            assert path.read_text() == "10.0.0.7:20030\nsecret\n"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert os.listdir(tmp_path) == ["join"]
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_run_invites_only_if_it_is_told_where(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with invitation():
        assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{tmp_path}/none/join")
    with pytest.raises(UserError, match="none/join"), invitation():
        pass
