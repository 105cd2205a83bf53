"""Charts as SVG: no script, nothing loaded, and colours that follow the reader's light or dark.

Drawn by hand because the reader's preference is a rule of CSS inside the picture, and because a
number has to stand beside every bar.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence

from .report import Bar, Bars, Chart, Curve, Curves

_WIDTH, _LABELS, _NUMBERS, _ROW, _HEAD = 860, 300, 150, 26, 44
_PLOT = _WIDTH - _LABELS - _NUMBERS
_HEIGHT, _LEFT, _RIGHT, _BOTTOM = 340, 64, 16, 52  # size and margins of curves
_COLOURS = 8
_STYLE = """<style>
svg { font: 13px system-ui, sans-serif; --ink: #24292f; --soft: #6e7781; --rule: #d8dee4;
  --c0: #3b6ea5; --c1: #b5651d; --c2: #4f8a5b; --c3: #8a5a9e; --c4: #a33a4a; --c5: #5f7480;
  --c6: #93762a; --c7: #2f8f8f; }
@media (prefers-color-scheme: dark) { svg { --ink: #d6dce3; --soft: #95a0ac; --rule: #3a424b;
  --c0: #7fadd9; --c1: #dd9a5b; --c2: #86bf91; --c3: #bb93cc; --c4: #dd8090; --c5: #9fb2bd;
  --c6: #cdb266; --c7: #6cc4c4; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .title { font-size: 15px; font-weight: 600; }
line, path { stroke: var(--rule); fill: none; } .curve { stroke-width: 2; }
</style>"""


def draw(chart: Chart) -> str:
    """Return a chart as one SVG element."""
    return _bars(chart) if isinstance(chart, Bars) else _lines(chart)


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{html.escape(title)}" style="max-width: {_WIDTH}px; width: 100%">'
    )
    return "\n".join([head, _STYLE, _text(0, 18, title, "title"), *parts, "</svg>"])


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = "") -> str:
    style = f' style="stroke: {colour}"' if colour else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{style}/>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="2" style="fill: {colour}"/>'


# Bars


def _bars(chart: Bars) -> str:
    begins = _begins(chart)
    ends = [begin + bar.value for begin, bar in zip(begins, chart.bars, strict=True)]
    highest = max([*ends, *(bar.high or 0 for bar in chart.bars if not chart.stacked), 1e-9])
    lowest = min([bar.value for bar in chart.bars if bar.value > 0], default=1.0)
    scale = _scale(highest, lowest / 2 if chart.logarithmic else None, _PLOT)
    rows = [
        part
        for number, (begin, bar) in enumerate(zip(begins, chart.bars, strict=True))
        for part in _bar(chart, bar, begin, number, scale)
    ]
    axis = f"{chart.unit}, logarithmic" if chart.logarithmic else chart.unit
    return _svg(
        _HEAD + _ROW * len(chart.bars) + 8, chart.title, [_text(_LABELS, 36, axis, "soft"), *rows]
    )


def _begins(chart: Bars) -> list[float]:
    """Return where each bar begins: at nothing, or where those before it end."""
    sums = [0.0]
    for bar in chart.bars:
        sums.append(sums[-1] + bar.value)
    return sums[:-1] if chart.stacked else [0.0] * len(chart.bars)


def _bar(
    chart: Bars, bar: Bar, begin: float, number: int, scale: Callable[[float], float]
) -> list[str]:
    top = _HEAD + _ROW * number
    left, right = sorted((scale(begin), scale(begin + bar.value)))  # a step may seem to cost less
    colour = f"var(--c{number % _COLOURS if chart.stacked else 0})"
    parts = [
        _text(_LABELS - 10, top + 16, bar.label, anchor="end"),
        _box(_LABELS + left, top + 3, max(right - left, 1), _ROW - 8, colour),
    ]
    edge = right
    if bar.low is not None and bar.high is not None and not chart.stacked:
        low, edge = scale(bar.low), max(right, scale(bar.high))
        middle = top + _ROW / 2 - 1
        parts.append(_rule(_LABELS + low, middle, _LABELS + scale(bar.high), middle, "var(--ink)"))
    words = number_in_words(bar.value)
    if chart.stacked:
        words = f"{bar.value:+.0f}, then {begin + bar.value:,.0f}" if number else words
    return [*parts, _text(_LABELS + edge + 6, top + 16, words)]


def number_in_words(value: float) -> str:
    """Return a number with three digits that say something."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _scale(highest: float, lowest: float | None, length: float) -> Callable[[float], float]:
    """Return value -> pixels; from `lowest` on logarithmic, without it from nothing on."""
    if lowest is None:
        return lambda value: value / highest * length
    low, high = math.log10(lowest), math.log10(max(highest, lowest * 1.01))
    return lambda value: (math.log10(max(value, lowest)) - low) / (high - low) * length


# Curves


def _lines(chart: Curves) -> str:
    points = [point for line in chart.lines for point in line.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low_x = min((x for x in xs if x > 0), default=0.1) if chart.logarithmic else None
    x_scale = _scale(max([*xs, 1e-9]), low_x, _WIDTH - _LEFT - _RIGHT)
    y_scale = _scale(max([*ys, 1e-9]) * 1.05, None, _HEIGHT - _HEAD - _BOTTOM)
    legend = (len(chart.lines) + 1) // 2 * 20

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x_scale(x), _HEIGHT - _BOTTOM - y_scale(y)

    parts = [*_axes(chart, xs, ys, place)]
    for number, line in enumerate(chart.lines):
        parts += _curve(line, number, place)
    return _svg(_HEIGHT + legend, chart.title, parts)


Place = Callable[[float, float], tuple[float, float]]


def _axes(chart: Curves, xs: Sequence[float], ys: Sequence[float], place: Place) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [_text(0, 36, chart.y, "soft")]
    for y in ticks(0, max([*ys, 1e-9]) * 1.002):  # 99.9 % has a 100 above it
        at = place(max(xs), y)[1]
        parts.append(_rule(_LEFT, at, _WIDTH - _RIGHT, at))
        parts.append(_text(_LEFT - 8, at + 4, f"{y:,g}", "soft", "end"))
    for x in decades(xs) if chart.logarithmic else ticks(0, max([*xs, 1e-9])):
        at = place(x, 0)[0]
        parts.append(_rule(at, _HEAD, at, bottom))
        parts.append(_text(at, bottom + 18, f"{x:,g}", "soft", "middle"))
    axis = f"{chart.x}, logarithmic" if chart.logarithmic else chart.x
    return [*parts, _text(_WIDTH - _RIGHT, bottom + 36, axis, "soft", "end")]


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    rough = max(high - low, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [low + step * number for number in range(int((high - low) / step + 1e-9) + 1)]


def decades(values: Sequence[float]) -> list[float]:
    """Return 1, 2 and 5 of each power of ten among `values`; powers alone where there are many."""
    low, high = min(value for value in values if value > 0), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 5 else (1,)
    every = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in every if low <= value <= high] or [low, high]


def _curve(line: Curve, number: int, place: Place) -> list[str]:
    colour = f"var(--c{number % _COLOURS})"
    spots = [place(x, y) for x, y in line.points]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    parts = [f'<path class="curve" d="{path}" style="stroke: {colour}"/>']
    if len(spots) <= 20:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: {colour}"/>' for x, y in spots
        ]
    x, y = _LEFT + (number % 2) * 400, _HEIGHT + 4 + number // 2 * 20
    mark = _box(x, y - 10, 12, 12, colour)
    return [*parts, mark, _text(x + 18, y, line.label)]
