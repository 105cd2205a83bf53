"""The OpenAPI document (3.1), made from the endpoints and the types of their bodies."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ...version import NAME, installed_version
from .endpoint import Endpoint
from .problems import Problem

_REFERENCE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "description": "The same key with the same body gets the same answer, for ten minutes.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}  # fmt: skip


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document."""
    types = {each for endpoint in endpoints for each in (endpoint.takes, endpoint.gives)}
    structs = sorted(types - {None, bytes}, key=lambda each: each.__name__)
    _, schemas = msgspec.json.schema_components([*structs, Problem], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        path = _PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each)
    document = {
        "openapi": "3.1.0",
        "info": {"title": NAME, "version": installed_version() or "0"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return plain  # without tuples, which are defaults of fields


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": _reference(Problem)}}
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint)],
        "responses": {
            str(endpoint.status): _success(endpoint),
            "default": {"description": "A problem.", "content": problem},
        },
    }
    if endpoint.method == "POST" and not endpoint.stream:
        operation["parameters"].append(_KEY)
    if endpoint.takes is bytes:
        operation["requestBody"] = {"required": True, "content": _BINARY}
    elif endpoint.takes:
        content = {"application/json": {"schema": _reference(endpoint.takes)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _success(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.stream:
        words = "Events; the data of each is JSON."
        if endpoint.gives:
            words += f" That of the last, `result`, is a {endpoint.gives.__name__}."
        return {
            "description": words,
            "content": {"text/event-stream": {}},
        }
    if endpoint.gives is None:
        return {"description": "Done."}
    if endpoint.gives is bytes:
        return {"description": "The file.", "content": _BINARY}
    if endpoint.gives is dict:
        return {
            "description": "Done.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    return {
        "description": "Done.",
        "content": {"application/json": {"schema": _reference(endpoint.gives)}},
    }


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(endpoint.path)
    ]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    schema = msgspec.json.schema(endpoint.query)["$defs"][endpoint.query.__name__]
    return [
        {"name": name, "in": "query", "required": False, "schema": each}
        for name, each in schema["properties"].items()
    ]


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
