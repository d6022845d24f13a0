"""Plot a scalar of several runs over the steps, from their TensorBoard logs, as a PNG.

    python tools/plot_runs.py OUT.png [--scalar eval/mean@4] [--title TEXT] [NAME=]RUN_FOLDER ...

RUN_FOLDER is a run's folder, or any folder with event files in it. NAME is the label of its curve; the
default is the folder's name. The tool needs matplotlib (pip install grpo-megatron[plot]).
"""

import argparse
import sys
from pathlib import Path


def read_scalar(folder: str | Path, scalar: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of a scalar in a folder's TensorBoard logs, sorted by step.

    If a step was logged twice, the later value counts.

    Raises ValueError if there are no logs. Raises ValueError also if there is no such scalar; the message
    then names those that exist.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(Path(folder).rglob("events.out.tfevents.*"))
    if not files:
        raise ValueError(f"{folder} contains no TensorBoard logs; give the folder of a run")
    found: dict[int, float] = {}
    known: set[str] = set()
    for file in files:
        # 0 keeps all points. The default would keep a sample.
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        known |= set(events.Tags()["scalars"])
        if scalar in events.Tags()["scalars"]:
            found |= {event.step: event.value for event in events.Scalars(scalar)}
    if not found:
        raise ValueError(
            f"{folder} has no scalar {scalar}; set --scalar to one of {', '.join(sorted(known)) or '(none)'}"
        )
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def plot(out: str, scalar: str, runs: dict[str, str], title: str | None = None) -> None:
    """Plot a scalar of several runs over the steps and write it as a PNG file to `out`.

    runs: {label of a curve: folder with TensorBoard logs}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {label: read_scalar(folder, scalar) for label, folder in runs.items()}
    figure, axes = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    for (label, (steps, values)), marker in zip(curves.items(), "osv^Dx+*" * len(curves), strict=False):
        # Markers show curves that coincide.
        axes.plot(steps, values, label=label, marker=marker, markersize=4, markevery=max(1, len(steps) // 12))
    axes.set_xlabel("step")
    axes.set_ylabel(scalar)
    axes.set_title(title or scalar)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT.png", help="file to write the plot to")
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN_FOLDER",
        help="folder of a run, with a label for its curve if NAME is given",
    )
    parser.add_argument("--scalar", default="eval/mean@4", help="scalar to plot (default: %(default)s)")
    parser.add_argument("--title", help="title of the plot")
    options = parser.parse_args()
    runs: dict[str, str] = {}
    for text in options.runs:
        name, separator, folder = text.partition("=")
        label, folder = (name, folder) if separator else (Path(text).name, text)
        if label in runs:
            parser.error(f"two curves are called {label}; give them names: NAME=RUN_FOLDER")
        runs[label] = folder
    try:
        plot(options.out, options.scalar, runs, options.title)
    except ValueError as error:
        sys.exit(f"plot_runs: {error}")
    print(options.out)


if __name__ == "__main__":
    main()
