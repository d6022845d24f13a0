"""Print the table of docs/gpu.md: SGLang's decisions for the engines of every configuration in configs/.

    python tools/engine_settings.py [--write]

The tool runs the Python code of the GPU stack's SGLang, which `make install` unpacks beside the environment.
It needs no GPU, because tools/faked_h100.py makes torch report H100s. --write replaces the table in
docs/gpu.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plan_recipes import RECIPES

from grpo_megatron.cluster.gpu_environment import gpu_environment
from grpo_megatron.commands.doctor import SGLANG_ON_GPU
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.files import json_text
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- python tools/engine_settings.py --write -->", "<!-- end of the table -->"
# {configuration: its model in configs/models}. The other configurations train a model that their recipe makes
# itself. The tool uses a model with the config.json _TINY in its place.
_MODELS = RECIPES | {"qwen2.5_0.5b_gsm8k": "qwen2.5-0.5b", "qwen2.5_0.5b_gsm8k_lora": "qwen2.5-0.5b"}
_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# No configuration has engines in FP8. The table shows one dense model and one with experts in FP8 as well.
_FP8 = ("rollout.engine.quantization=fp8", "rollout.engine.kv_cache_dtype=fp8_e4m3")
_IN_FP8 = ("qwen3_8b_1node", "qwen3_30b_a3b_4node")
HEAD = (
    "configurations",
    "attention",
    "decode graphs",
    "prefill graphs",
    "chunked prefill",
    "FP8 products",
    "KV cache",
    "memory saver",
)


def release_folder() -> Path:
    return Path(sys.prefix, "unpacked", f"sglang-{SGLANG_ON_GPU}")


def configurations(tiny: str) -> dict[str, Config]:
    """Return {name: configuration} of each file in configs/ that has engines.

    Those in _IN_FP8 are also returned with FP8 engines, under a name that ends with `in FP8`.

    tiny: folder with a config.json, used for configurations whose recipe makes the model itself.
    """
    found = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if "rollout:" in path.read_text(encoding="utf-8").splitlines():
            model = ROOT / "configs" / "models" / _MODELS[path.stem] if path.stem in _MODELS else tiny
            found[f"`{path.stem}`"] = read_config(str(path), [f"model.path={model}"])
            if path.stem in _IN_FP8:
                found[f"`{path.stem}` in FP8"] = read_config(str(path), [f"model.path={model}", *_FP8])
    return found


def asked(config: Config) -> dict:
    """Return the arguments and environment with which sglang.pool starts an engine on a GPU.

    The result {"arguments": ..., "environment": ...} is an element of faked_h100.py's input.
    """
    engine, routing = config.rollout.engine, config.moe.routing_replay == RoutingReplay.engine
    arguments = engine_arguments(
        engine, config.model, 0, bool(config.rollout.stop), gpu=True, routing=routing
    )
    arguments["enable_memory_saver"] = config.cluster.placement == Placement.colocated
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | {
        "PYTHONPATH": f"{release_folder()}:{ROOT}"
    }
    return {
        "arguments": arguments,
        "environment": environment | gpu_environment({}) | engine_environment(engine, gpu=True),
    }


@contextmanager
def all_asked() -> Iterator[dict[str, dict]]:
    """Return a context with {name: result of `asked`} for every configuration in the table.

    Some of the arguments name the folder of the tiny model, which exists only in the `with` block.
    """
    with tempfile.TemporaryDirectory() as tiny:
        Path(tiny, "config.json").write_text(json_text(_TINY), encoding="utf-8")
        yield {name: asked(config) for name, config in configurations(tiny).items()}


def resolved(given: dict[str, dict]) -> dict[str, dict]:
    """Run faked_h100.py, and return {configuration: SGLang's decisions for its engines}.

    given: {configuration: result of `asked`}.

    Raises RuntimeError if SGLang refuses the arguments of an engine.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{release_folder()}:{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "faked_h100.py")]
    done = subprocess.run(
        command, input=json_text(list(given.values())), env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return dict(zip(given, json.loads(done.stdout.splitlines()[-1]), strict=True))


def cells(found: dict) -> tuple[str, ...]:
    graphs = found["decode_graphs"]
    return (
        found["attention"],
        graphs if graphs == "disabled" else f"{graphs}, up to {found['largest_decode_graph']}",
        found["prefill_graphs"],
        str(found["chunked_prefill"]),
        found["fp8_products"] or "none",
        found["kv_cache"],
        "on" if found["memory_saver"] else "off",
    )


def table(decisions: dict[str, dict]) -> str:
    """Return the table of docs/gpu.md as Markdown and, below it, the environment variables of the engines.

    Configurations with the same decisions share a row.

    decisions: {configuration: SGLang's decisions for its engines}, the result of `resolved`.
    """
    names = defaultdict(list)
    for name, found in decisions.items():
        names[cells(found)].append(name)
    rows = [HEAD, ("---",) * len(HEAD), *((", ".join(of), *row) for row, of in names.items())]
    environments = {
        name: {key: value for key, value in found.items() if key.isupper() and value}
        for name, found in decisions.items()
    }
    common = dict(set.intersection(*(set(variables.items()) for variables in environments.values())))
    others = {name: sorted(variables.items() - common.items()) for name, variables in environments.items()}
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", f"Environment of all engines: {_settings(sorted(common.items()))}."]
    more = defaultdict(list)
    for name, variables in others.items():
        if variables:
            more[_settings(variables)].append(name)
    lines += [f"Also in the environment of {', '.join(of)}: {settings}." for settings, of in more.items()]
    return "\n".join(lines)


def _settings(variables: list[tuple[str, str]]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in variables)


def parts_of(page: str) -> tuple[str, str, str]:
    """Split the text of docs/gpu.md into the text before the table, the table, and the text after it."""
    before, _, rest = page.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside.strip(), after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    options = parser.parse_args()
    with all_asked() as given:
        made = table(resolved(given))
    print(made)
    if options.write:
        before, _, after = parts_of(PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
