"""Restriction of a process's file access by Landlock, a security module of the Linux kernel.

It is used where users may not create namespaces, as in most containers. Landlock does not cover everything.
System calls that change a file without opening it (chmod, utime, truncate) are forbidden by system_calls.py.
The existence of a path and the size of a file stay visible.
"""

import ctypes
import os

from grpo_megatron.sandbox import libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH, _NET_PORT = 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
# The rights that apply to files; all others apply only to folders. 1 << 14: truncate, 1 << 15: ioctl on a
# device.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
# Number of rights in each version of the interface, starting with version 1.
_NUM_RIGHTS = (13, 14, 15, 15, 16)
# Rights to bind and to connect TCP sockets, since version 4.
_BIND_TCP, _CONNECT_TCP, _NETWORK_VERSION = 1, 2, 4
# The scopes for abstract sockets and for signals to outside processes, since version 6.
_SIGNALS, _SCOPES, _SCOPES_VERSION = 2, 3, 6


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


class _Port(ctypes.Structure):
    _fields_ = [("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64)]


def version() -> int:
    """Return the version of the kernel's Landlock interface, which decides which access rights exist.

    Raises OSError if the kernel is older than Linux 5.13, or if Landlock is disabled.
    """
    return libc.system_call("landlock_create_ruleset", _CREATE_RULESET, None, 0, 1)


def bounds_connections() -> bool:
    """Return True if `restrict` can bound the TCP connections of a process to a port (Linux 6.7 or later)."""
    return version() >= _NETWORK_VERSION


def restrict(
    writable: list[str],
    readable: list[str],
    devices: list[str],
    may_execute: bool = False,
    port: int | None = None,
) -> None:
    """Restrict this process permanently: it can only access the given folders, files and devices.

    The process must have called system_calls.no_new_privileges before.

    writable: folders in which the process may read and write files.
    readable: folders and files that the process may read and execute.
    devices: devices that the process may read and write.
    may_execute: True to let the process also execute files in `writable`.
    port: the only TCP port that the process may connect to, and bind no socket; None: no restriction, because
        system_calls.py forbids all of the network.

    Raises OSError if the kernel has no Landlock, or if a path does not exist.
    """
    known = version()
    rights = (1 << _NUM_RIGHTS[min(known, len(_NUM_RIGHTS)) - 1]) - 1
    network = 0 if port is None else _BIND_TCP | _CONNECT_TCP
    ruleset = _new_ruleset(rights, network, _SCOPES if known >= _SCOPES_VERSION else 0)
    for paths, allowed in (
        (writable, rights if may_execute else rights & ~_EXECUTE),
        (readable, _EXECUTE | _READ_FILE | _READ_DIR),
        (devices, _READ_FILE | _WRITE_FILE),
    ):
        for path in paths:
            _allow(ruleset, path, allowed)
    if port is not None:
        rule = _Port(_CONNECT_TCP, port)
        libc.system_call("landlock_add_rule", _ADD_RULE, ruleset, _NET_PORT, ctypes.byref(rule), 0)
    _enforce(ruleset)


def keep_signals() -> bool:
    """Permanently keep this process from sending signals to processes other than its descendants.

    The process must have called system_calls.no_new_privileges before. Returns False, and does nothing, if
    the kernel is older than Linux 6.12 or has no Landlock.
    """
    try:
        if version() < _SCOPES_VERSION:
            return False
    except OSError:
        return False
    _enforce(_new_ruleset(0, 0, _SIGNALS))
    return True


def _new_ruleset(files: int, network: int, scopes: int) -> int:
    # struct landlock_ruleset_attr. An older kernel refuses a size with fields that it does not know.
    handled = (ctypes.c_uint64 * 3)(files, network, scopes)
    size = 24 if scopes else 16 if network else 8
    return libc.system_call("landlock_create_ruleset", _CREATE_RULESET, ctypes.byref(handled), size, 0)


def _enforce(ruleset: int) -> None:
    libc.system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(allowed if os.path.isdir(path) else allowed & _OF_FILES, found)
    libc.system_call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(found)
