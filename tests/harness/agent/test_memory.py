"""Memory of an agent between runs, and the choice among plans by it."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.agent import AgentMemory, Planner
from cellwright.harness.agent.agent_memory import MOST_EPISODES, MOST_FACTS, Recipe, UsedTool
from cellwright.harness.agent.planner import AgentPlan, PlanStep
from cellwright.harness.agent.prompts import Message, ModelReply
from cellwright.harness.schemas.spec import ToolSpec


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[AgentMemory]:
    with AgentMemory(tmp_path / "memory.db") as opened:
        yield opened


def used(*names: str, digest: str = "d") -> list[UsedTool]:
    return [UsedTool(name, digest) for name in names]


def test_tools_that_solved_a_task_are_recalled_for_a_similar_one(memory: AgentMemory) -> None:
    memory.note_run(
        "1", "Validate the e-mail address of Ann", "completed", 3, used("email_validator")
    )
    memory.note_run("2", "Draw a chart of sales", "completed", 3, used("chart"))
    memory.note_run("3", "Validate a postal address", "failed", 3, used("guess"))
    assert memory.recipes_for("Please validate an e-mail address") == (
        Recipe("Validate the e-mail address of Ann", ("email_validator",), 1, 1),
    )
    assert memory.recipes_for("Bake bread") == ()


def test_a_run_that_is_noted_twice_counts_once(memory: AgentMemory) -> None:
    for _ in range(3):
        memory.note_run("1", "task", "completed", 3, used("t", "t"))
    memory.note_run("2", "task", "failed", 3, used("t"))
    assert memory.recipes() == (Recipe("task", ("t",), 2, 1),)
    assert memory.successes_of(UsedTool("t", "d")) == (1, 2)


def test_a_merged_tool_is_named_in_recipes_but_inherits_no_trust(memory: AgentMemory) -> None:
    memory.note_run("1", "task", "completed", 3, used("old", "other"))
    memory.note_run("2", "task", "completed", 3, used("new", "other"))
    memory.note_run("3", "else", "failed", 3, used("old"))
    memory.replace_tool("old", "new")
    assert set(memory.recipes()) == {
        Recipe("task", ("new", "other"), 2, 2), Recipe("else", ("new",), 1, 0),
    }  # fmt: skip
    assert memory.successes_of(UsedTool("new", "d")) == (1, 1)


def test_runs_of_other_source_do_not_count(memory: AgentMemory) -> None:
    memory.note_run("1", "task", "completed", 3, used("t", digest="old"))
    memory.note_run("2", "task", "completed", 3, used("t", digest="new"))
    memory.note_run("3", "task", "completed", 3, [*used("t", digest="old"), *used("t")])
    assert memory.successes_of(UsedTool("t", "old")) == (2, 2)
    assert memory.successes_of(UsedTool("t", "new")) == (1, 1)
    assert memory.recipes() == (Recipe("task", ("t",), 3, 3),)


def test_counts_by_name_alone_end_when_an_older_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    with AgentMemory(path) as memory:
        memory.note_run("1", "task", "completed", 3, used("t"))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(
            "DROP TABLE tool_runs; CREATE TABLE tool_runs (tool TEXT NOT NULL, run TEXT NOT NULL, "
            "well INTEGER NOT NULL, PRIMARY KEY (tool, run)) WITHOUT ROWID; "
            "INSERT INTO tool_runs VALUES ('t', '1', 1); PRAGMA user_version = 1"
        )
    with AgentMemory(path) as memory:
        assert memory.successes_of(UsedTool("t", "d")) == (0, 0)
        assert memory.recipes() == (Recipe("task", ("t",), 1, 1),)


def test_facts_are_kept_by_a_person_and_recalled_by_their_words(memory: AgentMemory) -> None:
    kept = memory.keep_fact("The company's sales year begins in April.")
    assert memory.keep_fact("Ann is\n\nthe administrator.").text == "Ann is the administrator."
    assert memory.facts_for("When does the sales year begin?") == (kept,)
    assert memory.forget_fact(kept.id)
    assert not memory.forget_fact(kept.id)
    assert memory.facts_for("When does the sales year begin?") == ()


@pytest.mark.parametrize("text", ["", "  ", "\u202e\u200b", "x" * 1001])
def test_a_fact_must_be_a_visible_text(memory: AgentMemory, text: str) -> None:
    with pytest.raises(PolicyError):
        memory.keep_fact(text)


def test_memory_has_an_end(memory: AgentMemory) -> None:
    for number in range(MOST_FACTS):
        memory.keep_fact(f"fact {number}")
    with pytest.raises(PolicyError, match="200"):
        memory.keep_fact("one more")
    for number in range(MOST_EPISODES + 5):
        memory.note_run(str(number), f"task {number}", "completed", 1, used("t"))
    assert len(memory.episodes()) == MOST_EPISODES
    assert memory.episodes()[0].run == "5"
    assert len(memory.recipes()) <= 1000


def test_what_was_not_used_is_forgotten(memory: AgentMemory) -> None:
    memory.note_run("1", "task", "completed", 3, used("t"))
    assert memory.expire(1.0) == 0
    assert memory.expire(-1.0) == 2
    assert memory.recipes() == ()


def plan(*steps: tuple[str, str | None]) -> AgentPlan:
    return AgentPlan(tuple(PlanStep(*each) for each in steps))


SPECS = {name: ToolSpec(name=name, risky=name == "risky") for name in ("good", "bad", "risky")}


def tool_of(name: str) -> UsedTool:
    return UsedTool(name, SPECS[name].digest)


def test_a_plan_is_chosen_by_the_history_of_its_tools_its_length_and_its_risk(
    memory: AgentMemory,
) -> None:
    for number in range(4):
        memory.note_run(f"g{number}", "t", "completed", 1, [tool_of("good")])
        memory.note_run(f"b{number}", "t", "failed", 1, [tool_of("bad")])

    def score(*steps: tuple[str, str | None]) -> float:
        return Planner().score(plan(*steps), SPECS.get, memory).score

    assert score(("x", "good")) > score(("x", "bad"))
    assert score(("x", "good")) > score(("x", "good"), ("y", None))
    assert score(("x", None)) > score(("x", "missing"))
    assert score(("x", "bad")) > score(("x", "risky")) - 1
    scored = Planner().score(plan(("x", "risky"), ("y", "gone")), SPECS.get, memory)
    assert scored.reasons == ("risky needs approval", "gone is missing")
    recipe = [Recipe("t", ("bad",), 1, 1)]
    assert Planner().score(plan(("x", "bad")), SPECS.get, memory, recipe).score > score(
        ("x", "bad")
    )


class OneReply:
    name = "m"
    context_tokens = 8000

    def __init__(self, text: str) -> None:
        self.text = text

    def ask(self, messages: list[Message], *_: object, **about: object) -> ModelReply:
        self.asked = messages, about
        return ModelReply(text=self.text)


PLANS = {"plans": [{"steps": [{"what": "guess", "tool": "bad"}, {"what": "more", "tool": None}]},
                   {"steps": [{"what": "call", "tool": "good"}]}]}  # fmt: skip


@pytest.mark.parametrize("text", [json.dumps(PLANS), f"```json\n{json.dumps(PLANS)}\n```"])
def test_the_best_of_the_proposed_plans_is_taken(memory: AgentMemory, text: str) -> None:
    memory.note_run("1", "t", "failed", 1, [tool_of("bad")])
    model = OneReply(text)
    best = Planner().plan(model, "task", list(SPECS.values()), memory, failure="it broke")  # type: ignore[arg-type]
    assert best is not None
    assert best.text() == "1. call (tool: good)"
    messages, about = model.asked
    assert "it broke" in messages[1].text
    assert about["schema"]


@pytest.mark.parametrize(
    "text", ["", "no", "[]", '{"plans": []}', '{"plans": [{"steps": []}]}', "{" * 9999]
)
def test_without_a_usable_plan_there_is_none(memory: AgentMemory, text: str) -> None:
    assert Planner().plan(OneReply(text), "task", [], memory) is None  # type: ignore[arg-type]
