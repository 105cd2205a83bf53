"""Several tasks at once, and what other processes or a damaged file do to an agent's records."""

import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cellwright.agent import Agent
from cellwright.errors import RegistryError
from cellwright.harness.agent.prompts import ModelReply
from cellwright.tools import ToolState
from tests.conftest import OPTIONAL, policy_named
from tests.harness.agent.scripted import ScriptedModel, answer, program

pytestmark = pytest.mark.needs("userns")
WORDS = {"count_words": "Counts the words of a given English text",
         "word_count": "Counts the words of an English sentence"}  # fmt: skip


class Makers(ScriptedModel):
    """Has a tool made for each task, all drafts at the same time, and uses it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__([])
        self._together = threading.Barrier(len(names))

    def ask(self, messages: Any, *given: Any, **more: Any) -> ModelReply:
        if "You write one tool" in messages[0].text:
            name = messages[1].text.split()[1]
            self._together.wait(30)
            source = f"def {name}(text: str) -> int:\n    return len(text.split())"
            text = f"```python\n{source}\n```\n```tests\nassert {name}('a b') == {len('ab')}\n```"
            return ModelReply(text=text)
        name = messages[1].text.split()[1]
        if len(messages) == 2:
            return ModelReply(text=program(f"build_tool('{name}', {WORDS[name]!r})['name']"))
        made = "count_words" if "count_words" in messages[-1].text else "word_count"
        return ModelReply(text=answer(f"execute_tool('{made}', {{'text': 'a b c'}})"))


def test_tools_that_two_runs_made_at_once_are_one_tool_after_the_batch(tmp_path: Path) -> None:
    with Agent(Makers(tuple(WORDS)), policy=policy_named("strict"), directory=tmp_path) as agent:
        results = agent.run_batch([*WORDS], workers=2)
        assert [each.answer for each in results] == [3, 3]
        (kept,) = agent.factory.list_tools()
        assert agent.factory.run_tests(kept.name) >= 1
        assert {tools for each in agent.memory.recipes() for tools in each.tools} == {kept.name}
        retired = [each for each in agent.factory.registry.list_tools(retired=True)
                   if each.state is ToolState.RETIRED]  # fmt: skip
        assert len(retired) <= 1  # none if one draft was found to be like the other in time


def test_two_runs_that_build_one_name_at_once_get_the_same_tool(tmp_path: Path) -> None:
    with Agent(Makers(("a", "b")), policy=policy_named("strict"), directory=tmp_path) as agent:
        results = agent.run_batch(["count_words", "count_words"], workers=2)
        assert [each.answer for each in results] == [3, 3]
        (made,) = agent.factory.registry.versions("count_words")
        assert made.version == 1


def test_one_run_that_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    class Half(ScriptedModel):
        def ask(self, messages: Any, *given: Any, **more: Any) -> ModelReply:
            if "bad" in messages[1].text:
                raise RuntimeError("no model")
            return super().ask(messages, *given, **more)

    with Agent(Half([answer("1")]), policy=policy_named("strict"), directory=tmp_path) as agent:
        with pytest.raises(RuntimeError, match="no model"):
            agent.run_batch(["good", "bad", "good"])
        assert sorted(each.state for each in agent.runs()) == [
            "completed", "completed", "interrupted",
        ]  # fmt: skip


def test_the_command_merges_tools(tmp_path: Path) -> None:
    with Agent(ScriptedModel([]), policy=policy_named("strict"), directory=tmp_path) as agent:
        for name, about in WORDS.items():
            source = f"def {name}(text: str) -> int:\n    return len(text.split())"
            agent.factory.create_tool(
                name, about, source, tests=[f"assert {name}('a') == 1"], allow_similar=True
            )
    command = [sys.executable, "-Im", "cellwright", "agent", "merge", "--directory", str(tmp_path),
               *(f"--optional={each}" for each in OPTIONAL)]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told == "word_count@1 is retired: count_words@2 does the same\n"
    empty = subprocess.run(
        [*command[:-1 - len(OPTIONAL)], str(tmp_path / "none")], capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert empty.returncode == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE agents SET answer = x'ff'",
        "UPDATE agents SET answer = '{'",
        "UPDATE agents SET began = 'soon'",
        "UPDATE agents SET task = x'ff'",
        "UPDATE steps SET reply = 'text'",
        "UPDATE steps SET reply = x'c1'",
        "UPDATE steps SET reply = zeroblob(100)",
        "UPDATE steps SET used = x'80c0'",
        "UPDATE steps SET observation = x'00ff'",
    ],
)
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path, damage: str) -> None:
    script = [program("1"), RuntimeError("stop")]
    with Agent(ScriptedModel(script), policy=policy_named("strict"), directory=tmp_path) as agent:
        with pytest.raises(RuntimeError):
            agent.run("t")
        run = agent.runs()[0].run
        with sqlite3.connect(tmp_path / "agents.db") as db:
            db.execute(damage)
        db.close()
        with pytest.raises(RegistryError, match=r"agents\.db"):
            agent.show(run)
        with pytest.raises(RegistryError, match=r"agents\.db"):
            agent.resume(run)


def test_an_owner_that_is_no_process_does_not_hold_a_run(tmp_path: Path) -> None:
    script = [program("x = 1"), RuntimeError("stop")]
    with Agent(ScriptedModel(script), policy=policy_named("strict"), directory=tmp_path) as agent:
        with pytest.raises(RuntimeError):
            agent.run("t")
        with sqlite3.connect(tmp_path / "agents.db") as db:
            db.execute("UPDATE agents SET state = 'running', owner = '../self 1'")
        db.close()
        agent.model.script = [program("x = 1"), answer("x")]  # type: ignore[attr-defined]
        assert json.dumps(agent.resume(agent.runs()[0].run).answer) == "1"
