"""A tracer must not reach beyond its cell: attach to init, be traced by the launcher, end its own seccomp, have a
tracee make a call that the filter refuses, or make processes that no signal ends."""

import ctypes
import json
import os
import signal
import struct
import threading

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes, LIBC.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
TRACEME, CONT, ATTACH, SYSCALL, SETOPTIONS, SEIZE = 0, 7, 16, 24, 0x4200, 0x4206
GETREGSET, SETREGSET, PRSTATUS = 0x4204, 0x4205, 1
SYSGOOD, TRACEEXIT, SUSPEND_SECCOMP, WALL = 1, 0x40, 0x200000, 0x40000000
ORIG_RAX, RAX = 15 * 8, 10 * 8
UNSHARE, GETPPID = 272, 110
reached = []


def trace(*arguments: int) -> bool:
    return LIBC.ptrace(*arguments) >= 0


def attempt(name: str, *arguments: int) -> None:
    if trace(*arguments):
        reached.append(name)


attempt("be traced by the launcher", TRACEME, 0, 0, 0)
thread = threading.Thread(target=attempt, args=("as a thread", TRACEME, 0, 0, 0))
try:
    thread.start()
    thread.join()
except RuntimeError:
    pass
for request in (ATTACH, SEIZE):
    attempt("init", request, 1, 0, 0)
for call in ("process_vm_readv", "process_vm_writev"):
    vector = struct.pack("=2Q", ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    if getattr(LIBC, call)(1, vector, 1, vector, 1, 0) >= 0:
        reached.append(call)


def registers(pid: int, request: int, data: bytearray) -> None:
    room = (ctypes.c_char * len(data)).from_buffer(data)
    vector = ctypes.create_string_buffer(struct.pack("=2Q", ctypes.addressof(room), len(data)))
    trace(request, pid, PRSTATUS, ctypes.addressof(vector))


def call_of_tracee(pid: int) -> int:
    """Have the next call of a tracee be unshare(2), and return its answer."""
    options = SYSGOOD | TRACEEXIT
    if not trace(SETOPTIONS, pid, 0, options):
        return -1
    attempt("suspend seccomp", SETOPTIONS, pid, 0, options | SUSPEND_SECCOMP)
    while True:  # to the entry of getppid(2)
        trace(SYSCALL, pid, 0, 0)
        _, status = os.waitpid(pid, WALL)
        data = bytearray(27 * 8)
        registers(pid, GETREGSET, data)
        if not os.WIFSTOPPED(status) or struct.unpack_from("=q", data, ORIG_RAX)[0] == GETPPID:
            break
    struct.pack_into("=q", data, ORIG_RAX, UNSHARE)
    struct.pack_into("=q", data, 14 * 8, 0x10000000)  # rdi: CLONE_NEWUSER
    registers(pid, SETREGSET, data)
    trace(SYSCALL, pid, 0, 0)
    os.waitpid(pid, WALL)
    registers(pid, GETREGSET, data)
    return int(struct.unpack_from("=q", data, RAX)[0])


def traced() -> None:
    if trace(TRACEME, 0, 0, 0):
        os.kill(os.getpid(), signal.SIGSTOP)
        LIBC.getppid()
    # The other way round: a circle.
    for request in (ATTACH, SEIZE):
        if trace(request, os.getppid(), 0, TRACEEXIT):
            os._exit(1)
    os._exit(0)


detail = ""
try:
    child = os.fork()
except OSError:
    child = -1
if child == 0:
    traced()
if child > 0:
    _, status = os.waitpid(child, WALL)
    if os.WIFSTOPPED(status) and os.uname().machine == "x86_64":
        detail = f"traced, unshare: {(answer := call_of_tracee(child))}"
        if answer >= 0:
            reached.append("a call that the filter refuses")
    while os.WIFSTOPPED(status):
        trace(CONT, child, 0, 0)
        _, status = os.waitpid(child, WALL)
    if status:
        reached.append("a circle")
print(json.dumps({"case": "LAY-30", "escaped": bool(reached), "detail": f"{detail}{reached}"}))
