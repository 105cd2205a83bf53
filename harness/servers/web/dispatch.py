"""`Dispatcher`: reads and counts a request, has its endpoint answer it, and encodes the answer.

The work of a request ends with its client: once the client has disconnected, its cell is killed.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ....policies.errors import ToolBudgetExceeded
from ....runner.channel import refuse_deep_json, refuse_large_json
from ...mcp.waiting_threads import in_thread
from ...tools.tool import Meter
from ..client_quota import CLIENT, HeldAmount
from ..http_access import MIB, ClientTurns, header, run_in_thread, until_gone
from ..http_server import App, Receive, Scope, Send
from ..served_requests import KeptAnswers, KeptLimits
from .endpoint import (
    ContentAnswer,
    Endpoint,
    PiecewiseResponse,
    RequestRefused,
    WebCall,
    WebState,
    encoded_json,
    problem_of,
    send_events,
)

_JSON, _PROBLEM = "application/json", "application/problem+json"
_UTF8 = "charset=utf-8"  # stated, because a proxy could decode the text by another charset
_HEADERS = {
    "cache-control": "no-store", "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
_KEY = re.compile(r"[!-~]{1,255}")
_TRACE_CHARACTERS = 256
_AT_ONCE, _AT_ONCE_OF_ONE = 64, 32  # threads for requests that execute nothing; of one client
_DECODED_AT_ONCE = 64 * 1024  # bytes of JSON, by the event loop itself
_KEPT_SECONDS, _KEPT = 600.0, KeptLimits(4096, 64 * MIB)
_KEPT_OF_ONE = KeptLimits(256, 16 * MIB)  # for one client
_BUSY = 429
_LOG = logging.getLogger(__name__)


class Dispatcher:
    """Answers requests by endpoints."""

    def __init__(self, state: WebState) -> None:
        self._state = state
        self._executions = state.limits.executions
        self._answer_bytes = state.limits.answer_bytes
        self._turns = ClientTurns(_AT_ONCE_OF_ONE, _AT_ONCE)
        self._meters: dict[str, Meter] = {}  # a client is a token, so they are few
        self._kept: KeptAnswers[Response] = KeptAnswers(
            lambda answer: len(answer.body), _KEPT, _KEPT_OF_ONE, seconds=_KEPT_SECONDS
        )

    def app_of(self, endpoint: Endpoint) -> App:
        """Return the ASGI application of one endpoint."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self._answer(endpoint, scope, receive, send)
            except ClientDisconnect:  # also raised if the body did not arrive in time
                late = RequestRefused(408, "late", "the body did not come in time")
                await refusal(late, connection="close")(scope, receive, send)
            except Exception as error:  # noqa: BLE001 - an answer
                await _failure(endpoint, error)(scope, receive, send)

        return answer

    async def _answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        client: str = scope[CLIENT]
        self._count(client)
        if endpoint.needs_operator and not self._state.tokens.is_operator(client):
            raise RequestRefused(403, "denied", "only operators may call this")
        data = await read_body(scope, receive, self._state.limits.access.body_bytes)
        with HeldAmount(self._answer_bytes, client) as answer_bytes:
            call = WebCall(
                client, self._state, scope["path_params"], _query(endpoint, scope),
                await self._body(client, partial(_decoded, endpoint, scope, data), len(data)), -1,
                header(scope, b"traceparent")[:_TRACE_CHARACTERS], answer_bytes,
            )  # fmt: skip
            await self._answer_call(endpoint, call, data, scope, receive, send)

    async def _body(self, client: str, decode: Callable[[], Any], length: int) -> Any:
        """Return a decoded body; a thread decodes a long one, so that other requests go on."""
        if length <= _DECODED_AT_ONCE:
            return decode()
        async with self._turns.turn(client):
            return await run_in_thread(decode)

    async def _answer_call(
        self, endpoint: Endpoint, call: WebCall, data: bytes, scope: Scope, receive: Receive,
        send: Send,
    ) -> None:  # fmt: skip
        """Carry out a request, or find its kept answer, and send the answer."""
        key = _idempotency_key(endpoint, scope)
        if endpoint.stream:
            with self._counted(endpoint, call.client):
                await send_events(endpoint.stream(call), self._state.limits, scope, receive, send)
            return
        until = partial(until_gone, scope, receive)
        perform = partial(self._perform, endpoint, call, until)
        if key:
            place = (endpoint.method, scope["path"], key)
            answer = await self._kept_answer(call.client, place, data, perform)
        else:
            answer = await perform()
        call.answer_bytes.grow_to(len(answer.body))
        await answer(scope, receive, send)

    async def _kept_answer(
        self, client: str, place: Hashable, data: bytes, perform: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Return the kept answer, or that of `perform`; raises RequestRefused for another body.

        An answer that says that nothing was done, as the server was busy or failed, is not kept.
        """
        key, digest = (client, place), hashlib.sha256(data).digest()
        while True:
            entry, is_first = self._kept.begin(key, digest, client)
            if is_first:
                kept = None
                try:
                    response = await perform()
                    if response.status_code != _BUSY and response.status_code < 500:
                        kept = response
                finally:
                    self._kept.end(key, kept, is_kept=kept is not None)
                return response
            if entry.digest != digest:
                words = "Idempotency-Key: this key was used with another body"
                raise RequestRefused(409, "conflict", words, "use a new key")
            # shielded, because a client that leaves must not cancel work that others wait for
            if known := await asyncio.shield(asyncio.wrap_future(entry.answer)):
                return known

    async def _perform(
        self, endpoint: Endpoint, call: WebCall, until: Callable[[], Awaitable[None]]
    ) -> Response:
        work = partial(_work, endpoint, call)
        try:
            with self._counted(endpoint, call.client):
                if endpoint.executes:
                    return await in_thread(work, until)
                async with self._turns.turn(call.client):
                    return await in_thread(work, until)
        except Exception as error:  # noqa: BLE001 - an answer
            return _failure(endpoint, error)

    def _count(self, client: str) -> None:
        rate = self._state.limits.requests_per_second
        meter = self._meters.setdefault(client, Meter(math.inf, rate))
        try:
            meter.count()
        except ToolBudgetExceeded:
            words = f"more than {rate:g} requests a second"
            raise RequestRefused(429, "too_fast", words, "wait a second") from None

    @contextmanager
    def _counted(self, endpoint: Endpoint, client: str) -> Iterator[None]:
        if not endpoint.executes:
            yield
            return
        with self._executions.held(client):
            yield


def _failure(endpoint: Endpoint, error: Exception) -> Response:
    if problem_of(error).title == "bug":
        _LOG.error("%s %s failed", endpoint.method, endpoint.path, exc_info=error)
    return refusal(error)


def refusal(error: Exception, **headers: str) -> Response:
    """Return the answer to a request that raised `error`."""
    problem = problem_of(error)
    again = {"retry-after": "1"} if problem.status == 429 else {}
    return Response(encoded_json(problem), problem.status, _HEADERS | again | headers, _PROBLEM)


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """Return a body; raises RequestRefused if it is longer than `most`, ClientDisconnect if it does not
    come in time."""
    pieces, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(piece := message.get("body", b""))
        length += len(piece)
        if length > most:
            raise RequestRefused(413, "too_large", f"the body has more than {most} bytes")
        if not message.get("more_body", False):
            return b"".join(pieces)


def _work(endpoint: Endpoint, call: WebCall, stop: int) -> Response:
    assert endpoint.handler  # noqa: S101 - no stream
    answer = endpoint.handler(call._replace(stop=stop))
    if answer is None:
        return Response(status_code=204, headers=_HEADERS)
    if isinstance(answer, ContentAnswer):
        return _content(answer, call.state.limits.stalled_seconds)
    stalled_seconds = call.state.limits.stalled_seconds
    return PiecewiseResponse(
        encoded_json(answer), endpoint.status, _HEADERS, _JSON, stalled_seconds
    )


def _content(answer: ContentAnswer, stalled_seconds: float) -> Response:
    """Return a file as an attachment: a page of a guest's must not act as one of this server."""
    name = urllib.parse.quote(answer.name.rpartition("/")[2], safe="", errors="replace")
    about = {"content-disposition": f"attachment; filename*=UTF-8''{name}"}
    kind = "application/octet-stream"
    return PiecewiseResponse(answer.data, 200, _HEADERS | about, kind, stalled_seconds)


def _idempotency_key(endpoint: Endpoint, scope: Scope) -> str:
    """Return the key of a request, "" without one; raises RequestRefused for an invalid key."""
    found = [value for name, value in scope["headers"] if name == b"idempotency-key"]
    if not found:
        return ""
    key = str(found[0], "latin-1")
    if endpoint.method != "POST" or endpoint.stream:
        raise RequestRefused(400, "invalid", "Idempotency-Key: only for POST, and not for streams")
    if not _KEY.fullmatch(key):
        raise RequestRefused(400, "invalid", "Idempotency-Key: 1 to 255 visible ASCII characters")
    return key


def _decoded(endpoint: Endpoint, scope: Scope, data: bytes) -> Any:
    if endpoint.takes is bytes:
        return data
    if endpoint.takes is None:
        if data:
            raise RequestRefused(400, "invalid", "this request has no body")
        return None
    kind, *parameters = header(scope, b"content-type").lower().replace(" ", "").split(";")
    if kind != _JSON:  # only JSON, because a form on a foreign page cannot send it
        raise RequestRefused(415, "invalid", f"Content-Type: must be {_JSON}, got {kind[:64]!r}")
    if any(each.replace('"', "") not in ("", _UTF8) for each in parameters):
        raise RequestRefused(415, "invalid", f"Content-Type: only {_UTF8} may follow {_JSON}")
    return _checked(lambda: _decoded_json(endpoint.takes, data), "body")


def _decoded_json(takes: Any, data: bytes) -> Any:
    refuse_large_json(data)
    refuse_deep_json(data)
    decoded = msgspec.json.decode(data, type=takes)
    # numbers stay text, because int() raises a different error beyond 4,300 digits
    json.loads(data, object_pairs_hook=_refuse_duplicate_keys, parse_int=str, parse_float=str)
    return decoded


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raise msgspec.ValidationError for an object with the same key twice: a proxy could have read the
    other value."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise msgspec.ValidationError(f"duplicate key {twice[:64]!r}")


def _query(endpoint: Endpoint, scope: Scope) -> Any:
    text = scope["query_string"].decode("latin-1")
    try:
        given = urllib.parse.parse_qsl(
            text, keep_blank_values=True, max_num_fields=32, errors="strict"
        )
    except ValueError as error:
        raise RequestRefused(400, "invalid", f"query: {error}") from None
    pairs = dict(given)
    if len(pairs) < len(given):
        raise RequestRefused(400, "invalid", "query: a parameter is given twice")
    if endpoint.query is None:
        if pairs:
            raise RequestRefused(400, "invalid", "this request has no query")
        return None
    kind = endpoint.query
    return _checked(lambda: msgspec.convert(pairs, kind, strict=False), "query")


def _checked(decode: Callable[[], Any], what: str) -> Any:
    try:
        return decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, "invalid", f"{what}: {error}") from None
