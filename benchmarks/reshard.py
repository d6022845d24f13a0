"""Measure weight sync from trainer ranks to real SGLang engines: bytes and seconds of every transport.

    python benchmarks/reshard.py [--engine-tp 1 2] [--repeat N]

A Qwen3 of 222M parameters in bf16, TP2 x PP2 trainer ranks, one engine with 1 and then with 2 tensor-parallel
ranks. Each transport moves all weights `repeat` times, after a first time that opens the connections; figures
are medians. Seconds are those of the transfer with digests on both sides, without opening and closing the
engine's update session.

`raw` is a plain gloo broadcast of the same bytes from one process to another, in the same run and in buckets
of the same size. `bound` is the number of bytes that the engine's ranks must receive according to the plan.
`delta` goes through shared memory, after the given share of the elements was changed.

Prints a table and, as its last line, one JSON object:

    bytes_over_bound, time_over_raw    of the transport that `auto` chooses, the worse of the two engines
    seconds, digest_seconds            of the same transport
    groups_over_raw                    time of the transport `groups` over that of `raw`
    raw_seconds, ray_direct_seconds    of `raw`, and of Ray's direct transport between two actors
    delta_bytes                        {share of elements changed: share of all bytes}
    parameters                         number of parameters that one engine receives
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from grpo_megatron.commands.assemble import assemble, open_run
from grpo_megatron.config.command import Command
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.logs import show_messages
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.check import load_config
from grpo_megatron.weights.sync.plan import Layouts, ReshardPlan
from grpo_megatron.weights.sync.resharding import Resharding

SHARES = (0.01, 0.1, 1.0)


def make_model(folder: Path) -> None:
    """Write a model with random weights, 222M parameters in bf16."""
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=16384,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def config(folder: Path, engine_tp: int):
    return load_config(
        None,
        [
            f"run.root={folder}",
            f"run.name=tp{engine_tp}",
            "run.total_steps=1",
            f"model.path={folder}/model",
            f"data.train={folder}/none.jsonl",
            "megatron.tensor_parallel=2",
            "megatron.pipeline_parallel=2",
            "megatron.precision=bf16",
            "rollout.engine.load_format=dummy",
            f"rollout.engine.tensor_parallel={engine_tp}",
            "rollout.engine.max_total_tokens=2048",
            "checkpoint.export_hf=false",
            "run.resume=none",
        ],
    )


def timed(sync: Resharding, run, repeat: int) -> tuple[float, dict[str, float]]:
    """Transfer all weights repeat + 1 times. Return (median seconds without the first, metrics of the last).

    sync: the weight sync, with one transport.
    run: the assembled run with trainer and engines.
    """
    seconds = []
    for version in range(1, repeat + 2):
        run.engines.begin_update()
        started = time.perf_counter()
        measured = sync.transfer(run.trainer.weights, run.engines, version)
        seconds.append(time.perf_counter() - started)
        run.engines.end_update(version)
    return statistics.median(seconds[1:]), measured


def resharding(layouts, run, transport: Transport, **settings) -> Resharding:
    config = replace(run.config.weight_sync, transport=transport, **settings)
    return Resharding(layouts, config, folder="", call_timeout=600.0)


def deltas(layouts, run) -> dict[str, float]:
    """Return {share of the elements that was changed: share of all bytes that a delta sync then sent}.

    Each sync also compares the digests of trainer and engine.
    """
    sync = resharding(layouts, run, Transport.auto, delta=True)
    sent = {}
    for version, share in enumerate((None, *SHARES), start=1):
        if share is not None:
            run.trainer.weights.scale(1.5, share)
        run.engines.begin_update()
        sent[share] = sync.transfer(run.trainer.weights, run.engines, version)["sent_gb"]
        run.engines.end_update(version)
    return {str(share): sent[share] / sent[None] for share in SHARES}


def raw_broadcast(size: int, bucket_bytes: int, repeat: int) -> float:
    """Return the median seconds of a gloo broadcast of `size` bytes from one process to another.

    The bytes are sent in buckets of `bucket_bytes`, after a first broadcast that is not counted.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_broadcast, args=(rank, f"file://{folder}/store", size, bucket_bytes, repeat, answers)
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        seconds = [answers.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    return max(seconds)


def _broadcast(rank: int, store: str, size: int, bucket_bytes: int, repeat: int, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    buckets = [
        torch.ones(min(bucket_bytes, size - start), dtype=torch.uint8)
        for start in range(0, size, bucket_bytes)
    ]
    seconds = []
    for _ in range(repeat + 1):
        dist.barrier()
        started = time.perf_counter()
        for bucket in buckets:
            dist.broadcast(bucket, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    answers.put(statistics.median(seconds[1:]))
    dist.destroy_process_group()


@ray.remote(num_cpus=0)
class _Holder:
    """Actor that sends or receives tensors through Ray's direct transport."""

    def __init__(self, sizes: list[int]):
        self._buckets = [torch.ones(size, dtype=torch.uint8) for size in sizes]

    @ray.method(tensor_transport="gloo")
    def give(self, index: int) -> torch.Tensor:
        return self._buckets[index]

    def take(self, bucket: torch.Tensor) -> int:
        return bucket.numel()


def ray_direct(size: int, bucket_bytes: int, repeat: int) -> float:
    """Return the median seconds to send `size` bytes from one actor to another with Ray's direct transport.

    In a weight sync, this would only be the way to an engine's actor. SGLang's schedulers, which need the
    weights, are other processes.
    """
    from ray.experimental.collective import create_collective_group

    sizes = [min(bucket_bytes, size - start) for start in range(0, size, bucket_bytes)]
    giver, taker = (_Holder.remote(sizes) for _ in range(2))
    create_collective_group([giver, taker], backend="gloo")
    seconds = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        taken = ray.get([taker.take.remote(giver.give.remote(index)) for index in range(len(sizes))])
        seconds.append(time.perf_counter() - started)
        assert sum(taken) == size
    for actor in (giver, taker):
        ray.kill(actor)
    return statistics.median(seconds[1:])


def measure(folder: Path, engine_tp: int, repeat: int) -> dict:
    settings = config(folder, engine_tp)
    with open_run(settings, Command.train) as context, assemble(context, None) as run:
        layouts = Layouts(
            arch=read_architecture(settings.model.path),
            sizes=run.trainer.sizes,
            engine=EngineLayout(engine_tp),
            num_engines=1,
            rank_nodes=run.trainer.nodes,
            engine_nodes=run.engines.nodes,
        )
        plan = ReshardPlan(layouts)
        bound = 2 * sum(
            piece.numel
            for me in plan.engine_ranks
            for entry in plan.entries
            for piece in entry.engine_pieces(layouts.engine, me.rank)
        )
        found = {"engine_tp": engine_tp, "bound_gb": bound / 1e9}
        for transport in (Transport.shared_memory, Transport.groups):
            seconds, measured = timed(resharding(layouts, run, transport), run, repeat)
            found[transport.value] = {"seconds": seconds, **measured}
        found["delta"] = deltas(layouts, run)
        found["ray_direct"] = ray_direct(bound, settings.weight_sync.bucket_bytes, repeat)
        found["raw"] = raw_broadcast(bound, settings.weight_sync.bucket_bytes, repeat)
    return found


def main() -> None:
    show_messages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine-tp", type=int, nargs="+", default=[1, 2], help="tensor-parallel sizes of the engine"
    )
    parser.add_argument("--repeat", type=int, default=5, help="timed transfers of each transport")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        (folder / "none.jsonl").write_text("")
        found = [measure(folder, tp, options.repeat) for tp in options.engine_tp]
    rows = [("engine", "transport", "seconds", "over raw", "GB received", "over bound")]
    for one in found:
        name = f"TP{one['engine_tp']}"
        for transport in ("shared_memory", "groups"):
            of = one[transport]
            rows.append(
                (
                    name,
                    transport,
                    f"{of['seconds']:.3f}",
                    f"{of['seconds'] / one['raw']:.2f}",
                    f"{of['received_gb']:.3f}",
                    f"{of['received_gb'] / one['bound_gb']:.4f}",
                )
            )
        rows.append(
            (
                name,
                "Ray direct, to actor",
                f"{one['ray_direct']:.3f}",
                f"{one['ray_direct'] / one['raw']:.2f}",
                "",
                "",
            )
        )
        rows.append((name, "raw broadcast", f"{one['raw']:.3f}", "1.00", f"{one['bound_gb']:.3f}", "1.0000"))
        for share, bytes_share in one["delta"].items():
            rows.append(
                (name, f"delta, {float(share):.0%} changed", "", "", "", f"{bytes_share:.4f} of all bytes")
            )
    for row in rows:
        print("  ".join(f"{text:<22}" for text in row))
    print(json.dumps(summary(found)))


def summary(found: list[dict]) -> dict:
    return {
        "parameters": round(found[0]["bound_gb"] / 2 * 1e9),
        "bytes_over_bound": max(one["shared_memory"]["received_gb"] / one["bound_gb"] for one in found),
        "time_over_raw": max(one["shared_memory"]["seconds"] / one["raw"] for one in found),
        "groups_over_raw": max(one["groups"]["seconds"] / one["raw"] for one in found),
        "seconds": max(one["shared_memory"]["seconds"] for one in found),
        "ray_direct_seconds": max(one["ray_direct"] for one in found),
        "raw_seconds": max(one["raw"] for one in found),
        "digest_seconds": max(one["shared_memory"]["engine_digest_seconds"] for one in found),
        "delta_bytes": {share: max(one["delta"][share] for one in found) for share in found[0]["delta"]},
    }


if __name__ == "__main__":
    main()
