"""contain() takes away the calling process's access to files, network and other processes, for good."""

import ctypes
import os
import resource

from grpo_megatron.sandbox import landlock, libc, namespaces, system_calls

# The mechanisms that keep a program from files outside its folder. All other restrictions are the same with
# each mechanism.
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


def contain(containment: str, folder: str, python_folders: list[str], limits: dict, may_fork: bool) -> None:
    """Restrict this process permanently, before it runs an untrusted program.

    The process loses its access to the network, to other processes, and to files that it does not need. It
    must have a single thread. There is only one folder in which it may write, which becomes its working
    directory: `folder`, or with NAMESPACES a new file system in memory.

    containment: how files outside of this folder are protected: NAMESPACES, LANDLOCK or NOTHING (not at all).
    folder: an empty folder for the process.
    python_folders: folders of the Python interpreter and its packages, which the process may read.
    limits: the fields of config.sandbox.SandboxLimits as a dict.
    may_fork: True to allow the process to start other processes. These inherit the restrictions, and stay in
        the process group of this process.

    Raises OSError if the kernel refuses a restriction.
    """
    readable = _outermost([*_SYSTEM_FOLDERS, *python_folders])
    devices = [path for path in _DEVICES if os.path.exists(path)]
    if containment == NAMESPACES:
        namespaces.enter(folder, readable, devices, limits["files_mib"] << 20, limits["files"])
    else:
        os.chdir(folder)
    _limit_resources(limits)
    # In a process group of its own, the program cannot make a terminal stop or interrupt the helper.
    os.setpgid(0, 0)
    # Run with the lowest priority. Do not create a session: the scheduler's autogroups would give the session
    # an equal share of the processors, regardless of the priorities in it.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _drop_capabilities()
    system_calls.no_new_privileges()
    if containment == LANDLOCK:
        landlock.restrict([folder], readable, devices)
    # Do this only now, because a change of credentials resets this setting.
    system_calls.end_with_parent()
    system_calls.forbid(may_fork)


def _outermost(paths: list[str]) -> list[str]:
    """Return the paths that exist, without those that lie inside another one of the paths.

    Permission for a folder covers everything in it, so paths inside it need no permission of their own.
    """
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
        # SIGXCPU comes first and tells the reason. A program can ignore it, but not the SIGKILL a second
        # later.
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
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
_OPEN_FILES = 64


def _drop_capabilities() -> None:
    # Root and the creator of a user namespace have capabilities.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    libc.system_call("capset", _CAPSET[os.uname().machine], ctypes.byref(header), ctypes.byref(none))
