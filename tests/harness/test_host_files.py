"""Files and folders of the host that a call names by their paths."""

import os
from pathlib import Path

import pytest

from cellwright import PolicyError, Runs, Sandbox, SandboxStatus
from cellwright.harness.sandbox import host_files
from cellwright.harness.sandbox.host_files import content_of_paths
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


def test_a_path_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot read .*/nothing: No such file or directory"):
        content_of_paths({"x": folder / "nothing"})


def test_one_name_for_two_files_is_refused(folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"'main\.py' is given twice"):
        content_of_paths({"main.py": "text", ".": folder})


def test_a_folder_of_too_many_files_or_bytes_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_files, "MAX_FILES", 2)
    with pytest.raises(PolicyError, match="more than 2 files"):
        content_of_paths({".": folder})
    monkeypatch.undo()
    monkeypatch.setattr(host_files, "_MOST_BYTES", 20)
    with pytest.raises(PolicyError, match="or 20 bytes"):
        content_of_paths({".": folder})


@pytest.mark.needs("userns")
def test_the_command_copies_folders(folder: Path) -> None:
    for given, found in ((f"{folder}/", "project/main.py"), (f"{folder}:.", "main.py")):
        done = run("--file", given, "-c", f"import os\nprint(os.path.exists('{found}'))")
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
