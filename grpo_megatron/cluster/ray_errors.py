"""Classification of Ray's errors: a lost process, a machine that lacks something, or a defect.

A lost process is replaced, and the run goes on from its newest checkpoint. If the machine lacks something, a
restart would fail again, so the run ends with a message that says what to change. Everything else is a defect
and keeps its traceback.
"""

import re

from ray import exceptions as ray_errors
from ray.exceptions import RayError

from grpo_megatron.errors import shortened

# The process, its node, or something that it held is gone or out of reach. A replacement could go on.
LOST: tuple[type[RayError], ...] = (
    ray_errors.RayActorError,
    ray_errors.OutOfMemoryError,  # Ray's memory monitor killed it
    ray_errors.NodeDiedError,
    ray_errors.LocalRayletDiedError,
    ray_errors.WorkerCrashedError,
    ray_errors.ObjectLostError,
    ray_errors.AsyncioActorExit,
    ray_errors.ActorUnschedulableError,  # its node has left
    ray_errors.TaskUnschedulableError,
    ray_errors.ActorPlacementGroupRemoved,
    ray_errors.TaskPlacementGroupRemoved,
    ray_errors.RaySystemError,  # raised where a raylet is killed
    ray_errors.RpcError,
    ray_errors.GetTimeoutError,
)
# With these errors, the process is known to have ended. With the others in LOST, it may only be unreachable.
ENDED = (
    ray_errors.ActorDiedError,
    ray_errors.OutOfMemoryError,
    ray_errors.NodeDiedError,
    ray_errors.WorkerCrashedError,
    ray_errors.AsyncioActorExit,
)
# The machine lacks something. The text says what to do.
LACKING: dict[type[RayError], str] = {
    ray_errors.ObjectStoreFullError: (
        "Ray's object store is full; enlarge /dev/shm on the node, or start Ray with a larger "
        "--object-store-memory"
    ),
    ray_errors.OutOfDiskError: (
        "the disk with Ray's temporary folder is full; free some space, or set RAY_TMPDIR to a folder on "
        "another disk"
    ),
    ray_errors.RuntimeEnvSetupError: (
        "Ray could not set up the process's environment; see Ray's runtime_env_agent.log on the node for the "
        "reason, which is often a full disk"
    ),
    ray_errors.AuthenticationError: (
        "the Ray cluster rejected this process's token; set the RAY_AUTH_MODE and RAY_AUTH_TOKEN that the "
        "cluster's `ray start` had"
    ),
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def what_is_lacking(error: RayError) -> str | None:
    """Return a message if an error means that a machine lacks something, such as disk space; else None.

    The message tells the user what to do, and ends with the last line of Ray's own message.
    """
    for kind, advice in LACKING.items():
        if isinstance(error, kind):
            said = next((line for line in reversed(plain(error).splitlines()) if line.strip()), "")
            return f"{advice}. Ray says: {shortened(said.strip(), 200)}"
    return None


def plain(error: BaseException) -> str:
    """Return the text of an error without the codes for terminal colours that Ray adds."""
    return _COLOURS.sub("", str(error))


def raised_there(error: ray_errors.RayTaskError) -> tuple[BaseException | None, str]:
    """Return (cause, line): the exception that code in a remote process raised, and a line that describes it.

    `line` has the type and the first line of the exception, such as `ValueError: no layer`. If the exception
    could not be sent to this process, `cause` is None or a RayTaskError, and `line` is the last line of the
    remote traceback.

    error: Ray's error from the call to the remote process.
    """
    cause = error.cause if isinstance(error.cause, BaseException) else None
    if cause is None or isinstance(cause, ray_errors.RayTaskError):
        lines = plain(error).strip().splitlines() or [type(error).__name__]
        return cause, shortened(lines[-1], 300)
    first = next((line for line in plain(cause).splitlines() if line.strip()), "")
    return cause, shortened(f"{type(cause).__name__}: {first}".removesuffix(": "), 300)
