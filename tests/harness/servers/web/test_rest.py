"""Sessions, tools, runs and approvals over REST, each client's apart from the others'."""

from typing import Any

import pytest

from cellwright.harness.sandbox.pythons import pythons
from tests.harness.servers.web.web_servers import ANN, BOB, EVE, PAID, Web, good

pytestmark = pytest.mark.needs("userns")

PAY = "import tools\nprint(tools.pay('ann', {}))"


def opened(web: Web, token: str = ANN, **body: Any) -> str:
    return str(web.post("/v1/sessions", body, token)["session"])


# Sessions


def test_a_file_is_an_attachment_of_no_type_and_goes_with_its_session(web: Web) -> None:
    path = f"/v1/sessions/{opened(web)}"
    good(web.ask("PUT", f"{path}/files/a%2Fmade.html", content=b"hi"))
    answer = web.ask("GET", f"{path}/files/a%2Fmade.html")
    assert answer.content == b"hi"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/octet-stream"
    good(web.ask("DELETE", path))
    assert web.ask("GET", path).status_code == 404


def test_a_line_feed_in_a_path_is_a_part_of_it(web: Web) -> None:
    """Else a proxy that guards a path could be told another one, and `a` would get what is for `a\\n`."""
    assert web.ask("GET", "/v1/server%0A").status_code == 404
    path = f"/v1/sessions/{opened(web)}"
    assert web.ask("GET", f"{path}%0A").status_code == 404
    for name, content in (("a", b"1"), ("a%0A", b"2"), ("a%0Ab", b"3")):
        good(web.ask("PUT", f"{path}/files/{name}", content=content))
    assert [each["path"] for each in web.get(f"{path}/files")["files"]] == ["a", "a\n", "a\nb"]
    assert web.ask("GET", f"{path}/files/a%0A").content == b"2"
    good(web.ask("DELETE", path))


def test_a_session_of_another_client_does_not_exist(web: Web) -> None:
    session = opened(web)
    path = f"/v1/sessions/{session}"
    unknown = f"/v1/sessions/{'0' * 32}"
    requests: list[tuple[str, str, Any]] = [
        ("GET", "", None), ("DELETE", "", None), ("GET", "/files", None),
        ("POST", "/executions", {"code": "1"}),
    ]  # fmt: skip
    for method, below, body in requests:
        for token in (BOB, EVE):
            theirs = web.ask(method, path + below, token, json=body)
            none = web.ask(method, unknown + below, token, json=body)
            assert theirs.status_code == none.status_code == 404
            assert theirs.text.replace(session, "0" * 32) == none.text
    assert web.get("/v1/sessions", BOB)["sessions"] == []
    assert session in [each["session"] for each in web.get("/v1/sessions")["sessions"]]
    good(web.ask("DELETE", path))


def test_one_session_too_many_is_refused_until_one_is_closed(web: Web) -> None:
    sessions = [opened(web, BOB, language="sh") for _ in range(8)]
    refused = web.ask("POST", "/v1/sessions", BOB, json={"language": "sh"})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for each in sessions:
        good(web.ask("DELETE", f"/v1/sessions/{each}", BOB))
    good(web.ask("DELETE", f"/v1/sessions/{opened(web, BOB)}", BOB))


@pytest.mark.parametrize("path", ["..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "x%00y", "nothing"])
def test_a_path_outside_of_the_workspace_is_a_problem(web: Web, path: str) -> None:
    session = f"/v1/sessions/{opened(web)}"
    assert web.ask("GET", f"{session}/files/{path}").status_code == 422
    if path != "nothing":
        assert web.ask("PUT", f"{session}/files/{path}", content=b"x").status_code == 422
    good(web.ask("DELETE", session))


def test_a_session_is_branched_and_paused_by_its_client(web: Web) -> None:
    session = opened(web)
    path = f"/v1/sessions/{session}"
    web.post(f"{path}/executions", {"code": "n = [1]"})
    made = web.post(f"{path}/branches", {"n": 2})["sessions"]
    assert len({session, *(each["session"] for each in made)}) == 3
    good(web.ask("POST", f"{path}/pause"))
    states = {each["session"]: each["state"] for each in web.get("/v1/sessions")["sessions"]}
    assert [states[session], states[made[0]["session"]]] == ["paused", "open"]
    assert web.ask("POST", f"{path}/branches", BOB, json={}).status_code == 404
    assert web.ask("POST", f"{path}/pause", BOB).status_code == 404
    assert web.ask("POST", f"{path}/branches", json={"n": 9}).status_code == 400
    for each in (session, *(each["session"] for each in made)):
        body = {"code": "n.append(2); n"}
        assert web.post(f"/v1/sessions/{each}/executions", body)["value"] == [1, 2]
    threads = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    web.post(f"{path}/executions", {"code": threads})
    for refused in (web.ask("POST", f"{path}/branches", json={}), web.ask("POST", f"{path}/pause")):
        assert refused.status_code in (409, 422)
        assert "threads" in refused.json()["detail"]
    for each in (session, *(each["session"] for each in made)):
        good(web.ask("DELETE", f"/v1/sessions/{each}"))


# The route of thin plugins


def test_a_plugin_gets_what_it_expects(web: Web) -> None:
    body = {
        "sessionId": "agent 7", "traceId": "trace-1", "runtime": "python", "code": "n = 1; print(n)",
        "packages": [],
    }  # fmt: skip
    answer = web.post("/v1/run-code", body)
    assert (answer["exitCode"], answer["stdout"], answer["stderr"]) == (0, "1\n", "")
    assert answer["durationMs"] > 0
    assert answer["memoryUsage"] >= 0
    assert answer["traceId"] == "trace-1"
    assert web.post("/v1/run-code", body | {"code": "n += 1; print(n)"})["stdout"] == "2\n"
    other = web.post("/v1/run-code", body | {"code": "print(n)"}, BOB)  # a session of bob's
    assert (other["exitCode"], "NameError" in other["stderr"]) == (1, True)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit(0)", 0, ""),
        ("1/0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", 137, "signal"),
        ("bytearray(1 << 34)", 137, "memory"),
    ],
)
def test_only_success_has_the_exit_code_0(web: Web, code: str, status: int, words: str) -> None:
    answer = web.post("/v1/run-code", {"code": code})
    assert (answer["exitCode"], words in answer["stderr"]) == (status, True), answer


@pytest.mark.parametrize(
    "runtime", ["python:2.7", "python:3.10", "cobol:1", "sh:5", "python:/bin/sh", "python:"]
)
def test_another_version_of_a_language_is_refused(web: Web, runtime: str) -> None:
    answer = web.ask("POST", "/v1/run-code", json={"code": "1", "runtime": runtime})
    assert answer.status_code == 422
    hint = answer.json()["hint"]
    assert hint == "leave it out" if "python" not in runtime else "this server has python:3" in hint


def test_a_version_that_the_library_can_run_is_run(web: Web) -> None:
    for each in {f"{at.version[0]}.{at.version[1]}" for at in pythons() if None not in at.packages}:
        code = "import sys; print(*sys.version_info[:2], sep='.')"
        given = {"code": code, "runtime": f"python:{each}", "sessionId": "versions"}
        assert web.post("/v1/run-code", given)["stdout"] == f"{each}\n"


# Tools


def test_tools_are_found_described_and_called(web: Web) -> None:
    PAID.clear()
    assert {each["name"] for each in web.get("/v1/tools")["tools"]} >= {"add", "pay"}
    assert web.get("/v1/tools?query=add+numbers")["tools"][0]["name"] == "add"
    assert web.get("/v1/tools/add")["parameters"]["properties"].keys() == {"a", "b"}
    assert web.post("/v1/tools/add/calls", {"arguments": {"a": 1, "b": 2}})["result"] == 3
    for path, body, status in (
        ("add", {"a": 1}, 422), ("add", {"a": "x", "b": 1}, 422), ("nothing", {}, 404),
        ("pay", {"to": "ann", "amount": 1}, 403),
    ):  # fmt: skip
        answer = web.ask("POST", f"/v1/tools/{path}/calls", json={"arguments": body})
        assert answer.status_code == status, answer.text
    assert PAID == []


def test_a_made_tool_has_only_packages_that_the_policy_allows(web: Web) -> None:
    source = "import idna\ndef known(text: str) -> bool:\n    return True\n"
    body = {"name": "known", "source_code": source, "requirements": ["idna"]}
    answer = web.ask("POST", "/v1/tools", json=body)
    assert 400 <= answer.status_code < 500
    assert "packages.allow of the policy" in answer.text


def test_a_made_tool_belongs_to_its_maker(web: Web) -> None:
    source = "def double(n: int) -> int:\n    return n * 2\n"
    body = {
        "name": "double",
        "source_code": source,
        "description": "Doubles.",
        "tests": ["assert double(2) == 4"],
    }
    assert web.post("/v1/tools", body)["version"] == 1
    assert web.post("/v1/tools/double/calls", {"arguments": {"n": 21}}, BOB)["result"] == 42
    theirs = web.ask("POST", "/v1/tools", BOB, json=body | {"source_code": source + "\n"})
    assert theirs.status_code in (403, 422)


def test_without_skills_there_are_none(web: Web) -> None:
    assert web.get("/v1/skills")["skills"] == []
    assert web.ask("GET", "/v1/skills/nothing").status_code == 404


# Runs and approvals


def test_a_risky_call_waits_for_an_operator_and_is_made_once(web: Web) -> None:
    PAID.clear()
    started = web.post("/v1/runs", {"code": PAY.format(3)})
    assert started["status"] == "pending"
    (waiting,) = started["approvals"]
    assert (waiting["tool"], waiting["arguments"]) == ("pay", {"to": "ann", "amount": 3})
    assert waiting["expires"] > waiting["asked"]
    assert "amount" in waiting["shown"]
    decision = {"approve": True, "digest": waiting["digest"]}
    path = f"/v1/approvals/{waiting['approval']}"
    assert (
        web.ask("POST", path, json=decision).status_code == 403
    )  # it may not approve its own call
    assert [each["run"] for each in web.get("/v1/approvals", EVE)["approvals"]] == [started["run"]]
    wrong = web.ask("POST", path, EVE, json=decision | {"digest": "0" * 64})
    assert (wrong.status_code, PAID) == (409, [])
    assert web.post(path, decision, EVE)["approved"]
    assert web.ask("POST", path, EVE, json=decision).status_code == 404
    done = web.post(f"/v1/runs/{started['run']}/resume")
    assert (done["status"], done["result"]["stdout"]) == ("completed", "paid 3 to ann\n")
    assert PAID == [("ann", 3)]
    record = web.get(f"/v1/runs/{started['run']}")
    assert [(each["tool"], each["state"]) for each in record["calls"]] == [("pay", "done")]
    assert web.ask("POST", f"/v1/runs/{started['run']}/resume").status_code == 422
    good(web.ask("DELETE", f"/v1/runs/{started['run']}"))


def test_a_rejected_call_is_an_exception_with_the_reason(web: Web) -> None:
    PAID.clear()
    started = web.post("/v1/runs", {"code": PAY.format(4)})
    (waiting,) = started["approvals"]
    decision = {"approve": False, "digest": waiting["digest"], "reason": "too much"}
    web.post(f"/v1/approvals/{waiting['approval']}", decision, EVE)
    done = web.post(f"/v1/runs/{started['run']}/resume")
    assert ("too much" in done["result"]["error"], PAID) == (True, [])


def test_a_run_of_another_client_does_not_exist(web: Web) -> None:
    run = web.post("/v1/runs", {"code": PAY.format(5)})["run"]
    for method, below in (("GET", ""), ("DELETE", ""), ("POST", "/resume")):
        assert web.ask(method, f"/v1/runs/{run}{below}", BOB).status_code == 404
        assert web.ask(method, f"/v1/runs/bob~{run[4:]}{below}", BOB).status_code == 404
    assert web.get("/v1/runs", BOB)["runs"] == []
    assert web.get("/v1/approvals", BOB)["approvals"] == []
    assert run in [each["run"] for each in web.get("/v1/runs", EVE)["runs"]]
    good(web.ask("DELETE", f"/v1/runs/{run}"))


# Idempotency


def test_a_retry_with_the_same_key_does_nothing_twice(web: Web) -> None:
    session = f"/v1/sessions/{opened(web)}"
    body = {"code": "n = globals().get('n', 0) + 1; n"}
    first = web.post(f"{session}/executions", body, **{"Idempotency-Key": "k1"})
    again = web.post(f"{session}/executions", body, **{"Idempotency-Key": "k1"})
    assert first == again
    assert web.post(f"{session}/executions", body, **{"Idempotency-Key": "k2"})["value"] == 2
    other = web.ask(
        "POST", f"{session}/executions", json={"code": "2"}, headers={"Idempotency-Key": "k1"}
    )
    assert other.status_code == 409
    good(web.ask("DELETE", session))


def test_a_key_of_another_client_is_another_key(web: Web) -> None:
    body = {"code": "import os; os.urandom(8).hex()"}
    key = {"Idempotency-Key": "shared"}
    values = [web.post("/v1/executions", body, token, **key)["value"] for token in (ANN, BOB, ANN)]
    assert values[0] == values[2] != values[1]


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä"])
def test_an_invalid_key_is_refused(web: Web, key: str) -> None:
    headers = {"Idempotency-Key": key.encode()}
    answer = web.ask("POST", "/v1/executions", json={"code": "1"}, headers=headers)
    assert answer.status_code == 400


def test_a_stream_takes_no_key(web: Web) -> None:
    headers = {"Idempotency-Key": "k"}
    answer = web.ask("POST", "/v1/executions/stream", json={"code": "1"}, headers=headers)
    assert answer.status_code == 400
