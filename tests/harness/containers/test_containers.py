"""Sandboxes in containers, by runtimes that are really there and by one that fails in every way."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellwright import (
    HostSettings,
    LaunchError,
    PolicyError,
    PoolSettings,
    Sandbox,
    SandboxStatus,
    Unenforceable,
    tool,
)
from cellwright.policies.policy import Policy
from cellwright.runner.oci.container import remove_leftover_containers
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, ROOT, policy_named, soon
from tests.runner.test_ordinary_user import PRELUDE, PYTHON, USER, readable

__all__ = ["readable"]  # the fixture
pytestmark = [pytest.mark.needs("userns"), pytest.mark.filterwarnings("ignore:.*known holes")]
RUNTIMES = [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("runc", "crun")]
UNIFIED = Path("/sys/fs/cgroup/unified")
BUNDLES = "cellwright-oci-*"


def _is_hybrid() -> bool:
    """crun 1.8 refuses hosts where a controller is in v2 while others are in v1."""
    with contextlib.suppress(OSError):
        return bool((UNIFIED / "cgroup.controllers").read_text().strip())
    return False


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The path of a runtime; on a hybrid host crun is started where v2 is not mounted."""

    def path_of(name: str) -> str:
        found = shutil.which(name) or name
        if name != "crun" or not _is_hybrid() or os.geteuid():
            return found
        script = tmp_path_factory.getbasetemp() / "crun"
        if not script.exists():
            inner = f'umount -l {UNIFIED}; exec {found} "$@"'
            script.write_text(
                f"#!/bin/sh\nexec unshare -m --propagation private sh -c '{inner}' crun \"$@\"\n"
            )
            script.chmod(0o755)
        return str(script)

    return path_of


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, programs: Callable[[str], str]) -> str:
    return programs(request.param)


@pytest.fixture
def image(rootfs: Path, tmp_path: Path) -> Path:
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(rootfs, arcname=".")
    return path


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A file system of one program, which is linked statically."""
    root = tmp_path / "rootfs"
    for name in ("bin", "etc", "usr/share", "proc", "home"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in ("sh", "cat", "uname"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/os-release").write_text("ID=tiny\n")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    (root / "usr/share/word").write_text("hello")
    return root


def bundles() -> set[str]:
    return {str(path) for path in Path(tempfile.gettempdir()).glob(f"{BUNDLES}")}


def oci(runtime: str, policy: str = "strict", **given: Any) -> Sandbox:
    host = {name: given.pop(name) for name in ("rootfs", "language") if name in given}
    return Sandbox(
        policy=policy_named(policy),
        host=HostSettings(backend="oci", runtime=runtime, **host),
        **given,
    )


def test_programs_values_files_tools_and_sessions_are_those_of_every_sandbox(runtime: str) -> None:
    @tool
    def double(number: int) -> int:
        """Return twice the number."""
        return 2 * number

    before = bundles()
    with oci(runtime, tools=[double]) as sandbox:
        assert {"container", "kernel_shared", "seccomp", "landlock"} <= {*sandbox.layers, *OPTIONAL}
        result = sandbox.execute(
            "import tools\nopen('out', 'w').write(open('in').read() + name)\nprint('said')\n"
            "tools.double(number=21)",
            files={"in": "hello "}, inputs={"name": "cell"}, collect=["out"],
        )  # fmt: skip
        assert (result.value, result.stdout, result.reason) == (42, "said\n", "exit")
        assert result.artifacts[0].data == b"hello cell"
        assert result.layers == sandbox.layers
        assert result.usage.wall_seconds > 0
        with sandbox.session() as session:
            session.execute("x = 20")
            assert session.execute("x + 1").value == 21
        failed = sandbox.execute("1 / 0")
        assert failed.status is SandboxStatus.FAILED
        assert "ZeroDivisionError" in str(failed.error)
        assert sandbox.execute("while True: pass", timeout=1).reason == "wall_time"
        assert sandbox.audit
        assert len(sandbox.audit.get_entries()) >= 4
    assert bundles() == before


def test_what_a_policy_refuses_is_seen_as_a_violation(runtime: str) -> None:
    with oci(runtime, pool=0) as sandbox:
        result = sandbox.execute("import socket\nsocket.socket(socket.AF_INET)")
        assert [each.syscall for each in result.violations] == ["socket"]
        opened = sandbox.execute("open('/etc/shadow')")
        assert "/etc/shadow" in str(opened.violations)


def test_a_cell_is_confined_twice(runtime: str) -> None:
    """Its pid namespace lies below that of the container, which has no interface and no host file."""
    with oci(runtime, pool=0) as sandbox:
        program = (
            "import os\n[os.getpid(), os.getuid(), sorted(os.listdir('/')), os.listdir('/var')]"
        )
        pid, uid, names, below_var = sandbox.execute(program).value
        assert (pid, uid) == (2, 1000)
        assert {"workspace", "usr", "proc"} <= set(names)
        assert not {"run", "home", "boot"} & set(names)
        assert below_var == ["tmp"]


def test_with_a_launcher_for_each_cell_each_call_has_a_container_of_its_own(runtime: str) -> None:
    with oci(runtime, pool=PoolSettings(size=0, cells_per_launcher=1)) as sandbox:
        program = (
            "import ctypes\nctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, 'Py_None'))"
        )
        program = "id(int)"
        assert len({sandbox.execute(program).value for _ in range(3)}) == 3


def test_a_rootfs_is_what_programs_see(runtime: str, rootfs: Path) -> None:
    before = bundles()
    with oci(runtime, "standard", rootfs=rootfs) as sandbox:
        result = sandbox.execute("open('/etc/os-release').read(), open('/usr/share/word').read()")
        assert result.value == ["ID=tiny\n", "hello"]
        assert (
            sandbox.execute("open('/etc/passwd').read()")
            .value.splitlines()[1]
            .startswith("cell:x:1000")
        )
        assert sandbox.execute("open('/usr/share/word', 'w')").status is SandboxStatus.FAILED
        ran = sandbox.run(["/bin/cat", "/usr/share/word"])
        assert (ran.exit_code, ran.stdout) == (0, "hello")
        assert sandbox.execute("import json, ssl, sqlite3, zlib\njson.loads('[1]')").value == [1]
        assert sandbox.execute("import os\nos.path.exists('/usr/bin/env')").value is False
        with pytest.raises(LaunchError, match="with a rootfs"):
            sandbox.execute("echo hi", language="bash")
    assert bundles() == before
    assert sorted(path.name for path in rootfs.iterdir()) == ["bin", "etc", "home", "proc", "usr"]


def test_a_tar_is_a_rootfs_too(
    runtime: str, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with oci(runtime, "standard", rootfs=image, pool=0) as sandbox:
        assert sandbox.run(["/bin/cat", "/usr/share/word"]).stdout == "hello"


def test_a_path_of_the_policy_is_shown_at_its_place(runtime: str, tmp_path: Path) -> None:
    work = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        work.chmod(0o777)
        (work / "told").write_text("of the host")
        policy = {"extends": "strict", "filesystem": {"write": [str(work)]}}
        policy["optional_layers"] = list(OPTIONAL)  # type: ignore[assignment]
        with Sandbox(
            policy=policy, pool=0, host=HostSettings(backend="oci", runtime=runtime)
        ) as sandbox:
            result = sandbox.execute(
                f"open('{work}/made', 'w').write('in the cell')\nopen('{work}/told').read()"
            )
            assert result.value == "of the host"
        assert (work / "made").read_text() == "in the cell"
    finally:
        shutil.rmtree(work)


def test_a_path_beneath_a_writable_one_is_refused(runtime: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    policy = {"filesystem": {"write": [str(tmp_path)], "read": [str(tmp_path / "inner")]}}
    with pytest.raises(PolicyError, match="lies beneath a path that programs can write"):
        Sandbox(
            policy=policy | {"optional_layers": list(OPTIONAL)},
            host=HostSettings(backend="oci", runtime=runtime),
        )


def test_shells_of_the_host_run_in_a_container(runtime: str) -> None:
    with oci(runtime, language="sh", pool=0) as sandbox:
        result = sandbox.execute("echo hello from $PWD", language="sh")
        assert result.stdout == "hello from /workspace\n"


def test_a_container_that_was_killed_is_replaced(runtime: str) -> None:
    before = bundles()
    with oci(runtime, pool=0) as sandbox:
        assert sandbox.execute("1").value == 1
        (first,) = bundles() - before
        keeper = inspect(sandbox).supervisor.generation.launcher.keeper
        pidfd = os.pidfd_open(keeper)
        os.kill(keeper, signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0]  # the first process of a container ends last
        os.close(pidfd)
        assert sandbox.execute("2").value == 2
        (second,) = bundles() - before
        assert second != first
    assert bundles() == before


def as_user(readable: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as an ordinary user, on a hybrid host where v2 is not mounted."""
    lost = ["cgroup_cpu", "cgroup_memory", "cgroup_pids"]
    script = PRELUDE.format(paths=[str(readable)], lost=lost) + code
    home = readable / "home"
    user = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        PYTHON,
        "-I",
        "-c",
    ]
    hide = f"umount -l {UNIFIED} 2>/dev/null; " if _is_hybrid() else ""
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", f'{hide}exec "$@"', "sh"]
    return subprocess.run(
        [*command, *user, script], cwd="/",
        env={"HOME": str(home), "TMPDIR": str(home), "PATH": "/usr/bin:/usr/sbin:/bin:/sbin"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.needs("root")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="the system has no Python of this version")
@pytest.mark.parametrize("name", RUNTIMES)
def test_without_root_it_is_the_same(name: str, readable: Path) -> None:
    """The container has a user namespace with one id, and its launcher another one in it."""
    code = """
import warnings
warnings.simplefilter("ignore")
policy = msgspec.structs.replace(load_policy("standard"), optional_layers=tuple(LOST))
with Sandbox(policy=policy, host=HostSettings(backend="oci", runtime=NAME)) as sandbox:
    result = sandbox.execute("import os; print('x'); os.getuid()")
    refused = sandbox.execute("import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)")
    ran = sandbox.run(["/bin/echo", "hi"])
    with sandbox.session() as session:
        session.execute("x = 1")
        kept = session.execute("x + 1").value
    tell(value=result.value, refused=[each.syscall for each in refused.violations], ran=ran.stdout,
         kept=kept, layers=sandbox.layers)
"""
    done = as_user(readable, code.replace("NAME", repr(name)))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert (told["value"], told["refused"], told["ran"], told["kept"]) == (
        1000,
        ["ptrace"],
        "hi\n",
        2,
    )
    assert {"container", "kernel_shared", "landlock"} <= set(told["layers"])
    assert not list((readable / "home").glob(BUNDLES))


def test_nothing_is_left_when_the_process_is_killed(runtime: str) -> None:
    code = f"""
import os, signal, warnings
warnings.simplefilter("ignore")
from cellwright import HostSettings, Sandbox
box = Sandbox(policy={{"extends": "strict", "optional_layers": {list(OPTIONAL)!r}}}, pool=1,
              host=HostSettings(backend="oci", runtime={runtime!r}))
launcher = box._cells.supervisor.generation.launcher
print(launcher.keeper, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = bundles()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    keeper = int(done.stdout)
    assert soon(lambda: not _is_running(keeper))  # it hears the end of the socket
    left = bundles() - before
    assert len(left) == 1
    assert left <= set(remove_leftover_containers())
    assert bundles() == before


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


NOTED = """while [ $# -gt 0 ]; do [ "$1" = --pid-file ] && echo 999999999 > "$2"; shift; done
"""
FAKE = """#!/bin/sh
# An OCI runtime that fails as it is told.
for each; do case $each in
  --version) echo "crun version 1.20"; exit 0;;
  create|start|delete) verb=$each; break;;
esac; done
[ "$verb" = delete ] && { echo "$@" >> "$0.deleted"; exit 0; }
HOW
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("echo 'cannot clone: EPERM' >&2; exit 1", r"crun failed at create .exit status 1.: cannot clone"),
        ("exit 125", "crun failed at create .exit status 125.: no message"),
        ("kill -9 $$", "crun failed at create .signal 9."),
        ("exit 0", "it noted no process"),
        (
            NOTED + '[ "$verb" = start ] && { echo "no such container" >&2; exit 7; }; exit 0',
            "crun failed at start .exit status 7.: no such container",
        ),
        (NOTED + "exit 0", "the launcher ended before it was ready"),
    ],
)  # fmt: skip
def test_a_runtime_that_fails_is_our_error(how: str, message: str, tmp_path: Path) -> None:
    before = bundles()
    fake = tmp_path / "crun"
    fake.write_text(FAKE.replace("HOW", how))
    fake.chmod(0o755)
    with pytest.raises(LaunchError, match=message):
        oci(str(fake))
    assert bundles() == before
    assert "delete --force cellwright-oci-" in (tmp_path / "crun.deleted").read_text()


def test_a_runtime_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellwright.runner.oci.oci_runtime._SECONDS", 0.3)
    fake = tmp_path / "crun"
    fake.write_text(FAKE.replace("HOW", 'echo $$ > "$0.pid"; exec sleep 100'))
    fake.chmod(0o755)
    with pytest.raises(LaunchError, match=re.escape("crun did not end within 0.3 s at create")):
        oci(str(fake))
    assert not _is_running(int((tmp_path / "crun.pid").read_text()))


def test_an_old_runtime_is_named_with_its_holes(tmp_path: Path) -> None:
    fake = tmp_path / "runc"
    fake.write_text("#!/bin/sh\necho runc version 1.1.5\n")
    fake.chmod(0o755)
    with pytest.warns(UserWarning, match="CVE-2024-21626"), pytest.raises(LaunchError):
        oci(str(fake))


def test_on_the_command_line_a_warning_is_one_line(tmp_path: Path) -> None:
    fake = tmp_path / "runc"
    fake.write_text("#!/bin/sh\necho runc version 1.1.5\n")
    fake.chmod(0o755)
    command = [sys.executable, "-W", "always", "-m", "cellwright", "run", "--backend", "oci"]
    done = subprocess.run(
        [*command, "--runtime", str(fake), "-c", "1"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "known holes" in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("cellwright: runc 1.1.5 has known holes: ")
    assert "Warning" not in done.stderr


def test_a_policy_that_demands_a_kernel_is_refused_where_it_is_shared(runtime: str) -> None:
    policy = {"isolation": {"kernel": "own"}, "optional_layers": list(OPTIONAL)}
    with pytest.raises(Unenforceable, match="own_kernel: cells share the kernel of this host"):
        Sandbox(policy=policy, pool=0)
    with pytest.raises(Unenforceable, match="own_kernel"):
        Sandbox(policy=policy, host=HostSettings(backend="oci", runtime=runtime))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "vm"}, "backend: must be one of cells, oci"),
        ({"rootfs": "/usr"}, 'rootfs: needs backend="oci"'),
        ({"backend": "oci", "runtime": "podman"}, "podman is a container engine"),
        ({"backend": "oci", "pausable": True}, "pausable: cannot be combined"),
    ],
)
def test_arguments_that_make_no_container_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        Sandbox(policy=Policy(), host=HostSettings(**given))  # type: ignore[arg-type]


@pytest.mark.needs("runc")
def test_the_command_runs_a_program_in_a_container(rootfs: Path) -> None:
    options = [part for layer in OPTIONAL for part in ("--optional", layer)]
    command = [sys.executable, "-W", "ignore", "-m", "cellwright", "run", *options]
    done = subprocess.run(
        [*command, "--backend", "oci", "--runtime", "runc", "--rootfs", str(rootfs), "-"],
        input="print(open('/etc/os-release').read())", cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ID=tiny\n\n"), done.stderr
    done = subprocess.run(
        [*command, "--rootfs", str(rootfs), "-"], input="1", cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--rootfs: needs --backend oci" in done.stderr
