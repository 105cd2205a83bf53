"""The picture of a refusal in README.md shows what a terminal shows, and needs nothing else."""

import importlib.machinery
import re
import types
import xml.etree.ElementTree as ET

import pytest

from tests.conftest import ROOT
from tests.documents import blocks_of, text_of

_SVG = "{http://www.w3.org/2000/svg}"
PICTURE = (ROOT / "harness/examples/refusal.svg").read_text()


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    """Return scripts/picture as a module, without a `__pycache__` beside it."""
    module = types.ModuleType("picture")
    module.__file__ = str(ROOT / "scripts" / "picture")
    code = importlib.machinery.SourceFileLoader("picture", module.__file__).get_data(
        module.__file__
    )
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    return module


def lines_of(svg: str) -> list[str]:
    """Return the lines that a picture shows; any time and any size is N."""
    rows: dict[str, str] = {}
    for each in ET.fromstring(svg).iter(f"{_SVG}text"):
        rows[each.attrib["y"]] = rows.get(each.attrib["y"], "") + (each.text or "")
    return list(rows.values())


def without_numbers(text: str) -> str:
    return re.sub(r"\d+\.\d (ms|MiB)", r"N \1", text)


@pytest.mark.needs("cgroup")
def test_the_picture_shows_what_its_commands_print_now(script: types.ModuleType) -> None:
    now = "".join(lines_of(script.drawn(script.record())))
    assert without_numbers(now) == without_numbers("".join(lines_of(PICTURE)))


def test_the_readme_has_the_text_of_the_picture() -> None:
    block = next(each for each in blocks_of("README.md") if each.kind == "console")
    shown = without_numbers("".join(lines_of(PICTURE)))
    assert without_numbers(block.text.replace("\n", "")) == shown
    assert re.search(r"!\[[^\]]{40,}\]\(harness/examples/refusal.svg\)", text_of("README.md"))


def test_the_picture_stands_alone_and_is_readable_on_any_page() -> None:
    """It has no script, style, link or font, and a ground of its own below every letter."""
    tags = [each.tag.removeprefix(_SVG) for each in ET.fromstring(PICTURE).iter()]
    assert set(tags) == {"svg", "title", "rect", "g", "text"}
    assert "href" not in PICTURE
    colours = set(re.findall(r"fill=\"(#\w+)\"", PICTURE))
    ground = luminance(re.findall(r'<rect [^>]*fill="(#\w+)"', PICTURE)[0])
    for colour in colours - {"#1f2430"}:
        assert (luminance(colour) + 0.05) / (ground + 0.05) >= 4.5, colour


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_terminal_wraps_and_colours_as_is_drawn(script: types.ModuleType) -> None:
    parts = script.parts_of("a\x1b[33mb\x1b[0mc\x1b[1;31md")
    assert [(each.text, each.is_bold) for each in parts] == [
        ("a", False),
        ("b", False),
        ("c", False),
        ("d", True),
    ]
    assert [each.colour for each in parts] == [
        script.INK,
        script.COLOURS["33"],
        script.INK,
        script.COLOURS["31"],
    ]
    lines = script.wrapped([script.Part("x" * 100), script.Part("y" * 10)])
    assert [[len(part.text) for part in line] for line in lines] == [
        [100, script.COLUMNS - 100],
        [10 - (script.COLUMNS - 100)],
    ]
