"""Pictures: the rich displays of values, as in notebooks, open figures, and the data of charts, read
from the axes of matplotlib's figures before these are closed.

Nothing of matplotlib is imported: its objects are known by their methods and the names of their
classes.  `runner/requests/result.py` has the types that the supervisor decodes.
"""

import contextlib
import io
import math
import re
import sys
import warnings
from typing import Any

from ..messages import CHARTS, MOST_CHART_BYTES, MOST_CHARTS, MOST_PICTURES, encode

# The methods that IPython calls (its documentation, "Rich display"), and what they return.
_METHODS = {
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_svg_": "image/svg+xml",
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
}
Pictures = tuple[tuple[str, bytes], ...]
_displayed: list[tuple[str, bytes]] = []  # displayed since the last program ended


def display(*values: object) -> None:
    """Show values as the last one of a program is shown: their text on stdout, and their pictures."""
    for value in values:
        print(value if isinstance(value, str) else repr(value))  # noqa: T201 - the program's output
        _displayed.extend(_of_value(value))


def pictures(value: object, limit: int) -> Pictures:
    """Return (MIME type, content) of each, the first 64 and as many as fit into `limit` bytes, and then
    the data of charts; a method that fails gives none."""
    found = [*_displayed, *([] if value is None else _of_value(value))]
    _displayed.clear()
    numbered: list[NumberedChart] = []
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for drawn, data in _figures(pyplot):
            found.append(("image/png", drawn))
            numbered += [(len(found), chart) for chart in data]
    kept = []
    for mime, content in found[:MOST_PICTURES]:
        if (limit := limit - len(content)) < 0:
            break
        kept.append((mime, content))
    told = packed(numbered) if numbered and len(kept) < MOST_PICTURES else b""
    return (*kept, (CHARTS, told)) if told else tuple(kept)


def _of_value(value: object) -> list[tuple[str, bytes]]:
    found = []
    for name, mime in _METHODS.items():
        if method := getattr(type(value), name, None):
            with contextlib.suppress(Exception):  # runs code of the program
                content = method(value)
                content = (
                    content[0] if isinstance(content, tuple) else content
                )  # without its metadata
                if isinstance(content, str | bytes):
                    found.append((mime, content.encode() if isinstance(content, str) else content))
    return found


def _figures(pyplot: object) -> list[tuple[bytes, list[dict[str, Any]]]]:
    """Return every open figure as PNG, with the data of its charts, and close it: it belongs to this
    program, not to the next."""
    found: list[tuple[bytes, list[dict[str, Any]]]] = []
    seen: list[warnings.WarningMessage] | None = None
    # The program may have changed both modules in any way. Warnings are off, because they would name
    # this file and line.
    with contextlib.suppress(Exception), warnings.catch_warnings(record=True) as told:
        seen = told
        for number in pyplot.get_fignums():  # type: ignore[attr-defined]
            drawn, figure = io.BytesIO(), pyplot.figure(number)  # type: ignore[attr-defined]
            figure.savefig(drawn, format="png", bbox_inches="tight")
            data = charts(figure)  # drawing the figure sets the names of categories
            pyplot.close(number)  # type: ignore[attr-defined]
            found.append((drawn.getvalue(), data))
    with contextlib.suppress(Exception):  # the guest may have closed, replaced or deleted it
        sys.stderr.writelines(f"{each.category.__name__}: {each.message}\n" for each in seen or ())
    return found


_CHARACTERS = 200
_SERIES, _POINTS, _POINTS_OF_CHART, _TICKS = 64, 1000, 10_000, 64
_UNIT = re.compile(r"(?:\(([^()]*)\)|\[([^\[\]]*)\])\s*$")
# (V)ertical and (H)orizontal lines: whiskers, caps and median of a vertical or horizontal box
_BOXES = ("VVHHH", "HHVVV")
_NO_LINE = ("None", "none", "", " ")

NumberedChart = tuple[int, dict[str, Any]]  # the number of the picture, and the chart


def charts(figure: Any) -> list[dict[str, Any]]:
    """Return the chart of each pair of axes in a figure that was drawn; axes that fail have none."""
    found = []
    for axes in list(figure.axes)[:MOST_CHARTS]:
        with contextlib.suppress(Exception):  # the program may have done anything to it
            if (series := _series(axes)) or axes.has_data():
                found.append(_chart(axes, figure, series))
    return found


def packed(found: list[NumberedChart]) -> bytes:
    """Return as many charts as fit into 256 KiB, empty without any."""
    kept: list[NumberedChart] = []
    left = MOST_CHART_BYTES - 8  # bytes left for the array
    for each in found[:MOST_CHARTS]:
        if (left := left - len(encode(each))) < 0:  # type: ignore[arg-type] # plain values
            break
        kept.append(each)
    return encode(kept) if kept else b""  # type: ignore[arg-type]


def _chart(axes: Any, figure: Any, series: list[dict[str, Any]]) -> dict[str, Any]:
    above = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    most = max(1, _POINTS_OF_CHART // max(1, len(series)))
    for each in series:
        points = each["points"][:: _step(len(each["points"]), most)]
        each["points"] = [tuple(map(_coordinate, point)) for point in points]
        outliers = each.get("outliers", ())
        each["outliers"] = [tuple(map(_coordinate, point)) for point in outliers[:_POINTS]]
    return {
        "title": _text(axes.get_title() or above),
        "figure": _text(repr(figure)),
        "figure_title": _text(above),
        "x": _axis(axes.get_xlabel(), axes.get_xscale(), axes.xaxis),
        "y": _axis(axes.get_ylabel(), axes.get_yscale(), axes.yaxis),
        "series": series,
    }


def _axis(label: str, scale: str, axis: Any) -> dict[str, Any]:
    formatter = type(axis.get_major_formatter()).__name__
    if "Date" in formatter:
        scale = "datetime"
    elif _has_names(axis):
        scale = "categorical"
    unit = _UNIT.search(label)
    return {
        "label": _text(label),
        "unit": _text(unit[1] or unit[2] or "") if unit else "",
        "scale": _text(scale),
        **_ticks(axis, is_of_times=scale == "datetime"),
    }


def _ticks(axis: Any, *, is_of_times: bool) -> dict[str, Any]:
    places = list(axis.get_ticklocs())[:_TICKS]
    labels = [_text(each.get_text()) for each in axis.get_ticklabels()][:_TICKS]
    if is_of_times and (dates := sys.modules.get("matplotlib.dates")):
        places = [dates.num2date(each) for each in places]
    return {"ticks": list(map(_coordinate, places)), "tick_labels": labels}


def _has_names(axis: Any) -> bool:
    """Tell whether the ticks have names: of categories, or by set_ticklabels."""
    formatter = type(axis.get_major_formatter()).__name__
    locator = type(axis.get_major_locator()).__name__
    return formatter in ("FixedFormatter", "StrCategoryFormatter") or (
        (formatter, locator) == ("FuncFormatter", "FixedLocator")
    )


def _series(axes: Any) -> list[dict[str, Any]]:
    containers = list(axes.containers)
    lines, boxes, outliers = _without_boxes(_data_lines(axes, containers))
    found = [_of_line(line, axes) for line in lines]
    found += [
        _of_offsets(each) for each in axes.collections
        if type(each).__name__ == "PathCollection" and len(each.get_offsets())
    ]  # fmt: skip
    found += [_of_bars(each, axes) for each in containers if type(each).__name__ == "BarContainer"]
    wedges = [each for each in axes.patches if type(each).__name__ == "Wedge"]
    if wedges:
        shares = [(_label(each.get_label()), (each.theta2 - each.theta1) / 360) for each in wedges]
        found.append(_one("pie", "", shares))
    if boxes:
        points = [_of_box(each, axes) for each in boxes]
        far = [
            (point[0], value)
            for point, box, line in zip(points, boxes, outliers, strict=True)
            if line is not None
            for value in (line.get_ydata() if _stands(box) else line.get_xdata())
        ]
        found.append({**_one("box", "", points), "outliers": far})
    return found[:_SERIES]


def _one(
    kind: str, label: object, points: list[tuple[Any, ...]], total: int | None = None
) -> dict[str, Any]:
    count = len(points) if total is None else total
    return {"type": kind, "label": _label(label), "points": points, "total": count}


def _data_lines(axes: Any, containers: list[Any]) -> list[Any]:
    """Return the lines in the coordinates of the data, without the caps of error bars."""
    bars = [each for each in containers if type(each).__name__ == "ErrorbarContainer"]
    caps = [id(cap) for each in bars for cap in each[1]]
    return [
        each for each in axes.lines
        if id(each) not in caps and each.get_transform() is axes.transData
    ]  # fmt: skip


def _of_line(line: Any, axes: Any) -> dict[str, Any]:
    xs, ys = line.get_xdata(orig=True), line.get_ydata(orig=True)
    step = _step(len(ys), _POINTS)
    places = _moments(_values(xs)[::step], getattr(axes, "freq", None))
    points = list(zip(places, _values(ys)[::step], strict=False))
    return _one("scatter" if _is_marked(line) else "line", line.get_label(), points, len(ys))


def _is_marked(line: Any) -> bool:
    """Tell whether it shows points that no line joins."""
    return line.get_linestyle() in _NO_LINE and line.get_marker() != "None"


def _step(count: int, most: int) -> int:
    return max(1, math.ceil(count / most))


def _values(given: Any) -> Any:
    inside = getattr(
        given, "values", given
    )  # a pandas series or index, whose keys are not positions
    return given if callable(inside) else inside


def _moments(places: Any, frequency: Any) -> Any:
    """Return the times that pandas has drawn as numbers of periods."""
    pandas = sys.modules.get("pandas")
    if frequency is None or pandas is None:
        return places
    with contextlib.suppress(Exception):
        return [str(pandas.Period(ordinal=int(each), freq=frequency)) for each in places]
    return places


def _of_offsets(collection: Any) -> dict[str, Any]:
    offsets = collection.get_offsets()
    kept = offsets[:: _step(len(offsets), _POINTS)]
    kept = kept.filled(math.nan) if hasattr(kept, "filled") else kept  # numpy's masked array
    return _one("scatter", collection.get_label(), list(map(tuple, kept)), len(offsets))


def _of_bars(container: Any, axes: Any) -> dict[str, Any]:
    lies = getattr(container, "orientation", "vertical") == "horizontal"
    names = _names(axes.yaxis if lies else axes.xaxis)
    points: list[tuple[Any, ...]] = []
    for bar in container.patches:
        if lies:
            center, value = bar.get_y() + bar.get_height() / 2, bar.get_width()
        else:
            center, value = bar.get_x() + bar.get_width() / 2, bar.get_height()
        points.append((_named(center, names), value))
    return _one("bar", container.get_label(), points)


def _names(axis: Any) -> list[tuple[float, str]]:
    """Return the places and names of categories, none on an axis of numbers."""
    if not _has_names(axis):
        return []
    labels = [_text(each.get_text()) for each in axis.get_ticklabels()]
    return list(zip(map(float, axis.get_ticklocs()), labels, strict=False))


def _named(place: float, names: list[tuple[float, str]]) -> object:
    """Return the name of the category at `place`; the bars of a group are near it."""
    distance, name = min(((abs(at - place), name) for at, name in names), default=(1.0, ""))
    return name if distance < 0.5 and name else place


def _without_boxes(lines: list[Any]) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """Return the lines that are not of box plots, those of each box, and its outliers' line."""
    shapes = [_shape(line) for line in lines]
    others, boxes, outliers, at = [], [], [], 0
    while at < len(lines):
        first = at + (shapes[at] == "box")
        if any(_are(shapes[first : first + 5], box) for box in _BOXES):
            boxes.append(lines[first : first + 5])
            at = first + 5
            has_outliers = shapes[at : at + 1] == ["outliers"]
            outliers.append(lines[at] if has_outliers else None)
            at += has_outliers
        else:
            others.append(lines[at])
            at += 1
    return others, boxes, outliers


def _stands(box: list[Any]) -> bool:
    return _are([_shape(line) for line in box], _BOXES[0])


def _are(shapes: list[str], box: str) -> bool:
    return len(shapes) == len(box) and all(map(str.__contains__, shapes, box))


def _shape(line: Any) -> str:
    """Return V for a vertical stroke, H for a horizontal one, both for a dot, or another word."""
    xs, ys = line.get_xdata(), line.get_ydata()
    if len(xs) == 2:
        return ("V" if xs[0] == xs[1] else "") + ("H" if ys[0] == ys[1] else "")
    if len(xs) == 5 and xs[0] == xs[4] and ys[0] == ys[4]:
        return "box"
    return "outliers" if _is_marked(line) or not len(xs) else "other"


def _of_box(lines: list[Any], axes: Any) -> tuple[Any, ...]:
    stands = _stands(lines)
    low, high, _, _, median = (each.get_ydata() if stands else each.get_xdata() for each in lines)
    place = lines[0].get_xdata()[0] if stands else lines[0].get_ydata()[0]
    names = _names(axes.xaxis if stands else axes.yaxis)
    return (_named(float(place), names), low[1], low[0], median[0], high[0], high[1])


def _coordinate(value: Any) -> float | str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _text(value)
    if hasattr(value, "isoformat"):
        return _text(value.isoformat())
    if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # numpy.datetime64
        return _text(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _text(value)
    return number if math.isfinite(number) else None


def _label(label: object) -> str:
    """Return a label of the program's; matplotlib's own begin with an underscore."""
    text = _text(label)
    return "" if text.startswith("_") else text


def _text(value: object) -> str:
    return str(value)[:_CHARACTERS].encode("utf-8", "replace").decode()
