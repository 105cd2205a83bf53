"""Runs that wait for a person and go on where they were, in another process if need be."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import (
    AuditLog,
    Broker,
    FilePermission,
    PermissionLevel,
    PermissionSet,
    PolicyError,
    Sandbox,
    SandboxStatus,
    ToolFactory,
)
from cellwright.errors import ApprovalRequired, RegistryError
from cellwright.harness.runs.durable_runs import Runs
from cellwright.harness.runs.recorder import CallsInProgress, LiveCall, RunRecorder
from cellwright.harness.runs.replay import RecordedCall, Replay
from cellwright.harness.runs.run_store import RunStore
from cellwright.harness.sandbox.parameters import CallArguments
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec, grants_of
from cellwright.harness.tools.approval import ApprovalRequest
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.policies.tool_rules import Tools
from cellwright.results import Executable
from cellwright.runner.messages import Answer, Call
from tests.conftest import policy_named

ANY = {"type": "object", "properties": {"to": {}, "text": {}}}
MADE: list[tuple[str, Any]] = []
LOCK = threading.Lock()


def noted(name: str, value: Any = None, **about: Any) -> Tool:
    """Return a tool that notes each time that it really is called."""

    def perform(arguments: dict[str, Any], _: Caller) -> Any:
        with LOCK:
            MADE.append((name, arguments.get("to")))
            return len(MADE) if value is None else value

    return Tool(ToolSpec(name=name, owner=ToolOwner.DEVELOPER, parameters=ANY, **about), perform)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    MADE.clear()
    with Runs(str(tmp_path / "runs.db")) as opened:
        yield opened


def sandbox(runs: Runs, **settings: Any) -> Sandbox:
    tools = [noted("look"), noted("send", "sent", risky=True, description="Send a letter.")]
    broker = Broker(Offer(tools), approve=runs.ask, audit=settings.get("audit"))
    return Sandbox(policy=policy_named("strict"), tools=broker, pool=0, **settings)


LETTER = "import tools\nseen = tools.look(to='x')\nanswer = tools.send(to='ann', text='hello')\n[seen, answer, tools.look(to='y')]"


def test_a_run_waits_and_goes_on_where_it_was(runs: Runs) -> None:
    with sandbox(runs) as box:
        first = runs.start(box, LETTER)
        assert (first.result.status, first.result.reason) == (SandboxStatus.PENDING, "approval")
        assert first.result.error == "waits for approval of send"
        (waiting,) = runs.pending()
        assert (waiting.tool, waiting.arguments) == ("send", {"to": "ann", "text": "hello"})
        assert (waiting.run, waiting.description) == (first.run, "Send a letter.")
        assert MADE == [("look", "x")]
        assert runs.approve(waiting.approval)
        second = runs.resume(box, first.run)
    assert second.result.value == [1, "sent", 3]
    assert second.unused == ()
    assert MADE == [("look", "x"), ("send", "ann"), ("look", "y")]
    assert runs.pending() == ()


def test_a_run_is_not_resumed_without_the_tools_that_it_called(runs: Runs) -> None:
    with sandbox(runs) as box:
        waiting = runs.start(box, LETTER)
    before = runs.show(waiting.run)
    offers: list[list[Tool]] = [[], [noted("look")]]
    for offer, missing in zip(offers, ("look, send", "send"), strict=True):
        broker = Broker(Offer(offer), approve=runs.ask)
        with (
            Sandbox(policy=policy_named("strict"), tools=broker, pool=0) as box,
            pytest.raises(PolicyError, match=f"it called {missing}, which the sandbox does not"),
        ):
            runs.resume(box, waiting.run)
        assert runs.show(waiting.run) == before
    with Sandbox(policy=policy_named("strict"), pool=0) as box:  # no tools at all
        assert not box.has_tool("look")
        with pytest.raises(PolicyError, match="look, send"):
            runs.resume(box, waiting.run)
        attempt = runs.resume(box, waiting.run, allow_divergence=True)
    assert attempt.result.reason == "exception"


def test_a_call_of_a_tool_that_never_existed_keeps_no_run_from_being_resumed(runs: Runs) -> None:
    code = "try: call_tool('nobody', {})\nexcept Exception as error: print(error)\n" + LETTER
    with sandbox(runs) as box:
        waiting = runs.start(box, code)
        assert [each.tool for each in runs.show(waiting.run).calls] == ["nobody", "look", "send"]
        (asked,) = runs.pending()
        runs.approve(asked.approval)
        assert runs.resume(box, waiting.run).result.ok


def test_a_word_is_for_one_call_with_just_these_arguments(runs: Runs) -> None:
    code = "import tools\n[tools.send(to=name) for name in ('ann', 'ann', 'bob')]"
    with sandbox(runs) as box:
        attempt = runs.start(box, code)
        for expected in ("ann", "ann", "bob"):
            (waiting,) = runs.pending()
            assert waiting.arguments == {"to": expected}
            assert runs.approve(waiting.approval)
            assert not runs.approve(waiting.approval)
            attempt = runs.resume(box, attempt.run)
    assert attempt.result.value == ["sent"] * 3
    assert MADE == [("send", "ann"), ("send", "ann"), ("send", "bob")]


def test_a_word_is_for_the_version_that_was_asked_about(runs: Runs) -> None:
    source = "def send(to: str) -> str:\n    return f'{word} {{to}}'"
    with ToolFactory(approve=runs.ask) as factory, Sandbox(tools=factory.broker, pool=0) as box:
        factory.create_tool("send", "Send it", source.format(word="kindly"), risky=True)
        attempt = runs.start(box, "import tools\ntools.send(to='ann')")
        runs.approve(runs.pending()[0].approval)
        factory.create_tool("send", "Send it", source.format(word="rudely"), risky=True)
        attempt = runs.resume(box, attempt.run)
        assert attempt.result.status is SandboxStatus.PENDING
        runs.approve(runs.pending()[0].approval)
        assert runs.resume(box, attempt.run).result.value == "rudely ann"


def test_a_rejected_call_is_an_exception_in_the_program(runs: Runs) -> None:
    code = "import tools\ntry:\n    said = tools.send(to='ann')\nexcept tools.ToolError as error:\n    said = [error.kind, str(error)]\nsaid"
    with sandbox(runs) as box:
        attempt = runs.start(box, code)
        assert runs.reject(runs.pending()[0].approval, "not today")
        assert runs.resume(box, attempt.run).result.value == [
            "not_approved",
            "send was rejected: not today",
        ]
    assert MADE == []


def test_a_call_without_a_decision_in_time_is_refused(tmp_path: Path) -> None:
    with Runs(str(tmp_path / "runs.db"), wait_seconds=-1) as runs, sandbox(runs) as box:
        attempt = runs.start(box, "import tools\ntools.send(to='ann')")
        assert runs.pending() == ()
        result = runs.resume(box, attempt.run).result
    assert "send was expired: no decision in time" in str(result.error)


def test_a_grant_approves_so_many_calls_for_so_long(runs: Runs) -> None:
    code = "import tools\n[tools.send(to=n) for n in range(3)]"
    send = noted("send").spec
    runs.grant(send, count=2)
    runs.grant(send, seconds=-1)
    with sandbox(runs) as box:
        attempt = runs.start(box, code)
        assert attempt.result.status is SandboxStatus.PENDING
        assert [each.arguments for each in runs.pending()] == [{"to": 2}]
    assert MADE == [("send", 0), ("send", 1)]


def test_a_grant_is_for_the_version_that_was_looked_at(runs: Runs) -> None:
    source = "def send(to: str) -> str:\n    return f'{word} {{to}}'"
    with ToolFactory(approve=runs.ask) as factory, Sandbox(tools=factory.broker, pool=0) as box:
        kind = factory.create_tool("send", "Send", source.format(word="kindly"), risky=True)
        runs.grant(kind, count=2)
        code = "import tools\ntools.send(to='ann')"
        assert runs.start(box, code).result.value == "kindly ann"
        factory.create_tool("send", "Send", source.format(word="rudely"), risky=True)
        assert runs.start(box, code).result.status is SandboxStatus.PENDING
        older = "call_tool('send@1', {'to': 'ann'})"
        assert runs.start(box, older).result.value == "kindly ann"


def test_a_large_integer_waits_like_any_other(runs: Runs) -> None:
    with sandbox(runs) as box:
        attempt = runs.start(box, "import tools\ntools.send(to=2**70)")
        (waiting,) = runs.pending()
        assert waiting.arguments == {"to": 2**70}
        assert runs.approve(waiting.approval)
        assert runs.resume(box, attempt.run).result.value == "sent"
    assert MADE == [("send", 2**70)]


def test_calls_at_the_same_time_find_their_own_answers_again(runs: Runs) -> None:
    code = (
        "import asyncio, tools\n"
        "async def one(n): return [n, await tools.look(to=n)]\n"
        "async def main():\n"
        "    seen = await asyncio.gather(*(one(n) for n in range(8)))\n"
        "    return [seen, await tools.send(to='ann')]\n"
        "asyncio.run(main())"
    )
    with sandbox(runs) as box:
        attempt = runs.start(box, code)
        made = {to: number for number, (_, to) in enumerate(MADE, 1)}
        runs.approve(runs.pending()[0].approval)
        result = runs.resume(box, attempt.run).result
    assert result.value == [[[n, made[n]] for n in range(8)], "sent"]
    assert len(MADE) == 9


def test_a_program_that_goes_another_way_is_found_out(runs: Runs) -> None:
    code = "import os, tools\ntools.look(to=os.urandom(8).hex())\ntools.send(to='ann')"
    with sandbox(runs) as box:
        attempt = runs.start(box, code)
        runs.approve(runs.pending()[0].approval)
        second = runs.resume(box, attempt.run)
        assert "the program calls look, the record has look" in str(second.result.error)
    assert len(MADE) == 1
    with sandbox(runs) as box:
        code = (
            "import os, tools\nif os.urandom(1)[0] > LIMIT:\n    tools.look()\ntools.send(to='ann')"
        )
        always, never = code.replace("LIMIT", "-1"), code.replace("LIMIT", "255")
        attempt = runs.start(box, always)
        runs.approve(next(each for each in runs.pending() if each.run == attempt.run).approval)
        with runs._store._database.writing("change") as db:  # as if it had gone the other way
            db.execute("UPDATE runs SET code = ? WHERE run = ?", (never, attempt.run))
        assert runs.resume(box, attempt.run).unused == ("<cell>:3: look",)


def test_a_failed_call_fails_the_same_way_again(runs: Runs) -> None:
    code = "import tools\ntry: tools.look(7, 8, 9)\nexcept TypeError: pass\ntry: call_tool('none', {})\nexcept tools.ToolError as error: kind = error.kind\n[kind, tools.send(to='ann')]"
    with sandbox(runs) as box:
        attempt = runs.start(box, code)
        runs.approve(runs.pending()[0].approval)
        assert runs.resume(box, attempt.run).result.value == ["not_found", "sent"]


def test_only_a_run_that_waits_is_resumed(runs: Runs) -> None:
    with sandbox(runs) as box:
        attempt = runs.start(box, "1")
        assert attempt.result.value == 1
        with pytest.raises(PolicyError, match="it is completed"):
            runs.resume(box, attempt.run)
        with pytest.raises(PolicyError, match="no run"):
            runs.resume(box, "nonsense")
        with pytest.raises(PolicyError, match="cannot be stored"):
            runs.start(box, "1", inputs={"x": object()})
        with pytest.raises(TypeError, match="on_output"):
            runs.start(box, "1", on_output=print)  # type: ignore[call-arg]


def test_a_resumed_program_has_the_files_that_it_may_execute(runs: Runs) -> None:
    code = "import os, tools\ntools.send(to='ann')\n[bool(os.stat(name).st_mode & 0o100) for name in 'ab']"
    with sandbox(runs) as box:
        attempt = runs.start(box, code, files={"a": Executable(b"#!/bin/sh"), "b": b"data"})
        runs.approve(runs.pending()[0].approval)
        assert runs.resume(box, attempt.run).result.value == [True, False]


def test_without_a_run_there_is_nothing_to_wait_in(runs: Runs) -> None:
    with sandbox(runs) as box:
        result = box.execute("import tools\ntools.send(to='ann')")
    assert "must be approved, and this call cannot wait" in str(result.error)
    assert runs.pending() == ()


ELSEWHERE = """
import sys
from cellwright.harness.runs.durable_runs import Runs
with Runs(sys.argv[1]) as runs:
    for waiting in runs.pending():
        print(waiting.tool, waiting.arguments, runs.approve(waiting.approval))
"""


def test_a_run_is_approved_in_another_process(runs: Runs, tmp_path: Path) -> None:
    with sandbox(runs) as box:
        attempt = runs.start(box, LETTER)
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(tmp_path / "runs.db")],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == "send {'to': 'ann', 'text': 'hello'} True\n"
        assert runs.resume(box, attempt.run).result.value == [1, "sent", 3]


DIES = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from tests.harness.runs.test_runs import Runs, noted, sandbox
from cellwright import Broker, Sandbox
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Tool
runs = Runs(sys.argv[1])
die = noted("die")
die = Tool(die.spec, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
box = Sandbox(policy="strict", pool=0, tools=Broker(Offer([noted("look"), die])))
runs.start(box, CODE)
"""
CODE = """
import tools
said = [tools.look()]
try: said.append(tools.die())
except tools.ToolError as error: said.append(error.kind)
said + [tools.look()]
"""


@pytest.mark.parametrize(("idempotent", "told"), [(True, "lived"), (False, "unknown")])
def test_a_call_in_which_the_process_was_killed_is_made_again_only_if_that_does_no_harm(
    runs: Runs, tmp_path: Path, idempotent: bool, told: str
) -> None:
    root = str(Path(__file__).parents[3])
    ended = subprocess.run(
        [sys.executable, "-c", f"CODE = {CODE!r}\n{DIES}", str(tmp_path / "runs.db"), root],
        capture_output=True, timeout=60, check=False, env=os.environ | {"PYTHONPATH": root},
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with runs._store._database.reading() as db:
        (run,) = db.execute("SELECT run FROM runs").fetchone()
    tools = Broker(Offer([noted("look"), noted("die", "lived", idempotent=idempotent)]))
    with Sandbox(policy=policy_named("strict"), pool=0, tools=tools) as box:
        with pytest.raises(PolicyError, match="it is running"):
            runs.resume(box, run)
        value = runs.resume(box, run, abandoned=True).result.value
    assert value == [1, told, 2 if idempotent else 1]
    assert [name for name, _ in MADE] == (["die", "look"] if idempotent else ["look"])


ONCE = """
import tools
def kind_of(call):
    try: return call()[:4]
    except tools.ToolError as error: return error.kind
[kind_of(tools.fill), kind_of(tools.send)]
"""


def test_a_call_whose_answer_cannot_be_recorded_is_not_made_twice(runs: Runs) -> None:
    """The file may not grow any more: an answer that needs pages of its own cannot be written."""
    db = runs._store._database._db

    def fill(*_: Any) -> str:
        MADE.append(("fill", None))
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        return "x" * 60_000

    broker = Broker(Offer([Tool(noted("fill").spec, fill), noted("send", "sent")]))
    with Sandbox(policy=policy_named("strict"), pool=0, tools=broker) as box:
        attempt = runs.start(box, ONCE)
        assert attempt.result.value == ["unknown", "sent"]
        db.execute("PRAGMA max_page_count = 100000")
        with runs._store._database.writing("change") as opened:  # as if it had been killed then
            opened.execute("UPDATE runs SET state = 'running'")
        again = runs.resume(box, attempt.run, abandoned=True).result
    assert again.value == ["unknown", "sent"]
    assert [name for name, _ in MADE] == ["fill", "send"]


def test_a_call_that_cannot_be_announced_is_not_made(runs: Runs) -> None:
    db = runs._store._database._db

    def fill(*_: Any) -> str:
        db.execute("PRAGMA query_only = ON")
        return "full"

    broker = Broker(Offer([Tool(noted("fill").spec, fill), noted("send", "sent")]))
    with Sandbox(policy=policy_named("strict"), pool=0, tools=broker) as box:
        with pytest.raises(RegistryError, match="readonly"):
            runs.start(box, ONCE)
        assert MADE == []
        db.execute("PRAGMA query_only = OFF")
        (run,) = db.execute("SELECT run FROM runs").fetchone()
        result = runs.resume(box, run, abandoned=True).result
    assert result.value == ["unknown", "sent"]
    assert [name for name, _ in MADE] == ["send"]


def test_made_tools_that_change_nothing_may_be_repeated_and_others_if_they_say_so() -> None:
    made = ToolSpec(name="made")
    writes = PermissionSet([FilePermission(level=PermissionLevel.WRITE, allowed_paths=("/x/*",))])
    assert made.may_be_repeated
    assert not replace(made, calls=("send",)).may_be_repeated
    assert not replace(made, grants=grants_of(writes)).may_be_repeated
    assert not noted("send").spec.may_be_repeated
    assert noted("send", idempotent=True).spec.may_be_repeated


def test_what_asks_when_its_run_is_over_is_refused_and_writes_to_nothing(runs: Runs) -> None:
    over, refused = threading.Event(), threading.Event()

    def late(asked: ApprovalRequest) -> bool:
        over.wait(60)
        try:
            return runs.ask(asked)
        except ApprovalRequired as error:
            if "its run is over" in str(error):
                refused.set()
            raise

    broker = Broker(Offer([noted("send", risky=True)]), approve=late)
    with Sandbox(policy=policy_named("strict"), tools=broker, pool=0) as box:
        # The call is under way by then, on a busy machine too.
        attempt = runs.start(box, "import tools\ntools.send(to='ann')", timeout=2)
        assert attempt.result.status is SandboxStatus.TIMEOUT
        over.set()
        assert refused.wait(60)
    assert runs.pending() == ()
    assert MADE == []


def test_a_pause_that_comes_too_late_touches_no_file_of_others() -> None:
    store = RunStore(None)
    recorder = RunRecorder(store, store.get(store.begin(CallArguments(code=""))), CallsInProgress())
    number = recorder.stop
    told: list[Answer] = []

    def paused(_: LiveCall) -> Answer:
        recorder.close()
        assert os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) == number
        return Answer(1, None, "paused")

    call = Call(1, "send", b"{}", alone=True)
    recorder.answer(call, {}, paused, told.append, may_be_repeated=False)
    assert told == []
    other = number
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
    os.close(other)
    store.close()


def test_nothing_waits_for_a_run_that_is_over() -> None:
    store = RunStore(None)
    run = store.begin(CallArguments(code=""))
    store.use(ApprovalRequest("send", "", {}, "", "", run), 2**40)
    assert len(store.pending()) == 1
    store.end(run, "failed", attempt=store.get(run).attempt)
    assert store.pending() == ()
    store.close()


def test_a_tool_that_starts_runs_is_as_deep_as_it_is(runs: Runs) -> None:
    deep = []

    def again(_: dict[str, Any], caller: Caller) -> Any:
        deep.append(caller.depth)
        if len(deep) > 6:
            return "no end"
        return runs.start(box, "import tools\ntools.again()").result.error

    tool = Tool(ToolSpec(name="again", owner=ToolOwner.DEVELOPER), again)
    with Sandbox(policy=policy_named("strict"), tools=[tool], pool=0) as box:
        box.execute("import tools\ntools.again()")
    assert deep == [1, 2, 3, 4]


def test_a_long_result_is_read_on_after_waiting(runs: Runs) -> None:
    long = noted("look", "x" * 100_000)
    tools = Offer([long, noted("send", "sent", risky=True)])
    broker = Broker(tools, approve=runs.ask, rules=Tools(result_bytes=65_536))
    code = (
        "import tools\ntry:\n    tools.look()\nexcept tools.ToolError as error:\n"
        "    name = str(error).split(\"'\")[1]\ntools.send(to='ann')\n"
        "tools.results.read(result_id=name, characters=3)['text']"
    )
    with Sandbox(policy=policy_named("strict"), tools=broker, pool=0) as box:
        attempt = runs.start(box, code)
        runs.approve(runs.pending()[0].approval)
        assert runs.resume(box, attempt.run).result.value == '"xx'


def test_an_argument_that_cannot_be_kept_is_refused(runs: Runs) -> None:
    with sandbox(runs) as box, pytest.raises(PolicyError, match="stored"):
        runs.start(box, "1", inputs={"n": 2**70})


def test_waiting_is_told_to_the_trail(runs: Runs) -> None:
    trail = AuditLog()
    with sandbox(runs, audit=trail) as box:
        attempt = runs.start(box, "import tools\ntools.send(to='ann')")
        runs.approve(runs.pending()[0].approval)
        runs.resume(box, attempt.run)
    actions = [entry.action for entry in trail.get_entries(category="tool")]
    assert actions == ["waiting", "approved", "call", "returned"]


def test_a_file_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    import sqlite3

    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    text = tmp_path / "text"
    text.write_text("hello" * 1000)
    for path in (other, text, tmp_path, tmp_path / "no" / "where"):
        with pytest.raises(RegistryError):
            Runs(str(path))
    assert text.read_text() == "hello" * 1000


def test_the_file_is_its_owners_alone(runs: Runs, tmp_path: Path) -> None:
    assert (tmp_path / "runs.db").stat().st_mode & 0o777 == 0o600


# replay, without cells


def recorded(*calls: tuple[str, str]) -> Replay:
    return Replay(
        RecordedCall(number, site, digest, "tool", True, Answer(0, str(number).encode()))
        for number, (site, digest) in enumerate(calls)
    )


def test_equal_calls_get_their_answers_in_turn() -> None:
    replay = recorded(("a:1", "x"), ("a:1", "y"), ("a:1", "x"))
    taken = [replay.take("a:1", digest) for digest in ("x", "x", "y")]
    assert [each.number if each else None for each in taken] == [0, 2, 1]
    assert replay.take("a:1", "x") is None


def test_another_call_at_the_same_place_has_a_missing_one_in_its_way_and_elsewhere_none() -> None:
    replay = recorded(("a:1", "x"))
    assert replay.take("a:1", "z") is None
    assert [each.number for each in replay.conflicts("a:1")] == [0]
    assert replay.conflicts("a:2") == []
    assert replay.left() == ("a:1: tool",)


def test_an_answer_can_be_given_once_all_that_arrived_before_it_has_arrived_again() -> None:
    replay = Replay(
        RecordedCall(number, "a:1", digest, "tool", True, None, after=after)
        for number, (digest, after) in enumerate([("x", 0), ("y", 0), ("z", 1)])
    )
    seen = [replay.releasable()]
    for digest in ("z", "y", "x"):
        replay.take("a:1", digest)
        seen.append(replay.releasable())
    assert seen == [0, 0, 0, float("inf")]
