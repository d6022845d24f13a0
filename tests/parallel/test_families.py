"""Every family in every layout: log-probs equal transformers', and round trips are exact bit for bit."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_megatron.config.schema import OptimizerConfig, Precision
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.stored import dequantised, scales_shape
from tests.configs import actor_config, sizes_of
from tests.models import FAMILIES, KIMI_K2, YARN, random_batch, tiny_model, transformers_logprobs
from tests.parallel import actors
from tests.parallel.test_weights import assert_identical, read_all

SIGMOID = ("glm4_moe", "deepseek_v3", "minimax_m2")
EXPERTS = ("qwen3_moe", "mixtral", *SIGMOID, "gpt_oss")
DENSE = (*(family for family in FAMILIES if family not in EXPERTS), "gemma3")
LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp2": ParallelSizes(tp=2),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
    "pp2": ParallelSizes(pp=2),
    "pp2vpp2": ParallelSizes(pp=2, vpp=2),
    "cp2": ParallelSizes(cp=2),
    "tp2pp2": ParallelSizes(tp=2, pp=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function (family, tied) -> (folder, batch, transformers' log-probs). Each is made once."""
    made = {}

    def make(family, tied, **changes):
        key = (family, tied, str(changes))
        if key not in made:
            folder = tiny_model(tmp_path_factory.mktemp("model"), family, tied, **changes)
            batch = random_batch(count=8)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            made[key] = (folder, batch, transformers_logprobs(model, batch))
        return made[key]

    return make


# What `make test` takes: families that differ in their layers, each through a layout or two.
QUICK = {
    ("llama3", False, "tp2pp2"),
    ("qwen2", True, "tp2pp2"),
    ("qwen3", False, "tp2sp"),
    ("qwen3", False, "cp2"),
    ("gemma3", True, "tp2sp"),
}
SOME_EXPERTS = {
    "qwen3_moe": ("ep2tp2",),
    "glm4_moe": ("ep2tp2",),
    "deepseek_v3": ("pp2vpp2",),
    "minimax_m2": ("ep2tp2",),
    "gpt_oss": ("ep2tp2", "cp2"),
}
EXPERT_LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
    "pp2": ParallelSizes(pp=2),
    "pp2vpp2": ParallelSizes(pp=2, vpp=2),
    "cp2": ParallelSizes(cp=2),
    "tp2pp2": ParallelSizes(tp=2, pp=2, sequence_parallel=True),
    "ep2": ParallelSizes(dp=2, ep=2),
    "ep2tp2": ParallelSizes(tp=2, ep=2, sequence_parallel=True),
}


def check(ranks, folder, batch, expected, sizes, out):
    config = actor_config(folder, sizes, OptimizerConfig())
    reported = [
        v for v in ranks.run(actors.logprobs_and_round_trip, sizes, config, batch, str(out)) if v is not None
    ]
    assert len(reported) == sizes.dp
    # Each replica reports its own sequences, and zeros for those of others.
    assert np.abs(sum(reported) - expected).max() <= 1e-5
    assert_identical(read_all(out), read_all(folder))


@pytest.mark.slow_when(lambda family, tied, layout: (family, tied, layout) not in QUICK)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), list(itertools.product(DENSE, [False, True])))
def test_family(ranks, models, tmp_path, family, tied, layout):
    # 61 words: TP 2 does not divide the vocabulary
    check(ranks, *models(family, tied), LAYOUTS[layout], tmp_path / "out")


@pytest.mark.slow_when(lambda family, layout: layout not in SOME_EXPERTS.get(family, ()))
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("family", EXPERTS)
def test_family_with_experts(ranks, models, tmp_path, family, layout):
    check(ranks, *models(family, False), EXPERT_LAYOUTS[layout], tmp_path / "out")


def test_weights_of_chosen_experts_left_as_they_are(ranks, models, tmp_path):
    """norm_topk_prob=false: the weights do not sum to 1."""
    check(ranks, *models("qwen3_moe", False, norm_topk_prob=False), ParallelSizes(), tmp_path / "out")


WINDOWS = {
    "all layers": ("mistral", {"sliding_window": 9}),
    "the last layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
}


@pytest.mark.slow_when(lambda windows, layout: layout != "cp2")
@pytest.mark.parametrize("layout", ["tp1", "tp2sp", "cp2", "pp2vpp2"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_sliding_windows(ranks, models, tmp_path, windows, layout):
    family, changes = WINDOWS[windows]
    folder, batch, expected = models(family, False, **changes)
    check(ranks, folder, batch, expected, LAYOUTS[layout], tmp_path / "out")
    assert np.abs(models(family, False, sliding_window=None)[2] - expected).max() > 1e-2


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS = {
    "no latent of queries, rotation in halves": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False},
    ),
    "no groups, rotation unscaled": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "rope_parameters": PLAIN},
    ),
    "Kimi-K2": ("deepseek_v3", KIMI_K2),
    "another factor of cosines": ("deepseek_v3", {"rope_parameters": {"mscale": 0.7, "mscale_all_dim": 1.1}}),
    "all frequencies divided": ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "YaRN for half of a head, which ends between channels": (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "yarn", "truncate": False, "partial_rotary_factor": 0.5, **YARN}},
    ),
    "YaRN with its own factor of cosines": ("qwen2", {"rope_parameters": {"attention_factor": 0.8}}),
    "an epsilon that norms of latents do not take": ("deepseek_v3", {"rms_norm_eps": 0.01}),
    "neither norms nor biases": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 3},
    ),
}


@pytest.mark.slow_when(lambda variant: not variant.startswith(("no latent", "YaRN for half")))
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family(ranks, models, tmp_path, variant):
    family, changes = VARIANTS[variant]
    if "rope_type" not in changes.get("rope_parameters", PLAIN):
        changes = {"rope_parameters": FAMILIES[family][1]["rope_parameters"] | changes["rope_parameters"]}
    check(ranks, *models(family, False, **changes), EXPERT_LAYOUTS["tp2sp"], tmp_path / "out")


@pytest.mark.slow_when(lambda family: family != "deepseek_v3")
@pytest.mark.parametrize("family", SIGMOID)
def test_the_correction_bias_changes_something(models, family):
    """Otherwise the cases above would pass without it."""
    folder, batch, expected = models(family, False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    for bias in biases:
        bias.zero_()
    assert np.abs(transformers_logprobs(model, batch) - expected).max() > 1e-2


def test_fp8_blocks_are_loaded_as_their_values(ranks, models, tmp_path):
    """Slices may begin within a block. A layer for further tokens is left out of the export."""
    folder, block = Path(models("deepseek_v3", False)[0]), (20, 24)
    expected, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in expected.items():
        if "self_attn" in name and tensor.ndim == 2:
            scales = torch.rand(scales_shape(tensor.shape, block))
            stored |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
            expected[name] = dequantised(stored[name], scales, (0, 0), block)
    further = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    (tmp_path / "fp8").mkdir()
    save_file(expected | stored | further, tmp_path / "fp8" / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config | fp8))
    config = actor_config(str(tmp_path / "fp8"), EXPERT_LAYOUTS["tp2sp"], OptimizerConfig())
    ranks.run(actors.round_trip, sizes_of(config), config, str(tmp_path / "out"), None)
    assert_identical(read_all(tmp_path / "out"), expected)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in exported
    assert exported["num_nextn_predict_layers"] == 0


def test_the_correction_bias_is_not_rounded(ranks, models, tmp_path):
    """Rounded to bf16 like the parameters, it would choose other experts than the engine's."""
    folder = models("glm4_moe", False)[0]
    config = actor_config(folder, ParallelSizes(), OptimizerConfig(), Precision.bf16)
    ranks.run(actors.round_trip, sizes_of(config), config, str(tmp_path / "out"), None)
    ours, original = read_all(tmp_path / "out"), read_all(folder)
    biases = [name for name in original if name.endswith("e_score_correction_bias")]
    assert_identical({name: ours[name] for name in biases}, {name: original[name] for name in biases})
    assert {ours[name].dtype for name in ours.keys() - biases} == {torch.bfloat16}


@pytest.mark.slow_when(lambda family, sizes: (family, sizes.tp) != ("qwen3", 4))
@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2), ParallelSizes(tp=4)], ids=["tp2", "tp4"])
def test_fewer_kv_heads_than_tp_ranks(ranks, models, tmp_path, family, sizes):
    check(ranks, *models(family, False, num_key_value_heads=1), sizes, tmp_path / "out")


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_rope_scaling_changes_something(models, family):
    """Otherwise the cases of Llama 3's scaling and of YaRN above would pass without it."""
    scaled = models(family, False)[2]
    plain = models(family, False, rope_parameters=PLAIN)[2]
    assert np.abs(scaled - plain).max() > 1e-2
