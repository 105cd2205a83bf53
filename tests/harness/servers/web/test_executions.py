"""Programs over REST: answers, streams, and what is refused."""

import json
from typing import Any

import pytest

from tests.harness.servers.web.web_servers import Web

pytestmark = pytest.mark.needs("userns")


def events_of(web: Web, path: str, body: Any) -> list[tuple[str, Any]]:
    """Return the events of a stream, after their numbers were checked."""
    with web.client() as client, client.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.read()
        blocks = "".join(answer.iter_text()).split("\n\n")
    found = []
    for number, block in enumerate((each for each in blocks if each and each[0] != ":"), 1):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields["id"] == str(number)
        found.append((fields["event"], json.loads(fields["data"])))
    return found


def last_event(text: str) -> Any:
    return json.loads(text.rsplit("data: ", 1)[1])


def test_a_program_is_run(web: Web) -> None:
    answer = web.post(
        "/v1/executions",
        {
            "code": "import sys; print(open('in/a.bin', 'rb').read(), sys.argv[1:], name)\n6 * 7",
            "files": {"in/a.bin": {"base64": "AAE="}},
            "arguments": ["x"],
            "inputs": {"name": "ann"},
        },
    )
    assert (answer["status"], answer["value"]) == ("completed", 42)
    assert answer["stdout"] == "b'\\x00\\x01' ['x'] ann\n"


def test_a_program_that_fails_is_an_answer(web: Web) -> None:
    answer = web.post("/v1/executions", {"code": "open('/etc/shadow')"})
    assert (answer["ok"], answer["reason"]) == (False, "exception")
    assert answer["violations"][0]["rule"]


def test_files_come_back(web: Web) -> None:
    code = "open('out.txt', 'w').write('hi')"
    answer = web.post("/v1/executions", {"code": code, "collect": ["*.txt"]})
    assert [(each["path"], each["base64"]) for each in answer["returned"]] == [("out.txt", "aGk=")]


def test_output_is_streamed_in_its_order(web: Web) -> None:
    code = "for n in range(50): print(n, 'ä', flush=True)"
    events = events_of(web, "/v1/executions/stream", {"code": code})
    assert events[0][0] == "started"
    text = "".join(data["text"] for name, data in events if name == "output")
    assert text == "".join(f"{n} ä\n" for n in range(50))
    assert (events[-1][0], events[-1][1]["ok"]) == ("result", True)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "code"),
        ({"code": 1}, 400, "code"),
        ({"code": "1", "policy": "workshop"}, 400, "policy"),
        ({"code": "1", "timeout": -1}, 400, "timeout"),
        ({"code": "1", "timeout": 10_000}, 422, "timeout"),
        ({"code": "1", "files": {"../x": "y"}}, 422, "x"),
        ({"code": "1", "packages": ["left-pad"]}, 422, "packages"),
        ({"code": "\ud800"}, 400, "body"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/executions", "/v1/executions/stream"])
def test_an_invalid_program_is_a_problem(
    web: Web, body: Any, status: int, words: str, path: str
) -> None:
    data = json.dumps(body).encode()
    answer = web.ask("POST", path, content=data, headers={"Content-Type": "application/json"})
    problem = answer.json() if answer.is_error else last_event(answer.text)
    assert (problem["status"], words in problem["detail"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b'{"code": "1"}', "application/json; charset=utf-8", 200),
        (b'{"code": "1"}', 'Application/JSON;charset="UTF-8"', 200),
        (b'{"code": "1"}', "application/json; charset=utf-7", 415),
        (b'{"code": "1", "code": "2"}', "application/json", 400),
        (b'{"code": "1", "files": {"a": "1", "\\u0061": "2"}}', "application/json", 400),
        (b'{"code": "%s", "code": "2"}' % (b"#" * 100_000), "application/json", 400),
        (b'{"code": "\xff"}', "application/json", 400),
    ],
)
def test_a_body_has_one_meaning(web: Web, data: bytes, kind: str, status: int) -> None:
    headers = {"Content-Type": kind}
    answer = web.ask("POST", "/v1/executions", content=data, headers=headers)
    assert answer.status_code == status, answer.text


def test_a_request_with_many_headers_is_refused(web: Web) -> None:
    assert web.ask("GET", "/v1/server", headers={f"x-{n}": "1" for n in range(80)}).is_success
    answer = web.ask("GET", "/v1/server", headers={f"x-{n}": "1" for n in range(200)})
    assert answer.status_code == 431


def test_a_form_of_a_page_is_refused(web: Web) -> None:
    answer = web.ask(
        "POST", "/v1/executions", content=b'{"code": "1"}', headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 415
