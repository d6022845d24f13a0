"""Tiny random HF checkpoints, and batches for them."""

import numpy as np
import torch

from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.rollout import EarlyStopping

# Of batches whose longest sequence has 40 tokens, some positions lie beyond the original context.
YARN = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 64, "head_dim": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": False, "rope_parameters": {"rope_type": "yarn", **YARN}}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": (
        "Mixtral",
        {"head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # transformers does not write these, SGLang reads them
            "rotary_dim": 12,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            # transformers does not write these, SGLang reads them
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_parameters": {
                "rope_type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                **YARN,
            },
        },
    ),
}

# What distinguishes Kimi-K2's config.json from DeepSeek-V3's, besides sizes.
KIMI_K2 = {
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": YARN | {"rope_type": "yarn", "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}

# Families with gated delta networks. TransformerEngine's layers are refused for them.
# With the usual initializer_range, transformers' own log-probs in float32 would be 2e-5 from those in
# float64: the norm of a state's output magnifies what is left of nearly orthogonal queries and keys.
_HYBRID = {"initializer_range": 0.06, "head_dim": 24, "partial_rotary_factor": 0.25}
_HYBRID_WITH_EXPERTS = {
    **_HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
HYBRIDS = {
    "qwen3_next": (
        "Qwen3Next",
        {
            **_HYBRID_WITH_EXPERTS,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **_HYBRID,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _HYBRID_WITH_EXPERTS,
    ),
}

# Families for which TransformerEngine's layers are refused too, and of which engines compute windows. Of
# sequences with 40 tokens, most positions lie beyond the window.
WINDOWED = {
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 24,
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            # Some inputs of the activation are beyond this limit.
            "swiglu_limit": 1.0,
            "rope_parameters": {"rope_type": "yarn", "truncate": False, **YARN},
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
}
ALL_FAMILIES = FAMILIES | HYBRIDS | WINDOWED

# Changes with which SGLang can serve families: attention in every n-th layer, experts in every layer, no
# output layer of its own.
SERVED = {
    "gemma3": {"tie_word_embeddings": True},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"] * 2},
}


def config_class(name: str):
    """Return transformers' class of a family's config.json. name: of the family, as in ALL_FAMILIES."""
    import transformers

    has_vision = name.startswith(("Qwen3_5", "Gemma3"))
    return getattr(transformers, f"{name}TextConfig" if has_vision else f"{name}Config")


def tiny_model(folder, family, tied=False, seed=0, vocab_size=61, **changes):
    """Write a random float32 checkpoint of one of ALL_FAMILIES.

    Every kind of parameter has values that matter.
    """
    import transformers

    name, own = ALL_FAMILIES[family]
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = config_class(name)(**{**sizes, **own, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:  # all ones or zeros at first, which hides a norm that is not loaded
            with torch.no_grad():
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        if "bias" in parameter_name or "sinks" in parameter_name:  # all zeros or ones at first
            torch.nn.init.normal_(parameter, std=0.3)
        if "sinks" in parameter_name:  # SGLang loads them in bfloat16
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)
        if "A_log" in parameter_name:  # at first, most states forget within a few tokens
            torch.nn.init.uniform_(parameter, -5.0, 0.0)
    for buffer_name, buffer in model.named_buffers():
        if "correction_bias" in buffer_name:  # all zeros at first
            torch.nn.init.normal_(buffer, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def aligned_model(folder, family, **more):
    """Write a tiny_model whose sizes are multiples of 16, which GPU kernels require."""
    latent = {
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
    sizes = {"head_dim": 32, "rotary_dim": 16, "moe_intermediate_size": 64, **latent}
    changes = {name: size for name, size in sizes.items() if name in ALL_FAMILIES[family][1]}
    return tiny_model(
        folder, family, vocab_size=64, hidden_size=128, intermediate_size=192, **changes, **more
    )


def tiny_qwen3(folder, tied=False, seed=0, dtype=torch.float32, **changes):
    """Write a random Qwen3 checkpoint whose head_dim differs from hidden / heads."""
    tiny_model(folder, "qwen3", tied, seed, **changes)
    if dtype != torch.float32:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return str(folder)


def with_tools(folder) -> str:
    """Write the chat template of tools/make_tiny_model.py, with the names of tools before the messages.

    Returns the path of the file.
    """
    from make_tiny_model import TEMPLATE

    path = f"{folder}/with_tools.jinja"
    with open(path, "w", encoding="utf-8") as file:
        file.write("{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE)
    return path


def random_samples(count=12, vocab_size=61, seed=0, group_size=4, longest=40) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = rng.integers(1, longest // 2, size=2)
        mask = rng.random(response) < 0.9
        mask[0] = True
        samples.append(
            Sample.of(
                group_id=i // group_size,
                trajectory_id=i,
                prompt_ids=rng.integers(3, vocab_size, prompt).astype(np.int32),
                response_ids=rng.integers(3, vocab_size, response).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=-rng.random(response).astype(np.float32) * 4,
                finish_reason="stop",
                reward=float(rng.integers(0, 2)),
            )
        )
    return samples


def random_batch(**kwargs) -> TrainBatch:
    return TrainBatch.from_samples(random_samples(**kwargs))


@torch.no_grad()
def transformers_logprobs(model, batch: TrainBatch, temperature: float = 1.0) -> np.ndarray:
    """Return transformers' log-probs, float32 [T], computed one sequence at a time."""
    out = np.zeros(batch.num_tokens, np.float32)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0] / temperature
        logp = torch.log_softmax(logits.double(), -1)
        out[start:end] = logp.gather(1, torch.from_numpy(batch.target[start:end]).long()[:, None])[:, 0]
    return out


def transformers_beams(model, prompt, width, ends, limit, config):
    """Return transformers' beam search, best first: (sequences up to their end, scores).

    config: rollout.beam.
    """
    stopping = {EarlyStopping.unlikely: False, EarlyStopping.complete: True, EarlyStopping.never: "never"}
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=limit,
        length_penalty=config.length_penalty,
        early_stopping=stopping[config.early_stopping],
        eos_token_id=list(ends),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for ids in found.sequences[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(ids, 1) if token in ends), len(ids))
        sequences.append(ids[:end])
    return sequences, found.sequences_scores.numpy()
