"""Tasks of agents over REST, and as events that the package of AG-UI accepts."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ag_ui.core import Event, RunAgentInput
from pydantic import TypeAdapter

from tests.harness.agent.scripted import ScriptedModel, answer, program
from tests.harness.servers.web.web_servers import ANN, BOB, EVE, PAID, Web, web_server

pytestmark = pytest.mark.needs("userns")

EVENTS: TypeAdapter[Any] = TypeAdapter(Event)
PAY = "import tools\nx = tools.pay('ann', 7)"


@pytest.fixture
def paying() -> Iterator[Web]:
    PAID.clear()
    with web_server(model=ScriptedModel([program(PAY), answer("x")])) as web:
        yield web


def asked(text: str = "Pay ann.", **more: Any) -> dict[str, Any]:
    messages = [{"id": "1", "role": "user", "content": text}]
    body = {"threadId": "thread", "runId": "run", "messages": messages, **more}
    RunAgentInput.model_validate(body)
    return body


def events_of(web: Web, body: dict[str, Any], token: str = ANN) -> list[dict[str, Any]]:
    """Return the events of a task, each accepted by the package of the protocol."""
    with web.client(token) as client, client.stream("POST", "/v1/tasks/stream", json=body) as found:
        text = found.read().decode()
        assert found.status_code == 200, text
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    events: list[dict[str, Any]] = [json.loads(line.removeprefix("data: ")) for line in lines]
    for each in events:
        EVENTS.validate_python(each)
    return events


def test_an_agent_works_and_its_events_are_those_of_the_protocol() -> None:
    with web_server(model=ScriptedModel([program("print(6 * 7)"), answer("'42'")])) as web:
        events = events_of(web, asked("What is 6 * 7?"))
        kinds = [each["type"] for each in events]
        call = ["TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END", "TOOL_CALL_RESULT"]
        message = ["TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END"]
        assert kinds == ["RUN_STARTED", *call, *call, *message, "RUN_FINISHED"]
        assert "42" in events[4]["content"]
        assert events[-1]["outcome"] == {"type": "success"}
        assert events[-1]["result"]["answer"] == "42"
        task = web.get(f"/v1/tasks/{events[-1]['result']['task']}")
        assert (task["task"]["state"], len(task["steps"])) == ("completed", 2)


def test_a_call_that_waits_is_an_interrupt_and_resume_answers_it(paying: Web) -> None:
    events = events_of(paying, asked(), EVE)
    outcome = events[-1]["outcome"]
    assert outcome["type"] == "interrupt"
    (interrupt,) = outcome["interrupts"]
    assert interrupt["metadata"]["arguments"] == {"to": "ann", "amount": 7}
    assert "amount" in interrupt["message"]
    assert PAID == []
    entry = {"interruptId": interrupt["id"], "status": "resolved", "payload": {"approve": True}}
    done = events_of(paying, asked(resume=[entry]), EVE)
    assert done[-1]["result"]["answer"] == "paid 7 to ann"
    assert PAID == [("ann", 7)]
    again = paying.ask("POST", "/v1/tasks/stream", EVE, json=asked(resume=[entry]))
    assert (again.status_code, PAID) == (409, [("ann", 7)])


def test_the_dashboard_has_the_curve_of_all_agents() -> None:
    """Tools made against tasks done."""
    with web_server(model=ScriptedModel([answer("1")])) as web:
        for token in (ANN, BOB):
            web.post("/v1/tasks", {"task": "Count."}, token)
            web.state.agents.of("ann").factory.create_tool(
                f"double_{len(token)}{token[-8]}", "Double a number.",
                f"def double_{len(token)}{token[-8]}(n: int) -> int:\n    return 2 * n",
                allow_similar=True,
            )  # fmt: skip
        points = web.get("/v1/dashboard", EVE)["curve"]
        assert [(each["tasks"], each["tools"]) for each in points] == [(1, 0), (2, 1)]


def test_the_dashboard_lists_the_calls_of_every_clients_agent(paying: Web) -> None:
    """An operator who looks there would else never see them, and they would expire."""
    task = paying.post("/v1/tasks", {"task": "Pay ann."})["task"]
    (waiting,) = paying.get("/v1/dashboard", EVE)["approvals"]
    assert (waiting["client"], waiting["tool"], waiting["is_whole"]) == ("ann", "pay", True)
    decision = {"approve": True, "digest": waiting["digest"]}
    paying.post(f"/v1/approvals/{waiting['approval']}", decision, EVE)
    assert paying.get("/v1/dashboard", EVE)["approvals"] == []
    assert paying.post(f"/v1/tasks/{task}/resume")["answer"] == "paid 7 to ann"


def test_a_call_that_nobody_can_read_whole_can_only_be_refused() -> None:
    program_of_it = "import tools\nx = tools.pay('ab' * 10_000, 7)"
    with web_server(model=ScriptedModel([program(program_of_it), answer("x")])) as web:
        (waiting,) = web.post("/v1/tasks", {"task": "Pay."})["approvals"]
        path, decision = f"/v1/approvals/{waiting['approval']}", {"digest": waiting["digest"]}
        refused = web.ask("POST", path, EVE, json=decision | {"approve": True})
        assert (refused.status_code, refused.json()["title"]) == (403, "approval_required")
        assert not web.get("/v1/dashboard", EVE)["approvals"][0]["is_whole"]
        assert not web.post(path, decision | {"approve": False}, EVE)["approved"]


@pytest.mark.parametrize(
    ("status", "payload"),
    [("cancelled", None), ("resolved", None), ("resolved", {"approve": "yes"}), ("resolved", True)],
)
def test_only_a_clear_yes_approves(paying: Web, status: str, payload: Any) -> None:
    (interrupt,) = events_of(paying, asked(), EVE)[-1]["outcome"]["interrupts"]
    entry = {"interruptId": interrupt["id"], "status": status, "payload": payload}
    events_of(paying, asked(resume=[entry]), EVE)
    assert PAID == []


def test_a_client_does_not_approve_the_calls_of_its_own_agent(paying: Web) -> None:
    started = paying.post("/v1/tasks", {"task": "Pay ann."})
    assert started["status"] == "paused"
    (waiting,) = started["approvals"]
    entry = {"interruptId": waiting["approval"], "status": "resolved", "payload": {"approve": True}}
    assert paying.ask("POST", "/v1/tasks/stream", json=asked(resume=[entry])).status_code == 403
    (seen,) = paying.get("/v1/approvals", EVE)["approvals"]
    assert (seen["approval"], seen["client"]) == (waiting["approval"], "ann")
    decision = {"approve": True, "digest": seen["digest"]}
    paying.post(f"/v1/approvals/{seen['approval']}", decision, EVE)
    done = paying.post(f"/v1/tasks/{started['task']}/resume")
    assert (done["status"], done["answer"], PAID) == ("completed", "paid 7 to ann", [("ann", 7)])


def test_a_task_of_another_client_does_not_exist(paying: Web) -> None:
    task = paying.post("/v1/tasks", {"task": "Pay ann."})["task"]
    assert paying.ask("GET", f"/v1/tasks/{task}", BOB).status_code == 404
    assert paying.ask("POST", f"/v1/tasks/{task}/resume", BOB).status_code == 404
    assert paying.get("/v1/tasks", BOB)["tasks"] == []
    assert [each["task"] for each in paying.get("/v1/tasks")["tasks"]] == [task]


def test_a_failure_is_an_event_of_the_protocol() -> None:
    with web_server(model=ScriptedModel([RuntimeError("the model broke")])) as web:
        assert events_of(web, asked())[-1]["type"] == "RUN_ERROR"
        assert web.ask("POST", "/v1/tasks/stream", json=asked("  ")).status_code == 422


def test_without_a_model_there_is_no_agent(web: Web) -> None:
    for path, body in (("/v1/tasks", {"task": "x"}), ("/v1/tasks/stream", asked())):
        answer = web.ask("POST", path, json=body)
        assert (answer.status_code, "--model" in answer.json()["hint"]) == (404, True)
