"""Sections about weights: export, handover to another process, and the memory that sleep releases."""

import multiprocessing
import statistics

import numpy as np
import torch

from grpo_megatron.cluster.store import StoreAddress, StoreServer
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncSetup
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.receiver import WeightReceiver
from grpo_megatron.weights.sync.sender import WeightSender
from on_gpu.bench import Bench, random_weights
from on_gpu.device import seconds

_MODEL = "qwen3-8b"
_TRANSFERS = 5
_CYCLES = 5
_WAIT_SECONDS = 120


def export(bench: Bench) -> None:
    """Measure the export of all weights as HF tensors within the device's memory, beside a plain copy."""
    from grpo_megatron.megatron.state.hf_weights import iterate_hf
    from on_gpu.actors import config_of, one_rank, random_actor

    with one_rank(), bench.model(_MODEL, bench.sizes.layers) as folder:
        actor = random_actor(config_of(bench, folder))
        sizes = [tensor.nbytes for _, tensor in iterate_hf(actor.model.chunks, actor.model.entries)]

        def exhaust(tensors) -> None:
            for _ in tensors:
                pass

        def copy() -> None:
            for chunk in actor.model.chunks:
                for parameter in chunk.parameters():
                    parameter.detach().clone()

        gigabytes, repeats = sum(sizes) / 1e9, bench.sizes.repeats
        taken = {
            "device": seconds(
                bench.device, lambda: exhaust(iterate_hf(actor.model.chunks, actor.model.entries)), repeats
            ),
            "copy": seconds(bench.device, copy, repeats),
        }
        bench.report(
            gigabytes=gigabytes, **{f"{name}_gb_per_s": gigabytes / value for name, value in taken.items()}
        )


def handover(bench: Bench) -> None:
    """Measure the transfer of weights to another process on the same device, with digests on both sides.

    The processes share memory that both map (CUDA IPC on a GPU).
    """
    with bench.model(_MODEL, bench.sizes.layers) as folder:
        arch = read_architecture(folder)
    server = StoreServer("127.0.0.1", _WAIT_SECONDS)
    setup = _setup(arch, server.address, bench.sizes.bucket)
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    other = context.Process(target=_receive, args=(setup, bench.device.device, reports))
    other.start()
    with torch.no_grad():
        own = {
            entry.megatron: torch.empty(
                entry.megatron_shape(1), dtype=torch.bfloat16, device=bench.device.device
            )
            for entry in ReshardPlan(setup.layouts).entries
        }
        random_weights(own)
    sender = WeightSender(setup, 0, bench.device.device)
    sent = [sender.send(SyncCommand(SyncKind.transfer, index, setup), own) for index in range(_TRANSFERS)]
    received = [reports.get(timeout=_WAIT_SECONDS) for _ in range(_TRANSFERS)]
    sender.close()
    other.join(timeout=_WAIT_SECONDS)
    if any(report.wrong for report in received) or received[-1].link_checksums != sent[-1].link_checksums:
        raise RuntimeError(f"the received weights differ from the sent ones: {received[-1].wrong[:3]}")
    gigabytes = received[-1].bytes / 1e9
    taken = statistics.median(report.seconds["all"] for report in received[1:])
    parts = {f"sender_{name}_seconds": value for name, value in sent[-1].seconds.items()}
    parts |= {f"receiver_{name}_seconds": value for name, value in received[-1].seconds.items()}
    bench.report(gigabytes=gigabytes, gb_per_s=gigabytes / taken, bucket_bytes=setup.bucket_bytes, **parts)


def _setup(arch: Architecture, store: StoreAddress, bucket_bytes: int) -> SyncSetup:
    layouts = Layouts(arch, ParallelSizes(), EngineLayout(), 1, multicast=True, within_nodes=True)
    dtypes = tuple((name, torch.bfloat16) for name in ReshardPlan(layouts).engine_shapes)
    return SyncSetup(layouts, Transport.shared_memory, store, bucket_bytes, timeout=60.0, dtypes=dtypes)


def _receive(setup: SyncSetup, device: torch.device, reports) -> None:
    receiver = WeightReceiver(setup, EngineRank(0, 0), device)
    shapes = ReshardPlan(setup.layouts).engine_shapes
    own = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    for index in range(_TRANSFERS):
        reports.put(receiver.receive(SyncCommand(SyncKind.transfer, index, setup), own))
    receiver.close()


def sleep(bench: Bench) -> None:
    """Measure five cycles of sleep and wake-up, after a training step.

    Log-probs must be the same after each cycle.
    """
    from on_gpu.actors import batches, config_of, micro_batches, one_rank, random_actor
    from on_gpu.training import LOSS

    before = bench.device.occupied()
    with one_rank(), bench.model(_MODEL, bench.sizes.layers) as folder:
        actor = random_actor(config_of(bench, folder))
        batch = batches(bench.sizes, actor.model.arch.vocab_size)["long"]
        parts = micro_batches(batch, actor, bench.sizes.tokens)[:1]
        actor.passes.train_step(parts, LOSS, batch.num_tokens, current_is_old=True)
        expected = actor.passes.logprobs(parts)
        rows = []
        for _ in range(_CYCLES):
            awake = bench.device.occupied()
            asleep_after = seconds(bench.device, actor.memory.sleep, repeats=1, warm_up=0)
            asleep = bench.device.occupied()
            awake_after = seconds(bench.device, actor.memory.wake, repeats=1, warm_up=0)
            if not np.array_equal(actor.passes.logprobs(parts), expected):
                raise RuntimeError("log-probs changed while the actor was asleep")
            rows.append((awake, asleep, asleep_after, awake_after))
    awake, asleep, to_sleep, to_wake = zip(*rows, strict=True)
    bench.report(
        awake_gb=[value / 1e9 for value in awake],
        asleep_gb=[value / 1e9 for value in asleep],
        # This includes CUDA's context and the libraries' own memory, which no process can release.
        left_asleep_gb=(asleep[-1] - before) / 1e9,
        # The first cycle is left out, because it allocates what is allocated once, such as pinned memory.
        leak_gb=(max(asleep[1:]) - asleep[1]) / 1e9,
        sleep_seconds=list(to_sleep),
        wake_seconds=list(to_wake),
    )
