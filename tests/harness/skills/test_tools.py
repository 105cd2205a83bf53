"""Made tools become skills, functions of skills become tools, and their tests go along."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import FilePermission, PermissionLevel, PermissionSet, ToolFactory
from cellwright.harness.skills.skill import make_skill, read_skill
from cellwright.harness.skills.skill_store import export_skill
from cellwright.policies.errors import SkillInvalid, ToolDenied, ToolInvalid, ToolTestFailed
from cellwright.tools import Provenance, SkillManifest, SkillStore

pytestmark = pytest.mark.needs("cgroup")
SOURCE = 'def add_up(numbers: list[int], start: int = 0) -> int:\n    """Add numbers."""\n    return start + sum(numbers)\n'
MANIFEST = SkillManifest(name="sums", description="Adds numbers.")


@pytest.fixture
def factory() -> Iterator[ToolFactory]:
    with ToolFactory(pool=0) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> SkillStore:
    return SkillStore(tmp_path / "state")


def test_a_tool_that_became_a_skill_becomes_the_same_tool(
    factory: ToolFactory, store: SkillStore, tmp_path: Path
) -> None:
    made = factory.create_tool(
        "add_up", "Add many numbers", SOURCE, tests=[({"numbers": [1, 2]}, 3), "assert add_up([]) == 0"],
        tags=["sums"], timeout=5.0, provenance=Provenance(task="totals", model="m-1"),
    )  # fmt: skip
    kept = factory.save_skill("add_up", store)
    assert kept.skill.name == "add-up"
    assert sorted(kept.skill.tree.files) == [
        "SKILL.md", "assets/tool.json", "scripts/add_up.py", "tests/test_2.py",
    ]  # fmt: skip
    assert kept.skill.manifest.metadata["cellwright-task"] == "totals"
    carried = read_skill(export_skill(kept.skill, tmp_path / "usb"))
    with ToolFactory(pool=0) as another:
        (again,) = another.add_skill(carried)
        assert another.call("add_up", {"numbers": [4, 5]}) == 9
        for field in (
            "name",
            "description",
            "source_code",
            "parameters",
            "tests",
            "tags",
            "timeout",
        ):
            assert getattr(again, field) == getattr(made, field), field
        assert another.save_skill("add_up", store).skill.hash == kept.skill.hash


def test_functions_of_a_skill_become_tools_with_its_tests(factory: ToolFactory) -> None:
    tests = "from skills.sums.scripts.adding import add_up, half\nassert add_up([1]) == 1\nassert half(2) == 1\n"
    source = f"{SOURCE}\ndef half(n: int) -> int:\n    return n // 2\n\ndef _own(n: int): ...\n\ndef untyped(n): ...\n"
    skill = make_skill(
        MANIFEST, {"scripts/adding.py": source.encode(), "tests/check.py": tests.encode()}
    )
    specs = factory.add_skill(skill, allow_similar=True)
    assert [each.name for each in specs] == ["add_up", "half"]
    assert factory.call("half", {"n": 9}) == 4
    assert specs[0].provenance.parent == skill.reference
    assert [test.source for test in specs[0].tests] == [
        "assert add_up([1]) == 1\nassert half(2) == 1"
    ]


def test_tests_of_a_skill_hold_for_its_tools(factory: ToolFactory) -> None:
    tests = b"from skills.sums.scripts.adding import add_up\nassert add_up([1]) == 2\n"
    skill = make_skill(MANIFEST, {"scripts/adding.py": SOURCE.encode(), "tests/check.py": tests})
    with pytest.raises(ToolTestFailed):
        factory.add_skill(skill)
    assert factory.list_tools() == []


def test_what_a_skill_asks_for_is_granted_by_the_caller_alone(
    factory: ToolFactory, store: SkillStore, tmp_path: Path
) -> None:
    reading = PermissionSet(
        [FilePermission(level=PermissionLevel.READ, allowed_paths=[str(tmp_path)])]
    )
    factory.create_tool("add_up", "Add many numbers", SOURCE, permissions=reading)
    skill = factory.save_skill("add_up", store).skill
    asking = make_skill(
        SkillManifest(name="asking", description="Asks.", allowed_tools=("mail_send",)),
        {"scripts/a.py": b"def ask(n: int) -> int:\n    return n\n"},
    )
    with ToolFactory(pool=0) as another:
        with pytest.raises(ToolDenied, match="asks for"):
            another.add_skill(skill)
        with pytest.raises(ToolDenied, match="calling mail_send"):
            another.add_skill(asking)
        with pytest.raises(ToolInvalid, match="there is no tool 'mail_send'"):
            another.add_skill(asking, grant=True)


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({"scripts/a.py": b"def f(n): ..."}, SkillInvalid),
        ({"references/a.md": b"def f(n: int): ..."}, SkillInvalid),
        ({"scripts/a.py": b"def f(n: int:"}, ToolInvalid),
        ({"scripts/a.py": b"\xff"}, ToolInvalid),
        (
            {"scripts/a.py": b"import os\ndef f(n: int) -> int:\n    return os.getpid()"},
            ToolInvalid,
        ),
        ({"assets/tool.json": b"{", "scripts/a.py": b""}, ToolInvalid),
        ({"assets/tool.json": b'{"format": 2, "name": "a"}', "scripts/a.py": b""}, ToolInvalid),
        (
            {"assets/tool.json": b'{"format": 1, "name": "../../b"}', "scripts/a.py": b""},
            ToolInvalid,
        ),
    ],
)
def test_a_hostile_skill_makes_no_tool(
    factory: ToolFactory, files: dict[str, bytes], refused: type[Exception]
) -> None:
    with pytest.raises(refused):
        factory.add_skill(make_skill(MANIFEST, {**files}))
    assert factory.list_tools() == []
