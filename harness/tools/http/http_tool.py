"""`http_tool`: the tool `http.request`, as programs call it."""

import base64
import contextlib
import json
import re
from typing import Any

from ....policies.errors import ToolArgumentsInvalid
from ....policies.policy import Http
from ....runner.settings import AuditLevel
from ...schemas.spec import ToolOwner, ToolSpec, ToolState
from ..tool import Caller, Tool
from .http_client import METHODS, HttpClient, RequestRecord
from .http_exchange import HttpAnswer
from .targets import Target

_CHARSET = re.compile(r"charset=\"?([A-Za-z0-9._-]{1,40})", re.IGNORECASE)
_JSON = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\b", re.IGNORECASE)
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "description": "begins with https:// or http://"},
        "method": {"type": "string", "enum": list(METHODS), "default": "GET"},
        "headers": _TEXTS,
        "body": {"type": "string", "description": "sent as UTF-8"},
        "body_base64": {"type": "string", "description": "a body of bytes, instead of body"},
        "json": {"description": "a body that is sent as JSON, instead of body"},
    },
    "required": ["url"],
    "additionalProperties": False,
}
_RESULT = {
    "type": "object",
    "properties": {
        "status_code": {"type": "integer"},
        "url": {"type": "string", "description": "after redirects"},
        "headers": _TEXTS,
        "response_json": {"description": "the body, if it is JSON"},
        "body": {"type": "string", "description": "the body, if it is other text"},
        "body_base64": {"type": "string", "description": "the body, if it is not text"},
    },
    "required": ["status_code", "url", "headers"],
    "additionalProperties": False,
}
_SECRET = "credential {}"  # noqa: S105 - the name of an argument that callers cannot pass


def http_tool(client: HttpClient, name: str = "http.request") -> Tool:
    """Return the tool `http.request`, which makes the requests that `client` allows, on the host."""
    keys = dict.fromkeys(each.key for each in client.credentials)
    spec = ToolSpec(
        name=name,
        description="Make an HTTP request.  Only hosts, methods and paths that the host allows.",
        parameters=_PARAMETERS,
        output_schema=_RESULT,
        owner=ToolOwner.DEVELOPER,
        state=ToolState.TRUSTED,
        credentials={_SECRET.format(key): key for key in keys},
    )

    def perform(arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        headers = dict(arguments.get("headers", {}))
        body = _body(arguments, headers)
        secrets = {key: arguments[_SECRET.format(key)] for key in keys}
        target, answer = client.request(
            arguments.get("method", "GET"), arguments["url"], headers, body, secrets,
            lambda record: _record(caller, record), caller.id,
        )  # fmt: skip
        return _result(target, answer)

    return Tool(spec, perform)


def http_tools(rules: Http) -> list[Tool]:
    """Return the tool that the section `http` of a policy asks for; none without rules."""
    return [http_tool(client_of(rules))] if rules.allow else []


def client_of(rules: Http) -> HttpClient:
    """Return a client that makes the requests that the section `http` of a policy allows."""
    proxy = None if rules.proxy == "none" else rules.proxy
    return HttpClient(rules.allow, rules.deny, rules.addresses, proxy=proxy)


def _record(caller: Caller, record: RequestRecord) -> None:
    """Write one record into each trail of the caller, without the content of the request."""
    details = record._asdict()
    allowed, host, port = details.pop("is_allowed"), details.pop("host"), details.pop("port")
    level = AuditLevel.INFO if allowed else AuditLevel.WARNING
    for trail in caller.trails:
        trail.record(
            "network", "request", target=f"{host}:{port}", allowed=allowed, level=level,
            caller=caller.id, **details,
        )  # fmt: skip


def _body(arguments: dict[str, Any], headers: dict[str, str]) -> bytes:
    given = [each for each in ("body", "body_base64", "json") if each in arguments]
    if len(given) > 1:
        raise ToolArgumentsInvalid(f"{' and '.join(given)}: pass one of them")
    if "json" in arguments:
        if not any(name.lower() == "content-type" for name in headers):
            headers["Content-Type"] = "application/json"
        return json.dumps(arguments["json"], ensure_ascii=False, allow_nan=False).encode()
    try:
        if "body_base64" in arguments:
            return base64.b64decode(arguments["body_base64"], validate=True)
        return str(arguments.get("body", "")).encode()
    except ValueError as error:  # not base64, or a lone surrogate
        raise ToolArgumentsInvalid(f"{given[0]}: {error}") from None


def _result(target: Target, answer: HttpAnswer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "status_code": answer.status, "url": str(target), "headers": answer.headers,
    }  # fmt: skip
    kind = answer.headers.get("content-type", "")
    charset = _CHARSET.search(kind)
    try:
        text = answer.body.decode(charset[1] if charset else "utf-8")
    except (UnicodeError, LookupError):
        return found | {"body_base64": base64.b64encode(answer.body).decode()}
    if _JSON.match(kind):
        with contextlib.suppress(ValueError, RecursionError):
            return found | {"response_json": json.loads(text, parse_constant=_refuse)}
    return found | {"body": text}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
