"""Programs that are files: their name in tracebacks, `__file__`, and children that run them again."""

from pathlib import Path

import pytest

from cellwright import PolicyError, Sandbox
from tests.harness.test_cli import run

pytestmark = pytest.mark.needs("userns")

_FAILS = "def fail():\n    return 1 / 0\n\nfail()\n"
_SPAWNS = """
import multiprocessing, sys

def square(x):
    return x * x

if __name__ == "__main__":
    with multiprocessing.get_context({kind!r}).Pool(1) as pool:
        print(pool.map(square, [2, 3]))
"""


def test_a_traceback_names_the_file(tmp_path: Path, strict: Sandbox) -> None:
    (tmp_path / "sales.py").write_text(_FAILS)
    told = run(str(tmp_path / "sales.py")).stderr
    assert 'File "/workspace/sales.py", line 4, in <module>\n    fail()' in told
    assert 'File "/workspace/sales.py", line 2, in fail\n    return 1 / 0' in told
    assert "<cell>" not in told
    traceback = strict.execute(_FAILS, filename="etl/sales.py").traceback
    assert 'File "/workspace/etl/sales.py", line 4' in str(traceback)


def test_the_program_is_a_file_beside_its_data_while_it_runs(strict: Sandbox) -> None:
    program = (
        "import __main__, pathlib, sys\n"
        "data = pathlib.Path(__file__).parent / 'data.csv'\n"
        "[data.read_text(), __file__, __main__.__file__, sys.argv, pathlib.Path(__file__).read_text()[:6]]"
    )
    result = strict.execute(
        program, filename="sales.py", files={"data.csv": "1,2"}, arguments=["-v"]
    )
    path = "/workspace/sales.py"
    assert result.value == ["1,2", path, path, ["sales.py", "-v"], "import"], result.stderr
    assert result.files == ()  # and nothing of it is left


def test_a_program_that_is_no_file_has_no_name_for_one(strict: Sandbox) -> None:
    assert strict.execute("'__file__' in globals()").value is False
    assert strict.execute("import sys; sys.argv").value == ["<cell>"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_that_was_there_or_is_changed_stays(*, kept: bool, strict: Sandbox) -> None:
    code = "None" if kept else "with open(__file__, 'a') as file: file.write('#')"
    files = {"sales.py": "old"} if kept else {}
    result = strict.execute(code, filename="sales.py", files=files, collect=["sales.py"])
    assert [each.path for each in result.files] == ["sales.py"]
    assert result.artifacts[0].data == (code if kept else f"{code}#").encode()


@pytest.mark.parametrize("filename", ["sales.py", None])
@pytest.mark.parametrize("kind", ["spawn", "forkserver", "fork"])
def test_children_that_are_spawned_find_what_the_program_defines(
    kind: str, filename: str | None, standard: Sandbox
) -> None:
    result = standard.execute(_SPAWNS.format(kind=kind), filename=filename)
    assert result.stdout == "[4, 9]\n", result.stderr


def test_a_session_names_the_file_too(strict: Sandbox) -> None:
    with strict.session() as session:
        assert session.execute("__file__", filename="a.py").value == "/workspace/a.py"
        failed = session.execute(_FAILS, filename="b.py")
        assert 'File "/workspace/b.py", line 2' in str(failed.traceback)
        assert session.execute("import os; os.listdir()").value == []


@pytest.mark.parametrize("filename", ["/etc/passwd", "../x.py", ""])
def test_a_name_outside_the_workspace_is_refused(filename: str, strict: Sandbox) -> None:
    with pytest.raises(PolicyError, match="^filename: "):
        strict.execute("1", filename=filename)


@pytest.mark.parametrize(
    ("language", "filename", "program"),
    [("bash", "a.sh", "no-such-command"), ("ruby", "a.rb", "x = 1\nnope"), ("javascript", "a.js", "nope")],
)  # fmt: skip
def test_messages_of_other_languages_name_the_file(
    language: str, filename: str, program: str, standard: Sandbox
) -> None:
    assert f"/tmp/{filename}" in standard.execute(program, language, filename=filename).stderr
