"""sbatch options that slurm/submit.py passes on, and those that it refuses because it sets them itself."""

from dataclasses import replace

import pytest
from render import Job, sbatch_arguments
from sbatch_options import conflicts
from submit import main

PART = Job("run", 1, "/runs/run", "/here", "/env/bin", ["--config", "a.yaml"], cpus_per_node=3)
WHOLE = replace(PART, cpus_per_node=None, gpus_per_node=8)


def found(job, *arguments):
    return conflicts(replace(job, sbatch_arguments=list(arguments)))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--nodes=4", "use --nodes"),
        ("-N4", "-N is --nodes: use --nodes"),
        ("-N 4", "use --nodes"),
        ("--ntasks=2", "one task per node"),
        ("-n2", "one task per node"),
        ("--ntasks-per-node=8", "one task per node"),
        ("-c16", "use --cpus-per-node"),
        ("--gpus=8", "use --gpus-per-node"),
        ("-G8", "use --gpus-per-node"),
        ("--gres=gpu:8", "it requests 8 GPUs per node, but the job requests 0"),
        ("--gres=nvme:1,gpu:h100:4", "it requests 4 GPUs per node, but the job requests 0"),
        ("-pgold", "use --partition"),
        ("-Ame", "use --account"),
        ("-qhigh", "use --qos"),
        ("-t60", "use --time"),
        ("--array=0-3", "use --array"),
        ("-a0-3", "use --array"),
        ("-D/tmp", "the folder that the job is to work in"),
        ("--output=/tmp/x", "run.root and run.name"),
        ("-o/tmp/x", "run.root and run.name"),
        ("--open-mode=truncate", "run.root and run.name"),
        ("--job-name=x", "set run.name"),
        ("-Jx", "set run.name"),
        ("--signal=B:TERM@5", "use --stop-before"),
        ("--requeue", "use --requeue"),
        ("--no-requeue", "leave out --requeue"),
        ("--wrap=true", "use --setup"),
        ("--test-only", "use --dry-run"),
        ("--parsable", "runs sbatch itself"),
        ("gpu", "must start with - and have a name"),
        ("-", "must start with - and have a name"),
        ("--", "must start with - and have a name"),
    ],
)
def test_an_option_that_contradicts_what_submit_sets_is_refused(argument, says):
    """`--nodes 1 --sbatch-arg=--nodes=4` used to be queued: a run that was checked for one node got four."""
    (problem,) = found(PART, argument)
    assert problem.startswith(f"--sbatch-arg={argument}: ")
    assert says in problem


def test_the_program_refuses_them_all_at_once(capsys):
    arguments = ["--nodes", "1", "--sbatch-arg=--nodes=4", "--sbatch-arg=-n2", "--sbatch-arg=--exclude=n7"]
    assert main(["--config", "configs/quickstart.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --sbatch-arg=--nodes=4: use --nodes\n--sbatch-arg=-n2: -n is --ntasks")
    assert "n7" not in error


@pytest.mark.parametrize(
    "argument", ["--exclusive=user", "--mem=64G", "--mem-per-cpu=1G", "--oversubscribe", "-s"]
)
def test_whole_nodes_leave_no_choice_of_memory_or_sharing(argument):
    """The same options are legal with --cpus-per-node, which asks for a part of a node."""
    assert "the job takes whole nodes" in found(WHOLE, argument)[0]
    assert found(PART, argument) == []


@pytest.mark.parametrize(
    "argument",
    [
        *(
            "--exclude=n7",
            "-xn7",
            "--switches=1",
            "--nodelist=n[1-4]",
            "-wn1",
            "-HQ",
            "--mail-type=END",
            "--begin=now",
        ),
        *(
            "--dependency=afterok:7",
            "--error=e.log",
            "--export=ALL",
            "--time-min=60",
            "--gres-flags=enforce-binding",
        ),
        # Some clusters know GPUs only as --gres.
        *("--gres=gpu:8", "--gres=nvme:2,gpu:h100:8", "--gres=nvme:2"),
    ],
)
def test_an_option_that_contradicts_nothing_is_passed_on(argument):
    assert found(WHOLE, argument) == []
    assert sbatch_arguments(replace(WHOLE, sbatch_arguments=[argument]))[-1] == argument
