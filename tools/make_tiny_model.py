"""Make a tiny random checkpoint of Qwen3, Qwen3.5 or Qwen3-Next, with a tokenizer and a chat template.

    python tools/make_tiny_model.py OUT_DIR [--tokenizer characters|bytes] [--seed S] [--hidden 128] ...

The vocabulary consists of <pad>, <bos>, <eos>, the role marks, and either the characters of the arithmetic
task or all bytes (any text). The checkpoint loads in transformers and SGLang like any other.
"""

import argparse
from pathlib import Path

SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>"]
CHARACTERS = "0123456789+-*/=,.:;#? ()"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(kind: str = "characters"):
    """Return a tokenizer with a chat template, in which each character or byte is a token.

    kind: "characters" (digits, signs and blank of the arithmetic task) or "bytes" (any text).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        vocabulary = {token: i for i, token in enumerate([*SPECIAL, "<unk>", *CHARACTERS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        clean_up_tokenization_spaces=False,
        **({"unk_token": "<unk>"} if kind == "characters" else {}),
    )
    fast.chat_template = TEMPLATE
    return fast


def family_of(experts: int, delta: bool, sizes: dict[str, int]) -> tuple[str, str, dict]:
    """Return the family's name in transformers, its class of config.json, and the settings that only it has.

    experts: number of experts; 0: a dense model.
    delta: True for a family with gated delta networks.
    sizes: hidden, heads, kv_heads and ffn, see `make`.
    """
    own = {}
    if experts:
        own = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": sizes["ffn"],
            "norm_topk_prob": True,
        }
    if not delta:
        family = "Qwen3Moe" if experts else "Qwen3"
        return family, f"{family}Config", own
    own |= {
        "linear_num_key_heads": sizes["kv_heads"],
        "linear_num_value_heads": sizes["heads"],
        "linear_key_head_dim": sizes["hidden"] // sizes["heads"],
        "linear_value_head_dim": sizes["hidden"] // sizes["heads"],
    }
    if experts:
        return "Qwen3Next", "Qwen3NextConfig", own | {"shared_expert_intermediate_size": sizes["ffn"]}
    return "Qwen3_5", "Qwen3_5TextConfig", own


def make(
    out: Path,
    tokenizer: str = "characters",
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 384,
    positions: int = 2048,
    experts: int = 0,
    delta: bool = False,
) -> int:
    """Write a random Qwen3 checkpoint in float32 and return its number of parameters.

    tokenizer: kind of tokenizer, see `make_tokenizer`.
    seed: seed of the weights.
    hidden, layers, heads, kv_heads: hidden size, and numbers of layers, attention heads and KV heads.
    ffn: width of the MLP, or of each expert.
    positions: longest sequence, in tokens.
    experts: number of experts, of which each token uses 2. 0: a dense model.
    delta: True for gated delta networks in all layers but every fourth (or the last, if there are fewer): a
        Qwen3.5, or with experts a Qwen3-Next.
    """
    import torch
    import transformers

    tokenizer = make_tokenizer(tokenizer)
    torch.manual_seed(seed)
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    family, config, own = family_of(experts, delta, sizes)
    if delta:
        every = min(4, layers)
        kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
        own["layer_types"] = [kinds[layer % every] for layer in range(layers)]
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, config)(
            **own,
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            max_position_embeddings=positions,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write the HF checkpoint to")
    parser.add_argument(
        "--tokenizer", choices=("characters", "bytes"), default="characters", help="kind of tokenizer"
    )
    for name, default, meaning in (
        ("seed", 0, "seed of the weights"),
        ("hidden", 128, "hidden size"),
        ("layers", 2, "number of layers"),
        ("heads", 4, "number of attention heads"),
        ("kv-heads", 2, "number of heads of keys and values"),
        ("ffn", 384, "width of the MLP, or of each expert"),
        ("positions", 2048, "longest sequence, in tokens"),
        ("experts", 0, "number of experts; 0: a dense model"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--delta", action="store_true", help="gated delta networks in all layers but every fourth"
    )
    options = vars(parser.parse_args())
    out = options.pop("out")
    print(f"{out}: {make(out, **options):,} parameters")


if __name__ == "__main__":
    main()
