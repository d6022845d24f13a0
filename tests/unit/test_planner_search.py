"""`grpo-megatron plan`: what it lists is legal, fits and is the fastest; what it refuses would fit as it
says.
"""

import re
import shlex
from pathlib import Path

import pytest

from grpo_megatron.capabilities import GPUS
from grpo_megatron.cli import main
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import OldLogprobs, Placement
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner import reward_model
from grpo_megatron.planner import search as searching
from grpo_megatron.planner.advice import checked_plan, searched_plans
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.memory import memory, most_engine_fraction
from grpo_megatron.planner.plan import plan
from grpo_megatron.planner.search import search, with_values
from grpo_megatron.planner.text import changes_text
from grpo_megatron.preflight.model import architecture_violations, reward_model_violations
from grpo_megatron.preflight.rules import violations
from tests.unit.reward_models import scored_by
from tools.plan_recipes import RECIPES, recipe


def model_of(config):
    return read_architecture(config.model.path)


def fits(config):
    arch = model_of(config)
    broken = violations(config) + architecture_violations(config, arch) + reward_model_violations(config)
    return plan(config, arch, with_sync=False).fits and not broken


def test_a_layout_that_is_not_legal_as_configured_does_not_stop_the_search():
    config = with_values(recipe("qwen3_8b_1node"), "megatron", tensor_parallel=3)
    assert violations(config)
    assert len(searched_plans(config, model_of(config), Lengths.given(config))) == 5


def test_long_responses_get_more_gpus_for_engines():
    """Trainer and engines work at the same time. The search used to refuse every staleness."""
    config = with_values(recipe("qwen3_8b_1node"), "rollout", staleness=2)
    config = with_values(config, "train", old_logprobs=OldLogprobs.rollout)
    config = with_values(
        with_values(config, "megatron", sleep=False), "cluster", placement=Placement.separate
    )

    def of_engines(response):
        best = searched_plans(config, model_of(config), Lengths(512, response))[0].config
        assert best.cluster.placement == Placement.separate
        return best.rollout.engine.num_engines * best.rollout.engine.tensor_parallel

    longest = config.rollout.max_response_length
    assert 1 <= of_engines(longest / 100) < of_engines(longest) <= 7


@pytest.mark.slow_when(lambda name: name != "qwen3_8b_1node")
@pytest.mark.parametrize("name", ["qwen3_8b_1node", "llama3_70b_16node", "qwen3_30b_a3b_4node"])
def test_what_is_found_is_legal_fits_and_is_not_slower_than_the_recipe(name):
    config = recipe(name)
    arch, lengths = model_of(config), Lengths.given(config)
    found = search(config, arch, lengths)
    assert len(found) == 5
    assert all(fits(each.config) for each in found)
    steps = [each.times.step for each in found]
    assert steps == sorted(steps)
    assert steps[0] <= plan(config, arch, lengths, with_sync=False).times.step
    layouts = {changes_text(config, with_values(each.config, "optimizer", offload=False)) for each in found}
    assert len(layouts) == 5
    assert [each.config for each in search(config, arch, lengths)] == [each.config for each in found]


@pytest.mark.slow
def test_none_that_was_not_tried_is_quicker():
    """The bound at which the search stops, against all candidates."""
    config = with_values(recipe("qwen3_8b_1node"), "train", max_tokens_per_micro_batch=16384)
    arch, lengths = model_of(config), Lengths.given(config)
    everything = [searching._quickest(each, arch, lengths) for each in searching._candidates(config, arch)]
    quickest = min(each.times.step for each in everything if each)
    assert search(config, arch, lengths, count=1)[0].times.step == quickest
    assert None in everything  # memory is scarce enough to matter


def test_rules_beyond_those_of_layouts_hold_too():
    """Eight replicas would fit, but cannot share a step of two samples."""
    config = with_values(
        with_values(recipe("qwen3_8b_1node"), "cluster", gpu="h200"), "data", train_batch_size=1
    )
    config = with_values(with_values(config, "train", ppo_mini_batch_size=1), "rollout", n=2)
    arch, lengths = model_of(config), Lengths.given(config)
    replicas = [each for each in searching._candidates(config, arch) if each.megatron.data_parallel == 8]
    variants = [variant for each in replicas for variant in searching._variants(each, arch)]
    assert any(plan(variant, arch, with_sync=False).fits for variant in variants)
    assert [searching._quickest(each, arch, lengths) for each in replicas] == [None] * len(replicas)


QWEN3_8B = ("configs/qwen3_8b_1node.yaml", ["model.path=configs/models/qwen3-8b"])


@pytest.mark.slow
def test_what_is_found_has_room_for_a_reward_model_and_divides_it(tmp_path):
    """The reward model's 30 layers exclude four stages.

    TP8 divides its 24 heads, but six KV heads allow at most TP2.
    """
    sizes = {
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 6,
        "hidden_size": 6144,
    }
    path, model = QWEN3_8B
    config = read_config(path, [*model, *scored_by(tmp_path, "qwen3-8b", **sizes)])
    found = search(config, model_of(config), Lengths.given(config), count=20)
    assert {each.config.megatron.tensor_parallel for each in found} == {1, 2}
    assert {each.config.megatron.pipeline_parallel for each in found} <= {1, 2}
    for each in found:
        assert each.memory.moments[-1].items["reward model"] > 0
        assert fits(each.config)


def test_a_search_reads_a_reward_model_once(tmp_path):
    path, model = QWEN3_8B
    config = read_config(path, [*model, *scored_by(tmp_path)])
    before = reward_model._architecture.cache_info()
    assert search(config, model_of(config), Lengths.given(config), count=1)
    after = reward_model._architecture.cache_info()
    assert after.misses == before.misses + 1 < after.hits


def test_a_reward_model_for_which_there_is_no_room_is_refused(tmp_path):
    path, model = QWEN3_8B
    scored = scored_by(tmp_path, "qwen3-8b", num_hidden_layers=360)
    assert fits(read_config(path, model))
    text = refusal(read_config(path, [*model, *scored]))
    assert (
        "scoring takes 115.3 GB of a GPU, more than the usable 80.7 of the 84.9 GB of h100-80g: "
        "reward model 70"
    ) in text
    assert all(fits(read_config(path, [*model, *scored, *words])) for words in suggestions(text))
    config = read_config(path, [*model, *scored, "reward.model.path=configs/models/qwen3-8b"])
    assert "configs/models/qwen3-8b is a language model, not a reward model" in refusal(config)


def refusal(config):
    with pytest.raises(UserError) as error:
        checked_plan(config, model_of(config), Lengths.given(config))
    return str(error.value)


def suggestions(text):
    """Return the key=value arguments of each line that lists what would fit."""
    lines = text[text.index("would fit:") :].splitlines()[1:]
    return [[word for word in shlex.split(line) if "=" in word] for line in lines]


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(
    ("name", "change", "says", "first"),
    [
        (
            "llama3_70b_16node",
            "megatron.sleep=false",
            "training takes 132.4 GB of a GPU, more than the usable 80.7 of the 84.9",
            "megatron.sleep=true",
        ),
        (
            "qwen3_8b_1node",
            "megatron.distributed_optimizer=false",
            "training takes 103.3",
            "megatron.distributed_optimizer=true",
        ),
        (
            "qwen3_30b_a3b_4node",
            "train.max_tokens_per_micro_batch=32768",
            "activations kept",
            "max_tokens_per_micro_batch=8192",
        ),
        (
            "qwen3_8b_1node",
            "rollout.engine.mem_fraction=0.2",
            "an engine has room for 4,103 tokens",
            "rollout.engine.mem_fraction=0.85",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(name, change, says, first):
    path, model = f"configs/{name}.yaml", f"model.path=configs/models/{RECIPES[name]}"
    text = refusal(read_config(path, [model, change]))
    assert says in text
    same_layout, other_layout = suggestions(text)
    assert any(first in word for word in same_layout)
    for words in (same_layout, other_layout):
        assert fits(read_config(path, [model, change, *words]))


@pytest.mark.slow
def test_what_fits_nowhere_here_is_told_how_many_nodes_it_needs():
    config = with_values(recipe("llama3_70b_16node"), "cluster", nodes=1)
    with pytest.raises(UserError) as error:
        searched_plans(config, model_of(config), Lengths.given(config))
    text = str(error.value)
    assert "no layout of" in text
    nodes = int(re.search(r"- (\d+) nodes of 8 h100-80g, with", text)[1])
    assert nodes > 1
    (words,) = suggestions(text)
    model = f"model.path={config.model.path}"
    assert fits(read_config("configs/llama3_70b_16node.yaml", [model, f"cluster.nodes={nodes}", *words]))
    half = with_values(config, "cluster", nodes=nodes // 2)
    assert search(half, model_of(config), Lengths.given(config), count=1) == []


@pytest.mark.parametrize("fraction", [0.92, 0.01])
def test_a_share_of_the_engine_with_which_nothing_fits_is_told_another(fraction):
    path, given = "configs/qwen3_8b_1node.yaml", f"rollout.engine.mem_fraction={fraction}"
    model = "model.path=configs/models/qwen3-8b"
    config = read_config(path, [model, given])
    with pytest.raises(UserError) as error:
        searched_plans(config, model_of(config), Lengths.given(config))
    assert "- 1 node of 8 h100-80g, with " in str(error.value)
    (words,) = suggestions(str(error.value))
    assert "rollout.engine.mem_fraction=0.85" in words
    assert fits(read_config(path, [model, given, *words]))


@pytest.mark.parametrize("gpu", GPUS)
def test_the_share_that_is_proposed_is_the_largest_beside_any_sleeping_rank(gpu):
    """A rank of this layout is in all groups that exist."""
    parts = (
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
    )
    layout = [f"megatron.{part}=2" for part in parts] + [
        "megatron.data_parallel=4",
        f"cluster.gpu={gpu}",
        "cluster.nodes=4",
    ]
    model = "model.path=configs/models/qwen3-30b-a3b"
    config = read_config("configs/qwen3_30b_a3b_4node.yaml", [model, *layout])
    fraction = most_engine_fraction(gpu)
    for share, is_free in ((fraction, True), (fraction + 0.05, False)):
        found = memory(with_values(config, "rollout.engine", mem_fraction=share), model_of(config))
        assert (found.moments[-1].total <= found.usable) == is_free


def run(capsys, *arguments):
    """Return (exit status, standard output, standard error) of `grpo-megatron plan`."""
    status = main(["plan", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_command_on_a_recipe(capsys):
    status, out, err = run(
        capsys, "--config", "configs/qwen3_8b_1node.yaml", "model.path=configs/models/qwen3-8b"
    )
    assert (status, err) == (0, "")
    for line in (
        "parameters  ",
        "activations kept",
        "output layer",
        "asleep: a rank still holds",
        "host memory of a node: ",
        "KV cache of an",
    ):
        assert line in out
    for phase in (
        "generation  ",
        "old log-probs",
        "training  ",
        "weight sync  ",
        "step  ",
        "tokens/s/GPU",
        "not been compared",
    ):
        assert phase in out
    assert "idle" not in out


def test_what_is_parked_in_files_is_not_the_memory_of_the_host(capsys):
    common = ["--config", "configs/qwen3_8b_1node.yaml", "model.path=configs/models/qwen3-8b"]
    out = run(capsys, *common, "megatron.offload_folder=/nvme")[1]
    assert "host memory of a node: 66 GB (reference 66)\n" in out
    assert (
        "files of a node in megatron.offload_folder: 164 GB (sleeping parameters 66, optimizer 98)\n" in out
    )
    assert "offload_folder" not in run(capsys, *common)[1]


def test_nodes_gpu_and_lengths_of_the_command_line(capsys):
    common = ["--config", "configs/qwen3_8b_1node.yaml", "model.path=configs/models/qwen3-8b"]
    out = run(
        capsys, *common, "--nodes", 2, "--gpu", "h200", "--prompt-tokens", 100, "--response-tokens", 900
    )[1]
    assert "on 2 nodes of 8 h200; 8 of 16 GPUs are idle" in out
    assert "prompts of 100 and responses of 900 tokens" in out
    status, out, err = run(capsys, *common, "--response-tokens", 10**6)
    assert (status, out) == (2, "")
    assert err == (
        "error: the mean response length must be above 0 and at most the longest one (7168 tokens), "
        "but is 1e+06\n"
    )


@pytest.mark.slow_when(lambda path: path.stem not in ("quickstart", "qwen3_8b_1node", "llama3_70b_16node"))
@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_planned_or_refused_in_one_message(path, capsys, tmp_path):
    """Recipes are planned for their own GPUs, configurations for CPUs for one node of eight GPUs. Emulated
    kernels are not for GPUs.
    """
    model = RECIPES.get(path.stem, "qwen3-0.6b")
    arguments = ["--config", path, f"model.path=configs/models/{model}"]
    if path.stem not in RECIPES:
        arguments += ["--gpu", "h100-80g", "cluster.gpus_per_node=8", "cluster.nodes=1"]
        arguments += ["data.train=prompts.jsonl"]
    arguments += scored_by(tmp_path) if path.stem == "reward_model_grpo" else []
    status, out, err = run(capsys, *arguments)
    refused = {
        "quickstart_fp8": "kernels are emulated only on machines without a GPU",
        "qwen2.5_0.5b_gsm8k_lora": "leave megatron.lora.rank out",
    }
    if path.stem in refused:
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert refused[path.stem] in err
    else:
        assert (status, err) == (0, "")
        assert "tokens/s/GPU" in out


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["--gpu", "none"], "the planner needs a cluster with GPUs"),
        (["--nodes", "0"], "cluster.nodes"),
        (
            ["--gpu", "H100"],
            "cluster.gpu: expected one of none, a100-40g, a100-80g, l40s, h100-80g, h200, b200, gb300",
        ),
        (["megatron.tensor_parallel=3"], "megatron.tensor_parallel must divide the model's attention heads"),
        (["model.path=nowhere"], "nowhere does not exist"),
        (
            ["train.ppo_mini_batch_size=7", "--search"],
            "(train.ppo_mini_batch_size=7, data.train_batch_size=128)",
        ),
        (["megatron.lora.rank=8", "--search"], "leave megatron.lora.rank out"),
    ],
)
def test_what_cannot_be_planned_is_one_error(overrides, says, capsys):
    common = ["--config", "configs/qwen3_8b_1node.yaml", "model.path=configs/models/qwen3-8b"]
    status, out, err = run(capsys, *common, *overrides)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
