"""`WebState`: all that the endpoints use, and their limits."""

from pathlib import Path
from typing import NamedTuple

from ...dashboard.live import LiveTimeline
from ...runs.durable_runs import Runs
from ..client_quota import ClientQuota
from ..http_access import MIB, AccessLimits
from ..owned_sessions import OwnedSessions
from ..services import ServicesByClient
from ..tokens import Tokens
from .agents import AgentsByClient


class WebLimits(NamedTuple):
    """Limits of one client, and of all together."""

    executions_of_one: int = 64
    executions_of_all: int = 256
    requests_per_second: float = 200.0  # of one client
    stalled_seconds: float = 30.0  # until a client that does not read its stream is dropped
    # Of answers that clients have not read yet: one that takes some bytes now and then is not dropped.
    answer_bytes_of_one: int = 128 * MIB
    answer_bytes_of_all: int = 512 * MIB
    access: AccessLimits = AccessLimits()

    runs_of_one: int = 10_000  # that are recorded
    run_bytes_of_one: int = 48 * MIB

    @property
    def executions(self) -> ClientQuota:
        """Return a quota for executions."""
        return ClientQuota("executions", self.executions_of_one, self.executions_of_all)

    @property
    def answer_bytes(self) -> ClientQuota:
        """Return a quota for the bytes of answers."""
        return ClientQuota(
            "bytes of answers", self.answer_bytes_of_one, self.answer_bytes_of_all,
            "read the answers to earlier requests",
        )  # fmt: skip


class DashboardSources(NamedTuple):
    """What the dashboard shows beside the state of the server: the records that were written since the
    server started, and the file that they are in."""

    timeline: LiveTimeline
    trail: Path | None = None


class WebState(NamedTuple):
    """The services, sessions and runs of all clients, and who they are."""

    services: ServicesByClient
    sessions: OwnedSessions
    runs: Runs
    tokens: Tokens
    limits: WebLimits = WebLimits()
    dashboard: DashboardSources | None = None
    agents: AgentsByClient | None = None
