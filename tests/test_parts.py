"""`scripts/test`: parts of equal length, and one more try of a few failed tests."""

import json
from pathlib import Path

import pytest

from tests import parts
from tests.conftest import ROOT

# Fails until it ran as often as the file beside it says.
UNSTEADY = """
from pathlib import Path
def test_it():
    count = Path(__file__ + ".count")
    before = int(count.read_text()) if count.exists() else 0
    count.write_text(str(before + 1))
    assert before >= {failures}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with other tests, which no part ran before."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\ntestpaths = tests\n")
    hook = "from tests.parts import pytest_runtest_logreport as pytest_runtest_logreport\n"
    (tmp_path / "conftest.py").write_text(hook)
    for name in ("tests/harness", "tests/runner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tests/harness/test_good.py").write_text("def test_it(): pass\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "DURATIONS", tmp_path / "durations.json")
    parts.DURATIONS.write_text("{}")
    return tmp_path


def test_parts_are_of_about_the_same_length() -> None:
    seconds = {"a": 50.0, "b": 30.0, "c": 25.0, "d": 9.0}
    made = parts.divide(["a", "b", "c", "d", "new"], seconds, 2)
    assert [part.files for part in made] == [["b", "c", "new"], ["a", "d"]]
    assert [part.seconds for part in made] == [60, 59]
    assert len(parts.divide(["a"], seconds, 8)) == 1


def test_every_file_of_tests_is_in_a_part_and_every_duration_is_of_one() -> None:
    files = parts.test_files(["tests"])
    assert set(files) >= {"tests/test_parts.py", "tests/escapes/test_network.py"}
    assert json.loads(parts.DURATIONS.read_text()).keys() <= set(files)
    assert set(parts.test_files(parts.QUICK)) < set(files)


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (1, 0), (2, 1)])
def test_a_failed_test_is_tried_again_once_and_named(
    failures: int, status: int, tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "tests/harness/test_unsteady.py"
    (tree / name).write_text(UNSTEADY.format(failures=failures))
    assert parts.main([]) == status
    told = capfd.readouterr().out
    assert "2 of 2 parts done, 2 tests" in told
    assert (f"test: failed: {name}::test_it" in told) == (failures > 0)
    assert (f"passed when tried again: {name}::test_it" in told) == (failures == 1)
    assert int((tree / f"{name}.count").read_text()) == (2 if failures else 1)


@pytest.mark.parametrize("others", [("harness/test_b", "harness/test_c"), ("escapes/test_b",)])
def test_nothing_is_tried_again_beside_many_or_one_of_security(
    others: tuple[str, ...], tree: Path
) -> None:
    (tree / "tests/escapes").mkdir()
    for name in ("harness/test_a", *others):
        (tree / f"tests/{name}.py").write_text(UNSTEADY.format(failures=1))
    assert parts.main([]) == 1
    assert (tree / "tests/harness/test_a.py.count").read_text() == "1"


@pytest.mark.parametrize(
    "name",
    [
        "tests/runner/audit/test_log.py",
        "tests/policies/test_compile.py",
        "tests/harness/skills/test_hostile_folders.py",
        "tests/harness/projects/test_credentials.py",
    ],
)
def test_tests_of_security_are_known_by_their_files(name: str) -> None:
    assert parts._NEVER_AGAIN.match(f"{name}::test_it")
    assert not parts._NEVER_AGAIN.match("tests/harness/skills/test_tools.py::test_a_killed_run")


def test_what_cannot_be_collected_fails(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tree / "tests/harness/test_broken.py").write_text("import nowhere\n")
    assert parts.main([]) > 1
    assert "No module named 'nowhere'" in capfd.readouterr().out


def test_record_writes_the_seconds_of_each_file(tree: Path) -> None:
    assert parts.main(["record"]) == 0
    assert json.loads(parts.DURATIONS.read_text()).keys() == {"tests/harness/test_good.py"}


def test_files_that_use_the_same_names_of_the_host_are_in_one_part() -> None:
    files = [f"tests/test_{n}.py" for n in range(9)] + [*parts._TOGETHER]
    divided = parts.divide(files, {}, 4)
    assert sorted(name for part in divided for name in part.files) == sorted(files)
    (one,) = (part for part in divided if parts._TOGETHER[0] in part.files)
    assert set(parts._TOGETHER) <= set(one.files)
