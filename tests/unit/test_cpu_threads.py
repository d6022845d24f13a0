"""CPU threads of ranks and engines: a node's cores are divided among the processes that work at the same
time.
"""

import os

import pytest

from grpo_megatron.cluster import cpu_threads
from grpo_megatron.cluster.cpu_threads import cores_text, threads_by_node, threads_text, usable_cores
from grpo_megatron.cluster.placement import Slot
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.load import read_config
from grpo_megatron.sglang.arguments import engine_environment
from grpo_megatron.trainer.ranks import _environment


@pytest.mark.parametrize(
    ("setting", "nodes", "cores", "expected"),
    [
        ("auto", "a", {"a": 2}, {"a": 2}),
        ("auto", "aa", {"a": 2}, {"a": 1}),
        ("auto", "aaa", {"a": 8}, {"a": 2}),
        ("auto", "aaaa", {"a": 2}, {"a": 1}),  # more processes than cores
        ("auto", "aabbb", {"a": 8, "b": 12}, {"a": 4, "b": 4}),
        ("auto", "", {"a": 8}, {}),  # no engines
        ("3", "aab", {"a": 2, "b": 64}, {"a": 3, "b": 3}),
    ],
)
def test_cores_are_divided_among_the_processes_of_a_node(setting, nodes, cores, expected):
    assert threads_by_node(setting, nodes, cores) == expected


@pytest.mark.parametrize(
    ("setting", "variable", "expected"),
    [("auto", "1", 1), ("auto", "5", 5), ("2", "5", 2), ("auto", "0", 8), ("auto", "4,2", 4)],
)
def test_auto_follows_the_usual_variable(setting, variable, expected):
    assert threads_by_node(setting, "a", {"a": 8}, {"OMP_NUM_THREADS": variable}) == {"a": expected}


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("9000000 100000", 16), ("", 16)],
)
def test_a_containers_quota_counts(quota, expected, tmp_path, monkeypatch):
    """A container with 2 processors on a machine of 16 sees all 16. A thread for each would only wait."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cpu_threads, "_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores() == expected
    (tmp_path / "cpu.max").unlink()
    assert usable_cores() == 16


def test_the_affinity_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_threads, "_QUOTA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cores() == 2


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_no_thread_of_a_rank_or_an_engine_waits_by_spinning(threads):
    """Ranks waited passively, but engines did not.

    On two cores that others used too, a generation of 8 s was seen to take 98 to 172 s.
    """
    rank = _environment(Slot(0, "node", None), threads)
    engine = engine_environment(EngineConfig(), gpu=False, threads=threads)
    for environment in (rank, engine):
        assert environment["OMP_NUM_THREADS"] == str(threads)
        assert environment["OMP_WAIT_POLICY"] == "passive"
        assert int(environment["GOMP_SPINCOUNT"]) < 10_000


def test_what_is_said_at_the_start():
    assert threads_text("trainer rank", {"a": 1, "b": 1}) == "1 thread for each trainer rank"
    assert threads_text("engine rank", {"a": 2, "b": 4}) == "2 to 4 threads for each engine rank"
    assert cores_text({"a": 8}) == "8 usable cores on each node"


@pytest.mark.parametrize("key", ["megatron.cpu_threads", "rollout.engine.cpu_threads"])
@pytest.mark.parametrize(("value", "expected"), [("4", "4"), ("auto", "auto")])
def test_both_keys_take_a_number_or_auto(key, value, expected):
    config = read_config(None, [f"{key}={value}", "model.path=m", "data.train=d"])
    section = config.megatron if key.startswith("megatron") else config.rollout.engine
    assert section.cpu_threads == expected
