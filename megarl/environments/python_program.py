"""Runs the Python program of its standard input, under limits of this process, which may start no other one.

A script for `tool_functions.python`, on Linux and x86-64. A filter of system calls (seccomp) refuses processes, sockets
and signals to other processes, so that the limits of one process are those of the program, and nothing of it runs on.

Arguments: id of the parent process, most seconds, most bytes of memory and of a file.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from errno import ENOSYS, EPERM

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_FILTER = 2
_X86_64 = 0xC000003E
_OTHER_ABI = 0x40000000
"""From here on: the numbers of x32."""
_CLONE, _KILL, _CLONE3 = 56, 62, 435
_REFUSED = {
    "socket": 41,
    "fork": 57,
    "vfork": 58,
    "ptrace": 101,
    "rt_sigqueueinfo": 129,
    "tkill": 200,
    "rt_tgsigqueueinfo": 297,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,  # can open sockets
    "pidfd_open": 434,
    "pidfd_getfd": 438,
}
_TGKILL, _PRLIMIT, _PRCTL = 234, 302, 157
_CLONE_THREAD = 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of BPF
_ALLOW, _FAIL, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def system_call_filter(pid: int) -> bytes:
    """Returns the filter, as instructions of classic BPF; a refused call fails with EPERM."""
    refused = _FAIL | EPERM
    rules = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, refused),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | ENOSYS),  # the C library then takes clone, whose flags can be read here
    ]
    for number in _REFUSED.values():
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    # What the first argument must be, or must not be: an id of this process (prlimit's 0 is, too), or an option.
    needed = ((_CLONE, _ANY_BIT, _CLONE_THREAD), (_KILL, _EQUAL, pid), (_TGKILL, _EQUAL, pid), (_PRLIMIT, _EQUAL, 0))
    for number, test, value in needed:
        rules += [(_EQUAL, 0, 3, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (test, 1, 0, value), (_RETURN, 0, 0, refused)]
        rules += [(_LOAD, 0, 0, _NUMBER)]
    rules += [(_EQUAL, 0, 3, _PRCTL), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, _PR_SET_PDEATHSIG)]
    rules += [(_RETURN, 0, 0, refused)]
    rules += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def limit(parent: int, seconds: int, memory: int, file_size: int) -> None:
    """Gives up what the program must not do; raises OSError where the kernel has no such filters."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    limits = {"CPU": seconds, "AS": memory, "FSIZE": file_size, "NOFILE": 64, "CORE": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    rules = ctypes.create_string_buffer(code := system_call_filter(os.getpid()), len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(rules))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls (seccomp)")


if __name__ == "__main__":
    limit(*map(int, sys.argv[1:]))
    exec(compile(sys.stdin.read(), "program.py", "exec"), {"__name__": "__main__"})
