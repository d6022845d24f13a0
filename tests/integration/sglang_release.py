"""Checks this package's calls to SGLang against the signatures of one release.

Started by test_sglang_releases.py.

The release comes first on the path. Reads {arguments, sampling} as JSON, writes {problems, calls,
knows_spans} as JSON. No engine is started: the called objects have the methods and signatures of SGLang's
classes, and requests are SGLang's own.
"""

import asyncio
import inspect
import json
import pickle
import sys
import tempfile
import typing
from pathlib import Path
from unittest import mock

import msgspec
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# 0.5.17 registers kinds of models that the newer transformers of this environment knows already.
_register = CONFIG_MAPPING.register
CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _register(key, value, exist_ok=True)

import sglang  # noqa: E402
from sglang.srt.configs import model_config  # noqa: E402
from sglang.srt.distributed import get_tp_group  # noqa: E402, F401  # receive_weights calls it
from sglang.srt.entrypoints.engine import Engine  # noqa: E402  # what sglang.Engine is, once it is called
from sglang.srt.managers import io_struct, tokenizer_manager  # noqa: E402
from sglang.srt.managers.load_snapshot import (  # noqa: E402
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
)
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils import MultiprocessingSerializer  # noqa: E402
from sglang.srt.utils.common import dynamic_import, normalize_serialized_named_tensor_payload  # noqa: E402

from grpo_megatron.config.lora import LoraConfig  # noqa: E402
from grpo_megatron.sglang.release import PAUSES, EngineControl  # noqa: E402
from grpo_megatron.sglang.weight_receiver import RECEIVE_WEIGHTS, as_named_tensors, receive_weights  # noqa: E402

META = (
    "input_token_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "finish_reason",
    "weight_version",
    "routed_experts",
)


def argument_problems(arguments: dict) -> list[str]:
    """Return the names that the release does not have, and the values that it does not accept."""
    hints, found = typing.get_type_hints(ServerArgs, include_extras=True), []
    for name, value in arguments.items():
        if name not in hints:
            found.append(f"no argument {name}")
            continue
        kind, *notes = (
            typing.get_args(hints[name])
            if typing.get_origin(hints[name]) is typing.Annotated
            else [hints[name]]
        )
        if kind == typing.Union[set[str], typing.List[str], None]:  # noqa: UP006, UP007 - equal to SGLang's
            kind = list[str] | None  # msgspec knows no alternatives that are both sequences
        try:
            msgspec.convert(value, kind, strict=True)
        except (msgspec.ValidationError, TypeError) as error:
            found.append(f"{name}={value!r}: {error}")
        choices = next((note.choices for note in notes if getattr(note, "choices", None)), None)
        values = value if isinstance(value, list) else [value]
        if choices is not None and value is not None and not set(values) <= set(choices):
            found.append(f"{name}={value!r} is not among {choices}")
    return found


def quantization_problems(arguments: dict) -> list[str]:
    """Return what is wrong with linear layers under the quantization_config that an engine is given.

    They must be quantised in blocks, with the parameters that the weight sync's plan expects.
    """
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    config = Fp8Config.from_config(json.loads(arguments["json_model_override_args"])["quantization_config"])
    layer = torch.nn.Module()
    made = {
        "input_size": 256,
        "output_size": 384,
        "params_dtype": torch.bfloat16,
        "weight_loader": lambda *_: None,
    }
    with mock.patch.object(Fp8LinearMethod, "validate_block_quant_shapes"):  # asks for process groups
        Fp8LinearMethod(config).create_weights(
            layer, input_size_per_partition=256, output_partition_sizes=[128] * 3, **made
        )
    found = {name: (tuple(value.shape), value.dtype) for name, value in layer.named_parameters()}
    blocks = ((3, 2), torch.float32)
    if found != {"weight": ((384, 256), torch.float8_e4m3fn), "weight_scale_inv": blocks}:
        return [f"a linear layer in FP8 has {found}"]
    return expert_problems(config) if "lm_head" in config.ignored_layers else ["lm_head would be in FP8"]


def expert_problems(config) -> list[str]:
    """Return what is wrong with experts, on Hopper with DeepGEMM.

    They must have the plan's parameters, loading must not replace these, and their kernel must be Triton's.
    """
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.quantization import fp8

    layer, method, runner = torch.nn.Module(), fp8.Fp8MoEMethod(config), MoeRunnerConfig()
    layer.moe_tp_size, layer.moe_runner_config = 1, runner
    with mock.patch.object(
        fp8, "get_parallel", return_value=mock.Mock(tp_size=1)
    ):  # 0.5.17 asks for process groups
        method.create_weights(layer, 3, 256, 128, params_dtype=torch.bfloat16)
    found = {name: (tuple(value.shape), value.dtype) for name, value in layer.named_parameters()}
    elements, scales = torch.float8_e4m3fn, torch.float32
    planned = {
        "w13_weight": ((3, 256, 256), elements),
        "w2_weight": ((3, 256, 128), elements),
        "w13_weight_scale_inv": ((3, 2, 2), scales),
        "w2_weight_scale_inv": ((3, 2, 1), scales),
    }
    if found != planned:
        return [f"experts in FP8 have {found}"]
    before = {}
    for name, value in layer.named_parameters():
        value.data.copy_(torch.randn(value.shape))
        before[name] = (value.data_ptr(), value.data.float().clone())
    with mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True):
        method.create_moe_runner(layer, runner)
        method.process_weights_after_loading(layer)
    after = dict(layer.named_parameters())
    moved = [name for name, (place, _) in before.items() if after[name].data_ptr() != place]
    changed = [
        name for name, (_, values) in before.items() if not torch.equal(after[name].data.float(), values)
    ]
    problems = (
        [f"loading makes other parameters of {moved + changed}"]
        if moved + changed or after.keys() != before.keys()
        else []
    )
    return problems + (
        [] if method.runner.runner_backend.is_triton() else [f"experts run by {method.runner.runner_backend}"]
    )


def load_problems(arguments: dict) -> list[str]:
    """Return what is wrong with the path of a weight-sync command through the scheduler's process."""
    if dynamic_import(arguments["custom_weight_loader"][0]) is not receive_weights or arguments[
        "custom_weight_loader"
    ] != [RECEIVE_WEIGHTS]:
        return [f"{RECEIVE_WEIGHTS} is not the weight loader"]
    payload = normalize_serialized_named_tensor_payload(as_named_tensors({"number": 7}))
    ((_, tensor),) = MultiprocessingSerializer.deserialize(payload)
    given = pickle.loads(tensor.to("cpu").numpy().tobytes())
    return [] if given == {"number": 7} else [f"a command came as {given}"]


def adapter_problems() -> list[str]:
    """Return what is wrong with the buffers of adapters, which the weight loader writes.

    The first slot must be that of requests without an adapter, so that ours is the second.
    """
    folder = Path(sglang.__file__).parent / "srt/lora"  # its import asks for kernels
    layers = (folder / "layers.py").read_text()
    buffers = ("A_buffer", "B_buffer", "A_buffer_qkv", "B_buffer_qkv")
    problems = [f"no {name} of adapters" for name in buffers if f"self.{name} = {name}\n" not in layers]
    first = "self.fetch_new_loras({None})" in (folder / "lora_manager.py").read_text()
    return problems + ([] if first else ["requests without an adapter do not get the first slot"])


def reports_of_two_ranks() -> ShmLoadSnapshotReader:
    """Return the reader of the reports of two data-parallel ranks, whose file has no name any more."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/loads"
        writers = [ShmLoadSnapshotWriter(path, 2, rank) for rank in range(2)]
        reader = ShmLoadSnapshotReader(path, 2)
    for rank, writer in enumerate(writers):
        writer.write(
            LoadSnapshot(dp_rank=rank, num_running_reqs=3, num_waiting_reqs=4 + rank, timestamp=7.0 + rank)
        )
    return reader


async def made_calls() -> tuple[list[str], bool]:
    """Return the names of the calls that EngineControl's methods make, and whether the release knows
    spans.
    """
    engine = mock.create_autospec(Engine, instance=True)
    engine.tokenizer_manager = manager = mock.create_autospec(
        tokenizer_manager.TokenizerManager, instance=True
    )
    manager.flush_cache.return_value = io_struct.FlushCacheReqOutput(success=True, message="")
    manager.load_snapshot_reader = reports_of_two_ranks()
    control, reported = EngineControl(engine), []

    async def chunks():
        """Yield a response of two tokens as SGLang streams it: with all tokens so far."""
        for length, reason in ((1, None), (2, None), (2, {"type": "stop"})):
            logprobs = [(-1.0, token, None) for token in range(length)]
            yield {"meta_info": {"output_token_logprobs": logprobs, "finish_reason": reason}}

    async def generated(*_, stream=False, **__):
        return chunks() if stream else mock.MagicMock()

    engine.async_generate.side_effect = generated
    # A request that has reached the scheduler, and whose state has what `abort` reads.
    state = tokenizer_manager.ReqState.__new__(tokenizer_manager.ReqState)
    state.dispatched = True
    manager.rid_to_state = {f"{8:032d}": state}
    arguments = {
        "sample": (7, [1, 2], {"temperature": 1.0}, 1, 4, "salt", lambda *new: reported.append(new), 4),
        "abort": (8,),
        "prepare": (LoraConfig(rank=4), 2),
        "score": ([[1, 2], [3]],),
        "pause": (True,),
        "call_loader": (as_named_tensors({}), 2, RECEIVE_WEIGHTS),
        "tag": (3,),
        "release_memory": (["weights", "kv_cache"],),
        "resume_memory": (["weights"],),
    }
    for name, method in inspect.getmembers(control, inspect.ismethod):
        if not name.startswith("_"):
            answer = method(*arguments.pop(name, ()))
            if inspect.isawaitable(answer):
                await answer
    assert not arguments, f"no such methods: {list(arguments)}"
    assert control.load() == (6, 9, 8.0)
    assert reported == [([0], [-1.0]), ([1], [-1.0])]
    calls = {name.removeprefix("tokenizer_manager.") for name, *_ in engine.method_calls}
    return sorted(calls), control.knows_spans


def main() -> None:
    given = json.load(sys.stdin)
    problems = [problem for arguments in given["arguments"] for problem in argument_problems(arguments)]
    problems += load_problems(given["arguments"][0])
    for arguments in given["arguments"]:
        problems += quantization_problems(arguments) if "json_model_override_args" in arguments else []
    problems += adapter_problems()
    for mode in PAUSES:
        msgspec.convert(mode, typing.get_type_hints(io_struct.PauseGenerationReqInput)["mode"])
    SamplingParams(**given["sampling"], stream_interval=4)
    source = inspect.getsource(tokenizer_manager)
    problems += [f"no {key} in meta_info" for key in META if f'"{key}"' not in source]
    problems += (
        []
        if "self.last_receive_tstamp = " in source
        else ["nobody notes when the scheduler was last heard of"]
    )
    problems += [] if "dispatched" in vars(tokenizer_manager.ReqState) else ["no ReqState.dispatched"]
    problems += (
        []
        if "self.hf_eos_token_id = " in inspect.getsource(model_config)
        else ["nobody knows the ends of the model"]
    )
    calls, knows_spans = asyncio.run(made_calls())
    found = {"version": sglang.__file__, "problems": problems, "calls": calls, "knows_spans": knows_spans}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
