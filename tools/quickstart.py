"""Run the quickstart: make a task and a tiny model, warm it up by SFT, train it with GRPO, print the result.

    python tools/quickstart.py [--config NAME] [--model M] [--seed S] [--root DIR] [--prepare] [key=value ...]

The GRPO run is configs/NAME.yaml, where NAME is quickstart, quickstart_fp8 or quickstart_async. Extra
key=value arguments are passed on to it.

Prints a table and, as its last line, one JSON object:

    accuracy_before, accuracy_after     accuracy on held-out problems, mean of 4 samples at temperature 1
    greedy_before, greedy_after         accuracy of greedy decoding on the same problems
    train_seconds, tokens_per_second    duration and speed of the GRPO steps
    mismatch_max                        largest difference of a log-prob between engine and trainer
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.preflight.check import load_config

TOOLS = Path(__file__).resolve().parent
CONFIGS = TOOLS.parent / "configs"
CLI = ("-m", "grpo_megatron.cli")
# Arguments of make_tiny_model.py for each --model.
MODELS = {"qwen3": (), "qwen3.5": ("--delta",)}


def call(title: str, *command: str) -> None:
    print(f"== {title}", flush=True)
    status = subprocess.run([sys.executable, *command]).returncode
    if status:
        sys.exit(f"{title} failed with exit status {status}")


def prepare(root: str, seed: str, kind: str = "qwen3") -> None:
    """Make the task and a tiny model under `root`, and warm the model up by SFT, ready for the GRPO run.

    kind: kind of the model, one of MODELS.
    """
    data, model = f"{root}/quickstart_data", f"{root}/quickstart_model"
    call("task: two-digit sums", str(TOOLS / "make_arithmetic.py"), data, "--seed", seed)
    tool = str(TOOLS / "make_tiny_model.py")
    call(f"a tiny {kind.capitalize()}", tool, model, "--seed", seed, *MODELS[kind])
    paths = [*common(root, seed), f"model.path={model}", f"data.train={data}/sft.jsonl"]
    call(
        "warm start on a noisy teacher", *CLI, "sft", "--config", str(CONFIGS / "quickstart_sft.yaml"), *paths
    )


def common(root: str, seed: str) -> list[str]:
    return [f"run.root={root}", f"run.seed={seed}", "run.resume=none"]


def grpo_arguments(root: str, seed: str) -> list[str]:
    """Return key=value arguments for a GRPO run on the task and model that `prepare` makes."""
    data = [f"data.{name}={root}/quickstart_data/{name}.jsonl" for name in ("train", "eval")]
    return [*common(root, seed), f"model.path={root}/quickstart_sft/hf", *data]


def with_overrides(
    parser: argparse.ArgumentParser, overrides: list[str], file: str, arguments: list[str]
) -> list[str]:
    """Return the arguments of the GRPO run followed by the user's overrides.

    The whole configuration is checked now, so that a mistake is reported before the warm start. If it is not
    legal, or if an override sets run.name, run.root or run.seed, this process ends with an error message.

    file: YAML file of the run's configuration.
    arguments: key=value arguments that this tool gives the run.
    """
    moved = [text for text in overrides if text.startswith(("run.name", "run.root", "run.seed"))]
    if moved:
        parser.error(
            f"{', '.join(moved)} cannot be set here: use --root for run.root and --seed for run.seed"
        )
    try:
        load_config(file, [*arguments, *overrides])
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    return [*arguments, *overrides]


def show(run: dict, *lines: tuple[str, str]) -> None:
    """Print a table of a finished run: accuracy before and after, speed, and the paths of its files.

    run: content of the run's result.json.
    lines: further rows of the table, as (name, figure).
    """
    before, after = run["before"], run["after"]
    rows = [("held-out accuracy", "before GRPO", "after GRPO")]
    rows += [(name.removeprefix("eval/"), f"{before[name]:.1%}", f"{after[name]:.1%}") for name in before]
    print("\n== result")
    for row in rows:
        print(f"  {row[0]:<24}{row[1]:>14}{row[2]:>14}")
    figures = [("tokens per second", f"{run['tokens'] / run['seconds']:.0f}")]
    figures += [(f"time in {name}", f"{seconds:.1f} s") for name, seconds in run["phases"].items()]
    for name, figure in [*figures, *lines, ("GRPO in total", f"{run['wall_seconds']:.1f} s")]:
        print(f"  {name:<24}{figure:>28}")
    print(f"  logs         {run['run_dir']}/logs")
    print(f"  TensorBoard  tensorboard --logdir {run['tensorboard']}")
    print(f"  model        {run['model']}")


def result_of(root: str, name: str) -> dict:
    return json.loads(Path(root, name, "result.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        default="quickstart",
        choices=("quickstart", "quickstart_fp8", "quickstart_async"),
        help="configuration of the GRPO run",
    )
    parser.add_argument("--model", default="qwen3", choices=tuple(MODELS), help="kind of the tiny model")
    parser.add_argument("--seed", type=int, default=1234, help="seed of task, model, warm start and training")
    parser.add_argument("--root", default="runs", help="folder for everything that is written")
    parser.add_argument("--prepare", action="store_true", help="stop before GRPO, for examples/own_loop.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    options = parser.parse_intermixed_args()
    root, seed, file = options.root, str(options.seed), str(CONFIGS / f"{options.config}.yaml")
    arguments = with_overrides(parser, options.overrides, file, grpo_arguments(root, seed))
    prepare(root, seed, options.model)
    if options.prepare:
        return
    call("GRPO", *CLI, "train", "--config", file, *arguments)
    warm, run = result_of(root, "quickstart_sft"), result_of(root, options.config)
    show(run, ("warm start in total", f"{warm['wall_seconds']:.1f} s"))
    print(
        json_text(
            {
                "accuracy_before": run["before"]["eval/mean@4"],
                "accuracy_after": run["after"]["eval/mean@4"],
                "greedy_before": run["before"]["eval/greedy"],
                "greedy_after": run["after"]["eval/greedy"],
                "train_seconds": run["seconds"],
                "tokens_per_second": run["tokens"] / run["seconds"],
                "mismatch_max": run["mismatch_max"],
            }
        )
    )


if __name__ == "__main__":
    main()
