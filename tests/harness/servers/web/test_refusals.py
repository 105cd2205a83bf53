"""Refusals of the web server as a whole, and its limits."""

import pytest

from cellwright import Privacy, Sandbox, ToolRegistry
from cellwright.harness.runs.durable_runs import Runs
from cellwright.harness.servers.http_access import AccessLimits
from cellwright.harness.servers.services import OwnedSessions, ServicesByClient, SessionLimits
from cellwright.harness.servers.web.endpoint import WebLimits, WebState
from cellwright.harness.servers.web.tool_endpoints import approver
from cellwright.harness.servers.web.web_app import web_app
from cellwright.policies.errors import PolicyError
from tests.conftest import policy_named
from tests.harness.servers.web.web_servers import ANN, BOB, HOSTS, TOKENS, web_server

pytestmark = pytest.mark.needs("userns")


def test_personal_data_is_not_served_without_tokens() -> None:
    with (
        Sandbox(policy=policy_named("strict"), pool=0, privacy=Privacy()) as ceiling,
        ToolRegistry() as registry,
        Runs() as runs,
    ):
        limits = SessionLimits()
        services = ServicesByClient(ceiling, registry, approver(runs), limits)
        with pytest.raises(PolicyError, match="privacy"):
            web_app(WebState(services, OwnedSessions(limits), runs, TOKENS), HOSTS)
        services.close()


def test_too_many_requests_a_second_are_refused_for_that_client_only() -> None:
    with web_server(limits=WebLimits(requests_per_second=2)) as web:
        statuses = {web.ask("GET", "/v1/server").status_code for _ in range(20)}
        assert 429 in statuses
        assert web.ask("GET", "/v1/server", BOB).status_code == 200


@pytest.mark.parametrize("most", [{"runs_of_one": 2}, {"run_bytes_of_one": 2000}])
def test_the_recorded_runs_of_a_client_are_limited(most: dict[str, int]) -> None:
    """They stay until somebody removes them, and without --runs they are in memory."""
    code = "import tools\ntools.add(a=1, b=2)" + " " * 1000
    with web_server(limits=WebLimits(**most)) as web:
        first, _ = (web.post("/v1/runs", {"code": code})["run"] for _ in range(2))
        refused = web.ask("POST", "/v1/runs", json={"code": code})
        assert refused.status_code == 429
        assert "too many recorded runs" in refused.json()["detail"]
        assert web.post("/v1/runs", {"code": code}, BOB)["status"] == "completed"
        assert web.ask("DELETE", f"/v1/runs/{first}").status_code == 204
        assert web.post("/v1/runs", {"code": code})["status"] == "completed"


def test_a_body_that_is_too_long_or_decodes_to_much_is_refused() -> None:
    limits = WebLimits(access=AccessLimits(body_bytes=1 << 20))
    headers = {"Content-Type": "application/json"}
    with web_server(limits=limits) as web:
        bodies = {
            413: b'{"code": "' + b"x" * (1 << 20) + b'"}',
            400: b'{"code": "", "inputs": {"a": ' + b"[" * 100 + b"]" * 100 + b"}}",
        }
        for status, body in bodies.items():
            for path in ("/v1/executions", "/v1/executions/stream"):
                answer = web.ask("POST", path, content=body, headers=headers)
                assert answer.status_code == status, answer.text
        chunks = (b"x" * 65536 for _ in range(100))  # a length that is not declared
        answer = web.ask("POST", "/v1/executions", content=chunks, headers=headers)
        assert answer.status_code == 413
        assert web.post("/v1/executions", {"code": "1"}, ANN)["value"] == 1
