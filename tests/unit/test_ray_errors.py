"""A run's reaction to each of Ray's errors: a restart, a message, or a defect with its traceback."""

import pytest
import ray
from ray import exceptions as given
from ray.exceptions import RayError, RayTaskError

from grpo_megatron.cluster.processes import Process, ProcessDied, process_error
from grpo_megatron.cluster.ray_errors import LACKING, LOST
from grpo_megatron.errors import UserError

# Only a mistake in this code could cause these.
DEFECTS = {
    given.ActorAlreadyExistsError,
    given.ActorHandleNotFoundError,
    given.CrossLanguageError,
    given.ObjectRefStreamEndOfStreamError,
    given.OufOfBandObjectRefSerializationException,
    given.PendingCallsLimitExceeded,
    given.PlasmaObjectNotAvailable,
    given.RayTaskError,  # remote code failed; `process_error` says how
    given.TaskCancelledError,
    given.UnserializableException,
    given.UserCodeException,
}
# As Ray 2.60 writes it, shortened in the middle.
OOM = """\
1 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 192.0.2.2, ID: b9ce22c6) was 61.44GB used / 62.54GB limit (0.98)
OOM kill reason: Memory usage 1540435968B exceeded threshold of 252765008B
Selected to kill: (Actor(da1c3078): job ID=01000000, task name=_Worker.__init__, pid=18443, \
actual memory used=31.08GB)
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
18443\t31.08\tray::_Worker.call
17449\t20.17\tsglang::scheduler
18206\t5.09\t.venv/bin/python /a/very/long/path/of/a/program/that/goes/on/and/on/and/on/grpo-megatron train
18442\t0.04\tray::IDLE
Refer to the documentation on how to address the out of memory issue."""
# As Ray 2.40 wrote it.
OLD_OOM = """\
Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.7, ID: 8a) where the lease was running was 61.15GB / 62.25GB (0.982), \
which exceeds the limit
Top 10 memory users:
PID\tMEM(GB)\tCOMMAND
12\t40.00\tray::PoolWorker.work"""
PROCESS = Process("trainer rank 1 of 2", "/runs/x/logs/rank1.log")


def subclasses(kind):
    return [found for one in kind.__subclasses__() for found in (one, *subclasses(one))]


@pytest.mark.parametrize(
    "kind", sorted({one for one in subclasses(RayError) if one.__module__ == "ray.exceptions"}, key=str)
)
def test_every_error_of_ray_has_a_meaning(kind):
    """A rank that Ray's memory monitor killed ended the run with status 1, because OutOfMemoryError is no
    RayActorError.

    A class that a newer Ray adds has to be assigned to one of these kinds, too.
    """
    meanings = [issubclass(kind, LOST), issubclass(kind, tuple(LACKING)), kind in DEFECTS]
    assert meanings.count(True) == 1, f"{kind.__name__}: {meanings}"


@pytest.mark.parametrize("report", [OOM, OLD_OOM])
def test_lack_of_memory_is_a_lost_process_and_says_what_needed_the_memory(report):
    error = process_error(given.OutOfMemoryError(report), PROCESS, "train_step")
    assert isinstance(error, ProcessDied)
    assert error.exit_status == 3
    head, most, advice = str(error).splitlines()
    if report is OOM:
        assert head == (
            "trainer rank 1 of 2 died in `train_step` (ended by Ray because its node 192.0.2.2 was out of "
            "memory: 61.44 of 62.54 GB were used); its log is /runs/x/logs/rank1.log"
        )
        assert (
            "ray::_Worker.call (process 18443) with 31.08 GB, sglang::scheduler "
            "(process 17449) with 20.17 GB, " in most
        )
        assert "IDLE" not in most
    else:
        assert "10.0.0.7 was out of memory: 61.15 of 62.25 GB" in head
        assert most.endswith("ray::PoolWorker.work (process 12) with 40.00 GB")
    assert "train.max_tokens_per_micro_batch" in advice


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (given.NodeDiedError("The node 10.0.0.2 died"), "died in `generate`"),
        (given.WorkerCrashedError(), "died in `generate`"),
        (given.ActorDiedError(), "died in `generate`"),
        (
            given.ActorUnavailableError("keepalive watchdog timeout", None),
            "was lost in `generate` (The actor None is unavailable",
        ),
        (given.LocalRayletDiedError(), "was lost in `generate` (The task's local raylet died"),
        (given.ObjectLostError("ab12", None, ""), "was lost in `generate` (Failed to retrieve object ab12"),
        (given.OwnerDiedError("ab12", None, ""), "was lost in `generate`"),
        (
            given.ActorUnschedulableError("its node is gone"),
            "was lost in `generate` (The actor is not schedulable: its node is gone)",
        ),
        (given.ActorPlacementGroupRemoved(), "was lost in `generate`"),
        (given.RaySystemError("Broken pipe"), "was lost in `generate` (System error: Broken pipe)"),
        (given.RpcError("Socket closed"), "was lost in `generate`"),
        (given.GetTimeoutError("Get timed out"), "was lost in `generate` (Get timed out)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RayError) else "",
)
def test_a_lost_process_is_replaced(error, says, tmp_path):
    """`run_with_restarts` answers ProcessLost with a restart from the newest checkpoint."""
    (tmp_path / "log").touch()
    found = process_error(error, Process("engine 0", str(tmp_path / "log")), "generate")
    assert isinstance(found, ProcessDied)
    assert ("died in `generate`" if says == "died in `generate`" else says) in str(found)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            given.ObjectStoreFullError("Failed to put object"),
            "Ray's object store is full; enlarge /dev/shm",
        ),
        (
            given.OutOfDiskError("Local disk is full"),
            "the disk with Ray's temporary folder is full; free some space",
        ),
        (
            given.RuntimeEnvSetupError("[Errno 28] No space left on device"),
            "Ray says: [Errno 28] No space left on device",
        ),
        (given.AuthenticationError("Token authentication is enabled"), "RAY_AUTH_TOKEN"),
    ],
)
def test_what_a_machine_lacks_ends_the_run_with_what_to_do(error, says):
    """A restart would fail in the same way."""
    found = process_error(error, PROCESS, "start")
    assert type(found) is UserError
    assert found.exit_status == 2
    assert str(found).startswith("trainer rank 1 of 2 failed in `start`: ")
    assert says in str(found)


def of_a_task(
    cause,
    words="\x1b[36mray::_Worker.call()\x1b[39m (pid=7, ip=127.0.0.1)\n  File \"a.py\", line 3\nKeyError: 'x'",
):
    return RayTaskError(
        "call", words, cause, proctitle="ray::_Worker.call", pid=7, ip="127.0.0.1"
    ).as_instanceof_cause()


@pytest.mark.parametrize(
    ("cause", "kind", "says"),
    [
        (UserError("rollout.n is too large"), UserError, "rollout.n is too large"),
        (
            given.ObjectLostError("ab12", None, ""),
            ProcessDied,
            "trainer rank 1 of 2 was lost in `train_step`",
        ),
        (given.OutOfMemoryError(OOM), ProcessDied, "out of memory: 61.44 of 62.54 GB"),
        (given.OutOfDiskError("full"), UserError, "free some space"),
        (
            ValueError("no such layer\nmore"),
            RuntimeError,
            "failed in `train_step`: ValueError: no such layer; its log is",
        ),
        (KeyError("x"), RuntimeError, "failed in `train_step`: KeyError: 'x'; its log is"),
        (AssertionError(), RuntimeError, "failed in `train_step`: AssertionError; its log is"),
    ],
)
def test_what_remote_code_raised(cause, kind, says):
    """The first line names the cause, because the terminal shows no other.

    The colour codes of Ray's traceback used to appear in logs and in status.json.
    """
    found = process_error(of_a_task(cause), PROCESS, "train_step")
    assert type(found) is kind
    assert says in str(found)
    assert "\x1b" not in str(found)


def test_a_defect_stays_what_it_is():
    error = given.TaskCancelledError()
    assert process_error(error, PROCESS, "train_step") is error


@pytest.mark.slow
def test_rays_own_memory_monitor(monkeypatch):
    """It kills a process when the node uses more than a hundredth of its memory, as it is configured here."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "200")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:

        @ray.remote
        class Greedy:
            def eat(self):
                import time

                kept = bytearray(200 * 2**20)
                time.sleep(60)
                return len(kept)

        with pytest.raises(RayError) as raised:
            ray.get(Greedy.remote().eat.remote())
        found = process_error(raised.value, PROCESS, "eat")
        assert isinstance(found, ProcessDied)
        assert "was out of memory: " in str(found)
        assert "the processes that used the most memory on that node: " in str(found)
    finally:
        ray.shutdown()
