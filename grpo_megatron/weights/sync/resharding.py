"""The driver's side of a weight sync, in which trainer ranks send their shards directly to engine ranks."""

import contextlib
import logging
import os
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from grpo_megatron.cluster.processes import Calls, Process, ProcessDied, gather, outcomes
from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.config.weight_sync import Transport, WeightSyncConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.model.adapters import Content
from grpo_megatron.weights.sync.cost import broadcast_is_cheaper
from grpo_megatron.weights.sync.interface import EnginesLost, WeightSource, WeightTarget
from grpo_megatron.weights.sync.messages import (
    SyncCommand,
    SyncKind,
    SyncReport,
    SyncSetup,
    parameter_differences,
    sync_metrics,
)
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.transports.base import ABANDONED

logger = logging.getLogger(__name__)

_SHOWN = 5
# Maximum seconds until all processes have ended a sync in which one has died.
_ABANDON_SECONDS = 60.0


class Resharding:
    """The driver's part of a weight sync, which sends commands to all ranks and compares their checksums.

    In the sync, trainer ranks send slices of their shards directly to engine ranks. Each engine rank writes
    the slices into its own parameters.
    """

    def __init__(
        self,
        layouts: Layouts,
        config: WeightSyncConfig,
        folder: str,
        call_timeout: float,
        loads_base: bool = True,
    ):
        """Compute the reshard plan, and start the key-value store through which the ranks coordinate.

        Files that an earlier run has left in `folder` are deleted.

        layouts: how trainer and engines divide the model, and the nodes that they are on.
        config: the section weight_sync of the configuration.
        folder: folder for the files of the transport `disk`. No other run may use it.
        call_timeout: maximum seconds of a whole sync.
        loads_base: for Content.adapter: True if engines load the base (the weights to which adapters belong)
            from the checkpoint, so that only its digests are compared. False to send the base once.
        Raises UserError if the configured transport cannot reach the engines.
        """
        self._config, self._folder, self._call_timeout = config, folder, call_timeout
        self._sync_id, self._layouts, self._loads_base = 0, layouts, loads_base
        # Engines of the plan, as in WeightTarget.members.
        self._members = tuple((index, 0) for index in range(layouts.num_engines))
        self._with_base: set[tuple[int, int]] = set()  # engines that have the base, as in `members`
        self._store, self._num_plans = StoreServer(ray.util.get_node_ip_address(), timeout=60), 0
        self._plan_for(layouts)
        self._clear_folder()  # a killed run of the same name may have left files

    def _plan_for(self, layouts: Layouts) -> None:
        """Compute a new plan of which trainer rank sends what to which engine rank, and new settings.

        In the next sync, all ranks connect anew, the engines' parameters are checked again, and all weights
        are sent instead of a delta.

        layouts: how trainer and engines divide the model, and the nodes that they are on.
        """
        transport, layouts = choose_transport(self._config, layouts)
        self._plan = ReshardPlan(layouts)
        self._num_plans += 1
        self._setup = SyncSetup(
            layouts,
            transport,
            self._store.address,
            self._config.bucket_bytes,
            self._config.timeout,
            folder=self._folder,
            delta=self._config.delta,
            plan=self._num_plans,
        )
        self._delivered = None
        self.__dict__.pop("_links_to", None)

    def _follow(self, target: WeightTarget) -> None:
        """Compute a new reshard plan if engines were lost, added or restarted since the last one.

        target: the engines.
        """
        if self._members != target.members:
            nodes = target.nodes if self._layouts.engine_nodes else ()
            self._plan_for(replace(self._layouts, num_engines=len(target.members), engine_nodes=nodes))
            self._members = target.members

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        """Transfer all weights from the trainer (`source`) to the engines (`target`), and verify them.

        The weights are verified by digests (checksums). Return metrics of the sync, such as {"sent_gb": 15.2,
        "engine_load_seconds": 0.8}. The caller must have called `target.begin_update`, and calls
        `target.end_update` afterwards. If some but not all engines have wrong weights after the transfer,
        the wrong engines are reported to `target.lost`, and no error is raised here.

        version: version number of the trainer's weights, see WeightSync.version.

        Raises:

        - UserError if the engines' parameters differ from the plan in name, shape or dtype.
        - RuntimeError if all engines have wrong weights after the transfer, or if a process reports an error.
        - EnginesLost if only engines have died. Dead engines are reported to `target.lost`. The transfer must
          be repeated, because it is unknown which of the other engines have the weights.
        - ProcessDied if a trainer rank has died, or if an engine has died and the sync could not be ended in
          the other processes. Collective calls, which some transports use, cannot be ended.
        - ProcessLost if the sync takes longer than `call_timeout`.
        """
        return self._run(SyncKind.transfer, source, target, version)

    def verify(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        """Check that the engines have the trainer's weights, by sending only digests (checksums).

        Metrics, errors and the handling of engines with wrong weights are the same as in `transfer`.

        version: version number of the trainer's weights, see WeightSync.version.
        """
        return self._run(SyncKind.verify, source, target, version)

    def _run(
        self, kind: SyncKind, source: WeightSource, target: WeightTarget, version: int
    ) -> dict[str, float]:
        self._follow(target)
        if self._layouts.content == Content.adapter and not self._with_base.issuperset(target.members):
            self._share_base(source, target, version)
        return self._exchange(kind, source, target, version)

    def _share_base(self, source: WeightSource, target: WeightTarget, version: int) -> None:
        """Check that the engines have the base, the weights that the trainer's adapters belong to.

        If engines do not load the base themselves, it is sent. Engines keep it until they are started again.
        """
        adapter = self._setup.layouts
        self._plan_for(replace(adapter, content=Content.base))
        try:
            kind = SyncKind.verify if self._loads_base else SyncKind.transfer
            self._exchange(kind, source, target, version)
        finally:
            self._plan_for(adapter)
        self._with_base |= set(target.members)

    def _exchange(
        self, kind: SyncKind, source: WeightSource, target: WeightTarget, version: int
    ) -> dict[str, float]:
        """Make all ranks carry out a sync of the current plan. Compare checksums, and return the metrics."""
        if not self._setup.dtypes:
            self._check_parameters(target)
        command = self._command(kind, version)
        self._delivered = None  # if the transfer fails, it is unknown which engine has which weights
        reports = self._reports(source.send_weights(command), source.processes, command, target)
        sent, received = reports[: len(source.processes)], _by_rank(reports[len(source.processes) :])
        self._check(sent, received, target)
        self._delivered = version
        return sync_metrics(sent, list(received.values()))

    def _check(
        self, sent: list[SyncReport], received: dict[EngineRank, SyncReport], target: WeightTarget
    ) -> None:
        """Compare the checksums of all engines with the trainer's. Report wrong engines to `target.lost`.

        Raises RuntimeError if all engines are wrong, because the trainer or the transport is then the cause.

        sent: the reports of all trainer ranks.
        received: the report of each engine rank.
        """
        faults = {}
        for number, member in enumerate(target.members):
            try:
                self._compare(sent, {me: one for me, one in received.items() if me.engine == number})
            except RuntimeError as error:
                faults[member] = error
        if len(faults) == len(target.members):
            self._compare(sent, received)
        for (index, starts), error in faults.items():
            target.lost(index, starts, error)

    def _compare(self, sent: list[SyncReport], received: dict[EngineRank, SyncReport]) -> None:
        self._compare_digests(received)
        self._compare_links(sent, received)

    def _shown(self, me: EngineRank) -> EngineRank:
        """Return a copy of an engine rank that has the engine's index among all engines, for error messages.

        me: the engine rank, with the engine's index among the engines that take part in the sync.
        """
        return me._replace(engine=self._members[me.engine][0])

    def _command(self, kind: SyncKind, version: int) -> SyncCommand:
        self._sync_id += 1
        return SyncCommand(kind, self._sync_id, self._setup, full=self._delivered != version - 1)

    def _reports(
        self, sent: Calls, senders: list[Process], command: SyncCommand, target: WeightTarget
    ) -> list:
        """Send a command to the engines, and wait for the reports of the trainer's ranks and the engines.

        Return one report per trainer rank, followed by one list of reports per engine.

        sent: the calls to the trainer's ranks, which have been made already.
        senders: the processes of the trainer's ranks.

        Raises the error of a process whose call failed. If only engines have died and the sync could be ended
        in all other processes, the dead engines are reported to `target.lost`, and EnginesLost is raised.
        """
        processes, first = [*senders, *target.processes], len(senders)
        references = sent.references | dict(enumerate(target.receive_weights(command), first))
        try:
            found = gather(references, processes, "weight sync", self._call_timeout, sent.forwarded)
        except ProcessDied as error:
            ended = self._abandon(references, processes, sent, error)
            died = {index: one for index, one in ended.items() if isinstance(one, ProcessDied)}
            if not died or min(died) < first:
                raise
            members = target.members
            for index, one in died.items():
                target.lost(*members[index - first], one)
            raise EnginesLost from error
        return list(found.values())

    def _abandon(
        self,
        references: dict[int, ray.ObjectRef],
        processes: list[Process],
        sent: Calls,
        error: ProcessDied,
    ) -> dict[int, Any]:
        """End a sync in which a process has died. Return {process index: result or error of its call}.

        A key in the driver's key-value store tells waiting ranks to stop. The next sync gets a new plan.

        references: {process index: Ray's reference to the result} of the processes that were called directly.
        processes: name and log of each process.
        sent: the calls to the trainer's ranks, including calls that other processes forward.
        error: the death that was noticed. It is raised if a process does not end its call within a minute,
            or if the transport uses collective calls, which cannot be ended.
        """
        # Collective calls wait until their own time limit, or end the process. Relays use them too.
        if self._setup.transport == Transport.groups or self._plan.has_relays:
            raise error
        self._members = ()  # the next sync has a new plan, without this key
        self._setup.of_plan(self._store.store).set(ABANDONED, "")
        try:
            return outcomes(references, processes, "weight sync", _ABANDON_SECONDS, sent.forwarded)
        except ProcessLost:
            raise error from None

    def _check_parameters(self, target: WeightTarget) -> None:
        """Ask the engines for their parameters, and compare them with the plan. Keep the parameters' dtypes.

        Later commands contain the dtypes. Raises a UserError that names parameters which differ from the plan
        in name, shape or dtype.
        """
        command = self._command(SyncKind.describe, version=0)
        reports = _by_rank(self._reports(Calls({}), [], command, target))
        described = {self._shown(me): report.parameters for me, report in reports.items()}
        different = parameter_differences(self._plan, described)
        if different:
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise UserError(
                "the engines' parameters do not match the weight map in grpo_megatron/model/families "
                f"({len(different)} differ: {'; '.join(different[:_SHOWN])}{more}), so no weights were sent. "
                "Install the SGLang release from requirements/, or correct the map"
            )
        dtypes = {name: dtype for own in described.values() for name, (_, dtype) in own.items()}
        self._setup = replace(self._setup, dtypes=tuple(sorted(dtypes.items(), key=lambda item: item[0])))

    def _compare_digests(self, received: dict[EngineRank, SyncReport]) -> None:
        """Raise RuntimeError if the digests (checksums) of some tensors differ between engines and trainer.

        The message names up to five of these tensors.

        received: the report of each engine rank.
        """
        wrong = [f"{name} at {self._shown(me)}" for me, report in received.items() for name in report.wrong]
        if wrong:
            more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
            differs = f"the digests differ for {', '.join(wrong[:_SHOWN])}{more}"
            if self._setup.layouts.content == Content.base and self._loads_base:
                raise RuntimeError(
                    f"the adapters of the trainer belong to other weights than the engines have: {differs}; "
                    "engines and trainer must load the same files of model.path, and round them to the same "
                    "dtype (rollout.engine.dtype, megatron.precision), or set weight_sync.lora=merged"
                )
            raise RuntimeError(
                f"after the weight sync, the engines do not have the trainer's weights: {differs}; try "
                "another weight_sync.transport"
            )

    def _compare_links(self, sent: list[SyncReport], received: dict[EngineRank, SyncReport]) -> None:
        """Raise RuntimeError unless each engine rank received all that the trainer ranks sent to it.

        A link is a sender with its receivers. Each of these ranks has computed a checksum of all weights sent
        over the link. The checksums must be equal.

        sent: the reports of all trainer ranks.
        received: the report of each engine rank.
        """
        checksums = {link: checksum for report in sent for link, checksum in report.link_checksums.items()}
        for me, report in received.items():
            expected = {link: checksums.get(link) for link in self._links_to[me]}
            different = sorted(
                link
                for link in expected.keys() | report.link_checksums.keys()
                if expected.get(link) != report.link_checksums.get(link)
            )
            if different:
                raise RuntimeError(
                    f"{self._shown(me)} did not load the weights that the trainer sent: the checksums of "
                    f"these links differ: {', '.join(different[:_SHOWN])} (named "
                    "TRAINER_RANK-ENGINE.RANK); try another weight_sync.transport"
                )

    @cached_property
    def _links_to(self) -> dict[EngineRank, list[str]]:
        """{engine rank: names of the links (a sender with its receivers) over which it receives weights}."""
        found = {me: [] for me in self._plan.engine_ranks}
        for link in self._plan.volumes(itemsize=1):
            for me in link.receivers:
                found[me].append(link.name)
        return found

    def close(self) -> None:
        """Delete weight files that dead trainer ranks have left behind (only with the transport `disk`)."""
        self._clear_folder()

    def _clear_folder(self) -> None:
        """Delete the weight files of the transport `disk`, and the folder if nothing else is in it.

        Other files in the folder are kept, because the user chose the folder. With another transport, nothing
        is done.
        """
        if self._setup.transport == Transport.disk:
            for left in Path(self._setup.folder).glob("sync????????"):
                shutil.rmtree(left, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(self._setup.folder)


def _by_rank(reports) -> dict[EngineRank, SyncReport]:
    """Arrange the reports of all engine ranks as {engine rank: report}.

    reports: for each engine, the list of its ranks' reports in rank order.
    """
    return {
        EngineRank(engine, rank): report
        for engine, engine_reports in enumerate(reports)
        for rank, report in enumerate(engine_reports)
    }


def choose_transport(config: WeightSyncConfig, layouts: Layouts) -> tuple[Transport, Layouts]:
    """Choose the transport that carries the weights. Return (transport, adapted copy of the layouts).

    The fields `multicast` and `within_nodes` of the copy are set as the transport requires.

    With `weight_sync.transport=auto` the transport is shared memory if every engine node has a trainer rank,
    else process groups. Process groups send by broadcast if the cost model (weights.sync.cost) predicts that
    broadcasts are faster, else point to point. Raises UserError if shared memory is configured but an engine
    node has no trainer rank.
    """
    remote = sorted(set(layouts.engine_nodes) - set(layouts.rank_nodes))
    transport = config.transport
    if transport == Transport.auto:
        transport = Transport.groups if remote else Transport.shared_memory
    if transport == Transport.shared_memory and remote:
        raise UserError(
            "weight_sync.transport=shared_memory needs a trainer rank on every engine node, but there is "
            f"none on {', '.join(remote[:_SHOWN])}; set weight_sync.transport=groups or "
            "weight_sync.transport=auto"
        )
    multicast = transport != Transport.groups or broadcast_is_cheaper(layouts, config.bucket_bytes)
    within_nodes = transport == Transport.shared_memory
    return transport, replace(layouts, multicast=multicast, within_nodes=within_nodes)
