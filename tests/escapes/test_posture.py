"""A living cell, read from the host and compared with what it should be: anything more fails."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cellwright import HostSettings, Sandbox
from cellwright.benchmarks.census import children
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.tool import Tool
from cellwright.runner.launcher import inits
from cellwright.testing import inspect
from tests.conftest import policy_named
from tests.escapes.live_cell import NAMESPACES, LiveCell, status

pytestmark = pytest.mark.needs("root")
HELD_BY_INIT = ("ipc", "net", "pid", "uts")
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
DEVICES = ("full", "null", "random", "urandom", "zero")


@pytest.fixture(scope="module", params=[0, 1], ids=["on demand", "parked"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=request.param) as box:
        box.settle()
        yield box


@pytest.fixture(scope="module")
def cell(sandbox: Sandbox) -> Iterator[LiveCell]:
    launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
    parked = children(launcher)
    run = sandbox.start("import threading\nprint('up', flush=True)\nthreading.Event().wait(60)")
    next(run.output())
    with contextlib.ExitStack() as stack:
        stack.callback(run.result)
        stack.callback(run.cancel)
        yield LiveCell(sandbox, (parked or children(launcher))[0])


def test_ids_and_privileges(cell: LiveCell) -> None:
    for pid in (cell.init, cell.guest):
        for task in os.listdir(f"/proc/{pid}/task"):
            seen = status(pid, f"task/{task}/")
            ids = set(seen["Uid"].split() + seen["Gid"].split())
            assert len(ids) == 1
            assert int(ids.pop()) >= 0x70000000
            assert seen["Groups"] == ""
            assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Seccomp_filters"]) == ("1", "2", "1")
            assert seen["TracerPid"] == "0"
    assert {status(cell.guest)[name] for name in CAPABILITIES} == {"0" * 16}


@pytest.mark.parametrize("process", ["init", "nursery"])
def test_the_processes_that_make_namespaces_have_no_other_capability(
    cell: LiveCell, process: str
) -> None:
    seen = status(getattr(cell, process))
    assert {seen[name] for name in ("CapPrm", "CapEff")} == {f"{1 << 21:016x}"}  # CAP_SYS_ADMIN
    assert {seen[name] for name in ("CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
    assert os.stat(f"/proc/{getattr(cell, process)}/mem").st_uid == 0  # not dumpable: proc(5)
    assert os.readlink(f"/proc/{getattr(cell, process)}/ns/user") != os.readlink(
        "/proc/self/ns/user"
    )


def test_init_has_executed_nothing(cell: LiveCell) -> None:
    """It is where the clone left it: in pause, having been put to sleep once."""
    while (call := Path(f"/proc/{cell.init}/syscall").read_text().split()[0]) == "running":
        os.sched_yield()  # its turn on a busy processor has yet to come
    assert call in ("34", "73")  # pause, ppoll on aarch64
    seen = status(cell.init)
    assert int(seen["voluntary_ctxt_switches"]) + int(seen["nonvoluntary_ctxt_switches"]) <= 2


def test_the_processes_that_make_cells_are_not_root(cell: LiveCell) -> None:
    for pid in (cell.keeper, cell.nursery, cell.launcher):
        ids = set(status(pid)["Uid"].split())
        assert len(ids) == 1
        assert int(ids.pop()) >= 0x70000000
        assert os.readlink(f"/proc/{cell.launcher}/ns/user") != os.readlink("/proc/self/ns/user")
    assert status(cell.keeper)["CapEff"] == "0" * 16


def test_id_maps_have_one_id(cell: LiveCell) -> None:
    outside = status(cell.guest)["Uid"].split()[0]
    for name in ("uid_map", "gid_map"):
        assert Path(f"/proc/{cell.guest}/{name}").read_text().split() == ["1000", outside, "1"]
    assert Path(f"/proc/{cell.guest}/setgroups").read_text() == "deny\n"


def test_every_namespace_differs_from_the_hosts_and_the_launchers(cell: LiveCell) -> None:
    def namespaces(pid: int | str) -> dict[str, str]:
        return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES}

    host, launcher = namespaces("self"), namespaces(cell.launcher)
    init, guest = namespaces(cell.init), namespaces(cell.guest)
    for kind in NAMESPACES:
        assert guest[kind] not in (host[kind], launcher[kind]), kind
        assert (guest[kind] == init[kind]) == (kind in HELD_BY_INIT), kind


def test_the_mounts_are_these_and_no_others(cell: LiveCell, sandbox: Sandbox) -> None:
    mounts = [
        line.split(" ") for line in Path(f"/proc/{cell.guest}/mountinfo").read_text().splitlines()
    ]
    boot = inspect(sandbox).supervisor.generation.boot
    expected = ["/", "/proc", "/proc", "/tmp", "/workspace", *boot.files, *boot.hidden]
    expected += [f"/dev/{name}" for name in DEVICES]
    assert sorted(mount[4] for mount in mounts) == sorted(expected)
    writable = {"/tmp", "/workspace", *(f"/dev/{name}" for name in DEVICES)}
    for mount in mounts:
        flags = set(mount[5].split(","))
        assert "nosuid" in flags, mount
        assert "nodev" in flags or mount[4].startswith("/dev/"), mount
        if mount is not mounts[[m[4] for m in mounts].index("/proc")]:  # the launcher's, covered
            assert ("rw" in flags) == (mount[4] in writable), mount


def test_the_descriptors_are_these_and_no_others(cell: LiveCell) -> None:
    def kinds(pid: int) -> dict[str, str]:
        directory = f"/proc/{pid}/fd"
        return {n: os.readlink(f"{directory}/{n}").split(":")[0] for n in os.listdir(directory)}

    assert kinds(cell.guest) == {"0": "pipe", "1": "pipe", "2": "pipe", "3": "socket"}
    # The launcher's socket, /proc, its network namespace and an epoll, and of each cell whose network
    # namespace may be used again that and a pidfd.  An init shares the table, and nothing can get at it.
    counts = Counter(kinds(cell.nursery).values())
    kept = counts["net"] - 1
    assert counts == Counter({"socket": 1, "/proc": 1, "net": 1 + kept, "anon_inode": 1 + kept})
    assert kept <= inits._MOST
    assert kinds(cell.init) == kinds(cell.nursery)


def descriptors_of(sandbox: Sandbox, language: str, program: str) -> dict[int, str]:
    """Return what the guest's process has open while `program`, which has said so, goes on."""
    launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
    run = sandbox.start(program, language)
    next(run.output())
    (guest,) = children(launcher)
    try:
        directory = f"/proc/{guest}/fd"
        opened = {int(n): os.readlink(f"{directory}/{n}") for n in os.listdir(directory)}
        return {n: name.partition(":")[0] for n, name in opened.items()}
    finally:
        run.cancel()
        run.result()


@pytest.mark.parametrize("language", ["bash", "sh"])
def test_tools_bring_a_shell_no_descriptor_until_it_calls(language: str) -> None:
    """Then it has one: a socket, whose other end the supervisor holds."""
    waits = "echo up; while :; do :; done"
    tools = [Tool(ToolSpec(name="x", owner=ToolOwner.DEVELOPER), lambda *_: None)]
    shell = partial(
        Sandbox, policy=policy_named("strict"), pool=0, host=HostSettings(language=language)
    )
    with shell() as plain, shell(tools=tools) as box:
        without, given = (descriptors_of(each, language, waits) for each in (plain, box))
        calling = descriptors_of(box, language, f"exec 7<>/dev/tools; {waits}")
    own = {n: kind for n, kind in without.items() if not kind.startswith("/tmp/cell.")}
    assert own == dict.fromkeys(range(3), "pipe")
    assert {n: kind for n, kind in given.items() if not kind.startswith("/tmp/cell.")} == own
    assert calling == given | {7: "socket"}


def test_tools_bring_a_shells_root_the_command_and_nothing_else() -> None:
    tools = [Tool(ToolSpec(name="x", owner=ToolOwner.DEVELOPER), lambda *_: None)]
    with Sandbox(policy=policy_named("strict"), pool=0, tools=tools) as box:
        result = box.execute(
            "cd /dev; printf '%s ' * bin/*; [ -w bin/cellwright-call ] || echo; : >bin/x", "bash"
        )
    *devices, command = result.stdout.split()
    assert devices == sorted((*DEVICES, "bin", "fd", "shm", "stderr", "stdin", "stdout"))
    assert command == "bin/cellwright-call"
    assert "Read-only file system" in result.stderr


def test_nothing_of_the_environment_or_the_checkout_shows(cell: LiveCell) -> None:
    here = str(Path(__file__).parents[2]).encode()
    for pid in (cell.keeper, cell.nursery, cell.launcher, cell.init, cell.guest):
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        assert here not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_limits_and_oom_score(cell: LiveCell, sandbox: Sandbox) -> None:
    text = Path(f"/proc/{cell.guest}/limits").read_text()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in text.splitlines()[1:]}
    assert limits["Max core file size"] == ["1", "1"]
    assert limits["Max open files"] == ["1024", "1024"]
    assert limits["Max locked memory"] == ["0", "0"]
    # Every file that it may write has the size of its tmpfs above it, or is memory of the cgroup.
    assert limits["Max file size"] == [str(2 << 40)] * 2
    assert limits["Max realtime priority"] == ["0", "0"]
    for pid in (cell.launcher, cell.init, cell.guest):
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


def test_the_working_directory_and_root_are_the_cells(cell: LiveCell) -> None:
    assert os.readlink(f"/proc/{cell.guest}/cwd") == "/workspace"
    assert os.readlink(f"/proc/{cell.guest}/root") == "/"
    assert not os.path.exists(f"/proc/{cell.guest}/root/etc/shadow")


@pytest.mark.needs("cgroup")
def test_the_guest_is_in_the_cells_cgroup_and_init_is_not(cell: LiveCell) -> None:
    """Init shares the nursery's memory: a guest out of memory must not be its end."""
    assert "/cell-" in Path(f"/proc/{cell.guest}/cgroup").read_text()
    assert "/cell-" not in Path(f"/proc/{cell.init}/cgroup").read_text()


# A program that took the place of the guest's process


@pytest.fixture(scope="module")
def program() -> Iterator[LiveCell]:
    with (
        Sandbox(policy=policy_named("server"), pool=0) as sandbox,
        sandbox.program(("/usr/bin/bash", "-c", "echo up; read -r line")) as living,
    ):
        assert os.read(living.stdout, 10) == b"up\n"
        yield LiveCell(
            sandbox, children(inspect(sandbox).supervisor.generation.launcher.pids()[2])[0]
        )


def test_a_program_that_lives_is_behind_the_same_layers(program: LiveCell) -> None:
    test_ids_and_privileges(program)
    test_id_maps_have_one_id(program)
    test_every_namespace_differs_from_the_hosts_and_the_launchers(program)
    test_the_working_directory_and_root_are_the_cells(program)
    assert Path(f"/proc/{program.guest}/comm").read_text() == "bash\n"


def test_a_program_that_lives_has_no_descriptor_but_its_streams(program: LiveCell) -> None:
    directory = f"/proc/{program.guest}/fd"
    kinds = {n: os.readlink(f"{directory}/{n}").split(":")[0] for n in os.listdir(directory)}
    assert kinds == {"0": "pipe", "1": "pipe", "2": "pipe"}


@pytest.mark.needs("cgroup")
def test_a_program_that_lives_is_in_its_cells_cgroup(program: LiveCell) -> None:
    test_the_guest_is_in_the_cells_cgroup_and_init_is_not(program)


# A cell that has what programs of a developer's machine expect


@pytest.fixture(scope="module")
def workshop_cell() -> Iterator[LiveCell]:
    with Sandbox(policy=policy_named("workshop"), pool=0) as sandbox, _living(sandbox) as cell:
        yield cell


@contextlib.contextmanager
def _living(
    sandbox: Sandbox,
    program: str = "import threading\nprint('up', flush=True)\nthreading.Event().wait(60)",
) -> Iterator[LiveCell]:
    run = sandbox.start(program)
    next(run.output())
    try:
        launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
        yield LiveCell(sandbox, children(launcher)[0])
    finally:
        run.cancel()
        run.result()


def test_a_workshop_is_behind_the_same_layers(workshop_cell: LiveCell) -> None:
    test_ids_and_privileges(workshop_cell)
    test_id_maps_have_one_id(workshop_cell)
    test_every_namespace_differs_from_the_hosts_and_the_launchers(workshop_cell)
    test_nothing_of_the_environment_or_the_checkout_shows(workshop_cell)


# A cell whose programs trace each other


_TRACES = """
import ctypes, os, signal, threading
pid = os.fork()
if not pid: signal.pause()
ctypes.CDLL(None).ptrace(0x4206, pid, None, None)
print('up', flush=True)
threading.Event().wait(60)
"""


def test_a_cell_that_traces_is_behind_the_same_layers_and_traces_its_own_alone() -> None:
    policy = policy_named("workshop")
    processes = msgspec.structs.replace(policy.processes, debug=True)
    with (
        Sandbox(policy=msgspec.structs.replace(policy, processes=processes), pool=0) as sandbox,
        _living(sandbox, _TRACES) as cell,
    ):
        test_a_workshop_is_behind_the_same_layers(cell)
        (tracee,) = children(cell.guest)
        assert status(tracee)["TracerPid"] == str(cell.guest)
        for outside in (cell.init, cell.nursery, cell.launcher, cell.keeper):
            assert status(outside)["TracerPid"] == "0"


def test_terminals_and_the_machine_of_a_workshop_are_its_own(workshop_cell: LiveCell) -> None:
    place = f"/proc/{workshop_cell.guest}"
    lines = [line.split(" ") for line in Path(f"{place}/mountinfo").read_text().splitlines()]
    (terminals,) = [line for line in lines if " devpts " in " ".join(line)]
    assert terminals[4] == "/dev/pts"
    assert {"nosuid", "noexec"} <= set(terminals[5].split(","))
    assert "max=16" in terminals[-1].split(",")
    assert os.stat(f"{place}/root/dev/pts").st_dev != os.stat("/dev/pts").st_dev
    assert os.readlink(f"{place}/root/dev/ptmx") == "pts/ptmx"
    assert os.listdir(f"{place}/root/dev/pts") == ["ptmx"]
    of_sys = [path for path, _, files in os.walk(f"{place}/root/sys") for path in files]
    assert len(of_sys) < 100
    assert os.statvfs(f"{place}/root/sys/fs/cgroup").f_flag & os.ST_RDONLY
    names = [line.split() for line in Path(f"{place}/net/unix").read_text().splitlines()[1:]]
    assert not names  # no socket of the cell's network namespace has one


def test_the_control_channel_of_a_workshop_has_its_name_for_good(workshop_cell: LiveCell) -> None:
    inode = os.readlink(f"/proc/{workshop_cell.guest}/fd/3").strip("socket:[]")
    (line,) = [
        each.split()
        for each in Path("/proc/net/unix").read_text().splitlines()
        if inode in each.split()
    ]
    assert line[-1].startswith("@")


def test_limits_of_a_workshop(workshop_cell: LiveCell) -> None:
    text = Path(f"/proc/{workshop_cell.guest}/limits").read_text()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in text.splitlines()[1:]}
    assert limits["Max core file size"] == ["1", "1"]
    assert int(limits["Max locked memory"][1]) <= 1 << 20
    assert limits["Max realtime priority"] == limits["Max nice priority"] == ["0", "0"]
    assert int(limits["Max pending signals"][1]) <= 1024
