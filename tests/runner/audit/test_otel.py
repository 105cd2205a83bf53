"""Executions as spans, with OpenTelemetry's own SDK."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cellwright import AuditLog, Sandbox
from cellwright.runner.audit.otel import OpenTelemetry
from tests.conftest import policy_named

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_an_execution_is_a_span_under_the_callers() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    log = AuditLog(on_entry=OpenTelemetry(provider))
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        sandbox.execute("import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)", trace_id=PARENT)
        sandbox.execute("raise ValueError", trace_id="mine")
    good, bad = exporter.get_finished_spans()
    assert good.name == "cellwright.execute"
    assert format(good.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert good.parent
    assert format(good.parent.span_id, "016x") == "b7ad6b7169203331"
    assert good.status.is_ok
    assert good.attributes
    assert good.attributes["cellwright.reason"] == "exit"
    assert good.end_time
    assert good.start_time
    assert good.end_time > good.start_time
    assert not bad.status.is_ok
    assert bad.parent is None
    assert [event.name for event in good.events] == ["ptrace"] or good.events == ()
