"""A pool of persistent processes that become the ranks of one layout after another.

Importing Megatron takes seconds. With a CPU build of torch, a session pays this once, in a process from which
the others are forked. With a CUDA build, every process is spawned and imports Megatron again: CUDA cannot be
used in a process that was forked from one that has asked for devices, and importing Megatron asks. Process
groups are kept as long as the layout stays the same, and made anew for another.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import traceback
import uuid
from pathlib import Path

import psutil
import pytest

from grpo_megatron.capabilities import emulated_transformer_engine, start_method
from grpo_megatron.model.parallel_sizes import ParallelSizes

_MOST_THREADS = 300


@contextlib.contextmanager
def rank_pool(emulate_kernels: bool = False):
    """Yield a RankPool that is closed at the end. Skip the test if kernels must be emulated and cannot be."""
    if emulate_kernels and (problem := emulated_transformer_engine()[1]):
        pytest.skip(problem)
    pool = RankPool(emulate_kernels)
    try:
        yield pool
    finally:
        pool.close()


class RankPool:
    def __init__(self, emulate_kernels: bool = False):
        """Create a pool.

        emulate_kernels: True if TransformerEngine must be importable in the processes.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._forge = Forge(emulate_kernels)
        # What a layout is compared with, mostly on one rank, does not interrupt it.
        self._alone, self._together = (Team(self._forge, self._folder.name) for _ in range(2))

    def run(self, function, sizes: ParallelSizes, *args, seed: int = 1234) -> list:
        """Run function(*args) on every rank of the layout, and return the results in rank order.

        `function` must be importable. Raises AssertionError with the traceback of the first rank that failed.
        The processes are then started anew, because the others may hang in a collective.
        """
        team = self._alone if sizes.world_size == 1 else self._together
        return team.run(function, sizes, args, seed)

    def close(self):
        self._alone.close()
        self._together.close()
        self._forge.close()


class Forge:
    """A process that starts the others. If it forks them, it has imported everything before."""

    def __init__(self, emulate_kernels: bool):
        self._orders, theirs = multiprocessing.get_context("spawn").Pipe()
        # Not a daemon: it has children.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_start_on_order, args=(theirs, emulate_kernels, start_method())
        )
        self._process.start()
        theirs.close()

    def process(self):
        """Start a process and return (its id, the connection to it)."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._orders.send(theirs)
            return self._orders.recv(), ours

    def close(self):
        self._process.kill()
        self._process.join()


class Team:
    """Processes that are, or can become, the ranks of one layout."""

    def __init__(self, forge: Forge, folder: str):
        self._forge, self._folder = forge, folder
        self._workers = []
        self._joined: ParallelSizes | None = None  # the layout of their process groups
        self._init_method = ""

    def run(self, function, sizes: ParallelSizes, args: tuple, seed: int) -> list:
        if sizes != self._joined:
            self._renew()
            self._joined, self._init_method = sizes, f"file://{Path(self._folder) / uuid.uuid4().hex}"
        while len(self._workers) < sizes.world_size:
            self._workers.append(self._forge.process())
        used = self._workers[: sizes.world_size]
        for rank, (_, connection) in enumerate(used):
            connection.send((function, args, sizes, rank, self._init_method, seed))
        results = []
        for rank, (_pid, connection) in enumerate(used):
            if not connection.poll(300):
                self.close()
                raise AssertionError(f"rank {rank} did not answer within 300 s")
            ok, value = connection.recv()
            if not ok:
                self.close()
                raise AssertionError(f"rank {rank} of {sizes}:\n{value}")
            results.append(value)
        return results

    def _renew(self) -> None:
        """Replace processes that have too many threads.

        gloo's groups do not end all their threads when they are destroyed. After some hundred layouts there
        are thousands of them, and their polling slows the tests down to a tenth.
        """
        for worker in list(self._workers):
            if psutil.Process(worker[0]).num_threads() > _MOST_THREADS:
                self._end([worker])
                self._workers.remove(worker)

    def close(self):
        self._end(self._workers)
        self._workers, self._joined = [], None

    @staticmethod
    def _end(workers) -> None:
        for pid, connection in workers:
            with contextlib.suppress(ProcessLookupError):  # it died, and its parent has noticed
                os.kill(pid, signal.SIGKILL)
            connection.close()


def _forget_scales() -> None:
    """Reset TransformerEngine's state about FP8 scales and their groups, which lives as long as the
    process.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def _import_megatron(emulate_kernels: bool) -> None:
    gc.disable()  # during the imports, of which nothing is garbage
    if emulate_kernels:
        from grpo_megatron.megatron.without_gpu import emulation

        emulation.install()
    import grpo_megatron.megatron.actor  # noqa: F401

    gc.enable()
    gc.freeze()  # no collection walks through what was imported


def _start_on_order(orders, emulate_kernels: bool, method: str):
    if method == "fork":
        _import_megatron(emulate_kernels)
    context = multiprocessing.get_context(method)
    while True:
        try:
            connection = orders.recv()
        except EOFError:
            return  # the test session is gone
        # Not a daemon: saving a checkpoint starts a process of its own.
        process = context.Process(target=_serve, args=(connection, emulate_kernels))
        process.start()
        connection.close()
        orders.send(process.pid)


def _serve(connection, emulate_kernels: bool):
    _import_megatron(emulate_kernels)
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from grpo_megatron.megatron import process_groups

    torch.set_num_threads(1)
    joined = None
    while True:
        try:
            function, args, sizes, rank, init_method, seed = connection.recv()
        except EOFError:
            return  # the test session is gone
        try:
            if joined != init_method:
                process_groups.destroy()
                gc.collect()
                process_groups.initialize(sizes, rank, init_method, seed, timeout_seconds=120)
                joined = init_method
            else:
                model_parallel_cuda_manual_seed(seed)
            if emulate_kernels:
                _forget_scales()
            value = function(*args)
            gc.collect()  # models and optimizers hold each other
            connection.send((True, value))
        except Exception:
            connection.send((False, traceback.format_exc()))
