"""Access of clients by their keys, and to each sandbox by its token or a signature."""

import urllib.parse

from starlette.responses import Response

from ..http_access import MIB, header
from ..http_server import App, Receive, Scope, Send
from ..tokens import Tokens
from .answers import error_answer, number_of
from .cell import ENVD_PORT
from .sandboxes import E2bSandbox, E2bSandboxes
from .signatures import validity_of

SANDBOX_HEADER, PORT_HEADER = b"e2b-sandbox-id", b"e2b-sandbox-port"
KEY_HEADER = b"x-api-key"
TOKEN_HEADERS = (b"x-access-token", b"e2b-traffic-access-token")
MOST_CALL = MIB  # of the part of a stream that is read
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
    """Return a request with the header that names its sandbox."""
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
