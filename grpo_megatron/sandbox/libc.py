"""Wrappers of system calls that Python 3.11 has no function for."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments) -> int:
    """Call a function of the C library, and return its result.

    name: name of the function, such as `mount`.
    arguments: the function's arguments: ints, strings, bytes, pointers of ctypes or None.

    Raises OSError if the function returns -1.
    """
    result = getattr(_libc, name)(*map(_as_c, arguments))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def system_call(name: str, number: int, *arguments) -> int:
    """Make a system call for which the C library has no function, and return its result.

    name: name of the call, for the error message.
    number: number of the call on this architecture.
    arguments: the call's arguments: ints, strings, bytes, pointers of ctypes or None.

    Raises OSError if the call returns -1.
    """
    result = _libc.syscall(ctypes.c_long(number), *map(_as_c, arguments))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, value: int) -> None:
    call("prctl", option, value, 0, 0, 0)


def _as_c(argument):
    # ctypes passes a plain int as 32 bits, and leaves the upper 32 bits of the argument undefined.
    if isinstance(argument, int):
        return ctypes.c_long(argument)
    return argument.encode() if isinstance(argument, str) else argument
