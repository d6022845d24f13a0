"""The machines that will run a configuration decide what is legal, not the one that checks it."""

from dataclasses import replace

import pytest
import torch

from grpo_megatron.capabilities import GPUS, Capabilities, release
from grpo_megatron.cli import main
from grpo_megatron.config.command import Command
from grpo_megatron.config.load import read_config
from grpo_megatron.preflight.cluster import contradictions
from grpo_megatron.preflight.cluster_rules import known_capabilities
from grpo_megatron.preflight.rules import violations

NEEDED = ["model.path=m", "data.train=d.jsonl"]
FP8 = "megatron.precision=fp8"
LARGE = [
    "--config",
    "configs/llama3_70b_16node.yaml",
    "model.path=/nowhere/model",
    "data.train=/nowhere/train.jsonl",
]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.11.0+cu128", (2, 11, 0)), ("2.8.0a0+5228986c39.nv25.06", (2, 8, 0)), ("2.12.0rc1", (2, 12, 0))],
)
def test_the_numbers_of_a_version(version, numbers):
    """A release candidate used to count as its number: 2.12.0rc1 as 2.12.01."""
    assert release(version) == numbers


def config(*overrides):
    return read_config(None, [*NEEDED, *overrides])


def broken(*overrides, command=Command.train) -> list[str]:
    return violations(config(*overrides), command)


def check(capsys, *arguments) -> tuple[int, str]:
    status = main(["config", "check", *arguments])
    out, err = capsys.readouterr()
    return status, out + err


# The least that torch was found to name, in GiB, where the memory of such a card had run out.
REPORTED = {
    "a100-40g": 39.38,
    "a100-80g": 79.14,
    "l40s": 44.34,
    "h100-80g": 79.11,
    "h200": 139.72,
    "b200": 178.35,
}


@pytest.mark.parametrize("gpu", REPORTED)
def test_the_memory_of_a_gpu_is_what_cuda_reports_and_no_more(gpu):
    assert REPORTED[gpu] - 0.1 < GPUS[gpu].memory / 2**30 <= REPORTED[gpu]


def test_fp8_depends_on_the_gpu_that_was_named():
    for gpu in GPUS:
        assert bool(broken(FP8, f"cluster.gpu={gpu}")) == gpu.startswith("a100")
    (sentence,) = broken(FP8, "cluster.gpu=a100-80g")
    assert sentence.startswith("megatron.precision=fp8 needs TransformerEngine and GPUs that support FP8")
    assert "(with cluster.gpu=a100-80g: FP8 needs compute capability 8.9" in sentence
    assert "TransformerEngine needs CUDA" in broken(FP8, "cluster.gpu=none")[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_facts_this_machine_decides_unless_a_cluster_is_to_be_joined():
    assert "megatron.precision=bf16 (here" in broken(FP8)[0]
    assert broken(FP8, "cluster.ray_address=10.0.0.1:6379") == []
    assert broken(FP8, "cluster.nodes=2") == []


def test_the_large_configuration_is_legal_on_this_machine(capsys):
    status, text = check(capsys, *LARGE)
    assert (status, "no violations" in text) == (0, True)
    status, text = check(capsys, *LARGE, FP8)
    assert (status, "no violations" in text) == (0, True)
    status, text = check(capsys, *LARGE, FP8, "cluster.gpu=a100-80g", "cluster.nodes=8")
    assert status == 2
    assert "2 violations" in text
    assert "compute capability 8.9" in text
    assert (
        "need 128 GPUs with cluster.placement=colocated, but there are only 64 with cluster.gpu=a100-80g"
        in text
    )


def test_check_says_when_it_does_not_know_the_cluster(capsys):
    needed = ["model.path=/nowhere", "data.train=/nowhere.jsonl", "cluster.ray_address=10.0.0.1:6379"]
    assert "not checked: capabilities of the cluster" in check(capsys, *needed)[1]
    assert "capabilities of the cluster" not in check(capsys, *needed, "cluster.gpu=h200")[1]


NODE_OF_8 = ["cluster.gpu=h200", "cluster.nodes=1", "cluster.gpus_per_node=8"]
TWO_NODES = ["cluster.gpu=h200", "cluster.nodes=2", "cluster.gpus_per_node=8"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([*NODE_OF_8, "megatron.data_parallel=7"], None),
        (
            [*NODE_OF_8, "megatron.data_parallel=8"],
            "need 9 GPUs with cluster.placement=separate, but there are only 8",
        ),
        ([*NODE_OF_8, "megatron.data_parallel=8", "cluster.placement=colocated"], None),
        ([*NODE_OF_8, "megatron.data_parallel=8", "rollout.replay=r.jsonl"], None),
        ([*NODE_OF_8, "rollout.engine.num_engines=9", "cluster.placement=colocated"], "need 9 GPUs"),
        ([*NODE_OF_8, "megatron.tensor_parallel=3"], None),
        ([*TWO_NODES, "megatron.tensor_parallel=3", "megatron.data_parallel=2"], None),
        (
            [*TWO_NODES, "megatron.tensor_parallel=3", "megatron.data_parallel=3"],
            "groups of 3 ranks",
        ),
        (
            [*TWO_NODES, "megatron.tensor_parallel=16", "cluster.placement=colocated"],
            "groups of 16 ranks",
        ),
        ([*TWO_NODES, "rollout.engine.tensor_parallel=8"], None),
        ([*TWO_NODES, "rollout.engine.tensor_parallel=12"], "must be a multiple of 8"),
        ([*TWO_NODES, "rollout.engine.tensor_parallel=16", "cluster.placement=colocated"], None),
        (
            [
                *TWO_NODES,
                "rollout.engine.tensor_parallel=8",
                "megatron.tensor_parallel=3",
                "cluster.placement=colocated",
            ],
            "would cross nodes; make one a multiple of the other",
        ),
        ([*TWO_NODES, "rollout.engine.tensor_parallel=8", "cluster.placement=colocated"], None),
        (["cluster.gpu=none", "cluster.nodes=1", "megatron.data_parallel=64"], None),
    ],
)
def test_ranks_and_engines_on_nodes(overrides, says):
    found = broken(*overrides)
    assert len(found) == (says is not None)
    assert all(says in sentence for sentence in found)


def test_fine_tuning_has_no_engines():
    assert broken(*NODE_OF_8, "megatron.data_parallel=8", command=Command.sft) == []
    (sentence,) = broken(*NODE_OF_8, "megatron.data_parallel=16", command=Command.sft)
    assert "16 ranks" in sentence
    assert "but only 8 GPUs" in sentence


def test_a_cluster_that_is_not_as_described_is_refused():
    said = config("cluster.gpu=h200", "cluster.nodes=2", "cluster.gpus_per_node=8")
    found = replace(known_capabilities(said), where="in the Ray cluster")
    assert contradictions(said, found) == []
    assert contradictions(said, replace(found, nodes=4)) == []
    assert contradictions(said, replace(found, nodes=1, gpus_per_node=4)) == [
        "cluster.nodes=2, but only 1 found in the Ray cluster; correct or remove the setting",
        "cluster.gpus_per_node=8, but only 4 found in the Ray cluster; correct or remove the setting",
    ]
    assert contradictions(said, replace(found, gpu=GPUS["a100-80g"])) == [
        "cluster.gpu=h200, but the GPUs in the Ray cluster have compute capability 8.0; correct or "
        "remove the setting"
    ]
    without = Capabilities.of_facts("none", 2, None)
    assert "there are no GPUs" in contradictions(said, without)[0]
    assert "there are GPUs" in contradictions(config("cluster.gpu=none"), found)[0]
    assert contradictions(config(), found) == contradictions(config(), without) == []


def test_this_machine_is_what_torch_says():
    here = Capabilities.of_this_machine()
    assert here.gpus == torch.cuda.is_available()
    assert (here.gpu is None) == (not here.gpus)
    assert here.num_gpus == (torch.cuda.device_count() if here.gpus else None)
    if not here.gpus:
        assert here.fp8_problem == here.transformer_engine_problem
