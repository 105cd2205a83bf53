"""python-prctl is optional: with and without it processes have the same privileges and every layer holds."""

import subprocess
import sys
from pathlib import Path

import msgspec
import prctl  # scripts/setup installs it
import pytest

from cellwright import Sandbox
from cellwright.benchmarks.census import children
from cellwright.harness.cli.helping.doctor import examine
from cellwright.runner.cell import privileges
from cellwright.runner.launching import spawn
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named, soon
from tests.escapes.live_cell import LiveCell, status

FIELDS = (
    "Name",
    "NoNewPrivs",
    "Seccomp",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "Groups",
)
GUEST = """
import ctypes, threading
libc = ctypes.CDLL(None)
print(libc.prctl(3), libc.prctl(27), flush=True)  # PR_GET_DUMPABLE, PR_GET_SECUREBITS
threading.Event().wait(60)
"""
ASK = """
import sys
sys.modules["prctl"] = None if sys.argv[1] == "without" else __import__("prctl")
from cellwright.runner.cell import privileges
assert (privileges.prctl is None) == (sys.argv[1] == "without")
print(privileges.has_sys_admin())
"""


@pytest.fixture
def no_prctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers find msgspec and cellwright, and no prctl."""
    assert msgspec.__file__
    (tmp_path / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    monkeypatch.setattr(spawn, "import_paths", lambda _: [str(tmp_path), str(ROOT)])


def processes() -> dict[str, object]:
    """Return what the kernel says of the processes of a launcher, and of a cell of it."""
    with Sandbox(policy=policy_named("standard"), pool=0) as sandbox:
        run = sandbox.start(GUEST)
        bits = next(run.output())[1]
        launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
        cell = LiveCell(sandbox, children(launcher)[0])
        found: dict[str, object] = {"dumpable and securebits": bits}
        # It has the name of an init for as long as it makes one.
        assert soon(lambda: status(cell.nursery)["Name"] == "cell-nursery")
        for name in ("keeper", "nursery", "launcher", "init", "guest"):
            pid = getattr(cell, name)
            seen = status(pid)
            owner = Path(f"/proc/{pid}/mem").stat().st_uid == 0  # True: not dumpable, proc(5)
            found[name] = (*(seen[field] for field in FIELDS), owner)
        run.cancel()
        run.result()
    return found


@pytest.mark.needs("root")
def test_both_ways_make_the_same_processes(request: pytest.FixtureRequest) -> None:
    with_it = processes()
    request.getfixturevalue("no_prctl")
    assert processes() == with_it
    assert with_it["dumpable and securebits"] == b"1 %d\n" % privileges._SECUREBITS


def test_every_layer_holds_without_it(no_prctl: None) -> None:
    failed = [check for check in examine(policy_named("strict")) if check.verdict == "FAIL"]
    assert failed == []


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("bounding", "expected"), [("+sys_admin", "True"), ("-sys_admin", "False")]
)
@pytest.mark.parametrize("way", ["with", "without"])
def test_a_root_without_the_capability_of_namespaces_is_recognised(
    bounding: str, expected: str, way: str
) -> None:
    command = ["setpriv", f"--bounding-set={bounding}", sys.executable, "-c", ASK, way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_the_bits_are_those_that_python_prctl_names() -> None:
    no_ambient = 0x40 | 0x80  # which it does not know
    names = (
        "NOROOT",
        "NOROOT_LOCKED",
        "NO_SETUID_FIXUP",
        "NO_SETUID_FIXUP_LOCKED",
        "KEEP_CAPS_LOCKED",
    )
    named = sum(getattr(prctl, f"SECBIT_{name}") for name in names)
    assert named | no_ambient == privileges._SECUREBITS


def test_a_launcher_finds_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Path(prctl.__file__).parent) in spawn.import_paths(())
    real = spawn.spec_of
    monkeypatch.setattr(spawn, "spec_of", lambda name: None if name == "prctl" else real(name))
    assert spawn.import_paths(())
