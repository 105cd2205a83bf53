"""Answers of the server: JSON, and E2B's form of errors."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....policies.errors import BusyError, CellwrightError, PolicyError, SessionLost
from ....runner.nesting import refuse_deep_json, refuse_large_json
from ..http_access import MIB
from ..http_server import Receive, Scope, Send
from .sandboxes import E2bSandboxes

MOST_BODY = 64 * MIB  # a file of a request
_MOST_JSON = 17 * MIB
_T = TypeVar("_T")

Handler = Callable[[Request, E2bSandboxes], Awaitable[Response]]


def answering(handler: Handler, sandboxes: E2bSandboxes) -> Any:
    """Return an endpoint that turns exceptions into E2B's errors."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, sandboxes)
        except E2bRefusal as refused:
            return error_answer(refused.status, str(refused))
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            return error_answer(400, f"the body is invalid: {error}")
        except PolicyError as error:
            return error_answer(400, str(error).replace("\n", " "))
        except BusyError as error:
            return error_answer(429, error.what)
        except SessionLost as error:
            return error_answer(404, str(error))
        except CellwrightError as error:
            return error_answer(500, error.what)

    return answer


class E2bRefusal(Exception):  # noqa: N818 - it becomes an answer
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_answer(status: int, message: str) -> Response:
    return json_answer({"code": status, "message": message}, status)


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json"
    )


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await error_answer(404, f"{scope['method']} {scope['path'][:200]} is not supported")(
        scope, receive, send
    )


async def body_of(request: Request, most: int = MOST_BODY) -> bytes:
    """Return the body; raises E2bRefusal if it has more than `most` bytes, or than the request's quota
    was charged for."""
    charged = request.headers.get("content-length")
    most = most if charged is None else min(most, int(charged))
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise E2bRefusal(413, f"the body is longer than {most} bytes")
    return bytes(body)


async def read_body(request: Request, kind: type[_T]) -> _T:
    body = await body_of(request, _MOST_JSON) or b"{}"
    refuse_large_json(body)
    refuse_deep_json(body)
    given = msgspec.json.decode(body)
    if isinstance(given, dict):  # clients write null for what they leave out
        given = {name: value for name, value in given.items() if value is not None}
    return msgspec.convert(given, kind)


def number_of(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 12 else default
