"""Tools as files: they come back as they were, and a folder from anywhere does no harm."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import CellwrightError, FilePermission, PermissionSet, Policy, Sandbox, ToolFactory
from cellwright.errors import RegistryError, ToolDenied, ToolInvalid, ToolTestFailed
from cellwright.harness.skills.skill import read_skill
from cellwright.policies.policy import Filesystem
from cellwright.tools import Provenance, ToolState
from tests.conftest import OPTIONAL

DOUBLE = "def double(n: int) -> int:\n    return n * 2"


@pytest.fixture
def factory(strict: Sandbox) -> Iterator[ToolFactory]:
    with ToolFactory(strict) as factory:
        yield factory


@pytest.fixture
def folder(factory: ToolFactory, tmp_path: Path) -> Path:
    factory.create_tool("double", "Double a number", DOUBLE, tests=[({"n": 1}, 2)], tags=["maths"],
                        provenance=Provenance(task="arithmetic"))  # fmt: skip
    return factory.export_tool("double", tmp_path)


def test_a_tool_comes_back_as_it_was(factory: ToolFactory, folder: Path) -> None:
    before = factory.get_tool("double")
    assert sorted(path.name for path in folder.iterdir()) == ["tool.json", "tool.py"]
    assert (folder / "tool.py").read_text() == DOUBLE
    factory.remove_tool("double")
    after = factory.import_tool(folder)
    for field in (
        "name",
        "description",
        "source_code",
        "parameters",
        "output_schema",
        "tests",
        "tags",
    ):
        assert getattr(after, field) == getattr(before, field)
    assert after.provenance.task == "arithmetic"
    assert after.state is ToolState.TESTED


def test_an_export_does_not_overwrite_a_folder(factory: ToolFactory, folder: Path) -> None:
    with pytest.raises(RegistryError, match="exists"):
        factory.export_tool("double", folder.parent)


def test_a_tool_of_the_host_has_no_files(factory: ToolFactory, tmp_path: Path) -> None:
    def greet() -> None: ...

    factory.registry.register(greet)
    with pytest.raises(ToolDenied):
        factory.export_tool("greet", tmp_path)


def changed(folder: Path, **about: Any) -> None:
    found = json.loads((folder / "tool.json").read_text())
    (folder / "tool.json").write_text(json.dumps(found | about))


def link(folder: Path) -> None:
    (folder / "tool.py").rename(folder.parent / "elsewhere.py")
    (folder / "tool.py").symlink_to(folder.parent / "elsewhere.py")


def fifo(folder: Path) -> None:
    (folder / "tool.py").unlink()
    os.mkfifo(folder / "tool.py")
    os.write(os.open(folder / "tool.py", os.O_RDWR | os.O_NONBLOCK), DOUBLE.encode())


CHANGES: dict[str, Callable[[Path], object]] = {
    "no folder": lambda folder: folder.rename(folder.parent / "elsewhere"),
    "no source": lambda folder: (folder / "tool.py").unlink(),
    "a link": link,
    "a FIFO": fifo,
    "a directory": lambda folder: ((folder / "tool.py").unlink(), (folder / "tool.py").mkdir()),
    "too large": lambda folder: (folder / "tool.py").write_text("#" * (2 << 20)),
    "no text": lambda folder: (folder / "tool.py").write_bytes(b"\xff\xfe"),
    "no JSON": lambda folder: (folder / "tool.json").write_text("{"),
    "deep": lambda folder: (folder / "tool.json").write_text("[" * 100_000),
    "another format": lambda folder: changed(folder, format=2),
    "a field too many": lambda folder: changed(folder, state="trusted"),
    "a name that is a path": lambda folder: changed(folder, name="../../x"),
    "a schema that leads outside": lambda folder: changed(folder, parameters={"$ref": "file:///etc/passwd"}),
    "a hidden instruction": lambda folder: changed(folder, description="ok\U000e0041"),
    "a source that may not": lambda folder: (folder / "tool.py").write_text("import os\n" + DOUBLE),
    "a source that does something else": lambda folder: (folder / "tool.py").write_text(DOUBLE.replace("2", "3")),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_folder_that_is_not_what_it_should_be_is_refused(
    factory: ToolFactory, folder: Path, change: Callable[[Path], object]
) -> None:
    factory.remove_tool("double")
    change(folder)
    with pytest.raises((ToolInvalid, ToolTestFailed)) as caught:
        factory.import_tool(folder)
    assert isinstance(caught.value, CellwrightError)
    assert factory.list_tools() == []


def test_what_a_folder_asks_for_it_gets_only_if_it_is_granted(tmp_path: Path) -> None:
    policy = Policy(filesystem=Filesystem(read=(str(tmp_path),)), optional_layers=OPTIONAL)
    granted = PermissionSet([FilePermission(allowed_paths=[str(tmp_path)])])
    with Sandbox(policy=policy, pool=0) as sandbox, ToolFactory(sandbox) as factory:
        factory.create_tool("double", "Double", DOUBLE, permissions=granted)
        factory.create_tool("other", "Other", "def other(): ...", calls=["double"])
        folders = [factory.export_tool(name, tmp_path) for name in ("double", "other")]
        factory.clear_all()
        for folder, said in zip(folders, (str(tmp_path), "calling double"), strict=True):
            with pytest.raises(ToolDenied, match=said):
                factory.import_tool(folder)
            factory.import_tool(folder, grant=True)
        assert factory.get_tool("double").permissions.permissions != []


def test_a_tool_is_exported_as_a_skill(factory: ToolFactory, tmp_path: Path) -> None:
    source = "def triple(n: int) -> int:\n    return n * 3"
    made = factory.create_tool(
        "triple", "Triple a number.", source, tests=["assert triple(2) == 6"]
    )
    skill = read_skill(factory.export_tool("triple", tmp_path, as_skill=True))
    assert {"SKILL.md", "scripts/triple.py", "tests/test_1.py"} <= skill.tree.files.keys()
    factory.remove_tool("triple")
    (again,) = factory.add_skill(skill)
    assert (again.source_code, again.tests) == (made.source_code, made.tests)
