"""Executions as OpenTelemetry spans: `AuditLog(on_entry=OpenTelemetry(tracer_provider))`.

The only module that imports opentelemetry (extra `otel`).
"""

from opentelemetry import trace
from opentelemetry.context import Context

from .record import AuditEntry

_NANOSECONDS = 1_000_000_000
_HEXADECIMAL = set("0123456789abcdef")


class OpenTelemetry:
    """Ends one span for each execution, under the caller's span, with refusals as span events."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        """Use `provider`; default: the global tracer provider."""
        self._tracer = trace.get_tracer("cellwright", tracer_provider=provider)
        self._open: dict[str, trace.Span] = {}

    def __call__(self, entry: AuditEntry) -> None:
        """Take one entry."""
        if entry.category == "violation" and entry.parent_id in self._open:
            self._open[entry.parent_id].add_event(entry.action, _attributes(entry), _time(entry))
        elif entry.category == "execution" and entry.action == "start":
            self._open[entry.span_id] = self._tracer.start_span(
                "cellwright.execute", context=_context(entry), start_time=_time(entry)
            )
        elif entry.category == "execution" and entry.span_id in self._open:
            self._end(self._open.pop(entry.span_id), entry)

    def _end(self, span: trace.Span, entry: AuditEntry) -> None:
        span.set_attributes(_attributes(entry))
        code = trace.StatusCode.OK if entry.action == "ok" else trace.StatusCode.ERROR
        span.set_status(trace.Status(code, None if entry.action == "ok" else entry.action))
        span.end(_time(entry))


def _context(entry: AuditEntry) -> Context | None:
    if len(entry.trace_id) != 32 or not set(entry.trace_id + entry.parent_id) <= _HEXADECIMAL:
        return None
    parent = trace.SpanContext(
        int(entry.trace_id, 16), int(entry.parent_id or "0", 16), is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )  # fmt: skip
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def _attributes(entry: AuditEntry) -> dict[str, str | int | float | bool]:
    fields = {"target": entry.target, "allowed": entry.allowed, **entry.details}
    kept = {name: value for name, value in fields.items() if isinstance(value, str | int | float)}
    return {f"cellwright.{name}": value for name, value in kept.items()}


def _time(entry: AuditEntry) -> int:
    return int(entry.time * _NANOSECONDS)
