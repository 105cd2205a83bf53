"""`Chart`: the data of a chart that a program drew, decoded from its own word.

The guest reads the data from its figures (`cell/charts.py`).  It may lie, so the types limit every
part: 256 KiB of charts decode to less than 12 MiB.
"""

from typing import Annotated, Literal

import msgspec

from .messages import MOST_CHART_BYTES, MOST_CHARTS, decode

_LARGEST = 1.7976931348623157e308  # of a float: what is beyond, and NaN, is refused
_MANY = 10_000
_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Coordinate = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | _Text | None
_Point = Annotated[tuple[_Coordinate, ...], msgspec.Meta(max_length=64)]
_MOST_TICKS = 64
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

SeriesType = Literal["line", "scatter", "bar", "pie", "box"]


class ChartAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An axis: its label, the unit at the end of that in parentheses or brackets, and its scale, such
    as linear, log, categorical or datetime.

    ticks, tick_labels: the places of the ticks, moments on an axis of times, and what stands there
    """

    label: _Text = ""
    unit: _Text = ""
    scale: _Text = "linear"
    ticks: Annotated[tuple[_Coordinate, ...], msgspec.Meta(max_length=_MOST_TICKS)] = ()
    tick_labels: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=_MOST_TICKS)] = ()


class ChartSeries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A series of points, each of numbers, texts and None for what is missing.

    line, scatter: (x, y)
    bar: (category or position, value)
    pie: (label, share of the circle)
    box: (category or position, low end, first quartile, median, third quartile, high end)

    total: how many points it has in the figure; of many, some at even distances are kept
    outliers: of boxes: (category or position, value)
    """

    type: SeriesType
    label: _Text = ""
    points: Annotated[tuple[_Point, ...], msgspec.Meta(max_length=_MANY)] = ()
    total: _Count = 0
    outliers: Annotated[tuple[_Point, ...], msgspec.Meta(max_length=_MANY)] = ()


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data of one pair of axes in a figure; `picture` names the artifact that shows the figure.

    series: empty if the axes show something else
    figure, figure_title: its text, such as <Figure size 640x480 with 1 Axes>, and its own title
    """

    title: _Text = ""
    x: ChartAxis = ChartAxis()
    y: ChartAxis = ChartAxis()
    series: Annotated[tuple[ChartSeries, ...], msgspec.Meta(max_length=64)] = ()
    picture: _Text = ""
    figure: _Text = ""
    figure_title: _Text = ""


_Charts = Annotated[tuple[tuple[_Count, Chart], ...], msgspec.Meta(max_length=MOST_CHARTS)]


def charts_of(data: bytes, names: tuple[str, ...]) -> tuple[Chart, ...]:
    """Return the charts in the words of a guest, none if these are malformed; each has the number of
    its picture, counted from 1, in `names`."""
    if len(data) > MOST_CHART_BYTES:
        return ()
    try:
        told: tuple[tuple[int, Chart], ...] = decode(data, _Charts)
    except msgspec.DecodeError:
        return ()
    return tuple(
        msgspec.structs.replace(chart, picture=names[at - 1] if 0 < at <= len(names) else "")
        for at, chart in told
    )
