"""A seccomp filter that refuses system calls which a contained process may not make, also after an exec.

Such a filter can be installed everywhere, also in containers. It forbids the network, new processes, and all
access to other processes of the same user. In particular, it forbids every call that makes the kernel send a
signal to such a process. A program that needs new processes, such as a shell, can be allowed to start them.
"""

import ctypes
import errno
import os
from dataclasses import dataclass

from grpo_megatron.sandbox import libc

# The numbers of each call on x86-64 and on 64-bit ARM; None where an architecture lacks the call.
_FORBIDDEN = {
    # The network, and other processes that are reachable by sockets.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # New processes, which could outlive this process, and would each have limits of their own.
    "fork": (57, None),
    "vfork": (58, None),
    # Other processes of this user: their memory, signals, priorities and processors.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Process groups and sessions. A terminal signals the process groups of its session, so a program must
    # stay in the group that it is put into.
    "setpgid": (109, 154),
    "setsid": (112, 157),
    # Changes of files without opening them, which Landlock does not check.
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # Memory that no limit counts.
    "memfd_create": (319, 279),
    # Memory, semaphores and queues that are shared with other processes of this user. Only namespaces hide
    # those that exist already.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    # A user namespace gives capabilities. The other calls have had most of the security holes of kernels.
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "personality": (135, 92),
}

# From this number on, all architectures have the same numbers. Of these calls, and of those that later
# kernels add, only the listed ones are allowed. The others fail with ENOSYS, as on an older kernel, which C
# libraries can handle. clone3 is one of them: its flags are in memory, which a filter cannot read.
_FIRST_COMMON = 424
_COMMON_ALLOWED = {
    "close_range": 436,
    "openat2": 437,
    "faccessat2": 439,
    "epoll_pwait2": 441,
    "futex_waitv": 449,
    "mseal": 462,
}

_STARTS_PROCESSES = ("fork", "vfork")
_MAKES_SESSIONS = ("setpgid", "setsid")
_CHANGES_FILES = (
    *("truncate", "chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
_CONNECTS = ("socket", "connect")
_CLONE_THREAD = 0x10000
# Flags for new namespaces, and CLONE_PARENT, with which the new process would not be a child of its caller.
_CLONE_APART = 0x7E020000 | 0x8000
_AF_UNIX, _AF_INET, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 2, 1, 0xF
_DEFAULT_PROTOCOL, _TCP, _MSG_FASTOPEN = 0, 6, 0x20000000
_WHOLE = 0xFFFFFFFF
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SCHED_CORE = 1, 36, 38, 62
_F_SETFL, _O_ASYNC = 4, 0x2000

# The allowed requests of fcntl: all that concern the program's own descriptors and locks. The others choose
# the process that gets the signals of a file (F_SETOWN, F_SETOWN_EX, F_SETSIG), or request such signals
# (F_SETLEASE, F_NOTIFY).
_FCNTL = {
    "F_DUPFD": 0,
    "F_GETFD": 1,
    "F_SETFD": 2,
    "F_GETFL": 3,
    "F_SETFL": _F_SETFL,
    "F_GETLK": 5,
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_OFD_GETLK": 36,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_DUPFD_QUERY": 1027,
    "F_DUPFD_CLOEXEC": 1030,
    "F_SETPIPE_SZ": 1031,
    "F_GETPIPE_SZ": 1032,
    "F_GET_SEALS": 1034,
}
# The allowed requests of ioctl: those that Python and C libraries use on files, pipes and sockets. There are
# thousands of others, some of them dangerous: FIOSETOWN and SIOCSPGRP do what F_SETOWN does, FIOASYNC sets
# O_ASYNC, TIOCSPGRP, TIOCSCTTY, TIOCSIG, TIOCNOTTY and TIOCVHANGUP make a terminal send signals, and TIOCSTI
# types into it.
_IOCTL = {
    "TCGETS": 0x5401,
    "TCGETS2": 0x802C542A,
    "TIOCGPGRP": 0x540F,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
}


@dataclass(frozen=True)
class _Condition:
    """A condition on one argument of a system call. The filter refuses calls that violate it.

    Only the lower 32 bits of the argument are compared, because the kernel reads these arguments as ints.
    """

    argument: int
    """Index of the argument, from 0."""
    values: frozenset[int]
    """The values that the argument is compared with."""
    mask: int = _WHOLE
    """Bits of the argument that are compared. All other bits are taken as 0."""
    refused: bool = False
    """If True, the argument must be none of `values`. If False, it must be one of `values`."""
    only_if: tuple[int, int] | None = None
    """(index, value): the condition applies only to calls whose argument with this index has this value."""


@dataclass(frozen=True)
class Allowed:
    """The dangerous system calls that the filter allows all the same, because something else bounds them."""

    fork: bool = False
    """Start processes. They inherit the filter."""
    sessions: bool = False
    """Make process groups and sessions. Whoever ends the program must then look for all its descendants."""
    signals: bool = False
    """Send signals. Landlock must keep them from other programs' processes."""
    file_changes: bool = False
    """Change files without opening them. All file systems must be read-only, except the program's own."""
    connections: bool = False
    """Make TCP connections. Landlock or a network namespace must bound where to."""


def _conditional(
    own_pid: int, allowed: Allowed
) -> dict[str, tuple[tuple[int, int | None], list[_Condition]]]:
    """Return the system calls that are allowed only with certain arguments, as {name: (numbers, conditions)}.

    - numbers: numbers of the call on x86-64 and on 64-bit ARM.
    - conditions: conditions on the arguments. A call is allowed if it meets all of them.

    own_pid: id of the contained process, which may send signals only to itself.
    """
    own = [] if allowed.signals else [_Condition(0, frozenset({own_pid}))]
    clone = (
        _Condition(0, frozenset({0}), _CLONE_APART)
        if allowed.fork
        else _Condition(0, frozenset({_CLONE_THREAD}), _CLONE_THREAD)
    )
    return (_CONNECTING if allowed.connections else {}) | {
        "clone": ((56, 220), [clone]),
        "kill": ((62, 129), own),
        "tgkill": ((234, 131), own),
        "prlimit64": ((302, 261), [_Condition(0, frozenset({0, own_pid}))]),
        # Event loops and multiprocessing make pairs of stream sockets. A datagram socket of a pair could
        # still write to the sockets of other processes.
        "socketpair": (
            (53, 199),
            [_Condition(0, frozenset({_AF_UNIX})), _Condition(1, frozenset({_SOCK_STREAM}), _SOCK_TYPE_MASK)],
        ),
        # O_ASYNC requests signals. The signals of a terminal go to its foreground processes, even if no owner
        # is set.
        "fcntl": (
            (72, 25),
            [
                _Condition(1, frozenset(_FCNTL.values())),
                _Condition(2, frozenset({_O_ASYNC}), _O_ASYNC, refused=True, only_if=(1, _F_SETFL)),
            ],
        ),
        "ioctl": ((16, 29), [_Condition(1, frozenset(_IOCTL.values()))]),
        # The program must end with its helper, and must not join the core scheduling group of another
        # process.
        "prctl": ((157, 167), [_Condition(0, frozenset({_PR_SET_PDEATHSIG, _PR_SCHED_CORE}), refused=True)]),
    }


# Connections by TCP only. TCP Fast Open connects while it sends, which Landlock does not check.
_SLOWLY = frozenset({_MSG_FASTOPEN})
_CONNECTING = {
    "socket": (
        (41, 198),
        [
            _Condition(0, frozenset({_AF_INET})),
            _Condition(1, frozenset({_SOCK_STREAM}), _SOCK_TYPE_MASK),
            _Condition(2, frozenset({_DEFAULT_PROTOCOL, _TCP})),
        ],
    ),
    "sendto": ((44, 206), [_Condition(3, _SLOWLY, _MSG_FASTOPEN, refused=True)]),
    "sendmsg": ((46, 211), [_Condition(2, _SLOWLY, _MSG_FASTOPEN, refused=True)]),
    "sendmmsg": ((307, 269), [_Condition(3, _SLOWLY, _MSG_FASTOPEN, refused=True)]),
}

# {machine: (column of the numbers above, AUDIT_ARCH_* value that the filter sees)}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_Instruction = tuple[int, int, int, int]  # code, lines to skip if true, if false, value


def _filter(machine: str, own_pid: int, exceptions: Allowed) -> list[_Instruction]:
    column, architecture = _ARCHITECTURES[machine]
    refused, unknown = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    allowed = (_RETURN, 0, 0, _ALLOW)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # 32-bit system calls have other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in _COMMON_ALLOWED.values():
        lines += [(_JUMP_EQUAL, 0, 1, number), allowed]
    lines += [(_JUMP_AT_LEAST, 0, 1, _FIRST_COMMON), unknown]
    exempt = (
        *(_STARTS_PROCESSES if exceptions.fork else ()),
        *(_MAKES_SESSIONS if exceptions.sessions else ()),
        *(_CHANGES_FILES if exceptions.file_changes else ()),
        *(_CONNECTS if exceptions.connections else ()),
    )
    for name, numbers in _FORBIDDEN.items():
        if numbers[column] is not None and name not in exempt:
            lines += [(_JUMP_EQUAL, 0, 1, numbers[column]), refused]
    for numbers, conditions in _conditional(own_pid, exceptions).values():
        body = [line for condition in conditions for line in _checked(condition, refused)] + [allowed]
        lines += [(_JUMP_EQUAL, 0, len(body), numbers[column]), *body]
    return [*lines, allowed]


def _checked(condition: _Condition, refusal: _Instruction) -> list[_Instruction]:
    """Return instructions of a seccomp filter that check one condition of a system call.

    If a call violates the condition, the instruction `refusal` is executed. Otherwise, the filter goes on
    with the instruction after the returned ones.
    """
    values = sorted(condition.values)
    # If the values are equal, a comparison skips the remaining comparisons and one more instruction.
    comparisons = [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    otherwise = [(_JUMP, 0, 0, 1), refusal] if condition.refused else [refusal]
    lines = [_loaded(condition.argument), (_AND, 0, 0, condition.mask), *comparisons, *otherwise]
    if condition.only_if is None:
        return lines
    argument, value = condition.only_if
    return [_loaded(argument), (_JUMP_EQUAL, 0, len(lines), value), *lines]


def _loaded(argument: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)


class _Line(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    ]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.POINTER(_Line))]


_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def forbid(allowed: Allowed) -> None:
    """Install a seccomp filter in this process that permanently forbids dangerous system calls.

    The process must have called `no_new_privileges` before.

    Raises OSError if the kernel refuses the filter, or if the architecture is not x86-64 or 64-bit ARM.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(
            errno.ENOSYS,
            f"the system call filter supports {' and '.join(_ARCHITECTURES)}, not {machine}",
        )
    lines = _filter(machine, os.getpid(), allowed)
    program = _Filter(len(lines), (_Line * len(lines))(*lines))
    libc.call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)


def no_new_privileges() -> None:
    """Set the flag no_new_privs of this process, so that it can no longer gain rights from a setuid program.

    The kernel requires this before a process without privileges may use seccomp or Landlock.
    """
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1)


def end_with_parent() -> None:
    libc.prctl(_PR_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent has ended, so that it can reap them."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
