"""Measure the time of a gated delta network against a layer's attention, forward and backward, on a CPU.

    python benchmarks/delta_net.py [--tokens T] [--sequences S] [--hidden H] [--repeats R]

One rank, float32, one thread. Both layers have the sizes of Qwen3-Next-80B-A3B for a hidden size of 2048, and
a share of its heads for a smaller one: attention with an output gate and 16 heads of 256 channels, two of
them for keys and values; a gated delta network with 16 key heads and 32 value heads of 128 channels. Input
and output projections are included; the layers' norms and experts are not. The pack has S sequences of T
tokens. Seconds are CPU time, which other load on the machine affects least. The two take turns.

Prints, as its last line, one JSON object:

    delta_over_attention   time of the gated delta network / time of the attention, forward and backward
                           together; the median over the repeats. The target is 1.5 at 512 tokens.
    forward                the same for the forward pass alone
    SIDE_seconds           median seconds of forward and backward pass, of `delta` and `attention`
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from grpo_megatron.batch.layout import Layout
from grpo_megatron.config.schema import Config, MegatronConfig, Precision
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.layers.build import build_model
from grpo_megatron.megatron.layers.packs import describe_pack
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes

PUBLISHED_HIDDEN = 2048


def config_json(hidden: int) -> dict:
    """Return the config.json of a Qwen3.5 with one layer of each kind and a share of the published heads."""

    def heads(published: int) -> int:
        return max(1, published * hidden // PUBLISHED_HIDDEN)

    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads(16),
        "num_key_value_heads": heads(2),
        "head_dim": 256,
        "vocab_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": heads(16),
        "linear_num_value_heads": 2 * heads(16),
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def make_layers(folder: str, hidden: int) -> dict[str, torch.nn.Module]:
    """Return {side: layer}, with random weights."""
    Path(folder, "config.json").write_text(json.dumps(config_json(hidden)))
    config = Config(megatron=MegatronConfig(precision=Precision.fp32))
    (chunk,) = build_model(read_architecture(folder), config)
    torch.manual_seed(0)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    delta, attention = (layer.self_attention for layer in chunk.decoder.layers)
    return {"delta": delta.train(), "attention": attention.train()}


def timed(layer: torch.nn.Module, hidden: torch.Tensor, packed) -> tuple[float, float]:
    """Return (seconds of the forward pass, seconds of forward and backward pass together)."""
    begun = time.process_time()
    output = layer(hidden, None, packed_seq_params=packed)[0]
    forward = time.process_time() - begun
    output.backward(hidden.detach())
    taken = time.process_time() - begun
    for tensor in (hidden, *layer.parameters()):
        tensor.grad = None
    return forward, taken


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return {side: (forward, forward and backward) of each repeat}."""
    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        layers = make_layers(folder, options.hidden)
        packed = describe_pack(Layout().pack([options.tokens] * options.sequences), torch.device("cpu"))
        tokens = options.tokens * options.sequences
        hidden = torch.randn(tokens, 1, options.hidden, requires_grad=True)
        taken = {side: [] for side in layers}
        for repeat in range(options.repeats + 1):  # the first one warms up
            for side, layer in layers.items():
                found = timed(layer, hidden, packed)
                if repeat:
                    taken[side].append(found)
        process_groups.destroy()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of the pack")
    parser.add_argument("--hidden", type=int, default=PUBLISHED_HIDDEN, help="hidden size")
    parser.add_argument("--repeats", type=int, default=7, help="measured repeats of each layer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    taken = measure(options)
    pairs = list(zip(taken["delta"], taken["attention"], strict=True))
    ratios = [[delta[i] / attention[i] for delta, attention in pairs] for i in range(2)]
    seconds = {f"{side}_seconds": statistics.median(both for _, both in taken[side]) for side in taken}
    forward, both = map(statistics.median, ratios)
    print(json.dumps({"delta_over_attention": both, "forward": forward, **seconds}))


if __name__ == "__main__":
    main()
