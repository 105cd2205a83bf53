"""Files and folders of the host that a call names by their paths."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import Filesystem, Policy, PolicyError, Runs, Sandbox, SandboxStatus
from cellwright.harness.sandbox.workspaces import archive
from cellwright.harness.sandbox.workspaces.archive import content_of_paths
from tests.conftest import policy_named
from tests.harness.test_cli import run

LIST = (
    "import os\n"
    "sorted(os.path.join(at, f)[11:] for at, _, files in os.walk('/workspace') for f in files)"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "inner" / "deep").mkdir(parents=True)
    (project / "main.py").write_text("import inner.part")
    (project / "inner" / "part.py").write_text("answer = 42\n")
    (project / "inner" / "deep" / "data.bin").write_bytes(b"\xff\0")
    return project


@pytest.mark.needs("userns")
def test_a_file_and_a_folder_are_copied_to_the_names_that_are_given(
    folder: Path, strict: Sandbox
) -> None:
    files = {"own/copy.py": folder / "main.py", "project": folder, "text.txt": "text"}
    assert strict.execute(LIST, files=files).value == [
        "own/copy.py", "project/inner/deep/data.bin", "project/inner/part.py",
        "project/main.py", "text.txt",
    ]  # fmt: skip


@pytest.mark.needs("userns")
def test_a_folder_called_dot_is_the_workspace_itself(folder: Path, strict: Sandbox) -> None:
    result = strict.execute("import inner.part\ninner.part.answer", files={".": folder})
    assert result.value == 42, result.error


@pytest.mark.needs("userns")
def test_sessions_take_paths_too(folder: Path, strict: Sandbox) -> None:
    with strict.session() as session:
        session.upload("copy.bin", folder / "inner" / "deep" / "data.bin")
        assert session.download("copy.bin") == b"\xff\0"
        session.upload("project", folder)
        assert session.execute(LIST).value == [
            "copy.bin", "project/inner/deep/data.bin", "project/inner/part.py", "project/main.py",
        ]  # fmt: skip


@pytest.mark.needs("userns")
def test_a_durable_run_keeps_the_content_of_its_start(
    folder: Path, strict: Sandbox, tmp_path: Path
) -> None:
    runs = Runs(tmp_path / "runs.db")
    code = "open('main.py').read()"
    attempt = runs.start(strict, code, files={"main.py": folder / "main.py"})
    assert attempt.result.status is SandboxStatus.COMPLETED
    assert attempt.result.value == "import inner.part"


def test_an_executable_stays_one(folder: Path) -> None:
    (folder / "main.py").chmod(0o755)
    content = content_of_paths({"a": folder / "main.py", "b": folder / "inner" / "part.py"})
    assert [type(content[name]).__name__ for name in "ab"] == ["Executable", "bytes"]


def test_a_link_inside_the_folder_is_copied_as_the_file_that_it_leads_to(folder: Path) -> None:
    (folder / "link.py").symlink_to("inner/part.py")
    assert content_of_paths({".": folder})["link.py"] == b"answer = 42\n"


@pytest.mark.parametrize("target", ["/etc/passwd", "..", "inner", "missing", "link"])
def test_a_link_that_leads_elsewhere_is_refused(target: str, folder: Path) -> None:
    (folder / "link").symlink_to(target)
    with pytest.raises(PolicyError, match="link is a link that leads out") as refused:
        content_of_paths({".": folder})
    assert "name of its own" in refused.value.hint


def test_neither_a_pipe_nor_a_device_is_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for given in (folder, folder / "pipe", Path("/dev/null")):
        with pytest.raises(PolicyError, match="neither a file nor a folder"):
            content_of_paths({"x": given})


@pytest.mark.parametrize("name", ["main.py", "inner"])
def test_an_entry_that_becomes_a_link_while_it_is_read_is_not_followed(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program to which the folder is shown as writable can do that at any moment."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "part.py").write_text("secret")
    target = tmp_path / "secret" / ("part.py" if name == "main.py" else "")
    listed = archive._entries

    def replaced(*arguments: Any) -> Iterator[tuple[str, bool]]:
        found = list(listed(*arguments))
        if not (folder / name).is_symlink():
            (folder / name).rename(tmp_path / "before")
            (folder / name).symlink_to(target)
        return iter(found)

    monkeypatch.setattr(archive, "_entries", replaced)
    with pytest.raises(PolicyError, match="a link that leads out|Too many levels of symbolic"):
        content_of_paths({".": folder})
    place = folder / name
    assert (place if name == "main.py" else place / "part.py").read_text() == "secret"


def test_a_special_file_is_not_even_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a device can already do something, and a FIFO would tell its writer of a reader."""
    os.mkfifo(folder / "pipe")
    opened: list[int] = []
    open_it = os.open

    def note(path: str, flags: int) -> int:
        opened.append(flags)
        return open_it(path, flags)

    monkeypatch.setattr(archive.os, "open", note)
    with pytest.raises(PolicyError, match="neither a file nor a folder"):
        content_of_paths({"x": folder / "pipe"})
    assert [flags & os.O_PATH for flags in opened] == [os.O_PATH]
    assert content_of_paths({"x": folder / "main.py"})
    assert [flags & os.O_PATH for flags in opened] == [os.O_PATH, os.O_PATH, 0]


def test_a_file_larger_than_all_may_be_is_refused_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "only").mkdir()
    with (folder / "only" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.delattr(archive, "_read_all")
    for given in (folder / "only" / "sparse", folder / "only"):
        with pytest.raises(PolicyError, match=r"files or .* bytes, at 'x"):
            content_of_paths({"x": given})


def test_a_file_of_proc_has_the_content_that_it_gives() -> None:
    content = content_of_paths({"x": Path("/proc/self/status")})["x"]
    assert isinstance(content, bytes)
    assert content.startswith(b"Name:")


def test_folders_count_and_their_depth_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "/".join(["d"] * 32)).mkdir(parents=True)
    assert len(content_of_paths({"x": folder})) == 3
    (folder / "/".join(["d"] * 33)).mkdir()
    with pytest.raises(PolicyError, match="more than 32 levels of folders"):
        content_of_paths({"x": folder})
    monkeypatch.setattr(archive, "MAX_FILES", 10)
    for number in range(11):
        (folder / "inner" / str(number)).mkdir()
    with pytest.raises(PolicyError, match="more than 10 files"):
        content_of_paths({"x": folder / "inner"})


def test_a_path_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot read .*/nothing: No such file or directory"):
        content_of_paths({"x": folder / "nothing"})


def test_one_name_for_two_files_is_refused(folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"'main\.py' is given twice"):
        content_of_paths({"main.py": "text", ".": folder})


def test_a_folder_of_too_many_files_or_bytes_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 2)
    with pytest.raises(PolicyError, match="more than 2 files"):
        content_of_paths({".": folder})
    monkeypatch.undo()
    monkeypatch.setattr(archive, "_MOST_BYTES", 20)
    with pytest.raises(PolicyError, match="or 20 bytes"):
        content_of_paths({".": folder})


@pytest.mark.needs("userns")
def test_the_command_copies_folders(folder: Path) -> None:
    for given, found in ((f"{folder}/", "project/main.py"), (f"{folder}:.", "main.py")):
        done = run("--file", given, "-c", f"import os\nprint(os.path.exists('{found}'))")
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.needs("userns")
def test_too_many_paths_below_the_home_of_a_cell_are_named_with_their_number(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / f"file-{number}" for number in range(900)]
    for path in paths:
        path.touch()

    def showing(count: int) -> Policy:
        shown = Filesystem(read=tuple(map(str, paths[:count])))
        home = {**policy_named("strict").environment, "HOME": str(tmp_path)}
        return replace(policy_named("strict"), filesystem=shown, environment=home)

    with Sandbox(policy=showing(100)) as sandbox:
        assert sandbox.execute(f"open({str(paths[99])!r}).read()").value == ""
    # /tmp itself has the directory of this test
    number = r"^filesystem\.read: 901 paths are shown below /tmp, .*; it can show about 7\d\d there"
    with pytest.raises(PolicyError, match=number):
        Sandbox(policy=showing(900)).close()
