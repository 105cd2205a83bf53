"""A cell sees a machine of its own size, whatever a runtime asks."""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.policies.errors import WorkspaceError
from cellwright.policies.policy import Filesystem
from cellwright.runner.fixed_root import PROC_NAMES, SETTINGS
from cellwright.runner.kernel import notifications
from cellwright.runner.listening import machine_files
from tests.conftest import policy_named, soon, with_limits
from tests.escapes.without import without_listener

pytestmark = pytest.mark.needs("userns")
MIB = 1024 * 1024
HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
ASKS = """
import os
lines = open("/proc/meminfo").read().split("\\n")
with open("/proc/cpuinfo") as file:
    stanzas = file.read().count("processor\\t")
[os.cpu_count(), len(os.sched_getaffinity(0)), os.sysconf("SC_NPROCESSORS_CONF"), stanzas,
 os.sysconf("SC_PHYS_PAGES") * 4096, int(lines[0].split()[1]) * 1024,
 int(open("/sys/fs/cgroup/memory.max").read()), open("/sys/fs/cgroup/cpu.max").read(),
 open("/proc/self/cgroup").read(), open("/sys/fs/cgroup/pids.max").read()]
"""


def test_every_way_to_ask_tells_the_limits_of_the_cell(strict: Sandbox) -> None:
    limits = policy_named("strict").limits
    assert limits.memory_bytes < HOST
    assert strict.execute(ASKS).value == [
        1, 1, 1, 1, limits.memory_bytes, limits.memory_bytes, limits.memory_bytes,
        "100000 100000\n", "0::/\n", f"{limits.processes}\n",
    ]  # fmt: skip
    assert strict.execute(ASKS).violations == ()


def test_without_the_listener_runtimes_see_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(policy=without_listener(monkeypatch), pool=0) as box:
        result = box.execute("import os; os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')")
    assert result.value == HOST


def test_a_cell_of_two_processors_has_two(workshop: Sandbox) -> None:
    expected = min(2, len(os.sched_getaffinity(0)))
    result = workshop.execute(
        "nproc; grep -c ^processor /proc/cpuinfo; getconf _NPROCESSORS_ONLN", "bash"
    )
    assert result.stdout.split() == [str(expected)] * 3


def test_an_affinity_that_a_program_set_is_what_it_reads(workshop: Sandbox) -> None:
    result = workshop.execute(
        "import os\nfirst = min(os.sched_getaffinity(0))\nos.sched_setaffinity(0, {first})\n"
        "os.sched_getaffinity(0) == {first}"
    )
    assert result.value is True


@pytest.mark.needs("cgroup")
def test_memory_that_a_cell_takes_is_missing_in_what_it_sees(strict: Sandbox) -> None:
    code = """
def available():
    lines = open("/proc/meminfo").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
before = available()
kept = b"x" * (64 << 20)
before - available() >= 60 * 1024 and int(open("/sys/fs/cgroup/memory.current").read()) >= 64 << 20
"""
    assert strict.execute(code).value is True


def test_every_file_of_the_machine_can_be_read_and_none_written(strict: Sandbox) -> None:
    names = sorted(
        [*PROC_NAMES, *(f"sys/{name}" for name in SETTINGS if os.path.exists(f"/proc/sys/{name}"))]
    )
    code = f"""
import os
seen = []
for name in {names!r}:
    try:
        open("/proc/" + name, "rb").read()
        descriptor = os.open("/proc/" + name, os.O_RDONLY)
        os.write(descriptor, b"x")
    except OSError as error:
        if error.errno != 9:  # EBADF: it was opened for reading
            seen.append((name, error.errno))
    for write in (lambda: os.write(os.open(f"/proc/self/fd/{{descriptor}}", os.O_RDWR), b"x"),
                  lambda: os.truncate(f"/proc/self/fd/{{descriptor}}", 9000)):
        try:
            write()
            seen.append((name, "written"))
        except OSError:
            pass
    os.close(descriptor)
[seen, open("/proc/cpuinfo").read(9), open("/proc/meminfo").read(9)]
"""  # fmt: skip
    assert strict.execute(code).value == [[], "processor", "MemTotal:"]


@pytest.mark.needs("lscpu")
def test_files_are_found_from_a_directory_too(workshop: Sandbox) -> None:
    assert workshop.execute("cd /proc && head -c 9 meminfo", "bash").stdout == "MemTotal:"
    result = workshop.execute("lscpu | grep '^CPU(s):'", "bash")
    assert result.stdout.split()[-1] == str(min(2, len(os.sched_getaffinity(0))))


def test_a_flood_of_opens_takes_little_of_the_host(strict: Sandbox) -> None:
    """Content that is new needs memory of the supervisor: beyond a budget a cell gets the last one again."""
    code = """
kept = [open("/proc/meminfo") for _ in range(900)]
import os
len({os.fstat(each.fileno()).st_ino for each in kept})
"""
    assert 1 < strict.execute(code).value < 400


_KEEPS = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def keep(most):
    places, said = [], 0
    try:
        while len(places) < most:
            descriptor = os.open("/proc/uptime", os.O_RDONLY)
            places.append(libc.mmap(None, 4096, 1, 2, descriptor, 0))
            os.close(descriptor)
    except OSError as error: said = error.errno
    return places, said
places, said = keep(1500)
seen = [len(places), said]
for place in places: libc.munmap(ctypes.c_void_p(place), 4096)
[*seen, len(keep(100)[0])]
"""


def test_files_that_a_cell_keeps_open_are_bounded_until_it_closes_them(
    strict: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping keeps a file open without a descriptor, and the supervisor is charged for it."""
    assert strict.execute(_KEEPS).value == [1500, 0, 100]
    monkeypatch.setattr(machine_files, "_MOST_OPEN", 1000)
    monkeypatch.setattr(machine_files, "_LOOK_SECONDS", 0.0)
    assert strict.execute(_KEEPS).value == [1000, errno.ENFILE, 100]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.needs(command.split()[0]))
        for command in ("ps aux", "free", "uptime", "lscpu", "vmstat", "df", "mount")
    ],
)
def test_tools_that_ask_about_the_machine_work(workshop: Sandbox, command: str) -> None:
    result = workshop.execute(command, "bash")
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.needs("node")
def test_node_sees_its_memory_and_processors(workshop: Sandbox) -> None:
    code = (
        "const os = require('os'); [os.cpus().length, os.totalmem(), process.constrainedMemory()]"
    )
    memory = policy_named("workshop").limits.memory_bytes
    expected = [min(2, len(os.sched_getaffinity(0))), memory, memory]
    assert workshop.execute(f"console.log(JSON.stringify({code.partition('; ')[2]}))".replace("os.", "require('os')."), "javascript").stdout == f"[{','.join(map(str, expected))}]\n"  # fmt: skip


@pytest.mark.parametrize("limit", [64 * MIB, 200 * MIB])
def test_the_size_follows_the_policy(limit: int) -> None:
    with Sandbox(policy=with_limits(policy_named("strict"), memory_bytes=limit), pool=0) as box:
        assert box.execute("import os; os.sysconf('SC_PHYS_PAGES') * 4096").value == limit


def test_a_caller_that_does_not_take_its_file_delays_nothing_else(
    strict: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has the giver wait for a caller that gets no processor time."""
    over, waits = threading.Event(), []
    monkeypatch.setattr(notifications, "answer_with", lambda *_: waits.append(over.wait(20)))
    result = strict.execute("open('/proc/stat')", timeout=1)
    over.set()
    assert (result.reason, waits or soon(lambda: waits)) == ("wall_time", [True])


KERNEL_ADDRESSES = {
    "tcp": b"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 7 1 "
    b"ffff888012345678 100 0 0 10 0\n",
    "udp6": b"  1: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 "
    b"00000000:00000000 00:00000000 00000000  1000        0 7 2 ffff888012345678 0\n",
    "unix": b"ffff888012345678: 00000002 00000000 00010000 0001 01 7 /tmp/x 0123456789abcdef y\n",
}


@pytest.mark.parametrize("name", ["igmp", "igmp6"])
def test_groups_of_multicast_are_those_of_the_cell(workshop: Sandbox, name: str) -> None:
    """Go's net.Interface.MulticastAddrs reads them."""
    result = workshop.execute(
        f"[open(place + '/net/{name}').read() for place in ('/proc', '/proc/self')]"
    )
    ours, kernels = result.value
    assert ours == kernels
    assert "lo " in ours


@pytest.mark.parametrize(("name", "line"), KERNEL_ADDRESSES.items(), ids=KERNEL_ADDRESSES)
def test_tables_of_sockets_tell_no_address_of_the_kernel(
    name: str, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_files, "_of_process", lambda *_: b"head\n" + line)
    told = machine_files._network(name)(1)
    line = line.replace(b"ffff888012345678", b"0" * 16)
    assert told == b"head\n" + line.replace(b" 1000 ", b"65534 " if name != "unix" else b"")


def test_what_was_read_of_a_caller_that_is_gone_is_not_kept(
    strict: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be that of a process of the host by then."""
    waits = notifications.is_waiting
    given: list[int] = []

    def gone_once(listener: int, notification: notifications.Notification) -> bool:
        if given:
            return waits(listener, notification)
        given.append(notification.thread)
        notifications.refuse(listener, notification, errno.ESRCH)
        return False

    tables = iter([b"the host's", b"the cell's"])
    monkeypatch.setattr(notifications, "is_waiting", gone_once)
    monkeypatch.setattr(machine_files, "_of_process", lambda *_: next(tables))
    asks = "import os\nread = lambda: os.read(os.open('/proc/mounts', 0), 99).decode()\n"
    result = strict.execute(f"{asks}try:\n    read()\nexcept ProcessLookupError:\n    pass\nread()")
    assert (result.value, len(given)) == ("the cell's", 1)


def test_other_processes_and_other_ways_to_open_are_answered_by_the_kernel(strict: Sandbox) -> None:
    code = """
import os
seen = [len(os.sched_getaffinity(os.getpid()))]
for attempt in (lambda: os.sched_getaffinity(99999), lambda: os.open("/proc/stat", os.O_DIRECTORY),
                lambda: os.open("/proc/stat", os.O_PATH), lambda: os.open("/proc/stat", os.O_CREAT)):
    try: attempt(); seen.append(0)
    except OSError as error: seen.append(error.errno)
seen
"""
    found = strict.execute(code).value
    assert found[0] == 1
    assert found[1] == errno.ESRCH
    assert all(found[2:])


# Garbage of 3 GiB beside live data of 50 and 200 MiB: a heap of the host's size would be killed for memory.
GARBAGE = {
    "java": "cat >G.java <<'END'\nclass G { public static void main(String[] a) { byte[][] live = new byte[50][];"
    " for (int i = 0; i < 3000; i++) live[i % 50] = new byte[1 << 20]; System.out.println(\"collected\"); } }\nEND\n"
    "java G.java",
    "node": "node -e 'const live = []; for (let r = 0; r < 60; r++) for (let i = 0; i < 300000; i++)"
    " live[i] = {a: i, b: [r]}; console.log(\"collected\")'",
}  # fmt: skip


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize(
    "runtime", [pytest.param(each, marks=pytest.mark.needs(each)) for each in GARBAGE]
)
def test_a_runtime_that_makes_garbage_collects_it(workshop: Sandbox, runtime: str) -> None:
    result = workshop.execute(GARBAGE[runtime], "bash")
    assert (result.stdout, result.exit_code) == ("collected\n", 0), result.stderr
    assert result.usage.killed_for_memory == 0


RESERVES = """
import os
file = os.memfd_create("doublemapper")
try: os.ftruncate(file, 2 << 40)
except OSError as error: size = error.errno
else: size = os.fstat(file).st_size
size
"""


def test_a_runtime_may_reserve_more_than_it_uses(strict: Sandbox, tmp_path: Path) -> None:
    """What .NET asks for at its start.  A file on the host stays no larger than the workspace."""
    assert strict.execute(RESERVES).value == 2 << 40
    tmp_path.chmod(0o777)
    policy = msgspec.structs.replace(
        policy_named("strict"), filesystem=Filesystem(write=(str(tmp_path),))
    )
    with Sandbox(policy=policy) as box:
        assert box.execute(RESERVES).value == errno.EFBIG


@pytest.mark.needs("java")
def test_a_heap_in_a_file_of_memory_may_be_larger_than_the_workspace(workshop: Sandbox) -> None:
    assert policy_named("workshop").limits.workspace_bytes < 600 * MIB
    result = workshop.execute("java -XX:+UseZGC -Xmx600m -version", "bash")
    assert result.exit_code == 0, result.stdout


def test_files_that_claim_two_tebibytes_are_told_as_such(strict: Sandbox) -> None:
    code = "for n in range(300):\n    with open(f'f{n}', 'wb') as file: file.truncate(2 << 40)"
    with strict.session() as session:
        result = session.execute(code, collect=["*"])
        assert result.ok
        assert sum(file.size_bytes for file in result.files) == 300 * (2 << 40)
        assert session.execute("open('f0', 'wb').truncate((2 << 40) + 1)").error is not None
        with pytest.raises(WorkspaceError, match="claim more than"):
            session.snapshot()


def test_what_a_process_writes_about_itself_succeeds_or_is_no_violation(strict: Sandbox) -> None:
    """The JVM, PostgreSQL, sshd; the score stays what it was, for cells are to be killed first."""
    result = strict.execute("""
import os, threading
def write(path, text):
    try:
        with open(path, "w") as file: file.write(text)
    except OSError as error: return type(error).__name__
me, score = f"/proc/{os.getpid()}", open("/proc/self/oom_score_adj").read()
done = [write("/proc/self/coredump_filter", "0x31"),
        write(f"{me}/coredump_filter", "0"), write("/proc/self/timerslack_ns", "1000")]
refused = [write(f"/proc/self/task/{threading.get_native_id()}/comm", "x"), write(f"{me}/clear_refs", "1"),
           write("/proc/self/oom_score_adj", "-500"), write("/proc/1/oom_score_adj", "0")]
[done, refused, open("/proc/self/oom_score_adj").read() == score]
""")
    done, refused, is_kept = result.value
    assert done == [None] * 3
    assert None not in refused
    assert is_kept
    assert result.violations == ()
