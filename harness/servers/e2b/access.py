"""Access of clients by their keys, and to each sandbox by its token or a signature; and the answers of
the server: JSON, and E2B's form of errors.
"""

import base64
import hashlib
import hmac
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....policies.errors import CellwrightError
from ....runner.channel import refuse_deep_json, refuse_large_json
from ..client_quota import Tokens
from ..http_access import MIB, header
from ..http_server import App, Receive, Scope, Send
from .e2b_cell import ENVD_PORT
from .e2b_sandboxes import E2bSandbox, E2bSandboxes

SANDBOX_HEADER, PORT_HEADER = b"e2b-sandbox-id", b"e2b-sandbox-port"
KEY_HEADER = b"x-api-key"
TOKEN_HEADERS = (b"x-access-token", b"e2b-traffic-access-token")
MOST_CALL = MIB  # bytes read at the beginning of a stream
_FILES = "/files"


class E2bTokens(Tokens):
    """The clients' keys, and the tokens of their sandboxes."""

    def __init__(self, tokens: Tokens, sandboxes: E2bSandboxes) -> None:
        self._tokens = tokens
        self._sandboxes = sandboxes

    def client_of(self, authorization: str) -> str | None:
        scheme, _, token = authorization.partition(" ")
        if scheme == "Key":
            return self._tokens.client_of(f"Bearer {token}")
        sandbox = self._sandboxes.with_token(token) if scheme == "Sandbox" else None
        return sandbox.client if sandbox else None


class Credentials:
    """ASGI middleware that turns E2B's headers of access into one Authorization header, and refuses
    unknown keys and tokens as E2B does."""

    def __init__(self, app: App, tokens: E2bTokens, sandboxes: E2bSandboxes) -> None:
        self._app = app
        self._tokens = tokens
        self._sandboxes = sandboxes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        signed = self._signed(scope)
        if signed is not None:
            scope = _for_sandbox(scope, signed)
        given = self._credential(scope, signed)
        if self._tokens.client_of(given) is None:
            await self._refusal(scope, signed)(scope, receive, send)
            return
        headers = [each for each in _with_length(scope) if each[0] != b"authorization"]
        headers.append((b"authorization", given.encode("latin-1")))
        await self._app({**scope, "headers": headers}, receive, send)

    def _refusal(self, scope: Scope, signed: E2bSandbox | None) -> Response:
        if signed is not None:
            return error_answer(401, "signature is already expired")
        if is_signed(scope):
            return error_answer(401, "invalid signature")
        if not is_for_sandbox(scope):
            return error_answer(
                401, "invalid API key: give the key that the server printed as E2B_API_KEY"
            )
        if self._sandboxes.find(header(scope, SANDBOX_HEADER)) is None:
            return error_answer(502, "The sandbox was not found")  # as E2B's proxy says it
        return error_answer(401, "invalid access token")

    def _signed(self, scope: Scope) -> E2bSandbox | None:
        """Return the sandbox whose token made the signature of a request, which may be expired.  The
        URLs that E2B's clients sign do not name it."""
        if not is_signed(scope):
            return None
        query = _query_of(scope)
        name = header(scope, SANDBOX_HEADER)
        return next(
            (
                each for each in self._sandboxes.all() if name in ("", each.id)
                and validity_of(query, scope["method"], each.token) != "invalid"
            ),
            None,
        )  # fmt: skip

    def _credential(self, scope: Scope, signed: E2bSandbox | None) -> str:
        if not is_for_sandbox(scope):
            return f"Key {header(scope, KEY_HEADER)}"
        if signed is not None:
            is_valid = validity_of(_query_of(scope), scope["method"], signed.token) == "valid"
            return f"Sandbox {signed.token if is_valid else ''}"
        token = next(filter(None, (header(scope, name) for name in TOKEN_HEADERS)), "")
        return f"Sandbox {token}"


def is_signed(scope: Scope) -> bool:
    """Tell whether a request has a signature in place of a token: it is for one file."""
    has_token = any(header(scope, name) for name in TOKEN_HEADERS)
    is_file = scope["path"] == _FILES and port_of(scope) == ENVD_PORT
    return is_file and not has_token and "signature" in _query_of(scope)


def _query_of(scope: Scope) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))


def _for_sandbox(scope: Scope, sandbox: E2bSandbox) -> Scope:
    others = [each for each in scope["headers"] if each[0] != SANDBOX_HEADER]
    return {**scope, "headers": [*others, (SANDBOX_HEADER, sandbox.id.encode())]}


def _with_length(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers; a call that streams counts as long as its first part may be, not as a file,
    because it is at work for as long as a command runs.  `body_of` reads no more than that."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if not is_stream(scope) or not any(name == b"transfer-encoding" for name, _ in headers):
        return headers
    kept = [each for each in headers if each[0] not in (b"transfer-encoding", b"content-length")]
    return [*kept, (b"content-length", str(MOST_CALL).encode())]


def is_stream(scope: Scope) -> bool:
    """Tell whether a request is a call that streams (connectrpc.com/docs/protocol)."""
    return header(scope, b"content-type").startswith("application/connect+")


def port_of(scope: Scope) -> int:
    """Return the port of a sandbox that a request is for."""
    return number_of(header(scope, PORT_HEADER), ENVD_PORT)


def is_for_sandbox(scope: Scope) -> bool:
    return any(name == SANDBOX_HEADER for name, _ in scope["headers"])


_OPERATIONS = {"GET": "read", "POST": "write"}
Validity = Literal["valid", "expired", "invalid"]


def validity_of(query: Mapping[str, str], method: str, token: str) -> Validity:
    """Return whether a request for a file has a signature that the holder of `token` made, as E2B's
    clients do, and whether that has expired.

    The signed text joins its parts by colons.  Only the path may hold one, so that each text has one
    reading.
    """
    expiration, user = query.get("signature_expiration", ""), query.get("username", "")
    if method not in _OPERATIONS or ":" in user or (expiration and not expiration.isdecimal()):
        return "invalid"
    parts = [query.get("path", ""), _OPERATIONS[method], user, token]
    text = ":".join([*parts, expiration] if expiration else parts)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    if not hmac.compare_digest(f"v1_{digest}".encode(), query.get("signature", "").encode()):
        return "invalid"
    return "expired" if expiration and int(expiration[:20]) < time.time() else "valid"


MOST_BODY = 64 * MIB  # a file of a request
_MOST_JSON = 17 * MIB
_STATUS = {422: 400}  # statuses that E2B's clients read as an invalid argument
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
        except CellwrightError as error:
            status = _STATUS.get(error.status, error.status)
            return error_answer(status, str(error).replace("\n", " "))

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
