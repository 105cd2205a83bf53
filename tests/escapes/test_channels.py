"""Named pipes and Unix sockets of the host in shown paths: what a program does to them, it does to the
process behind them, and a read-only mount stops none of it."""

import contextlib
import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from cellwright import FilePermission, PermissionSet, PolicyError, Sandbox
from cellwright.harness.cli.running.learn import learn
from cellwright.harness.sandbox.faces.permissions import policy_of
from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import SOCKETS_ABI, Host
from cellwright.policies.compiling.syscalls import UNIX_SOCKETS
from cellwright.policies.policy import Filesystem, Policy, Processes, Python, Syscalls
from cellwright.runner.kernel import landlock
from cellwright.runner.kernel.steps import Steps
from cellwright.runner.launcher import views
from tests.conftest import policy_named
from tests.escapes.without import errno_of, sandbox_with_plan
from tests.runner.test_ordinary_user import as_user, readable

__all__ = ["readable"]  # a fixture

MESSAGE = b"of the host"
NAMES_SOCKETS = Syscalls(groups=(UNIX_SOCKETS,))
# Tries all of it, on every kind of file of each place; the value is place -> attempt -> errno, 0 if it succeeds.
ATTEMPTS = """
import os, socket
def attempt(run):
    try: run()
    except OSError as error: return error.errno
    return 0
def opened(path, flags): os.close(os.open(path, flags | os.O_NONBLOCK))
def sent(path): socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"guest", path)
def connected(path): socket.socket(socket.AF_UNIX).connect(path)
def every(place):
    at = lambda name: f"{place}/{name}"
    tries = {
        "write a file": lambda: opened(at("plain"), os.O_WRONLY),
        "truncate a file": lambda: os.truncate(at("plain"), 0),
        "write through a link": lambda: opened(at("link"), os.O_WRONLY),
        "change a mode": lambda: os.chmod(at("plain"), 0o777),
        "make a file": lambda: opened(at("new"), os.O_WRONLY | os.O_CREAT),
        "make a directory": lambda: os.mkdir(at("folder/new")),
        "make a pipe": lambda: os.mkfifo(at("folder/pipe2")),
        "make a link": lambda: os.symlink("plain", at("link2")),
        "make a hard link": lambda: os.link(at("pipe"), "/workspace/pipe"),
        "rename a pipe": lambda: os.rename(at("pipe"), at("pipe2")),
        "remove a pipe": lambda: os.unlink(at("pipe")),
        "write a pipe": lambda: opened(at("pipe"), os.O_WRONLY),
        "write a pipe through a link": lambda: opened(at("to_pipe"), os.O_WRONLY),
        "write a deep pipe": lambda: opened(at("folder/deep/pipe"), os.O_RDWR),
        "read a pipe": lambda: opened(at("pipe"), os.O_RDONLY),
        "open a pipe again": lambda: opened(f"/proc/self/fd/{os.open(at('pipe'), os.O_PATH)}", os.O_RDWR),
        "open a device": lambda: opened(at("device"), os.O_RDWR),
        "send to a socket": lambda: sent(at("dgram")),
        "connect to a socket": lambda: connected(at("stream")),
        "connect through a link": lambda: connected(at("to_stream")),
    }
    return {name: attempt(run) for name, run in tries.items()}
"""
OF_PIPES = ["write a pipe", "write a pipe through a link", "write a deep pipe", "open a pipe again"]
OF_SOCKETS = ["send to a socket", "connect to a socket", "connect through a link"]


class Places(NamedTuple):
    """Directories that hold one of each kind of file; a process of the host is behind the pipes and
    sockets."""

    below_tmp: Path
    within_write: Path
    elsewhere: Path
    executable: Path
    writable: Path
    sockets: list[socket.socket]

    @property
    def read_only(self) -> tuple[Path, ...]:
        return self[:4]

    def policy(self, hidden: tuple[str, ...] = (), **changes: Any) -> Policy:
        standard = policy_named("standard")
        execute = (*standard.processes.execute, str(self.executable))
        return replace(
            standard,
            filesystem=Filesystem(
                read=tuple(map(str, self[:3])),
                write=(str(self.writable), str(self.within_write.parent)),
                hidden=hidden,
            ),
            processes=replace(standard.processes, execute=execute),
            **changes,
        )

    def heard(self) -> int:
        """Count the connections and messages that came to the sockets."""
        count = 0
        for sock in self.sockets:
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.accept()[0].close() if sock.type == socket.SOCK_STREAM else sock.recv(100)
                    count += 1
        return count


@pytest.fixture
def places() -> Iterator[Places]:
    with contextlib.ExitStack() as stack:
        temporary, other = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=above, prefix="channels-")))
            for above in ("/tmp", "/var/tmp")
        )
        other.chmod(0o755)
        found = Places(
            temporary, other / "parent" / "inner", other / "elsewhere", other / "executable",
            other / "writable", [],
        )  # fmt: skip
        for place in found[:5]:
            fill(place, found.sockets, stack)
        found.within_write.parent.chmod(0o777)
        yield found


def fill(place: Path, sockets: list[socket.socket], stack: contextlib.ExitStack) -> None:
    """Put one of each kind of file into `place`; every user may do everything with it."""
    (place / "folder" / "deep").mkdir(parents=True)
    (place / "plain").write_text("plain")
    for name, target in (("link", "plain"), ("to_pipe", "pipe"), ("to_stream", "stream")):
        (place / name).symlink_to(target)
    for pipe in (place / "pipe", place / "folder" / "deep" / "pipe"):
        os.mkfifo(pipe)
        held = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so that a writer finds a reader
        stack.callback(os.close, held)
        os.write(held, MESSAGE)
    if os.geteuid() == 0:
        os.mknod(place / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    for name, kind in (("stream", socket.SOCK_STREAM), ("dgram", socket.SOCK_DGRAM)):
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        sock.bind(str(place / name))
        sock.setblocking(False)
        sockets.append(sock)
        if kind == socket.SOCK_STREAM:
            sock.listen()
    for path in (place, *place.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777)


def attempts(sandbox: Sandbox, paths: tuple[Path, ...]) -> dict[str, dict[str, int]]:
    result = sandbox.execute(
        f"{ATTEMPTS}\n{{place: every(place) for place in {[*map(str, paths)]}}}"
    )
    assert result.ok, result.error
    value: dict[str, dict[str, int]] = result.value
    return value


def unread(place: Path) -> bytes:
    descriptor = os.open(place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("without", [{}, {"landlock_abi": 0}], ids=["all", "without Landlock"])
def test_a_path_that_is_only_read_is_read_only_for_every_kind_of_file(
    places: Places, without: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sandbox_with_plan(monkeypatch, places.policy(), **without) as sandbox:
        tried = attempts(sandbox, places.read_only)
    succeeded = {
        place: [name for name, number in each.items() if not number]
        for place, each in tried.items()
    }
    assert not any(succeeded.values()), succeeded
    for place in tried.values():
        assert {place[name] for name in ("write a file", "make a file", "rename a pipe")} == {
            errno.EROFS
        }
        assert {place[name] for name in (*OF_PIPES, "read a pipe")} == {errno.EACCES}
    assert not places.heard()
    assert {unread(place) for place in places.read_only} == {MESSAGE}


def test_pipes_beside_a_hidden_name_are_not_there(places: Places) -> None:
    """Such a directory is shown entry by entry, and looks like one of plain files."""
    hidden = tuple(f"{place}/plain" for place in places.read_only)
    with Sandbox(policy=places.policy(hidden), pool=0) as sandbox:
        tried = attempts(sandbox, places.read_only)
    for place in tried.values():
        assert {place[name] for name in OF_PIPES} == {errno.ENOENT, errno.EACCES}
    assert {unread(place) for place in places.read_only} == {MESSAGE}


def test_a_writable_directory_gives_its_pipes_and_not_its_sockets(places: Places) -> None:
    """So the attempts above would succeed if nothing stopped them."""
    pipes = f"[os.close(os.open('{places.writable}/pipe', f | os.O_NONBLOCK)) for f in range(3)]"
    with Sandbox(policy=places.policy(), pool=0) as sandbox:
        assert sandbox.execute(f"import os\n{pipes}").value == [None] * 3
        (tried,) = attempts(sandbox, (places.writable,)).values()
    assert {tried[name] for name in OF_SOCKETS} <= {errno.EPERM, errno.EACCES}
    assert not places.heard()


def test_the_attempts_on_sockets_succeed_where_the_policy_names_them(places: Places) -> None:
    with Sandbox(policy=places.policy(syscalls=NAMES_SOCKETS), pool=0) as sandbox:
        tried = attempts(sandbox, places.read_only)
    assert {each[name] for each in tried.values() for name in OF_SOCKETS} == {0}
    assert places.heard() == len(OF_SOCKETS) * len(places.read_only)


@pytest.mark.skipif(landlock.abi() >= SOCKETS_ABI, reason="the kernel judges sockets by their path")
def test_a_refused_unix_socket_says_what_the_policy_must_name(places: Places) -> None:
    with Sandbox(policy=places.policy(), pool=0) as sandbox:
        result = sandbox.execute(errno_of("socket.socket(socket.AF_UNIX)", "import socket"))
        assert result.value == errno.EPERM
        (refused,) = result.violations
        assert refused.rule == f'seccomp: needs syscalls.groups = ["{UNIX_SOCKETS}"]'
        pair = "import socket\na, b = socket.socketpair()\na.send(b'x')\nb.recv(1).decode()"
        assert sandbox.execute(pair).value == "x"


OWN = """
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind("/tmp/own"); server.listen()
client = socket.socket(socket.AF_UNIX); client.connect("/tmp/own"); client.send(b"own")
server.accept()[0].recv(3).decode()
"""


@pytest.mark.parametrize("what", ["nothing", "the system", "a file"])
def test_unix_sockets_work_where_no_directory_of_others_is_shown(places: Places, what: str) -> None:
    shown = {
        "nothing": (),
        "the system": ("/usr/share",),
        "a file": (str(places.elsewhere / "plain"),),
    }
    files = Filesystem(read=shown[what])
    with Sandbox(policy=policy_named("standard", filesystem=files), pool=0) as sandbox:
        assert sandbox.execute(OWN).value == "own"


@pytest.mark.parametrize("name", ["pipe", "stream"])
def test_a_pipe_or_socket_itself_is_shown_only_for_writing(places: Places, name: str) -> None:
    path = str(places.elsewhere / name)
    for files in (Filesystem(read=(path,)), Filesystem(read=("/usr/share", path))):
        with pytest.raises(PolicyError, match=r"filesystem\.read: .* is a named pipe or a socket"):
            Sandbox(policy=policy_named("standard", filesystem=files), pool=0)
    policy = policy_named("standard", filesystem=Filesystem(write=(path,)), syscalls=NAMES_SOCKETS)
    code = f"import os, socket\n{'os.open' if name == 'pipe' else 'socket.socket(socket.AF_UNIX).connect'}"
    code += f"({path!r}{', os.O_WRONLY | os.O_NONBLOCK' if name == 'pipe' else ''}) and 0"
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(code).ok


def test_a_wildcard_chooses_no_pipe_and_no_socket(places: Places) -> None:
    permissions = PermissionSet([FilePermission(allowed_paths=[f"{places.elsewhere}/*"])])
    names = {os.path.basename(path) for path in policy_of(permissions).filesystem.read}
    assert {"plain", "folder"} <= names
    assert not names & {"pipe", "stream", "dgram", "to_pipe", "to_stream"}


@pytest.mark.skipif(landlock.abi() >= SOCKETS_ABI, reason="the kernel judges sockets by their path")
def test_an_observed_program_reaches_no_socket_and_the_learned_policy_says_so(
    places: Places,
) -> None:
    program = places.below_tmp / "program.py"
    program.write_text(
        f"import socket\ntry: socket.socket(socket.AF_UNIX).connect({str(places.below_tmp / 'stream')!r})\n"
        "except OSError as error: print(error.errno)"
    )
    program.chmod(0o644)
    text, result = learn(program, policy_named("strict"))
    assert result.stdout == f"{errno.EPERM}\n"
    assert "# Unix sockets were refused during this run" in text
    assert "subprocesses = true  # socket" in text
    assert not places.heard()


AS_USER = """
from pathlib import Path
from cellwright.policies.policy import Filesystem
import msgspec, socket, tempfile
place = tempfile.mkdtemp(dir=os.environ["HOME"])
os.mkfifo(f"{place}/pipe", 0o600)
sock = socket.socket(socket.AF_UNIX); sock.bind(f"{place}/stream"); sock.listen()
reader = os.open(f"{place}/pipe", os.O_RDWR | os.O_NONBLOCK)
policy = msgspec.structs.replace(load_policy("standard"), optional_layers=tuple(LOST),
    filesystem=Filesystem(read=(place,), write=(os.environ["HOME"],)))
code = CODE + f"\\n[every({place!r})[name] for name in ('write a pipe', 'read a pipe', 'connect to a socket')]"
with Sandbox(policy=policy, pool=0) as sandbox:
    tell(value=sandbox.execute(code).value)
"""


@pytest.mark.needs("root")
def test_an_ordinary_users_own_pipes_and_sockets_are_refused_too(readable: Path) -> None:
    """There the cell has the user's own id, to which the modes allow everything."""
    told = as_user(readable, f"CODE = {ATTEMPTS!r}\n{AS_USER}")
    assert told["value"][:2] == [errno.EACCES, errno.EACCES]
    assert told["value"][2] in (errno.EPERM, errno.EACCES)


def plan(abi: int, shows_sockets: bool, **changes: Any) -> Any:
    host = Host(landlock_abi=abi, cgroups={"memory": "", "cpu": "", "pids": ""})
    policy = Policy(processes=Processes(subprocesses=True), **changes)
    return compile_policy(policy, host, shows_sockets=shows_sockets)


def test_a_kernel_that_judges_sockets_lets_programs_make_them() -> None:
    assert UNIX_SOCKETS in plan(SOCKETS_ABI, True).groups
    assert UNIX_SOCKETS in plan(SOCKETS_ABI - 1, False).groups
    assert UNIX_SOCKETS not in plan(SOCKETS_ABI - 1, True).groups
    named = plan(SOCKETS_ABI - 1, True, syscalls=NAMES_SOCKETS)
    assert UNIX_SOCKETS in named.groups
    assert named.reaches_sockets
    assert not plan(SOCKETS_ABI, True).reaches_sockets


@pytest.mark.parametrize(
    ("abi", "unhandled", "is_judged"),
    [
        (SOCKETS_ABI - 1, 0, False),
        (SOCKETS_ABI, 0, True),
        (SOCKETS_ABI, landlock.RESOLVE_UNIX, False),
    ],
)
def test_the_ruleset_judges_sockets_from_their_abi_on(
    abi: int, unhandled: int, is_judged: bool
) -> None:
    steps = Steps()
    landlock.restrict(steps, abi, [], False, unhandled)
    laid = steps.layout(1023, 0)
    rights = landlock.handled_filesystem_rights(abi) & ~unhandled
    assert bool(rights & landlock.RESOLVE_UNIX) == is_judged
    assert rights.to_bytes(8, "little") in laid


def test_directories_of_packages_do_not_count(places: Places) -> None:
    python = Python(path=(str(places.elsewhere),))
    policy = replace(policy_named("standard"), python=python)
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(OWN).value == "own"


def test_few_entries_of_a_toolchain_are_looked_at_for_pipes(tmp_path: Path) -> None:
    """A toolchain of 100,000 files would take longer than the launch; the nearest pipes are found."""
    for number in range(30):
        (tmp_path / f"lib{number}").mkdir()
        for each in range(100):
            (tmp_path / f"lib{number}/{each}").touch()
    listed: list[str] = []
    look = views._listed

    def note(root: int, path: str, most: int) -> list[tuple[str, int]]:
        listed.append(path)
        return look(root, path, most)

    root = os.open("/", os.O_PATH)
    try:
        for of_programs in (True, False):
            listed.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(views, "_listed", note)
                views.cover_pipes(root, str(tmp_path), of_programs=of_programs)
            assert (len(listed) < 12) == of_programs
    finally:
        os.close(root)
