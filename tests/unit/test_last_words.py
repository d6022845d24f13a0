"""Messages about a process that died, made from logs and from Ray's report."""

import pytest
from ray.exceptions import ActorDiedError, RayError

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
# What every start of an engine on a CPU writes.
ENGINE_NOISE = """\
[2026-11-25 10:32:46] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit
[2026-11-25 10:32:46] Signal handler is not added because the engine is not in the main thread. \
This disables the SIGQUIT handler.
[2026-11-25 10:32:49] Cannot detect CUDA architecture.
[2026-11-25 10:32:53] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'
[2026-11-25 10:32:56] No HuggingFace chat template found
[2026-11-25 10:32:57] init_cpu_threads_env and shared memory based AllReduce is disabled, \
only intel amx backend and arm64 are supported
"""
SCHEDULER = """\
[2026-11-25 10:33:01 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/site-packages/sglang/srt/managers/scheduler.py", line 3000, in run_scheduler_process
    scheduler.run_event_loop()
  File "/site-packages/sglang/srt/layers/sampler.py", line 80, in forward
    probs = torch.softmax(logits, dim=-1)
RuntimeError: probability tensor contains either `inf`, `nan` or element < 0

"""
PARENT = """\
[2026-11-25 10:33:02] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "/site-packages/sglang/srt/entrypoints/engine.py", line 700, in _wait
    data = reader.recv()
EOFError
[2026-11-25 10:33:02] Rank 0 scheduler died during initialization (exit code: 1).
"""
CHAINED = """\
Traceback (most recent call last):
  File "loader.py", line 5, in load
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: '/models/x/model.safetensors'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "loader.py", line 9, in load
    raise ValueError(f"{path} cannot be loaded")
ValueError: /models/x/model.safetensors cannot be loaded
"""
SAMPLER = ['  File "/site-packages/sglang/srt/layers/sampler.py", line 80, in forward']
SAMPLER += ["RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"]
BROKEN = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file."
)


@pytest.mark.parametrize(
    ("log", "report", "how", "lines"),
    [
        (NOISE, BROKEN, "probably killed by SIGKILL, sent manually", []),
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
        (
            "",
            "Task was killed due to the node running low on memory.",
            "(ended by Ray because its node was out of memory)",
            [],
        ),
        (
            "bye\n",
            "Worker exit detail: The process receives a SIGTERM.",
            " (The process receives a SIGTERM)",
            ["bye"],
        ),
        ("last\n", "", "in `step`; its log", ["last"]),
        (ENGINE_NOISE, BROKEN, "by SIGKILL", []),
        (ENGINE_NOISE + SCHEDULER + ENGINE_NOISE, BROKEN, "by SIGKILL", SAMPLER),
        (ENGINE_NOISE + SCHEDULER + PARENT, BROKEN, "by SIGKILL", SAMPLER),
        (
            CHAINED + ENGINE_NOISE,
            "",
            "in `step`",
            [
                '  File "loader.py", line 9, in load',
                "ValueError: /models/x/model.safetensors cannot be loaded",
            ],
        ),
        (
            ENGINE_NOISE + "CUDA error: out of memory\nstep 7\nstep 8\nstep 9\nstep 10\n",
            "",
            "in `step`",
            ["CUDA error: out of memory"],
        ),
        (
            "[10:00 TP0] ERROR one\nINFO fine\n[10:01 TP0] ERROR two\n"
            + ENGINE_NOISE
            + PARENT.splitlines()[-1]
            + "\n",
            "",
            "in `step`",
            ["[10:00 TP0] ERROR one", "[10:01 TP0] ERROR two"],
        ),
        (PARENT, "", "in `step`", None),
        (
            "a\n" + "  Traceback (most recent call last):\n",
            "",
            "in `step`",
            ["a", "  Traceback (most recent call last):"],
        ),
    ],
)
def test_the_message(tmp_path, log, report, how, lines):
    """Lines that every start of an engine writes used to appear beside the cause of its death, or instead of
    it.

    lines: quoted lines; None: any.
    """
    path = tmp_path / "rank1.log"
    path.write_text(log)
    said, *quoted = str(Process("trainer rank 1 of 2", str(path)).died("step", RayError(report))).splitlines()
    assert said.startswith("trainer rank 1 of 2 died in `step`")
    assert said.endswith(f"; its log is {path}")
    assert how in said
    assert quoted == [f"  | {line}" for line in lines] if lines is not None else quoted


def test_a_log_elsewhere_and_a_death_without_report():
    said = str(Process("engine 0", "/nowhere/engine0.log").died("generate", ActorDiedError()))
    assert (
        said == "engine 0 died in `generate`; its log is /nowhere/engine0.log\n"
        "  | (this node cannot read the log)"
    )
