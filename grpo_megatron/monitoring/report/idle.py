"""Busy shares: how much of each driver phase the ranks, engines and workers worked, from a run's timeline."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from grpo_megatron.monitoring.timeline import DRIVER

# (start, end), in microseconds.
Interval = tuple[float, float]


def busy_shares(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how busy the processes were in each phase of the driver: {driver phase: {role: share}}.

    A share is a number from 0 to 1. While the driver is in its phase, a process counts as busy when it is in
    any phase of its own. The share is the busy time divided by the time of the driver phase, as the mean over
    all processes of the role. A role is a process's name up to its number: `trainer rank 3 of 8` has the role
    `trainer rank`. The result is empty if only the driver recorded phases.

    events: events of timeline.json, in the Trace Event Format.
    """
    names, spans = {}, defaultdict(list)
    for event in events:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            spans[event["pid"]].append((event["name"], event["ts"], event["ts"] + event["dur"], event["tid"]))
    phases: dict[str, list[Interval]] = defaultdict(list)
    roles: dict[str, list[list[Interval]]] = defaultdict(list)
    for pid, own in spans.items():
        if names.get(pid) == DRIVER:
            for name, start, end, line in own:
                if line == 0:
                    phases[name].append((start, end))
        else:
            roles[_role(names.get(pid, ""))].append(_union([(start, end) for _, start, end, _ in own]))
    if not roles:
        return {}
    return {
        phase: {role: _mean_share(intervals, processes) for role, processes in roles.items()}
        for phase, intervals in phases.items()
    }


def _role(process: str) -> str:
    """Return a process's role: its name up to its number, such as `trainer rank` of `trainer rank 3 of 8`."""
    words = process.split()
    return " ".join(words[: next((i for i, word in enumerate(words) if word.isdigit()), len(words))])


def _mean_share(phase: list[Interval], processes: list[list[Interval]]) -> float:
    """Return the share (0 to 1) of a driver phase in which a process is busy, averaged over processes.

    The result is 0 if the phase took no time.

    phase: all intervals of the driver phase.
    processes: the busy intervals of each process, sorted and without overlaps.
    """
    whole = sum(end - start for start, end in phase)
    if not whole:
        return 0.0
    return sum(_overlap(sorted(phase), busy) for busy in processes) / len(processes) / whole


def _union(intervals: list[Interval]) -> list[Interval]:
    """Merge overlapping intervals, so that nested phases count once. Return the union, sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(left: list[Interval], right: list[Interval]) -> float:
    """Return the total length of the intersection of two lists of intervals.

    Each list must be sorted and without overlaps.
    """
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
