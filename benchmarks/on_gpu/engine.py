"""Check an SGLang engine without Ray on one GPU: log-probs, release of memory, and new weights.

    python benchmarks/on_gpu/engine.py RESULTS.json [--prefill-graph] [--dry-run]

A tiny random model is served as in a colocated run. The parts, in this order: start; log-probs of sampled
tokens against transformers'; release of all memory; memory for weights resumed; other weights from another
process, through shared memory; log-probs again. With --prefill-graph SGLang chooses the CUDA graph for
prefill itself, and only the first log-probs are compared. --dry-run uses a CPU.

RESULTS.json is written after each part. The exit status is 1 if a mean difference of log-probs is above the
tolerance.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import numpy as np
import torch
from make_tiny_model import make
from safetensors.torch import load_file

from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment
from grpo_megatron.sglang.memory import EngineMemory, MemoryPart, engine_bytes
from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.release import EngineControl
from grpo_megatron.sglang.start import meeting_file, start_engine
from grpo_megatron.sglang.weight_receiver import RECEIVE_WEIGHTS, as_named_tensors, report_key
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncReport, SyncSetup
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.sender import WeightSender

_WAIT_SECONDS = 60.0
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 16, 48, 24
# {GPU?: largest mean difference of log-probs, in nats}. The engine computes in bf16 on a GPU, in float32 on a
# CPU.
_TOLERANCE = {True: 0.05, False: 1e-3}


class Report:
    """The file RESULTS.json."""

    def __init__(self, path: Path):
        self._path, self._started, self.figures = path, time.monotonic(), {}

    def add(self, **figures) -> None:
        self.figures |= figures | {"seconds": time.monotonic() - self._started}
        self._path.write_text(json.dumps(self.figures, indent=1), encoding="utf-8")
        print(figures, flush=True)


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, _PROMPT_TOKENS, _PROMPTS)
    return [rng.integers(6, vocab_size, length).tolist() for length in lengths]


async def difference(control: EngineControl, model: str, gpu: bool) -> float:
    """Return the mean difference between the engine's log-probs of its greedy tokens and transformers'."""
    from transformers import AutoModelForCausalLM

    asked = prompts(read_architecture(model).vocab_size)
    sampling = {"temperature": 0.0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
    answers = await asyncio.gather(
        *(control.sample(number, prompt, sampling, None, 0) for number, prompt in enumerate(asked))
    )
    device = torch.device("cuda" if gpu else "cpu")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    found = []
    for prompt, answer in zip(asked, answers, strict=True):
        given = answer["meta_info"]["output_token_logprobs"]
        tokens = [token for _, token, _ in given]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0].cpu()
        found.append((expected - torch.tensor([logprob for logprob, _, _ in given])).abs())
    return float(torch.cat(found).mean())


def send_weights(setup: SyncSetup, model: str, device: torch.device) -> None:
    """Send a checkpoint's weights as the only rank of a trainer. Runs in a process of its own."""
    tensors = load_file(Path(model, "model.safetensors"))
    own = {}
    for entry in ReshardPlan(setup.layouts).entries:
        local = torch.empty(entry.megatron_shape(1))
        for piece in entry.megatron_pieces(1, 0):
            piece.of(local).copy_(tensors[piece.hf][box(piece.start, piece.shape)])
        own[entry.megatron] = local.to(device)
    sender = WeightSender(setup, 0, device)
    sender.send(SyncCommand(SyncKind.transfer, 1, setup), own)
    sender.close()


async def take_weights(control: EngineControl, model: str, gpu: bool) -> SyncReport:
    """Let the engine take another checkpoint's weights from another process, and return its report."""
    server = StoreServer("127.0.0.1", _WAIT_SECONDS)
    layouts = Layouts(
        read_architecture(model), ParallelSizes(), EngineLayout(), 1, multicast=True, within_nodes=True
    )
    kind = torch.bfloat16 if gpu else torch.float32
    dtypes = tuple((name, kind) for name in ReshardPlan(layouts).engine_shapes)
    setup = SyncSetup(layouts, Transport.shared_memory, server.address, 1 << 20, _WAIT_SECONDS, dtypes)
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    sender = multiprocessing.get_context("spawn").Process(target=send_weights, args=(setup, model, device))
    sender.start()
    command = SyncCommand(SyncKind.transfer, 1, setup, engine=0)
    accepted, message = await control.begin_weight_update()
    if accepted:
        accepted, message = await control.call_loader(as_named_tensors(command), 1, RECEIVE_WEIGHTS)
    if not accepted:
        raise RuntimeError(f"the engine refused the weights: {message}")
    report = pickle.loads(command.setup.connect().get(report_key(command, EngineRank(0, 0).rank)))
    await control.end_weight_update()
    await control.flush_cache()
    await asyncio.to_thread(sender.join, _WAIT_SECONDS)
    return report


async def measure(
    control: EngineControl, models: list[str], gpu: bool, report: Report, all_parts: bool
) -> None:
    """Do all parts after the start.

    models: the model that the engine was started with, and the model whose weights are sent to it.
    all_parts: False to compare only the first log-probs.
    """

    async def waited_for(_call, awaitable):
        return await awaitable

    report.add(difference_at_start=await difference(control, models[0], gpu))
    if not all_parts:
        return
    memory, children = EngineMemory("the engine", control, waited_for), Children()
    before = engine_bytes(children)
    await memory.release()
    report.add(released_gb=(before - engine_bytes(children)) / 1e9, occupied_gb=engine_bytes(children) / 1e9)
    await memory.resume(MemoryPart.weights)
    synced = await take_weights(control, models[1], gpu)
    report.add(sync_error=synced.error, wrong=synced.wrong, sync_seconds=synced.seconds.get("all"))
    await memory.resume(MemoryPart.kv_cache)
    report.add(resumed_gb=engine_bytes(children) / 1e9)
    report.add(difference_after_sync=await difference(control, models[1], gpu))


def arguments_of(model: str, gpu: bool, prefill_graph: bool) -> tuple[dict, dict]:
    """Return the arguments and environment variables of an engine in a colocated run."""
    config = EngineConfig(dtype="bfloat16" if gpu else "float32", max_total_tokens=1 << 14, mem_fraction=0.3)
    arguments = engine_arguments(
        config, ModelConfig(path=model), seed=0, needs_tokenizer=False, gpu=gpu, routing=False
    )
    arguments["enable_memory_saver"] = True
    if gpu:
        # The pack lacks the FlashAttention kernels, which are larger than everything else in it.
        arguments["attention_backend"] = "triton"
        arguments.setdefault("cuda_graph_backend_prefill", "disabled")
    if prefill_graph:
        arguments.pop("cuda_graph_backend_prefill")
    return arguments, engine_environment(config, gpu)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="file to write the results to")
    parser.add_argument("--prefill-graph", action="store_true", help="let SGLang choose the prefill graphs")
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU")
    given = parser.parse_args()
    report, gpu = Report(given.results), not given.dry_run
    with tempfile.TemporaryDirectory() as folder:
        models = [f"{folder}/{seed}" for seed in range(2)]
        for seed, model in enumerate(models):
            make(Path(model), "bytes", seed, hidden=256, ffn=512)
        arguments, environment = arguments_of(models[0], gpu, given.prefill_graph and gpu)
        os.environ.update(environment)
        meeting, path = meeting_file()
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{path}"
        with meeting:
            control = EngineControl(start_engine(arguments))
            report.add(started=True)
            try:
                asyncio.get_event_loop().run_until_complete(
                    measure(control, models, gpu, report, not given.prefill_graph)
                )
            finally:
                control.shutdown()
    found = [value for name, value in report.figures.items() if name.startswith("difference")]
    wrong = [value for value in found if not value <= _TOLERANCE[gpu]]
    report.add(tolerance=_TOLERANCE[gpu], too_far=wrong)
    return int(bool(wrong or report.figures.get("sync_error") or report.figures.get("wrong")))


if __name__ == "__main__":
    sys.exit(main())
