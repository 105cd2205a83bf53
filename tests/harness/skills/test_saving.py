"""Skills from sessions: they are kept once they have worked without the session."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Privacy, Sandbox, Skills
from cellwright.policies.errors import PolicyError, SkillInvalid, SkillUntrusted
from cellwright.tools import SkillStore

pytestmark = pytest.mark.needs("cgroup")
ROMAN = "def roman(n: int) -> str:\n    return 'I' * n\n"


@pytest.fixture
def store(tmp_path: Path) -> SkillStore:
    return SkillStore(tmp_path)


calls: list[str] = []


def post(text: str) -> str:
    """Post a text."""
    calls.append(text)
    return text


@pytest.fixture
def sandbox(store: SkillStore) -> Iterator[Sandbox]:
    with Sandbox(skills=Skills([], store=store), tools=[post], pool=0) as made:
        yield made


def test_the_history_of_a_session_becomes_a_skill(sandbox: Sandbox, store: SkillStore) -> None:
    with sandbox.session() as session:
        session.execute(ROMAN)
        session.execute("1 / 0")
        session.execute("assert roman(2) == 'II'")
        tests = (
            "from skills.roman_numbers.scripts.roman_numbers import roman\nassert roman(3) == 'III'"
        )
        kept = session.save_skill(
            "roman-numbers",
            "Writes numbers.",
            tests=tests,
            task="number pages",
            model="m-1",
            trust=True,
        )
    assert kept.version == 1
    files = kept.skill.tree.files
    assert sorted(files) == ["SKILL.md", "scripts/roman_numbers.py", "tests/check.py"]
    assert (
        files["scripts/roman_numbers.py"].content.decode() == f"{ROMAN}\nassert roman(2) == 'II'\n"
    )
    assert kept.skill.manifest.metadata == {
        "cellwright-origin": "history", "cellwright-task": "number pages", "cellwright-model": "m-1",
    }  # fmt: skip
    assert "import skills.roman_numbers.scripts.roman_numbers" in kept.skill.manifest.body
    code = "from skills.roman_numbers.scripts.roman_numbers import roman; roman(4)"
    assert sandbox.execute(code).value == "IIII"
    assert "roman-numbers" in sandbox.skills.prompt()
    with Sandbox(skills=Skills([], store=store), pool=0) as another:
        assert another.execute(code).value == "IIII"


def test_files_of_the_workspace_become_a_skill(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.upload("roman.py", ROMAN)
        session.upload("notes.md", "How.")
        session.upload("data/table.csv", "1,I\n")
        kept = session.save_skill(
            "roman", "Writes.", files=["*.py", "*.md", "data/*"], body="Do it."
        )
        with pytest.raises(PolicyError, match="matches 'gone'"):
            session.save_skill("roman", "Writes.", files=["gone"])
    assert sorted(kept.skill.tree.files) == [
        "SKILL.md", "assets/data/table.csv", "references/notes.md", "scripts/roman.py",
    ]  # fmt: skip
    with pytest.raises(SkillUntrusted):
        Skills([], store=sandbox.skills.source.store).get("roman")
    assert sandbox.skills.usable() == ()  # nobody has trusted it


def test_what_needs_its_session_is_not_kept(sandbox: Sandbox, store: SkillStore) -> None:
    with sandbox.session() as session:
        session.execute("print(n)", inputs={"n": 1})
        with pytest.raises(SkillInvalid, match="NameError") as refused:
            session.save_skill("needs-inputs", "Prints.")
        assert refused.value.result.status.name == "FAILED"
        with pytest.raises(SkillInvalid, match="AssertionError"):
            session.save_skill(
                "wrong", "Writes.", files={"scripts/a.py": ROMAN}, tests="assert False"
            )
        with pytest.raises(SkillInvalid, match="nothing in it can be tried"):
            session.save_skill("words", "Words.", files={"references/a.md": "x"})
    assert store.versions() == ()


def test_a_replay_calls_no_tool_and_reaches_no_host(sandbox: Sandbox) -> None:
    calls.clear()
    with sandbox.session() as session:
        assert session.execute("import tools; tools.post('once')").ok
        with pytest.raises(SkillInvalid, match="ModuleNotFoundError"):
            session.save_skill("poster", "Posts.")
    assert calls == ["once"]


def test_a_guest_cannot_smuggle_files_into_a_skill(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.execute(
            "import os; os.symlink('/etc/passwd', 'x.py'); open('y\\u202e.py', 'w').close()"
        )
        with pytest.raises(PolicyError, match="matches 'x.py'"):
            session.save_skill("smuggled", "Has a link.", files=["x.py"])
        with pytest.raises(SkillInvalid, match="hidden"):
            session.save_skill("smuggled", "Has a name.", files=["y*"])
        with pytest.raises(SkillInvalid, match="not a path"):
            session.save_skill("smuggled", "Leads out.", files={"../evil.py": ""})
        with pytest.raises(SkillInvalid, match="hidden"):
            session.save_skill("smuggled", "Hidden\u200b.", files={"scripts/a.py": ""})


def test_a_secret_is_not_kept(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.execute("key = 'ghp_16C7e42F292c6912E7710c838347Ae178B4a'")
        with pytest.raises(SkillInvalid, match="looks like a secret"):
            session.save_skill("keys", "Has a key.")


def test_a_session_of_another_language_becomes_a_skill(store: SkillStore) -> None:
    with Sandbox(pool=0) as sandbox, sandbox.session(language="bash") as session:
        session.execute("greet() { echo hello $1; }")
        script = "scripts/greeting.bash"
        tests = f"source /skills/greeting/{script}; greet you"
        kept = session.save_skill("greeting", "Greets.", tests=tests, store=store)
        assert script in kept.skill.tree.files
        with pytest.raises(SkillInvalid, match="fresh cell"):
            session.save_skill("greeting", "Greets.", tests="exit 3", store=store)


def test_saving_again_makes_a_version_and_the_same_makes_none(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        versions = [
            session.save_skill("roman", "Writes.", files={"scripts/a.py": text}).version
            for text in (ROMAN, ROMAN, ROMAN + "\n")
        ]
    assert versions == [1, 1, 2]


def test_arguments_that_are_no_texts_are_named(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.execute("x = 1")
        for given, name in (
            ({"name": 1, "description": "d"}, "name"),
            ({"name": "a", "description": None}, "description"),
            ({"name": "a", "description": "d", "tests": b"1"}, "tests"),
            ({"name": "a", "description": "d", "files": {"scripts/a.py": 1}}, "files"),
            ({"name": "a", "description": "d", "files": "*.py"}, "files"),
        ):
            with pytest.raises(PolicyError, match=f"^{name}: "):
                session.save_skill(**given)
        with pytest.raises(SkillInvalid, match="fresh cell"):
            session.save_skill("a", "d", files={"scripts/a.py": "x = '\ud800'"})


def test_a_maker_adds_no_version_to_the_skill_of_another(sandbox: Sandbox) -> None:
    def save(text: str, maker: str) -> int:
        files = {"scripts/a.py": text}
        return session.save_skill("roman", "Writes.", files=files, maker=maker).version

    with sandbox.session() as session:
        assert save(ROMAN, "one") == 1
        assert save(ROMAN + "#", "one") == 2
        with pytest.raises(SkillInvalid, match="another maker, one"):
            save(ROMAN + "##", "two")
        assert save(ROMAN + "###", "") == 3  # a person
        with pytest.raises(SkillInvalid, match="another maker, a person"):
            save(ROMAN + "####", "one")


def test_a_trusted_version_outlives_newer_untrusted_ones(tmp_path: Path) -> None:
    store = SkillStore(tmp_path, most_versions=3)
    with Sandbox(skills=Skills([], store=store), pool=0) as sandbox, sandbox.session() as session:
        for number in range(6):
            session.save_skill(
                "roman", "Writes.", files={"scripts/a.py": f"n = {number}"}, trust=number == 0
            )
    assert [each.version for each in store.versions("roman")] == [6, 5, 1]
    assert Skills([], store=store).read("roman", "scripts/a.py") == b"n = 0"


def test_saving_has_a_form_for_asyncio(sandbox: Sandbox) -> None:
    async def save() -> str:
        kept = await session.asave_skill(
            "roman", "Writes.", files={"scripts/a.py": ROMAN}, task="t"
        )
        return kept.skill.name

    with sandbox.session() as session:
        assert asyncio.run(save()) == "roman"


def test_tokens_for_personal_data_are_not_kept(store: SkillStore) -> None:
    with Sandbox(pool=0, privacy=Privacy()) as sandbox, sandbox.session() as session:
        token = session.execute("to", inputs={"to": "ann@example.org"}).value
        with pytest.raises(PolicyError, match="token for personal data"):
            session.save_skill(
                "mailer", "Mails.", files={"scripts/a.py": f"x = {token!r}"}, store=store
            )
        assert session.save_skill("other", "Mails.", files={"scripts/a.py": "x = 'pii_email_00000000'"},
                                  store=store).version == 1  # fmt: skip
    assert [each.skill.name for each in store.versions()] == ["other"]
