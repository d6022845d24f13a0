"""The decision which processes of a run hang, from their newest heartbeats."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import ray

from grpo_megatron.cluster.heartbeat import Beat
from grpo_megatron.cluster.processes import Process

# Number of hanging processes that an error message describes.
_SHOWN = 3
# The file with torch's collectives, as it appears in Beat.place.
_COLLECTIVE = "distributed_c10d.py"


@dataclass(eq=False)
class Watched:
    """A process that the hang detector watches, and its newest heartbeat."""

    process: Process
    """Name and log of the process."""
    actor: ray.actor.ActorHandle
    """Ray's handle for the process, which is an actor."""
    beat: Beat | None = None
    """The newest heartbeat; None before the first."""
    silent: float = 0.0
    """Seconds since the newest heartbeat."""
    spans: int = 0
    """Number of the last phase passed on to the timeline (Span.sequence_number); 0 if there is none."""

    @property
    def name(self) -> str:
        return (self.beat and self.beat.role) or self.process.name


@dataclass(frozen=True)
class Hang:
    """The processes of a run at the moment when some of them are found to hang.

    silent: processes that have sent no heartbeat for longer than the time limit
    still: processes that send heartbeats, but whose call has made no progress for longer than the time limit
    others: all other processes that are in a call. In each of their calls, some process still makes progress.
    """

    silent: list[Watched]
    still: list[Watched]
    others: list[Watched]

    @property
    def at_fault(self) -> list[Watched]:
        """The processes that are assumed to have caused the hang. They are killed.

        If some processes have sent no heartbeat for too long (`silent`), they are the cause. Otherwise the
        processes that make no progress (`still`) are grouped by their position in the code. The smallest
        group is the cause (or all groups of this size), because in most hangs many ranks wait for a few.
        Processes that wait in a collective are left out, unless all processes in `still` do so.
        """
        if self.silent:
            return self.silent
        by_place = defaultdict(list)
        for watched in [
            watched for watched in self.still if _COLLECTIVE not in watched.beat.place
        ] or self.still:
            # The place of an engine contains its process ids. Without their removal, every engine would be
            # the only one at its place, and so belong to the smallest groups.
            by_place[re.sub(r" \(pid \d+\)", "", watched.beat.place)].append(watched)
        fewest = min(len(group) for group in by_place.values())
        return [watched for group in by_place.values() if len(group) == fewest for watched in group]

    def message(self) -> str:
        """Return the error message for ProcessHangs: which processes hang, and where. At most five lines."""
        at_fault = self.at_fault
        lines = [self.line(watched) for watched in at_fault[:_SHOWN]]
        if len(at_fault) > _SHOWN:
            lines.append(f"and {len(at_fault) - _SHOWN} more")
        places = Counter(
            f"`{watched.beat.phase}`" + (f", at {watched.beat.place}" if watched.beat.place else "")
            for watched in (*self.still, *self.others)
            if watched not in at_fault
        )
        if places:
            most = [f"{count} in {place}" for place, count in places.most_common(2)]
            lines.append(f"other processes: {'; '.join(most)}")
        return "\n".join(lines)

    def line(self, watched: Watched) -> str:
        """Describe one process in one line: its call, the seconds in the call, and its place in the code.

        If the process has stopped sending heartbeats, the line says instead for how long, and its last call.
        """
        beat = watched.beat
        if watched in self.silent:
            last = f", last in `{beat.phase}`" if beat.phase else ""
            return f"{watched.name} has sent no heartbeat for {watched.silent:.0f} s{last}"
        where = f", at {beat.place}" if beat.place else ""
        return f"{watched.name} in `{beat.phase}` for {beat.seconds:.0f} s{where}"


def find_hang(all_watched: list[Watched], timeout: float) -> Hang | None:
    """Return a Hang that lists the processes that hang, or None if no process of the run hangs.

    A process hangs if it has sent no heartbeat for `timeout` seconds. Processes in the same call may wait for
    each other, so they hang only if none of them has made progress for `timeout` seconds. A process whose
    heartbeat has the flag `alone` waits for no other, so only its own progress counts.

    all_watched: all processes of the run. Those that have not sent a heartbeat yet are ignored.
    timeout: seconds.
    """
    heard = [watched for watched in all_watched if watched.beat]
    silent = [watched for watched in heard if watched.silent > timeout]
    asked = [watched for watched in heard if watched.beat.phase and watched not in silent]
    calls = defaultdict(list)
    for watched in asked:
        calls[watched.process.name if watched.beat.alone else watched.beat.phase].append(watched)
    still = [
        watched
        for members in calls.values()
        if all(member.beat.still > timeout for member in members)
        for watched in members
    ]
    if not silent and not still:
        return None
    return Hang(silent, still, [watched for watched in asked if watched not in still])


def at_work(all_watched: list[Watched], now: float) -> list[dict[str, Any]]:
    """Return the calls that processes are executing now, for status.json: one dict for each call.

    - "name": the process that has been in the call longest, and how many others are in the call, as text
    - "phase": name of the call
    - "since": time at which this process entered the call
    - "heard": time of the last heartbeat of the process that has been silent longest

    All times are in seconds since the epoch.

    all_watched: all processes of the run.
    now: the present time.
    """
    calls = defaultdict(list)
    for watched in all_watched:
        if watched.beat and watched.beat.phase:
            calls[watched.beat.phase].append(watched)
    rows = []
    for phase, members in calls.items():
        longest = max(members, key=lambda member: member.beat.seconds + member.silent)
        others = f" and {len(members) - 1} more" if len(members) > 1 else ""
        since = now - longest.beat.seconds - longest.silent
        heard = now - max(member.silent for member in members)
        rows.append({"name": longest.name + others, "phase": phase, "since": since, "heard": heard})
    return rows
