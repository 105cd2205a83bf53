"""The modules that a command imports: a count, and not a time.  Each costs up to some milliseconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.harness.servers.daemon.daemons import serving

# Without site: .pth files of the environment import what they like.
_MAIN = """
import sys
sys.path[:0] = {path!r}
from cellwright.harness.cli.main import main
status = main({arguments!r})
assert status == 0, status
print(*sorted(sys.modules), file=sys.stderr)
"""

_COMMAND = """
import gc, sys
sys.path[:0] = {path!r}
sys.argv = ["cellwright", "help"]
from cellwright.harness.cli.main import main
assert main() == 0
print(gc.isenabled(), gc.get_freeze_count())
"""


def _imported_by(*arguments: str) -> set[str]:
    """Return the modules that the process of a command has when the command completes."""
    code = _MAIN.format(path=[str(ROOT), *filter(None, sys.path)], arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


def test_the_version_is_printed_without_what_cells_need() -> None:
    imported = _imported_by("--version")
    assert not imported & {"msgspec", "typing", "argparse", "collections", "importlib", "json"}
    assert not {name for name in imported if name.startswith("cellwright.runner")}
    assert len(imported) <= 38


def test_a_run_imports_no_module_that_it_does_not_execute() -> None:
    _imported_by("run", "-c", "1 + 1")  # the first run of a policy on a host compiles it
    imported = _imported_by("run", "-c", "1 + 1")
    assert "msgspec" in imported
    assert not imported & {
        "cellwright.harness.text.terminal_text", "cellwright.harness.text.hidden", "msgspec.toml", "msgspec.yaml", "unicodedata",
        "ast", "asyncio", "dataclasses", "inspect", "pathlib", "sqlite3", "ssl", "subprocess", "tarfile", "tomllib", "typing_extensions",
        "urllib.request", "prctl", "psutil", "pyseccomp", "socket", "selectors", "platform", "locale", "_hashlib", "base64", "ctypes",
        "gettext", "importlib", "mmap", "msgspec.inspect", "queue", "shlex", "signal", "textwrap",
    }  # fmt: skip
    assert len(imported) <= 194


_LAUNCHED = """
import sys
sys.path[:0] = {path!r}
from cellwright.harness.cli import main
from cellwright.runner.launching import launch
begin_beside = launch.Launch.begin_beside
def begin(self):
    print(*sorted(sys.modules), file=sys.stderr)
    begin_beside(self)
launch.Launch.begin_beside = begin
assert main.main(["run", "-c", "1 + 1"]) == 0
"""


def test_a_launch_begins_before_a_run_imports_what_makes_and_watches_cells() -> None:
    code = _LAUNCHED.format(path=[str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    imported = set(done.stderr.split())
    assert "cellwright.runner.launching.launch" in imported
    assert not imported & {
        "cellwright.harness.sandbox.local", "cellwright.harness.sandbox.calls.admission", "cellwright.runner.cells.cell",
        "cellwright.runner.requests.execution", "cellwright.runner.cells.held_cell", "cellwright.runner.supervisor",
        "cellwright.runner.watching",
    }  # fmt: skip
    assert len(imported) <= 182


@pytest.mark.parametrize("code", ["print(1 + 1)", "[1, {'a': 2.5}]"])
def test_a_run_in_a_daemon_imports_few_modules_and_no_msgspec(tmp_path: Path, code: str) -> None:
    with serving(tmp_path / "s") as daemon:
        imported = _imported_by("run", "--connect", str(daemon.path), "-c", code)
    assert not imported & {"msgspec", "argparse", "typing", "re", "json", "socket", "threading"}
    assert len(imported) <= 60


def test_a_client_of_a_daemon_imports_nothing_that_makes_cells(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as daemon:
        # An option that only argparse knows.
        imported = _imported_by("run", "--connect", str(daemon.path), "--timeo", "9", "-c", "1 + 1")
    assert "cellwright.harness.sandbox.remote.daemon_client" in imported
    assert not imported & {
        "cellwright.harness.sandbox.local", "cellwright.harness.sandbox.calls.admission", "cellwright.harness.sandbox.sessions.session",
        "cellwright.runner.cgroups", "cellwright.runner.requests.execution", "cellwright.runner.cells.held_cell",
        "cellwright.runner.host", "cellwright.runner.kernel", "cellwright.runner.cells.pool", "cellwright.runner.sessions.session_cell",
        "cellwright.runner.supervisor", "cellwright.runner.listening", "cellwright.runner.watching",
        "asyncio", "ctypes", "hashlib", "inspect", "json", "pathlib", "queue", "shlex", "shutil", "signal", "subprocess",
        "tarfile", "traceback", "typing_extensions", "prctl", "socket", "selectors", "platform", "locale",
    }  # fmt: skip
    assert len(imported) <= 153


def test_collections_are_on_while_a_command_runs_and_leave_out_what_it_imported() -> None:
    code = _COMMAND.format(path=[str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    enabled, frozen = done.stdout.split()[-2:]
    assert enabled == "True"
    assert int(frozen) > 1000


_END = """
import atexit, sys, threading
sys.path[:0] = {path!r}
sys.argv = ["cellwright", "help", *{words!r}]
from cellwright.harness.cli.main import command
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread")), daemon={daemon}).start()
command()
"""


@pytest.mark.parametrize("words", [(), ("unknown",)])
@pytest.mark.parametrize("daemon", [False, True])
def test_a_command_ends_with_its_status_its_output_and_what_other_code_wants_at_the_end(
    words: tuple[str, ...], daemon: bool
) -> None:
    code = _END.format(path=[str(ROOT), *filter(None, sys.path)], words=words, daemon=daemon)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == (2 if words else 0)
    assert ("usage: cellwright" in done.stdout, bool(done.stderr)) == (not words, bool(words))
    ends = done.stdout.splitlines()[-2:] if not daemon else done.stdout.splitlines()[-1:]
    assert set(ends) == ({"at exit"} if daemon else {"thread", "at exit"})
