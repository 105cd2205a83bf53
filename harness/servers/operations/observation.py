"""The trail, its listeners, the log of requests and the pages that operators asked of a server."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....runner.audit.log import AuditLog, OnEntry
from ....runner.audit.record import AuditEntry
from .endpoint import serving_pages
from .measurements import Measurements
from .pages import OperatorsPages
from .request_log import RequestLog


class OperatorSettings(NamedTuple):
    """A file or address each; None for nothing of the kind."""

    audit: str | None = None
    metrics: str | None = None
    request_log: str | None = None
    opentelemetry: bool = False


class ServerRecords(NamedTuple):
    """What a server writes to; `trail` and `log` are None if nothing needs one."""

    measurements: Measurements
    trail: AuditLog | None
    log: RequestLog | None


@contextlib.contextmanager
def observing(
    settings: OperatorSettings, measurements: Measurements, *others: OnEntry
) -> Iterator[ServerRecords]:
    """Open the trail and the log during the block; raises PolicyError and AuditError.

    `others` hear of each record, too.  The trail keeps no entries in memory: nobody can ask a server
    for them.
    """
    with contextlib.ExitStack() as stack:
        listeners = [*others]
        if settings.metrics or settings.opentelemetry:
            listeners.append(measurements)
        if settings.opentelemetry:
            from .telemetry import exporting  # the SDK takes 200 ms to import

            listeners.append(stack.enter_context(exporting(measurements)))

        def tell(entry: AuditEntry) -> None:
            for each in listeners:
                each(entry)

        trail = log = None
        if listeners or settings.audit:
            told = tell if listeners else None
            trail = stack.enter_context(AuditLog(path=settings.audit, max_entries=0, on_entry=told))
        if settings.request_log:
            log = stack.enter_context(contextlib.closing(RequestLog(settings.request_log)))
        yield ServerRecords(measurements, trail, log)


@contextlib.contextmanager
def serving_operators(
    settings: OperatorSettings, measurements: Measurements, not_ready: Callable[[], str] = str,
    is_well: Callable[[], bool] = lambda: True, group: int = -1,
) -> Iterator[None]:  # fmt: skip
    """Answer the pages of operators at `settings.metrics` during the block, if that is given."""
    if settings.metrics is None:
        yield
        return
    pages = OperatorsPages(measurements, not_ready, is_well)
    with serving_pages(settings.metrics, pages, group):
        yield
