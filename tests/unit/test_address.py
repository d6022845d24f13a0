"""The address at which a job's nodes reach the first one."""

import socket
import subprocess
import sys

import psutil
import pytest

from grpo_megatron.cluster import address, placement
from grpo_megatron.errors import UserError


def test_an_interface_has_its_address():
    assert address.of_interface("lo") == "127.0.0.1"
    for name, addresses in psutil.net_if_addrs().items():
        own = [found.address for found in addresses if found.family.name == "AF_INET"]
        if own:
            assert address.of_interface(name) == own[0]


def test_an_interface_that_is_not_there_is_an_error_with_those_that_are():
    with pytest.raises(
        UserError,
        match=r"^network interface ib7 does not exist on node .+; choose one of the node's interfaces: "
        r"(.+, )?lo \(127\.0\.0\.1\)",
    ):
        address.of_interface("ib7")


def test_a_host_name_stands_for_an_address():
    assert address.of_host("localhost") == address.of_host("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"cannot resolve no-such-host\.invalid"):
        address.of_host("no-such-host.invalid")


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (["10.0.0.5"], "10.0.0.5"),
        (["127.0.1.1", "10.0.0.5", "10.0.0.6"], "10.0.0.5"),
        (["127.0.1.1"], "127.0.1.1"),
    ],
)
def test_a_host_that_has_another_address_is_not_reached_at_loopback(known, chosen, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in known]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert address.of_host("node1") == chosen


def test_processes_meet_on_loopback_where_a_node_is_known_by_an_address_that_no_interface_has(monkeypatch):
    """Debian's /etc/hosts has 127.0.1.1 for the machine's name, but the loopback interface has 127.0.0.1.

    A run of one node used to end there.
    """
    for at, alone in (("127.0.0.1", True), ("127.0.1.1", True), ("10.0.0.5", False)):
        monkeypatch.setattr(placement.ray.util, "get_node_ip_address", lambda at=at: at)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        assert placement._loopback_variables() == (dict.fromkeys(names, "lo") if alone else {})


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--interface", "lo"], 0, "127.0.0.1\n"),
        (["--host", "localhost"], 0, "127.0.0.1\n"),
        (["--interface", "ib7"], 2, ""),
    ],
)
def test_a_job_script_gets_the_address_or_an_exit_status(arguments, status, says):
    command = [sys.executable, "-m", "grpo_megatron.cluster.address", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, says)
    assert done.stderr.startswith("error: network interface ib7 does not exist") == (status == 2)
