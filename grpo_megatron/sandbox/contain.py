"""Everything that contains the process which calls it, for good."""

import ctypes
import os
import resource

from grpo_megatron.sandbox import landlock, libc, namespaces, system_calls

# What keeps a program from files outside of its folder. The rest is the same with all of them.
NAMESPACES, LANDLOCK, NOTHING = "namespaces", "landlock", "nothing"

_SYSTEM_FOLDERS = (
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


def contain(files: str, folder: str, python_folders: list[str], limits: dict) -> None:
    """Contain this process, which has a single thread; the working directory is its own folder then.

    files: NAMESPACES, LANDLOCK or NOTHING. folder: an empty one. python_folders: of the interpreter and its packages.
    limits: see config.sandbox. Raises OSError.
    """
    readable = _outermost([*_SYSTEM_FOLDERS, *python_folders])
    devices = [path for path in _DEVICES if os.path.exists(path)]
    if files == NAMESPACES:
        namespaces.enter(folder, readable, devices, limits["files_mib"] << 20, limits["files"])
    else:
        os.chdir(folder)
    _limit_resources(limits)
    # A terminal that stops or interrupts a group of processes is not to meet the helper.
    os.setpgid(0, 0)
    # Behind whatever else this machine has to do. In a session of its own it would not be: the scheduler's autogroups give each
    # session an equal share, whatever the priorities in it.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _drop_capabilities()
    system_calls.no_new_privileges()
    if files == LANDLOCK:
        landlock.restrict([folder], readable, devices)
    # Changed credentials take it away, so not earlier.
    system_calls.end_with_parent()
    system_calls.forbid()


def _outermost(paths: list[str]) -> list[str]:
    """Those that exist, without what lies in another one of them."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if os.path.exists(path) and not any(path.startswith(other + os.sep) for other in kept):
            kept.append(path)
    return kept


def _limit_resources(limits: dict) -> None:
    memory, file_size = limits["memory_mib"] << 20, limits["files_mib"] << 20
    seconds = limits["cpu_seconds"]
    for kind, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        # SIGXCPU first, by which the reason is known; it can be ignored, SIGKILL a second later cannot.
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        # Whoever runs the sandbox may have stricter ones itself, as a reward worker has of files; they cannot be raised.
        own = resource.getrlimit(kind)[1]
        most = hard if own == resource.RLIM_INFINITY else min(hard, own)
        resource.setrlimit(kind, (min(soft, most), most))


# A deleted file takes its space for as long as it is open.
_OPEN_FILES = 64


def _drop_capabilities() -> None:
    """Those of root, or of the creator of a user namespace."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    libc.system_call("capset", _CAPSET[os.uname().machine], ctypes.byref(header), ctypes.byref(none))
