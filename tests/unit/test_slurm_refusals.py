"""Refusals of slurm/submit.py before anything is queued, and its notes on what it could not check."""

import re
from pathlib import Path

import pytest
from submit import main, task_numbers

from grpo_megatron.errors import UserError
from tests.unit.slurm_jobs import ABSENT, EVALUATION, submit


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        *(
            (spec, "is not a number or range")
            for spec in ("", "a", "3-", "-1", "0-4:0", "1\n", "²", "9" * 30)
        ),
        *((spec, "after % must come a positive number") for spec in ("0-4%", "0-4%0", "1%2%3")),
        *((spec, "it must have 1 to 1000") for spec in ("4-0", "0-5000", "0-999999999")),
    ],
)
def test_what_is_no_array_is_refused(spec, says):
    with pytest.raises(UserError, match=rf"--array {re.escape(spec)}(?s:.*){says}"):
        task_numbers(spec)


@pytest.mark.slow_but(6)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "configs/quickstart.yaml"], "the number of nodes is not set; give --nodes"),
        (["--config", "nowhere.yaml", "--nodes", 1], "nowhere.yaml"),
        (["--config", "configs/quickstart.yaml", "--nodes", 1, "run.nmae=x"], "run.name"),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "cluster.gpu=h100-80g"],
            "needs the number of GPUs per node; give --gpus-per-node",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "megatron.precision=fp8"],
            "with cluster.gpu=none: TransformerEngine needs CUDA",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--time", "1h"],
            "--time 1h must have the form MINUTES",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--requeue", "--time", "11"],
            "must be more than a minute longer than --stop-before",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--array", "1", "run.root=a{task}"],
            "put {task} into run.name",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--env", "A-B=1"],
            "--env A-B=1 must have the form NAME=VALUE",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--sbatch-arg", "gpu"],
            "an sbatch option must start with -",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--pyxis", "a.sqsh", "--mount", "b:c"],
            "--mount b:c must have the form",
        ),
        (
            ["--config", "configs/llama3_70b_16node.yaml", "--nodes", 8, ABSENT],
            "but there are only 64 with cluster.gpu=h100-80g",
        ),
        (
            ["--config", "configs/llama3_70b_16node.yaml", "--gpus-per-node", 4, ABSENT],
            "each node has 4 GPUs",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--requeue", "run.resume=here"],
            "each job would start over; set run.resume=auto",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--nodes", 1, "--cpus-per-node", 2],
            "this run needs at least 3",
        ),
        (
            ["--config", "configs/llama3_70b_16node.yaml", "--cpus-per-node", 7, ABSENT],
            "this run needs at least 8",
        ),
        (
            ["--config", "configs/llama3_70b_16node.yaml", ABSENT, "--architecture", "/no/such"],
            "--architecture /no/such does not exist; it must be a folder",
        ),
        (
            [
                "--config",
                "configs/quickstart.yaml",
                "--nodes",
                1,
                "--architecture",
                "configs/models/llama-3.1-70b/config.json",
            ],
            "is a file, not a folder; it must be a folder with the model's config.json",
        ),
        (
            [
                "--config",
                "configs/llama3_70b_16node.yaml",
                ABSENT,
                "--architecture",
                "configs/models/llama-3.1-70b",
                "megatron.sleep=false",
            ],
            "the same layout with megatron.sleep=true",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_a_message(capsys, arguments, says):
    """There is no --dry-run: if it were not refused, sbatch would be called."""
    message = submit(capsys, *arguments, status=2)
    assert says in message
    assert message.startswith("error: ")


@pytest.mark.parametrize(
    ("root", "why"), [("/proc/runs", "No such file or directory"), ("setup.py", "Not a directory")]
)
def test_nothing_is_queued_where_the_logs_cannot_be_written(capsys, root, why):
    run = (f"run.root={root}", "run.resume=none")
    message = submit(capsys, "--config", "configs/quickstart.yaml", "--nodes", 1, *run, status=2)
    assert f"error: {Path(root).absolute()}/quickstart/slurm cannot be written: {why};" in message


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--requeue"], "an evaluation cannot be continued"),
        (["--dependency-chain", 2], "an evaluation cannot be continued"),
        (["--stop-before", 90], "an evaluation cannot be continued"),
        (
            ["rollout.engine.num_engines=9"],
            "9 GPUs are needed, but there are only 8 with cluster.gpu=h100-80g",
        ),
        (
            ["rollout.engine.num_engines=1", "rollout.engine.tensor_parallel=12", "--nodes", 2],
            "on one node or on several whole nodes",
        ),
        (
            ["rollout.engine.tensor_parallel=3", "rollout.engine.num_engines=2", "--cpus-per-node", 5],
            "needs at least 6",
        ),
        (["reward.function=model", "reward.model.path=r"], "cannot use the function model in eval"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(capsys, arguments, says):
    assert says in submit(capsys, *EVALUATION, *arguments, status=2)


def test_what_could_not_be_checked_is_said(capsys):
    assert main(["--config", "configs/llama3_70b_16node.yaml", "--dry-run", ABSENT]) == 0
    assert "not checked: memory: /nowhere does not exist here; give a folder" in capsys.readouterr().err
    unused = ("--architecture", "configs/models/llama-3.1-70b", "run.root=setup.py", "run.resume=none")
    assert main(["--config", "configs/quickstart.yaml", "--nodes", "1", "--dry-run", *unused]) == 0
    says = capsys.readouterr().err
    assert "not checked: memory: --architecture has no effect" in says
    assert f"not checked: run.root: {Path('setup.py').absolute()} is a file, not a folder" in says


def test_without_the_reward_model_the_memory_is_not_known(capsys):
    model = (
        "--architecture",
        "configs/models/qwen3-8b",
        ABSENT,
        "reward.function=model",
        "reward.model.path=/nowhere",
    )
    assert main(["--config", "configs/qwen3_8b_1node.yaml", "--dry-run", *model]) == 0
    assert (
        "not checked: memory: the folder of the reward model, /nowhere, does not exist here"
        in capsys.readouterr().err
    )
