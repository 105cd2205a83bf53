"""`scripts/test`: parts of equal length, and a retry for listed tests alone."""

import datetime
import json
from pathlib import Path

import pytest

from tests import parts
from tests.conftest import ROOT

# Fails until it ran as often as the file beside it says.
FLAKY = """
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
    monkeypatch.setattr(parts, "FLAKY", tmp_path / "flaky.toml")
    parts.DURATIONS.write_text("{}")
    parts.FLAKY.write_text("")
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


def listing(test: str, days: int = 0) -> str:
    since = datetime.date.today() - datetime.timedelta(days)
    return f'[[flaky]]\ntest = "{test}"\nsince = {since}\nwhy = "a race in the test"\n'


@pytest.mark.parametrize(
    ("failures", "is_listed", "status"),
    [(0, False, 0), (1, False, 1), (0, True, 0), (1, True, 0), (2, True, 1)],
)
def test_only_a_listed_test_is_tried_again_and_once(
    failures: int, is_listed: bool, status: int, tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "tests/harness/test_flaky.py"
    (tree / name).write_text(FLAKY.format(failures=failures))
    parts.FLAKY.write_text(listing(f"{name}::test_it") if is_listed else "")
    assert parts.main([]) == status
    told = capfd.readouterr().out
    assert "2 of 2 parts done, 2 tests" in told
    assert (f"test: failed: {name}::test_it" in told) == (failures > 0)
    assert ("1 flaky tests were tried again" in told) == (failures > 0 and is_listed)
    assert int((tree / f"{name}.count").read_text()) == (2 if failures and is_listed else 1)


def test_no_listed_test_is_tried_again_beside_one_that_is_not_listed(tree: Path) -> None:
    for name in ("a", "b"):
        (tree / f"tests/harness/test_{name}.py").write_text(FLAKY.format(failures=1))
    parts.FLAKY.write_text(listing("tests/harness/test_a.py::test_it"))
    assert parts.main([]) == 1
    assert (tree / "tests/harness/test_a.py.count").read_text() == "1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (listing("tests/harness/test_a.py::test_it", days=31), "has expired"),
        (listing("tests/escapes/test_a.py::test_it"), "may not be listed"),
        (
            listing("tests/harness/test_a.py::test_it").replace("a race in the test", ""),
            "no reason",
        ),
    ],
)
def test_a_listing_expires_and_none_is_of_escapes_or_without_a_reason(
    text: str, complaint: str, tree: Path
) -> None:
    parts.FLAKY.write_text(text)
    with pytest.raises(SystemExit, match=complaint):
        parts.main([])


def test_the_committed_listings_are_valid_and_name_tests() -> None:
    today = datetime.date.today()
    files = parts.test_files(["tests"])
    assert {
        name.partition("::")[0] for name in parts.flaky_tests(parts.FLAKY.read_text(), today)
    } <= set(files)


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
