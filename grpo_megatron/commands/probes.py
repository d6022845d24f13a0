"""Probes of `grpo-megatron doctor`: functions that try out one library or device each.

`attempt` runs a probe in a process of its own, because a broken library may crash it. A probe returns one
line of text for the user, and raises an exception if it fails.
"""

import importlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

from grpo_megatron.cluster.gpu_environment import filled_in, gpu_environment, preload_environment

_CHILD = """
import sys
from grpo_megatron.commands import probes
print(getattr(probes, sys.argv[1])(*sys.argv[2:]))
"""


class ProbeError(Exception):
    """Failure of a probe, which is a check of one library or device. The message is one line."""


def attempt(probe: Callable[..., str], *arguments: str, timeout: float = 180.0) -> str:
    """Run a probe (a check of one library or device) in another process, and return its line of text.

    The process has the environment variables of a rank or an engine. Raises ProbeError if the probe raises,
    if its process crashes, or after the timeout. Except after the timeout, the message includes the last line
    that the process printed on stderr.

    probe: a function of this module, which is called with `arguments`.
    timeout: seconds.
    """
    environment = filled_in(gpu_environment(os.environ), os.environ)
    said = _output_of(["-W", "ignore", "-c", _CHILD, probe.__name__, *arguments], timeout, environment)
    if not said.strip():
        raise ProbeError("its process ended with exit status 0 but without a result")
    return said.splitlines()[-1]


def _output_of(arguments: list[str], timeout: float, environment: dict[str, str] | None = None) -> str:
    """Run the Python interpreter in a new process, and return the text that the process prints on stdout.

    Raises ProbeError if the process fails, or does not end in time.

    arguments: command-line arguments of the interpreter.
    timeout: seconds.
    environment: environment variables of the new process; None: those of this process.
    """
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it did not finish within {timeout:.0f} s") from error
    last = ([line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it printed no message"])[
        -1
    ]
    if done.returncode < 0:
        raise ProbeError(f"its process was ended by {signal.Signals(-done.returncode).name}: {last}")
    if done.returncode:
        raise ProbeError(last.removeprefix(f"{__name__}.ProbeError: "))
    return done.stdout


def import_of(module: str) -> str:
    """Import a module, to check that the module and the libraries it needs work.

    Returns the module's version, or the text `can be imported` if the module states none. Raises whatever the
    import raises.
    """
    return getattr(importlib.import_module(module), "__version__", "can be imported")


_PAUSED_BYTES = 256 * 2**20
_PAUSE = """
import sys
import torch
from torch_memory_saver import torch_memory_saver as saver

size = int(sys.argv[1])
with saver.region(tag="weights"):
    memory = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
free = torch.cuda.mem_get_info()[0]
saver.pause("weights")
freed = torch.cuda.mem_get_info()[0] - free
saver.resume("weights")
memory.fill_(3)
if freed < size // 2 or int(memory[-1]) != 3:
    raise RuntimeError(f"it gave back {freed >> 20} of {size >> 20} MiB, and the last byte is \
{int(memory[-1])} instead of 3")
"""


def memory_saver() -> str:
    """Check that torch_memory_saver can release GPU memory and allocate it again. Return a text for the user.

    Engines that share devices with the trainer release their memory in this way. The check starts one more
    process, because torch_memory_saver's library must be preloaded when a process starts. Raises ProbeError
    if the check fails.
    """
    import torch
    import torch_memory_saver

    os.environ |= preload_environment(os.environ, torch.version.cuda)
    with torch_memory_saver.configure_subprocess():
        _output_of(["-W", "ignore", "-c", _PAUSE, str(_PAUSED_BYTES)], timeout=120.0)
    return f"gives back {_PAUSED_BYTES >> 20} MiB and takes them again"


def kernel(capability: str = "") -> str:
    """Check that GPU kernels can be built: compile SGLang's SwiGLU kernel, which nearly all models need.

    capability: compute capability to build for, such as `9.0`. If empty, the kernel is built for this
        machine's GPU, and its results are checked too.

    Returns a text for the user. Raises ProbeError if the build fails or the kernel's results are wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TVM_FFI_CACHE_DIR"] = folder  # a kernel that was built earlier would prove nothing
        import torch
        from sglang.kernels.jit.utils import arch
        from sglang.kernels.ops.activation import activation

        start = time.perf_counter()
        chosen = (
            arch.override_jit_cuda_arch(*map(int, capability.split("."))) if capability else nullcontext()
        )
        with chosen:
            try:
                activation.activation_module(torch.bfloat16)
            except RuntimeError as error:  # holds all that the compilers have printed
                lines = [
                    line
                    for line in str(error).splitlines()
                    if re.search(r"\b(error|cannot|not found)\b", line, re.IGNORECASE)
                ]
                raise ProbeError(lines[0] if lines else str(error).strip().splitlines()[-1]) from error
            target = arch.get_jit_cuda_arch().target_name
        seconds = time.perf_counter() - start
        if not capability:
            both = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
            gate, up = both.float().chunk(2, dim=-1)
            error = (
                (activation.silu_and_mul(both).float() - torch.nn.functional.silu(gate) * up)
                .abs()
                .max()
                .item()
            )
            if not error < 0.1:
                raise ProbeError(f"the results of SGLang's kernel for SwiGLU are off by {error:.2g}")
    return f"built for sm {target} in {seconds:.0f} s"


# Largest rounding error of a product, relative to its largest element. A wrong library is off by far more.
_ROUNDING = {"fp32": 1e-5, "bf16": 1e-2, "fp8": 0.1}


def matrix_product(precision: str) -> str:
    """Compare a square matrix product with the product in float64, and time it, on a GPU if there is one.

    precision: fp32, bf16, or fp8 (with TransformerEngine).

    Returns a text with speed and error. Raises ProbeError if rounding cannot explain the error.
    """
    import torch

    cuda = torch.cuda.is_available()
    # On a GPU, the size keeps it busy for milliseconds.
    size = (4096 if precision == "fp32" else 8192) if cuda else 512
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    a, b = (
        torch.randn(size, size, generator=generator).to("cuda" if cuda else "cpu", dtype) for _ in range(2)
    )
    product = _fp8_product(b) if precision == "fp8" else lambda a: a @ b.T
    exact = a[:16].double() @ b.T.double()
    error = ((product(a)[:16].double() - exact).abs().max() / exact.abs().max()).item()
    if not error <= _ROUNDING[precision]:
        raise ProbeError(f"a product in {precision} is off by {error:.2g} of its largest element")
    seconds = statistics.median(_seconds(lambda: product(a), cuda) for _ in range(10))
    return f"{2 * size**3 / seconds / 1e12:.3g} TFLOP/s ({size} x {size} x {size}), error {error:.1e}"


def _fp8_product(weight):
    """Return a function that multiplies a matrix by the transposed `weight` in FP8, with TransformerEngine.

    Each call also casts both matrices to FP8 and computes their scales, so a measured time includes this.

    weight: tensor [outputs, inputs].
    """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    layer = te.Linear(
        weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, device=weight.device
    )
    layer.weight.data.copy_(weight)

    def product(a):
        with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return layer(a)

    return product


def _seconds(work: Callable, cuda: bool) -> float:
    import torch

    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def all_reduce() -> str:
    """Check and time an all-reduce: with NCCL over one process per GPU, or with gloo over two CPU processes.

    Returns a text with size and time. Raises an exception if a rank fails, or if it gets a wrong sum.
    """
    import torch

    cuda = torch.cuda.is_available()
    world = torch.cuda.device_count() if cuda else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _all_reduce_rank, (world, f"file://{folder}/store", f"{folder}/seconds"), nprocs=world
        )
        with open(f"{folder}/seconds", encoding="utf-8") as file:
            seconds = float(file.read())
    backend, size = ("NCCL", _ELEMENTS_ON_GPU) if cuda else ("gloo", _ELEMENTS)
    return f"{backend}, {world} processes: {4 * size / 2**20:.0f} MiB in {1e3 * seconds:.3g} ms"


_ELEMENTS, _ELEMENTS_ON_GPU = 2**20, 2**26


def _all_reduce_rank(rank: int, world: int, store: str, report: str) -> None:
    """Run five all-reduces as one rank, and check each sum. Raise ProbeError if a sum is wrong.

    world: number of ranks.
    store: init_method of torch.distributed, the URL of a file through which the ranks find each other.
    report: path of the file into which rank 0 writes the median time in seconds.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=world)
    times = []
    for _ in range(5):
        tensor = torch.full((_ELEMENTS_ON_GPU if cuda else _ELEMENTS,), rank + 1.0, device=device)
        times.append(_seconds(lambda tensor=tensor: dist.all_reduce(tensor), cuda))
        if not bool((tensor == world * (world + 1) / 2).all()):
            raise ProbeError(f"the sum over {world} processes is wrong on process {rank}")
    if rank == 0:
        with open(report, "w", encoding="utf-8") as file:
            file.write(str(statistics.median(times)))
    dist.destroy_process_group()
