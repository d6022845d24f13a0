"""Values read from config.json equal transformers', also if keys are absent or contradict each other."""

import json
from pathlib import Path

import pytest
import torch

from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from tests.models import ALL_FAMILIES, FAMILIES, HYBRIDS, config_class

# Sizes: transformers has defaults for them too, which fit a checkpoint by accident only.
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "shared_expert_intermediate_size"),
}
# The dtype of the files; layers that predict further tokens, which are not built.
NO_PART_OF_THE_MODEL = {"architectures", "model_type", "dtype", "num_nextn_predict_layers"}


def written(folder, config: dict) -> str:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(config))
    return str(folder)


def as_transformers_reads(folder: str, target) -> str:
    """Write a folder whose config.json has every key, with the values that transformers reads from
    `folder`.
    """
    from transformers import AutoConfig

    architectures = json.loads(Path(folder, "config.json").read_text())["architectures"]
    return written(target, AutoConfig.from_pretrained(folder).to_dict() | {"architectures": architectures})


def full_config(family: str) -> dict:
    """Return every key that transformers writes for a small model of the family."""
    name, own = ALL_FAMILIES[family]
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 5000.0,
        "num_hidden_layers": 4,
    }
    if family == "deepseek_v3":
        sizes["num_key_value_heads"] = 8
    config = config_class(name)(**{**sizes, **own}).to_dict()
    derived = [] if family in HYBRIDS else ["layer_types"]
    for key in derived + ["head_dim"] * (family == "deepseek_v3"):
        config.pop(key, None)
    return config | {"architectures": [f"{name}ForCausalLM"]}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_an_absent_key_has_transformers_default(family, tmp_path):
    """A config.json without rope_theta used to be refused, and missing num_key_value_heads or
    sliding_window misread.
    """
    full, refused = full_config(family), set()
    for key in sorted(full.keys() - NO_PART_OF_THE_MODEL):
        folder = written(tmp_path / "ours", {name: value for name, value in full.items() if name != key})
        try:
            ours = read_architecture(folder)
        except UserError as error:
            if f"key {key} is missing" in str(error):
                refused.add(key)
                continue
            with pytest.raises(UserError):  # such as a head size that does not fit the layer's sizes
                read_architecture(as_transformers_reads(folder, tmp_path / "theirs"))
            continue
        assert ours == read_architecture(as_transformers_reads(folder, tmp_path / "theirs")), key
    assert refused <= SIZES
    assert "num_hidden_layers" in refused
    # Published files of Gemma 3 lack this one.
    assert ("num_attention_heads" in refused) == (family != "gemma3")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
THETA = {"rope_type": "default", "rope_theta": 3000.0}
READ = {
    "nothing": {},
    "rope_theta alone": {"rope_theta": 500.0},
    "rope_parameters alone": {"rope_parameters": THETA},
    "rope_theta within wins": {"rope_parameters": THETA, "rope_theta": 500.0},
    "empty rope_parameters": {"rope_parameters": {}, "rope_theta": 500.0},
    "null rope_parameters": {"rope_parameters": None, "rope_theta": 500.0},
    "empty rope_scaling": {"rope_parameters": THETA, "rope_scaling": {}},
    "null rope_scaling": {"rope_parameters": THETA, "rope_scaling": None},
    "rope_scaling, as older versions wrote it": {"rope_scaling": LLAMA3 | ORIGINAL, "rope_theta": 500.0},
    "rope_scaling without theta": {"rope_scaling": LLAMA3 | ORIGINAL},
    "rope_scaling wins": {
        "rope_scaling": LLAMA3 | ORIGINAL | {"rope_theta": 3000.0},
        "rope_parameters": THETA,
    },
    "rope_scaling wins, theta outside": {
        "rope_scaling": LLAMA3 | ORIGINAL,
        "rope_parameters": THETA,
        "rope_theta": 3000.0,
    },
    "rope_scaling turns scaling off": {
        "rope_scaling": {"rope_type": "default", "rope_theta": 3000.0},
        "rope_parameters": LLAMA3 | ORIGINAL | {"rope_theta": 3000.0},
    },
    "type, as older versions called it": {
        "rope_scaling": {
            "type": "llama3",
            **{k: v for k, v in LLAMA3.items() if k != "rope_type"},
            **ORIGINAL,
        }
    },
    "rope_type wins over type": {"rope_scaling": {"type": "linear", "factor": 2.0, **THETA}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": YARN, "rope_theta": 500.0},
    "yarn as Qwen3's cards say": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "yarn, original positions not given": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, original positions outside win": {
        "rope_scaling": YARN,
        "original_max_position_embeddings": 16,
    },
    "yarn, its own factor of cosines": {"rope_scaling": YARN | {"attention_factor": 1.5}},
    "yarn, DeepSeek's factor of cosines": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn, other turns": {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2}},
    "yarn, as many turns for both as in Kimi-K2": {"rope_scaling": YARN | {"beta_fast": 1.0}},
    "yarn between channels": {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8}},
    "yarn that shortens": {"rope_scaling": YARN | {"factor": 0.5}},
    "original positions not given": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "original positions outside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    "original positions outside win": {
        "rope_scaling": LLAMA3 | ORIGINAL,
        "original_max_position_embeddings": 16,
    },
}


def llama(folder, changes: dict) -> str:
    full = {
        key: value
        for key, value in full_config("llama3").items()
        if key not in ("rope_parameters", "rope_theta")
    }
    return written(folder, full | {"max_position_embeddings": 256} | changes)


@pytest.mark.parametrize("name", READ)
def test_rotary_frequencies_are_transformers(name, tmp_path):
    """rope_scaling used to be ignored if it was added to a config.json with rope_parameters."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = llama(tmp_path, READ[name])
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    arch = read_architecture(folder)
    torch.testing.assert_close(arch.rope_frequencies(), theirs.inv_freq, rtol=1e-6, atol=0)
    assert arch.rope_factor == theirs.attention_scaling


SLIDING = {"use_sliding_window": True, "sliding_window": 32}
WINDOWS = {
    "no window": ("qwen2", {"sliding_window": 32}),
    "all layers": ("qwen2", SLIDING | {"max_window_layers": 0}),
    "the last layers": ("qwen2", SLIDING | {"max_window_layers": 3}),
    "no layer": ("qwen3", SLIDING),
    "layers by name": ("qwen3", SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "experts": ("qwen3_moe", SLIDING | {"max_window_layers": 4}),
    "mistral": ("mistral", {"sliding_window": 32}),
    "mistral without": ("mistral", {"sliding_window": None}),
    "mistral's flag": ("mistral", {"sliding_window": 32, "use_sliding_window": False}),
    "mixtral": ("mixtral", {"sliding_window": 32}),
    "llama has none": ("llama3", SLIDING),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows_are_transformers(name, tmp_path):
    import transformers

    family, changes = WINDOWS[name]
    folder = written(tmp_path, full_config(family) | {"max_position_embeddings": 128} | changes)
    arch = read_architecture(folder)
    with torch.device("meta"):
        model = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")(
            transformers.AutoConfig.from_pretrained(folder)
        )
    layers = [layer.self_attn for layer in model.model.layers]
    theirs = tuple(
        model.config.sliding_window
        if family in ("mistral", "mixtral")
        else getattr(layer, "sliding_window", None)
        for layer in layers
    )
    assert (arch.windows or (None,) * 4) == theirs
    assert arch.longest_within_windows == (32 if any(theirs) else 128)
    assert arch.max_positions == 128


def test_layer_types_that_do_not_fit_are_refused(tmp_path):
    for types in (["full_attention"], ["chunked_attention"] * 4):
        folder = written(tmp_path, full_config("qwen2") | SLIDING | {"layer_types": types})
        with pytest.raises(UserError, match="layer_types must name full_attention or sliding_attention"):
            read_architecture(folder)


KINDS = {"linear": {"factor": 4.0}, "yarn": YARN | {"truncate": False}, "llama3": LLAMA3 | ORIGINAL}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scales_as_transformers(family, kind, tmp_path):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    full = full_config(family)
    scaling = full["rope_parameters"] | KINDS[kind] | {"rope_type": kind}
    folder = written(tmp_path, full | {"rope_parameters": scaling, "num_key_value_heads": 8})
    if FAMILIES[family][0].startswith("Deepseek") and kind != "yarn":
        with pytest.raises(UserError, match=f"rope_type '{kind}' is not supported; supported are"):
            read_architecture(folder)
        return
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](AutoConfig.from_pretrained(folder))
    arch = read_architecture(folder)
    torch.testing.assert_close(arch.rope_frequencies(), frequencies, rtol=1e-6, atol=0)
    assert arch.rope_factor == factor


REFUSED = [
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling: rope_type 'dynamic' is not supported, because its frequencies depend on the length",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
        "rope_parameters: rope_type 'longrope' is not supported, because within a response, SGLang changes",
    ),
    ({"rope_scaling": YARN | {"attn_factor": 2.0}}, "attn_factor of YaRN RoPE scaling must be 1"),
    ({"rope_scaling": YARN | {"mscale": 1.0}}, "only supported together"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters: rope_type 'proportional'"),
    (
        {"rope_scaling": LLAMA3 | ORIGINAL, "rope_parameters": THETA},
        "rope_parameters.rope_theta=3000 would be lost",
    ),
    ({"rope_scaling": YARN, "rope_parameters": THETA}, "move the keys of rope_scaling into rope_parameters"),
    (
        {"rope_parameters": {"full_attention": THETA, "sliding_attention": {"rope_theta": 1e4}}},
        r"different values for different types of layers \(full_attention, sliding_attention\)",
    ),
    (
        {"rope_scaling": {"full_attention": THETA}},
        "rope_scaling has different values for different types of layers",
    ),
    ({"rope_theta": None}, "key rope_theta is missing"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_other_rotary_embeddings_are_refused_by_name(changes, says, tmp_path):
    with pytest.raises(UserError, match=says):
        read_architecture(llama(tmp_path, changes))
