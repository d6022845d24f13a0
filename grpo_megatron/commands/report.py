"""`grpo-megatron report`: one HTML page about a run."""

from pathlib import Path

from grpo_megatron.config.keys import value_text
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.report.page import Changes, page
from grpo_megatron.monitoring.report.read import CONFIG, REPORT, RecordedRun, read_run
from grpo_megatron.preflight.show import diff


def report(folder: str, against: str | None, out: str | None) -> int:
    """Execute `grpo-megatron report`: write an HTML page about a run, print its path, return exit status 0.

    folder: the run's folder.
    against: folder of another run to compare with; None: no comparison.
    out: path of the page; None: report.html in the run's folder.

    Raises UserError if a folder is not the folder of a run, or if the page cannot be written.
    """
    recorded = read_run(folder)
    other = read_run(against) if against else None
    text = page(recorded, other, _changes(recorded, other) if other else "")
    path = Path(out) if out else Path(folder, REPORT)
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {path}: {error}; choose another file with --out"
        ) from error
    print(path)
    return 0


def _changes(run: RecordedRun, other: RecordedRun) -> Changes | str:
    """Return the differences of two runs' configurations, as {key: (value in `run`, value in `other`)}.

    All values are texts. If the configurations cannot be compared, for example because one of them has a key
    of an earlier version, a sentence with the reason is returned instead of the dict.
    """
    try:
        found = diff(str(run.folder / CONFIG), str(other.folder / CONFIG))
    except UserError as error:
        return str(error)
    return {
        key: (value_text(sides["a"]["value"]), value_text(sides["b"]["value"]))
        for key, sides in found.items()
    }
