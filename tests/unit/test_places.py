"""Places of ranks in the network, the address where a job listens, and waiting for its nodes."""

import resource
import socket
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from grpo_megatron.cluster import ray_connection, ray_patches, wait
from grpo_megatron.cluster.bundles import neighbouring_stages
from grpo_megatron.cluster.ports import free_ports
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import MegatronConfig
from tests.tools import wait_until


def layout_of(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> MegatronConfig:
    return MegatronConfig(tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, expert_parallel=ep)


def slots_of(layout: MegatronConfig) -> list[int]:
    return list(range(layout.tensor_parallel * layout.pipeline_parallel * layout.data_parallel))


def nodes_of_ranks(layout: MegatronConfig, per_node: int) -> list[int]:
    """Return the node of each rank, with nodes numbered in the network's order."""
    return [slot // per_node for slot in neighbouring_stages(slots_of(layout), layout, per_node)]


def test_stages_of_a_replica_are_on_neighbouring_nodes():
    layout = layout_of(tp=2, pp=3, dp=2)
    # Stages one after the other, and in each the two replicas, one a node.
    assert nodes_of_ranks(layout, per_node=2) == [0, 0, 3, 3, 1, 1, 4, 4, 2, 2, 5, 5]


@pytest.mark.parametrize(
    ("layout", "per_node"),
    [
        (layout_of(tp=2, pp=2, dp=1), 2),  # one replica
        (layout_of(tp=2, dp=4), 4),  # one stage
        (layout_of(tp=2, pp=2, dp=2), 8),  # one node
        (layout_of(tp=4, pp=2, dp=2, ep=8), 4),  # experts over a whole stage of two nodes
        (layout_of(tp=2, pp=2, dp=3), 4),  # stages that do not end where nodes do
    ],
)
def test_what_has_nothing_to_gain_stays_in_order(layout, per_node):
    assert neighbouring_stages(slots_of(layout), layout, per_node) == slots_of(layout)


def test_replicas_share_a_node_before_stages_do():
    # Gradients are more than what one stage gives the next.
    layout = layout_of(tp=1, pp=2, dp=4)
    assert nodes_of_ranks(layout, per_node=2) == [0, 0, 2, 2, 1, 1, 3, 3]


def test_experts_that_exchange_tokens_stay_neighbours():
    layout = layout_of(tp=2, pp=2, dp=4, ep=4)
    assert nodes_of_ranks(layout, per_node=2) == [0, 0, 1, 1, 4, 4, 5, 5, 2, 2, 3, 3, 6, 6, 7, 7]


def test_the_recipe_for_70b_has_its_two_stages_on_pairs_of_nodes():
    layout = read_config("configs/llama3_70b_16node.yaml", ["model.path=/nowhere"]).megatron
    nodes = nodes_of_ranks(layout, per_node=8)
    assert [(nodes[rank], nodes[rank + 64]) for rank in range(0, 64, 8)] == [
        (first, first + 1) for first in range(0, 16, 2)
    ]


def test_a_port_that_is_taken_is_passed_over():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        if taken > 65000:
            pytest.skip("there is no room behind the port that the system chose")
        assert free_ports(2, taken - 1) > taken
        assert free_ports(2, taken) > taken
    with pytest.raises(OSError, match="does not have 3 consecutive free ports"):
        free_ports(3, 65535)


@pytest.mark.timeout(120)
def test_a_process_that_can_open_no_socket_does_not_look_for_a_port_for_ever():
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))
    try:
        with pytest.raises(OSError, match="does not have 1 consecutive free ports"):
            free_ports(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_a_port_is_free_when_its_server_has_ended():
    """The system still keeps the connections that the server has closed."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        caller = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
        assert caller.recv(1) == b""
        caller.close()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert free_ports(1, port) == port


def test_what_asks_for_nodes_ends_with_who_started_it():
    """A job that ended used to leave it behind, asking for half an hour."""
    asking = (
        "from pathlib import Path; Path('/proc/self/comm').write_text('asks-for-nodes'); "
        "import time; time.sleep(600)"
    )
    starter = f"""
from grpo_megatron.cluster import wait
wait._COUNT = wait._COUNT.partition("import ray")[0] + {asking!r}
wait.listening = lambda address: True
wait.alive_nodes("127.0.0.1:1")
"""

    def askers():
        processes = [
            process for process in psutil.process_iter(["name"]) if process.info["name"] == "asks-for-nodes"
        ]
        return [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]

    with subprocess.Popen([sys.executable, "-c", starter]) as started:
        wait_until(askers)
        started.kill()
    wait_until(lambda: not askers())


@pytest.mark.parametrize(
    ("said", "nodes"), [("a pool.\\nnodes alive: 2\\nmore", 2), ("nodes alive: many", 0), ("", 0)]
)
def test_nodes_are_counted_whatever_else_ray_prints(monkeypatch, said, nodes):
    monkeypatch.setattr(wait, "_COUNT", f'print("{said}")')
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert wait.alive_nodes(f"127.0.0.1:{listener.getsockname()[1]}") == nodes


def test_a_child_that_ends_while_it_is_asked_for_its_name_is_none_of_rays(monkeypatch):
    """It used to end the thread that handles signals."""

    def vanished():
        raise psutil.NoSuchProcess(4711)

    raylet = SimpleNamespace(name=lambda: "raylet")
    children = [SimpleNamespace(name=vanished), raylet, SimpleNamespace(name=lambda: "sh")]
    monkeypatch.setattr(ray_connection.psutil, "Process", lambda: SimpleNamespace(children=lambda: children))
    assert ray_connection.daemons() == [raylet]


def test_a_raylet_has_time_to_start(monkeypatch):
    """Ray itself allows half a minute, which is too short for a slow file system to load its agents'
    modules.
    """
    answers = iter([RuntimeError("not known yet"), RuntimeError("not known yet"), "node"])

    def asked(address, node):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return f"{answer} {node} at {address}"

    raylet = SimpleNamespace(name=lambda: "raylet", status=lambda: status)
    monkeypatch.setattr(ray_connection, "daemons", lambda: [raylet])
    monkeypatch.setattr(ray_patches.services, "get_node", asked)
    in_time = partial(ray_patches.wait_for_raylet, 300, ray_connection._raylet_runs)
    status = psutil.STATUS_SLEEPING
    with in_time():
        assert ray_patches.services.get_node("here", "a") == "node a at here"
    assert ray_patches.services.get_node is asked
    status, answers = psutil.STATUS_ZOMBIE, iter([RuntimeError("not known yet")])
    with in_time(), pytest.raises(RuntimeError, match="not known yet"):
        ray_patches.services.get_node("here", "a")
