"""Who sends which rectangle of which tensor to whom, from the two layouts alone.

A rank of the trainer sends slices of its own shards straight into the fused, sharded parameters of the engines' ranks. Nobody relays
what it does not own, and stages, expert-parallel ranks and replicas send side by side. Every process derives its own part of the plan
from the same small description, so that no plan is sent around.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.block_scaled import engine_entries, is_block_scaled, stacked_by_tensor
from grpo_megatron.model.entries import EngineLayout, Entry, engine_shapes
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import Move, Shape, moves
from grpo_megatron.weights.sync.ranks import TrainerRanks


class EngineRank(NamedTuple):
    """A tensor-parallel rank of one engine."""

    engine: int
    rank: int

    def __str__(self):
        return f"rank {self.rank} of engine {self.engine}"


class Link(NamedTuple):
    """A rank of the trainer, and the engines' ranks that all take the same bytes from it.

    carrier: the rank of the trainer that hands them over; another one than the sender where that must be on the receivers' node.
    """

    sender: int
    receivers: tuple[EngineRank, ...]
    carrier: int

    @property
    def name(self) -> str:
        """The same in every process."""
        first = self.receivers[0]
        others = f"+{zlib.crc32(repr(self.receivers).encode()):08x}" if len(self.receivers) > 1 else ""
        return f"{self.sender}-{first.engine}.{first.rank}{others}"


@dataclass(frozen=True)
class Part:
    """A rectangle on its way from the Megatron parameter `megatron` into the engine's parameter `engine`."""

    megatron: str
    engine: str
    move: Move


@dataclass(frozen=True)
class Layouts:
    """All that a plan follows from.

    multicast: bytes that several engines need alike leave the trainer once, for all of them (a broadcast, shared memory, a file);
    else each engine gets its own from the replica that serves it. within_nodes: they are handed over within a node, to all engines
    there. rank_nodes, engine_nodes: the node of every rank, and of every engine's ranks, one engine after the other; a replica on
    their own node serves them. Empty: all are on one.
    """

    arch: Architecture
    sizes: ParallelSizes
    engine: EngineLayout
    num_engines: int
    multicast: bool = False
    within_nodes: bool = False
    rank_nodes: tuple[str, ...] = ()
    engine_nodes: tuple[str, ...] = ()

    def node_of(self, receiver: EngineRank) -> str | None:
        """None where nodes are not given."""
        return (
            self.engine_nodes[receiver.engine * self.engine.tp + receiver.rank] if self.engine_nodes else None
        )

    @property
    def spread(self) -> bool:
        """Whether an engine is on several nodes."""
        tp = self.engine.tp
        return any(
            len(set(self.engine_nodes[first : first + tp])) > 1
            for first in range(0, len(self.engine_nodes), tp)
        )


class ReshardPlan:
    """Every element of every engine rank's parameters, exactly once."""

    def __init__(self, layouts: Layouts, transformer_engine: bool = False):
        """transformer_engine: the trainer's layers are, and have names of, TransformerEngine."""
        self.layouts = layouts
        alone = set(layouts.engine_nodes) - set(layouts.rank_nodes)
        if layouts.within_nodes and alone:
            raise ValueError(
                f"no rank of the trainer is on the engines' nodes {sorted(alone)}, to hand weights over there"
            )
        entries = weight_map(layouts.arch, transformer_engine).values()
        self._exported = [entry for entry in entries if entry.exported]
        self.entries = engine_entries(self._exported, layouts.engine)
        self._ranks = TrainerRanks(layouts.sizes, layouts.arch.num_layers)

    @property
    def engine_ranks(self) -> list[EngineRank]:
        engines, tp = self.layouts.num_engines, self.layouts.engine.tp
        return [EngineRank(engine, rank) for engine in range(engines) for rank in range(tp)]

    @cached_property
    def engine_shapes(self) -> dict[str, Shape]:
        """{engine's parameter: its shape on each rank}."""
        return engine_shapes(self.entries, self.layouts.engine)

    def outgoing(self, rank: int) -> dict[Link, list[Part]]:
        """What a rank of the trainer sends; all of it lies in parameters of its own."""
        return self._collected(self._links(sender=rank))

    def carried(self, rank: int) -> dict[Link, list[Part]]:
        """What a rank of the trainer hands over on its node for ranks of other nodes."""
        links = self._collected(self._links(carrier=rank)) if self.has_carriers else {}
        return {link: parts for link, parts in links.items() if link.sender != rank}

    def incoming(self, receiver: EngineRank) -> dict[Link, list[Part]]:
        """What an engine's rank takes."""
        return self._collected(self._links(receiver=receiver))

    def quantised(self, rank: int) -> dict[str, list[Move]]:
        """{Megatron name of what a rank of the trainer quantises: its shard's rectangles, into their order in model.block_scaled}."""
        found = {}
        for entry in self._exported if self.layouts.engine.fp8 else ():
            parts = self._ranks.shards(entry)
            shard = next((shard for shard in range(parts) if rank in self._ranks.holders(entry, shard)), None)
            if is_block_scaled(entry) and shard is not None:
                pieces = entry.megatron_pieces(parts, shard)
                found[entry.megatron] = moves(pieces, stacked_by_tensor(pieces))
        return found

    def volumes(self, itemsize: int) -> dict[Link, int]:
        """{link: bytes that go over it}, of the whole plan; for layouts too large to list every part of. itemsize: of the
        engine's dtype."""
        found: dict[Link, int] = defaultdict(int)
        for number, entry in enumerate(self.entries):
            for shard in range(self._ranks.shards(entry)):
                sizes: dict[tuple[int, ...], int] = defaultdict(int)
                for move, ranks in self._needed(entry, shard, None).items():
                    sizes[tuple(ranks)] += move.numel * (
                        entry.engine_dtype.itemsize if entry.engine_dtype else itemsize
                    )
                for holder, audiences in self._senders[number, shard].items():
                    for ranks, size in sizes.items():
                        for receivers in self._receivers(audiences, ranks):
                            found[Link(holder, receivers, self._carrier(holder, receivers[0]))] += size
        return found

    @staticmethod
    def _collected(links: Iterator[tuple[Link, Part]]) -> dict[Link, list[Part]]:
        found = defaultdict(list)
        for link, part in links:
            found[link].append(part)
        return dict(found)

    def _links(
        self, sender: int | None = None, receiver: EngineRank | None = None, carrier: int | None = None
    ) -> Iterator[tuple[Link, Part]]:
        """sender, receiver, carrier: only what leaves, reaches, or is handed over by this one."""
        for number, entry in enumerate(self.entries):
            for shard in range(self._ranks.shards(entry)):
                senders = self._senders[number, shard]
                if sender is not None and sender not in senders:
                    continue
                for move, ranks in self._needed(entry, shard, receiver).items():
                    part = Part(entry.megatron, entry.engine, move)
                    for holder, audiences in senders.items():
                        if sender is None or holder == sender:
                            for receivers in self._receivers(self._served_by(carrier, audiences), ranks):
                                link = Link(holder, receivers, self._carrier(holder, receivers[0]))
                                if (receiver is None or receiver in receivers) and carrier in (
                                    None,
                                    link.carrier,
                                ):
                                    yield link, part

    def _served_by(self, carrier: int | None, audiences: tuple[int, ...]) -> tuple[int, ...]:
        """Those on the carrier's node, where all that it hands over goes."""
        if carrier is None:
            return audiences
        layouts = self.layouts
        return tuple(
            a for a in audiences if layouts.node_of(self._audiences[a][0]) == layouts.rank_nodes[carrier]
        )

    def _receivers(
        self, audiences: tuple[int, ...], ranks: Sequence[int]
    ) -> Iterator[tuple[EngineRank, ...]]:
        for audience in audiences:
            everyone = tuple(one for one in self._audiences[audience] if one.rank in ranks)
            if self.layouts.multicast:
                yield from [everyone] if everyone else []
            else:
                yield from ((one,) for one in everyone)

    def _carrier(self, sender: int, receiver: EngineRank) -> int:
        layouts = self.layouts
        if not layouts.within_nodes or not layouts.rank_nodes:
            return sender
        node = layouts.node_of(receiver)
        if layouts.rank_nodes[sender] == node:
            return sender
        there = self._ranks_on[node]
        return there[(receiver.engine * layouts.engine.tp + receiver.rank) % len(there)]

    @property
    def has_carriers(self) -> bool:
        """Whether parcels may go through another rank of the trainer than the one that sends them."""
        return self.layouts.within_nodes and len(set(self.layouts.rank_nodes)) > 1

    @cached_property
    def _ranks_on(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        for rank, node in enumerate(self.layouts.rank_nodes):
            found[node].append(rank)
        return found

    @cached_property
    def _audiences(self) -> list[tuple[EngineRank, ...]]:
        """Ranks of engines that are served together: of one engine on one node; with multicast all on a node, or all."""
        layouts, found = self.layouts, defaultdict(list)
        for one in self.engine_ranks:
            node = layouts.node_of(one) if layouts.within_nodes or not layouts.multicast else None
            found[node, None if layouts.multicast else one.engine].append(one)
        # Those of the engines' first nodes, then those of the second ones: an expert is on one of an engine's nodes, and all of its
        # holders shall send it to some engines.
        return sorted(
            (tuple(ranks) for ranks in found.values()), key=lambda ranks: (ranks[0].rank, ranks[0].engine)
        )

    def _needed(self, entry: Entry, shard: int, receiver: EngineRank | None) -> dict[Move, list[int]]:
        """{rectangle of this shard: the ranks of an engine that need it, all in the same place}; of what the receiver needs."""
        layout, parts = self.layouts.engine, self._ranks.shards(entry)
        source, needed = entry.megatron_pieces(parts, shard), defaultdict(list)
        for rank in range(layout.tp):
            for move in moves(source, entry.engine_pieces(layout, rank)):
                needed[move].append(rank)
        return (
            needed
            if receiver is None
            else {move: ranks for move, ranks in needed.items() if receiver.rank in ranks}
        )

    @cached_property
    def _senders(self) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
        """{(entry, shard): {replica that sends it: the audiences it goes to}}.

        Each time the replica that has the least to send so far, of those that serve the audience.
        """
        load: dict[tuple[int, ...], dict[int, int]] = {}
        chosen = {}
        for number, entry in enumerate(self.entries):
            shards = self._ranks.shards(entry)
            for shard in range(shards):
                holders, goes_to = self._ranks.holders(entry, shard), defaultdict(tuple)
                for audience in range(len(self._audiences)):
                    serving = self._serving(holders, audience)
                    loads = load.setdefault(serving, dict.fromkeys(serving, 0))
                    sender = min(serving, key=loads.__getitem__)
                    loads[sender] += entry.numel // shards
                    goes_to[sender] += (audience,)
                chosen[number, shard] = dict(goes_to)
        return chosen

    def _serving(self, holders: tuple[int, ...], audience: int) -> tuple[int, ...]:
        """The replicas that send to this audience: those on its node if there are any, else an equal share of all."""
        rank_nodes, engine_nodes = self.layouts.rank_nodes, self.layouts.engine_nodes
        nodes = (
            {self.layouts.node_of(one) for one in self._audiences[audience]}
            if rank_nodes and engine_nodes
            else set()
        )
        if len(nodes) == 1:
            near = tuple(rank for rank in holders if rank_nodes[rank] in nodes)
            if near:
                return near
        return holders[audience % len(holders) :: len(self._audiences)]
