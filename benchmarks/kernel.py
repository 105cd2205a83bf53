"""Kernel memory: how much of the host's a cell gets, object by object, beyond its own cap.

Each attempt makes as many objects of one kind as it can, in nine processes of one cell, while the
memory of the host is watched from outside.
"""

import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import MIB, Policy
from ..policies.profiles.loading import load_policy
from ..runner.requests.result import SandboxResult
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings

_SECONDS, _SMOKE_SECONDS = 5.0, 0.3
_LOOK_SECONDS = 0.02
# kernel memory that no cgroup counts: more than a cell makes, far less than a host misses
_SLAB_MIB = 32
_NOISE_MIB = 256  # memory that other programs may take meanwhile
_BEYOND = (
    "Beyond: by how much the unreclaimable slab of the host grew more than the cell's cgroup counted. "
    "Other programs on the machine add to it."
)
_WITHOUT = (
    "Without a memory cgroup nothing is counted: what is bounded by number stays so, and "
    "`memory_bytes` bounds the address space of each process."
)
_YES, _NO = "yes", "no"
_HEADER = """
import ctypes, fcntl, mmap, os, select, signal, socket, struct, threading, time
END = time.monotonic() + {seconds}
C = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
def lock(fd, start, command=fcntl.F_SETLK):
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, 1, 0))
def filled(*sockets, size=65536):
    for each in sockets:
        each.setblocking(False)
        try:
            while True: each.send(bytes(size))
        except BlockingIOError: pass
"""
_FOOTER = """
def run():
    made, kept = 0, make()
    try:
        for number in kept:
            made += number
            if time.monotonic() > END: break
    except (OSError, MemoryError, RuntimeError): pass
    return made, kept
read, write = os.pipe()
children = 0
try:
    for _ in range(8):
        if os.fork() == 0:
            made, kept = run()
            os.write(write, made.to_bytes(8, "little"))
            time.sleep(max(0, END - time.monotonic()) + 1)
            os._exit(0)
        children += 1
except OSError: pass
made, kept = run()
made + sum(int.from_bytes(os.read(read, 8), "little") for _ in range(children))
"""


class KernelItem(NamedTuple):
    """One kind of object: whether a cgroup counts it, what bounds it, and how it is made."""

    what: str
    v1: str
    v2: str
    bound: str
    make: str  # the body of a generator that yields how many it made
    debugs: bool = False  # whether it is tried with `processes.debug`


_REFUSED = ("-", "-")
ATTEMPTS = (
    KernelItem("record locks", _NO, _NO, "1,024 in a cell; none in a cell of one process", """
    for number in range(400):
        fd = os.open(f"/tmp/{os.getpid()}-{number}", os.O_RDWR | os.O_CREAT)
        for place in range(500): lock(fd, 2 * place); yield 1
"""),
    KernelItem("locks of an open file (OFD)", _NO, _NO, "refused", """
    fd = os.open("/tmp/ofd", os.O_RDWR | os.O_CREAT)
    for place in range(1_000_000): lock(fd, 2 * place, 37); yield 1
"""),
    KernelItem("flock", _NO, _NO, "one for an open file: `open_files`, `processes`", """
    kept = []
    while True:
        kept.append(os.open(f"/tmp/{os.getpid()}-{len(kept)}", os.O_RDWR | os.O_CREAT))
        fcntl.flock(kept[-1], fcntl.LOCK_EX); yield 1
"""),
    KernelItem("leases, directory notifications", *_REFUSED, "refused", """
    fd = os.open(f"/tmp/{os.getpid()}", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK); yield 1
"""),
    KernelItem("TCP buffers", "apart", _YES, "a quarter of `memory_bytes`, killed at half (v1)", """
    kept, listener = [], socket.create_server(("127.0.0.1", 0), backlog=64)
    while True:
        kept += [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        filled(*kept[-2:]); yield 2
"""),
    KernelItem("UDP buffers", "apart", _YES, "a quarter of `memory_bytes` (v1)", """
    kept = []
    while True:
        one, two = (socket.socket(type=socket.SOCK_DGRAM) for _ in "ab")
        one.bind(("127.0.0.1", 0)); two.connect(one.getsockname()); kept += [one, two]
        two.setblocking(False)
        for _ in range(300):
            try: two.send(bytes(1000)); yield 1
            except BlockingIOError: break
"""),
    KernelItem("connections that nobody accepts", _NO, _NO, "one for 256 KiB of `memory_bytes`", """
    kept = []
    while True:
        kept.append(socket.create_server(("127.0.0.1", 0), backlog=4096))
        for _ in range(4000):
            socket.create_connection(kept[-1].getsockname()).close(); yield 1
"""),
    KernelItem("connections in TIME_WAIT", _NO, _NO, "net.ipv4.tcp_max_tw_buckets of a cell", """
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    while True:
        one = socket.create_connection(listener.getsockname()); two = listener.accept()[0]
        one.close(); two.close(); yield 1
"""),
    KernelItem("Unix sockets and their buffers", _YES, _YES, "`open_files`; net.core.wmem_default", """
    kept = []
    while True:
        kept += socket.socketpair(); filled(*kept[-2:]); yield 2
"""),
    KernelItem("Unix sockets, a byte a message", _YES, _YES, "as above", """
    kept = []
    while True:
        kept += socket.socketpair(); filled(*kept[-2:], size=1); yield 2
"""),
    KernelItem("netlink sockets and their answers", _NO, _NO, "16 in a cell, 210 KiB each", """
    kept, question = [], struct.pack("=IHHII", 32, 16, 5, 0, 0) + bytes(16)
    while True:
        kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)); yield 1
        for _ in range(400): kept[-1].send(question)
"""),
    KernelItem("descriptors in flight", _YES, _YES, "`open_files`, for all cells of an id", """
    kept = []
    while True:
        one, two = socket.socketpair(); kept += [one, two]
        one.setblocking(False)
        for _ in range(100):
            try: socket.send_fds(one, [b"x"], [one.fileno()] * 200); yield 200
            except BlockingIOError: break
"""),
    KernelItem("pipes and their buffers", _YES, _YES, "`open_files`; fs.pipe-user-pages-soft", """
    while True:
        read, write = os.pipe(); os.set_blocking(write, False); yield 1
        try:
            while True: os.write(write, bytes(65536))
        except BlockingIOError: pass
"""),
    KernelItem("epoll entries", _YES, _YES, "`open_files`; fs.epoll.max_user_watches", """
    kept, events = [], [os.eventfd(0) for _ in range(400)]
    while True:
        kept.append(select.epoll())
        for event in events: kept[-1].register(event); yield 1
"""),
    KernelItem("eventfds, timerfds", _YES, _YES, "`open_files`, `processes`", """
    while True: os.eventfd(0); yield 1
"""),
    KernelItem("inotify watches", _NO, _NO, "one for 64 KiB of `memory_bytes`, 16 descriptors", """
    fds = [checked(C.inotify_init1(0)) for _ in range(4)]
    for number in range(1_000_000):
        path = f"/tmp/{os.getpid()}-{number}"; open(path, "w").close()
        for fd in fds: checked(C.inotify_add_watch(fd, path.encode(), 2)); yield 1
"""),
    KernelItem("inotify events", _YES, _YES, "16,384 a descriptor; `memory_bytes`", """
    checked(C.inotify_add_watch(checked(C.inotify_init1(0)), b"/tmp", 0xFFF))
    names = [f"/tmp/{os.getpid()}-{n}-" + "x" * 200 for n in range(2)]
    while True:
        for name in names: os.mkdir(name); yield 16
        for name in names: os.rmdir(name); yield 16
"""),
    KernelItem("POSIX timers", _YES, _YES, "RLIMIT_SIGPENDING, 1,024", """
    timer = ctypes.c_void_p()
    while True: checked(C.timer_create(1, None, ctypes.byref(timer))); yield 1
"""),
    KernelItem("signals queued", _YES, _YES, "RLIMIT_SIGPENDING, 1,024", """
    signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
    while True: checked(C.sigqueue(os.getpid(), 40, ctypes.c_void_p(1))); yield 1
"""),
    KernelItem("memfds", _YES, _YES, "`memory_bytes`; refused without a memory cgroup", """
    while True:
        fd = os.memfd_create("x"); yield 1
        for _ in range(8): os.write(fd, bytes(1 << 20))
"""),
    KernelItem("files on tmpfs, their names", _YES, _YES, "`workspace_inodes`, `workspace_bytes`", """
    for number in range(1_000_000):
        os.symlink("x" * 200, f"/workspace/{os.getpid()}-{number}"); yield 1
"""),
    KernelItem("user attributes of files", _YES, _YES, "room for inodes; memfds: `memory_bytes`", """
    for number in range(1_000_000):
        path = f"/workspace/{os.getpid()}-{number}"; open(path, "w").close()
        for each in range(50): os.setxattr(path, f"user.{each}", bytes(255)); yield 1
"""),
    KernelItem("access lists of files", _NO, _NO, "255 bytes a file; `workspace_inodes`", """
    entry = struct.Struct("<HHI").pack
    users = b"".join(entry(2, 7, 1000) for _ in range(1))
    acl = struct.pack("<I", 2) + entry(1, 7, 2**32 - 1) + users
    acl += entry(4, 7, 2**32 - 1) + entry(16, 7, 2**32 - 1) + entry(32, 7, 2**32 - 1)
    for number in range(1_000_000):
        path = f"/workspace/{os.getpid()}-{number}"; open(path, "w").close()
        os.setxattr(path, "system.posix_acl_access", acl); yield 1
"""),
    KernelItem("mappings", _YES, _YES, "vm.max_map_count a process", """
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 4096, prot=1 + 2 * (len(kept) % 2))); yield 1
"""),
    KernelItem("page tables", _YES, _YES, "`memory_bytes`; RLIMIT_AS without a memory cgroup", """
    size = 1 << 40
    kept = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | 0x4000, prot=1)  # MAP_NORESERVE
    for place in range(0, size, 1 << 21): kept[place]; yield 1
"""),
    KernelItem("processes", _YES, _YES, "`processes`", """
    while True:
        if os.fork() == 0: time.sleep(max(0, END - time.monotonic())); os._exit(0)
        yield 1
"""),
    KernelItem("threads", _YES, _YES, "`processes`", """
    while True:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); yield 1
"""),
    KernelItem("threads that wait for a lock or a futex", _YES, _YES, "`processes`", """
    fd, held = (os.open("/tmp/f", os.O_RDWR | os.O_CREAT) for _ in "ab")
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    while True:
        threading.Thread(target=fcntl.flock, args=(fd, fcntl.LOCK_EX), daemon=True).start(); yield 1
"""),
    KernelItem("System V shared memory", _YES, _YES, "kernel.shmmni; not without a memory cgroup", """
    C.shmat.restype = ctypes.c_void_p
    while True:
        segment = checked(C.shmget(0, 1 << 20, 0o1600))
        at = C.shmat(segment, None, 0); ctypes.memset(at, 1, 1 << 20); C.shmdt(ctypes.c_void_p(at))
        yield 1
"""),
    KernelItem("System V semaphores", _YES, _YES, "kernel.sem; not without a memory cgroup", """
    while True: checked(C.semget(0, 250, 0o1600)); yield 250
"""),
    KernelItem("System V message queues", *_REFUSED, "refused", """
    while True: checked(C.msgget(0, 0o1600)); yield 1
"""),
    KernelItem("terminals", *_REFUSED, "refused but for `terminal`; 16 in a cell", """
    while True: os.openpty(); yield 1
"""),
    KernelItem("files of the machine", _NO, _NO, "4,096 open in a cell", """
    C.mmap.restype = ctypes.c_void_p
    C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    while True:
        fd = os.open("/proc/uptime", os.O_RDONLY)
        checked(C.mmap(None, 4096, 1, 2, fd, 0) or 0); os.close(fd); yield 1
"""),
    KernelItem("POSIX message queues", *_REFUSED, "refused", """
    while True: checked(C.mq_open(b"/x", os.O_CREAT | os.O_RDWR, 0o600, None)); yield 1
"""),
    KernelItem("keys", *_REFUSED, "refused", """
    while True: checked(C.syscall(248, b"user", b"x", b"x" * 1000, 1000, -3)); yield 1
"""),
    KernelItem("hardware breakpoints", _NO, _NO, "4 a tracee: `processes`; refused but for `debug`", """
    C.ptrace.argtypes, kept = [ctypes.c_long] * 4, (ctypes.c_char * 64)()
    debug = 848 if os.uname().machine == "x86_64" else -1  # offsetof(struct user, u_debugreg)
    while True:
        if (pid := os.fork()) == 0:
            checked(C.ptrace(0, 0, 0, 0)); os.kill(os.getpid(), signal.SIGSTOP); os._exit(0)
        os.waitpid(pid, 0)
        for n in range(4):
            checked(C.ptrace(6, pid, debug + 8 * n, ctypes.addressof(kept) + 8 * n)); yield 1
        checked(C.ptrace(6, pid, debug + 56, 0xFFFF0055))
""", debugs=True),
    KernelItem("namespaces, and all that is in them", *_REFUSED, "refused", """
    while True: checked(C.unshare(0x50000000)); yield 1
"""),
    KernelItem("mounts", *_REFUSED, "refused", """
    while True: checked(C.mount(b"x", b"/tmp", b"tmpfs", 0, None)); yield 1
"""),
    KernelItem("seccomp filters, Landlock domains", *_REFUSED, "refused", """
    while True: checked(C.syscall(444, None, 0, 1)); yield 1
"""),
    KernelItem("rings of io_uring, asynchronous I/O, BPF", *_REFUSED, "refused", """
    while True: checked(C.syscall(425, 64, bytes(120))); yield 1
"""),
)  # fmt: skip


class Consumption(NamedTuple):
    """What came of an attempt, and what the host missed meanwhile, in MiB."""

    result: SandboxResult
    slab: float  # SUnreclaim, at the most
    taken: float  # MemAvailable, at the most
    beyond: float  # the part of `slab` that the cell's cgroup did not count


def measure(settings: Settings) -> Report:
    """Return what each kind of object cost the host beyond the cell's cap."""
    seconds = _SMOKE_SECONDS if settings.smoke else _SECONDS
    policy = _policy(settings.policy)
    processes = msgspec.structs.replace(policy.processes, debug=True)
    debug = msgspec.structs.replace(policy, processes=processes)
    with Sandbox(policy=policy, pool=0) as sandbox, Sandbox(policy=debug, pool=0) as debugged:
        sandbox.execute("1")
        boxes = {False: sandbox, True: debugged}
        seen = {each: _try(boxes[each.debugs], each, seconds) for each in ATTEMPTS}
        layers = sandbox.layers
    return Report(
        name="kernel",
        title="Kernel memory",
        tables=(_table(seen),),
        verdicts=tuple(_verdicts(seen, policy)),
        notes=(_in_force(policy, layers, seconds), _BEYOND, _WITHOUT),
    )


def _in_force(policy: Policy, layers: tuple[str, ...], seconds: float) -> str:
    caps = ", ".join(layer for layer in layers if layer.startswith("cgroup_"))
    mib = policy.limits.memory_bytes // MIB
    return f"Cells have {mib} MiB, the profile `standard` and {seconds:g} s for each; in force: {caps}."


def _policy(asked: Policy) -> Policy:
    standard = load_policy("standard")
    limits = msgspec.structs.replace(standard.limits, wall_seconds=30.0, cpu_seconds=60.0)
    return msgspec.structs.replace(standard, optional_layers=asked.optional_layers, limits=limits)


def _try(sandbox: Sandbox, attempt: KernelItem, seconds: float) -> Consumption:
    program = f"{_HEADER.format(seconds=seconds)}def make():{attempt.make}{_FOOTER}"
    before = _memory()
    most_slab, least_free = before["SUnreclaim"], before["MemAvailable"]
    ended = threading.Event()
    found: list[SandboxResult] = []

    def run() -> None:
        try:
            found.append(sandbox.execute(program))
        finally:
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    while not ended.wait(_LOOK_SECONDS):
        now = _memory()
        most_slab = max(most_slab, now["SUnreclaim"])
        least_free = min(least_free, now["MemAvailable"])
    thread.join()
    if not found:
        raise RuntimeError(f"the attempt to make {attempt.what} could not be run")
    slab = (most_slab - before["SUnreclaim"]) / MIB
    taken = (before["MemAvailable"] - least_free) / MIB
    counted = found[0].usage.memory_peak_bytes / MIB
    return Consumption(found[0], slab, taken, max(0.0, slab - counted))


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}


def _table(seen: dict[KernelItem, Consumption]) -> ReportTable:
    columns = (
        "object",
        "counted by v1",
        "by v2",
        "our bound",
        "made",
        "cell's peak MiB",
        "beyond MiB",
    )
    return ReportTable(
        title="What a cell can make of the kernel's memory",
        columns=tuple(Column(title, 0) for title in columns),
        rows=tuple(
            (
                each.what, each.v1, each.v2, each.bound, _made(of.result),
                of.result.usage.memory_peak_bytes / MIB, of.beyond,
            )
            for each, of in seen.items()
        ),
    )  # fmt: skip


def _made(result: SandboxResult) -> str:
    if isinstance(result.value, int):
        return f"{result.value:,}" if result.value else "refused"
    return f"ended: {result.reason}"


def _verdicts(seen: dict[KernelItem, Consumption], policy: Policy) -> list[Criterion]:
    """Judge what the host lost: slab beyond what is counted, with what v1 counts apart, and in all."""
    sockets = policy.limits.memory_bytes // 4 // MIB
    beyond = {each: of.beyond - (sockets if each.v1 == "apart" else 0) for each, of in seen.items()}
    most = max(beyond, key=beyond.__getitem__)
    cap = policy.limits.memory_bytes * 1.5 / MIB + _NOISE_MIB
    taken = max(seen, key=lambda each: seen[each].taken)
    return [
        Criterion(
            f"no object takes more than {_SLAB_MIB} MiB of slab beyond what is counted and capped",
            beyond[most] <= _SLAB_MIB,
            f"at most {max(0.0, beyond[most]):.0f} MiB, of {most.what}",
        ),
        Criterion(
            f"no object takes more than {cap:.0f} MiB of the host",
            seen[taken].taken <= cap,
            f"at most {seen[taken].taken:.0f} MiB, of {taken.what}",
        ),
    ]
