"""Programs of a smolagents agent in a cell: state, tools, answers, failures."""

from collections.abc import Iterator

import pytest
from smolagents import Tool
from smolagents.default_tools import FinalAnswerTool
from smolagents.local_python_executor import CodeOutput, PythonExecutor

from cellwright import PolicyError
from cellwright.harness.adapters.smolagents import CellExecutor


class Double(Tool):
    name = "Double"
    description = "Twice a number"
    inputs = {  # noqa: RUF012 - as smolagents has it
        "number": {"type": "integer", "description": "a number"},
        "plus": {"type": "integer", "description": "added", "nullable": True},
    }
    output_type = "integer"

    def forward(self, number: int, plus: int | None = None) -> int:
        if number > 1000:
            raise ValueError("too large")
        return number * 2 + (plus or 0)


@pytest.fixture(scope="module")
def executor() -> Iterator[CellExecutor]:
    made = CellExecutor(pool=0, timeout=20)
    made.send_variables({"given": [1, 2]})
    made.send_tools({"Double": Double(), "final_answer": FinalAnswerTool()})
    yield made
    made.cleanup()


def test_it_is_an_executor_and_keeps_state(executor: CellExecutor) -> None:
    assert isinstance(executor, PythonExecutor)
    assert executor("x = sum(given); print('seen')") == CodeOutput(None, "seen\n", False)
    assert executor("x").output == 3


def test_tools_are_called_on_the_host_with_checked_arguments(executor: CellExecutor) -> None:
    assert executor("Double(4), Double(number=4, plus=1)").output == [8, 9]
    for code, words in (
        ("Double('4')", "number"),
        ("Double(2000)", "ValueError: too large"),
        ("Double()", "number"),
    ):
        with pytest.raises(RuntimeError, match=words):
            executor(code)
    called = [e for e in executor.cell.sandbox.audit.get_entries() if "double" in str(e)]
    assert called


def test_the_final_answer_ends_the_program(executor: CellExecutor) -> None:
    done = executor(
        "print(1)\ntry:\n    final_answer({'a': [1]})\nexcept Exception:\n    pass\nprint(2)"
    )
    assert done == CodeOutput({"a": [1]}, "1\n", True)
    assert executor("final_answer({1, 2})").output == "{1, 2}"
    assert not executor("5").is_final_answer


def test_tools_that_a_program_overwrote_are_back_in_the_next_step(executor: CellExecutor) -> None:
    executor("Double = None")
    assert executor("Double(1)").output == 2


def test_a_failure_tells_the_traceback_and_what_was_printed(executor: CellExecutor) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
        executor("print('before')\n1 / 0")
    assert "line 2" in str(caught.value)
    assert executor.state["_print_outputs"] == "before\n"


def test_a_step_that_takes_too_long_leaves_the_state(executor: CellExecutor) -> None:
    short = CellExecutor(pool=0, timeout=0.5)
    short("y = 1")
    with pytest.raises(RuntimeError, match=r"0\.5 s"):
        short("while True: pass")
    assert short("y").output == 1
    short.cleanup()


def test_a_session_that_is_lost_is_replaced_and_said(executor: CellExecutor) -> None:
    executor("z = 1")
    with pytest.raises(RuntimeError, match="variables, imports and files are lost"):
        executor("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RuntimeError, match="NameError"):
        executor("z")
    assert executor("Double(3)").output == 6


def test_other_tools_take_the_place_of_those_before(executor: CellExecutor) -> None:
    other = CellExecutor(pool=0)
    other.send_tools({"Double": Double()})
    other.send_tools({"final_answer": FinalAnswerTool()})
    with pytest.raises(RuntimeError, match="NameError"):
        other("Double(1)")
    with pytest.raises(PolicyError, match="pass tools to CodeAgent"):
        CellExecutor(tools=[])
    with pytest.raises(PolicyError, match="not JSON"):
        other.send_variables({"x": object()})
    other.cleanup()


def test_a_missing_module_is_explained_to_the_model(executor: CellExecutor) -> None:
    with pytest.raises(RuntimeError, match="hint: .*the user decides") as raised:
        executor("import pandas_of_nobody")
    assert "--packages" not in str(raised.value)
