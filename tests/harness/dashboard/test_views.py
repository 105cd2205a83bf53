"""The views of the page: their contents, and that a person without a mouse reaches them."""

from pathlib import Path

import pytest

from cellwright.harness.dashboard.dashboard_page import static_page
from tests.browser import Browser, Page
from tests.harness.dashboard.overviews import full

pytestmark = pytest.mark.needs("chromium")

EXPECTED = {
    "#overview": (
        "calls that wait",
        "cells ready",
        "of 8",
        "broken",
        "Tools made against tasks",
    ),
    "#approvals": (
        "send_mail",
        'to: "ann"',
        "the tool is risky",
        "runs approve runs.db an-approval",
    ),
    "#runs": ("a-run", "error", "750 ms", "3.0 MiB", "a-durable-r", "Not shown", "3 runs"),
    "#runs/a-run": (
        "until a cell was ready 250 ms",
        "returned",
        "refused",
        "mount_ns: not shown",
        "\u00d73",
    ),
    "#runs/a-durable-run": ("paused", "an ending", "send_mail", "waiting"),
    "#runs/unknown": ("Not found",),
    "#cells": ("1.2.3", "live", "1.0 MiB", "1 min 10 s", "closed: it was closed"),
    "#tools": ("a_tool", "needs approval", "4 (40 %)", "a_called_tool", "a-skill", "trusted"),
    "#network": ("target of connection", "192.0.2.1", "2.0 KiB", "500 ms"),
    "#violations": ("openat", "mount_ns: not shown", "cat"),
    "#chain": ("broken", "line 10: it is torn", "9:efef", "execution.start"),
    "#nothing/%E0%A4%A": ("Overview",),
}


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    file = tmp_path_factory.mktemp("views") / "page.html"
    file.write_bytes(static_page(full()))
    return browser.page(file.as_uri())


@pytest.mark.parametrize(("place", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_a_view_shows_its_data(place: str, expected: tuple[str, ...], shown: Page) -> None:
    words = shown.show(place)
    assert [each for each in expected if each not in words] == []
    assert "undefined" not in words
    assert "NaN" not in words
    assert shown.complaints() == []


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_view_is_wider_than_the_window_and_texts_stand_out(
    width: int, dark: bool, browser: Browser, file: Path
) -> None:
    file.write_bytes(static_page(full()))
    page = browser.page(file.as_uri(), width=width, dark=dark)
    for place in EXPECTED:
        page.show(place)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        assert page.evaluate(_LEAST_CONTRAST) >= 4.5, place  # WCAG 2.2, 1.4.3


# The least contrast of a visible text with the colour behind it.
_LEAST_CONTRAST = """(() => {
  const colour = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [[r, .2126], [g, .7152], [b, .0722]].reduce((sum, [part, share]) =>
    sum + share * (part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4), 0);
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const found = colour(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return colour(getComputedStyle(document.documentElement).backgroundColor);
  };
  const texts = [...document.querySelectorAll('body *')].filter((each) =>
    [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && each.checkVisibility()
    && !each.matches('script, style, noscript, option, :disabled'));
  return Math.min(...texts.map((each) => {
    const style = getComputedStyle(each);
    const pair = [light(colour(each.matches('text') ? style.fill : style.color)), light(behind(each))];
    return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
  }));
})()"""


def test_a_filter_keeps_the_focus_while_the_list_changes(shown: Page) -> None:
    shown.show("#runs")
    shown.evaluate("document.querySelector('#filter').focus()")
    for letter in "zz":
        shown.press(letter, ord(letter.upper()), letter)
    assert shown.evaluate("document.activeElement.value") == "zz"
    assert "No run matches." in shown.evaluate("document.body.innerText")


def test_every_view_is_reached_with_the_keyboard(browser: Browser, file: Path) -> None:
    file.write_bytes(static_page(full()))
    page = browser.page(file.as_uri())
    page.press("Tab", 9)
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    titles = []
    for _ in range(8):
        page.press("Tab", 9)
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring == "solid"
        titles.append(page.evaluate("document.activeElement.getAttribute('href')"))
    assert titles == [f"#{view}" for view in _views(page)]
    page.press("Enter", 13, "\r")
    page.wait_for("document.querySelector('h1').textContent.startsWith('Audit chain')")
    assert page.evaluate("document.activeElement.id") == "main"


def _views(page: Page) -> list[str]:
    views: list[str] = page.evaluate("Object.keys(VIEWS)")
    return views
