"""Section `loop`: whole GRPO steps with a real engine on the same device."""

import json
import random
import tempfile
import time
from pathlib import Path

import torch
from make_tiny_model import make_tokenizer
from safetensors.torch import save_file

from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.schema import Config
from grpo_megatron.logs import show_messages
from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.preflight.check import load_config
from grpo_megatron.run.folder import METRICS
from on_gpu.bench import Bench, random_weights

_MODEL = "qwen3-0.6b"
_STEPS = 3


def steps(bench: Bench) -> None:
    """Run three steps of `grpo-megatron train`. Report every scalar that the last step logged."""
    show_messages()
    with tempfile.TemporaryDirectory() as root, bench.model(_MODEL) as model:
        _complete(Path(model), bench.device.device)
        bench.device.give_back()
        config = _config(bench, root, model)
        started = time.perf_counter()
        with assembled_loop(config) as (controller, run):
            bench.report(start_seconds=time.perf_counter() - started)
            syncing = time.perf_counter()
            controller.rollouts.start()
            bench.report(first_sync_seconds=time.perf_counter() - syncing)
            for _ in range(_STEPS):
                controller.train_step(controller.loop.begin_step())
            logged = Path(run.directory, METRICS).read_text(encoding="utf-8").splitlines()
        scalars = json.loads(logged[-1])
        generated = scalars["response/length_mean"] * config.data.train_batch_size * config.rollout.n
        bench.report(generated_tokens_per_second=generated / scalars["time/generate"], last_step=scalars)


def _complete(folder: Path, device: torch.device) -> None:
    """Add random weights and a byte tokenizer to the config.json in the folder."""
    tokenizer = make_tokenizer("bytes")
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "model_type": "qwen3",
    }
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | ends), encoding="utf-8")
    shapes = hf_shapes(weight_map(read_architecture(str(folder))))
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()
    }
    random_weights(tensors)
    save_file(
        {name: tensor.cpu() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _config(bench: Bench, root: str, model: str) -> Config:
    sizes, rng = bench.sizes, random.Random(0)
    prompts = Path(root, "prompts.jsonl")
    with prompts.open("w", encoding="utf-8") as file:
        for _ in range(sizes.prompts * _STEPS):
            text = f"What is {rng.randrange(10**6)} plus {rng.randrange(10**6)}?"
            file.write(json.dumps({"prompt": text, "answer": "0"}) + "\n")
    return load_config(
        None,
        [
            f"run.root={root}/runs",
            f"run.total_steps={_STEPS}",
            f"model.path={model}",
            f"data.train={prompts}",
            f"data.train_batch_size={sizes.prompts}",
            "data.max_prompt_length=256",
            "rollout.n=8",
            f"rollout.max_response_length={sizes.response}",
            "rollout.engine.mem_fraction=0.5",
            f"rollout.engine.max_total_tokens={1024 * sizes.prompts * 8}",
            "reward.extract=\\d",
            f"train.ppo_mini_batch_size={sizes.prompts}",
            f"train.max_tokens_per_micro_batch={sizes.tokens}",
            "megatron.precision=bf16",
            "megatron.sleep=true",
            "cluster.placement=colocated",
            "checkpoint.export_hf=false",
            "checkpoint.at_end=false",
            "run.resume=none",
        ],
    )
