"""Reloads of the configuration: all of it or nothing, and no call or session is lost."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import CellwrightError, PolicyError, Sandbox
from tests.conftest import soon
from tests.harness.servers.daemon.configured import ConfiguredDaemon, configured

pytestmark = pytest.mark.needs("userns")
MINE = 'name = "mine"\n[limits]\nwall_seconds = {}\n'
BOTH = 'policies = ["strict", "mine.toml"]\n'


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ConfiguredDaemon]:
    (tmp_path / "mine.toml").write_text(MINE.format(20))
    with configured(tmp_path, BOTH) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfiguredDaemon]:
    """One for tests after which it serves as before."""
    folder = Path(tmp_path_factory.mktemp("steady"))
    (folder / "mine.toml").write_text(MINE.format(20))
    with configured(folder, BOTH) as daemon:
        yield daemon


def rewrite(daemon: ConfiguredDaemon, seconds: int) -> None:
    """Replace the policy's file, as an editor does: a daemon that reads meanwhile sees either."""
    made = daemon.file.parent / "mine.new"
    made.write_text(MINE.format(seconds))
    made.rename(daemon.file.parent / "mine.toml")


def test_a_changed_policy_holds_for_the_next_call_of_a_client_that_is_connected(
    daemon: ConfiguredDaemon,
) -> None:
    with daemon.sandbox("mine") as sandbox:
        assert sandbox.execute("1").ok
        rewrite(daemon, 1)
        assert "reloaded: serving strict, mine" in daemon.reload_as_it_is()
        assert sandbox.execute("while True: pass").reason == "wall_time"


def test_no_call_is_lost_when_policies_change_under_load(daemon: ConfiguredDaemon) -> None:
    over = threading.Event()
    values: list[object] = []
    failures: list[BaseException] = []

    def call(number: int) -> None:
        try:
            with daemon.sandbox("mine") as sandbox:
                session = sandbox.session(f"s{number}")
                session.execute("n = 0")
                calls = 0
                while not over.is_set():
                    values.append(sandbox.execute(f"{number} * 2").value == number * 2)
                    calls += 1
                    values.append(session.execute("n += 1; n").value == calls)
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for seconds in range(21, 26):
        rewrite(daemon, seconds)
        assert "reloaded" in daemon.reload_as_it_is()
    over.set()
    for each in threads:
        each.join(60)
    assert failures == []
    assert len(values) > 20
    assert all(values)


def test_a_long_call_goes_on_under_the_policy_that_it_began_under(daemon: ConfiguredDaemon) -> None:
    with daemon.sandbox("mine") as sandbox:
        run = sandbox.start("print('up', flush=True); import time; time.sleep(2); 42")
        assert next(run.output()) == ("stdout", b"up\n")
        rewrite(daemon, 1)
        assert "reloaded" in daemon.reload_as_it_is()
        assert run.result().value == 42


def test_a_session_outlives_its_policy_whose_cells_end_with_it(daemon: ConfiguredDaemon) -> None:
    with daemon.sandbox("mine") as sandbox:
        session = sandbox.session("kept")
        session.execute("x = 7")
        rewrite(daemon, 21)
        daemon.reload_as_it_is()
        assert session.execute("x").value == 7
        with daemon.sandbox("mine") as other, pytest.raises(CellwrightError):
            raise_if_none(other.session("kept").execute("x").error)
        session.close()
        assert daemon.sees("cellwright_sessions{policy=mine,state=thawed}", 1)  # the other one
        assert soon(lambda: launchers(daemon) == 2)


def raise_if_none(error: str | None) -> None:
    if error:
        raise CellwrightError(error)


def test_a_policy_that_is_not_named_any_more_is_refused(daemon: ConfiguredDaemon) -> None:
    with daemon.sandbox("mine") as sandbox, daemon.sandbox("strict") as strict:
        assert sandbox.execute("1").ok
        daemon.reload("")
        with pytest.raises(PolicyError, match="'mine' is not one of the daemon's: strict"):
            sandbox.execute("1")
        assert strict.execute("1").ok


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("polices = []", "did you mean policies?"),
        ('policies = ["strict", "none.toml"]', "none.toml: No such file"),
        ("policies = ['strict'", "not TOML"),
        (BOTH + 'request_log = "-"', "request_log: changes only when the daemon is restarted"),
        (BOTH + "[limits]\nrunning = 3", "limits: changes only"),
        ("python = '9.9'", "9.9"),
    ],
)
def test_a_file_that_cannot_be_applied_changes_nothing_and_is_told(
    steady: ConfiguredDaemon, text: str, complaint: str
) -> None:
    told = steady.reload(text)
    assert "configuration not reloaded, the former one stays in force" in told
    assert complaint in told
    with steady.sandbox("mine") as sandbox:
        assert sandbox.execute("6 * 7").value == 42
    assert steady.ask("/readyz") == (200, b"ready\n")


@pytest.mark.parametrize("kind", ["fifo", "huge", "gone", "a device"])
def test_what_is_no_file_is_neither_read_nor_waited_for(
    steady: ConfiguredDaemon, kind: str
) -> None:
    steady.file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(steady.file)
    elif kind == "huge":
        steady.file.touch()
        os.truncate(steady.file, 1 << 30)
    elif kind == "a device":
        steady.file.symlink_to("/dev/zero")
    try:
        assert "not reloaded" in steady.reload_as_it_is()
        assert steady.ask("/healthz") == (200, b"ok\n")
        assert steady.resident_mib() < 200
    finally:
        steady.file.unlink(missing_ok=True)


def test_a_storm_of_signals_ends_in_the_last_file(daemon: ConfiguredDaemon) -> None:
    with daemon.sandbox("mine") as sandbox:
        for number in range(300):
            rewrite(daemon, 20 + number % 5)
            daemon.process.send_signal(signal.SIGHUP)
        rewrite(daemon, 1)
        daemon.reload_as_it_is()
        assert soon(lambda: sandbox.execute("while True: pass").reason == "wall_time")
        assert daemon.process.poll() is None
        assert soon(lambda: launchers(daemon) == 2)  # launchers of both policies


def launchers(daemon: ConfiguredDaemon) -> int:
    """Return how many sandboxes the daemon has, of former configurations too."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
    names = []
    for thread in children.parent.parent.glob("*/children"):
        pids = thread.read_text().split()
        names += [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]
    return names.count("cell-keeper")


def test_policies_that_sessions_still_use_are_not_collected_without_end(
    daemon: ConfiguredDaemon,
) -> None:
    with daemon.sandbox("mine") as sandbox:
        sessions = []
        for number in range(9):
            sessions.append(sandbox.session(f"s{number}"))
            rewrite(daemon, 30 + number)
            told = daemon.reload_as_it_is()
        assert "sessions still use 8 policies" in told
        assert all(each.execute("1").ok for each in sessions)
        for each in sessions:
            each.close()
        assert "reloaded: serving" in daemon.reload_as_it_is()


def test_a_signal_at_the_end_is_harmless(daemon: ConfiguredDaemon) -> None:
    daemon.process.send_signal(signal.SIGHUP)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.wait() == 0
    assert not daemon.path.exists()


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(os.fspath(tmp_path / "notify"))
        told.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(tmp_path / "notify"))
        with configured(tmp_path) as daemon:
            assert told.recv(4096) == b"READY=1\nSTATUS=serving strict"
            daemon.reload_as_it_is()
            assert told.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert told.recv(4096) == b"READY=1\nSTATUS=serving strict"
            assert daemon.end() == 0
            assert told.recv(4096) == b"STOPPING=1"


def test_the_clients_default_policy_follows_the_file(tmp_path: Path) -> None:
    with configured(tmp_path) as daemon, Sandbox(connect=daemon.path) as sandbox:
        assert sandbox.policy.name == "strict"
        daemon.reload('policies = ["standard", "strict"]')
        with Sandbox(connect=daemon.path) as other:
            assert other.policy.name == "standard"
        assert sandbox.execute("1").ok
