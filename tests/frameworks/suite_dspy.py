"""Programs of a DSPy module in a cell: state, tools, SUBMIT, failures, and a whole RLM."""

from collections.abc import Iterator
from typing import Any

import dspy
import pytest
from dspy.primitives.code_interpreter import (
    CodeExecutionError,
    CodeInterpreter,
    CodeInterpreterError,
    FinalOutput,
)
from dspy.utils import DummyLM

from cellwright import PolicyError
from cellwright.harness.adapters.dspy import CellInterpreter


def double(number: int, plus: int = 0) -> int:
    if number > 1000:
        raise ValueError("too large")
    return number * 2 + plus


@pytest.fixture(scope="module")
def interpreter() -> Iterator[CellInterpreter]:
    made = CellInterpreter({"double": double}, pool=0, timeout=20)
    made.start()
    yield made
    made.shutdown()


def test_it_is_an_interpreter_and_keeps_state(interpreter: CellInterpreter) -> None:
    assert isinstance(interpreter, CodeInterpreter)
    assert interpreter.execute("x = sum(given); print('seen')", {"given": [1, 2]}) == "seen\n"
    assert interpreter.execute("x") == 3
    assert interpreter.execute("pass") is None


def test_tools_are_called_on_the_host(interpreter: CellInterpreter) -> None:
    assert interpreter.execute("double(4), double(number=4, plus=1)") == [8, 9]
    with pytest.raises(CodeExecutionError, match="ValueError: too large"):
        interpreter.execute("double(2000)")
    interpreter.tools["Half"] = lambda number: number / 2
    assert interpreter.execute("Half(3)") == 1.5
    del interpreter.tools["Half"]

    async def later(*, number: int) -> int:
        return number + 1

    interpreter.tools["later"] = later
    assert interpreter.execute("later(number=1)") == 2


def test_submit_ends_the_program(interpreter: CellInterpreter) -> None:
    code = "try:\n    SUBMIT({'a': [1]})\nexcept Exception:\n    pass\nprint('never')"
    assert interpreter.execute(code) == FinalOutput({"output": {"a": [1]}})
    interpreter.output_fields = [{"name": "answer"}, {"name": "why"}]
    assert interpreter.execute("SUBMIT(1, 'x')") == FinalOutput({"answer": 1, "why": "x"})
    assert interpreter.execute("SUBMIT(why=1, answer=2)") == FinalOutput({"answer": 2, "why": 1})
    with pytest.raises(CodeExecutionError, match="SUBMIT takes answer, why"):
        interpreter.execute("SUBMIT(1)")
    interpreter.output_fields = None


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("1 / 0", CodeExecutionError, "ZeroDivisionError"),
        ("x = (", SyntaxError, "SyntaxError"),
        (
            "import pandas_of_nobody",
            CodeExecutionError,
            "hint: .*the user decides.* pandas-of-nobody",
        ),
    ],
    ids=["exception", "syntax", "module"],
)
def test_failures_say_what_a_model_can_use(
    interpreter: CellInterpreter, code: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        interpreter.execute(code)
    assert "--packages" not in str(raised.value)
    assert "argument files" not in str(raised.value)


def test_a_lost_session_and_a_closed_one_are_no_failures_of_the_program() -> None:
    made = CellInterpreter(pool=0)
    with pytest.raises(CodeInterpreterError, match="the cell has ended"):
        made.execute("import os; os._exit(1)")
    with pytest.raises(CodeInterpreterError):
        made.execute("1")
    made.shutdown()
    with pytest.raises(PolicyError, match="connect"):
        CellInterpreter(connect="x")


def test_program_of_thought_and_rlm_run_in_a_cell() -> None:
    made: list[CellInterpreter] = []

    def factory(**given: Any) -> CellInterpreter:
        made.append(CellInterpreter(pool=0, **given))
        return made[-1]

    code = "```python\nSUBMIT({'answer': 6 * 7})\n```"
    replies = [{"reasoning": "r", "generated_code": code}, {"reasoning": "r", "answer": "42"}]
    with dspy.context(lm=DummyLM(replies)):
        thought = dspy.ProgramOfThought("question -> answer", interpreter_factory=factory)
        assert thought(question="6 times 7?").answer == "42"
    replies = [{"reasoning": "r", "code": "```python\nprint(len(context))\n```"},
               {"reasoning": "r", "code": "```python\nSUBMIT(str(len(context)))\n```"}]  # fmt: skip
    with dspy.context(lm=DummyLM(replies)):
        reader = dspy.RLM("context -> answer", interpreter_factory=factory)
        assert reader(context="x" * 1000).answer == "1000"
    assert len(made) == 2
