"""What is said of a process that died, from logs and from Ray's report."""

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayError

from grpo_megatron.cluster import last_words
from grpo_megatron.cluster.processes import Process

NOISE = """\
/site-packages/torchvision/io/image.py:13: UserWarning: Failed to load image Python extension
  warn(
[2026-11-22 22:36:48] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'
Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 840.04it/s]
W1122 21:34:11 torch/utils: warning: something is old

"""
CRASH = """\
step 1
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "model.py", line 12 in forward
  File "model.py", line 40 in step
Extension modules: numpy.core
"""
BROKEN = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
)


@pytest.mark.parametrize(
    ("log", "report", "how", "lines"),
    [
        (NOISE, BROKEN, "by SIGKILL, as it seems: by hand", []),
        (NOISE + "one\ntwo\nthree\nfour\n" + NOISE, BROKEN, "by SIGKILL", ["two", "three", "four"]),
        (
            NOISE + CRASH + NOISE,
            BROKEN,
            "(Segmentation fault)",
            [
                "Fatal Python error: Segmentation fault",
                "Current thread 0x00007f (most recent call first):",
                '  File "model.py", line 12 in forward',
            ],
        ),
        ("bye\n", "Worker exits with an exit code 4.", "(with exit status 4)", ["bye"]),
        ("", "Task was killed due to the node running low on memory.", "(ended by Ray because its node was out of memory)", []),
        ("bye\n", "Worker exit detail: The process receives a SIGTERM.", " (The process receives a SIGTERM)", ["bye"]),
        ("last\n", "", "in `step`; its log", ["last"]),
    ],
)
def test_the_message(tmp_path, log, report, how, lines):
    path = tmp_path / "rank1.log"
    path.write_text(log)
    said, *quoted = str(Process("trainer rank 1 of 2", str(path)).died("step", RayError(report))).splitlines()
    assert said.startswith("trainer rank 1 of 2 died in `step`")
    assert said.endswith(f"; its log is {path}")
    assert how in said
    assert quoted == [f"  | {line}" for line in lines]


@pytest.mark.parametrize(("address", "was_here"), [("127.0.0.1", True), ("192.0.2.7", False), ("", False)])
def test_the_kernels_kills_are_counted_for_processes_of_this_machine(address, was_here, tmp_path, monkeypatch):
    """As Ray reports a death; 192.0.2.0/24 is nobody's, and Ray leaves out an address that it does not know."""
    (tmp_path / "log").touch()
    process = Process("engine 0", str(tmp_path / "log"))
    monkeypatch.setattr(last_words, "_killed_before", last_words.killed_for_memory() - 1)
    context = ActorDiedErrorContext(actor_id=bytes(16), class_name="Engine", node_ip_address=address, error_message=BROKEN)
    said = str(process.died("generate", ActorDiedError(context)))
    assert ("this machine was out of memory" in said) == was_here
    assert ("by hand, or by the kernel for lack of memory" in said) != was_here


def test_a_log_elsewhere_and_a_death_without_report():
    said = str(Process("engine 0", "/nowhere/engine0.log").died("generate", ActorDiedError()))
    assert said == "engine 0 died in `generate`; its log is /nowhere/engine0.log\n  | (the log cannot be read from here)"
