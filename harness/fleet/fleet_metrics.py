"""`FleetMetrics`: what a fleet counts, in the text format of Prometheus (extra `metrics`)."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...policies.errors import BusyError, ClosedError, NodeLost, QuotaExceeded
from ..servers.operations.measurements import REQUESTS, Measurements, MetricFamily, Reading
from ..servers.operations.pages import OperatorsPages
from .router import RouterState

_NODES = MetricFamily("cellwright_fleet_nodes", "Nodes of the fleet", ("state",))
_FREE = MetricFamily("cellwright_fleet_free_cells", "Calls that a node can take now", ("node",))
_WAITING = MetricFamily("cellwright_fleet_waiting", "Calls that wait for a node")
_SESSIONS = MetricFamily("cellwright_fleet_sessions", "Sessions that are open")


class FleetMetrics:
    """Counts requests by kind and outcome, and refusals by tenant and limit; safe from many threads."""

    def __init__(
        self, tenants: Sequence[str], state: Callable[[], RouterState], sessions: Callable[[], int]
    ) -> None:
        self.measurements = Measurements(tenants=tenants)
        self.measurements.add_gauges(lambda: _gauges(state(), sessions()))

    @contextlib.contextmanager
    def request(self, kind: str, tenant: str) -> Iterator[None]:
        """Count the request that the block makes, and its time."""
        began, outcome = time.monotonic(), "ok"
        try:
            yield
        except BaseException as error:
            outcome = _outcome_of(error)
            if isinstance(error, BusyError):
                limit = error.limit if isinstance(error, QuotaExceeded) else "queue"
                self.measurements.note_refusal(tenant, limit)
            raise
        finally:
            self.measurements.note_request(kind, outcome, time.monotonic() - began)

    def note_retry(self) -> None:
        """Count a call that is sent again, because nothing of it had begun."""
        self.measurements.count(REQUESTS, "fleet_retry", "ok")

    def text(self) -> str:
        """Return the metrics; raises PolicyError without the extra `metrics`."""
        return OperatorsPages(self.measurements).answer("/metrics").body.decode()


def _outcome_of(error: BaseException) -> str:
    for kind, word in ((BusyError, "busy"), (NodeLost, "node_lost"), (ClosedError, "closed")):
        if isinstance(error, kind):
            return word
    return "error"


def _gauges(state: RouterState, sessions: int) -> Iterable[Reading]:
    yield Reading(_NODES, ("alive",), len(state.free))
    yield Reading(_NODES, ("lost",), len(state.lost))
    for node, free in state.free.items():
        yield Reading(_FREE, (node,), free)
    yield Reading(_WAITING, (), state.waiting)
    yield Reading(_SESSIONS, (), sessions)
