"""Control groups: the logic against fake trees, the caps against this machine's real ones."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cellwright import HostSettings, LaunchError, Sandbox
from cellwright.policies.policy import MIB, Policy
from cellwright.runner.cgroups import cgroup_tree, detect, v1, v2
from cellwright.runner.cgroups.cgroup_tree import (
    Caps,
    CgroupTree,
    has_ended,
    make_held,
    pid_namespace,
    processes_in,
    read_field,
    remove,
    this_process,
    write,
)
from cellwright.runner.cgroups.counters import Counters
from cellwright.runner.cgroups.systemd import delegated_scope
from cellwright.testing import inspect
from tests.conftest import CAPS as CAP_LAYERS
from tests.conftest import policy_named, soon, with_limits
from tests.runner.test_leftovers import inits_of

CAPS = Caps(64 * MIB, 0.5, 10)
V1_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", "memory.max_usage_in_bytes"),
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us"),
    "cpuacct": ("cpuacct.usage", "cpuacct.usage_user", "cpuacct.usage_sys"),
    "pids": ("pids.max", "pids.peak"),
}  # fmt: skip
V2_FILES = ("memory.max", "memory.oom.group", "memory.swap.max", "memory.peak", "memory.events",
            "cpu.max", "cpu.stat", "pids.max", "pids.peak", "cgroup.kill")  # fmt: skip

# Detection: texts of /proc/self/mountinfo

V1_HOST = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_HOST = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
"""
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup ro,nosuid shared:7 - tmpfs tmpfs ro,mode=755
32 31 0:29 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw,nsdelegate
33 31 0:30 / /sys/fs/cgroup/systemd rw,relatime shared:11 - cgroup cgroup rw,xattr,name=systemd
34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:16 - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/pids rw,relatime shared:17 - cgroup cgroup rw,pids
"""
TOP = Path("/sys/fs/cgroup")
DETECTION = {
    "v1": (V1_HOST, {name: TOP / name for name in V1_FILES}, TOP / "unified"),
    "v2": (V2_HOST, {}, TOP),
    "hybrid": (
        HYBRID,
        {"memory": TOP / "memory", "pids": TOP / "pids", "cpu": TOP / "cpu,cpuacct", "cpuacct": TOP / "cpu,cpuacct"},
        TOP / "unified",
    ),
    "named hierarchy only": ("33 31 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n", {}, None),
    "none": ("22 27 0:21 / /proc rw,relatime - proc proc rw\n", {}, None),
    "empty": ("", {}, None),
    "controllers named in the device field": ("33 31 0:30 / /mnt rw - ext4 memory rw,memory\n", {}, None),
    "mounted with an odd name": ("33 31 0:30 / /cg/memory rw - cgroup a-b rw,memory\n", {"memory": Path("/cg/memory")}, None),
    "a space in the path": ("33 31 0:30 / /cg\\040x rw - cgroup c rw,pids\n", {"pids": Path("/cg x")}, None),
}  # fmt: skip


@pytest.mark.parametrize(("text", "hierarchies", "unified"), DETECTION.values(), ids=DETECTION)
def test_hierarchies_are_found(
    text: str, hierarchies: dict[str, Path], unified: Path | None
) -> None:
    assert detect.hierarchies(text) == {name: str(path) for name, path in hierarchies.items()}
    assert detect._mount_point_of_v2(text) == (str(unified) if unified else None)


# The logic, with the files where the kernel would make them


def fake_mkdir(files: dict[str, str]):
    """Return an os.mkdir that fills the new directory as a cgroup file system does."""
    real = os.mkdir

    def mkdir(path: str, *arguments: object, **named: object) -> None:
        real(path, *arguments, **named)  # type: ignore[arg-type]
        for name, text in files.items():
            Path(path, name).write_text(text)

    return mkdir


def v1_kernel(monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    every = {name: "" for names in V1_FILES.values() for name in names} | {
        "tasks": "",
        "cgroup.procs": "",
    }
    monkeypatch.setattr(
        os, "mkdir", fake_mkdir(every | {k.replace("__", "."): v for k, v in texts.items()})
    )


def v1_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[v1.CgroupTreeV1, dict[str, Path]]:
    hierarchies = {name: tmp_path / name for name in V1_FILES}
    for path in hierarchies.values():
        path.mkdir()
    v1_kernel(monkeypatch)
    return v1.CgroupTreeV1(hierarchies, "ours"), hierarchies


def test_v1_writes_the_caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, at = v1_tree(tmp_path, monkeypatch)
    cgroup = tree.create("cell-0", CAPS)
    read = lambda name, file: (at[name] / "ours/cell-0" / file).read_text()  # noqa: E731
    assert read("memory", "memory.limit_in_bytes") == str(64 * MIB)
    assert read("memory", "memory.memsw.limit_in_bytes") == str(64 * MIB)
    assert read("cpu", "cpu.cfs_quota_us") == "50000"
    assert read("pids", "pids.max") == "10"
    assert not cgroup.into_cgroup
    cgroup.close_descriptors()


def test_v1_opens_one_descriptor_a_hierarchy_even_if_controllers_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory", "cpu,cpuacct", "pids"):
        (tmp_path / name).mkdir()
    v1_kernel(monkeypatch)
    shared = tmp_path / "cpu,cpuacct"
    tree = v1.CgroupTreeV1(
        {
            "memory": tmp_path / "memory",
            "cpu": shared,
            "cpuacct": shared,
            "pids": tmp_path / "pids",
        },
        "ours",
    )
    cgroup = tree.create("cell-0", CAPS)
    assert len(cgroup.descriptors) == 3
    cgroup.close_descriptors()
    assert cgroup.descriptors == ()


def test_v1_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    v1_kernel(monkeypatch)
    tree = v1.CgroupTreeV1({"memory": tmp_path / "memory"}, "ours")
    assert tree.missing["memory"] == ""
    assert "cpu" in tree.missing["cpu"]
    assert "pids" in tree.missing["pids"]


def test_v1_reads_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, at = v1_tree(tmp_path, monkeypatch)
    cgroup = tree.create("c", CAPS)
    (at["cpuacct"] / "ours/c/cpuacct.usage_user").write_text("1000000000\n")
    (at["cpuacct"] / "ours/c/cpuacct.usage").write_text("1500000000\n")
    (at["memory"] / "ours/c/memory.max_usage_in_bytes").write_text(f"{64 * MIB}\n")
    (at["pids"] / "ours/c/pids.events").write_text("max 5\n")
    (at["memory"] / "ours/c/memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    )
    assert cgroup.cpu_seconds() == 1.5
    usage = cgroup.usage()
    assert (usage.cpu_user_seconds, usage.memory_peak_bytes, usage.processes_peak) == (
        1.0,
        64 * MIB,
        None,
    )
    assert (usage.killed_for_memory, usage.forks_refused) == (2, 5)
    cgroup.close_descriptors()


def test_v1_kills_by_forbidding_new_processes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, at = v1_tree(tmp_path, monkeypatch)
    cgroup = tree.create("c", CAPS)
    cgroup.kill()
    assert (at["pids"] / "ours/c/pids.max").read_text().startswith("0")
    cgroup.close_descriptors()


def test_v1_kills_no_stranger_with_a_reused_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, _ = v1_tree(tmp_path, monkeypatch)
    cgroup = tree.create("c", CAPS)
    stranger = subprocess.Popen(["/bin/sleep", "60"])
    told = iter([[stranger.pid], [], [stranger.pid], [stranger.pid]])
    monkeypatch.setattr(v1, "processes_in", lambda _: next(told))
    cgroup.kill()  # it was told of when it ended, and is no more by the time its pidfd is open
    assert stranger.poll() is None
    cgroup.kill()
    assert stranger.wait(10) == -signal.SIGKILL
    cgroup.close_descriptors()


def v2_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str = "cpu memory pids"
) -> v2.CgroupTreeV2:
    files = {
        **dict.fromkeys(V2_FILES, ""),
        "cgroup.controllers": controllers,
        "cgroup.procs": "",
        "cgroup.subtree_control": "",
    }
    monkeypatch.setattr(os, "mkdir", fake_mkdir(files))
    return v2.CgroupTreeV2(tmp_path / "ours", create=True)


def test_v2_writes_the_caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = v2_tree(tmp_path, monkeypatch)
    tree.admit(os.getpid(), os.geteuid())
    cgroup = tree.create("cell-0", CAPS)
    read = lambda file: (tmp_path / "ours/cell-0" / file).read_text()  # noqa: E731
    assert read("memory.max") == str(64 * MIB)
    assert (read("memory.oom.group"), read("memory.swap.max")) == ("1", "0")
    assert read("cpu.max") == "50000 100000"
    assert read("pids.max") == "10"
    assert cgroup.into_cgroup
    assert len(cgroup.descriptors) == 1
    cgroup.close_descriptors()


def test_v2_moves_the_launcher_aside_and_switches_controllers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = v2_tree(tmp_path, monkeypatch)
    tree.admit(12, os.geteuid())
    assert (tmp_path / "ours/launcher/cgroup.procs").read_text() == "12"
    assert (tmp_path / "ours/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


@pytest.mark.parametrize("module", [v1, v2])
def test_a_tree_is_closed_while_another_thread_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    made = v1_tree(tmp_path, monkeypatch)[0] if module is v1 else v2_tree(tmp_path, monkeypatch)
    held = [*made._held]
    given_up: list[str] = []

    def close_meanwhile(directory: str) -> None:
        given_up.append(directory)
        if len(given_up) == 1:
            made.close()

    monkeypatch.setattr(module, "give_up", close_meanwhile)
    made.close()
    assert held
    for each in held:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_v2_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = v2_tree(tmp_path, monkeypatch, controllers="cpuset memory")
    assert tree.missing["memory"] == ""
    assert "not delegated" in tree.missing["cpu"]
    assert "not delegated" in tree.missing["pids"]


def test_v2_leaves_no_cgroup_whose_caps_could_not_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = v2_tree(tmp_path, monkeypatch)
    monkeypatch.undo()  # the kernel makes none of the files
    with pytest.raises(FileNotFoundError, match=r"memory\.max"):
        tree.create("cell-0", CAPS)
    assert not (tmp_path / "ours/cell-0").exists()


def test_v2_reads_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = v2_tree(tmp_path, monkeypatch)
    cgroup = tree.create("c", CAPS)
    (tmp_path / "ours/c/cpu.stat").write_text(
        "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n"
    )
    (tmp_path / "ours/c/memory.peak").write_text(f"{64 * MIB}\n")
    (tmp_path / "ours/c/memory.events").write_text(
        "low 0\nhigh 0\nmax 5\noom 1\noom_kill 3\noom_group_kill 1\n"
    )
    (tmp_path / "ours/c/pids.peak").write_text("10\n")
    (tmp_path / "ours/c/pids.events").write_text("max 7\n")
    assert cgroup.cpu_seconds() == 2.5
    assert cgroup.usage() == (2.0, 0.5, 64 * MIB, 10, 3, 7)
    (tmp_path / "ours/c/memory.peak").write_text("8192\n")
    assert cgroup.usage().killed_for_memory == 0  # far below its cap: the file is not opened
    cgroup.kill()
    assert (tmp_path / "ours/c/cgroup.kill").read_text() == "1"
    cgroup.close_descriptors()


def test_an_older_kernel_without_the_files_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = v2_tree(tmp_path, monkeypatch)
    cgroup = tree.create("c", CAPS)
    for name in ("cgroup.kill", "memory.peak", "pids.peak", "memory.events", "cpu.stat"):
        (tmp_path / "ours/c" / name).unlink()
    cgroup.kill()
    assert cgroup.usage() == (None, None, None, None, 0, 0)
    cgroup.close_descriptors()


def test_no_cgroups_says_why_for_each_controller() -> None:
    assert CgroupTree("none here").missing == dict.fromkeys(("memory", "cpu", "pids"), "none here")


def test_a_root_that_is_no_cgroup_directory_gives_none(tmp_path: Path) -> None:
    tree = detect.open_tree(os.getpid(), str(tmp_path))
    assert "no cgroup directory" in tree.missing["memory"]
    assert "nowhere" in detect.open_tree(os.getpid(), "/nowhere").missing["memory"]


def test_an_empty_variable_names_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit or a compose file may set it so."""
    monkeypatch.setenv("CELLWRIGHT_CGROUP_ROOT", "")
    roots: list[str | None] = []

    def noted(keeper: int, root: str | None) -> CgroupTree:
        roots.append(root)
        return CgroupTree("not asked")

    monkeypatch.setattr(detect, "_tree", noted)
    detect.open_tree(os.getpid())
    assert roots == [None]
    swept: list[list[str]] = []
    monkeypatch.setattr(detect, "sweep", lambda parents: swept.append([*parents]) or [])
    detect.sweep_host()
    assert "" not in swept[0]


# Sweeping


def test_a_sweep_removes_only_what_dead_supervisors_left(tmp_path: Path) -> None:
    me = f"cellwright-{os.getpid()}-{detect.start_time(os.getpid())}-0"
    reused = f"cellwright-{os.getpid()}-1-0"  # our pid, but another start time
    dead = "cellwright-4194305-123-0"  # above the largest pid there is
    for name in (me, reused, dead, "other", "cellwright-notes", "cellwright--", "cellwright-x-1-0"):
        (tmp_path / name).mkdir()
    (tmp_path / dead / "cell-0").mkdir()
    (tmp_path / dead / "launcher").mkdir()
    (tmp_path / reused / "cell-7").mkdir()
    detect.sweep([tmp_path])
    left = {path.name for path in tmp_path.iterdir()}
    assert {me, "other", "cellwright-notes", "cellwright-x-1-0"} <= left
    assert not {dead, reused} & left


ELSEWHERE = """
import sys
sys.path[:0] = {path!r}
from cellwright.runner.cgroups import detect
print(detect.sweep([{place!r}]))
"""


def swept_elsewhere(place: Path) -> str:
    """Sweep in a process of another pid namespace, where no process, or another one, has our number."""
    command = [sys.executable, "-I", "-c", ELSEWHERE.format(path=sys.path, place=str(place))]
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    return subprocess.run([*apart, *command], capture_output=True, text=True, check=True).stdout


@pytest.mark.needs("userns")
def test_supervisors_with_one_number_in_two_pid_namespaces_have_two_names() -> None:
    """Two containers that begin together: their processes have one number and one start time."""
    assert f"-{pid_namespace()}-" in detect._name()
    script = "from cellwright.runner.cgroups.cgroup_tree import pid_namespace as p; print(p())"
    code = f"import sys; sys.path[:0] = {sys.path!r}; {script}"
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    command = [*apart, sys.executable, "-I", "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert other.strip() not in ("", pid_namespace())


@pytest.mark.needs("userns")
def test_a_sweep_leaves_what_a_supervisor_of_another_pid_namespace_holds(tmp_path: Path) -> None:
    """As two containers do that have the host's cgroups mounted."""
    place = tmp_path / f"cellwright-{os.getpid()}-{detect.start_time(os.getpid())}-0"
    held = make_held(str(place))
    (place / "cell-0").mkdir()
    assert swept_elsewhere(tmp_path) == "[]\n"
    assert (place / "cell-0").exists()
    os.close(held)  # as if this process had ended
    assert swept_elsewhere(tmp_path) == f"{[str(place)]}\n"
    assert not place.exists()


def test_a_new_cgroup_that_a_sweep_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = tmp_path / "mine", cgroup_tree.lock_of
    swept: list[str] = []

    def sweep_first(directory: str) -> int | None:
        if not swept:
            swept.append(directory)
            place.rmdir()
        return real(directory)

    monkeypatch.setattr(cgroup_tree, "lock_of", sweep_first)
    held = make_held(str(place))
    assert swept
    assert place.exists()
    with pytest.raises(BlockingIOError, match="mine"):
        make_held(str(place))
    os.close(held)


def test_a_process_of_another_pid_namespace_is_not_said_to_have_ended() -> None:
    pid, start, namespace = this_process().split("-")
    assert not has_ended(f"{this_process()}-0")
    assert has_ended(f"4194305-{start}-{namespace}-0")
    assert not has_ended(f"4194305-{start}-{int(namespace) + 1}-0")
    assert has_ended(f"4194305-{start}-0")  # as earlier versions named it
    assert not has_ended(f"{pid}-{start}-0")
    assert not has_ended("x-1-0")


def test_a_sweep_of_a_place_that_is_gone_is_nothing(tmp_path: Path) -> None:
    detect.sweep([tmp_path / "nowhere"])


# Small parts


def test_reading_what_is_not_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "events").write_text("oom 1\noom_kill x\n")
    assert read_field(tmp_path / "events", "oom") == 1
    assert read_field(tmp_path / "events", "oom_kill") is None
    assert read_field(tmp_path / "events", "nothing") is None
    assert processes_in(tmp_path) == []


def test_a_failed_write_names_the_file() -> None:
    with pytest.raises(OSError, match="/dev/full"):
        write("/dev/full", "1")


def test_removing_says_whether_all_is_gone(tmp_path: Path) -> None:
    (tmp_path / "busy" / "child").mkdir(parents=True)
    (tmp_path / "free").mkdir()
    assert not remove([tmp_path / "busy", tmp_path / "free", tmp_path / "nowhere"])
    assert not (tmp_path / "free").exists()
    (tmp_path / "busy" / "child").rmdir()
    assert remove([tmp_path / "busy"])


def test_counters_are_read_through_descriptors_that_stay_open(tmp_path: Path) -> None:
    (tmp_path / "peak").write_text("5\n")
    (tmp_path / "stat").write_text("usage_usec 7\nuser_usec 3\n")
    (tmp_path / "max").write_text("max\n")
    names = ("peak", "stat", "max", "nowhere")
    counters = Counters({name: tmp_path / name for name in names})
    assert counters.number("peak") == 5
    (tmp_path / "peak").write_text("6\n")
    assert counters.number("peak") == 6
    assert counters.fields("stat") == {"usage_usec": 7, "user_usec": 3}
    assert (counters.number("max"), counters.number("nowhere")) == (None, None)
    assert counters.fields("nowhere") == {}
    counters.close()
    assert counters.number("peak") is None


# The real thing


def directories_of(cgroup: object) -> dict[str, Path]:
    if isinstance(cgroup, v1.CgroupV1):
        return {name: Path(directory) for name, directory in cgroup._directories.items()}
    assert isinstance(cgroup, v2.CgroupV2)
    return dict.fromkeys(("memory", "cpu", "pids"), Path(cgroup._directory))


@contextlib.contextmanager
def noted_cgroups(sandbox: Sandbox) -> Iterator[list[object]]:
    """Give a list to which every cgroup is added that is made for a cell of `sandbox`."""
    tree = inspect(sandbox).supervisor.generation.tree
    made: list[object] = []
    create = tree.create
    tree.create = lambda *given: made.append(create(*given)) or made[-1]  # type: ignore[method-assign,func-returns-value]
    yield made


@pytest.mark.needs("cgroup")
def test_a_living_cell_stands_under_the_caps_of_its_policy() -> None:
    policy = with_limits(
        policy_named("strict"),
        memory_bytes=96 * MIB,
        cpus=0.5,
        processes=12,
    )
    with Sandbox(policy=policy, pool=0) as sandbox, noted_cgroups(sandbox) as made:
        run = sandbox.start("import time\nprint('up', flush=True)\ntime.sleep(60)")
        assert next(run.output())[1] == b"up\n"
        at = directories_of(made[-1])
        read = lambda controller, file: (at[controller] / file).read_text().strip()  # noqa: E731
        if isinstance(made[-1], v1.CgroupV1):
            assert read("memory", "memory.limit_in_bytes") == str(96 * MIB)
            assert read("cpu", "cpu.cfs_quota_us") == "50000"
            assert read("cpu", "cpu.cfs_period_us") == "100000"  # the kernel's own
        else:
            assert read("memory", "memory.max") == str(96 * MIB)
            assert read("cpu", "cpu.max") == "50000 100000"
        assert read("pids", "pids.max") == "12"
        for directory in at.values():
            assert len(processes_in(directory)) == 1, directory  # the guest
        run.cancel()
        run.result()
        assert not any(directory.exists() for directory in at.values())
    parents = [each.parent for each in at.values() if each.parent.name.startswith("cellwright-")]
    assert soon(lambda: not any(parent.exists() for parent in parents))


def cannot_be_made(*given: object) -> object:
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), "/cgroup/memory.max")


def test_a_cgroup_that_cannot_be_made_is_a_launch_error_that_names_it() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        inspect(sandbox).supervisor.generation.tree.create = cannot_be_made  # type: ignore[assignment,method-assign]
        with pytest.raises(LaunchError, match=r"cannot make /cgroup/memory\.max: No such device"):
            sandbox.execute("1")


def test_a_cgroup_that_goes_with_a_dying_launcher_is_made_again() -> None:
    """systemd removes a scope with its last process: between our look at the launcher and mkdir."""
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        supervisor = inspect(sandbox).supervisor
        pids = supervisor.generation.launcher.pids()
        keeper, _, launcher = pidfds = [os.pidfd_open(pid) for pid in pids]

        def end_and_fail(*given: object) -> object:
            signal.pidfd_send_signal(launcher, signal.SIGKILL)
            assert select.select([keeper], [], [], 60)[0]
            return cannot_be_made()

        supervisor.generation.tree.create = end_and_fail  # type: ignore[assignment,method-assign]
        assert sandbox.execute("1 + 1").value == 2
    for pidfd in pidfds:
        os.close(pidfd)


@pytest.mark.parametrize("pool", [0, 2])
def test_without_a_cgroup_usage_comes_from_the_process_that_reaped_the_guest(
    tmp_path: Path, pool: int
) -> None:
    policy = Policy(optional_layers=CAP_LAYERS)
    with Sandbox(policy=policy, pool=pool, host=HostSettings(cgroup_root=str(tmp_path))) as sandbox:
        usage = sandbox.execute("sum(range(5_000_000)); len(bytearray(20_000_000))").usage
    assert usage.memory_peak_bytes > 20_000_000
    assert usage.cpu_user_seconds + usage.cpu_system_seconds > 0.01


@pytest.mark.needs("root", "v1_memory")
def test_a_directory_of_one_v1_hierarchy_stands_for_those_of_the_others() -> None:
    """An operator who makes one in each names any of them: none is the parent of the others."""
    name = f"cellwright-test-{os.getpid()}"
    tops = {name: Path(top) for name, top in detect.hierarchies(detect.mountinfo()).items()}
    made = [top / name for top in dict.fromkeys(tops.values())]
    try:
        for each in made:
            each.mkdir()
        with Sandbox(pool=0, host=HostSettings(cgroup_root=str(tops["memory"] / name))) as sandbox:
            assert {"cgroup_memory", "cgroup_cpu", "cgroup_pids"} <= set(sandbox.layers)
            assert any(each.is_dir() for each in (tops["memory"] / name).iterdir())
            assert sandbox.execute("x = bytearray(1 << 30)").reason == "memory"
    finally:
        for each in made:
            each.rmdir()


@pytest.mark.needs("cgroup")
def test_threads_past_the_cap_are_refused() -> None:
    policy = with_limits(policy_named("strict"), processes=8)
    code = """
import threading
stop = threading.Event()
started = 0
try:
    for _ in range(50):
        threading.Thread(target=stop.wait).start()
        started += 1
except RuntimeError:
    pass
stop.set()
started
"""
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(code).value == 7  # the main thread is the eighth


BUSY = """
import time
while time.process_time() < 0.2: pass
print('done', flush=True)
time.sleep(60)
"""


def periods_throttled(cpus: float) -> int:
    """Return in how many periods the kernel held back a busy loop in a cell with `cpus`."""
    policy = with_limits(policy_named("strict"), cpus=cpus)
    with Sandbox(policy=policy, pool=0) as sandbox, noted_cgroups(sandbox) as made:
        run = sandbox.start(BUSY)
        assert next(run.output())[1] == b"done\n"
        throttled = read_field(directories_of(made[-1])["cpu"] / "cpu.stat", "nr_throttled")
        run.cancel()
        run.result()
    assert throttled is not None
    return throttled


@pytest.mark.needs("cgroup")
def test_a_busy_loop_is_held_back_by_its_share_and_by_nothing_else() -> None:
    assert periods_throttled(cpus=0.1) > 0  # a share that a busy host has to give
    assert periods_throttled(cpus=4) == 0


# A scope that systemd delegates


@pytest.mark.needs("scope")
def test_the_scope_stands_under_the_manager_of_the_user() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox, noted_cgroups(sandbox) as made:
        assert sandbox.execute("6 * 7").value == 42
        assert isinstance(made[0], v2.CgroupV2)
        cell = Path(made[0]._directory)
        scope = cell.parent
        manager = "system.slice" if os.geteuid() == 0 else f"user@{os.geteuid()}.service"
        assert manager in scope.parts
        assert scope.name.startswith(f"cellwright-{os.getpid()}-")
        assert (scope / "cgroup.subtree_control").read_text().split() == ["cpu", "memory", "pids"]
        assert not processes_in(scope)  # they are in its child, away from the cells
        makers = {*inspect(sandbox).supervisor.generation.launcher.pids(), *inits_of(sandbox)}
        assert set(processes_in(scope / "launcher")) == makers
        assert not cell.exists()


@pytest.mark.needs("scope")
def test_memory_tasks_and_processors_are_capped_by_that_scope() -> None:
    """The kernel's own counters say so, not the guest."""
    policy = with_limits(
        policy_named("standard"),
        memory_bytes=64 * MIB,
        processes=10,
        cpus=0.5,
    )
    code = """
import os, time
try:
    while True:
        if os.fork() == 0: time.sleep(60)
except BlockingIOError:
    pass
while time.process_time() < 0.3: pass
print('up', flush=True)
time.sleep(60)
"""
    with Sandbox(policy=policy, pool=0) as sandbox, noted_cgroups(sandbox) as made:
        run = sandbox.start(code)
        assert next(run.output())[1] == b"up\n"
        cell = directories_of(made[-1])["pids"]
        assert int((cell / "pids.current").read_text()) == 10
        assert (read_field(cell / "pids.events", "max") or 0) > 0
        assert (read_field(cell / "cpu.stat", "nr_throttled") or 0) > 0
        run.cancel()
        run.result()
        hog = sandbox.execute("bytearray(200 << 20)")
    assert hog.reason == "memory"
    assert hog.usage.memory_peak_bytes <= 64 * MIB


def scopes_named(name: str) -> list[Path]:
    """Return the cgroups of a scope; os.walk goes on where one vanishes meanwhile, `glob` does not."""
    unit = f"{name}.scope"
    return [Path(above, unit) for above, below, _ in os.walk(TOP) if unit in below]


@pytest.mark.needs("scope")
@pytest.mark.parametrize("way", ["pystemd", "busctl"])
def test_a_scope_whose_process_ended_meanwhile_is_not_left_behind(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of asking systemd get the same scope."""
    if way == "busctl":
        monkeypatch.setitem(sys.modules, "pystemd", None)
    name = f"cellwright-test-{os.getpid()}-{way}"
    refused = (None, "was too late: the launcher is gone")
    with subprocess.Popen(["true"]) as ended, subprocess.Popen(["sleep", "60"]) as lasting:
        try:
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # nobody has reaped it
            assert delegated_scope(ended.pid, f"{name}-1") == refused
            # Once this has its scope, systemd has done everything that it was asked before.
            scope, _ = delegated_scope(lasting.pid, f"{name}-2")
            assert scopes_named(f"{name}-2") == [scope]
            assert soon(lambda: not scopes_named(f"{name}-1"))
        finally:
            lasting.kill()
    assert soon(lambda: not scopes_named(f"{name}-2"))


@pytest.mark.parametrize("option", ["nokmem", "nosocket", "nobpf,nokmem"])
def test_a_kernel_that_was_told_not_to_count_is_no_memory_cgroup(option: str) -> None:
    assert option in detect.not_counted(f"quiet cgroup.memory={option} panic=1")


def test_a_kernel_that_counts_all_is_one() -> None:
    assert detect.not_counted("quiet cgroup.memory=nobpf panic=1") == ""


@pytest.mark.needs("v1_memory", "root")
def test_sockets_are_capped_on_v1_where_there_are_any() -> None:
    memory = Path("/sys/fs/cgroup/memory")
    limits = {}
    for name, socket_bytes in (("some", 4 * MIB), ("none", 0)):
        directory = memory / f"cellwright-test-{os.getpid()}-{name}"
        cgroup = v1.CgroupV1({"memory": directory}, CAPS._replace(socket_bytes=socket_bytes))
        try:
            limits[name] = int((directory / "memory.kmem.tcp.limit_in_bytes").read_text())
            assert cgroup.can_exceed == bool(socket_bytes)
            assert not cgroup.has_exceeded()
        finally:
            cgroup.close_descriptors()
            assert cgroup.remove()
    assert limits["some"] == 4 * MIB
    assert limits["none"] > 1 << 50


@pytest.mark.needs("cgroup")
def test_a_program_that_sleeps_over_the_ticks_is_charged_for_what_it_computes() -> None:
    """The ticks of the timer, by which v1 splits user and system time, meet it never or seldom."""
    program = (
        "import time\nticks = 0.004\n"
        "for _ in range(40):\n"
        "    time.sleep(ticks - time.monotonic() % ticks + 0.0002)\n"
        "    end = time.monotonic() + 0.002\n    while time.monotonic() < end: pass\n"
        "time.process_time()"
    )
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        result = box.execute(program)
    counted = result.usage.cpu_user_seconds + result.usage.cpu_system_seconds
    assert counted >= 0.9 * result.value > 0
