"""`RequestObserver`: counts and logs the requests to a daemon."""

import msgspec

from ....policies.errors import CellwrightError, QuotaExceeded
from ...sandbox.remote.frames import Executed, Failure
from ..operations.measurements import Measurements
from ..operations.request_log import LogValue, RequestLog
from .peers import Peer

INVALID, SLOW, USER = "invalid frame", "time", "user"  # limits beside those of QuotaExceeded


class RequestObserver:
    """Safe from many threads; `log` is optional."""

    def __init__(self, measurements: Measurements, log: RequestLog | None = None) -> None:
        self.measurements = measurements
        self._log = log

    def note_reply(
        self, peer: Peer, policy: str, kind: str, reply: msgspec.Struct, seconds: float
    ) -> None:
        """Note a request that was answered; `kind` is the name of its frame."""
        outcome = reply.kind if isinstance(reply, Failure) else "ok"
        self.measurements.note_request(kind, outcome, seconds)
        more: dict[str, LogValue] = {}
        if isinstance(reply, Failure):
            more["why"] = reply.message
            if outcome == QuotaExceeded.__name__:
                self.measurements.note_refusal(peer.tenant, reply.limit)
        elif isinstance(reply, Executed):
            result = reply.result
            more |= {"execution": result.execution_id, "status": result.status.value}
            more |= {"reason": result.reason, "trace": result.trace_id}
        self._tell(peer, kind, outcome, seconds, policy=policy, **more)

    def note_refused(self, peer: Peer, error: CellwrightError, limit: str = "") -> None:
        """Note a connection or request that was refused before it was decoded; `limit` says why, unless
        the error does."""
        limit = error.limit if isinstance(error, QuotaExceeded) else limit
        self.measurements.note_refusal(peer.tenant, limit)
        self._tell(peer, "refused", type(error).__name__, 0.0, limit=limit, why=error.what)

    def _tell(self, peer: Peer, kind: str, outcome: str, seconds: float, **more: LogValue) -> None:
        if self._log:
            about: dict[str, LogValue] = {"tenant": peer.tenant, "uid": peer.uid, "pid": peer.pid}
            self._log.note("daemon", kind, outcome, seconds, **about, **more)
