"""Attacks on the host through /workspace, also while the host reads it: names, kinds, sizes, races.

Every way of reading it is tried: `files`, `download`, `snapshot`, `collect`, `result.files`.
"""

import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from cellwright import PolicyError, Sandbox, SandboxResult, Session, WorkspaceError
from tests.conftest import policy_named
from tests.escapes.without import sandbox_with_plan

CANARY = "secret of the host"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(CANARY)
    return tmp_path / "secret"


def workspace_of(session: Session) -> int:
    return session.cell._held.cell.workspace


def read_as_anybody(session: Session, name: str) -> bytes:
    """Read as a collector does that takes no care: what it then gets is why ours takes it."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=workspace_of(session))
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return [member.name for member in opened]


def told_by(session: Session, result: SandboxResult) -> list[set[str]]:
    """Return the names of files, by each way in which the host tells them."""
    return [
        {file.path for file in session.files()},
        {file.path for file in result.files},
        {artifact.name for artifact in result.artifacts},
        set(names_in(session.snapshot())),
    ]


# Names

NAMES = [
    "new\nline", "carriage\rreturn", "\x1b[2J\x1b]0;title\x07", "tab\t", "\x7f", "\x01", " ", "trailing ", ".hidden", "...",
    "-rf", "--config=x", "@file", "~", "~root", "$(id)", "`id`", "a;b", "a|b", "*", "?", "[a]", "!x", "#x", "%s%n",
    "{0.__class__}", "..\\x", "C:\\x", "con", "data:text", "http:x", "a'b", 'a"b', "<b>", "&amp;", "\u202eexe.txt",
    "\u200b", "\uff0e\uff0e", "e\u0301", "\u00e9", "\u0130", "\U0001f4a9", "\u2028", "x" * 255, "\u00fc" * 127, ".tar", "PaxHeader",
]  # fmt: skip


def test_every_name_is_data(session: Session, sandbox: Sandbox) -> None:
    code = "for n in names:\n    with open(n, 'w', newline='') as file: file.write(n)"
    result = session.execute(code, inputs={"names": NAMES}, collect=["*"])
    assert told_by(session, result) == [set(NAMES)] * 4
    for name in NAMES:
        assert session.download(name) == name.encode()
    assert json.loads(json.dumps(result.to_dict()))["files"]
    with sandbox.session() as other:
        other.restore(session.snapshot())
        assert {file.path for file in other.files()} == set(NAMES)
        assert other.execute(
            "all(open(n, newline='').read() == n for n in names)", inputs={"names": NAMES}
        ).value


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_given_under_any_plain_name(session: Session, name: str) -> None:
    session.upload(name, "given")
    assert session.execute("import os\nos.listdir('.')").value == [name]
    assert session.download(name) == b"given"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "/etc/x", "a//b", "./a", "a/.", "a/", "nul\0", "\ud800",
     "x" * 256, "\u00fc" * 128, "/".join(["d"] * 600)],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(session: Session, name: str) -> None:
    for attempt in (lambda: session.upload(name, "x"), lambda: session.download(name)):
        with pytest.raises((PolicyError, WorkspaceError)):
            attempt()
    assert session.execute("1").ok


def test_names_that_are_no_text_are_left_out(session: Session) -> None:
    code = r"""
import os
for name in (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"ok\xe9"):
    os.mkdir(b"d" + name)
    for path in (name, b"d" + name + b"/inside"): os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
open("text", "w").close()
len(os.listdir("."))
"""
    result = session.execute(code, collect=["*"])
    assert result.value == 11
    assert told_by(session, result) == [{"text"}] * 4


def test_paths_as_deep_as_a_guest_can_make_them(session: Session) -> None:
    """Deeper than 32 is not looked at; longer than a path may be (path_resolution(7)) neither."""
    code = """
import os
for name, times in (("d", 2000), ("e" * 255, 40)):
    os.chdir("/workspace")
    for depth in range(times):
        try: os.mkdir(name); os.chdir(name); open("f", "w").close()
        except OSError: break
os.chdir("/workspace")
depth
"""
    result = session.execute(code, collect=["*"])
    assert result.value == 39
    told = told_by(session, result)
    assert {"d/f", "/".join(["d"] * 32) + "/f"} <= told[0]
    assert told == [told[0]] * 4
    assert max(path.count("/") for path in told[0]) == 32
    assert 3500 < max(map(len, told[0])) < 4096


# Kinds


def test_links_lead_the_host_nowhere(session: Session, secret: Path) -> None:
    code = """
import os
os.symlink(secret, "file"); os.symlink(os.path.dirname(secret), "directory"); os.symlink("../" * 20 + secret, "up")
os.symlink("/proc/self/root" + secret, "magic"); os.symlink("loop", "loop"); os.symlink("nowhere", "dangling")
os.symlink("/dev/zero", "endless"); os.mkdir("d"); os.symlink("..", "d/back"); open("d/plain", "w").write("x")
os.symlink("d", "inside")
"""
    result = session.execute(code, inputs={"secret": str(secret)}, collect=["*", "*/*"])
    assert result.ok
    for name in ("file", "directory/secret", "magic"):
        assert read_as_anybody(session, name) == CANARY.encode()  # so a link does lead there
    names = ("file", "directory", "directory/secret", "up", "magic", "loop", "dangling", "endless", "d/back", "inside/plain")  # fmt: skip
    for name in names:
        with pytest.raises(WorkspaceError, match="cannot read"):
            session.download(name)
    assert told_by(session, result) == [{"d/plain"}] * 4


def test_what_is_no_regular_file_is_never_opened(session: Session) -> None:
    code = "import os\nos.mkfifo('fifo')\nos.mkdir('d')\nos.mkfifo('d/fifo')\nopen('plain', 'w').close()"
    result = session.execute(code, collect=["*"])
    assert stat.S_ISFIFO(os.stat("fifo", dir_fd=workspace_of(session)).st_mode)
    for name in ("fifo", "d/fifo", "d"):
        with pytest.raises(WorkspaceError, match="not a regular file"):
            session.download(name)
    assert told_by(session, result) == [{"plain"}] * 4


@pytest.mark.parametrize("exponent", [40, 50, 62])
def test_sparse_files_are_bounded(exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest's file may be no larger than the workspace (RLIMIT_FSIZE); here that limit is gone."""
    unlimited = sandbox_with_plan(monkeypatch, policy_named("strict"), rlimits=())
    with unlimited as sandbox, sandbox.session() as session:
        make = f"with open('f', 'wb') as file: file.truncate((1 << {exponent}) - 4096)\nopen('g', 'w').close()"
        result = session.execute(make, collect=["*"])
        assert [file.size_bytes for file in result.files] == [(1 << exponent) - 4096, 0]
        assert [each.name for each in result.artifacts] == ["g"]
        assert result.files[0].sha256 == ""
        with pytest.raises(WorkspaceError, match="is larger than"):
            session.download("f")
        with pytest.raises(WorkspaceError, match="claim more than"):
            session.snapshot()


def test_modes_and_times_are_none_of_the_hosts(session: Session, sandbox: Sandbox) -> None:
    code = """
import os
for name, mode in (("none", 0), ("set", 0o6777), ("d", 0)):
    os.mkdir(name) if name == "d" else open(name, "w").write(name)
    os.chmod(name, mode)
for when in (-(2 ** 31), 2 ** 40):
    open(f"t{when}", "w").close(); os.utime(f"t{when}", (when, when))
"""
    assert session.execute(code).ok
    with tarfile.open(fileobj=io.BytesIO(session.snapshot())) as kept:
        assert {(member.mode & 0o7000, member.mtime, member.uid) for member in kept} == {(0, 0, 0)}
    with sandbox.session() as other:
        other.restore(session.snapshot())
        assert other.execute("import os\nos.stat('set').st_mode & 0o7000").value == 0


# While the host looks

CHANGES = """
import os, threading
os.makedirs("d/e"); open("d/e/x", "w").write("inside"); open("plain", "w").write("inside")

def swap():
    ways = (lambda: open("f", "w").write("inside"), lambda: os.symlink(secret, "f"), lambda: os.mkfifo("f"),
            lambda: os.mkdir("f"), lambda: os.link("plain", "f"))
    while True:
        for make in ways:
            make()
            os.rmdir("f") if make is ways[3] else os.unlink("f")

def rename():
    while True:
        os.rename("d", "z"); os.symlink(os.path.dirname(secret), "d"); os.unlink("d"); os.rename("z", "d")

def grow():
    with open("g", "wb", buffering=0) as file:
        while True:
            for _ in range(100): file.write(b"inside" * 1000)
            file.truncate(0); file.seek(0)

for each in (swap, rename, grow): threading.Thread(target=each, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.needs("real_cpu")
def test_nothing_that_changes_while_the_host_looks_leads_it_astray(
    session: Session, secret: Path
) -> None:
    run = session.start(f"{CHANGES}\nprint('up', flush=True)\nstop = threading.Event()\nstop.wait()", inputs={"secret": str(secret)})  # fmt: skip
    next(run.output())
    read, refused, astray = set(), set(), False
    kinds = {" Too many levels of symbolic links", " it is not a regular file"}
    for rounds in range(100_000):
        for name in ("f", "d/e/x", "d/secret", "g"):
            try:
                read.add(session.download(name))
            except WorkspaceError as error:
                refused.add(str(error).rpartition(":")[2])
        for name in ("f", "d/secret"):
            astray = astray or _leads_astray(session, name)
        if rounds >= 50 and astray and kinds <= refused:
            break
    assert astray, "a collector that takes no care has been led to the host's file"
    assert all(content.replace(b"inside", b"").strip(b"insde") == b"" for content in read)
    assert kinds <= refused
    session.files()
    assert CANARY.encode() not in session.snapshot()
    run.cancel()
    run.result()
    result = session.execute("1", collect=["*"])
    assert result.ok
    assert CANARY not in str(result.to_dict())


def _leads_astray(session: Session, name: str) -> bool:
    try:
        return read_as_anybody(session, name) == CANARY.encode()
    except OSError:
        return False
