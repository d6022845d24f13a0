"""Weights from one process to another on the same device, through memory that both map (CUDA IPC on a
GPU).
"""

import multiprocessing

import pytest
import torch

from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncSetup
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.receiver import WeightReceiver
from grpo_megatron.weights.sync.sender import WeightSender
from tests.unit.sync_cluster import DENSE, engine_parameters, hf_tensors, trainer_parameters

ME = EngineRank(0, 0)
SYNCS = (1, 2)


def send(setup, device, reports):
    sender, plan = WeightSender(setup, 0, torch.device(device)), ReshardPlan(setup.layouts)
    for sync_id in SYNCS:
        own = trainer_parameters(plan, hf_tensors(DENSE, seed=sync_id))[0]
        own = {name: value.to(device) for name, value in own.items()}
        report = sender.send(SyncCommand(SyncKind.transfer, sync_id, setup), own)
        reports.put(("sent", sync_id, report.link_checksums))
    sender.close()


def receive(setup, device, reports):
    plan = ReshardPlan(setup.layouts)
    receiver, own = (
        WeightReceiver(setup, ME, torch.device(device)),
        engine_parameters(plan, dtypes=dict(setup.dtypes))[ME],
    )
    own = {name: value.to(device) for name, value in own.items()}
    for sync_id in SYNCS:
        report = receiver.receive(SyncCommand(SyncKind.transfer, sync_id, setup), own)
        expected = engine_parameters(plan, hf_tensors(DENSE, seed=sync_id), dict(setup.dtypes))[ME]
        equal = all(
            torch.equal(own[name].cpu().nan_to_num(7.0), value.nan_to_num(7.0))
            for name, value in expected.items()
        )
        reports.put(
            ("received", sync_id, report.link_checksums if equal and not report.wrong else report.wrong)
        )


@pytest.mark.parametrize(
    "device", [pytest.param("cuda:0", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def test_a_process_takes_weights_out_of_anothers_memory(device):
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    server = StoreServer("127.0.0.1", timeout=60)
    layouts = Layouts(DENSE, ParallelSizes(), EngineLayout(), 1, multicast=True, within_nodes=True)
    dtypes = tuple((name, torch.bfloat16) for name in ReshardPlan(layouts).engine_shapes)
    setup = SyncSetup(
        layouts, Transport.shared_memory, server.address, bucket_bytes=4000, timeout=60.0, dtypes=dtypes
    )
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    processes = [context.Process(target=side, args=(setup, device, reports)) for side in (send, receive)]
    for process in processes:
        process.start()
    found = {
        (side, sync_id): link_checksums
        for side, sync_id, link_checksums in (reports.get(timeout=120) for _ in range(2 * len(SYNCS)))
    }
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    for sync_id in SYNCS:
        assert found["received", sync_id] == found["sent", sync_id] != {}
