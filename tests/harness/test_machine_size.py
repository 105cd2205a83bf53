"""A cell sees a machine of its own size, whatever a runtime asks."""

import errno
import os
import threading

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.runner import launch
from cellwright.runner.fixed_root import PROC_NAMES
from cellwright.runner.kernel import notifications
from cellwright.runner.machine import SETTINGS
from cellwright.runner.watching import machine_files
from tests.conftest import OPTIONAL, policy_named, soon, with_limits

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
    deaf = msgspec.structs.replace(policy_named("strict"), optional_layers=(*OPTIONAL, "listener"))
    probe = launch.probe_host
    monkeypatch.setattr(
        launch,
        "probe_host",
        lambda *given: msgspec.structs.replace(probe(*given), listener="switched off"),
    )
    with Sandbox(policy=deaf, pool=0) as box:
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


@pytest.mark.parametrize(("name", "line"), KERNEL_ADDRESSES.items(), ids=KERNEL_ADDRESSES)
def test_tables_of_sockets_tell_no_address_of_the_kernel(
    name: str, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_files, "_of_process", lambda *_: b"head\n" + line)
    told = machine_files._network(name)(1)
    assert told == b"head\n" + line.replace(b"ffff888012345678", b"0" * 16)


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
