"""The dashboard on the server: who sees it, what it shows live, and decisions by click."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from cellwright import AuditLog
from cellwright.harness.dashboard.dashboard_page import LiveTimeline, encoded
from cellwright.harness.servers.web import web_app
from cellwright.harness.servers.web.endpoint import DashboardSources
from cellwright.harness.servers.web.web_app import dashboard_pages
from tests.browser import Browser, Page
from tests.harness.dashboard.overviews import VIEWS, hostile
from tests.harness.servers.web.web_servers import ANN, EVE, PAID, Web, web_server

ASKING = "import tools\nprint(tools.pay(to={to!r}, amount={amount}))"
HOSTILE = "ann</pre><script>window.beacon = 1</script>\u202eknab"


class Watched(NamedTuple):
    """A server with a dashboard, and what its client started."""

    web: Web

    def ask_to_pay(self, to: str, amount: int) -> str:
        """Start a run that waits for approval, and return its id."""
        sandbox = self.web.state.services.of("ann").sandbox
        return self.web.state.runs.start(sandbox, ASKING.format(to=to, amount=amount)).run

    def resume(self, run: str) -> Any:
        return self.web.state.runs.resume(self.web.state.services.of("ann").sandbox, run).result


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    trail = tmp_path_factory.mktemp("trail") / "trail.jsonl"
    timeline = LiveTimeline()
    with AuditLog(path=trail, max_entries=0, on_entry=timeline.add) as log:
        sources = DashboardSources(timeline, trail)
        with web_server(audit=log, dashboard=sources, pages=dashboard_pages()) as web:
            yield Watched(web)


@pytest.fixture
def page(watched: Watched, browser: Browser) -> Page:
    shown = browser.page(f"{watched.web.url}/#token={EVE}")
    shown.wait_for("data")
    return shown


def test_only_operators_see_the_data_and_decide(watched: Watched) -> None:
    body = {"digest": "", "approve": False}
    for method, path, given in (
        ("GET", "/v1/dashboard", None), ("GET", "/v1/dashboard/chain", None),
        ("POST", "/v1/approvals/a", body),
    ):  # fmt: skip
        assert watched.web.ask(method, path, "", json=given).status_code == 401
        assert watched.web.ask(method, path, ANN, json=given).status_code == 403
        assert watched.web.ask(method, path, EVE, json=given).status_code in (200, 404)


def test_the_page_is_served_without_a_token_and_without_data(watched: Watched) -> None:
    answer = watched.web.ask("GET", "/", "")
    assert answer.status_code == 200
    assert 'id="data">null</script>' in answer.text
    rules = answer.headers["content-security-policy"]
    assert rules.startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in rules
    assert "connect-src 'self'" in rules
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_decision_is_only_on_what_was_shown_and_only_once(watched: Watched) -> None:
    run = watched.ask_to_pay("carl", 1)
    (waiting,) = [
        each for each in watched.web.get("/v1/dashboard", EVE)["approvals"] if each["run"] == run
    ]
    path, body = f"/v1/approvals/{waiting['approval']}", {"approve": True}
    for digest in ("", "0" * 64):
        answer = watched.web.ask("POST", path, EVE, json=body | {"digest": digest})
        assert answer.status_code == 409
        assert "the call that waits is another one" in answer.json()["detail"]
    body["digest"] = waiting["digest"]
    assert watched.web.post(path, body, EVE)["approved"]
    answer = watched.web.ask("POST", path, EVE, json=body)
    assert "does not wait any more" in answer.json()["detail"]
    assert watched.resume(run).ok
    assert PAID[-1] == ("carl", 1)


def test_gauges_tell_of_the_sandboxes_of_all_clients(watched: Watched) -> None:
    sandbox = watched.web.state.services.of("ann").sandbox

    def told() -> dict[str, Any]:
        return {each["name"]: each for each in watched.web.get("/v1/dashboard", EVE)["gauges"]}

    sandbox.settle()
    ready = told()["Cells ready"]
    assert ready["value"] == ready["most"] > 0
    before = told()["Open sessions"]["value"]
    with sandbox.session():
        assert told()["Open sessions"]["value"] == before + 1
    run = sandbox.start("print(1, flush=True)\nwhile True: pass")
    assert next(iter(run.output()))  # it runs
    assert told()["Programs running"]["value"] == 1
    run.cancel()
    run.result()


def test_a_foreign_page_can_neither_read_nor_decide(watched: Watched) -> None:
    for origin in ("http://127.0.0.1:1", "null", "https://example.org"):
        with watched.web.client(EVE, Origin=origin) as client:
            assert client.get("/v1/dashboard").status_code == 403
            assert client.post("/v1/approvals/a", json={}).status_code == 403


def test_a_foreign_page_cannot_frame_it(watched: Watched) -> None:
    """`frame-ancestors` holds for pages of this server, too."""
    sent = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}
    with watched.web.client("", **sent) as client:
        assert client.get("/").status_code == 403


# In a browser

_CARD = "document.querySelector('#main section.card:last-of-type')"
_WORDS = "document.body.innerText"


@pytest.mark.needs("chromium")
def test_the_token_leaves_the_address_and_no_request_has_it_in_its_url(
    watched: Watched, page: Page
) -> None:
    assert page.evaluate("location.href") == f"{watched.web.url}/"
    assert page.evaluate("sessionStorage.length") == 1
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    assert {url.partition("#")[0] for url in page.requests()} <= {
        f"{watched.web.url}/", f"{watched.web.url}/v1/dashboard", f"{watched.web.url}/favicon.ico",
    }  # fmt: skip
    assert [url for url in page.requests() if EVE in url.partition("#")[0]] == []
    page.call("Page.reload")
    page.wait_for("document.readyState === 'complete' && typeof data !== 'undefined' && data")


@pytest.mark.needs("chromium")
def test_a_person_approves_by_click_what_the_page_shows(watched: Watched, page: Page) -> None:
    run = watched.ask_to_pay(HOSTILE, 7)
    page.show("#approvals")
    page.wait_for(f"{_WORDS}.includes('amount: 7')")
    assert "</pre><script>window.beacon = 1</script>\\u202eknab" in page.evaluate(_WORDS)
    approve, decide = f"{_CARD}.querySelector('button.main')", "#decide"
    selector = "#" + page.evaluate(f"{approve}.id")
    page.click(selector)
    page.wait_for("document.querySelector('dialog[open]')")
    assert page.evaluate("document.activeElement.id") == "cancel"
    assert "amount: 7" in page.evaluate("document.querySelector('dialog').innerText")
    page.press("Enter", 13, "\r")
    page.wait_for("!document.querySelector('dialog[open]')")
    assert len([each for each in watched.web.state.runs.pending() if each.run == run]) == 1
    page.click(selector)
    page.wait_for("document.querySelector('dialog[open]')")
    page.click(decide)
    page.wait_for("document.querySelector('#status').textContent === 'Approved, once.'")
    page.wait_for(f"!{_WORDS}.includes('amount: 7')")
    assert watched.resume(run).ok
    assert PAID[-1] == (HOSTILE, 7)
    assert page.evaluate("typeof window.beacon") == "undefined"
    page.show("#runs")
    page.wait_for(f"{_WORDS}.includes('completed')")
    assert page.complaints() == []


@pytest.mark.needs("chromium")
def test_a_person_refuses_with_a_reason_that_the_program_gets(watched: Watched, page: Page) -> None:
    run = watched.ask_to_pay("mallory", 9)
    page.show("#approvals")
    page.wait_for(f"{_WORDS}.includes('amount: 9')")
    page.click("#" + page.evaluate(f"{_CARD}.querySelector('button:not(.main)').id"))
    page.wait_for("document.querySelector('dialog[open]')")
    page.evaluate("document.querySelector('#why').focus()")
    page.call("Input.insertText", text="not to her")
    page.click("#decide")
    page.wait_for("document.querySelector('#status').textContent === 'Refused.'")
    assert "not to her" in str(watched.resume(run).error)
    assert ("mallory", 9) not in PAID


@pytest.mark.needs("chromium")
def test_a_call_that_was_decided_elsewhere_is_told(watched: Watched, page: Page) -> None:
    watched.ask_to_pay("dora", 11)
    page.show("#approvals")
    page.wait_for(f"{_WORDS}.includes('amount: 11')")
    page.click("#" + page.evaluate(f"{_CARD}.querySelector('button.main').id"))
    page.wait_for("document.querySelector('dialog[open]')")
    for each in watched.web.state.runs.pending():
        watched.web.state.runs.reject(each.approval)
    page.click("#decide")
    page.wait_for(
        "document.querySelector('#status').textContent.includes('does not wait any more')"
    )


@pytest.mark.needs("chromium")
def test_runs_sessions_and_the_chain_appear_while_the_page_is_open(
    watched: Watched, page: Page
) -> None:
    page.show("#violations")
    watched.web.post("/v1/executions", {"code": "open('/etc/shadow')"})
    page.wait_for(f"{_WORDS}.includes('mount_ns: not shown')")
    with watched.web.state.services.of("ann").sandbox.session("a-session") as session:
        session.execute("1")
        page.show("#cells")
        page.wait_for(f"/a-session[^]*live|live[^]*a-session/.test({_WORDS})")
    page.show("#chain")
    assert "unchecked" in page.evaluate(_WORDS)
    page.click("#check")
    page.wait_for(f"{_WORDS}.includes('Audit chain: intact')")


@pytest.mark.needs("chromium")
def test_a_wrong_token_is_asked_for_again(watched: Watched, browser: Browser) -> None:
    for wrong, told in (
        ("wrong" * 5, "does not know this token"),
        (ANN, "not that of an operator"),
    ):
        shown = browser.page(f"{watched.web.url}/?#token={wrong}")
        shown.wait_for(f"{_WORDS}.includes({told!r})")
        assert shown.evaluate("sessionStorage.length") == 0
    shown.call("Input.insertText", text=EVE)  # the field has the focus
    shown.press("Enter", 13, "\r")
    shown.wait_for("data")
    assert "Overview" in shown.evaluate(_WORDS)


@pytest.mark.needs("chromium")
def test_hostile_texts_are_shown_as_text_live(
    watched: Watched, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "</script><img src=x onerror='window.beacon = 1'><svg onload='window.beacon = 1'>\x1b[2J\u202e"
    given = encoded(hostile(text))
    monkeypatch.setattr(web_app, "encoded", lambda _: given)
    shown = browser.page(f"{watched.web.url}/#token={EVE}")
    shown.wait_for("data")
    for view in VIEWS:
        assert "onerror='window.beacon = 1'>" in shown.show(f"#{view}")
        assert shown.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert shown.evaluate("typeof window.beacon") == "undefined"
    assert shown.complaints() == []
