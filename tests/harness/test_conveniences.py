"""Conveniences that people expect of Python: imports of their files, await, exit, display."""

import pytest

from cellwright import Sandbox


def test_a_program_imports_the_files_that_come_with_it(strict: Sandbox) -> None:
    files = {"helpers.py": "X = 5", "parts/one.py": "Y = 6"}
    result = strict.execute("import helpers, parts.one\nhelpers.X + parts.one.Y", files=files)
    assert (result.value, result.error) == (11, None)
    assert result.files == ()  # no bytecode among the program's own
    assert result.violations == ()


def test_a_program_imports_what_it_wrote_itself(strict: Sandbox) -> None:
    code = "with open('written.py', 'w') as file: file.write('Z = 1')\nimport written\nwritten.Z"
    assert strict.execute(code).value == 1


def test_a_later_call_of_a_session_imports_files_that_came_with_it(strict: Sandbox) -> None:
    with strict.session() as session:
        assert session.execute("import first", files={"first.py": "A = 1"}).ok
        files = {"second.py": "A = 2"}
        assert session.execute("import second\nfirst.A + second.A", files=files).value == 3


@pytest.mark.parametrize("name", ["asyncio", "json", "traceback"])
def test_a_file_takes_the_place_of_no_module_of_the_standard_library(
    strict: Sandbox, name: str
) -> None:
    """What one program leaves in a workspace does not run in the next as that module."""
    files = {f"{name}.py": "raise SystemExit('planted')"}
    code = f"import {name}, asyncio\nawait asyncio.sleep(0, {name}.__file__)"
    value = strict.execute(code, files=files).value
    assert isinstance(value, str)
    assert not value.startswith("/workspace")
    failed = strict.execute("1 / 0", files=files)
    assert failed.error == "ZeroDivisionError: division by zero"


def test_await_works_at_the_top_level_of_any_program(strict: Sandbox) -> None:
    code = "import asyncio\nvalues = [await asyncio.sleep(0, n) for n in range(3)]\nawait asyncio.sleep(0, values)"
    assert strict.execute(code).value == [0, 1, 2]
    failed = strict.execute("import asyncio\nasync def fail():\n    1 / 0\nawait fail()")
    assert failed.traceback is not None
    assert "asyncio" not in failed.traceback.replace("import asyncio", "")


@pytest.mark.parametrize(
    ("code", "exit_code"), [("exit()", 0), ("quit()", 0), ("exit(3)", 3), ("quit('bye')", 1)]
)
def test_exit_and_quit_end_a_program(strict: Sandbox, code: str, exit_code: int) -> None:
    assert strict.execute(f"{code}\nprint('not reached')").exit_code == exit_code
    with strict.session() as session:
        session.execute("x = 1")
        assert session.execute(code).exit_code == exit_code
        assert session.execute("x").value == 1


def test_help_prints_what_is_known(strict: Sandbox) -> None:
    assert "Return the number of items" in strict.execute("help(len)").stdout


def test_display_shows_text_and_pictures(strict: Sandbox) -> None:
    code = """
class Drawn:
    def _repr_png_(self): return b"png"
    def __repr__(self): return "Drawn"
display(Drawn(), "text", [1])
"""
    result = strict.execute(code)
    assert result.stdout == "Drawn\ntext\n[1]\n"
    assert [(each.name, each.data) for each in result.artifacts] == [("picture-1.png", b"png")]
    with strict.session() as session:
        assert len(session.execute(code).artifacts) == 1
        assert session.execute("1").artifacts == ()
