"""Export of spans and measurements by OTLP, as the variables of OpenTelemetry say (extra `otlp`).

The SDK reads `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME` and the
other variables of the specification.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...policies.errors import PolicyError
from ...policies.extras import how_to_install
from ...runner.audit.record import AuditEntry
from .measurements import COUNTERS, HISTOGRAMS, Measurements, MetricFamily

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation

OnEntry = Callable[[AuditEntry], None]
_END_MILLISECONDS = 2000  # time for remaining spans at the end, if the collector does not answer
_NAME = "cellwright"


def check_installed() -> None:
    """Raise PolicyError without the extra `otlp`."""
    try:
        import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        import_module("opentelemetry.sdk.metrics.export")
    except ModuleNotFoundError as error:
        raise PolicyError(
            f"OpenTelemetry: the package {error.name} is not installed",
            how_to_install("otlp"),
        ) from None


@contextlib.contextmanager
def exporting(measurements: Measurements) -> Iterator[OnEntry]:
    """Export spans of programs and the measurements during the block; yield the listener of a trail.

    Raises PolicyError without the extra `otlp`.
    """
    check_installed()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from ...runner.audit.otel import OpenTelemetry

    resource = Resource.create() if _has_name() else Resource.create({"service.name": _NAME})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource)
    observe(meters.get_meter(_NAME), measurements)
    try:
        yield OpenTelemetry(tracers)
    finally:
        tracers.force_flush(_END_MILLISECONDS)
        meters.force_flush(_END_MILLISECONDS)
        tracers.shutdown()
        with contextlib.suppress(
            Exception
        ):  # ignore errors: losing the last spans is not a failure
            meters.shutdown(_END_MILLISECONDS)


def observe(meter: "Meter", measurements: Measurements) -> None:
    """Have a meter read the measurements: counters as they are, gauges by the names that there are now,
    and of histograms their sums and counts."""
    for family in COUNTERS:
        meter.create_observable_counter(
            family.name, [partial(_counted, measurements, family)], description=family.help
        )
    for family in HISTOGRAMS:
        for kind in ("sum", "count"):
            meter.create_observable_counter(
                f"{family.name}_{kind}", [partial(_timed, measurements, family, kind)],
                description=family.help,
            )  # fmt: skip
    for family in {reading.family: None for reading in measurements.gauges()}:
        meter.create_observable_gauge(
            family.name, [partial(_read, measurements, family)], description=family.help
        )


def _counted(measurements: Measurements, family: MetricFamily, _: Any) -> "list[Observation]":
    series = dict(measurements.counters())[family]
    return [_observation(family, labels, value) for labels, value in series.items()]


def _timed(
    measurements: Measurements, family: MetricFamily, kind: str, _: Any
) -> "list[Observation]":
    series = dict(measurements.histograms())[family]
    return [
        _observation(family, labels, seen.sum if kind == "sum" else seen.counts[-1])
        for labels, seen in series.items()
    ]


def _read(measurements: Measurements, family: MetricFamily, _: Any) -> "list[Observation]":
    return [
        _observation(family, reading.labels, reading.value)
        for reading in measurements.gauges()
        if reading.family == family
    ]


def _observation(family: MetricFamily, labels: tuple[str, ...], value: float) -> "Observation":
    from opentelemetry.metrics import Observation

    return Observation(value, dict(zip(family.labels, labels, strict=True)))


def _has_name() -> bool:
    import os

    return "OTEL_SERVICE_NAME" in os.environ
