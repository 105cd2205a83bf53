"""Access to the web server: tokens, names, origins, pages."""

import pytest

from cellwright.harness.servers.web.web_app import page
from tests.harness.servers.web.test_load import sent
from tests.harness.servers.web.web_servers import ANN, EVE, Web, web_server

pytestmark = pytest.mark.needs("userns")

BEARER = {"Authorization": f"Bearer {ANN}"}
UNWELCOME: dict[str, tuple[dict[str, str], int]] = {
    "no token": ({}, 401),
    "an unknown one": ({"Authorization": "Bearer nobody-has-this-token"}, 401),
    "a part of one": ({"Authorization": f"Bearer {ANN[:-1]}"}, 401),
    "a name": ({"Authorization": "Bearer ann"}, 401),
    "another scheme": ({"Authorization": f"Basic {ANN}"}, 401),
    "a foreign page": (BEARER | {"Origin": "http://evil.example"}, 403),
    "a page of this host": (BEARER | {"Origin": "http://localhost:3000"}, 403),
    "a page without a name": (BEARER | {"Origin": "null"}, 403),
    "another port of ours": (BEARER | {"Origin": "http://127.0.0.1:1"}, 403),
    "a picture in a foreign page": (BEARER | {"Sec-Fetch-Site": "cross-site"}, 403),
    "a link in a page of this host": (BEARER | {"Sec-Fetch-Site": "same-site"}, 403),
    "a foreign name": (BEARER | {"Host": "evil.example"}, 421),
    "a foreign name as its own page": (
        BEARER | {"Host": "evil.example", "Origin": "http://evil.example"},
        421,
    ),
    "a name that begins so": (BEARER | {"Host": "localhost.evil.example"}, 421),
    "a name in another's": (BEARER | {"Host": "evil.example:80@localhost"}, 421),
    "no name": (BEARER | {"Host": ""}, 421),
}


@pytest.mark.parametrize(("headers", "status"), UNWELCOME.values(), ids=UNWELCOME)
@pytest.mark.parametrize("path", ["/v1/server", "/v1/nothing"])
def test_an_unauthorized_request_is_refused(
    web: Web, headers: dict[str, str], status: int, path: str
) -> None:
    answer = web.ask("GET", path, token="", headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Host": "localhost"}, {"Host": "LOCALHOST:1"}, {"Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:1", "Origin": "https://localhost:1"},
    ],
)  # fmt: skip
def test_an_authorized_request_is_answered(web: Web, headers: dict[str, str]) -> None:
    answer = web.ask("GET", "/v1/server", headers=headers)
    assert answer.json()["client"] == "ann"
    assert not answer.json()["is_operator"]
    assert answer.headers["cache-control"] == "no-store"


def test_a_request_with_two_lengths_is_refused_and_ends_its_connection(web: Web) -> None:
    """A proxy may believe the other one: what is left of the body would be a request of its client."""
    left = f"GET /v1/server HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {EVE}\r\n\r\n"
    head = (
        "POST /v1/executions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ANN}\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    )
    told = b""
    with sent(web, f"{head}0\r\n\r\n{left}".encode()) as client:
        while piece := client.recv(65536):
            told += piece
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.count(b"HTTP/1.1") == 1


def test_an_operator_is_one(web: Web) -> None:
    assert web.get("/v1/server", EVE)["is_operator"]


def test_a_page_of_an_allowed_origin_may_read_answers() -> None:
    origin = {"Origin": "http://page.example"}
    with web_server(origins=["http://page.example"]) as web:
        preflight = web.ask("OPTIONS", "/v1/executions", token="", headers=origin)
        assert preflight.status_code == 204
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = web.ask("GET", "/v1/server", headers=origin)
        for each in (preflight, answer):
            assert each.headers["access-control-allow-origin"] == "http://page.example"
        foreign = {"Origin": "http://page.example.evil"}
        assert web.ask("OPTIONS", "/v1/server", headers=foreign).status_code == 403
        assert web.ask("GET", "/v1/server", token="", headers=origin).status_code == 401


def test_a_page_needs_no_token_and_no_other_path_goes_without() -> None:
    with web_server(pages={"/": page(b"<!doctype html>", "text/html")}) as web:
        found = web.ask("GET", "/", token="")
        assert found.text == "<!doctype html>"
        assert "script-src 'self'" in found.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in found.headers["content-security-policy"]
        assert web.ask("POST", "/", token="").status_code == 405
        assert web.ask("GET", "/", token="", headers={"Host": "evil.example"}).status_code == 421
        for path in ("/x", "/v1/server"):
            assert web.ask("GET", path, token="").status_code == 401


def test_paths_and_methods_that_do_not_exist_are_problems(web: Web) -> None:
    missing = web.ask("GET", "/v1/nothing")
    assert (missing.status_code, missing.json()["title"]) == (404, "not_found")
    wrong = web.ask("DELETE", "/v1/server")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert wrong.headers["content-type"] == "application/problem+json"
