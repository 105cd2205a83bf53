"""Replies of models: the program, the answer, or the reason why a reply is unusable."""

import pytest

from cellwright.harness.agent.planner import (
    Action,
    CodeAction,
    FinalAnswer,
    Unusable,
    fenced_blocks,
    read_reply,
)
from cellwright.harness.agent.prompts import ModelReply, ToolRequest


def read(text: str, finish: str = "stop", *requests: tuple[str, str]) -> Action:
    called = tuple(ToolRequest(*each) for each in requests)
    return read_reply(ModelReply(text=text, finish=finish, requests=called))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("I add.\n```python\n1 + 1\n```", "1 + 1"),
        ("```py\na = 1\n```\nthen\n```python\na\n```", "a = 1\na"),
        ("```\nx\n```", "x"),
        ("  ```python title\nx\n  ```", "x"),
        ("```bash\nls\n```\n```python\nx\n```", "x"),
        ("<|channel|>```python\nx\n```", "x"),
        ("```python\nx\n```\n```python\ny", "x"),
        ("<think>\n```python\ndraft\n```\n</think>\n```python\nx\n```", "x"),
        ("a draft:\n```python\ndraft\n```\n</think>\n\n```python\nx\n```", "x"),
        ("```python\nprint('</think>')\n```", "print('</think>')"),
    ],
)
def test_python_blocks_are_the_program(text: str, code: str) -> None:
    assert read(text)[1] == code  # type: ignore[index]


def test_a_draft_in_thoughts_without_an_end_is_not_run() -> None:
    assert isinstance(read("<think>\n```python\ndraft\n```\nbut", "length"), Unusable)


def test_the_text_before_a_block_is_the_thought() -> None:
    assert read("Think.\n\n```python\nx\n```") == CodeAction("Think.", "x")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('Thought: t\nAction: find_tool\nAction Input: {"description": "x"}',
         "execute_tool('find_tool', {'description': 'x'})"),
        ("Action: `now`", "execute_tool('now', {})"),
        ('Action: a.b\nAction Input: {"x": [1, "\'"],}', "execute_tool('a.b', {'x': [1, \"'\"]})"),
        ('Action: FinalResponse\nAction Input: {"message": "done"}', "final_answer('done')"),
    ],
)  # fmt: skip
def test_an_action_in_words_becomes_a_program(text: str, code: str) -> None:
    assert read(text)[1] == code  # type: ignore[index]


def test_a_call_of_a_tool_becomes_a_program() -> None:
    assert read("", "tool_calls", ("run_python", '{"code": "1+1"}')) == CodeAction("", "1+1")
    assert read("t", "stop", ("f", '{"a": true}'), ("g", "")) == CodeAction(
        "t", "execute_tool('f', {'a': True})\nexecute_tool('g', {})"
    )


def test_nothing_of_a_call_is_code() -> None:
    hostile = "x'); import os #\n"
    found = read("", "stop", (hostile, '{"a": "\'+evil()+\'"}'))
    assert isinstance(found, CodeAction)
    import ast

    (statement,) = ast.parse(found.code).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert ast.literal_eval(statement.value.args[0]) == hostile
    assert ast.literal_eval(statement.value.args[1]) == {"a": "'+evil()+'"}


def test_a_final_answer_in_words() -> None:
    assert read("Thought: done\nFinal Answer: 42\nlines") == FinalAnswer("42\nlines")


@pytest.mark.parametrize(
    ("text", "finish", "why"),
    [
        ("", "stop", "empty"),
        ("   <|im_end|>", "stop", "empty"),
        ("I think it is 4.", "stop", "no code block"),
        ("```python\nx = [1,", "length", "ended in the middle"),
        ("```python\nx = [1,", "stop", "does not end"),
        ("```ruby\nx\n```", "stop", "not Python"),
        ("half", "cut", "ended in the middle"),
        ("Action: f\nAction Input: {x}", "stop", "not a JSON object"),
        ("Action: f\nAction Input: [1]", "stop", "not a JSON object"),
    ],
)
def test_an_unusable_reply_says_why(text: str, finish: str, why: str) -> None:
    found = read(text, finish)
    assert isinstance(found, Unusable)
    assert why in found.why


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "{" * 100_000])
def test_malformed_arguments_of_a_call_are_unusable(arguments: str) -> None:
    assert isinstance(read("", "tool_calls", ("f", arguments)), Unusable)


def test_many_open_fences_are_read_in_one_pass() -> None:
    blocks, is_open = fenced_blocks("```a\n" * 300_000)
    assert blocks == []
    assert is_open
