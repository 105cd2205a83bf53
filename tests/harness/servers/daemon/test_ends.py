"""Start and shutdown of a daemon: socket, lock, signals, systemd, and what remains."""

import contextlib
import os
import re
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cellwright import CellwrightError, ClosedError, LaunchError, Sandbox, SandboxStatus
from cellwright.harness.cli.helping.doctor import _daemon
from cellwright.harness.sandbox.remote import address
from cellwright.harness.servers.daemon import lifecycle
from cellwright.harness.servers.daemon.configuration import DaemonConfiguration
from cellwright.runner.cgroups import systemd
from tests.conftest import OPTIONAL, ROOT, soon
from tests.harness.servers.daemon.daemons import Daemon, serving
from tests.runner.test_leftovers import cgroups_of, descendants, wait_until_ended

pytestmark = pytest.mark.needs("userns")
SLOW = "import time; print('up', flush=True); time.sleep({}); 42"
OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]


def started(sandbox: Sandbox, seconds: float):  # type: ignore[no-untyped-def]
    """Return a run that has begun."""
    run = sandbox.start(SLOW.format(seconds))
    assert next(run.output()) == ("stdout", b"up\n")
    return run


def is_gone(daemon: Daemon, pids: list[int]) -> bool:
    here = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return not here and not cgroups_of(daemon.pid) and os.listdir(daemon.path.parent) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_runs_may_end_before_the_daemon_does(tmp_path: Path, number: int) -> None:
    with (
        handled(signal.SIGHUP, signal.SIG_DFL),
        serving(tmp_path / "s") as daemon,
        daemon.sandbox() as sandbox,
        daemon.sandbox() as idle,
    ):
        run, pids = started(sandbox, 0.5), descendants(daemon.pid)
        daemon.process.send_signal(number)
        assert soon(lambda: not daemon.path.exists() or not _answers(daemon))
        assert soon(lambda: _is_refused(idle))
        assert run.result().value == 42
        assert daemon.wait() == 0
        assert soon(lambda: is_gone(daemon, pids))


def _is_refused(sandbox: Sandbox) -> bool:
    """Say whether another execution is; one may still be answered just after the socket closed."""
    try:
        sandbox.execute("1")
    except (ClosedError, LaunchError):
        return True
    return False


def test_nohup_keeps_a_daemon_from_ending_with_its_terminal(tmp_path: Path) -> None:
    with (
        handled(signal.SIGHUP, signal.SIG_IGN),
        serving(tmp_path / "s") as daemon,
        daemon.sandbox() as sandbox,
    ):
        daemon.process.send_signal(signal.SIGHUP)
        assert sandbox.execute("6 * 7").value == 42
        assert ignores(daemon.pid, signal.SIGHUP)
        assert daemon.end() == 0


@contextlib.contextmanager
def handled(number: signal.Signals, how: signal.Handlers) -> Iterator[None]:
    """Have what is started meanwhile inherit how a signal is handled."""
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


def ignores(pid: int, number: signal.Signals) -> bool:
    """Tell what the kernel says of a process (proc(5), SigIgn)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ignored,) = (line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) & 1 << (number - 1))


def _answers(daemon: Daemon) -> bool:
    try:
        daemon.sandbox().close()
    except CellwrightError:
        return False
    return True


def test_what_takes_longer_than_the_drain_is_cancelled_and_told(tmp_path: Path) -> None:
    with serving(tmp_path / "s", drain=0.1) as daemon, daemon.sandbox() as sandbox:
        run, pids = started(sandbox, 300), descendants(daemon.pid)
        assert daemon.end() == 0
        assert run.result().status is SandboxStatus.CANCELLED
        assert soon(lambda: is_gone(daemon, pids))


def test_a_second_signal_ends_what_runs_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "s", drain=1000) as daemon, daemon.sandbox() as sandbox:
        run, pids = started(sandbox, 300), descendants(daemon.pid)
        daemon.process.send_signal(signal.SIGINT)
        assert soon(lambda: not _answers(daemon))
        assert run.status is SandboxStatus.RUNNING
        assert daemon.end(signal.SIGINT) == 0
        assert run.result().status is SandboxStatus.CANCELLED
        assert soon(lambda: is_gone(daemon, pids))


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    from tests.harness.servers.daemon.daemons import RawClient, program

    with serving(tmp_path / "s", drain=0.1, reader_seconds=1000) as daemon:
        pids = descendants(daemon.pid)
        with RawClient(daemon.path) as client:
            client.say(program("while True: print('x' * 1000)", stream=True))
            client.hear()
            assert daemon.end() == 0
        assert soon(lambda: is_gone(daemon, pids))


def test_a_killed_daemon_leaves_nothing_that_the_next_one_does_not_remove(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as first:
        with first.sandbox() as sandbox:
            session = sandbox.session()
            session.execute("1")
            started(sandbox, 300).cancel()
        pidfds = dict(living(descendants(first.pid)))
        first.process.kill()
        first.wait()
        wait_until_ended(list(pidfds), pidfds)
        assert sorted(os.listdir(tmp_path)) == ["s", "s.lock"]
    with serving(tmp_path / "s") as second:
        assert cgroups_of(first.pid) == set()
        with second.sandbox() as sandbox:
            assert sandbox.execute("1").ok
        assert second.end() == 0
    assert os.listdir(tmp_path) == []


def living(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Give those that have not ended meanwhile, as the cell that was just cancelled may, and a pidfd."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            yield pid, os.pidfd_open(pid)


def cellwright(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cellwright", *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        check=False, env=os.environ | environment,
    )  # fmt: skip


def test_two_daemons_do_not_share_a_socket(daemon: Daemon) -> None:
    done = cellwright("serve", *OPTIONS, "--socket", str(daemon.path))
    assert (done.returncode, "a daemon already listens at" in done.stderr) == (70, True)
    assert daemon.is_well()


def test_what_is_no_socket_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    done = cellwright("serve", *OPTIONS, "--socket", f"{tmp_path}/s")
    assert (done.returncode, "is not a socket of this user" in done.stderr) == (2, True)
    assert (tmp_path / "s").read_text() == "precious"
    (tmp_path / "t").symlink_to(tmp_path / "elsewhere")
    assert (
        "is not a socket of this user"
        in cellwright("serve", *OPTIONS, "--socket", f"{tmp_path}/t").stderr
    )
    assert sorted(os.listdir(tmp_path)) == ["s", "t"]


def test_a_directory_where_others_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    done = cellwright("serve", *OPTIONS, "--socket", f"{tmp_path}/s")
    assert (done.returncode, "another user may write there" in done.stderr) == (2, True)


def test_a_name_that_the_kernel_cannot_take_is_refused(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/{'x' * 120}", f"{tmp_path}/none/s"):
        assert cellwright("serve", *OPTIONS, "--socket", path).returncode == 2
    with pytest.raises(CellwrightError, match="at most 107 bytes"):
        Sandbox(connect="x" * 120)


def test_one_listens_at_a_time_and_the_next_finds_nothing_of_it(tmp_path: Path) -> None:
    first, second = (address.listening_at(tmp_path / "s") for _ in range(2))
    with first, pytest.raises(CellwrightError, match="already"):
        second.__enter__()
    with address.listening_at(tmp_path / "s") as listener:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert listener.getsockname() != ""
    assert os.listdir(tmp_path) == []


def test_policies_of_one_name_are_refused(tmp_path: Path) -> None:
    done = cellwright("serve", "--policy", "strict", "--policy", "strict", "--socket", f"{tmp_path}/s")  # fmt: skip
    assert (done.returncode, "names must differ" in done.stderr) == (2, True)
    assert os.listdir(tmp_path) == []


def test_the_default_path_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert address.default_path() == Path("/run/cellwright.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert address.default_path() == Path("/run/user/1/cellwright.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(CellwrightError, match="XDG_RUNTIME_DIR is not set"):
        address.default_path()


# the command line


def test_a_run_uses_the_daemon(daemon: Daemon) -> None:
    start = "import subprocess; subprocess.run(['/usr/bin/echo', 'hi'])"
    done = cellwright("run", "--connect", str(daemon.path), "--policy", "standard", "-c", start)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hi\n", "")
    done = cellwright("run", "--connect", str(daemon.path), "-c", "1 / 0")
    assert (done.returncode, "ZeroDivisionError" in done.stderr) == (1, True)
    done = cellwright("run", "--connect", str(daemon.path), "--memory", "9", "-c", "1")
    assert (done.returncode, "cannot be combined with --connect" in done.stderr) == (2, True)
    done = cellwright("run", "--connect", f"{daemon.path}.none", "-c", "1")
    assert (done.returncode, "no daemon answers" in done.stderr) == (70, True)


def test_doctor_says_whether_one_answers(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "default_path", lambda: daemon.path)
    assert (_daemon().verdict, "one answers" in _daemon().proof) == ("PASS", True)
    monkeypatch.setattr(address, "default_path", lambda: tmp_path / "s")
    assert (_daemon().verdict, "none at" in _daemon().proof) == ("PASS", True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(os.fspath(tmp_path / "s"))
    assert (_daemon().verdict, "cellwright serve" in _daemon().repair) == ("WARN", True)


# systemd


def test_a_socket_that_is_passed_is_used_as_systemd_passes_it(tmp_path: Path) -> None:
    place = tmp_path / "passed"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(place))
        listener.listen()
        told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        told.bind(os.fspath(tmp_path / "notify"))
        told.settimeout(30)
        number = listener.fileno()
        script = f'exec 3<&{number}; exec env LISTEN_PID=$$ LISTEN_FDS=1 "$@"'
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "-", sys.executable, "-m", "cellwright", "serve", *OPTIONS],
            cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[number], stderr=subprocess.DEVNULL,
            env=os.environ | {"NOTIFY_SOCKET": os.fspath(tmp_path / "notify")},
        )  # fmt: skip
    try:
        with Sandbox(connect=place) as sandbox:  # waits until it is up
            assert sandbox.execute("6 * 7").value == 42
        with told:
            assert told.recv(4096).startswith(b"READY=1\n")
        process.terminate()
        assert process.wait(30) == 0
        assert place.is_socket()  # it is systemd's to remove
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["a file", "another type", "not listening", "two"])
def test_anything_else_that_is_passed_is_refused(tmp_path: Path, kind: str) -> None:
    with (
        open(tmp_path / "f", "wb") as file,
        socket.socket(socket.AF_UNIX) as stream,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as quiet,
    ):
        stream.bind(os.fspath(tmp_path / "s"))
        stream.listen()
        passed = {"a file": file, "another type": stream}.get(kind, quiet).fileno()
        count = 2 if kind == "two" else 1
        script = f'exec 3<&{passed}; exec env LISTEN_PID=$$ LISTEN_FDS={count} "$@"'
        command = [sys.executable, "-m", "cellwright", "serve"]
        done = subprocess.run(
            ["/bin/bash", "-c", script, "-", *command], cwd=ROOT, pass_fds=[passed],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False,
        )  # fmt: skip
    assert (done.returncode, b"systemd " in done.stderr) == (2, True)


def test_a_notice_goes_to_an_abstract_socket_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(f"\0cellwright-test-{os.getpid()}")
        address.notify("READY=1", {"NOTIFY_SOCKET": f"@cellwright-test-{os.getpid()}"})
        assert select.select([told], [], [], 5)[0]
        assert told.recv(100) == b"READY=1"
    address.notify("READY=1", {"NOTIFY_SOCKET": "@nobody"})
    address.notify("READY=1", {})


def test_units_are_written(tmp_path: Path) -> None:
    made = tmp_path / "new" / "units"
    done = cellwright("serve", "--units", str(made))
    assert done.stdout.split() == [f"{made}/{name}" for name in lifecycle.NAMES]
    for command in (
        "daemon-reload",
        "enable --now cellwright.socket",
        f"cp {made}/cellwright.socket",
    ):
        assert command in done.stderr
    assert ("loginctl enable-linger" in done.stderr) == (os.geteuid() != 0)
    service = (made / "cellwright.service").read_text()
    assert "Delegate=yes" in service
    assert re.search(r'^ExecStart="/.*" -I -m cellwright serve --delegated$', service, re.MULTILINE)


def test_units_keep_every_option_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "my policy.toml").write_text('name = "mine"\n')
    given = {
        "--policy": "my policy.toml", "--pool": "3", "--sessions": "5", "--session-idle": "60.0",
        "--audit": 'a"$%.jsonl', "--drain": "50.0", "--optional": "cgroup",
    }  # fmt: skip
    command = [sys.executable, "-m", "cellwright", "serve", "--units", ".", "--socket", "a.sock"]
    done = subprocess.run(
        [*command, *(word for option in given.items() for word in option)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert len(done.stdout.split()) == 2
    service = (tmp_path / "cellwright.service").read_text()
    (line,) = (line for line in service.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(line.partition("=")[2].replace("%%", "%").replace("$$", "$"))
    told = dict(zip(words[6::2], words[7::2], strict=True))
    files = {name: f"{tmp_path}/{given[name]}" for name in ("--policy", "--audit")}
    assert told == given | files
    assert "TimeoutStopSec=70\n" in service
    assert (
        f"ListenSequentialPacket={tmp_path}/a.sock\n"
        in (tmp_path / "cellwright.socket").read_text()
    )


@pytest.mark.needs("systemd_analyze")
@pytest.mark.parametrize("user", [0, 1000])
def test_systemd_finds_nothing_wrong_with_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    written = lifecycle.write_units(tmp_path, (), lifecycle.plan_of(DaemonConfiguration()))
    monkeypatch.undo()
    mode = "--system" if user == 0 else "--user"
    done = subprocess.run(
        ["systemd-analyze", mode, "verify", "--man=no", *map(os.fspath, written)],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": os.fspath(tmp_path)},
    )  # fmt: skip
    about_ours = [line for line in done.stderr.splitlines() if "cellwright" in line]
    assert (about_ours, done.returncode) == ([], 0)


def test_a_delegated_cgroup_is_divided_among_daemon_and_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By files that look like cgroup v2; the tests of hosts with systemd ask the kernel."""
    service = tmp_path / "system.slice" / "cellwright.service"
    service.mkdir(parents=True)
    (service / "cgroup.procs").write_text("7\n")
    (service / "cgroup.controllers").write_text("cpu io memory pids\n")
    (service / "cgroup.subtree_control").touch()
    (service / "daemon").mkdir()
    (service / "daemon" / "cgroup.procs").touch()
    monkeypatch.setattr(systemd, "_service", lambda mount: service)
    assert systemd.take_delegation(tmp_path) == str(service)
    assert (service / "daemon" / "cgroup.procs").read_text() == "7"
    assert (service / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"


def test_a_cgroup_that_cannot_be_used_is_not_delegated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "_service", lambda mount: tmp_path / "gone")
    assert systemd.take_delegation(tmp_path) is None
    monkeypatch.setattr(systemd, "_service", lambda mount: None)
    assert systemd.take_delegation(tmp_path) is None
