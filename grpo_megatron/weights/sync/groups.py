"""Parcels over process groups of the trainer's and the engines' ranks: NCCL between GPUs, gloo between CPUs.

Point to point, there is one group for each pipeline stage, of its ranks and all of the engines'. With multicast there is one for each
link, in which the sender broadcasts. Stages and replicas send side by side. A sender packs the next parcel while the last ones travel.
"""

from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo_megatron.weights.sync.channel import SizeOf
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, Link

_IN_FLIGHT = 2
Member = int | EngineRank  # a rank of the trainer, or of an engine


def _members(layouts: Layouts, link: Link) -> tuple[str, list[Member]]:
    """Name and members of the group that a link belongs to."""
    if layouts.multicast:
        return link.name, [link.sender, *link.receivers]
    per_stage = layouts.sizes.world_size // layouts.sizes.pp
    stage = link.sender // per_stage
    engines = [EngineRank(engine, rank) for engine in range(layouts.num_engines) for rank in range(layouts.engine.tp)]
    return f"stage{stage}", [*range(stage * per_stage, (stage + 1) * per_stage), *engines]


class _Groups:
    """The groups that this process is a member of; their making waits for all their members."""

    def __init__(
        self, store: dist.Store, layouts: Layouts, me: Member, links: list[Link], device: torch.device, timeout: float
    ):
        self._layouts, self._cuda, self._timeout = layouts, device.type == "cuda", timedelta(seconds=timeout)
        wanted = dict(_members(layouts, link) for link in links)
        if not layouts.multicast:  # members of a stage that have nothing to send to, or to take from, each other
            for stage in range(layouts.sizes.pp):
                name, members = _members(layouts, Link(stage * (layouts.sizes.world_size // layouts.sizes.pp), ()))
                if me in members:
                    wanted[name] = members
        self._places, self._groups = {}, {}
        for name in sorted(wanted):  # in one order everywhere, or processes would wait for each other in a circle
            members = wanted[name]
            self._places[name] = {member: place for place, member in enumerate(members)}
            self._groups[name] = self._make(dist.PrefixStore(name, store), members.index(me), len(members))

    def _make(self, store: dist.Store, rank: int, size: int):
        if not self._cuda:
            return dist.ProcessGroupGloo(store, rank, size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def transfer(self, link: Link, payload: torch.Tensor, sending: bool) -> dist.Work:
        """Start to send, or to receive, one payload."""
        name, _ = _members(self._layouts, link)
        group, places = self._groups[name], self._places[name]
        if self._layouts.multicast:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            return group.broadcast([payload], options)
        if sending:
            return group.send([payload], places[link.receivers[0]], 0)
        return group.recv([payload], places[link.sender], 0)

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise TimeoutError(
                f"{what} failed, or did not come within {self._timeout.total_seconds():.0f} s: {error}"
            ) from error
        if self._cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._groups.clear()


class GroupSender:
    """links: all that this rank sends over. timeout: seconds that one parcel may take."""

    def __init__(
        self,
        store: dist.Store,
        layouts: Layouts,
        rank: int,
        links: list[Link],
        device: torch.device,
        timeout: float,
        variable: bool,
    ):
        """variable: payloads differ in size from what receivers expect, which are told of it first."""
        self._groups = _Groups(store, layouts, rank, links, device, timeout)
        self._device, self._variable = device, variable
        self._busy: deque[tuple[dist.Work, torch.Tensor, str]] = deque()

    def begin(self, version: int) -> None:
        pass

    def buffer(self, size: int) -> torch.Tensor:
        while len(self._busy) >= _IN_FLIGHT:
            self._wait_for_first()
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        what = f"parcel {parcel.number} of link {parcel.link.name}"
        if self._variable:
            size = torch.tensor([len(payload)], device=self._device)
            self._busy.append((self._groups.transfer(parcel.link, size, sending=True), size, what))
        self._busy.append((self._groups.transfer(parcel.link, payload, sending=True), payload, what))

    def finish(self) -> None:
        while self._busy:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        work, _, what = self._busy.popleft()
        self._groups.wait(work, what)

    def close(self) -> None:
        self._groups.close()


class GroupReceiver:
    """me: this rank. links: all that it takes from."""

    def __init__(
        self,
        store: dist.Store,
        layouts: Layouts,
        me: EngineRank,
        links: list[Link],
        device: torch.device,
        timeout: float,
        variable: bool,
    ):
        self._groups = _Groups(store, layouts, me, links, device, timeout)
        self._device, self._variable = device, variable

    def receive(self, version: int, parcels: list[Parcel], size_of: SizeOf) -> Iterator[tuple[Parcel, torch.Tensor]]:
        asked: deque[tuple[Parcel, dist.Work, torch.Tensor]] = deque()
        for parcel in [*parcels, *[None] * _IN_FLIGHT]:
            if parcel is not None:
                asked.append((parcel, *self._ask(parcel, size_of(parcel))))
            if asked and (parcel is None or len(asked) >= _IN_FLIGHT):
                first, work, payload = asked.popleft()
                self._groups.wait(work, f"parcel {first.number} of link {first.link.name}")
                yield first, payload

    def _ask(self, parcel: Parcel, size: int) -> tuple[dist.Work, torch.Tensor]:
        if self._variable:
            told = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._groups.wait(self._groups.transfer(parcel.link, told, sending=False), f"a size over link {parcel.link.name}")
            size = int(told)
        payload = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._groups.transfer(parcel.link, payload, sending=False), payload

    def close(self) -> None:
        self._groups.close()
