"""The reshard plan: which trainer rank sends which rectangle of which tensor to which engine ranks.

A trainer rank sends slices of its own shards directly into the fused, sharded parameters of the engine ranks.
Pipeline stages, expert-parallel ranks and replicas send in parallel. The plan follows from the parallel
layouts of trainer and engines. Every process computes its own part of the plan from the same `Layouts`, so
that no plan has to be sent.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.model.adapters import Content, adapter_entries
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.block_scaled import is_block_scaled, stacked_by_tensor
from grpo_megatron.model.engine_entries import engine_entries, engine_shapes
from grpo_megatron.model.entries import EngineLayout, Entry
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import Move, Shape, moves
from grpo_megatron.weights.sync.ranks import TrainerRanks


class EngineRank(NamedTuple):
    """A tensor-parallel rank of one engine.

    engine: index of the engine among the engines that take part in weight syncs, without lost engines.
    rank: tensor-parallel rank within the engine.
    """

    engine: int
    rank: int

    def __str__(self):
        return f"rank {self.rank} of engine {self.engine}"


class Link(NamedTuple):
    """A trainer rank and the engine ranks that receive the same bytes from it.

    sender: the trainer rank that has the bytes.
    receivers: the engine ranks.
    relay_rank: the trainer rank that hands the bytes to the receivers. It is the sender itself, except with
        `Layouts.within_nodes` if the sender is on another node than the receivers.
    """

    sender: int
    receivers: tuple[EngineRank, ...]
    relay_rank: int

    @property
    def name(self) -> str:
        """Identifier of the link's sender and receivers, for keys and file names; equal in all processes."""
        first = self.receivers[0]
        others = f"+{zlib.crc32(repr(self.receivers).encode()):08x}" if len(self.receivers) > 1 else ""
        return f"{self.sender}-{first.engine}.{first.rank}{others}"


@dataclass(frozen=True)
class Part:
    """A rectangle that is copied from a shard of a Megatron parameter into an engine's parameter.

    megatron: name of the Megatron parameter.
    engine: name of the engine's parameter.
    move: the rectangle's place in both parameters and in the HF tensor.
    """

    megatron: str
    engine: str
    move: Move


@dataclass(frozen=True)
class Layouts:
    """Description of how trainer and engines divide the model, from which the reshard plan is computed."""

    arch: Architecture
    """Architecture of the model."""
    sizes: ParallelSizes
    """Parallel sizes of the trainer."""
    engine: EngineLayout
    """Parallel layout of an engine."""
    num_engines: int
    """Number of engines."""
    multicast: bool = False
    """If True, bytes that several engines need are sent once, by a broadcast, through shared memory, or in
    a file. If False, each engine gets a separate copy, from a data-parallel replica of the trainer that is
    chosen for the engine."""
    within_nodes: bool = False
    """If True (for shared memory), engine ranks get all bytes from trainer ranks on their own node. Bytes
    from another node are first sent to a trainer rank on the engine's node, the relay rank."""
    rank_nodes: tuple[str, ...] = ()
    """Name of the node of every trainer rank; empty if everything is on one node. An engine rank gets a
    shard from a trainer rank on its own node, if one there holds the shard."""
    engine_nodes: tuple[str, ...] = ()
    """Name of the node of every engine rank, all ranks of engine 0 first; empty if everything is on one
    node."""
    content: Content = Content.merged
    """The weights that are sent."""
    lora: LoraConfig | None = None
    """Settings of the adapters. Used only with Content.adapter."""

    def node_of(self, receiver: EngineRank) -> str | None:
        """Return the name of an engine rank's node, or None if everything is on one node."""
        return (
            self.engine_nodes[receiver.engine * self.engine.tp + receiver.rank] if self.engine_nodes else None
        )


class ReshardPlan:
    """The plan of a weight sync: which trainer rank sends which rectangles of weights to which engine ranks.

    The plan covers every element of every engine rank's parameters exactly once.
    """

    def __init__(self, layouts: Layouts, transformer_engine: bool = False):
        """Prepare the plan of a weight sync: which trainer rank sends which weights to which engine ranks.

        layouts: layouts of the trainer and of the engines, and their nodes.
        transformer_engine: True if the trainer's parameters have the names of TransformerEngine's layers.

        Raises ValueError if `layouts.within_nodes` is set and an engine's node has no trainer rank.
        """
        self.layouts = layouts
        alone = set(layouts.engine_nodes) - set(layouts.rank_nodes)
        if layouts.within_nodes and alone:
            raise ValueError(
                f"there is no trainer rank on the engine nodes {sorted(alone)}, but within_nodes needs one "
                "on each"
            )
        entries = weight_map(layouts.arch, transformer_engine).values()
        if layouts.content == Content.adapter:
            entries = adapter_entries(entries, layouts.lora).values()
        self._exported = [entry for entry in entries if entry.exported]
        self.entries = engine_entries(self._exported, layouts.engine)
        self._ranks = TrainerRanks(layouts.sizes, layouts.arch.num_layers)

    @property
    def engine_ranks(self) -> list[EngineRank]:
        engines, tp = self.layouts.num_engines, self.layouts.engine.tp
        return [EngineRank(engine, rank) for engine in range(engines) for rank in range(tp)]

    @cached_property
    def engine_shapes(self) -> dict[str, Shape]:
        """{name of an engine's parameter: its shape on each engine rank}."""
        return engine_shapes(self.entries, self.layouts.engine)

    def outgoing(self, rank: int) -> dict[Link, list[Part]]:
        """Return what a trainer rank sends from its own shards: {link: rectangles that are sent over it}.

        A link is a trainer rank with the engine ranks that receive the same bytes from it.
        """
        return self._collected(self._links(sender=rank))

    def relayed(self, rank: int) -> dict[Link, list[Part]]:
        """Return what a trainer rank relays for senders on other nodes to engine ranks on its own node.

        The result is {link: rectangles that are sent over it}. A link is the sending trainer rank with the
        engine ranks that receive the same bytes from it.
        """
        links = self._collected(self._links(relay_rank=rank)) if self.has_relays else {}
        return {link: parts for link, parts in links.items() if link.sender != rank}

    def incoming(self, receiver: EngineRank) -> dict[Link, list[Part]]:
        """Return what an engine rank receives: {link: rectangles that are sent to it over the link}.

        A link is a trainer rank with the engine ranks that receive the same bytes from it.
        """
        return self._collected(self._links(receiver=receiver))

    def quantised(self, rank: int) -> dict[str, list[Move]]:
        """Return how a trainer rank reorders the rows of weights before it quantises them for FP8 engines.

        The result is {Megatron name: copies from the rank's shard into the reordered shard}, for each weight
        that is quantised. It is empty if the engines do not use FP8. In the reordered shard, the rows of each
        HF tensor are adjacent, because a block that shares a scale must not mix HF tensors.
        """
        found = {}
        for entry in self._exported if self.layouts.engine.fp8 else ():
            parts = self._ranks.shards(entry)
            shard = next((shard for shard in range(parts) if rank in self._ranks.holders(entry, shard)), None)
            if is_block_scaled(entry) and shard is not None:
                pieces = entry.megatron_pieces(parts, shard)
                found[entry.megatron] = moves(pieces, stacked_by_tensor(pieces))
        return found

    def volumes(self, itemsize: int) -> dict[Link, int]:
        """Return {link: bytes sent over it} for the whole plan, for the cost model and for checks.

        A link is a trainer rank with the engine ranks that receive the same bytes from it. The rectangles are
        not listed, so the sums can be computed even for thousands of ranks.

        itemsize: bytes of an element of the engines' dtype.
        """
        found: dict[Link, int] = defaultdict(int)
        for index, entry in enumerate(self.entries):
            for shard in range(self._ranks.shards(entry)):
                sizes: dict[tuple[int, ...], int] = defaultdict(int)
                for move, ranks in self._needed(entry, shard, None).items():
                    sizes[tuple(ranks)] += move.numel * (
                        entry.engine_dtype.itemsize if entry.engine_dtype else itemsize
                    )
                for ranks, size in sizes.items():
                    for link in self._links_to(self._senders[index, shard], ranks):
                        found[link] += size
        return found

    @staticmethod
    def _collected(links: Iterator[tuple[Link, Part]]) -> dict[Link, list[Part]]:
        found = defaultdict(list)
        for link, part in links:
            found[link].append(part)
        return dict(found)

    def _links(
        self, sender: int | None = None, receiver: EngineRank | None = None, relay_rank: int | None = None
    ) -> Iterator[tuple[Link, Part]]:
        """Yield (link, rectangle sent over it) for the whole plan, or for the selected links only.

        A link is a trainer rank with the engine ranks that receive the same bytes from it. An argument that
        is not None selects the links with this sender, this receiver or this relay rank.
        """
        for index, entry in enumerate(self.entries):
            for shard in range(self._ranks.shards(entry)):
                senders = self._senders[index, shard]
                if sender is not None:
                    senders = {sender: senders[sender]} if sender in senders else {}
                if not senders:
                    continue
                for move, ranks in self._needed(entry, shard, receiver).items():
                    part = Part(entry.megatron, entry.engine, move)
                    for link in self._links_to(senders, ranks, relay_rank):
                        if receiver is None or receiver in link.receivers:
                            yield link, part

    def _links_to(
        self, senders: dict[int, tuple[int, ...]], tp_ranks: Sequence[int], relay_rank: int | None = None
    ) -> Iterator[Link]:
        """Yield the links over which a rectangle of weights is sent to the engine ranks that need it.

        A link is a trainer rank with the engine ranks that receive the same bytes from it.

        senders: {trainer rank that sends the rectangle: the groups of engine ranks that it sends to, as
            indices into `_receiver_groups`}.
        tp_ranks: tensor-parallel ranks, within each engine, that need the rectangle.
        relay_rank: yield only the links with this relay rank; None: all links.
        """
        for sender, groups in senders.items():
            for group in groups:
                if relay_rank is None or self._may_relay(relay_rank, group):
                    for receivers in self._receivers(group, tp_ranks):
                        link = Link(sender, receivers, self._relay_rank(sender, receivers[0]))
                        if relay_rank in (None, link.relay_rank):
                            yield link

    def _may_relay(self, rank: int, group: int) -> bool:
        """Return True if a trainer rank may relay weights to a group of engine ranks, as it is on their node.

        group: index of the group in `_receiver_groups`.
        """
        layouts = self.layouts
        return layouts.node_of(self._receiver_groups[group][0]) == layouts.rank_nodes[rank]

    def _receivers(self, group: int, tp_ranks: Sequence[int]) -> Iterator[tuple[EngineRank, ...]]:
        """Yield the sets of engine ranks in a group that receive a rectangle of weights together.

        With multicast, all ranks of the group that need the rectangle receive it together. Otherwise each of
        these ranks receives its own copy.

        group: index of the group in `_receiver_groups`.
        tp_ranks: tensor-parallel ranks, within each engine, that need the rectangle.
        """
        everyone = tuple(one for one in self._receiver_groups[group] if one.rank in tp_ranks)
        if self.layouts.multicast:
            yield from [everyone] if everyone else []
        else:
            yield from ((one,) for one in everyone)

    def _relay_rank(self, sender: int, receiver: EngineRank) -> int:
        layouts = self.layouts
        if not layouts.within_nodes or not layouts.rank_nodes:
            return sender
        node = layouts.node_of(receiver)
        if layouts.rank_nodes[sender] == node:
            return sender
        there = self._ranks_on[node]
        return there[(receiver.engine * layouts.engine.tp + receiver.rank) % len(there)]

    @property
    def has_relays(self) -> bool:
        """True if some trainer ranks pass on weights from trainer ranks on other nodes to engine ranks."""
        return self.layouts.within_nodes and len(set(self.layouts.rank_nodes)) > 1

    @cached_property
    def _ranks_on(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        for rank, node in enumerate(self.layouts.rank_nodes):
            found[node].append(rank)
        return found

    @cached_property
    def _receiver_groups(self) -> list[tuple[EngineRank, ...]]:
        """Groups of engine ranks. All ranks of a group get a given shard from the same trainer rank.

        Without multicast, a group is the ranks of one engine on one node. With multicast and `within_nodes`,
        a group is all engine ranks on one node. With multicast alone, all engine ranks are one group.
        """
        layouts, found = self.layouts, defaultdict(list)
        for one in self.engine_ranks:
            node = layouts.node_of(one) if layouts.within_nodes or not layouts.multicast else None
            found[node, None if layouts.multicast else one.engine].append(one)
        # Sorted by the position of the node within its engine: first the groups on the engines' first nodes,
        # then those on the second nodes. An expert is on only one of an engine's nodes. In this order, all
        # trainer ranks that hold the expert get a share of the engines to send it to.
        return sorted(
            (tuple(ranks) for ranks in found.values()), key=lambda ranks: (ranks[0].rank, ranks[0].engine)
        )

    def _needed(self, entry: Entry, shard: int, receiver: EngineRank | None) -> dict[Move, list[int]]:
        """Return {rectangle of a trainer's shard: tensor-parallel ranks, within each engine, that need it}.

        If ranks need the same rectangle at different positions of their parameters, it is listed once for
        each position.

        entry: the parameter, with its HF names and its layouts in trainer and engine.
        shard: index of the trainer's shard.
        receiver: return only the rectangles that this engine rank needs; None: all rectangles.
        """
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
        """{shard: {trainer rank that sends the shard: groups of engine ranks to which it sends the shard}}.

        A shard is identified by (index of the parameter in `entries`, index of the shard), and a group by its
        index in `_receiver_groups`. If several ranks can send the shard to a group (`_eligible_senders`), the
        rank with the fewest elements to send so far is chosen, to balance the load. The elements are counted
        separately for each set of candidates.
        """
        load: dict[tuple[int, ...], dict[int, int]] = {}
        chosen = {}
        for index, entry in enumerate(self.entries):
            shards = self._ranks.shards(entry)
            for shard in range(shards):
                holders, goes_to = self._ranks.holders(entry, shard), defaultdict(tuple)
                for group in range(len(self._receiver_groups)):
                    eligible = self._eligible_senders(holders, group)
                    loads = load.setdefault(eligible, dict.fromkeys(eligible, 0))
                    sender = min(eligible, key=loads.__getitem__)
                    loads[sender] += entry.numel // shards
                    goes_to[sender] += (group,)
                chosen[index, shard] = dict(goes_to)
        return chosen

    def _eligible_senders(self, holders: tuple[int, ...], group: int) -> tuple[int, ...]:
        """Return the trainer ranks that may send a shard to a group of engine ranks.

        If the group is on one node, and some holders of the shard are on this node, these holders may send.
        Otherwise every n-th holder may send, where n is the number of groups. The holder to begin with
        depends on the group, so that different groups have different senders.

        holders: the trainer ranks that hold the shard.
        group: index of the group in `_receiver_groups`.
        """
        rank_nodes, engine_nodes = self.layouts.rank_nodes, self.layouts.engine_nodes
        nodes = (
            {self.layouts.node_of(one) for one in self._receiver_groups[group]}
            if rank_nodes and engine_nodes
            else set()
        )
        if len(nodes) == 1:
            near = tuple(rank for rank in holders if rank_nodes[rank] in nodes)
            if near:
                return near
        return holders[group % len(holders) :: len(self._receiver_groups)]
