"""The terminal of a cell and those of the host: a guest reaches its own and no other."""

import errno
import fcntl
import os
import pty
from typing import Any

import pytest

from cellwright import BusyError, LaunchError, Sandbox, Session
from cellwright.runner.cells import cell_network as terminal_module
from cellwright.runner.cells.cell_network import open_terminal
from tests.conftest import policy_named
from tests.harness.test_terminal import to_the_end

pytestmark = pytest.mark.needs("userns")


@pytest.fixture(scope="module")
def sandbox(workshop: Sandbox) -> Sandbox:
    return workshop


ATTEMPT = """
import ctypes, errno, fcntl, os
def attempt(call):
    try:
        return call() and 0
    except OSError as error:
        return error.errno
requests = {requests!r}
def ask(request):
    return attempt(lambda: fcntl.ioctl(0, request, b"x" * 64))
print({{name: ask(number) for name, number in requests.items()}})
"""
FORBIDDEN = {
    "TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423, "TIOCCONS": 0x541D,
    "TIOCVHANGUP": 0x5437, "TIOCSTI with a high bit": 0x5412 | 1 << 32,
}  # fmt: skip


def test_nothing_types_into_a_terminal_or_changes_its_kind(session: Session) -> None:
    low = {name: number for name, number in FORBIDDEN.items() if number < 1 << 32}
    with session.terminal(["python3", "-c", ATTEMPT.format(requests=low)]) as terminal:
        said = eval(to_the_end(terminal))
    typing = ("TIOCSTI", "TIOCLINUX")
    assert said == {name: errno.EPERM if name in typing else errno.ENOTTY for name in low}
    seen = [each for each in session.execute("1").violations if each.syscall == "ioctl"]
    assert sum(each.count for each in seen) >= len(low)


def test_the_host_can_do_what_the_guest_cannot() -> None:
    """TIOCSETD to the discipline that it has succeeds without the filter."""
    master, own = pty.openpty()
    try:
        fcntl.ioctl(own, FORBIDDEN["TIOCSETD"], bytes(4))
    finally:
        os.close(master)
        os.close(own)


def test_a_high_bit_of_the_request_changes_nothing(session: Session) -> None:
    """The kernel looks at the low half only, as CVE-2019-10063 of Flatpak's filter shows."""
    number = FORBIDDEN["TIOCSTI with a high bit"]
    code = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); byte = ctypes.create_string_buffer(b'x');"
    code += f"print(libc.syscall(16, 0, ctypes.c_ulong({number}), byte), ctypes.get_errno())"
    if os.uname().machine == "aarch64":
        code = code.replace("syscall(16", "syscall(29")
    with session.terminal(["python3", "-c", code]) as terminal:
        assert to_the_end(terminal) == b"-1 1\r\n"


def test_the_terminals_of_the_host_are_not_there(session: Session) -> None:
    master, own = pty.openpty()
    try:
        hosts = os.ttyname(own)
        line = f"ls /dev/pts; [ -e {hosts} ] && echo there; [ -e /dev/ptmx ] && echo ptmx; tty"
        with session.terminal(["sh", "-c", line]) as terminal:
            words = to_the_end(terminal).decode().split()
        own_ones = ["0", "ptmx", "ptmx", "/dev/pts/0"]  # /dev/ptmx makes terminals of the cell
        assert words == own_ones or hosts == "/dev/pts/0"
        assert session.run(f"echo typed >/dev/pts/{os.path.basename(hosts)}", shell=True).exit_code
        os.set_blocking(master, False)
        with pytest.raises(BlockingIOError):
            os.read(master, 10)
    finally:
        os.close(master)
        os.close(own)


def test_the_controlling_terminal_is_the_cells_own_or_none(session: Session) -> None:
    assert session.run("echo x >/dev/tty", shell=True).exit_code != 0  # ENXIO: it has none
    with session.terminal(["sh", "-c", "echo own >/dev/tty"]) as terminal:
        assert to_the_end(terminal) == b"own\r\n"


def test_a_process_of_the_host_that_has_a_terminal_gives_none_to_its_cells() -> None:
    """The launcher is started by a process whose controlling terminal is a pty."""
    pid, master = pty.fork()
    if pid == 0:
        code = 1
        try:
            with Sandbox(policy=policy_named("workshop"), pool=0) as box, box.session() as session:
                refused = session.run("echo x >/dev/tty", shell=True).exit_code != 0
                with session.terminal(["sh", "-c", "echo own >/dev/tty"]) as terminal:
                    code = 0 if refused and to_the_end(terminal) == b"own\r\n" else 2
        finally:
            os._exit(code)
    seen = b""
    try:
        while data := os.read(master, 1000):
            seen += data
    except OSError:
        pass  # EIO: its end
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, seen
    assert b"own" not in seen


def test_a_program_makes_terminals_of_its_own(session: Session) -> None:
    """They lie in the devpts of the cell, which has at most 16."""
    result = session.execute(
        "import os, pty\nmaster, own = pty.openpty()\nos.write(own, b'x')\n"
        "seen = [os.ttyname(own), os.read(master, 10).decode(), os.stat('/dev/ptmx').st_dev]\n"
        "try:\n    more = [os.openpty() for _ in range(20)]\nexcept OSError as error:\n    seen.append(error.errno)\n"
        "[*seen[:2], seen[2] == os.stat('/dev/pts').st_dev, seen[3]]"
    )
    assert result.value == ["/dev/pts/0", "x", True, errno.ENOSPC]


def test_the_host_is_told_that_programs_hold_every_terminal(session: Session) -> None:
    session.execute(
        "import os\nheld = []\ntry:\n  while True: held.append(os.openpty())\nexcept OSError: pass"
    )
    with pytest.raises(BusyError, match="programs of the cell hold every terminal"):
        session.terminal(["cat"])
    session.execute("for pair in held: os.close(pair[0]), os.close(pair[1])")
    session.terminal(["true"]).close()


def test_terminals_of_two_cells_are_apart(workshop: Sandbox) -> None:
    with workshop.session() as one, workshop.session() as other:
        first, second = (
            one.terminal(["cat"]),
            other.terminal(["sh", "-c", "echo x >/dev/pts/0; ls /dev/pts"]),
        )
        with first, second:
            assert to_the_end(second) == b"x\r\n0  ptmx\r\n"
            first.write("y\n")
            assert first.read(timeout=30).startswith(b"y")


@pytest.mark.parametrize("wrong", ["null", "pts/../null"])
def test_what_is_no_master_is_refused(
    wrong: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_module, "_MASTER", f"../dev/{wrong}".encode())
    workspace: Any = session.cell._held.cell.workspace  # type: ignore[attr-defined]
    with pytest.raises(LaunchError, match="another file"):
        open_terminal(workspace)


@pytest.mark.needs("root")
def test_a_master_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_module, "_MASTER", b"ptmx")
    hosts = os.open("/dev/pts", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(LaunchError, match="another file"):
            open_terminal(hosts)
    finally:
        os.close(hosts)
