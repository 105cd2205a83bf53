"""Overviews for tests: one that has every view, and the same with a text in each of its fields."""

from typing import Any

import msgspec

from cellwright.harness.dashboard.overview import (
    CalledTool,
    CallView,
    CellView,
    Chain,
    DurableRun,
    Event,
    Gauge,
    Overview,
    Point,
    RunView,
    SessionView,
    SkillView,
    ToolView,
    WaitingCall,
)

VIEWS = ("overview", "approvals", "runs", "cells", "tools", "network", "violations", "chain")
_FIXED = ("source", "unit", "category")  # the page looks at these words
_FIXED_ACTIONS = ("connection", "call", "waiting", "start", "ok")


def _event(category: str, action: str, **about: Any) -> Event:
    return Event(
        seq=2, at=0.25, category=category, action=action, target=f"target of {action}",
        allowed=action != "openat", about={"detail": "word", "list": ["item"], **about},
    )  # fmt: skip


def full() -> Overview:
    """Return an overview with something in every view."""
    called = _event("tool", "call", arguments_bytes=15)
    called.ended, called.seconds = "returned", 0.1
    events = [
        called, _event("violation", "openat", rule="mount_ns: not shown", process="cat", count=3),
        _event("network", "connection", rule="api", address="192.0.2.1", outcome="ended",
               sent_bytes=10, received_bytes=2048, seconds=0.5),
        _event("tool", "waiting", why="waits for approval"), _event("other", "strange"),
    ]  # fmt: skip
    run = RunView(
        id="a-run", trace_id="a-trace", language="python", began=1_790_000_000.0, sandbox_id="box",
        session_id="a-session", state="error", reason="exception", wall_seconds=0.75,
        memory_peak_bytes=3 << 20, output_bytes=100, exit_code=1, source_sha256="ab" * 32,
        source_bytes=10, phases={"lease": 0.25, "run": 0.5}, events=events,
    )  # fmt: skip
    return Overview(
        source="server", name="a-name", made=1_790_000_100.0, runs_file="runs.db",
        approvals=[
            WaitingCall(
                approval="an-approval", run="a-durable-run", tool="send_mail", description="Send it.",
                reason="the tool is risky", arguments='1 arguments: to\n  to: "ann"',
                digest="cd" * 32, is_whole=True, asked=1_790_000_000.0, expires=4_000_000_000.0,
            )
        ],
        chain=Chain(
            state="broken", records=9, first=1, head_seq=9, head_hash="ef" * 32,
            broken="trail, line 10: it is torn",
        ),
        counts={"execution.start": 1},
        gauges=[Gauge(name="cells ready", value=6, most=8)],
        cells=[
            CellView(
                id="1.2.3", kind="session", state="live", policy="strict", language="python",
                session="a-session", memory_bytes=1 << 20, cpu_seconds=0.5, age_seconds=70.0,
                idle_seconds=None,
            )
        ],
        curve=[Point(tasks=1, tools=1, time=1.0), Point(tasks=2, tools=1, time=2.0)],
        tools=[
            ToolView(
                name="a_tool", version=2, state="active", owner="agent", maker="maker",
                description="What it does.", created_at="2026-11-01T00:00:00+00:00", risky=True,
                uses=10, failures=4, failures_in_a_row=1,
            )
        ],
        called_tools=[CalledTool(name="a_called_tool", calls=3, failed=1)],
        skills=[
            SkillView(
                name="a-skill", reference="a-skill@12", description="When to use it.",
                state="trusted", version=1, used=None, uses=7, failures=3,
            )
        ],
        sessions=[
            SessionView(
                id="a-session", sandbox_id="box", opened=1_789_999_990.0, ended=1_790_000_001.0,
                ending="closed: it was closed", runs=1, events=list(events),
            )
        ],
        runs=[run],
        durable=[
            DurableRun(
                run="a-durable-run", state="paused", began=1_790_000_000.0, language="python",
                ending="an ending",
                calls=[CallView(number=1, tool="send_mail", state="waiting", arguments="a", answer="b")],
            )
        ],
        other=[_event("network", "allowed"), _event("policy", "compiled")],
        left_out={"runs": 3},
    )  # fmt: skip


def hostile(text: str) -> Overview:
    """Return the full overview with `text` in each text of it that can come from outside."""
    return msgspec.convert(_replaced(msgspec.to_builtins(full()), "", text), Overview)


def _replaced(value: Any, name: str, text: str) -> Any:
    if isinstance(value, str):
        fixed = name in _FIXED or (name == "action" and value in _FIXED_ACTIONS)
        return value if fixed or value == "broken" else text
    if isinstance(value, list):
        return [_replaced(each, name, text) for each in value]
    if isinstance(value, dict):
        made = {key: _replaced(each, key, text) for key, each in value.items()}
        if name == "about":
            return {**made, text: text}
        return {**made, text: 1} if name == "counts" else made
    return value
