"""`RequestsMiddleware`: counts and logs the requests of an HTTP server, around its application."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .measurements import OTHER, Measurements
from .request_log import LogValue, RequestLog

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_UNFINISHED = "unfinished"  # the client was gone, or the server ended


class RequestsMiddleware:
    """ASGI middleware, the outermost; `server` names the server in labels and lines.

    A streamed answer counts when it ends.  `client_key`: where the application notes a client's name in
    the scope of its request.
    """

    def __init__(
        self, app: App, server: str, measurements: Measurements, log: RequestLog | None,
        client_key: str,
    ) -> None:  # fmt: skip
        self._app = app
        self._server = server
        self._measurements = measurements
        self._log = log
        self._client_key = client_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note how it was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        outcome = _UNFINISHED
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status, outcome
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                outcome = str(status)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._note(scope, outcome, time.monotonic() - begun)

    def _note(self, scope: Scope, outcome: str, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._measurements.note_request(f"{self._server} {method}", outcome, seconds)
        if self._log:
            client: LogValue = scope.get(self._client_key)
            path = str(scope.get("path", ""))
            self._log.note(self._server, method, outcome, seconds, client=client, path=path)
