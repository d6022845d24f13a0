"""Output of slurm/submit.py.

test_slurm_refusals.py has what it refuses. test_slurm_script.py runs the script. The integration tests
have a real Slurm.
"""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from job_checks import cpu_slots
from plan_recipes import RECIPES
from render import apptainer, directive, pyxis, render
from submit import task_numbers, time_limit

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import read_config
from grpo_megatron.errors import UserError
from tests.unit.slurm_jobs import ABSENT, EVALUATION, HOSTILE, JOB, header, shell_words, submit


@pytest.mark.parametrize("name", ["llama3_70b_16node", "qwen3_8b_1node", "qwen3_235b_a22b_16node"])
def test_every_recipe_is_a_job_of_its_cluster(capsys, name):
    model = f"configs/models/{RECIPES[name]}"
    script = submit(
        capsys,
        "--config",
        f"configs/{name}.yaml",
        "--dry-run",
        "--architecture",
        model,
        "--time",
        "8:00:00",
        ABSENT,
    )
    nodes = int(re.search(r"_(\d+)node$", name)[1])
    assert {
        f"--nodes={nodes}",
        "--gpus-per-node=8",
        "--ntasks-per-node=1",
        "--exclusive",
        "--time=8:00:00",
    } <= set(header(script))
    assert shell_words(script, '"$@"')[-3:] == [
        "cluster.gpu=h100-80g",
        f"cluster.nodes={nodes}",
        "cluster.gpus_per_node=8",
    ]


def test_no_value_changes_its_meaning_on_the_way(tmp_path):
    variables, launcher = {"SECRET_OF_NONE": HOSTILE}, ["apptainer", "exec", HOSTILE]
    job = replace(
        JOB,
        variables=variables,
        launcher=launcher,
        step_options=[f"--container-image={HOSTILE}"],
        bin=HOSTILE,
    )
    script = render(job)
    assert shell_words(script, '"$@"') == job.arguments
    assert shell_words(script, '"$SECRET_OF_NONE" "$GRPO_BIN"') == [HOSTILE, HOSTILE]
    # As slurm/train.sbatch reads them.
    for name, words in (("GRPO_RUN", launcher), ("GRPO_SRUN", job.step_options)):
        assert f'eval "{"launcher" if name == "GRPO_RUN" else "options"}=(${{{name}:-}})"' in script
        assert shlex.split(shell_words(script, f'"${name}"')[0]) == words


def test_setup_is_run_in_the_scripts_shell_and_ends_the_job_if_it_fails():
    def begun(*setup):
        return subprocess.run(
            ["bash"], input=render(replace(JOB, setup=list(setup))), capture_output=True, text=True
        )

    script = render(replace(JOB, setup=[f"X={shlex.quote(HOSTILE)} # set", "Y=2; Z=$Y"]))
    assert shell_words(script, '"$X" "$Z"') == [HOSTILE, "2"]
    for failing, status in (("module load cuda # first", "127"), ("(exit 3)", "3"), ("it's", "[12]")):
        done = begun(failing, "echo not reached")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(
            rf"^error: --setup {re.escape(failing)} failed with status {status}$",
            done.stderr,
            re.MULTILINE,
        )


def test_slurm_reads_each_value_as_it_is_or_it_is_refused():
    assert directive("--job-name=plain-1") == "--job-name=plain-1"
    assert directive("--requeue") == "--requeue"
    assert directive('--comment=a "b" \\ #1') == '--comment="a \\"b\\" \\\\ #1"'
    with pytest.raises(UserError, match="characters that cannot be passed to sbatch"):
        directive("--comment=a\n#SBATCH --nodes=999")
    output = next(
        line for line in header(render(replace(JOB, folder="/runs/100%j"))) if line.startswith("--output=")
    )
    assert output == "--output=/runs/100%%j/slurm/%j.log"
    with pytest.raises(UserError, match="contains a backslash"):
        render(replace(JOB, folder="/runs/a\\b"))


@pytest.mark.slow
def test_tasks_of_an_array_have_runs_of_their_own(capsys):
    quickstart = ("--config", "configs/quickstart.yaml", "--nodes", 1, "--dry-run", "--array", "0-1%2")
    script = submit(capsys, *quickstart, "run.seed={task}")
    assert {"--array=0-1%2", "--job-name=quickstart_array"} <= set(header(script))
    assert f"--output={Path('runs').absolute()}/quickstart_%a/slurm/%A_%a.log" in header(script)
    assert shell_words(script, '"$@"')[2:4] == ["run.seed={task}", "run.name=quickstart_{task}"]
    script = submit(capsys, *quickstart, "run.name=seed{task}-b")
    assert shell_words(script, '"$@"')[2] == "run.name=seed{task}-b"
    says = submit(capsys, *quickstart, "run.seed=-{task}", status=2)
    assert "nothing was submitted for task 1 of the array" in says
    assert "run.seed must be at least 0" in says


@pytest.mark.parametrize(
    ("spec", "numbers"), [("3", [3]), ("0-2", [0, 1, 2]), ("0-6:3,9", [0, 3, 6, 9]), ("1,2%1", [1, 2])]
)
def test_numbers_of_an_array(spec, numbers):
    assert task_numbers(spec) == numbers


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:00:01", 3601),
        ("2-3", 183600),
        ("1-0:30", 88200),
        ("0-0:0:9", 9),
        ("0", float("inf")),
        ("0:00", float("inf")),
        ("UNLIMITED", float("inf")),
    ],
)
def test_time_limits_are_read_as_slurm_does(text, seconds):
    assert time_limit(text) == seconds


def test_an_evaluation_is_a_job_of_its_engines_in_a_folder_of_its_own(capsys, tmp_path):
    """The configuration's ranks, which would not fit that node, are not started.

    The result of its training is not the result of this job.
    """
    ranks = ("megatron.tensor_parallel=8", "megatron.data_parallel=4")
    engines = ("rollout.engine.num_engines=2", "rollout.engine.tensor_parallel=2")
    script = submit(capsys, *EVALUATION, *ranks, *engines, "--dry-run", "--nodes", 1, "--gpus-per-node", 4)
    folder = Path("runs/qwen3_8b_eval").absolute()
    assert {"--nodes=1", "--gpus-per-node=4", f"--output={folder}/slurm/%j.log", "--no-requeue"} <= set(
        header(script)
    )
    assert shell_words(script, '"$GRPO_COMMAND"') == ["eval"]
    tasks = submit(capsys, *EVALUATION, "--dry-run", "--array", "0-1", "run.seed={task}")
    assert shell_words(tasks, '"$GRPO_LOGS"') == [f"{Path('runs').absolute()}/qwen3_8b_{{task}}_eval/slurm"]
    assert "run.name=qwen3_8b_{task}" in shell_words(tasks, '"$@"')
    (tmp_path / "actor").mkdir()
    assert "is a checkpoint of a run" in submit(capsys, *EVALUATION, f"model.path={tmp_path}", status=2)


@pytest.mark.slow
def test_every_process_of_a_run_on_cpus_has_a_cpu():
    def slots(nodes, *changes, command=Command.train):
        config = read_config("configs/quickstart.yaml", [f"cluster.nodes={nodes}", *changes])
        return cpu_slots(config, command)

    assert slots(1) == 3
    assert slots(2) == 2  # two ranks that stay together, and an engine
    assert slots(2, "megatron.data_parallel=2", "rollout.engine.num_engines=2") == 3
    assert slots(4, "megatron.data_parallel=2", "rollout.engine.num_engines=2") == 2
    assert slots(1, "rollout.replay=file") == 2
    assert slots(1, command=Command.sft) == slots(1, command=Command.reward_model) == 2
    assert slots(1, command=Command.eval) == 1
    assert (
        slots(1, "rollout.engine.num_engines=3", "rollout.engine.tensor_parallel=2", command=Command.eval)
        == 6
    )
    # Engines that share the ranks' GPUs share their CPUs too, and a run may leave GPUs of a node alone.
    on_gpus = (
        "megatron.tensor_parallel=1",
        "cluster.gpu=h100-80g",
        "cluster.gpus_per_node=8",
        "cluster.placement=colocated",
    )
    assert slots(1, "megatron.data_parallel=4", *on_gpus) == 4
    assert slots(2, "megatron.data_parallel=16", *on_gpus) == 8


def test_a_layout_without_room_names_the_reason():
    changes = ["megatron.tensor_parallel=16", "cluster.gpu=h100-80g", "cluster.gpus_per_node=8"]
    config = read_config("configs/quickstart.yaml", ["cluster.nodes=2", *changes])
    with pytest.raises(UserError, match=r"megatron\.tensor_parallel=16 exceeds the 8 devices of a node"):
        cpu_slots(config, Command.train)


def test_containers():
    image = ["apptainer", "exec", "--nv", "--bind", "/a", "--bind", "/b:/c:ro", "i.sif"]
    assert apptainer("i.sif", ["/a", "/b:/c:ro"], gpus=True) == image
    assert "--nv" not in apptainer("i.sif", [], gpus=False)
    options = [
        "--container-image=i.sqsh",
        "--container-mounts=/a:/a,/b:/c:ro,/tmp:/tmp",
        "--container-workdir=/w",
    ]
    assert pyxis("i.sqsh", ["/a", "/b:/c:ro"], "/w") == options
    assert "--container-mounts=/fast:/tmp" in pyxis("i.sqsh", ["/fast:/tmp"], "/w")


def test_a_container_sees_the_folders_of_the_run_and_has_its_own_environment(capsys, tmp_path):
    common = (
        "--config",
        "configs/quickstart.yaml",
        "--nodes",
        1,
        "--dry-run",
        "--mount",
        "/data:/data:ro",
        f"run.root={tmp_path}",
    )
    script = submit(capsys, *common, "--pyxis", "i.sqsh")
    (options,) = shell_words(script, '"$GRPO_SRUN"')
    for folder in (Path.cwd(), tmp_path, Path("configs").absolute()):
        assert f"{folder}:{folder}" in options
    assert "/data:/data:ro" in options
    assert shell_words(script, '"$GRPO_BIN" "$GRPO_RUN"') == ["/opt/grpo_megatron/.venv/bin", ""]
    (launcher,) = shell_words(submit(capsys, *common, "--apptainer", "my image.sif"), '"$GRPO_RUN"')
    assert shlex.split(launcher)[-1] == "my image.sif"


def test_what_submits_the_job_does_not_set_it_up(monkeypatch):
    """The shell may have an earlier job's settings, which Slurm passes on."""
    monkeypatch.setenv("GRPO_REQUEUE", "1")
    monkeypatch.setenv("GRPO_SRUN", "--container-image=other")
    assert shell_words(render(JOB), '"$GRPO_REQUEUE" "$GRPO_SRUN"') == ["", ""]


def test_a_job_that_is_queued_again_is_told_before_its_time_is_up(capsys):
    common = ("--config", "configs/quickstart.yaml", "--nodes", 1, "--dry-run", "run.resume=auto")
    assert {"--requeue", "--signal=B:USR1@600"} <= set(header(submit(capsys, *common, "--requeue")))
    assert "--signal=B:USR1@90" in header(
        submit(capsys, *common, "--dependency-chain", 2, "--stop-before", 90)
    )
    plain = header(submit(capsys, *common))
    assert "--no-requeue" in plain
    assert not any(argument.startswith("--signal") for argument in plain)


def test_a_run_that_is_told_to_stop_leaves_time_for_the_end_of_its_job(capsys, tmp_path):
    def grace(*arguments):
        script = submit(capsys, "--nodes", 1, "--dry-run", "run.resume=auto", *arguments)
        return [word for word in shell_words(script, '"$@"') if word.startswith("run.grace_usr1=")]

    quickstart = ("--config", "configs/quickstart.yaml")
    assert grace(*quickstart) == []
    assert grace(*quickstart, "--requeue") == ["run.grace_usr1=540"]
    assert grace(*quickstart, "--stop-before", 1800) == ["run.grace_usr1=1740"]
    assert grace(*quickstart, "--requeue", "--stop-before", 90) == ["run.grace_usr1=45"]
    assert grace(*quickstart, "--requeue", "run.grace_usr1=7") == ["run.grace_usr1=7"]
    file = tmp_path / "own.yaml"
    file.write_text(
        Path("configs/quickstart.yaml").read_text().replace("\nrun:\n", "\nrun:\n  grace_usr1: 7\n")
    )
    assert "grace_usr1" in file.read_text()
    assert grace("--config", file, "--requeue") == []


def test_options_go_before_what_the_shell_tells_sbatch(capsys, monkeypatch, tmp_path):
    """sbatch prefers its arguments to SBATCH_* variables, and those to what a script says."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f"#!/bin/sh\ncat > {tmp_path}/script\nprintf '%s\\0' \"$@\" > {tmp_path}/arguments\necho 7\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    options = ("--partition", "gold", f"--sbatch-arg=--comment={HOSTILE}", f"run.root={tmp_path}")
    says = submit(capsys, "--config", "configs/quickstart.yaml", "--nodes", 1, *options)
    assert says == f"queued as 7; output in {tmp_path}/quickstart/slurm\n"
    given = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert given[0] == "--parsable"
    assert list(map(directive, given[1:])) == header((tmp_path / "script").read_text())
    assert {"--partition=gold", "--no-requeue", f"--comment={HOSTILE}"} <= set(given)
