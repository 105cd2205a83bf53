"""Measurements in the text format of Prometheus (extra `metrics`).

The only module that imports prometheus_client.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .measurements import BUCKETS, Measurements, MetricFamily

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_BOUNDS = (*(f"{bound:g}" for bound in BUCKETS), "+Inf")


class PrometheusText:
    """Renders measurements and the kernel's counters of this process."""

    def __init__(self, measurements: Measurements) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_MeasurementsCollector(measurements))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _MeasurementsCollector(Collector):
    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements

    def collect(self) -> Iterator[Metric]:
        for family, series in self._measurements.counters():
            counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in series.items():
                counter.add_metric(labels, value)
            yield counter
        for family, times in self._measurements.histograms():
            histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
            for labels, seen in times.items():
                buckets = list(zip(_BOUNDS, map(float, seen.counts), strict=True))
                histogram.add_metric(labels, buckets, seen.sum)
            yield histogram
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        gauges: dict[MetricFamily, GaugeMetricFamily] = {}
        for family, labels, value in self._measurements.gauges():
            if family not in gauges:
                gauges[family] = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            gauges[family].add_metric(labels, value)
        yield from gauges.values()
