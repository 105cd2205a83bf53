"""The bundles that a notebook shows of a program: safe on a page that executes scripts."""

import html.parser

import pytest

from cellwright.harness.adapters.jupyter.notebook_session import picture_bundle, safe_bundle

_SCRIPT = "<script>parent.escaped = 1</script>"


class _Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize(
    "content",
    [_SCRIPT, f'"></iframe>{_SCRIPT}', f"'>{_SCRIPT}", f"&quot;>{_SCRIPT}", f"\0{_SCRIPT}"],
)
@pytest.mark.parametrize("mime", ["text/html", "image/svg+xml"])
def test_html_and_svg_are_one_frame_without_scripts_or_origin(mime: str, content: str) -> None:
    parser = _Elements()
    parser.feed(safe_bundle({mime: content})["text/html"])
    ((tag, attributes),) = parser.found
    assert tag == "iframe"
    assert attributes["sandbox"] == ""
    assert "default-src 'none'" in str(attributes["srcdoc"])


@pytest.mark.parametrize(
    "mime", ["application/javascript", "text/javascript", "application/vnd.jupyter.widget-view+json", "application/vnd.plotly.v1+json", "application/pdf"],
)  # fmt: skip
def test_types_that_a_page_would_execute_are_left_out(mime: str) -> None:
    assert safe_bundle({mime: _SCRIPT, "text/plain": "x"}) == {"text/plain": "x"}


@pytest.mark.parametrize("mime", ["text/markdown", "text/latex"])
def test_text_that_a_page_would_interpret_is_shown_as_text(mime: str) -> None:
    assert safe_bundle({mime: _SCRIPT, "text/plain": "<X>"}) == {"text/plain": _SCRIPT}


@pytest.mark.parametrize("content", [_SCRIPT, {"a": 1}, 3, "a b"])
def test_a_picture_that_is_not_base64_is_left_out(content: object) -> None:
    assert safe_bundle({"image/png": content}) == {}


def test_pictures_of_the_program_are_passed_on() -> None:
    assert picture_bundle("image/png", b"\x89PNG") == {"image/png": "iVBORw=="}
    assert set(picture_bundle("image/svg+xml", b"<svg/>")) == {"text/html"}
    assert picture_bundle("text/markdown", b"*x*") == {"text/plain": "*x*"}
