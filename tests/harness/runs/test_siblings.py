"""Runs whose calls are open at the same time: each is made once, and none is taken for another."""

import contextlib
import os
import select
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cellwright import Broker, PolicyError, Runs, Sandbox, SandboxStatus
from cellwright.benchmarks.replays import FORMS, expected_of, language_of
from cellwright.errors import RegistryError
from cellwright.harness.runs.durable_runs import CallState
from cellwright.harness.runs.recorder import CallsInProgress, LiveCall, RunRecorder
from cellwright.harness.runs.run_store import RunStore
from cellwright.harness.sandbox.parameters import CallArguments
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.approval import ApprovalRequest
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.runner.messages import Answer, Call
from tests.conftest import policy_named, soon

TO = {"type": "object", "properties": {"to": {"type": "string"}}}
ROUNDS, LANES = 12, 6
MADE: list[str] = []
DONE: dict[str, list[str]] = defaultdict(list)  # by run


def noting(name: str, *, risky: bool = False) -> Tool:
    def perform(arguments: dict[str, Any], caller: Caller) -> str:
        DONE[caller.id].append(f"{name} {arguments['to']}")
        MADE.append(f"{name} {arguments['to']}")
        return f"{name} {arguments['to']}"

    return Tool(ToolSpec(name=name, owner=ToolOwner.DEVELOPER, risky=risky, parameters=TO), perform)


_GATHER = (
    "import asyncio, tools\n"
    "async def main():\n    return await asyncio.gather({})\n"
    "asyncio.run(main())"
)


@pytest.fixture
def runs() -> Iterator[Runs]:
    with Runs() as opened:
        yield opened


@pytest.fixture
def box(runs: Runs) -> Iterator[Sandbox]:
    broker = Broker(Offer([noting("send", risky=True), noting("note")]), approve=runs.ask)
    with Sandbox(policy=policy_named("strict"), pool=2, tools=broker) as sandbox:
        yield sandbox


NODE = pytest.mark.needs("node")


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if language_of(form) == "python" else NODE) for form in FORMS],
)
def test_parallel_calls_in_every_form_are_made_once_and_diverge_never(
    runs: Runs, box: Sandbox, form: str
) -> None:
    def finished(_: int) -> None:
        attempt = runs.start(box, FORMS[form], language_of(form))
        for _ in range(20):
            if attempt.result.status is not SandboxStatus.PENDING:
                break
            own = [each for each in runs.pending() if each.run == attempt.run]
            assert all(runs.approve(each.approval) for each in own)
            attempt = runs.resume(box, attempt.run)
        assert attempt.result.value == expected_of(form), attempt.result.error
        assert sorted(DONE[attempt.run]) == expected_of(form)
        assert attempt.unused == ()

    with ThreadPoolExecutor(LANES) as lanes:
        assert len(list(lanes.map(finished, range(ROUNDS)))) == ROUNDS


def test_equal_calls_that_are_open_together_are_approved_one_by_one(
    runs: Runs, box: Sandbox
) -> None:
    MADE.clear()
    attempt = runs.start(box, FORMS["equal calls"])
    waiting = runs.pending()
    assert len(waiting) == 4
    assert runs.approve(waiting[0].approval)
    assert runs.resume(box, attempt.run).result.status is SandboxStatus.PENDING
    assert MADE == ["send a"]
    assert len(runs.pending()) == 3


def test_a_failed_run_is_resumed_and_shows_what_was_done(runs: Runs, box: Sandbox) -> None:
    code = "import tools\ntools.note('a')\ntools.send('b')\nraise ValueError('no')"
    attempt = runs.start(box, code)
    record = runs.show(attempt.run)
    assert [(each.tool, each.state) for each in record.calls] == [
        ("note", CallState.DONE),
        ("send", CallState.WAITING),
    ]
    assert record.actions == ("approve", "reject", "resume", "forget")
    runs.approve(runs.pending()[0].approval)
    assert runs.resume(box, attempt.run).result.status is SandboxStatus.FAILED
    MADE.clear()
    record = runs.show(attempt.run)
    assert (record.run.state, record.actions) == ("failed", ("resume", "forget"))
    assert "ValueError" in record.run.ending
    assert runs.resume(box, attempt.run).result.reason == "exception"
    assert MADE == []


def test_a_deadline_beside_a_call_that_waits_leaves_a_run_that_is_finished_later(
    runs: Runs,
) -> None:
    """A sibling outlives the program: the run still waits for approval, and gets its late answer."""
    go_on, made = threading.Event(), []

    def slow(_: dict[str, Any], __: Caller) -> str:
        made.append("slow")
        go_on.wait(60)
        return "late"

    tools = [
        noting("send", risky=True),
        Tool(ToolSpec(name="slow", owner=ToolOwner.DEVELOPER, parameters=TO), slow),
    ]
    broker = Broker(Offer(tools), approve=runs.ask)
    code = _GATHER.format("tools.slow('a'), tools.send('b')")
    with Sandbox(policy=policy_named("strict"), pool=0, tools=broker) as box:
        attempt = runs.start(box, code, timeout=1.0)
        assert attempt.result.status is SandboxStatus.PENDING
        # The two calls arrive in either order.
        assert {each.tool: each.state for each in runs.show(attempt.run).calls} == {
            "slow": CallState.UNKNOWN,
            "send": CallState.WAITING,
        }
        go_on.set()
        runs.approve(runs.pending()[0].approval)
        assert runs.resume(box, attempt.run).result.value == ["late", "send b"]
    assert made == ["slow"]


# without cells


class Attempted:
    """One attempt of a run in a store, whose calls are answered in threads of their own."""

    def __init__(self, store: RunStore, run: str, working: CallsInProgress | None = None) -> None:
        self.recorder = RunRecorder(store, store.get(run), working or CallsInProgress())
        self.told: list[Answer] = []
        self._threads: list[threading.Thread] = []

    def call(
        self, number: int, to: str, *, anew: Callable[[LiveCall], Answer] | None = None,
        alone: bool = False,
    ) -> None:  # fmt: skip
        def made(making: LiveCall) -> Answer:
            making.begin("digest")
            MADE.append(to)
            return Answer(number, b"1")

        def answer() -> None:
            call = Call(number, "send", b"{}", "<cell>:1", alone)
            self.recorder.answer(
                call, {"to": to}, anew or made, self.told.append, may_be_repeated=False
            )

        thread = threading.Thread(target=answer)
        thread.start()
        self._threads.append(thread)

    def end(self) -> None:
        self.recorder.close()
        for thread in self._threads:
            thread.join()

    def is_stopped(self) -> bool:
        return bool(select.select([self.recorder.stop], [], [], 0)[0])


@pytest.fixture
def store() -> Iterator[RunStore]:
    MADE.clear()
    opened = RunStore(None)
    yield opened
    opened.close()


def begun_with(store: RunStore, *made: str) -> str:
    """Return a run on whose record are the calls `made`."""
    run = store.begin(CallArguments(code=""))
    first = Attempted(store, run)
    for number, to in enumerate(made):
        first.call(number, to)
        assert soon(lambda: len(first.told) == number + 1)  # noqa: B023 - called at once
    first.end()
    store.end(run, "paused", attempt=store.get(run).attempt)
    store.take_up(run, abandoned=False)
    MADE.clear()
    return run


def test_a_new_call_waits_for_a_sibling_on_record_that_arrives_later(store: RunStore) -> None:
    again = Attempted(store, begun_with(store, "a"))
    again.call(1, "b")
    assert soon(lambda: again.recorder._held == 1)
    assert MADE == []
    again.call(2, "a")
    assert soon(lambda: len(again.told) == 2)
    assert MADE == ["b"]
    assert not again.is_stopped()
    again.end()


def test_a_call_in_the_place_of_one_that_was_made_stops_the_program_before_it_is_made(
    store: RunStore,
) -> None:
    again = Attempted(store, begun_with(store, "a"))
    again.call(1, "b", alone=True)
    assert soon(again.is_stopped)
    assert "the program calls send, the record has send" in again.recorder.diverged
    assert (MADE, again.told) == ([], [])
    again.end()


def test_answers_come_in_the_order_in_which_they_came_before(store: RunStore) -> None:
    again = Attempted(store, begun_with(store, "a", "b", "c"))
    for number, to in ((3, "c"), (2, "b"), (1, "a")):
        again.call(number, to)
    assert soon(lambda: len(again.told) == 3)
    assert [each.number for each in again.told] == [1, 2, 3]
    again.end()


def test_a_program_that_was_stopped_begins_no_call(store: RunStore) -> None:
    attempt = Attempted(store, store.begin(CallArguments(code="")))
    kinds = []

    def late(making: LiveCall) -> Answer:
        attempt.recorder.close()
        with pytest.raises(RegistryError, match="was stopped"):
            making.begin("digest")
        kinds.append("refused")
        return Answer(1, None, "failed", "not begun")

    attempt.call(1, "a", anew=late)
    assert soon(lambda: kinds == ["refused"])
    attempt.end()
    assert store.calls(attempt.recorder.run) == []


def test_a_run_that_was_resumed_elsewhere_begins_no_call_here(store: RunStore) -> None:
    run = store.begin(CallArguments(code=""))
    here = Attempted(store, run)
    store.take_up(run, abandoned=True)
    errors = []

    def late(making: LiveCall) -> Answer:
        with pytest.raises(RegistryError, match="resumed elsewhere") as caught:
            making.begin("digest")
        errors.append(caught.value)
        raise caught.value

    with pytest.raises(RegistryError):
        here.recorder.answer(
            Call(1, "send", b"{}"), {}, late, here.told.append, may_be_repeated=False
        )
    assert len(errors) == 1
    here.end()
    assert store.calls(run) == []


def test_a_resumed_run_waits_for_a_tool_that_outlived_its_program(store: RunStore) -> None:
    run, working, go_on = store.begin(CallArguments(code="")), CallsInProgress(), threading.Event()
    first = Attempted(store, run, working)

    def slow(making: LiveCall) -> Answer:
        making.begin("digest")
        MADE.append("a")
        go_on.wait(60)
        return Answer(1, b"1")

    first.call(1, "a", anew=slow)
    assert soon(lambda: MADE == ["a"])
    first.recorder.close()
    store.end(run, "failed", attempt=store.get(run).attempt)
    store.take_up(run, abandoned=False)
    again = Attempted(store, run, working)
    again.call(7, "a")
    go_on.set()
    assert soon(lambda: [each.number for each in again.told] == [7])
    assert MADE == ["a"]
    first.end()
    again.end()


def test_a_call_with_an_unknown_outcome_is_marked_by_a_person(store: RunStore) -> None:
    runs = Runs()
    runs._store = store
    run = store.begin(CallArguments(code=""))
    attempt = Attempted(store, run)

    def cut_off(making: LiveCall) -> Answer:
        making.begin("digest")
        raise RegistryError("killed here")

    for to in ("a", "b"):
        with pytest.raises(RegistryError, match="killed"):
            attempt.recorder.answer(
                Call(1, "send", b"{}", to), {"to": to}, cut_off, attempt.told.append,
                may_be_repeated=False,
            )  # fmt: skip
    attempt.end()
    store.end(run, "failed", attempt=store.get(run).attempt)
    first, second = runs.show(run).calls
    assert (first.state, second.state) == (CallState.UNKNOWN, CallState.UNKNOWN)
    assert "mark" in runs.show(run).actions
    runs.mark(run, first.number, made=True, value={"id": 7})
    runs.mark(run, second.number, made=False)
    assert [(each.state, each.answer) for each in runs.show(run).calls] == [
        (CallState.DONE, '{"id":7}'),
        (CallState.WAITING, ""),
    ]
    with pytest.raises(PolicyError, match="outcome is unknown"):
        runs.mark(run, first.number, made=False)
    with pytest.raises(PolicyError, match="value"):
        runs.mark(run, first.number, made=True, value=object())


OLD = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, state TEXT NOT NULL, began REAL NOT NULL, code TEXT NOT NULL,
    language TEXT NOT NULL, given BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE calls (
    number INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, turn INTEGER NOT NULL,
    site TEXT NOT NULL, digest TEXT NOT NULL, tool TEXT NOT NULL, begun INTEGER NOT NULL, answer BLOB
);
CREATE INDEX calls_of_run ON calls (run);
CREATE TABLE approvals (
    approval TEXT PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, tool TEXT NOT NULL,
    digest TEXT NOT NULL, arguments BLOB NOT NULL, description TEXT NOT NULL, reason TEXT NOT NULL,
    state TEXT NOT NULL, why TEXT NOT NULL DEFAULT '', asked REAL NOT NULL, expires REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX approvals_of_run ON approvals (run, digest);
CREATE TABLE grants (
    tool TEXT NOT NULL, version TEXT NOT NULL, left INTEGER NOT NULL, expires REAL NOT NULL
);
INSERT INTO runs VALUES ('r', 'paused', 1.0, '', 'python', x'80');
INSERT INTO calls VALUES (1, 'r', 0, '<cell>:1', 'd', 'send', 0, NULL);
INSERT INTO approvals VALUES ('a', 'r', 'send', 'd', '{"to":"ann"}', '', '', 'pending', '', 1.0, 9e9);
PRAGMA application_id = 0x63656C6C;
PRAGMA user_version = 2
"""


def test_files_of_versions_before_are_upgraded(tmp_path: Any) -> None:
    path = tmp_path / "runs.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(OLD)
    third = tmp_path / "third.db"
    Runs(str(third)).close()
    with contextlib.closing(sqlite3.connect(third)) as db:
        db.executescript("ALTER TABLE calls DROP COLUMN tool_digest; PRAGMA user_version = 3")
        db.execute("INSERT INTO runs (run, state, began, code, language, given) "
                   "VALUES ('r', 'failed', 1.0, '', 'python', x'80')")  # fmt: skip
        db.execute("INSERT INTO calls (run, seen, site, digest, tool, begun) "
                   "VALUES ('r', 0, '', 'd', 'send', 1)")  # fmt: skip
        db.commit()
    with Runs(str(third), must_exist=True) as runs:
        assert [(each.tool, each.tool_digest) for each in runs.calls("r")] == [("send", "")]
    for _ in range(2):
        with Runs(str(path), must_exist=True) as runs:
            (waiting,) = runs.pending()
            assert waiting.arguments == {"to": "ann"}
            assert [each.tool for each in runs.show("r").calls] == ["send"]


def test_a_file_that_must_exist_is_not_made(tmp_path: Any) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path in (tmp_path / "typo.db", empty):
        with pytest.raises(RegistryError):
            Runs(str(path), must_exist=True)
    assert os.listdir(tmp_path) == ["empty"]
    assert empty.stat().st_size == 0


@pytest.mark.parametrize("state", ["failed", "completed", "paused", "diverged"])
def test_an_attempt_that_was_replaced_does_not_end_the_run(state: str) -> None:
    with contextlib.closing(RunStore(None)) as store:
        run = store.begin(CallArguments(code="1"))
        first = store.get(run).attempt
        store.take_up(run, abandoned=True)
        second = store.get(run).attempt
        asked = ApprovalRequest("send", "", {"to": "ann"}, "me", "risky", run, "1", "call")
        assert store.use(asked, 2e10)[0] == "pending"
        store.end(run, state, attempt=first)
        assert [each.state for each in store.kept(run)] == ["running"]
        assert len(store.pending()) == 1
        with pytest.raises(PolicyError, match="running"):
            store.take_up(run, abandoned=False)
        store.end(run, state, attempt=second)
        assert [each.state for each in store.kept(run)] == [state]
