"""Confinement of a process: no network, no new process, no files except its scratch folder.

Confinement uses three features of Linux that need no privilege and that default container profiles
allow: resource limits, Landlock (files) and a seccomp filter (system calls). It does not use user
namespaces, because default container profiles forbid them.

This file and its neighbours import only the standard library, since they run in an interpreter
without site packages. Names of files stay visible: Landlock guards contents, not names.

Source: Linux, Documentation/userspace-api/landlock.rst and seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

MEMORY_BYTES = 1 << 30
"""Limit of a process's address space in bytes."""
FILE_BYTES = 4 << 20
OPEN_FILES = 64

_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom")
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ, _WRITE = 1 << 2 | 1 << 3, 1 << 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 8
"""Rights to read files and folders, and further rights to write, remove and make regular files."""
_TRUNCATE = 1 << 14
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights on files by version of Landlock; 16 from version 5."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Results of a filter: allow the call; refuse it with EPERM; kill the process."""

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine names, each with the number in audit.h and the column in the tables below."""
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None),
    "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "recvfrom": (45, 207), "socketpair": (53, 199), "exit": (60, 93),
    "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49), "unlink": (87, None),
    "readlink": (89, None), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "getgroups": (115, 158), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "arch_prctl": (158, None),
    "gettid": (186, 178), "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123),
    "getdents64": (217, 61), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "newfstatat": (262, 79), "unlinkat": (263, 35), "readlinkat": (267, 78),
    "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59),
    "getrandom": (318, 278), "statx": (332, 291), "close_range": (436, 436),
    "faccessat2": (439, 439),
}  # fmt: skip
"""System calls that are always allowed, each with its number on each machine."""
_GUARDED: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "ioctl": (16, 29), "fcntl": (72, 25),
    "kill": (62, 129), "tgkill": (234, 131), "sendto": (44, 206), "prlimit64": (302, 261),
}  # fmt: skip
"""System calls that are allowed with some arguments, each with its number on each machine."""
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B)
"""Allowed ioctls: terminal check, terminal size, blocking mode, close on exec, bytes to read."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Allowed fcntls: copies, flags, locks, pipe size. The owner of a file's signals is not among
them."""

_libc = ctypes.CDLL(None, use_errno=True)


class CannotConfine(Exception):
    """This machine lacks a feature for confinement; no code was run."""


def take_streams() -> tuple[TextIO, Callable[[dict[str, Any]], None]]:
    """Take the socket to the parent off the standard streams, which become empty.

    Returns:
        The stream of requests, line by line, and a function that sends a reply. Code that runs
        here later gets neither as a standard stream.
    """
    requests = os.fdopen(os.dup(0), encoding="ascii")
    replies = os.fdopen(os.dup(0), "w", encoding="ascii")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    return requests, reply


def begin() -> tuple[TextIO, Callable[[dict[str, Any]], None]]:
    """Confine this process by its arguments, and report that it is ready; returns its streams."""
    requests, reply = take_streams()
    try:
        confine(sys.argv[2], int(sys.argv[3]))
    except CannotConfine as error:
        reply({"error": f"cannot confine: {error}"})
        raise SystemExit(1) from None
    reply({"outcome": "ready"})
    return requests, reply


def confine(scratch: str, cpu_seconds: int) -> None:
    """Confine this process for the rest of its life; it must have only one thread.

    Args:
        scratch: absolute path of the only writable folder; becomes the current folder.
        cpu_seconds: limit of processor time since its start.

    Raises:
        CannotConfine: the kernel or its settings do not allow it; the process must not go on.
    """
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _MACHINES:
        raise CannotConfine(f"Linux on {' or '.join(_MACHINES)}, got {sys.platform} on {machine}")
    os.chdir(scratch)
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    # The process dies with its parent; no other process can read its memory; exec gives no rights.
    for option, value in ((_PR_SET_PDEATHSIG, 9), (_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
        if _libc.prctl(option, value, 0, 0, 0):
            raise CannotConfine(f"prctl {option}, got {os.strerror(ctypes.get_errno())}")
    restrict_files((*_READABLE, os.path.join(sys.base_prefix, "lib"), *sys.path), scratch)
    program = filter_program(machine, os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, pointer to them.
    packed = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, packed, 0, 0):
        raise CannotConfine(f"a seccomp filter, got {os.strerror(ctypes.get_errno())}")


def restrict_files(readable: Sequence[str], scratch: str) -> None:
    """Allow this process to open only these paths, and to write only in `scratch`.

    Raises:
        CannotConfine: the kernel has no Landlock, or it is switched off.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise CannotConfine(
            f"Landlock (Linux 5.13 or later, `landlock` among the security modules), got "
            f"{os.strerror(ctypes.get_errno())}"
        )
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # Rights on files; on TCP from version 4; on abstract sockets and signals from version 6.
    parts = (rights, *((3,) if version >= 4 else ()), *((3,) if version >= 6 else ()))
    rules = struct.pack(f"{len(parts)}Q", *parts)
    ruleset = _libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        raise CannotConfine(f"a Landlock ruleset, got {os.strerror(ctypes.get_errno())}")
    granted = [(path, _READ) for path in dict.fromkeys(readable)]
    granted += [("/dev/null", 1 << 1 | 1 << 2), (scratch, (_WRITE | _TRUNCATE) & rights)]
    for path, right in granted:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            right &= 1 << 1 | 1 << 2
        rule = struct.pack("=Qi", right, place)
        if _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0):
            raise CannotConfine(f"a Landlock rule, got {os.strerror(ctypes.get_errno())}")
        os.close(place)
    if _libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise CannotConfine(f"Landlock on itself, got {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def filter_program(machine: str, pid: int) -> bytes:
    """Return the seccomp filter in classic BPF; calls that are not allowed give EPERM.

    Args:
        machine: `x86_64` or `aarch64`.
        pid: the only process that may get a signal.

    Returns:
        Instructions of 8 bytes: code, jump if true, jump if false, operand.

    Example:
        >>> len(filter_program("x86_64", 1)) % 8
        0
    """
    architecture, column = _MACHINES[machine]
    load, equal, at_least, any_bit, and_with, end = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (end, 0, 0, _KILL),
        (load, 0, 0, 0),
        # Call numbers from here on are 32-bit calls of x86_64.
        (at_least, 0, 1, 0x40000000),
        (end, 0, 0, _REFUSE),
    ]
    for numbers in _CALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column] or 0), (end, 0, 0, _ALLOW)]

    def guard(name: str, body: list[tuple[int, int, int, int]]) -> None:
        """Add a call whose arguments `body` checks; `body` must end in results."""
        number = _GUARDED[name][column]
        if number is not None:
            code.extend([(equal, 0, len(body), number), *body])

    def argument(index: int, *, high: bool = False) -> tuple[int, int, int, int]:
        """Load half of an argument (both machines are little-endian)."""
        return (load, 0, 0, 16 + 8 * index + 4 * high)

    yes, no = (end, 0, 0, _ALLOW), (end, 0, 0, _REFUSE)
    for name, index in (("open", 1), ("openat", 2)):
        # Opening for reading with O_TRUNC is refused here, since Landlock checks it only from
        # version 3.
        wanted = os.O_TRUNC | os.O_ACCMODE
        truncates = [(and_with, 0, 0, wanted), (equal, 0, 1, os.O_TRUNC), no, yes]
        guard(name, [argument(index), *truncates])
    for name, values in (("ioctl", _IOCTLS), ("fcntl", _FCNTLS)):
        tests = [step for value in values for step in ((equal, 0, 1, value), yes)]
        guard(name, [argument(1), *tests, no])
    for name in ("kill", "tgkill"):
        guard(name, [argument(0), (equal, 0, 1, pid), yes, no])
    # sendto only without an address (asyncio uses its pair of sockets); prlimit64 only to read
    # limits.
    for name, index in (("sendto", 4), ("prlimit64", 2)):
        halves = [argument(index), (any_bit, 2, 0, 0xFFFFFFFF), argument(index, high=True)]
        guard(name, [*halves, (equal, 1, 0, 0), no, yes])
    code.append(no)
    return b"".join(struct.pack("=HBBI", *step) for step in code)
