"""The OpenAPI document is valid, and the server keeps to it, whatever it is asked."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cellwright.harness.servers.web.web_app import ENDPOINTS, openapi_document
from tests.harness.servers.web.web_servers import BOUND_SECONDS, EVE, Web

pytestmark = pytest.mark.needs("userns")

CHECKS = (
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance
)  # fmt: skip
DOCUMENT: dict[str, Any] = openapi_document(ENDPOINTS)
OPERATIONS = [
    (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
]  # fmt: skip


def test_the_document_is_valid_and_is_what_the_server_gives(web: Web) -> None:
    validate(DOCUMENT)
    assert web.get("/v1/openapi.json") == DOCUMENT
    names = [each["operationId"] for path in DOCUMENT["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names) == len(ENDPOINTS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=str)
def test_the_server_keeps_to_the_document(web: Web, path: str, method: str) -> None:
    """Whatever is asked, by a client that may do everything: no bug, and no undescribed answer."""
    headers = {"Authorization": f"Bearer {EVE}"}
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]

    @settings(
        max_examples=25, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def fuzz(case: Any) -> None:
        answer = case.call(base_url=web.url, headers=headers, timeout=BOUND_SECONDS)
        case.validate_response(answer, checks=CHECKS)

    fuzz()
