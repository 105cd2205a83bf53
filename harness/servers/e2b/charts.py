"""The data of charts in the form of E2B's code interpreter."""

from typing import Any

from ....runner.charts import Chart, ChartAxis, ChartSeries

_TYPES = {"box": "box_and_whisker"}
_NAMES = {"line": "Line", "bar": "Group", "scatter": "Points"}  # of series without labels
_DIGITS = 4  # of angles, which matplotlib computes with single precision
_BOX = ("min", "first_quartile", "median", "third_quartile", "max")


def chart_of(charts: list[Chart]) -> dict[str, Any] | None:
    """Return the data of a figure: of its chart, or a superchart of several."""
    if len(charts) < 2:
        return _chart(charts[0]) if charts else None
    title = charts[0].figure_title
    return {"type": "superchart", "title": title, "elements": [_chart(each) for each in charts]}


def _chart(chart: Chart) -> dict[str, Any]:
    kinds = {each.type for each in chart.series}
    kind = kinds.pop() if len(kinds) == 1 else "unknown"
    title = chart.title or None
    told: dict[str, Any] = {"type": _TYPES.get(kind, kind), "title": title, "elements": []}
    if kind != "pie":
        told |= {**_axis("x", chart.x), **_axis("y", chart.y)}
    if kind in ("line", "scatter"):
        told |= {**_ticks("x", chart.x), **_ticks("y", chart.y)}
    if kind != "unknown":
        told["elements"] = [
            element
            for number, each in enumerate(chart.series)
            for element in _elements(each, each.label or f"{_NAMES.get(kind, kind)} {number}")
        ]
    return told


def _axis(name: str, axis: ChartAxis) -> dict[str, Any]:
    return {f"{name}_label": axis.label or None, f"{name}_unit": axis.unit or None}


def _ticks(name: str, axis: ChartAxis) -> dict[str, Any]:
    return {
        f"{name}_ticks": axis.ticks, f"{name}_tick_labels": axis.tick_labels,
        f"{name}_scale": axis.scale,
    }  # fmt: skip


def _elements(series: ChartSeries, label: str) -> list[dict[str, Any]]:
    if series.type in ("line", "scatter"):
        return [{"label": label, "points": [list(each[:2]) for each in series.points]}]
    return [_element(series, label, list(point)) for point in series.points]


def _element(series: ChartSeries, group: str, point: list[Any]) -> dict[str, Any]:
    label, *values = point or [None]
    if series.type == "box":
        numbers = [*values, *[None] * len(_BOX)]
        far = [each[1] for each in series.outliers if len(each) == 2 and each[0] == label]
        return {"label": str(label), **dict(zip(_BOX, numbers, strict=False)), "outliers": far}
    value = values[0] if values else None
    if series.type == "pie":
        share = value if isinstance(value, int | float) else 0.0
        return {"label": str(label), "angle": round(360.0 * share, _DIGITS), "radius": 1.0}
    return {"label": str(label), "group": group, "value": value}
