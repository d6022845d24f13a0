"""Containment by Linux namespaces: the process gets its own network, IPC and file system.

The file system has the folders that the process may read, and /sandbox, a memory file system of limited size
that disappears with the process. There is no /proc. The network has no interfaces that are up, not even the
loopback, unless the process may use a port of it.
"""

import ctypes
import fcntl
import os
import socket
import struct

from grpo_megatron.sandbox import libc

WORK_FOLDER = "/sandbox"

_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x40000000  # mounts, IPC, user, network

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_USER = 1000  # within the namespace; not 0, which would have capabilities


def enter(new_root: str, readable: list[str], devices: list[str], max_bytes: int, max_files: int) -> None:
    """Move this process into new Linux namespaces, in which it has no network and sees only the given files.

    The only folder in which the process may write is WORK_FOLDER, which becomes its working directory.

    new_root: an empty folder, on which the new file system is mounted.
    readable: folders and files of the machine that stay visible at their paths, read-only.
    devices: devices of the machine that stay visible at their paths.
    max_bytes, max_files: maximum total size, and maximum number of files and folders, in WORK_FOLDER.

    Raises OSError if the machine does not allow its users to create namespaces, or if the kernel is older
    than Linux 5.12 (mount_setattr).
    """
    user, group = os.geteuid(), os.getegid()
    libc.call("unshare", _NEW_NAMESPACES)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_USER} {user} 1")
    _write("/proc/self/gid_map", f"{_USER} {group} 1")
    # Otherwise the mounts below would be visible outside.
    libc.call("mount", "none", "/", None, _MS_REC | _MS_PRIVATE, None)
    _mount_memory(new_root, "size=1m,nr_inodes=10k,mode=755")
    for path in readable:
        _show(path, new_root, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in devices:
        # A device can be written to even if it is mounted read-only, but its mode cannot be changed.
        _show(path, new_root, _ATTR_RDONLY | _ATTR_NOSUID)
    work_folder = new_root + WORK_FOLDER
    os.mkdir(work_folder)
    # One inode more, for the folder itself.
    _mount_memory(work_folder, f"size={max_bytes},nr_inodes={max_files + 1},mode=700")
    for path in ("/tmp", "/dev/shm"):
        if not os.path.lexists(new_root + path):
            os.makedirs(os.path.dirname(new_root + path), exist_ok=True)
            os.symlink(WORK_FOLDER, new_root + path)
    _set_attributes(new_root, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)
    os.chdir(new_root)
    # pivot_root stacks the old root on top of the new one, and umount2 removes it. So the old root needs no
    # folder.
    libc.system_call("pivot_root", _PIVOT_ROOT[os.uname().machine], b".", b".")
    libc.call("umount2", ".", _MNT_DETACH)
    os.chdir(WORK_FOLDER)


def listen(port: int) -> socket.socket:
    """Start the loopback of this process's network namespace, and return a socket that listens on it.

    The process must have called `enter` before, and must still have its capabilities.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    return socket.create_server(("127.0.0.1", port), backlog=64)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _mount_memory(folder: str, options: str) -> None:
    libc.call("mount", "tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _show(path: str, new_root: str, attributes: int) -> None:
    """Make a folder or file of the machine visible in the new file system, by a bind mount at the same path.

    path: path of the folder or file, or of a symbolic link to it, such as /lib.
    new_root: folder on which the new file system is mounted.
    attributes: mount attributes, such as _ATTR_RDONLY.
    """
    target = new_root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    libc.call("mount", path, target, None, _MS_BIND | _MS_REC, None)
    _set_attributes(target, attributes, _AT_RECURSIVE)


def _set_attributes(folder: str, attributes: int, flags: int) -> None:
    # struct mount_attr: set, clear, propagation, user namespace
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.sizeof(values)
    libc.system_call("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, folder, flags, ctypes.byref(values), size)
