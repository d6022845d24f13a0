"""Fast start of SGLang's processes on a CPU: they are forked from a process that has already imported SGLang.

SGLang spawns its processes, and each one imports everything again, because a process that uses CUDA must not
be forked. On a CPU these imports take most of an engine's start.

Written for SGLang 0.5.23.
"""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any

_IMPORTS = "grpo_megatron.sglang.without_gpu.forked_imports"


def prepare() -> None:
    """Start the process from which SGLang's processes will be forked, and return immediately.

    The new process gets the current environment variables and imports SGLang in the background.
    """
    forkserver.set_forkserver_preload([_IMPORTS])
    forkserver.ensure_running()


def forking(engine: type) -> type:
    """Return a subclass of sglang.Engine that forks its processes instead of spawning them, to start faster.

    engine: the class sglang.Engine.
    """

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
    """Run the main function of an SGLang process in a forked process, as if the process had been spawned.

    A spawned process would have the current environment variables, so they are set first. Child processes of
    the forked process are spawned, not forked.

    environment: environment variables of the engine's process. SGLang may have changed some after the process
        from which this one is forked was started.
    function: the main function. It is called with `arguments`, and its result is returned.
    """
    # Set only the variables that changed: once the whole environment has been set, a process title cannot be
    # set.
    os.environ.update(environment.items() - os.environ.items())
    multiprocessing.set_start_method("spawn", force=True)
    return function(*arguments)
