"""Export by OTLP: what a collector gets, and a collector that is not there."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cellwright import Sandbox
from cellwright.harness.servers.measurements import Measurements
from cellwright.harness.servers.request_log import OperatorSettings, observing
from tests.conftest import policy_named

SETTINGS = OperatorSettings(opentelemetry=True)


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        place = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", place)
        yield collector
        collector.shutdown()
        thread.join()


@pytest.mark.needs("userns")
def test_a_collector_gets_spans_and_measurements(collector: Collector) -> None:
    with (
        observing(SETTINGS, Measurements(["strict"])) as seen,
        Sandbox(policy=policy_named("strict"), pool=0, audit=seen.trail or False) as sandbox,
    ):
        sandbox.execute("open('/etc/shadow')")
    spans, names, resources = [], set(), set()
    for path, body in collector.got:
        if path == "/v1/traces":
            for traced in ExportTraceServiceRequest.FromString(body).resource_spans:
                resources |= {each.value.string_value for each in traced.resource.attributes}
                spans += [each for scope in traced.scope_spans for each in scope.spans]
        else:
            for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names |= {each.name for scope in measured.scope_metrics for each in scope.metrics}
    (span,) = spans
    assert span.name == "cellwright.execute"
    assert [event.name for event in span.events] == ["openat"] or not span.events
    assert {"cellwright_executions", "cellwright_refusals", "cellwright_phase_seconds_sum"} <= names
    assert "cellwright" in resources


@pytest.mark.needs("userns")
def test_a_collector_that_is_not_there_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with (
        observing(SETTINGS, Measurements()) as seen,
        Sandbox(policy=policy_named("strict"), pool=0, audit=seen.trail or False) as sandbox,
    ):
        assert sandbox.execute("6 * 7").value == 42
