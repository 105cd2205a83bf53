"""Charts: the data of figures beside their pictures, typed and limited on the host.

Most tests have a stand-in for matplotlib in the cell, whose objects answer as its objects do.
"""

import json
import sysconfig
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cellwright import Policy, Sandbox, SandboxResult
from cellwright.policies.policy import Limits, Python
from cellwright.results import Chart, ChartAxis, ChartSeries
from cellwright.runner.messages import CHARTS, MOST_CHART_BYTES
from cellwright.runner.requests.result import charts_of
from tests.conftest import OPTIONAL
from tests.harness.test_cli import run
from tests.work import cost_of

STANDIN = """
import sys, types

class Given:
    def __init__(self, **given): self.given = given
    def __getattr__(self, name):
        if name.startswith("get_") and name[4:] in self.given:
            return lambda **options: self.given[name[4:]]
        if name in self.given:
            return self.given[name]
        raise AttributeError(name)

class Line2D(Given): pass
class PathCollection(Given): pass
class BarContainer(Given): pass
class ErrorbarContainer(list): pass
class Wedge(Given): pass
class ScalarFormatter: pass
class FixedFormatter: pass
class AutoDateFormatter: pass
class AutoLocator: pass

DATA = object()

def axis(formatter=ScalarFormatter, ticks=(), names=()):
    return Given(major_formatter=formatter(), major_locator=AutoLocator(), ticklocs=list(ticks),
                 ticklabels=[Given(text=name) for name in names])

def line(xs, ys, label="_child0", linestyle="-", marker="None", transform=DATA):
    return Line2D(xdata=xs, ydata=ys, label=label, linestyle=linestyle, marker=marker, transform=transform)

def bars(values, label="_child0", width=1.0):
    made = [Given(x=at - width / 2, width=width, height=value) for at, value in enumerate(values)]
    return BarContainer(patches=made, label=label)

def axes(title="", x="", y="", scale="linear", xaxis=None, **parts):
    empty = dict(lines=[], collections=[], containers=[], patches=[])
    return Given(title=title, xlabel=x, ylabel=y, xscale="linear", yscale=scale, transData=DATA,
                 xaxis=xaxis or axis(), yaxis=axis(), **(empty | parts))

class Figure:
    def __init__(self, *axes): self.axes = axes
    def savefig(self, file, format, bbox_inches): file.write(b"PNG")
    def __repr__(self): return ""

class PyPlot(types.ModuleType):
    figures = {}
    def get_fignums(self): return list(self.figures)
    def figure(self, number): return self.figures[number]
    def close(self, number): del self.figures[number]

pyplot = sys.modules["matplotlib.pyplot"] = PyPlot("matplotlib.pyplot")

def show(*axes): pyplot.figures[len(pyplot.figures) + 1] = Figure(*axes)
"""
FILES = {"standin.py": STANDIN}


def drawn(strict: Sandbox, code: str) -> SandboxResult:
    result = strict.execute(f"from standin import *\n{code}", files=FILES)
    assert result.ok, result.to_dict()
    return result


def series_of(strict: Sandbox, code: str) -> tuple[ChartSeries, ...]:
    (chart,) = drawn(strict, f"show(axes({code}))").charts
    return chart.series


def test_a_figure_has_its_data_beside_its_picture(strict: Sandbox) -> None:
    code = (
        "show(axes('Title', 'time (s)', 'price [EUR]', 'log', lines=["
        "line([1, 2, 3], [4.5, float('nan'), None], 'a'), line([1], [2], 'b', 'None', 'o')]))"
    )
    result = drawn(strict, code)
    assert [(each.name, each.data) for each in result.artifacts] == [("picture-1.png", b"PNG")]
    a = ChartSeries("line", "a", ((1, 4.5), (2, None), (3, None)), 3)
    b = ChartSeries("scatter", "b", ((1, 2),), 1)
    x, y = ChartAxis("time (s)", "s", "linear"), ChartAxis("price [EUR]", "EUR", "log")
    assert result.charts == (Chart("Title", x, y, (a, b), "picture-1.png"),)
    told = json.loads(json.dumps(result.to_dict()))["charts"]
    assert told[0]["series"][0]["points"] == [[1, 4.5], [2, None], [3, None]]


def test_each_kind_of_series_is_known(strict: Sandbox) -> None:
    names = "xaxis=axis(FixedFormatter, [0, 1], ['x', 'y'])"
    assert series_of(strict, f"{names}, containers=[bars([5, 6], 'q')]") == (
        ChartSeries("bar", "q", (("x", 5), ("y", 6)), 2),
    )
    assert series_of(strict, "containers=[bars([5])]") == (ChartSeries("bar", "", ((0, 5),), 1),)
    dots = "collections=[PathCollection(offsets=[(1, 2), (3, 4)], label='s')]"
    assert series_of(strict, dots) == (ChartSeries("scatter", "s", ((1, 2), (3, 4)), 2),)
    pie = "patches=[Wedge(theta1=0, theta2=90, label='a'), Wedge(theta1=90, theta2=360, label='b')]"
    assert series_of(strict, pie) == (ChartSeries("pie", "", (("a", 0.25), ("b", 0.75)), 2),)
    box = (
        "lines=[line([1, 2, 2, 1, 1], [2, 2, 4, 4, 2]), line([1, 1], [2, 0]), line([1, 1], [4, 9]), "
        "line([0, 2], [0, 0]), line([0, 2], [9, 9]), line([0, 2], [3, 3]), "
        "line([1], [50], '', 'None', 'o'), line([1, 5], [7, 8], 'other')]"
    )
    assert series_of(strict, box) == (
        ChartSeries("line", "other", ((1, 7), (5, 8)), 2),
        ChartSeries("box", "", ((1, 0, 2, 3, 4, 9),), 1, ((1, 50),)),
    )


def test_times_and_names_are_text(strict: Sandbox) -> None:
    code = (
        "import datetime\nday = datetime.date(2026, 1, 2)\n"
        "show(axes(xaxis=axis(AutoDateFormatter), lines=[line([day], ['x' * 500])]))"
    )
    (chart,) = drawn(strict, code).charts
    assert chart.x.scale == "datetime"
    assert chart.series[0].points == (("2026-01-02", "x" * 200),)


def test_lines_that_are_no_data_and_axes_without_data_have_no_chart(strict: Sandbox) -> None:
    code = (
        "cap = line([1], [1])\n"
        "show(axes(lines=[line([0, 1], [3, 3], transform=object()), cap],"
        " containers=[ErrorbarContainer([None, [cap]])]), axes(), object(), axes(lines=[object()]))"
    )
    result = drawn(strict, code)
    assert result.charts == ()
    assert len(result.artifacts) == 1


def test_each_chart_names_its_picture(strict: Sandbox) -> None:
    code = (
        "class Html:\n    def _repr_html_(self): return '<b>'\n"
        "show(axes('1', lines=[line([1], [1])]), axes('2', lines=[line([1], [1])]))\n"
        "show(axes('3', lines=[line([1], [1])]))\nHtml()"
    )
    result = drawn(strict, code)
    assert [each.name for each in result.artifacts] == [
        "picture-1.html", "picture-1.png", "picture-2.png",
    ]  # fmt: skip
    assert [(each.title, each.picture) for each in result.charts] == [
        ("1", "picture-1.png"), ("2", "picture-1.png"), ("3", "picture-2.png"),
    ]  # fmt: skip


def test_of_many_points_some_are_kept_at_even_distances(strict: Sandbox) -> None:
    (one,) = series_of(strict, "lines=[line(range(10_000), range(10_000))]")
    assert (len(one.points), one.total) == (1000, 10_000)
    assert one.points[:3] == ((0, 0), (10, 10), (20, 20))
    many = series_of(strict, "lines=[line(range(1000), range(1000))] * 100")
    assert len(many) == 64
    assert sum(len(each.points) for each in many) <= 10_000
    shows = "show(*[axes(lines=[line(range(1000), [n / 7 for n in range(1000)])] * 10)] * 5)"
    assert len(drawn(strict, shows).charts) == 1  # 190 KB each: the others do not fit into 256 KiB


def test_a_session_shows_a_figure_once(strict: Sandbox) -> None:
    with strict.session() as session:
        code = "from standin import *\nshow(axes(lines=[line([1], [1])]))"
        assert len(session.execute(code, files=FILES).charts) == 1
        assert session.execute("1").charts == ()


def test_a_table_is_text_on_a_terminal_and_html_in_a_file(strict: Sandbox) -> None:
    code = (
        "class Table:\n    def _repr_html_(self): return '<table>'\n"
        "    def __repr__(self): return 'a  b'\nTable()"
    )
    result = strict.execute(code)
    assert result.value == "a  b"
    assert [(each.mime, each.data) for each in result.artifacts] == [("text/html", b"<table>")]
    assert run("-c", code).stdout == "a  b\n"


def encoded(*points: object, **fields: object) -> bytes:
    series = {"type": "line", "points": list(points)}
    return msgspec.msgpack.encode([(1, {"title": "t", "series": [series]} | fields)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encoded((float("nan"), 1)),
        encoded((float("inf"), 1)),
        encoded((True, 1)),
        encoded(([1], 1)),
        encoded(("x" * 201, 1)),
        encoded((1,) * 65),
        encoded(*[(1, 1)] * 10_001),
        encoded(title="x" * 201),
        encoded(other=1),
        encoded(series=[{"type": "map"}]),
        encoded(series=[{"type": "line"}] * 65),
        msgspec.msgpack.encode([(1, {})] * 33),
        msgspec.msgpack.encode([(-1, {})]),
        encoded((1, 1)) + b"\0",
        encoded((1, 1), title="x").replace(b"x", b"\xff"),
        encoded(series=[{"type": "line", "label": "x"}] * 64, title="").ljust(MOST_CHART_BYTES + 1),
    ],
    ids=range(18),
)
def test_malformed_charts_are_dropped(data: bytes) -> None:
    assert charts_of(encoded((1, "x")), ("p.png",))[0].series[0].points == ((1, "x"),)
    assert charts_of(data, ("p.png",)) == ()


def test_a_chart_names_no_picture_but_its_own() -> None:
    data = msgspec.msgpack.encode([(at, {"picture": "/etc/passwd"}) for at in (0, 1, 2, 3)])
    named = [each.picture for each in charts_of(data, ("one.png", ""))]
    assert named == ["", "one.png", "", ""]


def test_charts_take_a_bounded_number_of_bytes_on_the_host() -> None:
    for point in ((), (1, 1), ("", ""), (None,) * 64):
        for count in (1, 25):
            series = [
                {"type": "bar", "points": [point] * (10_000 if len(point) < 3 else 150)}
            ] * count
            data = msgspec.msgpack.encode([(1, {"series": series})])
            if len(data) <= MOST_CHART_BYTES:
                assert len(charts_of(data, ())) == 1
                assert cost_of(lambda data=data: charts_of(data, ())).memory_bytes < 12 << 20  # type: ignore[misc]


def test_a_forged_chart_is_dropped_and_the_result_stays(strict: Sandbox) -> None:
    forged = (
        "import os\n"
        "def packed(b, mark): return bytes([mark, len(b)]) + b\n"
        "frame = bytes([0x97]) + packed(b'Finished', 0xd9) + b'\\xc0' * 4 + b'\\xc3' + bytes([0x91])\n"
        f"frame += bytes([0x92]) + packed({CHARTS.encode()!r}, 0xd9) + packed({{data!r}}, 0xc4)\n"
        "os.write(3, b'\\x00' + frame); os._exit(0)"
    )
    result = strict.execute(forged.format(data=b"\x91\x92\x01\x80"))
    assert result.charts == (Chart(),)
    result = strict.execute(forged.format(data=b"\xff"))
    assert (result.ok, result.charts, result.artifacts) == (True, (), ())


REAL: tuple[tuple[str, Any], ...] = (
    ("plt.plot([1, 2], [3, 4], label='a'); plt.axhline(3)", ChartSeries("line", "a", ((1, 3), (2, 4)), 2)),
    ("plt.plot(['u', 'v'], [3, 4], 'o')", ChartSeries("scatter", "", (("u", 3), ("v", 4)), 2)),
    ("plt.scatter([1, 2], [3, 4])", ChartSeries("scatter", "", ((1, 3), (2, 4)), 2)),
    ("plt.bar(['u', 'v'], [3, 4])", ChartSeries("bar", "", (("u", 3), ("v", 4)), 2)),
    ("plt.barh(['u', 'v'], [3, 4], label='b')", ChartSeries("bar", "b", (("u", 3), ("v", 4)), 2)),
    ("plt.pie([1, 3], labels=['u', 'v'])", ChartSeries("pie", "", (("u", 0.25), ("v", 0.75)), 2)),
    ("plt.boxplot([[1, 2, 3, 4, 50]])", ChartSeries("box", "", (("1", 1, 2, 3, 4, 4),), 1, (("1", 50),))),
    ("plt.boxplot([[1, 2, 3, 4, 50]], vert=False, patch_artist=True); plt.yticks([1], ['u'])",
     ChartSeries("box", "", (("u", 1, 2, 3, 4, 4),), 1, (("u", 50),))),
    ("plt.errorbar([1, 2], [3, 4], yerr=1, capsize=2)", ChartSeries("line", "", ((1, 3), (2, 4)), 2)),
)  # fmt: skip


@pytest.fixture(scope="module")
def plotting() -> Iterator[Sandbox]:
    pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: only stand-ins are tested"
    )
    policy = Policy(
        python=Python(path=(sysconfig.get_path("purelib"),), preload=("matplotlib.pyplot",)),
        limits=Limits(memory_bytes=1 << 29),
        optional_layers=OPTIONAL,
    )
    with Sandbox(policy=policy, pool=0) as made:
        yield made


@pytest.mark.parametrize(("code", "series"), REAL, ids=range(len(REAL)))
def test_charts_of_the_real_library(plotting: Sandbox, code: str, series: ChartSeries) -> None:
    result = plotting.execute(f"import matplotlib.pyplot as plt\n{code}; plt.title('T')")
    (chart,) = result.charts
    assert (chart.title, chart.picture) == ("T", "picture-1.png")
    assert chart.series == (series,)


def test_a_warning_about_a_figure_names_no_file_of_ours(strict: Sandbox) -> None:
    """Such as that of matplotlib about a font that lacks a character."""
    code = (
        "import warnings\n"
        "def savefig(self, file, **_):\n    warnings.warn('no glyph', stacklevel=2)\n"
        "    file.write(b'PNG')\n"
        "Figure.savefig = savefig\nshow(axes('T', lines=[line([1], [1])]))"
    )
    result = drawn(strict, code)
    assert result.stderr == "UserWarning: no glyph\n"
    assert result.artifacts[0].data == b"PNG"
