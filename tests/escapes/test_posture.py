"""A living cell, read from the host and compared with what it should be: anything more fails."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox
from tests.conftest import policy_named

pytestmark = pytest.mark.needs("root")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
DEVICES = ("full", "null", "random", "urandom", "zero")


class Living:
    """The pids of a cell in which a program waits, as the host sees them."""

    def __init__(self, sandbox: Sandbox, init: int) -> None:
        self.keeper, self.launcher = sandbox._supervisor.generation.launcher.pids()
        self.init = init
        (self.guest,) = children(init)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def status(pid: int, task: str = "") -> dict[str, str]:
    lines = Path(f"/proc/{pid}/{task}status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture(scope="module", params=[0, 1], ids=["on demand", "parked"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=request.param) as box:
        box.settle()
        yield box


@pytest.fixture(scope="module")
def cell(sandbox: Sandbox) -> Iterator[Living]:
    launcher = sandbox._supervisor.generation.launcher.pids()[1]
    parked = children(launcher)
    run = sandbox.start("import threading\nprint('up', flush=True)\nthreading.Event().wait(60)")
    next(run.output())
    with contextlib.ExitStack() as stack:
        stack.callback(run.result)
        stack.callback(run.cancel)
        yield Living(sandbox, (parked or children(launcher))[0])


def test_ids_and_privileges(cell: Living) -> None:
    for pid in (cell.init, cell.guest):
        for task in os.listdir(f"/proc/{pid}/task"):
            seen = status(pid, f"task/{task}/")
            ids = set(seen["Uid"].split() + seen["Gid"].split())
            assert len(ids) == 1
            assert int(ids.pop()) >= 0x70000000
            assert seen["Groups"] == ""
            assert {seen[name] for name in CAPABILITIES} == {"0" * 16}
            assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Seccomp_filters"]) == ("1", "2", "1")
            assert seen["TracerPid"] == "0"


def test_the_processes_that_make_cells_are_not_root(cell: Living) -> None:
    for pid in (cell.keeper, cell.launcher):
        ids = set(status(pid)["Uid"].split())
        assert len(ids) == 1
        assert int(ids.pop()) >= 0x70000000
        assert os.readlink(f"/proc/{cell.launcher}/ns/user") != os.readlink("/proc/self/ns/user")
    assert status(cell.keeper)["CapEff"] == "0" * 16


def test_id_maps_have_one_id(cell: Living) -> None:
    outside = status(cell.guest)["Uid"].split()[0]
    for pid in (cell.init, cell.guest):
        for name in ("uid_map", "gid_map"):
            assert Path(f"/proc/{pid}/{name}").read_text().split() == ["1000", outside, "1"]
        assert Path(f"/proc/{pid}/setgroups").read_text() == "deny\n"


def test_every_namespace_differs_from_the_hosts_and_the_launchers(cell: Living) -> None:
    def namespaces(pid: int | str) -> dict[str, str]:
        return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES}

    host, launcher = namespaces("self"), namespaces(cell.launcher)
    init, guest = namespaces(cell.init), namespaces(cell.guest)
    for kind in NAMESPACES:
        assert guest[kind] not in (host[kind], launcher[kind]), kind
        # each process of the cell has a user namespace of its own and shares the others
        assert (guest[kind] == init[kind]) == (kind != "user"), kind


def test_the_mounts_are_these_and_no_others(cell: Living, sandbox: Sandbox) -> None:
    mounts = [
        line.split(" ") for line in Path(f"/proc/{cell.guest}/mountinfo").read_text().splitlines()
    ]
    boot = sandbox._supervisor.generation.boot
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


def test_the_descriptors_are_these_and_no_others(cell: Living) -> None:
    def kinds(pid: int) -> dict[str, str]:
        directory = f"/proc/{pid}/fd"
        return {n: os.readlink(f"{directory}/{n}").split(":")[0] for n in os.listdir(directory)}

    assert kinds(cell.guest) == {"0": "pipe", "1": "pipe", "2": "pipe", "3": "socket"}
    assert sorted(kinds(cell.init).values()) == ["anon_inode", "socket"]


def test_nothing_of_the_environment_or_the_checkout_shows(cell: Living) -> None:
    here = str(Path(__file__).parents[2]).encode()
    for pid in (cell.keeper, cell.launcher, cell.init, cell.guest):
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        assert here not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_limits_and_oom_score(cell: Living, sandbox: Sandbox) -> None:
    text = Path(f"/proc/{cell.guest}/limits").read_text()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in text.splitlines()[1:]}
    assert limits["Max core file size"] == ["1", "1"]
    assert limits["Max open files"] == ["1024", "1024"]
    assert limits["Max locked memory"] == ["0", "0"]
    assert limits["Max file size"] == [str(64 << 20)] * 2
    assert limits["Max realtime priority"] == ["0", "0"]
    for pid in (cell.launcher, cell.init, cell.guest):
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


def test_the_working_directory_and_root_are_the_cells(cell: Living) -> None:
    assert os.readlink(f"/proc/{cell.guest}/cwd") == "/workspace"
    assert os.readlink(f"/proc/{cell.guest}/root") == "/"
    assert not os.path.exists(f"/proc/{cell.guest}/root/etc/shadow")


@pytest.mark.needs("cgroup")
def test_both_processes_are_in_the_cells_cgroup(cell: Living) -> None:
    paths = [Path(f"/proc/{pid}/cgroup").read_text() for pid in (cell.init, cell.guest)]
    assert paths[0] == paths[1]
    assert "/cell-" in paths[0]
