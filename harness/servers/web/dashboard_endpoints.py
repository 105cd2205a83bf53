"""The dashboard: its page and its data."""

import time

import msgspec

from ....runner.audit.verification import verify
from ...dashboard import sources
from ...dashboard.encoding import encoded
from ...dashboard.overview import Chain, Gauge, Overview
from ...dashboard.page import live_page, policy
from ...version import installed_version
from ..http_server import App
from .approval_endpoints import visible_approvals
from .endpoint import Endpoint, WebCall
from .messages import WebAnswer
from .pages import page
from .problems import RequestRefused


class CheckedChain(WebAnswer, frozen=True):
    """The chain of the trail, as it was read at `at`."""

    at: float
    state: str
    records: int
    head_seq: int
    head_hash: str
    broken: str


def overview(call: WebCall) -> msgspec.Raw:
    """Return everything that the page shows."""
    state = call.state
    shown = Overview(
        source="server", name=f"cellwright {installed_version() or ''}".strip(), made=time.time()
    )
    shown.chain = _chain(call)
    shown.gauges = _gauges(call)
    sources.add_runs(shown, state.runs)
    sources.add_waiting(shown, [(each.waiting, each.client) for each in visible_approvals(call)])
    sources.add_cells(shown)
    sources.add_tools(shown, state.services.registry)
    if state.agents:
        agents = state.agents.opened().values()
        sources.add_curve(shown, [(each.factory.registry, each.memory) for each in agents])
    if state.services.skills:
        sources.add_skills(shown, state.services.skills)
    if state.dashboard:
        state.dashboard.timeline.fill(shown)
    return msgspec.Raw(encoded(shown))


def _gauges(call: WebCall) -> list[Gauge]:
    """Return what the sandboxes of all clients do now."""
    states = [each.sandbox._state() for each in call.state.services.made()]
    pools = [each for state in states for each in state.supervisors]
    memory = [each.memory_bytes for each in pools if each.memory_bytes is not None]
    gauges = [
        Gauge(
            name="Cells ready", value=sum(each.ready for each in pools),
            most=sum(each.wanted for each in pools),
        ),
        Gauge(
            name="Programs running", value=sum(each.running for each in pools),
            most=call.state.limits.executions_of_all,
        ),
        Gauge(name="Calls waiting for a cell", value=sum(each.waiting for each in pools)),
        Gauge(name="Open sessions", value=sum(state.sessions for state in states)),
    ]  # fmt: skip
    return [*gauges, Gauge(name="Memory", value=sum(memory), unit="bytes")] if memory else gauges


def _chain(call: WebCall) -> Chain | None:
    audit = call.state.services.ceiling.audit
    if audit is None:
        return None
    seq, found = audit.head
    return Chain(
        state="unchecked" if found else "memory",
        records=seq,
        first=1,
        head_seq=seq,
        head_hash=found,
    )


def check_chain(call: WebCall) -> CheckedChain:
    """Read the whole trail and check its chain."""
    known = call.state.dashboard
    if known is None or known.trail is None:
        raise RequestRefused(
            404, "not_found", "this server writes no trail", "start it with --audit"
        )
    at, verdict = time.time(), verify(known.trail)
    if not verdict.ok:  # the file may have been rotated meanwhile
        at, verdict = time.time(), verify(known.trail)
    return CheckedChain(
        at=at, state="intact" if verdict.ok else "broken", records=verdict.records,
        head_seq=verdict.head[0], head_hash=verdict.head[1], broken=verdict.broken,
    )  # fmt: skip


DASHBOARD_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET", "/v1/dashboard", "Everything that the dashboard shows.", Overview,
        handler=overview, needs_operator=True,
    ),
    Endpoint(
        "GET", "/v1/dashboard/chain", "Check the chain of the audit trail.", CheckedChain,
        handler=check_chain, needs_operator=True,
    ),
)  # fmt: skip


def dashboard_pages() -> dict[str, App]:
    """Return the page by its path."""
    return {"/": page(live_page(), "text/html; charset=utf-8", policy("'self'"))}
