"""SGLang's processes on a CPU, forked from one that has imported SGLang.

SGLang has each of them import everything anew, because a process that uses CUDA may not be forked. On a CPU that import is most of
what the start of an engine takes.

Written for SGLang 0.5.23.
"""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any

_IMPORTS = "grpo_megatron.sglang.cpu_imports"


def prepare() -> None:
    """Start the process to fork from, and return at once. Its environment is the one of now."""
    forkserver.set_forkserver_preload([_IMPORTS])
    forkserver.ensure_running()


def forking(engine: type) -> type:
    """sglang.Engine, whose processes are forked in place of spawned."""

    class ForkingEngine(engine):
        @classmethod
        def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func, **more):
            multiprocessing.set_start_method("forkserver", force=True)  # SGLang has just set "spawn"
            run = partial(_run, dict(os.environ), run_scheduler_process_func)
            return super()._launch_scheduler_processes(server_args, port_args, run, **more)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
            run = partial(_run, dict(os.environ), run_detokenizer_process_func)
            return super()._launch_detokenizer_subprocesses(server_args, port_args, run)

    return ForkingEngine


def _run(environment: dict[str, str], function: Callable, *arguments) -> Any:
    """As a spawned process would: in the environment that SGLang has prepared meanwhile, and to spawn others."""
    # Those that have changed: the title of a process cannot be set after its whole environment was.
    os.environ.update(environment.items() - os.environ.items())
    multiprocessing.set_start_method("spawn", force=True)
    return function(*arguments)
