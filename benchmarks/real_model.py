"""Measure a GRPO step of a real pretrained model on CPUs: time by phase, tokens/s, share of peak arithmetic.

    python benchmarks/real_model.py [--model DIR] [--steps N] [--length R] [--precision P] [--trl PYTHON]

The model is SmolLM2-135M-Instruct; without --model it is fetched (tools/fetch_smollm2.py). A step is that of
configs/quickstart_real.yaml without KL: 8 word problems x 8 responses, one optimizer step. Every response has
R tokens, because the model's end token is made improbable. The first step warms up; figures are medians of
the others.

The peak is the rate of torch.mm in the same run with the same threads, in two variants: for squares of 2048
(peak_square), and for the products of one layer and the output projection (peak_shapes, the mean weighted by
their arithmetic). The arithmetic of training is 3 x the forward pass, with the output projection for response
tokens only. That of generation is one pass over each prompt and each response token.

With --trl, the interpreter PYTHON (an environment with TRL installed) does the same work: same prompts, group
size, lengths, temperature, optimizer, threads and precision (bf16: TRL's autocast), no KL. The ratio is TRL's
seconds over ours.

Prints tables and, as its last line, one JSON object {precision: figures} with these figures:

    generate, train, step                                        seconds
    trained_tokens_per_second, generated_tokens_per_second
    peak_square, peak_shapes                                     GFLOP/s
    train_share, generate_share                                  of peak_square
    train_share_of_shapes, generate_share_of_shapes              of peak_shapes
    trl_step, trl_over_ours                                      with --trl
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Set this before torch loads OpenMP. Threads that spin are slow as soon as another process has work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from fetch_smollm2 import fetch
from make_word_problems import make as make_problems

from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.schema import Config
from grpo_megatron.logs import show_messages
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.check import load_config
from grpo_megatron.run.folder import METRICS

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def endless_model(model: Path, target: Path) -> None:
    """Copy a model so that it almost never ends a response.

    The end token's row of the embedding, which the output layer shares, is set to zero. The end token's logit
    is then 0, while the highest logits are about 30.
    """
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][
        json.loads((model / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    ] = 0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def products(arch: Architecture) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weight matrices of one layer: {name: (outputs, inputs)}."""
    h, d = arch.hidden_size, arch.head_dim
    qkv = (arch.num_heads + 2 * arch.num_kv_heads) * d
    return {
        "qkv": (qkv, h),
        "output": (h, arch.num_heads * d),
        "gate and up": (2 * arch.ffn_hidden_size, h),
        "down": (h, arch.ffn_hidden_size),
    }


def forward_flops(arch: Architecture, tokens: float, with_head: float, length: float) -> float:
    """Return the FLOPs of a forward pass over `tokens` tokens.

    with_head: number of tokens for which the output projection is computed.
    length: number of tokens of each sequence, for the cost of attention. If a pass covers only the end of the
        sequences, give twice the mean number of tokens that a token attends to.
    """
    layer = sum(2 * rows * columns for rows, columns in products(arch).values())
    attention = 4 * arch.num_heads * arch.head_dim * length / 2
    return tokens * arch.num_layers * (layer + attention) + with_head * 2 * arch.vocab_size * arch.hidden_size


def rate(rows: int, inner: int, columns: int, dtype: torch.dtype, repeats: int = 5) -> float:
    """Return the highest rate of [rows, inner] @ [inner, columns], in FLOP/s."""
    a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype).t()
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(4):
            torch.mm(a, b)
        best = min(best, (time.perf_counter() - start) / 4)
    return 2 * rows * inner * columns / best


def peaks(arch: Architecture, dtype: torch.dtype, tokens: int = 2048) -> tuple[float, float]:
    """Measure the peak FLOP/s of torch.mm. Return (that of a large square, that of the model's shapes).

    tokens: number of rows in the products of the model's shapes.
    """
    shapes = [(size, arch.num_layers) for size in products(arch).values()] + [
        ((arch.vocab_size, arch.hidden_size), 1)
    ]
    work = [2 * tokens * rows * columns * count for (rows, columns), count in shapes]
    seconds = [
        flops / rate(tokens, columns, rows, dtype)
        for flops, ((rows, columns), _) in zip(work, shapes, strict=True)
    ]
    return rate(2048, 2048, 2048, dtype), sum(work) / sum(seconds)


def our_config(folder: Path, precision: str, length: int, steps: int, threads: int) -> Config:
    return load_config(
        str(ROOT / "configs/quickstart_real.yaml"),
        [
            f"run.root={folder}/runs",
            f"run.name={precision}",
            "run.resume=none",
            f"run.total_steps={steps}",
            f"model.path={folder}/model",
            f"data.train={folder}/data/train.jsonl",
            "data.eval=null",
            "data.shuffle=false",
            f"rollout.max_response_length={length}",
            f"rollout.engine.dtype={'float32' if precision == 'fp32' else 'bfloat16'}",
            f"rollout.engine.cpu_threads={threads}",
            "algorithm.use_kl_loss=false",
            f"megatron.precision={precision}",
            f"megatron.cpu_threads={threads}",
            "optimizer.lr=1e-6",
            "mismatch.action=off",
        ],
    )


def our_steps(config: Config) -> list[dict[str, float]]:
    """Run our steps and return the logged scalars of each step except the first.

    Raises RuntimeError if responses ended before the maximum length.
    """
    with assembled_loop(config) as (controller, _):
        controller.rollouts.start()
        for _ in range(config.run.total_steps):
            controller.train_step(controller.loop.begin_step())
        lines = Path(controller.monitor.directory, METRICS).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "time/train" in row]
    length = config.rollout.max_response_length
    if any(row["response/length_mean"] < 0.99 * length for row in rows):
        raise RuntimeError(f"responses ended before {length} tokens")
    return rows[1:]


def trl_seconds(python: str, config: Config, threads: int) -> float:
    """Run the same steps with TRL. Return the median seconds of its steps, without the first.

    python: interpreter of an environment with TRL. If it fails, this process ends with an error message.
    threads: number of CPU threads.
    """
    options = {
        "model": config.model.path,
        "prompts": config.data.train,
        "steps": config.run.total_steps,
        "groups": config.data.train_batch_size,
        "group_size": config.rollout.n,
        "length": config.rollout.max_response_length,
        "temperature": config.rollout.temperature,
        "bf16": config.megatron.precision.value == "bf16",
        "threads": threads,
        "optimizer": {
            name: getattr(config.optimizer, name) for name in ("lr", "beta1", "beta2", "eps", "clip_grad")
        },
    }
    script = ROOT / "benchmarks/others/trl_step.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(script), json.dumps(options)], stdout=subprocess.PIPE, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"{python} {script} failed with exit status {done.returncode}")
    return statistics.median(json.loads(done.stdout.splitlines()[-1])[1:])


def measure(config: Config, arch: Architecture, precision: str) -> dict[str, float]:
    square, shapes = peaks(arch, DTYPES[precision])
    rows = our_steps(config)

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    groups, size, length = config.data.train_batch_size, config.rollout.n, median("response/length_mean")
    responses = groups * size * length
    tokens = statistics.median(row["throughput/tokens_per_second"] * row["time/step"] for row in rows)
    whole = tokens / (groups * size)
    prompt = whole - length
    train = 3 * forward_flops(arch, tokens, responses, whole) / median("time/train")
    generate = forward_flops(arch, groups * prompt, groups, prompt) + forward_flops(
        arch, responses, responses, prompt + whole
    )
    generate /= median("time/generate")
    return {
        **{name: median(f"time/{name}") for name in ("generate", "train", "step")},
        "trained_tokens_per_second": tokens / median("time/train"),
        "generated_tokens_per_second": responses / median("time/generate"),
        "peak_square": square / 1e9,
        "peak_shapes": shapes / 1e9,
        "train_share": train / square,
        "generate_share": generate / square,
        "train_share_of_shapes": train / shapes,
        "generate_share_of_shapes": generate / shapes,
    }


def main() -> None:
    show_messages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model; default: fetch it")
    parser.add_argument("--steps", type=int, default=3, help="number of measured steps")
    parser.add_argument("--length", type=int, default=48, help="tokens in every response")
    parser.add_argument(
        "--precision", choices=DTYPES, action="append", help="precision to measure; repeatable; default: both"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="CPU threads of the rank, the engine, TRL and the peak",
    )
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter with TRL installed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model is None:
            fetch(f"{folder}/fetched", "float32", [])
        endless_model(options.model or folder / "fetched", folder / "model")
        make_problems(folder / "data", 0, 256, 1)
        arch = read_architecture(f"{folder}/model")
        for precision in options.precision or DTYPES:
            config = our_config(folder, precision, options.length, options.steps + 1, options.threads)
            result[precision] = measure(config, arch, precision)
            if options.trl:
                seconds = trl_seconds(options.trl, config, options.threads)
                result[precision] |= {
                    "trl_step": seconds,
                    "trl_over_ours": seconds / result[precision]["step"],
                }
    for figure in next(iter(result.values())):
        print(
            f"{figure:<30}"
            + "".join(f"{precision:>6}{values[figure]:>12.3f}" for precision, values in result.items())
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
