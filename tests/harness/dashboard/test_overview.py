"""The parts of an overview, from trails, durable runs, a registry and an agent's memory."""

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from cellwright import AuditLog, Broker, Runs, Sandbox, ToolFactory, ToolRegistry
from cellwright.harness.agent.agent_memory import AgentMemory, UsedTool
from cellwright.harness.cli import main as cli
from cellwright.harness.dashboard import dashboard_page
from cellwright.harness.dashboard import overview as overview_sources
from cellwright.harness.dashboard.dashboard_page import LiveTimeline, Timeline
from cellwright.harness.dashboard.overview import Overview
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Tool
from cellwright.runner.audit.record import AuditEntry
from cellwright.runner.audit.verification import read
from tests.browser import Browser
from tests.conftest import policy_named

SEND = ToolSpec(name="send", owner=ToolOwner.DEVELOPER, risky=True, parameters={"type": "object"})


class Written(NamedTuple):
    """The files that programs left."""

    trail: Path
    runs: Path
    registry: Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Files of programs that were refused, called tools, had a session and wait for a person."""
    directory = tmp_path_factory.mktemp("written")
    files = Written(directory / "trail.jsonl", directory / "runs.db", directory / "registry.db")
    policy = policy_named("strict")
    with (
        AuditLog(path=files.trail) as log, Runs(files.runs) as runs,
        ToolRegistry(files.registry) as registry, Sandbox(policy=policy, pool=0, audit=log) as box,
        ToolFactory(box, registry) as factory,
        Sandbox(policy=policy, pool=0, audit=log, tools=factory.broker) as sandbox,
    ):  # fmt: skip
        factory.create_tool(
            "halve", "Halve a number.", "def halve(n: int) -> float:\n    return n / 2"
        )
        sandbox.execute("import tools\ntools.halve(n=4)\nopen('/etc/shadow')")
        with sandbox.session() as session:
            session.execute("1")
        broker = Broker(Offer([Tool(SEND, lambda *_: "sent")]), approve=runs.ask)
        with Sandbox(policy=policy, pool=0, audit=log, tools=broker) as asking:
            runs.start(asking, "import tools\ntools.send(to='ann\\u202ebob')")
    return files


def _overview(path: Path) -> Overview:
    overview = Overview(source="trail", name="", made=0.0)
    Timeline().add_all(read(path)).fill(overview)
    return overview


def test_a_run_has_its_phases_calls_and_violations_in_order(written: Written) -> None:
    overview = _overview(written.trail)
    (run,) = [each for each in overview.runs if each.state == "error"]
    call, inner, violation, end = run.events
    assert (call.category, call.action, call.target, call.ended) == (
        "tool",
        "call",
        "halve",
        "returned",
    )
    assert call.seconds
    assert call.seconds > 0
    assert (inner.category, inner.action) == ("execution", "start")
    (caused,) = [each for each in overview.runs if each.parent == run.id]
    assert inner.about["execution_id"] == caused.id
    assert (violation.action, violation.allowed) == ("openat", False)
    assert violation.about["rule"] == "mount_ns: not shown"
    assert (end.action, run.reason, run.exit_code) == ("error", "exception", 1)
    assert run.phases["run"] > 0
    assert 0 < sum(run.phases.values()) <= (run.wall_seconds or 0) + 0.01
    assert [each.at for each in run.events] == sorted(each.at for each in run.events)


def test_a_session_has_its_runs_and_its_end(written: Written) -> None:
    (session,) = _overview(written.trail).sessions
    assert (session.runs, session.ending) == (1, "closed: it was closed")
    assert session.ended


def test_calls_are_counted_by_tool(written: Written) -> None:
    counts = {each.name: each for each in _overview(written.trail).called_tools}
    assert (counts["halve"].calls, counts["halve"].failed, counts["send"].waited) == (1, 0, 1)


def test_durable_runs_have_their_calls_and_what_waits(written: Written) -> None:
    overview = Overview(source="runs", name="", made=0.0)
    with Runs(written.runs) as runs:
        overview_sources.add_runs(overview, runs)
        (run,) = overview.durable or []
        (waiting,) = overview.approvals
        assert (run.state, [call.tool for call in run.calls]) == ("paused", ["send"])
        assert waiting.arguments == '1 arguments: to\n  to: "ann\\u202ebob"'
        assert waiting.is_whole
        assert len(waiting.digest) == 64
        assert waiting.expires > waiting.asked


def test_arguments_that_nobody_can_read_cannot_be_approved(tmp_path: Path) -> None:
    with Runs(tmp_path / "runs.db") as runs:
        broker = Broker(Offer([Tool(SEND, lambda *_: "sent")]), approve=runs.ask)
        with Sandbox(policy=policy_named("strict"), pool=0, tools=broker) as sandbox:
            runs.start(sandbox, "import tools\ntools.send(to='ab' * 10_000)")
        (waiting,) = [overview_sources.waiting_call(each) for each in runs.pending()]
    assert not waiting.is_whole
    assert "cannot be shown whole" in waiting.arguments


def test_the_registry_tells_of_uses_and_the_memory_of_tasks(
    written: Written, tmp_path: Path
) -> None:
    overview = Overview(source="server", name="", made=0.0)
    with (
        ToolRegistry(written.registry, must_exist=True) as registry,
        contextlib.closing(AgentMemory(tmp_path / "memory.db")) as memory,
    ):
        for number, status in enumerate(("completed", "failed", "completed")):
            memory.note_run(f"run {number}", "a task", status, 1, [UsedTool("halve", "")])
        overview_sources.add_tools(overview, registry)
        overview_sources.add_curve(overview, [(registry, memory)])
    (tool,) = overview.tools or []
    assert (tool.name, tool.uses, tool.failures) == ("halve", 1, 0)
    assert [(point.tasks, point.tools) for point in overview.curve] == [(1, 1), (2, 1)]


def test_living_cells_tell_what_they_use(strict: Sandbox) -> None:
    overview = Overview(source="server", name="", made=0.0)
    with strict.session() as session:
        session.execute("held = bytearray(4_000_000)")
        overview_sources.add_cells(overview)
        (cell,) = [each for each in overview.cells or [] if each.session == session.id]
    assert (cell.kind, cell.state, cell.policy) == ("session", "live", "strict")
    assert cell.age_seconds >= 0


def _entry(seq: int, category: str, action: str, **fields: Any) -> AuditEntry:
    return msgspec.convert(
        {"seq": seq, "time": float(seq), "monotonic": 0.0, "level": 20, "category": category,
         "action": action, **fields}, AuditEntry,
    )  # fmt: skip


def test_a_trail_without_end_keeps_the_latest_runs_and_counts_the_rest() -> None:
    made, most = Timeline(), dashboard_page.MOST_RUNS
    for number in range(most + 10):
        span = f"{number:016x}"
        made.add(_entry(number, "execution", "start", span_id=span, details={"execution_id": span}))
        for _ in range(3 if number % 2 else dashboard_page.MOST_EVENTS + 5):
            made.add(
                _entry(number, "tool", "call", span_id=f"t{number}", parent_id=span, target="t")
            )
    overview = Overview(source="trail", name="", made=0.0)
    made.fill(overview)
    assert (len(overview.runs), overview.left_out["runs"]) == (most, 10)
    assert overview.runs[0].id == f"{most + 9:016x}"
    assert overview.runs[1].events_left_out == 5
    assert len(made._spans) == sum(map(len, made._caused.values()))
    assert len(made._caused) == most


def test_records_that_threads_tell_in_the_wrong_order_are_put_right() -> None:
    entries = [
        _entry(5, "policy", "compiled"),
        _entry(6, "execution", "start", span_id="a", details={"execution_id": "one"}),
        _entry(7, "execution", "ok", span_id="a", details={"execution_id": "one"}),
    ]
    made = LiveTimeline()
    for number in (0, 2, 1):
        made.add(entries[number])
    made.add(_entry(0, "log", "lost"))  # a record that could not be written has no number
    for number in range(9, 2000):  # 8 never comes
        made.add(_entry(number, "policy", "compiled"))
    overview = Overview(source="server", name="", made=0.0)
    made.fill(overview)
    assert [run.state for run in overview.runs] == ["ok"]
    assert overview.counts["policy.compiled"] == 1992


@pytest.mark.parametrize(
    "details",
    [
        {"execution_id": 7, "wall_seconds": "soon", "exit_code": [1]},
        {"session_id": {}, "reason": None},
    ],
)
def test_a_forged_record_is_shown_and_breaks_nothing(details: dict[str, Any]) -> None:
    made = Timeline()
    for number, (category, action) in enumerate(
        (("execution", "start"), ("execution", "ok"), ("session", "closed"), ("tool", "returned"),
         ("validation", "refused"), ("execution", "lost"), ("", ""))
    ):  # fmt: skip
        made.add(_entry(number, category, action, span_id="a", parent_id="a", details=details))
    overview = Overview(source="trail", name="", made=0.0)
    made.fill(overview)
    assert len(overview.runs) == 1


@pytest.mark.needs("chromium")
def test_the_command_writes_a_page_of_a_trail_with_everything_else(
    written: Written, file: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", "html", str(written.trail), "--runs", str(written.runs), "--registry",
               str(written.registry), "-o", str(file)]  # fmt: skip
    assert cli.main(command) == 0
    assert capsys.readouterr() == ("", "")
    assert os.stat(file).st_mode & 0o777 == 0o600
    page = browser.page(file.as_uri())
    assert "intact" in page.show("#chain")
    assert "halve" in page.show("#tools")
    assert 'to: "ann\\u202ebob"' in page.show("#approvals")
    assert "mount_ns: not shown" in page.show("#violations")
    page.show("#runs")
    page.click("main td a[href^='#runs/']")
    page.wait_for("document.querySelector('h1').textContent.includes('un ')")
    assert page.complaints() == []


def test_the_command_shows_one_run_and_durable_runs_alone(
    written: Written, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def data(*arguments: str) -> Any:
        assert cli.main(["audit", "html", "--json", *arguments]) == 0
        return msgspec.json.decode(capfdbinary.readouterr().out)

    (run,) = [each for each in _overview(written.trail).runs if each.state == "error"]
    assert {each["trace_id"] for each in data(str(written.trail), run.id)["runs"]} == {run.trace_id}
    (session,) = _overview(written.trail).sessions
    assert [each["session_id"] for each in data(str(written.trail), session.id)["runs"]] == [
        session.id
    ]
    whole = data(str(written.runs))
    assert (whole["chain"], len(whole["durable"]), len(whole["approvals"])) == (None, 1, 1)
    assert len(data(str(written.runs), whole["durable"][0]["run"])["durable"]) == 1
    forged = tmp_path / "forged.jsonl"
    forged.write_bytes(written.trail.read_bytes().replace(b"halve", b"HALVE", 1))
    assert "hash" in data(str(forged))["chain"]["broken"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{none}"], "cannot read {none}"),
        (["{text}"], "no line is a record"),
        (["{trail}", "unknown"], "no record of a trace, execution or session 'unknown'"),
        (["{runs}", "unknown"], "unknown"),
        (["{runs}", "--runs", "{runs}"], "--runs"),
        (["{trail}", "--memory", "{none}"], "--memory needs --registry"),
        (["{trail}", "--registry", "{none}"], "{none}"),
        (["{trail}", "-o", "{folder}"], "{folder}"),
    ],
)
def test_a_mistake_is_told(
    arguments: list[str], told: str, written: Written, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "text").write_text("words\n")
    places = {"none": tmp_path / "none", "text": tmp_path / "text", "folder": tmp_path,
              "trail": written.trail, "runs": written.runs}  # fmt: skip
    assert cli.main(["audit", "html", *(each.format(**places) for each in arguments)]) == 2
    assert told.format(**places) in capsys.readouterr().err
