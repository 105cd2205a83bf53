"""Texts of programs in the page: shown as text, whatever they are, and nothing of them executes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cellwright.harness.dashboard import dashboard_page
from cellwright.harness.dashboard.dashboard_page import live_page, policy, static_page
from tests.browser import Browser, Page
from tests.harness.dashboard.overviews import VIEWS, full, hostile

SCRIPTS = (
    "<script>window.beacon = 1</script>",
    "</script><script>window.beacon = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.beacon = 1'>",
    '<svg onload="window.beacon = 1"><script>window.beacon = 1</script></svg>',
    '"><iframe srcdoc="<script>parent.beacon = 1</script>"></iframe>',
    "javascript:window.beacon=1//",
    "{data}{script}{policy}]]>&lt;b&gt;",
)
HIDDEN = {
    "\x1b[31mred\x1b]0;title\x07": "\\x1b[31mred\\x1b]0;title\\x07",
    "\u202egnp.exe\u2066": "\\u202egnp.exe\\u2066",
    "a\u200bb\ufeffc\U000e0041": "a\\u200bb\\ufeffc\\U000e0041",
    "zero\0byte\r": "zero\\x00byte\\r",
    "half \ud800 line\u2028": "half \\ud800 line\\u2028",
}
_NOT_SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
_TAGS = {
    "A", "BUTTON", "CODE", "DD", "DETAILS", "DIV", "DL", "DT", "H1", "H2", "I", "INPUT", "LABEL", "LI",
    "METER", "OPTION", "P", "PRE", "SECTION", "SELECT", "SPAN", "SUMMARY", "TABLE", "TBODY", "TD",
    "TH", "THEAD", "TIME", "TR", "UL", "svg", "path", "text",
}  # fmt: skip
_SET = "typeof window.beacon !== 'undefined'"
_LOOK = """[...document.querySelectorAll('main *, nav *, header *')].map((each) =>
  [each.tagName, [...each.attributes].map((one) => one.name), each.getAttribute('href') ?? '#'])"""


def _places(shown: Page) -> list[str]:
    """Return every place of the page: its views, and its runs."""
    runs = shown.evaluate(
        "[...data.runs.map((run) => run.id), ...(data.durable ?? []).map((run) => run.run)]"
        ".map((id) => '#runs/' + encodeURIComponent(id))"
    )
    return [f"#{view}" for view in VIEWS] + runs


def _check(shown: Page) -> None:
    """Assert that the page has only elements of its own, and that nothing executed."""
    for tag, attributes, leads_to in shown.evaluate(_LOOK):
        assert tag in _TAGS
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert leads_to.startswith("#")
    assert not shown.evaluate(_SET)
    assert not _NOT_SHOWN.search(shown.evaluate("document.body.innerText"))


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" ".join(SCRIPTS), " ".join(SCRIPTS)),
        ("<!--<script>", "<!--<script>"),  # alone: it changes how a browser reads what follows
        (" ".join(HIDDEN), " ".join(HIDDEN.values())),
    ],
    ids=["markup", "comment", "hidden characters"],
)
def test_a_text_is_shown_as_text_in_every_view(
    text: str, expected: str, browser: Browser, file: Path
) -> None:
    file.write_bytes(static_page(hostile(text)))
    shown = browser.page(file.as_uri())
    for place in _places(shown):
        words = shown.show(place)
        shown.evaluate(
            "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
        )
        assert " ".join(expected.split()) in " ".join(words.split()), place
        _check(shown)
    assert shown.complaints() == []
    assert shown.requests() == [file.as_uri()]


@pytest.mark.needs("chromium")
def test_ten_megabytes_of_text_in_every_field_are_cut(browser: Browser, file: Path) -> None:
    made = static_page(hostile("<b>" * (10_000_000 // 3)))
    assert len(made) < 4 * dashboard_page.MOST_CHARACTERS
    file.write_bytes(made)
    shown = browser.page(file.as_uri())
    for place in _places(shown):
        assert "⟨cut: 9,999,999 characters⟩" in shown.show(place)
        _check(shown)
    assert shown.complaints() == []


def test_all_texts_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_page, "MOST_CHARACTERS", 5000)
    few = dashboard_page.encoded(hostile("x" * 4000))
    assert few.count(b"x") <= 5000
    assert "⟨cut: 4,000 characters⟩".encode() in few


# What these tests would miss if they tested nothing


def _without_policy(made: bytes) -> bytes:
    return re.sub(rb'<meta http-equiv="Content-Security-Policy"[^>]*>', b"", made)


def _as_markup(name: str, part: Callable[[str], bytes] = dashboard_page._part) -> bytes:
    """Return a part of the page whose script makes elements of texts."""
    written = (
        b"made.append(child instanceof Node ? child : document.createTextNode(String(child)));"
    )
    unsafe = b"if (child instanceof Node) made.append(child); else made.innerHTML += String(child);"
    found = part(name)
    if name == "page.js":
        assert written in found
    return found.replace(written, unsafe)


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("is_held", [False, True], ids=["without policy", "with policy"])
@pytest.mark.parametrize("missing", ["escapes in JSON", "text nodes"])
def test_without_a_protection_a_script_executes_but_for_the_policy(
    missing: str, is_held: bool, browser: Browser, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above see an execution, and the policy holds where the page's own code does not."""
    if missing == "text nodes":
        monkeypatch.setattr(dashboard_page, "_part", _as_markup)
        text = SCRIPTS[3]
    else:
        monkeypatch.setattr(dashboard_page, "_IN_A_PAGE", ())
        text = SCRIPTS[1]
    made = static_page(hostile(text))
    file.write_bytes(made if is_held else _without_policy(made))
    shown = browser.page(file.as_uri())
    if is_held:
        assert shown.complaints()
        assert not shown.evaluate(_SET)
    else:
        shown.wait_for(_SET)


def test_the_policy_names_nothing_but_the_parts_of_the_page() -> None:
    for rules in (policy("'none'"), policy("'self'")):
        directives = dict(each.split(" ", 1) for each in rules.split("; "))
        assert directives.pop("default-src") == "'none'"
        assert directives.pop("frame-ancestors") == "'none'"
        assert "unsafe" not in rules
        assert "http" not in rules
    made = live_page()
    assert made.count(b"<script") == 2
    assert not re.search(rb"\son[a-z]+=|\ssrc=|url\(|@import|style=", made)
    assert b"innerHTML" not in static_page(full())
