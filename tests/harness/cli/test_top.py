"""`cellwright top`: one screen for scripts, and the screen of a terminal: keys, sizes, hostile texts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import AuditLog, Sandbox
from cellwright.harness.cli.commands import run_command
from cellwright.harness.cli.watching.activity import Activity, GrowingTrail
from cellwright.policies.policy import Network, NetworkRule
from tests.conftest import ROOT, policy_named, soon
from tests.harness.cli.test_shell import Person, Tmux
from tests.harness.servers.daemon.configured import configured

TOP = (sys.executable, "-m", "cellwright", "top")
ENDING = b"q quit"  # the last line of the screen
WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
from cellwright.harness.cli.main import command
sys.argv = ["cellwright", "top", "--once"]
command()
"""
HOSTILE = "a\x1b[2J\x1b]0;owned\x07\u202egnp.exe\n" + "b" * 2000


@pytest.fixture(autouse=True)
def plain(own_records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_RUNTIME_DIR"])  # for its processes
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        yield box


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """A trail with the refusals that one hostile program caused."""
    path = tmp_path / "trail"
    with AuditLog(path=path) as log:
        log.record("violation", "openat", target=HOSTILE, allowed=False, rule="mount_ns: not shown")
        for name in ("good.example.org:443", "good.example.org:443"):
            log.record("network", "connection", target=name)
        log.record(
            "violation", "connect", target="evil.example.org 443", allowed=False,
            rule="network: no rule allows it", count=3,
        )  # fmt: skip
    return path


def once(*arguments: str) -> list[str]:
    done = subprocess.run(
        [*TOP, "--once", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


# for scripts


@pytest.mark.needs("userns")
def test_one_screen_has_every_sandbox_and_session(box: Sandbox) -> None:
    with box.session("mine") as session:
        session.execute("1")
        head, titles, *rows = once("--sort", "name")
        assert "1 sandboxes, 1 sessions (0 frozen)" in head
        assert titles.split()[:3] == ["ID", "KIND", "STATE"]
        assert [row.split()[1] for row in rows] == ["sandbox", "session"]
        assert rows[1].split()[-3:] == ["strict", "python", "mine"]
        (row,) = once("--filter", "MINE")[2:]
        assert row.split()[1] == "session"
        assert once("--filter", "no such thing")[2:] == []


@pytest.mark.needs("userns")
def test_texts_of_programs_and_clients_end_no_line_and_move_no_cursor(
    box: Sandbox, trail: Path
) -> None:
    with box.session("x\x1b[31m\u202e[bold]y") as session:
        session.execute("1")
        lines = once("--audit", str(trail))
    assert all(line.isprintable() and line.isascii() for line in lines)
    assert lines[-1].split()[1:] == ["mount_ns", "openat", *lines[-1].split()[3:]]
    assert "\\x1b[2J\\x1b]0;owned\\x07\\u202egnp.exe\\nbbb" in lines[-1].replace("\\\\", "\\")
    assert len(lines[-1]) < 400
    (named,) = [line for line in lines if "session" in line and "strict" in line]
    assert named.endswith("x\\x1b[31m\\u202e[bold]y")


def test_a_trail_shows_refusals_and_the_hosts_that_were_asked_for(trail: Path) -> None:
    text = "\n".join(once("--audit", str(trail)))
    assert re.search(r"^ +3 +refused +evil\.example\.org:443$", text, re.MULTILINE)
    assert re.search(r"^ +2 +connected +good\.example\.org:443$", text, re.MULTILINE)
    assert re.search(r"network +connect evil\.example\.org 443, 3 times$", text, re.MULTILINE)


@pytest.mark.needs("userns")
def test_a_name_that_waits_for_a_decision_is_shown_with_its_sandbox() -> None:
    rules = Network(allow=(NetworkRule(host="files.example.org"),))
    code = "import socket\ntry: socket.getaddrinfo('evil.example.org', 443)\nexcept OSError: pass"
    with Sandbox(policy=policy_named("strict", network=rules), pool=0) as box:
        assert box.execute(code).ok
        with contextlib.closing(Activity()) as activity:
            (host,) = activity.look().hosts
        (id,) = {line.split()[0] for line in once()[2:3]}
    assert (host.name, host.outcome, host.where) == ("evil.example.org", "refused", id)
    assert host.asked >= 1


@pytest.mark.needs("userns")
def test_the_tenants_of_a_daemon_are_shown_as_it_tells_them(tmp_path: Path) -> None:
    with configured(tmp_path) as daemon, daemon.sandbox() as sandbox:
        sandbox.execute("1")
        text = "\n".join(once("--connect", str(daemon.path)))
        assert f"daemon {daemon.pid}, up " in text
        assert re.search(r"^TENANT +CLIENTS +CALLS", text, re.MULTILINE)
        assert re.search(r"^owner +\d", text, re.MULTILINE)


def test_a_daemon_that_does_not_answer_is_a_line_of_the_screen(tmp_path: Path) -> None:
    assert once("--connect", str(tmp_path / "none"))[1].startswith("! ")


def test_without_the_extra_the_error_names_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RICH],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the extra `top` is not installed" in done.stderr
    assert "[top]" in done.stderr


def test_without_a_terminal_it_names_the_option_that_needs_none() -> None:
    done = subprocess.run(
        TOP, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--once" in done.stderr


# the file of a trail


def test_a_trail_is_followed_over_a_rotation_and_half_a_line(trail: Path, tmp_path: Path) -> None:
    with contextlib.closing(GrowingTrail(str(trail))) as growing:
        growing.read()
        before = len(growing.refusals)
        line = trail.read_bytes().splitlines(keepends=True)[-1]
        with open(trail, "ab") as file:
            file.write(b"no record\n" + line[:40])
        growing.read()
        assert len(growing.refusals) == before
        with open(trail, "ab") as file:
            file.write(line[40:])
        growing.read()
        assert len(growing.refusals) == before + 1
        trail.rename(tmp_path / "trail.1")
        growing.read()
        trail.write_bytes(line * 2)
        growing.read()
        assert len(growing.refusals) == before + 3
        trail.write_bytes(b"")  # emptied in its place
        growing.read()
        trail.write_bytes(line)
        growing.read()
        assert len(growing.refusals) == before + 4


def test_a_long_trail_is_read_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trail"
    with AuditLog(path=path) as log:
        for _ in range(2000):
            log.record("violation", "openat", target="/x", allowed=False)
    with contextlib.closing(GrowingTrail(str(path))) as growing:
        growing.read()
        assert 0 < len(growing.refusals) <= 500
        assert growing.refusals[-1].seq == json.loads(path.read_bytes().splitlines()[-1])["seq"]


def test_a_trail_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert run_command(["top", "--once"], None) == 0
    done = subprocess.run(
        [*TOP, "--once", "--audit", str(tmp_path / "none")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, "cannot read" in done.stderr) == (2, True)


# at a terminal


@contextlib.contextmanager
def person(*arguments: str) -> Iterator[Person]:
    made = Person(*arguments, command=TOP)
    try:
        made.until(ENDING)
        yield made
    finally:
        made.close()


def test_q_ends_it_and_the_terminal_is_as_it_was(trail: Path) -> None:
    with person("--audit", str(trail)) as me:
        assert not me.is_restored()
        me.type(b"q")
        assert me.end() == 0
        assert me.is_restored()
        assert me.seen.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_ends_it_and_the_terminal_is_as_it_was(
    number: signal.Signals, status: int
) -> None:
    with person() as me:
        me.process.send_signal(number)
        assert me.end() in (status, -number)
        assert me.is_restored()
        assert b"\x1b[?1049l" in me.seen


def test_only_sequences_of_ours_reach_the_terminal(trail: Path) -> None:
    with person("--audit", str(trail)) as me:
        me.type(b"q")
        me.end()
    assert b"\x1b]" not in me.seen  # no title, no clipboard
    assert set(re.findall(rb"\x1b\[[0-9;?]*[A-Za-z]", me.seen)) <= {
        b"\x1b[H", b"\x1b[0m", b"\x1b[1m", b"\x1b[7m", b"\x1b[33m", b"\x1b[?1049l", b"\x1b[?25h",
    }  # fmt: skip


def test_no_colour_is_used_where_it_is_declined(
    trail: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with person("--audit", str(trail)) as me:
        me.until(b"\x1b[33m")
    monkeypatch.setenv("NO_COLOR", "1")
    with person("--audit", str(trail)) as me:
        me.type(b"r")
        while b"mount_ns" not in me.seen:  # the word that was coloured
            me.seen += os.read(me.master, 65536)
        me.type(b"q")
        me.end()
    assert re.search(rb"\x1b\[[0-9;]*3[0-9]m", me.seen) is None


@pytest.fixture
def tmux(trail: Path) -> Iterator[Tmux]:
    path = os.environ["XDG_RUNTIME_DIR"]
    words = (
        "env",
        f"XDG_RUNTIME_DIR={path}",
        f"XDG_CACHE_HOME={path}",
        "PS1=$ ",
        "bash",
        "--norc",
        "-i",
    )
    made = Tmux(*words, columns=80, rows=24)
    try:
        made.until("$")
        made.type(" ".join((*TOP, "--audit", str(trail))), "Enter")
        made.until("q quit")
        yield made
    finally:
        made("kill-server")


@pytest.mark.needs("userns", "tmux")
def test_keys_sort_filter_and_help(tmux: Tmux, box: Sandbox) -> None:
    with box.session("needle") as session:
        session.execute("1")
        tmux.until("needle", "sort by cpu")
        for key, shown in (
            ("M", "memory"),
            ("N", "name"),
            ("P", "cpu"),
            (">", "memory"),
            ("<", "cpu"),
        ):
            tmux.type(key)
            tmux.until(f"sort by {shown}")
        tmux.type("r")
        tmux.until("cpu reversed")
        tmux.type("/")
        tmux.type("nothing")
        tmux.until("only lines with: nothing_")
        assert soon(lambda: "needle" not in tmux.screen())
        tmux.type("Escape")
        tmux.until("needle", "q quit")
        tmux.type("h")
        tmux.until("sort by CPU, memory, age, name")
        tmux.type("x")
        tmux.until("needle", "q quit")
        tmux.type("q")
        tmux.until("$")
        assert "needle" not in tmux.screen()  # the screen from before is back


@pytest.mark.needs("tmux")
@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (132, 50), (20, 5)])
def test_a_terminal_that_is_resized_is_filled_and_nothing_scrolls(
    tmux: Tmux, columns: int, rows: int
) -> None:
    tmux("resize-window", "-x", str(columns), "-y", str(rows))
    assert soon(lambda: _is_filled(tmux, rows)), tmux.screen()
    assert tmux.screen().startswith("cellwright ")
    tmux("resize-window", "-x", "80", "-y", "24")
    assert soon(lambda: _is_filled(tmux, 24)), tmux.screen()
    tmux.until("REFUSED", "evil.example.org")


def _is_filled(tmux: Tmux, rows: int) -> bool:
    lines = tmux.screen().split("\n")[:-1]
    return len(lines) == rows and lines[-1].startswith("q quit") and lines[0].startswith("cell")


@pytest.mark.needs("tmux")
def test_it_stops_and_goes_on_as_a_job_of_a_shell(tmux: Tmux) -> None:
    tmux.type("C-z")
    tmux.until("Stopped")
    tmux.type("echo typed", "Enter")
    tmux.until("typed\n")  # echoed: the modes are those of the shell
    tmux.type("fg", "Enter")
    tmux.until("q quit", "REFUSED")
    tmux.type("q")
    assert soon(lambda: tmux.screen().rstrip().endswith("$"))


def test_the_person_types_into_a_terminal_of_that_size(trail: Path) -> None:
    with person("--audit", str(trail)) as me:
        termios.tcsetwinsize(me.master, (24, 80))
        me.process.send_signal(signal.SIGWINCH)
        me.until(ENDING)
        me.type(b"\x1b[B\x1b[A\x1b[5~\x1b[99~\xff\xe2")  # moves, an unknown key, no UTF-8
        me.type(b" q")
        assert me.end() == 0
