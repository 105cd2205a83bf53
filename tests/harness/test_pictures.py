"""Pictures: what a value shows of itself, and figures, by the real libraries."""

import io
import sysconfig
from collections.abc import Iterator

import pytest

from cellwright import Policy, Sandbox, Session
from cellwright.policies.policy import Limits, Python
from tests.conftest import OPTIONAL

CSV = "month,sold\n" + "".join(f"{month},{month * month}\n" for month in range(1, 13))
SHOWS = "class Shows:\n    def _repr_{kind}_(self): return {content!r}\nShows()"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    policy = Policy(
        python=Python(
            path=(sysconfig.get_path("purelib"),), preload=("matplotlib.pyplot", "pandas")
        ),
        limits=Limits(memory_bytes=1 << 29),
        optional_layers=OPTIONAL,
    )
    with Sandbox(policy=policy, pool=0) as box:
        yield box


def test_an_analysis_with_pandas_and_matplotlib_gives_a_table_and_a_picture(
    session: Session,
) -> None:
    from PIL import Image

    session.upload("sales.csv", CSV)
    session.execute(
        "import pandas as pd, matplotlib.pyplot as plt\nsales = pd.read_csv('sales.csv')"
    )
    assert session.execute("int(sales.sold.sum())").value == 650
    drawn = session.execute(
        "sales.plot(x='month', y='sold', kind='bar', color='red')\nsales.describe()"
    )
    assert drawn.violations == ()
    assert [(each.name, each.mime) for each in drawn.artifacts] == [
        ("picture-1.html", "text/html"), ("picture-1.png", "image/png"),
    ]  # fmt: skip
    assert b"<table" in drawn.artifacts[0].data
    assert "mean" in drawn.value  # its text, bounded
    picture = Image.open(io.BytesIO(drawn.artifacts[1].data)).convert("RGB")
    assert picture.width > 300
    red = sum(count for count, color in picture.getcolors(1 << 20) or () if color == (255, 0, 0))
    assert 0.05 < red / (picture.width * picture.height) < 0.5
    assert session.execute("plt.get_fignums()").value == []
    assert session.execute("1").artifacts == ()


def test_a_line_is_where_the_data_of_the_csv_have_it(session: Session) -> None:
    """Fifty pixels a unit, from edge to edge but for a margin: a pixel is a number."""
    from PIL import Image

    session.upload("walk.csv", "x,y\n0,0\n4,8\n8,4\n10,10\n")
    session.execute(
        "import pandas as pd, matplotlib.pyplot as plt\nwalk = pd.read_csv('walk.csv')\nwalk.shape"
    )
    drawn = session.execute(
        "figure = plt.figure(figsize=(5, 5), dpi=100)\naxes = figure.add_axes((0, 0, 1, 1))\naxes.axis('off')\n"
        "axes.set(xlim=(0, 10), ylim=(0, 10))\nline = axes.plot(walk.x, walk.y, color='blue', linewidth=4)"
    )
    (picture,) = drawn.artifacts
    assert picture.mime == "image/png"
    image = Image.open(io.BytesIO(picture.data)).convert("RGB")
    margin = (image.width - 500) // 2
    assert 0 <= margin < 20
    assert image.height == image.width
    white, blue = (255, 255, 255), (0, 0, 255)
    on_the_line = ((1, 2), (2, 4), (3, 6), (5, 7), (6, 6), (7, 5), (9, 7))
    for x, y in on_the_line:
        column, row = margin + 50 * x, margin + 500 - 50 * y
        seen = [image.getpixel((column, row + off)) for off in (-25, 0, 25)]
        assert seen == [white, blue, white], (x, y)
    shares = {
        color: count / (image.width * image.height)
        for count, color in image.getcolors(1 << 16) or ()
    }
    assert 0.01 < shares[blue] < 0.05
    assert shares[white] > 0.9


@pytest.mark.parametrize(
    ("kind", "content", "name", "mime"),
    [
        ("png", b"\x89PNG", "picture-1.png", "image/png"),
        ("jpeg", b"\xff\xd8", "picture-1.jpeg", "image/jpeg"),
        ("svg", "<svg/>", "picture-1.svg", "image/svg+xml"),
        ("html", "<b>\u00fc</b>", "picture-1.html", "text/html"),
        ("markdown", ("# x", {}), "picture-1.md", "text/markdown"),
    ],
)
def test_a_value_may_show_itself(
    strict: Sandbox, kind: str, content: object, name: str, mime: str
) -> None:
    (shown,) = strict.execute(SHOWS.format(kind=kind, content=content)).artifacts
    text = content[0] if isinstance(content, tuple) else content
    assert (shown.name, shown.mime) == (name, mime)
    assert shown.data == (text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize(
    "code",
    [
        "class Fails:\n    def _repr_png_(self): raise ValueError\nFails()",
        "class Odd:\n    def _repr_png_(self): return 5\nOdd()",
        "class NotAClass:\n    pass\nx = NotAClass()\nx._repr_png_ = lambda: b'instance'\nx",
        SHOWS.format(kind="png", content=None),
        "class Large:\n    def _repr_png_(self): return b'x' * (17 << 20)\nLarge()",
    ],
)
def test_what_shows_nothing_useful_leaves_the_value(strict: Sandbox, code: str) -> None:
    result = strict.execute(code)
    assert result.ok
    assert result.artifacts == ()
    assert "object at 0x" in result.value


def test_pictures_and_collected_files_come_together(strict: Sandbox) -> None:
    code = "open('a.txt', 'w').write('x')\n" + SHOWS.format(kind="png", content=b"p")
    result = strict.execute(code, collect=["*.txt"])
    assert [each.name for each in result.artifacts] == ["picture-1.png", "a.txt"]


def test_a_forged_picture_has_no_name_and_no_type_of_its_own(strict: Sandbox) -> None:
    """What comes is the guest's word: a type that is not known is dropped, a name is ours."""
    forged = (
        "import os\n"
        "def packed(b, mark): return bytes([mark, len(b)]) + b\n"
        "frame = bytes([0x97]) + packed(b'Finished', 0xd9) + b'\\xc0' * 4 + b'\\xc3' + bytes([0x92])\n"
        "for mime in (b'../../etc/passwd', b'image/png'):\n"
        "    frame += bytes([0x92]) + packed(mime, 0xd9) + packed(b'data', 0xc4)\n"
        "os.write(3, b'\\x00' + frame); os._exit(0)"
    )
    result = strict.execute(forged)
    assert [(each.name, each.mime) for each in result.artifacts] == [("picture-1.png", "image/png")]
