"""Transport of packed weights (parcels) over process groups: NCCL between GPUs, gloo between CPUs.

There are three kinds of process groups:

- Point to point: one group per pipeline stage, with the ranks of the stage and all engine ranks.
- Multicast: one group per link, in which the sender broadcasts.
- Relay: one group of all trainer ranks, which brings parcels to the relay rank on the receivers' node. It is
  used where engine ranks get all parcels from trainer ranks on their own node (Layouts.within_nodes).

Pipeline stages and replicas send in parallel. A sender packs the next parcel while the previous ones are in
flight.
"""

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from grpo_megatron.weights.sync.messages import SyncKind, SyncSetup
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, Link
from grpo_megatron.weights.sync.transports.base import PayloadBytes

_IN_FLIGHT = 2
Member = int | EngineRank  # a trainer rank, or an engine rank


class _Route(NamedTuple):
    """The process group through which a sender reaches its receivers, and the target within the group.

    name: name of the group, the same in all processes.
    members: trainer ranks and engine ranks of the group. The index of a member is its rank in the group.
    target: the member that the sender sends to. None: the sender broadcasts to all members.
    """

    name: str
    members: list[Member]
    target: Member | None


def _route(layouts: Layouts, link: Link) -> _Route:
    if layouts.within_nodes:
        return _Route("relay", list(range(layouts.sizes.world_size)), link.relay_rank)
    if layouts.multicast:
        return _Route(link.name, [link.sender, *link.receivers], None)
    per_stage = layouts.sizes.world_size // layouts.sizes.pp
    return _stage(layouts, link.sender // per_stage, link.receivers[0])


def _stage(layouts: Layouts, stage: int, target: Member | None) -> _Route:
    per_stage = layouts.sizes.world_size // layouts.sizes.pp
    engines = [
        EngineRank(engine, rank) for engine in range(layouts.num_engines) for rank in range(layouts.engine.tp)
    ]
    return _Route(f"stage{stage}", [*range(stage * per_stage, (stage + 1) * per_stage), *engines], target)


def _groups_of(layouts: Layouts, me: Member, links: list[Link]) -> dict[str, list[Member]]:
    """Return {name: members} of each process group that process `me` must join.

    Members with which `me` exchanges no data are listed too, because all members must create a group
    together.

    me: the process, a trainer rank or an engine rank.
    links: all links (a sender with its receivers) over which `me` sends or receives.
    """
    routes = [_route(layouts, link) for link in links]
    if layouts.within_nodes:
        routes = [_Route("relay", list(range(layouts.sizes.world_size)), None)]
    elif not layouts.multicast:
        routes = [_stage(layouts, stage, None) for stage in range(layouts.sizes.pp)]
    return {route.name: route.members for route in routes if me in route.members}


class Groups:
    """The process groups of a weight sync that this process is a member of.

    The constructor creates the groups, and waits for all members of each group.

    setup: settings of the weight syncs.
    me: this process, a trainer rank or an engine rank.
    parcels: the messages of packed weights that this process sends or receives.
    device: device of the buffers that are sent or received.
    """

    def __init__(self, setup: SyncSetup, me: Member, parcels: list[Parcel], device: torch.device):
        self.device, self._layouts = device, setup.layouts
        self._timeout = timedelta(seconds=setup.timeout)
        self._places, self._groups = {}, {}
        store, links = setup.connect(), list(dict.fromkeys(parcel.link for parcel in parcels))
        # All processes create their groups in the same order. Otherwise they could deadlock.
        for name, members in sorted(_groups_of(setup.layouts, me, links).items()):
            self._places[name] = {member: place for place, member in enumerate(members)}
            self._groups[name] = self._make(dist.PrefixStore(name, store), members.index(me), len(members))

    def _make(self, store: dist.Store, rank: int, size: int):
        if self.device.type != "cuda":
            return dist.ProcessGroupGloo(store, rank, size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def transfer(self, link: Link, payload: torch.Tensor, sending: bool) -> dist.Work:
        """Start to send or receive bytes over a link. Return the operation, which `wait` waits for.

        link: a sender with its receivers. This process is one of them.
        payload: the tensor to send, or the tensor to receive into.
        sending: True in the sender's process.
        """
        route = _route(self._layouts, link)
        group, places = self._groups[route.name], self._places[route.name]
        if route.target is None:
            options = dist.BroadcastOptions()
            options.rootRank = places[link.sender]
            return group.broadcast([payload], options)
        return (
            group.send([payload], places[route.target], 0)
            if sending
            else group.recv([payload], places[link.sender], 0)
        )

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise TimeoutError(
                f"the transfer of {what} failed or took longer than {self._timeout.total_seconds():.0f} s "
                f"(weight_sync.timeout): {error}"
            ) from error
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        self._groups.clear()


class _Ring:
    """A fixed number of buffers that messages of packed weights use in turn.

    The buffers are reused, because allocating memory for a message would take as long as the copy into it.
    """

    def __init__(self, device: torch.device):
        self._device, self._buffers, self._next = (
            device,
            [torch.empty(0, dtype=torch.uint8)] * (_IN_FLIGHT + 1),
            0,
        )

    def take(self, size: int) -> torch.Tensor:
        """Return the next buffer, uint8 [size]. Its contents stay valid during the next two calls.

        The third call from now may return the same memory again.
        """
        self._next = (self._next + 1) % len(self._buffers)
        if len(self._buffers[self._next]) < size:
            self._buffers[self._next] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[self._next][:size]


class GroupSender:
    """Sends a trainer rank's packed weights to engine ranks over process groups (a base.ParcelSender).

    variable: True if messages vary in size, as with weight_sync.delta, where they have only changed weights.
        The size is then sent before each message.
    """

    def __init__(self, groups: Groups, variable: bool):
        self._groups, self._variable, self._ring = groups, variable, _Ring(groups.device)
        self._busy: deque[tuple[dist.Work, torch.Tensor, str]] = deque()

    def begin(self, sync_id: int) -> None:
        pass

    def buffer(self, size: int) -> torch.Tensor:
        while len(self._busy) >= _IN_FLIGHT:
            self._wait_for_first()
        return self._ring.take(size)

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        what = f"parcel {parcel.index} of link {parcel.link.name}"
        if self._variable:
            size = torch.tensor([len(payload)], device=self._groups.device)
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
    """The receiving side of the transport over process groups (a base.ParcelReceiver).

    variable: True if messages vary in size, as deltas do. The size is then received before each message.
    """

    def __init__(self, groups: Groups, variable: bool):
        self._groups, self._variable, self._ring = groups, variable, _Ring(groups.device)

    def receive(
        self, sync_id: int, parcels: list[Parcel], payload_bytes: PayloadBytes
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        asked: deque[tuple[Parcel, dist.Work, torch.Tensor]] = deque()
        for parcel in [*parcels, *[None] * _IN_FLIGHT]:
            if parcel is not None:
                asked.append((parcel, *self._ask(parcel, payload_bytes(parcel))))
            if asked and (parcel is None or len(asked) >= _IN_FLIGHT):
                first, work, payload = asked.popleft()
                self._groups.wait(work, f"parcel {first.index} of link {first.link.name}")
                yield first, payload

    def _ask(self, parcel: Parcel, size: int) -> tuple[dist.Work, torch.Tensor]:
        if self._variable:
            told = torch.zeros(1, dtype=torch.int64, device=self._groups.device)
            self._groups.wait(
                self._groups.transfer(parcel.link, told, sending=False),
                f"the size of a parcel of link {parcel.link.name}",
            )
            size = int(told)
        payload = self._ring.take(size)
        return self._groups.transfer(parcel.link, payload, sending=False), payload

    def close(self) -> None:
        self._groups.close()


class Relay(GroupSender):
    """The transport of packed weights between trainer ranks, over a process group of all trainer ranks.

    If trainer and engines share GPUs, an NCCL group cannot contain ranks of both. Engines then get all
    weights from trainer ranks on their own node. These trainer ranks also relay weights that come from other
    nodes. The inherited methods send this rank's messages (parcels) to relay ranks on other nodes. `take`
    receives the messages that this rank must relay to engines on its own node.
    """

    def __init__(self, setup: SyncSetup, rank: int, parcels: list[Parcel], device: torch.device):
        groups = Groups(setup, rank, parcels, device)
        super().__init__(groups, setup.delta)
        self._setup, self._receiver = setup, GroupReceiver(groups, setup.delta)

    def take(self, parcel: Parcel, kind: SyncKind) -> torch.Tensor:
        """Receive a message that this rank must relay to engines, and return its bytes, uint8 [bytes].

        parcel: layout of the message.
        kind: kind of the weight sync. It determines how many bytes are received.
        """
        payload_bytes = partial(self._setup.payload_bytes, kind=kind)
        ((_, payload),) = self._receiver.receive(0, [parcel], payload_bytes)
        return payload
