"""Restriction of a process's file access by Landlock, a security module of the Linux kernel.

It is used where users may not create namespaces, as in most containers. Landlock does not cover everything.
System calls that change a file without opening it (chmod, utime, truncate) are forbidden by system_calls.py.
The existence of a path and the size of a file stay visible.
"""

import ctypes
import os

from grpo_megatron.sandbox import libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
# The rights that apply to files; all others apply only to folders. 1 << 14: truncate, 1 << 15: ioctl on a
# device.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
# Number of rights in each version of the interface, starting with version 1.
_NUM_RIGHTS = (13, 14, 15, 15, 16)
# The scopes for abstract sockets and for signals to outside processes, since version 6.
_SCOPES = 3


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def version() -> int:
    """Return the version of the kernel's Landlock interface, which decides which access rights exist.

    Raises OSError if the kernel is older than Linux 5.13, or if Landlock is disabled.
    """
    return libc.system_call("landlock_create_ruleset", _CREATE_RULESET, None, 0, 1)


def restrict(writable: list[str], readable: list[str], devices: list[str]) -> None:
    """Restrict this process permanently: it can only access the given folders, files and devices.

    The process must have called system_calls.no_new_privileges before.

    writable: folders in which the process may read and write, but not execute files.
    readable: folders and files that the process may read and execute.
    devices: devices that the process may read and write.

    Raises OSError if the kernel has no Landlock, or if a path does not exist.
    """
    known = version()
    rights = (1 << _NUM_RIGHTS[min(known, len(_NUM_RIGHTS)) - 1]) - 1
    # struct landlock_ruleset_attr: files, network (system_calls.py forbids all of it), scopes
    handled = (ctypes.c_uint64 * 3)(rights, 0, _SCOPES if known >= 6 else 0)
    size = ctypes.sizeof(handled) if known >= 6 else 8
    ruleset = libc.system_call("landlock_create_ruleset", _CREATE_RULESET, ctypes.byref(handled), size, 0)
    for paths, allowed in (
        (writable, rights & ~_EXECUTE),
        (readable, _EXECUTE | _READ_FILE | _READ_DIR),
        (devices, _READ_FILE | _WRITE_FILE),
    ):
        for path in paths:
            _allow(ruleset, path, allowed)
    libc.system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(allowed if os.path.isdir(path) else allowed & _OF_FILES, found)
    libc.system_call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(found)
