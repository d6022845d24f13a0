"""A job's script (slurm/train.sbatch with its head) without Slurm.

tests/integration/test_slurm.py has a real one.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from render import TEMPLATE, Job, render

JOB = Job(
    "run",
    2,
    "/runs/run",
    "/here",
    "/env/bin",
    ["--config", "a.yaml", "data.eval=code.jsonl"],
    cpus_per_node=3,
)


def part_of_script(*parts: str, **env) -> subprocess.CompletedProcess:
    """Run the functions of slurm/train.sbatch that need no Slurm as a job's script.

    parts: lines before and after the functions.
    """
    before, *after = parts
    functions = TEMPLATE.read_text().partition("\ntask=")[0]
    script = "\n".join([before, functions, *after])
    env = {**os.environ, "SLURM_JOB_ID": "7", "GRPO_REQUEUE": "1", **env}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("status", "says"), [(0, ""), (1, "error: Slurm refused to queue job 7 again")])
def test_a_run_that_has_stopped_is_a_job_that_has_stopped_whatever_scontrol_says(status, says):
    done = part_of_script(f"scontrol() {{ echo scontrol $*; return {status}; }}", "asked=USR1", "leave 75")
    assert done.returncode == 75
    assert "scontrol requeue 7" in done.stdout
    assert done.stderr.startswith(says)
    assert bool(done.stderr) == bool(says)


def test_a_signal_while_the_driver_is_being_started_stops_the_run(tmp_path):
    """Slurm's signal may come before the script knows which process to pass it on to."""
    (tmp_path / "grpo-megatron").write_text("#!/bin/sh\nexec sleep 45\n")
    (tmp_path / "grpo-megatron").chmod(0o755)
    start = '"${here[@]}" "$bin/grpo-megatron"'
    just_before = (
        "trap 'case $BASH_COMMAND in *bin/grpo-megatron*) trap - DEBUG; kill -s USR1 $$;; esac' DEBUG"
    )
    _, _, from_start = TEMPLATE.read_text().partition(start)
    done = part_of_script(
        "", "here=() address=", just_before, start + from_start, bin=str(tmp_path), GRPO_REQUEUE=""
    )
    assert (done.returncode, done.stderr) == (75, "")


def test_what_a_sites_prolog_prints_is_no_node(tmp_path):
    """TaskProlog prints to each task's output, and a job may have more tasks than nodes."""
    script = TEMPLATE.read_text()
    places = re.search(r"^places=.*?^mapfile [^\n]*\n", script, flags=re.MULTILINE | re.DOTALL)[0]
    of = (
        "node-order s2.node10 node10",
        "node-order s2.node9 node9",
        "node-order s1.node11 node11",
        "node-order s2.node9 node9",
    )
    printed = "\n".join(f"welcome\n{line}" for line in of)
    srun = f"srun() {{ printf '%s\\n' {shlex.quote(printed)}; }}"
    done = part_of_script(srun, "SLURM_JOB_NUM_NODES=3", places, 'echo "${nodes[*]}"')
    assert done.stdout == "node11 node9 node10\n"


# What the script calls, on one node. Ray stays until it is ended, the run says what it was given.
PROGRAMS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"',
    "scontrol": "echo NodeAddr=node1",
    "python": 'case "$*" in *.address*) echo 10.0.0.1;; *.ports*) echo 20000;; *.ray_command*) exec ray;; '
    "esac",
    "ray": 'echo "ray $PATH $CUDA_HOME"\ntouch ray_is_up\nexec sleep 60',
    "grpo-megatron": "while [ ! -e ray_is_up ]; do sleep 0.01; done\n"
    'echo "run $*"\necho "driver $PATH $CUDA_HOME"\nexit 3',
}


def whole_script(job: Job, folder: Path, bin: Path | None = None, **more: str) -> subprocess.CompletedProcess:
    """Run the job's script from its first line to its last, with stand-ins for Slurm, Ray and the run.

    bin: the folder in which the script looks for programs; None: that of the stand-ins, which is on PATH in
        any case.
    more: environment variables of the job.
    """
    for name, lines in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    slurm = {"JOB_ID": "7", "JOB_NUM_NODES": "1", "SUBMIT_DIR": str(folder)}
    env = {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURMD_NODENAME": "node1"}
    env = {**os.environ, **env, "PATH": f"{folder}:{os.environ['PATH']}", **more}
    return subprocess.run(
        ["bash"],
        input=render(replace(job, bin=str(bin or folder))),
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", ["train", "eval"])
def test_what_another_job_has_left_since_this_one_was_queued_does_not_end_it(command, tmp_path):
    """It used to be taken for this job's own: the second evaluation in a folder ended at once with status 0.

    So did a run of more steps.
    """
    result = tmp_path / "result.json"
    result.write_text('{"step": 50}')
    os.utime(result, (time.time() + 3600,) * 2)
    done = whole_script(replace(JOB, folder=str(tmp_path), command=command), tmp_path)
    assert (
        f"run {command} --config a.yaml data.eval=code.jsonl cluster.ray_address=10.0.0.1:20000\n"
        in done.stdout
    )
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("home", ["/opt/cuda-13.0", ""])
def test_ray_and_the_run_find_what_kernels_are_built_with(tmp_path, home):
    """Programs used to be called by their paths, and did not find the programs that they call in turn."""
    (tmp_path / "stand-ins").mkdir()
    (tmp_path / "bin").symlink_to(tmp_path / "stand-ins")
    done = whole_script(
        replace(JOB, folder=str(tmp_path)), tmp_path / "stand-ins", tmp_path / "bin", CUDA_HOME=home
    )
    found = [line.split(" ") for line in done.stdout.splitlines() if line.startswith(("ray ", "driver "))]
    assert {who for who, *_ in found} == {"ray", "driver"}, done.stdout + done.stderr
    for _, path, cuda_home in found:
        assert path.startswith(f"{tmp_path}/bin:{tmp_path}/stand-ins:")
        assert cuda_home == home


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/tmp/ray-7654"),
        ({"TMPDIR": "/disk"}, "/disk/ray-7654"),
        ({"RAY_TMPDIR": "/fast", "TMPDIR": "/disk"}, "/fast/ray-7654"),
        ({"TMPDIR": "/local/job.7654"}, "/local/job.7654"),  # the site has made it for this job
        ({"TMPDIR": "/" + "x" * 29}, f"/{'x' * 29}/ray-7654"),
        ({"TMPDIR": "/" + "x" * 30}, "/tmp/ray-7654"),  # Ray's sockets would have names that are too long
        ({"TMPDIR": f"/{'x' * 60}/7654"}, "/tmp/ray-7654"),
    ],
)
def test_every_job_has_a_folder_of_its_own_for_ray(variables, folder):
    """/tmp/ray belonged to another user if that user's Ray had run, and the job failed three times."""
    values = {"TMPDIR": "", "RAY_TMPDIR": "", "SLURM_JOB_ID": "7654"} | variables
    assert part_of_script("", "ray_folder", **values).stdout.strip() == folder


@pytest.mark.parametrize("status", [0, 3])
def test_the_files_of_ray_go_with_a_run_that_is_done(status, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setitem(PROGRAMS, "ray", 'mkdir -p "$RAY_TMPDIR/ray"; exec sleep 60')
    run = f'until [ -d "$RAY_TMPDIR/ray" ]; do sleep 0.1; done; echo "in $RAY_TMPDIR"; exit {status}'
    monkeypatch.setitem(PROGRAMS, "grpo-megatron", run)
    job = str(os.getpid())  # not 7: processes that run tests would share /tmp/ray-7
    done = whole_script(replace(JOB, folder=str(tmp_path)), tmp_path, SLURM_JOB_ID=job)
    assert done.returncode == status, done.stderr
    folder = Path(re.search("^in (.*)$", done.stdout, re.MULTILINE)[1])
    assert folder.name == f"ray-{job}"
    assert folder.exists() == (status != 0)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["as it is", "rendered"])
def test_shellcheck_finds_nothing(name, tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(Path("slurm/train.sbatch").read_text() if name == "as it is" else render(JOB))
    done = subprocess.run(["shellcheck", "--severity=warning", str(script)], capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize(("ends", "status"), [("rm -f join", 0), (":", 1)], ids=["run ended", "run goes on"])
def test_a_job_that_joins_starts_ray_with_the_other_jobs_address_and_token(tmp_path, ends, status):
    """And no run. Its Ray must not end before the run, which then removes the file."""
    programs = {
        "python": f'echo "$RAY_AUTH_TOKEN $@"; {ends}',
        "srun": "while [[ $1 != */python && $1 != bash && $1 != rm ]]; do shift; done\n"
        'if [[ $1 == bash ]]; then echo "node-order n1 n1"; echo "node-order n2 n2"; else "$@"; fi',
        "scontrol": ":",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "join").write_text("10.0.0.7:20030\nsecret\n")
    _, task, rest = TEMPLATE.read_text().partition("\ntask=")
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "2"}
    paths = {"GRPO_BIN": str(tmp_path), "GRPO_JOINS": "join", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = part_of_script("", task + rest, **env, **paths, TMPDIR=f"{tmp_path}/tmp", GRPO_COMMAND="none")
    assert done.returncode == status, done.stderr
    assert bool(done.stderr) == bool(status)
    command = "secret -m grpo_megatron.cluster.ray_command start --address="
    started = [line for line in done.stdout.splitlines() if line.startswith(command)]
    assert len(started) == 2
    assert all(line.startswith(f"{command}10.0.0.7:20030 ") for line in started)
    assert "n1 n2 join the Ray at 10.0.0.7:20030" in done.stdout


@pytest.mark.parametrize("content", ["", "10.0.0.7:20030\n"])
def test_a_file_without_address_and_token_ends_the_job(tmp_path, content):
    (tmp_path / "join").write_text(content)
    line = re.search(r"^    \{ read -r address.*?^    \}$", TEMPLATE.read_text(), re.MULTILINE | re.DOTALL)[0]
    done = part_of_script("", line, GRPO_JOINS=str(tmp_path / "join"))
    assert done.returncode == 1
    assert "join has no address and no token of a run" in done.stderr
