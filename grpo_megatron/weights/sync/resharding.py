"""The driver's side of a weight sync that follows a ReshardPlan (from shard to shard)."""

import contextlib
import logging
import os
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import ray

from grpo_megatron.cluster.processes import gather
from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.config.weight_sync import SyncTransport, WeightSyncConfig
from grpo_megatron.errors import UserError
from grpo_megatron.weights.sync.cost import broadcast_is_cheaper
from grpo_megatron.weights.sync.interface import Transport, WeightSource, WeightTarget
from grpo_megatron.weights.sync.object_store import ObjectStore
from grpo_megatron.weights.sync.order import Answer, Order, Setup, Task, Way
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan

logger = logging.getLogger(__name__)

_SHOWN = 5


class Resharding:
    """The transport in which trainer ranks send slices of their shards directly to engine ranks.

    Each engine rank writes the slices into its own parameters. This object runs in the driver process: it
    sends the orders and compares the checksums of both sides.
    """

    def __init__(
        self, layouts: Layouts, way: Way, config: WeightSyncConfig, folder: str, call_timeout: float
    ):
        """Compute the reshard plan, and start the key-value store through which the ranks coordinate.

        way: what carries the data.
        folder: for Way.disk, the folder for the data, which only this run uses.
        call_timeout: maximum seconds of a whole sync.
        """
        self._plan, self._call_timeout = ReshardPlan(layouts), call_timeout
        self._store = StoreServer(ray.util.get_node_ip_address(), timeout=60)
        self._setup = Setup(
            layouts,
            way,
            self._store.address,
            config.bucket_bytes,
            config.timeout,
            folder=folder,
            delta=config.delta,
        )
        self._number, self._delivered = 0, None
        self._clear_folder()  # a killed run of the same name may have left files

    def describe(self, target: WeightTarget) -> list[str]:
        """Compare the shapes and dtypes of the engines' parameters with the plan.

        Return one sentence for each difference; empty if this transport can be used. It must be called before
        any other method, and between `begin_update` and `end_update` of the engines.
        """
        shapes, found, dtypes = self._plan.engine_shapes, [], {}
        planned = {entry.engine: entry.engine_dtype for entry in self._plan.entries if entry.engine_dtype}
        for me, answer in self._asked(target, Task.describe).items():
            have = answer.parameters
            dtypes |= {name: dtype for name, (_, dtype) in have.items() if name in shapes}
            found += [
                f"{me} has {name} of shape {have[name][0] if name in have else 'none'}, "
                f"planned {shapes.get(name, 'none')}"
                for name in sorted(shapes.keys() | have.keys())
                if name not in have or have[name][0] != shapes.get(name)
            ]
            found += [
                f"{me} has {name} in {have[name][1]}, planned {dtype}"
                for name, dtype in planned.items()
                if name in have and have[name][1] != dtype
            ]
        self._setup = replace(self._setup, dtypes=tuple(sorted(dtypes.items(), key=lambda item: item[0])))
        return found

    def _asked(self, target: WeightTarget, task: Task) -> dict[EngineRank, Answer]:
        order = self._order(task, version=0)
        answers = gather(
            dict(enumerate(target.sync_order(order))), target.processes, "weight sync", self._call_timeout
        )
        return _by_rank(answers.values())

    def _order(self, task: Task, version: int) -> Order:
        self._number += 1
        return Order(task, self._number, self._setup, full=self._delivered != version - 1)

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        return self._run(Task.transfer, source, target, version)

    def verify(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        """Check that the engines have the trainer's weights, by sending only digests (checksums).

        version: version of the weights. Return the same metrics as `transfer`.
        Raises RuntimeError if the weights differ.
        """
        return self._run(Task.verify, source, target, version)

    def _run(self, task: Task, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        order = self._order(task, version)
        self._delivered = None  # if the transfer fails, it is unknown which engine has which weights
        references = [*source.sync_order(order), *target.sync_order(order)]
        processes = [*source.processes, *target.processes]
        answers = list(
            gather(dict(enumerate(references)), processes, "weight sync", self._call_timeout).values()
        )
        sent, received = answers[: len(source.processes)], _by_rank(answers[len(source.processes) :])
        self._compare(sent, received)
        self._delivered = version
        return _measured(sent, list(received.values()))

    def _compare(self, sent: list[Answer], received: dict[EngineRank, Answer]) -> None:
        """Raise RuntimeError unless each engine rank has the weights that the trainer ranks sent to it.

        sent: one report per trainer rank.
        received: the report of each engine rank.
        """
        wrong = [f"{name} at {me}" for me, answer in received.items() for name in answer.wrong]
        if wrong:
            more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
            raise RuntimeError(
                "after the weight sync the digest differs from the trainer's of "
                f"{', '.join(wrong[:_SHOWN])}{more}; the engines do not have the trainer's weights and may "
                "not serve"
            )
        seals = {link: seal for answer in sent for link, seal in answer.seals.items()}
        for me, answer in received.items():
            expected = {name: seals.get(name) for name in self._links_to[me]}
            different = sorted(
                link
                for link in expected.keys() | answer.seals.keys()
                if expected.get(link) != answer.seals.get(link)
            )
            if different:
                raise RuntimeError(
                    f"{me} did not take over what the trainer sent on {', '.join(different[:_SHOWN])}"
                )

    @cached_property
    def _links_to(self) -> dict[EngineRank, list[str]]:
        """{engine rank: names of the links over which the plan sends it weights}."""
        found = {me: [] for me in self._plan.engine_ranks}
        for link in self._plan.volumes(itemsize=1):
            for me in link.receivers:
                found[me].append(link.name)
        return found

    def close(self) -> None:
        """Remove the files that the trainer ranks have written, for the case that they died before."""
        self._clear_folder()

    def _clear_folder(self) -> None:
        """Remove the files of all syncs, and then the folder if it is empty; does nothing unless Way.disk.

        Other files in it are kept, because the user chose the folder.
        """
        if self._setup.way == Way.disk:
            for left in Path(self._setup.folder).glob("sync????????"):
                shutil.rmtree(left, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(self._setup.folder)


def _by_rank(answers) -> dict[EngineRank, Answer]:
    """Return {engine rank: its answer}. answers: for each engine, the list of its ranks' answers."""
    return {
        EngineRank(e, rank): answer
        for e, of_engine in enumerate(answers)
        for rank, answer in enumerate(of_engine)
    }


def _measured(sent: list[Answer], received: list[Answer]) -> dict[str, float]:
    """Return the metrics of a sync, {name: value}.

    They are the GB that the trainer sent and that the engines received, and for each activity the seconds of
    the slowest trainer rank and of the slowest engine rank.
    """
    seconds = {
        f"{side}_{what}_seconds": max(answer.seconds.get(what, 0.0) for answer in answers)
        for side, answers, kinds in (
            ("trainer", sent, ("pack", "digest", "all")),
            ("engine", received, ("load", "digest", "all")),
        )
        for what in kinds
    }
    sent_gb, received_gb = (sum(answer.bytes for answer in answers) / 1e9 for answers in (sent, received))
    return {"sent_gb": sent_gb, "received_gb": received_gb, **seconds}


def chosen_way(config: WeightSyncConfig, layouts: Layouts) -> tuple[Way, Layouts]:
    """Choose what carries the parcels. Returns (way, layouts): the layouts are adapted to the way.

    With `weight_sync.transport=auto` it is shared memory if every engine node has a trainer rank, else
    process groups. Process groups broadcast if the cost model in weights.sync.cost says that this is faster.
    Otherwise they send point to point. Raises UserError if shared memory is configured but an engine node has
    no trainer rank.
    """
    alone = sorted(set(layouts.engine_nodes) - set(layouts.rank_nodes))
    automatic = Way.groups if alone else Way.shared_memory
    way = automatic if config.transport == SyncTransport.auto else Way(config.transport.value)
    if way == Way.shared_memory and alone:
        raise UserError(
            "weight_sync.transport=shared_memory needs a rank of the trainer on every engine's node, and "
            f"there is none on {', '.join(alone[:_SHOWN])}; use groups, or auto"
        )
    multicast = way != Way.groups or broadcast_is_cheaper(layouts, config.bucket_bytes)
    return way, replace(layouts, multicast=multicast, within_nodes=way == Way.shared_memory)


class Checked:
    """A transport that chooses between `Resharding` and full tensors (`ObjectStore`) at the first sync.

    Only then can the engines be asked for their parameters. If these are as the reshard plan expects, it uses
    `Resharding`. If not, weight_sync.transport=auto falls back to full tensors and tells the user. Every
    other setting raises UserError.
    """

    def __init__(
        self,
        resharding: Resharding,
        full: ObjectStore,
        transport: SyncTransport,
        not_full: str,
    ):
        """Keep both transports until the first sync.

        transport: the setting weight_sync.transport.
        not_full: reason why these engines cannot load full tensors, for an error message; empty if they can.
        """
        self._resharding, self._full, self._transport, self._not_full = (
            resharding,
            full,
            transport,
            not_full,
        )
        self._chosen: Transport | None = None

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        if self._chosen is None:
            self._chosen = self._choose(target)
        return self._chosen.transfer(source, target, version)

    def _choose(self, target: WeightTarget) -> Transport:
        different = self._resharding.describe(target)
        if not different:
            return self._resharding
        what = (
            f"the engines' parameters are not those of the weight map ({len(different)} differ: "
            f"{'; '.join(different[:_SHOWN])})"
        )
        if self._transport != SyncTransport.auto or self._not_full:
            reason = self._not_full or "use object_store, or auto"
            raise UserError(f"weight_sync.transport={self._transport.value}: {what}; {reason}")
        logger.warning(
            "weights travel as full tensors through the object store, and their digests are not compared: "
            f"{what}"
        )
        return self._full

    def close(self) -> None:
        self._resharding.close()


def _not_full(layouts: Layouts) -> str:
    if layouts.spread:
        return "an engine over several nodes takes no others"
    return "an engine in FP8 takes no others" if layouts.engine.fp8 else ""


def make_transport(config: WeightSyncConfig, layouts: Layouts, folder: str, call_timeout: float) -> Transport:
    """Return the transport of a run, as weight_sync.transport configures it.

    layouts: how trainer and engines divide the model, and the nodes that they are on.
    folder: the folder of this run below weight_sync.folder, for the transport `disk`.
    call_timeout: maximum seconds of a whole sync.
    Raises UserError if the configured transport cannot reach the engines.
    """
    full = ObjectStore(ReshardPlan(layouts).entries, config.bucket_bytes)
    if config.transport == SyncTransport.object_store:
        if layouts.spread:
            raise UserError(
                "weight_sync.transport=object_store does not reach the ranks of an engine over several "
                "nodes; use groups, or auto"
            )
        return full
    way, layouts = chosen_way(config, layouts)
    return Checked(
        Resharding(layouts, way, config, folder, call_timeout),
        full,
        config.transport,
        _not_full(layouts),
    )
