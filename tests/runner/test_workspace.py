"""Files of a cell seen from outside: what a guest may have put there, each kind refused or bounded."""

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox, WorkspaceError
from cellwright.results import Artifact, WorkspaceFile
from cellwright.runner.cells import workspace as ws
from cellwright.runner.cells.workspace import (
    Uncollected,
    changed,
    collect,
    collecting_budget,
    list_files,
    read_file,
)
from cellwright.runner.concurrency import NEVER
from cellwright.runner.requests.execution import is_empty
from tests.conftest import policy_named, with_limits
from tests.forked import exit_code_of

CANARY = b"host secret"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A workspace, and beside it what must never be reached."""
    (tmp_path / "secret").write_bytes(CANARY)
    (tmp_path / "w").mkdir()
    descriptor = os.open(tmp_path / "w", os.O_RDONLY | os.O_DIRECTORY)
    yield tmp_path / "w", descriptor
    os.close(descriptor)


def test_regular_files_are_listed_by_path_with_size(place: tuple[Path, int]) -> None:
    path, descriptor = place
    (path / "a").write_text("12")
    (path / "d/e").mkdir(parents=True)
    (path / "d/e/ü b").write_text("345")
    assert {name: seen.size_bytes for name, seen in list_files(descriptor).items()} == {
        "a": 2, "d/e/ü b": 3,
    }  # fmt: skip
    assert read_file(descriptor, "d/e/ü b", 10) == b"345"


def test_what_is_no_regular_file_is_not_listed_and_not_opened(place: tuple[Path, int]) -> None:
    path, descriptor = place
    (path / "link").symlink_to(path.parent / "secret")
    (path / "up").symlink_to("..")
    (path / "loop").symlink_to("loop")
    (path / "magic").symlink_to("/proc/self/root")
    (path / "inside").symlink_to("plain")
    (path / "plain").write_text("x")
    os.mkfifo(path / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path / "socket"))
    if os.geteuid() == 0:  # nobody else may make one
        os.mknod(path / "device", 0o20666, os.makedev(1, 5))  # /dev/zero
    assert list(list_files(descriptor)) == ["plain"]
    for name in (
        "link",
        "up/secret",
        "loop",
        "magic/etc/shadow",
        "inside",
        "fifo",
        "socket",
        "device",
        ".",
    ):
        with pytest.raises(WorkspaceError, match="cannot read"):
            read_file(descriptor, name, 100)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "", "a/../../secret", "nul\0", "\ud800", "none", "x" * 5000],
)
def test_names_lead_nowhere_else(place: tuple[Path, int], name: str) -> None:
    with pytest.raises(WorkspaceError, match="cannot read"):
        read_file(place[1], name, 100)


@pytest.mark.needs("root")
def test_other_mounts_are_not_entered(place: tuple[Path, int]) -> None:
    from cellwright.runner.kernel import mounts
    from cellwright.runner.kernel import process_calls as processes
    from cellwright.runner.kernel.steps import Now

    path, _ = place
    (path / "m").mkdir()

    def look() -> int:
        processes.unshare(processes.CLONE_NEWNS)
        mounts.make_private()
        mounts.put(Now(), mounts.new(Now(), "tmpfs", 0, size="1M"), str(path / "m"))
        (path / "m/f").write_text("x")
        inside = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        return 0 if list(list_files(inside)) == [] else 1

    assert exit_code_of(look) == 0


def test_a_name_that_is_no_text_is_left_out(place: tuple[Path, int]) -> None:
    path, descriptor = place
    os.close(os.open(os.fsencode(path) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    os.mkdir(os.fsencode(path) + b"/\xfe")
    (path / "line\nbreak").write_text("x")
    assert list(list_files(descriptor)) == ["line\nbreak"]


def test_entries_and_depth_are_bounded(
    place: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, descriptor = place
    for number in range(30):
        (path / str(number)).touch()
    deep = path.joinpath(*["d"] * (ws.MOST_LEVELS + 2))
    deep.mkdir(parents=True)
    (deep / "f").touch()
    assert len(list_files(descriptor)) == 30
    monkeypatch.setattr(ws, "_ENTRIES", 10)
    assert len(list_files(descriptor)) <= 10
    monkeypatch.setattr(ws, "_SECONDS", -1.0)
    assert list_files(descriptor) == {}


def test_paths_together_are_bounded(place: tuple[Path, int]) -> None:
    """Sixteen thousand files at the end of a long path are 70 MB of paths, kept for each session."""
    path, descriptor = place
    deep = path.joinpath(*["d" * 200] * 15)
    os.makedirs(deep)
    for number in range(2000):
        (deep / f"{number}").touch()
    listing = list_files(descriptor)
    assert 0 < sum(map(len, listing)) <= 4 * 1024 * 1024


def test_a_name_does_not_tell_its_type(place: tuple[Path, int]) -> None:
    """mimetypes takes a name for a URL, and a data: URL says what it is, in words of the guest."""
    path, descriptor = place
    (path / "data:text").mkdir()
    (path / "data:text/html\r\nX: y,").write_text("x")
    (path / "http:a.png").write_text("x")
    found, _ = collect(descriptor, list_files(descriptor), ["*"], 100, collecting_budget(NEVER))
    assert [each.mime for each in found] == ["application/octet-stream", "image/png"]


def test_a_sparse_file_counts_as_it_says(place: tuple[Path, int]) -> None:
    path, descriptor = place
    with (path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WorkspaceError, match="larger than 1000 bytes"):
        read_file(descriptor, "sparse", 1000)
    (told,) = changed(descriptor, {}, list_files(descriptor))
    assert told == WorkspaceFile("sparse", 1 << 40, "")
    found, left_out = collect(
        descriptor, list_files(descriptor), ["*"], 1 << 20, collecting_budget(NEVER)
    )
    assert (found, [each.path for each in left_out]) == ((), ["sparse"])


def test_what_changed_is_told_with_its_hash(place: tuple[Path, int]) -> None:
    path, descriptor = place
    (path / "stays").write_text("1")
    (path / "grows").write_text("1")
    before = list_files(descriptor)
    (path / "grows").write_text("12")
    (path / "new").write_text("3")
    assert changed(descriptor, before, list_files(descriptor)) == (
        WorkspaceFile("grows", 2, hashlib.sha256(b"12").hexdigest()),
        WorkspaceFile("new", 1, hashlib.sha256(b"3").hexdigest()),
    )


def test_a_file_that_became_a_link_is_not_followed(place: tuple[Path, int]) -> None:
    """Between the look and the opening a guest may do anything."""
    path, descriptor = place
    (path / "f").write_bytes(b"x" * len(CANARY))
    listing = list_files(descriptor)
    (path / "f").unlink()
    (path / "f").symlink_to(path.parent / "secret")
    assert changed(descriptor, {}, listing)[0].sha256 == ""
    found, (left_out,) = collect(descriptor, listing, ["*"], 100, collecting_budget(NEVER))
    assert found == ()
    assert (left_out.path, left_out.size_bytes) == ("f", len(CANARY))
    assert left_out.why.startswith("cannot read 'f': ")


def test_collecting_stays_within_its_bytes(place: tuple[Path, int]) -> None:
    path, descriptor = place
    for name, size in (("a.txt", 6), ("b.txt", 6), ("c.txt", 3), ("d.bin", 1)):
        (path / name).write_bytes(b"x" * size)
    (path / "e").mkdir()
    (path / "e/f.png").write_bytes(b"p")
    found, left_out = collect(
        descriptor, list_files(descriptor), ["*.txt", "e/*"], 10, collecting_budget(NEVER)
    )
    assert found == (
        Artifact("a.txt", "text/plain", b"x" * 6),
        Artifact("c.txt", "text/plain", b"x" * 3),
        Artifact("e/f.png", "image/png", b"p"),
    )
    assert left_out == (
        Uncollected("b.txt", 6, "limits.artifact_bytes is 10, of which 4 are left"),
    )


def test_what_is_not_collected_is_told_within_bounds(place: tuple[Path, int]) -> None:
    path, descriptor = place
    for number in range(120):
        (path / f"{number:03}").write_bytes(b"xx")
    found, left_out = collect(
        descriptor, list_files(descriptor), ["*"], 1, collecting_budget(NEVER)
    )
    assert (found, len(left_out)) == ((), 101)
    assert [left_out[0].path, left_out[99].path] == ["000", "099"]
    assert left_out[-1] == Uncollected("", 40, "20 more")


def test_a_result_says_what_was_not_collected() -> None:
    policy = with_limits(policy_named("strict"), artifact_bytes=100)
    code = "import os\nopen('a', 'w').write('x' * 101)\nopen('b', 'w').write('x')\nopen(os.fsencode('c') + b'\\xff', 'w')"
    with Sandbox(policy=policy, pool=0) as sandbox:
        result = sandbox.execute(code, collect=["*"])
        assert [each.name for each in result.artifacts] == ["b"]
        assert [(each.path, each.size_bytes) for each in result.uncollected] == [
            ("a", 101),
            ("", 0),
        ]
        assert result.uncollected[1].why == "a name that is not UTF-8"
        assert result.to_dict()["uncollected"][0]["path"] == "a"
        with sandbox.session() as session:
            assert session.execute(code, collect=["a"]).uncollected[0].path == "a"
        assert sandbox.execute(code).uncollected == ()


def test_links_and_special_files_that_match_are_told(strict: Sandbox) -> None:
    code = (
        "import os\nopen('a.csv', 'w').write('1')\nos.symlink('a.csv', 'b.csv')\n"
        "os.mkfifo('c.csv')\nos.symlink('a.csv', 'other')\nos.mkdir('d.csv')"
    )
    result = strict.execute(code, collect=["*.csv"])
    assert [each.name for each in result.artifacts] == ["a.csv"]
    why = "it is a link or a special file"
    assert result.uncollected == tuple(Uncollected(name, 0, why) for name in ("b.csv", "c.csv"))


def test_emptiness_is_seen_without_a_look() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox, sandbox.session() as session:
        session.execute("1")
        workspace = session.cell._held.cell.workspace
        assert is_empty(workspace)
        for code in ("open('f', 'w').close()", "import os\nos.mkdir('d')", "os.symlink('x', 'l')"):
            session.execute(code)
            assert not is_empty(workspace), code
            session.execute(
                "import os, shutil\nfor n in os.listdir('.'): os.path.isdir(n) and os.rmdir(n) or os.path.lexists(n) and os.remove(n)"
            )
            assert is_empty(workspace), code


# Through the sandbox


def test_a_result_tells_what_was_made_and_not_what_was_given(strict: Sandbox) -> None:
    result = strict.execute(
        "open('made', 'w').write('abc')\nopen('given-and-changed', 'a').write('!')",
        files={"given": b"x", "given-and-changed": b"y"},
    )
    assert [(each.path, each.size_bytes) for each in result.files] == [
        ("given-and-changed", 2), ("made", 3),
    ]  # fmt: skip
    assert result.files[1].sha256 == hashlib.sha256(b"abc").hexdigest()
    assert strict.execute("1").files == ()


def test_named_files_come_back(strict: Sandbox) -> None:
    code = "import os\nos.mkdir('out')\nopen('out/a.csv', 'w').write('1,2')\nopen('b.txt', 'w').write('no')"
    result = strict.execute(code, collect=["*.csv"])
    assert result.artifacts == (Artifact("out/a.csv", "text/csv", b"1,2"),)
    assert result.to_dict()["artifacts"] == (
        {"name": "out/a.csv", "mime": "text/csv", "data": "MSwy"},
    )


def test_a_hostile_workspace_gives_nothing_of_the_host(strict: Sandbox) -> None:
    hostile = """
import os
os.symlink('/etc/passwd', 'a.txt'); os.symlink('../../../../etc', 'd'); os.symlink('/proc/self/environ', 'b.txt')
os.mkfifo('c.txt'); os.symlink('e.txt', 'e.txt')
with open('f.txt', 'wb') as file: file.truncate(1 << 25)
os.link('f.txt', 'g.txt')
for n in range(200): open(f"h{n}", "w").close()
"""
    result = strict.execute(hostile, collect=["*.txt", "d/*"])
    assert result.ok
    assert {each.name for each in result.artifacts} <= {"f.txt", "g.txt"}
    assert sum(len(each.data) for each in result.artifacts) <= 16 * 1024 * 1024
    assert all(set(each.data) <= {0} for each in result.artifacts)


def test_files_of_a_session_are_told_call_by_call(strict: Sandbox) -> None:
    with strict.session() as session:
        session.upload("in/data.csv", "1,2\n")
        assert session.execute("open('in/data.csv').read()").value == "1,2\n"
        first = session.execute("open('out', 'w').write('x')")
        assert [each.path for each in first.files] == ["out"]
        assert session.execute("1").files == ()
        assert [each.path for each in session.files()] == ["in/data.csv", "out"]
        assert session.download("out") == b"x"
        with pytest.raises(WorkspaceError, match="No such file"):
            session.download("nothing")
        with pytest.raises(WorkspaceError, match="cannot write"):
            session.upload("out/below", b"x")


def test_an_unreadable_file_does_not_fail_the_call(strict: Sandbox) -> None:
    result = strict.execute("import os\nopen('f', 'w').write('x')\nos.chmod('f', 0)", collect=["*"])
    assert result.ok
    assert [each.path for each in result.files] == ["f"]
