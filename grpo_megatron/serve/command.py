"""`grpo-megatron serve`: starts the session and the HTTP server, and executes requests until it stops."""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from grpo_megatron.api import open_session
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import Stopped, UserError
from grpo_megatron.run.checkpoints import CHECKPOINTS, discard, folders
from grpo_megatron.run.folder import run_folder
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.lock import Ownership
from grpo_megatron.serve.clients import Clients
from grpo_megatron.serve.server import ServerState, serve_on
from grpo_megatron.serve.tenant import FOLDER, Tenant

_KEY = "TINKER_API_KEY"
# Time between two looks for a request to stop.
_LOOK_SECONDS = 0.5


def serve(
    config: Config, host: str, port: int, name: str | None, lost_after: float, guard: Guard | None = None
) -> None:
    """Serve the Tinker API until the process is asked to stop. The key is in the environment, or is printed.

    host, port: address to listen on. Port 0: a free one.
    name: name by which clients ask for the model. None: model.path.
    lost_after: seconds without a sign of life after which a client counts as lost.

    Raises UserError if the configuration cannot be used or the port is taken, and Stopped at the end.
    """
    guard = guard or Guard()
    key = os.environ.get(_KEY) or f"tml-{secrets.token_urlsafe(32)}"
    if not key.startswith("tml-"):
        raise UserError(f"{_KEY} must begin with tml-, because the SDK requires it")
    if config.rollout.temperature != 1:
        raise UserError("the losses of the Tinker API are of temperature 1; set rollout.temperature=1")
    _no_checkpoints_of_others(config)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error}; choose another --port") from error
    with listener, open_session(config, guard) as session:
        model, tenant = name or config.model.path, Tenant(session)
        rank = config.megatron.lora.rank
        state = ServerState(tenant, Clients(tenant, lost_after), model, rank, session.longest)
        with listening(listener, state, key):
            shown = "" if os.environ.get(_KEY) else f" {_KEY}={key}"
            print(f"serving {model}; clients need", flush=True)
            print(f"export TINKER_BASE_URL=http://{host}:{listener.getsockname()[1]}{shown}", flush=True)
            while not guard.stop.is_made:
                guard.stop.step = session.step  # from now on, a request in progress is completed
                tenant.work(_LOOK_SECONDS)
    raise Stopped(
        f"stopped on request ({guard.stop.signal.name}); the same command serves the saved states again"
    )


def _no_checkpoints_of_others(config: Config) -> None:
    """Raise UserError if the run's folder has checkpoints that no server wrote. Delete what a server left.

    Raises UserError also if a server that is still running owns the folder.
    """
    folder = run_folder(config)
    left = folders(folder / CHECKPOINTS)
    if left and not (folder / FOLDER).exists():
        raise UserError(f"{folder} is the folder of another kind of run; choose another run.name")
    if left:
        with ExitStack() as owned:
            owned.callback(Ownership(folder).release)
            for path in folders(folder / CHECKPOINTS):
                discard(path)


@contextmanager
def listening(listener: socket.socket, state: ServerState, key: str) -> Iterator[None]:
    """Serve HTTP requests in a thread, as long as the context is open."""
    stop = threading.Event()
    arguments = (serve_on(listener, state, key, stop),)
    thread = threading.Thread(target=asyncio.run, args=arguments, name="serve", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
