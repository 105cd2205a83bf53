"""Access of clients by their keys, and to each sandbox by its token or a signature."""

import urllib.parse

from starlette.responses import Response

from ..http_access import MIB, header
from ..http_server import App, Receive, Scope, Send
from ..tokens import Tokens
from .answers import error_answer, number_of
from .cell import ENVD_PORT
from .sandboxes import E2bSandboxes
from .signatures import is_signed

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
        given = self._credential(scope)
        if self._tokens.client_of(given) is None:
            await self._refusal(scope)(scope, receive, send)
            return
        headers = [each for each in _with_length(scope) if each[0] != b"authorization"]
        headers.append((b"authorization", given.encode("latin-1")))
        await self._app({**scope, "headers": headers}, receive, send)

    def _refusal(self, scope: Scope) -> Response:
        if not is_for_sandbox(scope):
            return error_answer(
                401, "invalid API key: give the key that the server printed as E2B_API_KEY"
            )
        if self._sandboxes.find(header(scope, SANDBOX_HEADER)) is None:
            return error_answer(502, "The sandbox was not found")  # as E2B's proxy says it
        return error_answer(401, "invalid access token")

    def _credential(self, scope: Scope) -> str:
        if not is_for_sandbox(scope):
            return f"Key {header(scope, KEY_HEADER)}"
        query = dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))
        token = next(filter(None, (header(scope, name) for name in TOKEN_HEADERS)), "")
        if not token and "signature" in query:
            sandbox = self._sandboxes.find(header(scope, SANDBOX_HEADER))
            is_file = scope["path"] == _FILES and port_of(scope) == ENVD_PORT
            if sandbox and is_file and is_signed(query, scope["method"], sandbox.token):
                token = sandbox.token  # for nothing else: a signature is of one file
        return f"Sandbox {token}"


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
