"""contain() takes away the calling process's access to files, network and other processes, for good."""

import ctypes
import os
import resource
import socket

from grpo_megatron.sandbox import landlock, libc, namespaces, system_calls

# The mechanisms that keep a program from files outside its folder. All other restrictions are the same with
# each mechanism, except that BARE restricts nothing at all.
NAMESPACES, LANDLOCK, NOTHING, BARE = "namespaces", "landlock", "nothing", "bare"

SYSTEM_FOLDERS = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_CAPABILITIES_VERSION = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}


def contain(program: dict) -> socket.socket | None:
    """Restrict this process permanently, before it runs an untrusted program.

    The process loses its access to the network, to other processes, and to files that it does not need. It
    must have a single thread. There is only one folder in which it may write, which becomes its working
    directory: `folder`, or with NAMESPACES a new file system in memory.

    program: the message from Sandbox that describes the program. Its containment says how files outside of
        the folder are protected: NAMESPACES, LANDLOCK, NOTHING (not at all), or BARE (no restriction at all).
        A program with several processes may start other processes, which inherit the restrictions. A shell
        command with a port may also connect to this port of the machine's loopback.

    Returns the socket through which a program with NAMESPACES reaches its port, see relay.py; else None.

    Raises OSError if the kernel refuses a restriction.
    """
    containment, folder, limits = program["containment"], program["folder"], program["limits"]
    is_command, port, listener = program["kind"] == "command", program["port"], None
    readable = _outermost([*SYSTEM_FOLDERS, *program["readable"]])
    devices = [path for path in _DEVICES if os.path.exists(path)]
    if containment == NAMESPACES:
        namespaces.enter(folder, readable, devices, limits["files_mib"] << 20, limits["files"])
        listener = None if port is None else namespaces.listen(port)
    else:
        os.chdir(folder)
    # In a process group of its own, the program cannot make a terminal stop or interrupt the helper.
    os.setpgid(0, 0)
    if containment == BARE:
        # Otherwise it could start a setuid program, which nothing here could end.
        system_calls.no_new_privileges()
        system_calls.end_with_parent()
        return None
    if is_command:
        # Programs such as Node reserve much more address space than they use.
        _limit_resources(limits, resource.RLIMIT_DATA, _OPEN_FILES_OF_COMMANDS)
    else:
        _limit_resources(limits, resource.RLIMIT_AS, _OPEN_FILES)
    if not is_command:
        # Run with the lowest priority. Do not create a session: the scheduler's autogroups would give the
        # session an equal share of the processors, regardless of the priorities in it.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _drop_capabilities()
    system_calls.no_new_privileges()
    if containment == LANDLOCK:
        landlock.restrict([folder], readable, devices, is_command, port)
    # Do this only now, because a change of credentials resets this setting.
    system_calls.end_with_parent()
    system_calls.forbid(
        system_calls.Allowed(
            fork=program["processes"] > 1,
            sessions=is_command,
            signals=is_command and landlock.keep_signals(),
            file_changes=is_command and containment == NAMESPACES,
            connections=port is not None,
        )
    )
    return listener


def _outermost(paths: list[str]) -> list[str]:
    """Return the paths that exist, without those that lie inside another one of the paths.

    Permission for a folder covers everything in it, so paths inside it need no permission of their own.
    """
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if os.path.exists(path) and not any(path.startswith(other + os.sep) for other in kept):
            kept.append(path)
    return kept


def _limit_resources(limits: dict, memory_kind: int, open_files: int) -> None:
    """Set the limits that the kernel enforces.

    limits: the fields of config.sandbox.SandboxLimits as a dict.
    memory_kind: the resource that limits.memory_mib limits: RLIMIT_AS, or RLIMIT_DATA for private memory.
    open_files: maximum number of open files.
    """
    memory, file_size = limits["memory_mib"] << 20, limits["files_mib"] << 20
    seconds = limits["cpu_seconds"]
    for kind, soft, hard in (
        (memory_kind, memory, memory),
        # SIGXCPU comes first and tells the reason. A program can ignore it, but not the SIGKILL a second
        # later.
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, open_files, open_files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        # This process may already have stricter limits, such as a reward worker's on files. These cannot be
        # raised.
        own = resource.getrlimit(kind)[1]
        most = hard if own == resource.RLIM_INFINITY else min(hard, own)
        resource.setrlimit(kind, (min(soft, most), most))


# Limited, because a deleted file occupies its space as long as it is open.
_OPEN_FILES, _OPEN_FILES_OF_COMMANDS = 64, 1024


def _drop_capabilities() -> None:
    # Root and the creator of a user namespace have capabilities.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    libc.system_call("capset", _CAPSET[os.uname().machine], ctypes.byref(header), ctypes.byref(none))
