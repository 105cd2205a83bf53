"""Python programs find in a cell what python(1) gives them: names, paths, flags, input, and an end."""

import sys
from pathlib import Path

import pytest

from cellwright import Sandbox
from tests.harness.test_cli import run

pytestmark = pytest.mark.needs("userns")

# What python(1) prints for the same file is in each case the last line.
_AS_IN_PYTHON = {
    "its directory comes first": "import os; print(sys.path[0] == os.path.dirname(__file__))",
    "modules beside it": "import beside; print(beside.X == 1)",
    "its source by its path": "print(sys._getframe().f_code.co_filename == __file__)",
    "its command line": "print(sys.orig_argv == [sys.executable, *sys.argv])",
    "flags": "print(not (sys.flags.isolated or sys.flags.no_site or sys.flags.ignore_environment))",
    "names of site": "print(all(map(callable, (copyright, credits, license, exit, quit, help))))",
    "no bytecode is cached": "print(__cached__ is None)",
    "its hook reports errors": (
        "def hook(*error): print(error[0] is ValueError)\n"
        "sys.excepthook = hook\n"
        "raise ValueError"
    ),
    "its objects end": (
        "class Ends:\n    def __del__(self): print(sys is not None)\n"
        "ends = Ends()"
    ),
    "variables of Python": "import os; print(os.path.isdir('/workspace/more') and '/workspace/more' in sys.path)",
}  # fmt: skip


@pytest.mark.parametrize("code", _AS_IN_PYTHON.values(), ids=_AS_IN_PYTHON.keys())
def test_a_program_finds_what_python_gives_it(code: str, strict: Sandbox) -> None:
    result = strict.execute(
        f"import sys\n{code}",
        filename="etl/sales.py",
        files={"etl/beside.py": "X = 1", "more/__init__.py": ""},
        env={"PYTHONPATH": "/workspace/more"},
    )
    assert result.stdout == "True\n", result.stderr
    assert result.violations == ()


def test_its_flags_have_every_name_that_python_has(strict: Sandbox) -> None:
    """Some of them are no fields of the tuple from Python 3.14 on, and threads read one of those."""
    result = strict.execute(
        "import sys, threading\nthread = threading.Thread(target=str)\nthread.start()\nthread.join()\n"
        "dir(sys.flags)"
    )
    assert result.ok, result.error
    assert set(dir(sys.flags)) <= set(result.value)


_OPEN_BESIDE_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
left = open("left.txt", "w"); left.write("abc")
"""


@pytest.mark.parametrize("filename", ["sales.py", None])
@pytest.mark.parametrize(
    "code",
    [
        "left = open('left.txt', 'w'); left.write('abc')",
        _OPEN_BESIDE_A_THREAD,
        "import sys\nleft = [open('left.txt', 'wb')]; left.append(left); left[0].write(b'abc'); sys.exit()",
    ],
)  # fmt: skip
def test_files_that_a_program_left_open_are_written(
    code: str, filename: str | None, strict: Sandbox
) -> None:
    result = strict.execute(code, filename=filename, collect=["left.txt"])
    assert [each.data for each in result.artifacts] == [b"abc"], result.stderr


_STACKS = """
import faulthandler, logging, traceback, sys
traceback.print_stack(file=sys.stdout)
logging.warning("careful", stack_info=True)
faulthandler.dump_traceback()
breakpoint()
"""


def test_stacks_show_no_path_of_the_host(strict: Sandbox) -> None:
    """Nor does a program that prints them look for our files, which would be refused attempts."""
    result = strict.execute(_STACKS, stdin="w\nc\n")
    assert "<cell>" in result.stdout
    assert "(Pdb)" in result.stdout
    assert ".py" not in result.stdout + result.stderr
    assert result.violations == ()


_SPAWNS_LATER = """
import multiprocessing
with multiprocessing.get_context({kind!r}).Pool(1) as pool:
    told = pool.map(square, [2, 3])
told
"""


@pytest.mark.parametrize("kind", ["spawn", "forkserver", "fork"])
def test_children_in_a_session_find_what_earlier_programs_defined(
    kind: str, standard: Sandbox
) -> None:
    with standard.session() as session:
        session.execute(
            "import math\nTWO = 2\nprint('once')\ndef square(x): return math.pow(x, TWO)"
        )
        session.execute("1", filename="between.py")
        result = session.execute(_SPAWNS_LATER.format(kind=kind), timeout=20)
        assert result.value == [4, 9], result.stderr


def test_children_need_no_guard_where_the_program_has_none(standard: Sandbox) -> None:
    code = "def square(x): return x * x\n" + _SPAWNS_LATER.format(kind="spawn")
    assert standard.execute(code, timeout=20).value == [4, 9]


def test_children_and_descriptor_0_have_the_input_of_a_session(standard: Sandbox) -> None:
    with standard.session() as session:
        code = "import subprocess\nsubprocess.check_output(['cat'], text=True)"
        assert session.execute(code, stdin="one").value == "one"
        assert session.execute(
            "import sys; sys.stdin.fileno(), input(), input()", stdin="a\nb\n"
        ).value == [0, "a", "b"]
        assert session.execute(code).value == ""
        assert session.execute("sys.stdin.read()").value == ""


def test_a_session_forgets_a_file_that_ended(strict: Sandbox) -> None:
    with strict.session() as session:
        before = session.execute("import sys; list(sys.path)").value
        session.execute("1", filename="etl/a.py")
        assert session.execute("'__file__' in globals(), list(sys.path)").value == [False, before]


def test_input_and_a_debugger_read_standard_input(tmp_path: Path) -> None:
    program, answers = tmp_path / "ask.py", tmp_path / "answers"
    program.write_text("name = input('name? ')\nbreakpoint()\nprint('hello', name)\nname = None\n")
    answers.write_text("Ada\np name[::-1]\nc\n")
    told = run("--stdin", str(answers), str(program))
    assert "name? " in told.stdout
    # Python 3.14 stops at the call, earlier ones after it.
    line = 2 if sys.version_info >= (3, 14) else 3
    assert f"> /workspace/ask.py({line})<module>()" in told.stdout
    assert "(Pdb) 'adA'" in told.stdout
    assert told.stdout.endswith("hello Ada\n")


@pytest.mark.parametrize(
    ("attempt", "line"),
    [
        ("import multiprocessing; multiprocessing.Pool(1)", "processes.subprocesses = true"),
        ("import concurrent.futures as f; f.ProcessPoolExecutor(1).submit(abs, 1)", "processes.subprocesses = true"),
        ("from multiprocessing.shared_memory import SharedMemory as S; S(create=True, size=1)", "processes.subprocesses = true"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-V'])", "processes.subprocesses = true"),
        ("import asyncio; asyncio.run(asyncio.create_subprocess_shell(':'))", "processes.subprocesses = true"),
        ("import socket; socket.create_server(('127.0.0.1', 0))", "network.loopback = true"),
        ("import pty; pty.openpty()", "processes.terminal = true"),
    ],
)  # fmt: skip
def test_strict_names_the_line_of_the_policy_that_allows_it(
    attempt: str, line: str, strict: Sandbox
) -> None:
    result = strict.execute(attempt)
    assert not result.ok
    assert line in " ".join(result.hints)
