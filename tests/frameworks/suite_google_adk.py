"""The behaviour that Google ADK asks of a code executor, and what a cell adds."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.code_executors.code_execution_utils import (
    CodeExecutionInput,
    CodeExecutionResult,
    File,
)

from cellwright.harness.adapters.google_adk import AdkCellExecutor

_CONTEXT: Any = None  # unused


@pytest.fixture(scope="module")
def executor() -> Iterator[AdkCellExecutor]:
    made = AdkCellExecutor(timeout_seconds=20, options={"pool": 0})
    yield made
    made.close()


def run(
    executor: AdkCellExecutor, code: str, *files: File, id: str | None = None
) -> CodeExecutionResult:
    return executor.execute_code(_CONTEXT, CodeExecutionInput(code, list(files), id))


@pytest.mark.parametrize("content", [b"a,b", "a,b", base64.b64encode(b"a,b").decode()])
def test_a_program_reads_and_makes_files(executor: AdkCellExecutor, content: Any) -> None:
    code = "text = open('d.csv').read()\nprint(text)\nopen('out.txt', 'w').write('made')"
    done = run(executor, code, File("d.csv", content, "text/csv"))
    assert (done.stdout.splitlines()[0], done.stderr, done.exit_code) == ("a,b", "", 0)
    (made,) = done.output_files
    assert (made.name, base64.b64decode(made.content)) == ("out.txt", b"made")


def test_a_failure_is_told(executor: AdkCellExecutor) -> None:
    done = run(executor, "print('before')\n1/0")
    assert (done.stdout, done.exit_code) == ("before\n", 1)
    assert "ZeroDivisionError" in done.stderr


def test_a_program_that_takes_too_long_is_told() -> None:
    executor = AdkCellExecutor(timeout_seconds=1, options={"pool": 0})
    done = run(executor, "while True: pass")
    executor.close()
    assert "wall_time" in done.stderr
    assert done.exit_code


def test_programs_share_nothing_unless_stateful(executor: AdkCellExecutor) -> None:
    run(executor, "kept = 1", id="a")
    assert "NameError" in run(executor, "kept", id="a").stderr
    stateful = AdkCellExecutor(stateful=True, options={"pool": 0})
    run(stateful, "kept = 1", id="a")
    assert run(stateful, "kept", id="a").stdout == "1\n"
    assert "NameError" in run(stateful, "kept", id="b").stderr
    run(stateful, "import os; os._exit(1)", id="a")
    assert "NameError" in run(stateful, "kept", id="a").stderr
    stateful.close()


def test_a_program_does_not_see_the_host(executor: AdkCellExecutor) -> None:
    assert "FileNotFoundError" in run(executor, "open('/etc/shadow')").stderr
