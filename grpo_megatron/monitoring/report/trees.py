"""Trajectories as trees in HTML. Each turn can be opened, and each trajectory has an anchor for links."""

from collections.abc import Sequence

from markupsafe import Markup

from grpo_megatron.monitoring.report import rendering
from grpo_megatron.monitoring.report.read import RecordedRun
from grpo_megatron.monitoring.report.rendering import parts
from grpo_megatron.monitoring.trajectories import TrajectoryOfStep

# Limits of a page, so that a browser opens it in seconds: trajectories, and characters of all their texts.
MOST_TRAJECTORIES, _MOST_CHARACTERS = 100, 8_000_000

_OTHER_PAGE = "`grpo-megatron trajectories RUN_DIR --step N` writes a page about a step."
_CHOOSE = "Choose some with --prompt or --sample."


def chosen_for_page(every: Sequence[TrajectoryOfStep]) -> tuple[list[TrajectoryOfStep], int]:
    """Return (trajectories that a page shows, number of those that are left out).

    The newest steps come first. If there are too many trajectories, those of the first step are kept, so that
    a reader can compare both, and those of the last steps.
    """
    newest_first = sorted(every, key=lambda one: -one.step)
    first = min((one.step for one in every), default=0)
    ranked = sorted(newest_first, key=lambda one: one.step != first)  # the first step has the right of way
    kept, room = set(), _MOST_CHARACTERS
    for one in ranked[:MOST_TRAJECTORIES]:
        room -= _characters(one)
        if kept and room < 0:
            break
        kept.add(id(one))
    return [one for one in newest_first if id(one) in kept], len(every) - len(kept)


def _characters(one: TrajectoryOfStep) -> int:
    return sum(len(node.text) + sum(len(call.arguments) for call in node.calls) for node in one.shown.nodes)


def trees(shown: Sequence[TrajectoryOfStep], left_out: int, advice: str = _OTHER_PAGE) -> Markup:
    """Return HTML with the trees of trajectories.

    left_out: number of further trajectories, which a sentence mentions.
    advice: how to see these.
    """
    return parts.trees(shown, left_out, advice) if shown else parts.nothing()


def trees_page(
    title: str, run: RecordedRun, note: str, every: Sequence[TrajectoryOfStep], left_out: int = 0
) -> str:
    """Return an HTML page about trajectories of one step of a run.

    note: sentence for the top of the page.
    every: the trajectories, in the order in which they are shown, as far as the page has room for them.
    left_out: number of further ones.
    """
    shown, others = chosen_for_page(every)
    body = parts.sentence(note) + trees(shown, left_out + others, _CHOOSE)
    return rendering.page.render(title=title, run=run, sections=[("Trajectories", body)])
