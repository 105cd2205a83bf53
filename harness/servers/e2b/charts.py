"""The data of charts in the form of E2B's code interpreter."""

from typing import Any

from ....runner.charts import Chart, ChartAxis, ChartSeries

_TYPES = {"box": "box_and_whisker"}
_BOX = ("min", "first_quartile", "median", "third_quartile", "max")


def chart_of(charts: list[Chart]) -> dict[str, Any] | None:
    """Return the data of a figure: of its chart, or a superchart of several."""
    if len(charts) < 2:
        return _chart(charts[0]) if charts else None
    return {"type": "superchart", "title": "", "elements": [_chart(each) for each in charts]}


def _chart(chart: Chart) -> dict[str, Any]:
    kinds = {each.type for each in chart.series}
    kind = kinds.pop() if len(kinds) == 1 else "unknown"
    told: dict[str, Any] = {"type": _TYPES.get(kind, kind), "title": chart.title, "elements": []}
    if kind != "pie":
        told |= {**_axis("x", chart.x), **_axis("y", chart.y)}
    if kind in ("line", "scatter"):
        ticks = ("x_ticks", "x_tick_labels", "y_ticks", "y_tick_labels")
        told |= {**{each: [] for each in ticks}, "x_scale": chart.x.scale, "y_scale": chart.y.scale}
    if kind != "unknown":
        told["elements"] = [element for each in chart.series for element in _elements(each)]
    return told


def _axis(name: str, axis: ChartAxis) -> dict[str, Any]:
    return {f"{name}_label": axis.label or None, f"{name}_unit": axis.unit or None}


def _elements(series: ChartSeries) -> list[dict[str, Any]]:
    if series.type in ("line", "scatter"):
        return [{"label": series.label, "points": [list(each[:2]) for each in series.points]}]
    return [_element(series, list(point)) for point in series.points]


def _element(series: ChartSeries, point: list[Any]) -> dict[str, Any]:
    label, *values = point or [None]
    if series.type == "box":
        numbers = [*values, *[None] * len(_BOX)]
        return {"label": str(label), **dict(zip(_BOX, numbers, strict=False)), "outliers": []}
    value = values[0] if values else None
    if series.type == "pie":
        share = value if isinstance(value, int | float) else 0.0
        return {"label": str(label), "angle": 360.0 * share, "radius": 1.0}
    return {"label": str(label), "group": series.label, "value": value}
