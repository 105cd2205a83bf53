"""Transports to a server, with limits: the pipes of a process, or streamable HTTP."""

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from ..text.redaction import Redaction
from ..tools.vault import Vault
from .config import ServerConfig
from .message_filter import MessageFilter
from .processes import ServerProcess
from .stdio import MAX_LINE_BYTES, AtEnd, ProtocolViolation, StderrTail, pipe_streams
from .variables import from_vault

# How Python, Node, curl and others report getaddrinfo(3) and connect(2) failing in a cell.
_NO_NETWORK = re.compile(
    "EAI_AGAIN|ENOTFOUND|ENETUNREACH|fetch failed|name resolution|Name or service not known|"
    "Network is unreachable|Could not resolve|nodename nor servname|All connection attempts failed",
    re.IGNORECASE,
)
# Lines below the message of an error: its stack, its fields, and the version of Node.
_BELOW_AN_ERROR = re.compile(r"\s|[\]})]+,?$|Node\.js v[\d.]+$")
_ERROR = re.compile(r"(Uncaught )?[\w$.]*(Error|Exception)\b|(error|fatal|panic)\b", re.IGNORECASE)
_LAST_LINES = 5
_LAST_CHARACTERS = 300
Launch = Callable[[ServerConfig, Mapping[str, str]], ServerProcess]


NO_NETWORK_HINT = (
    "; cells have no network: set sandboxed: false, or run the server elsewhere by url"
)


class Transport:
    """An open transport to one server; `secrets` are the credentials that it was opened with."""

    def __init__(
        self, streams: TransportStreams, secrets: tuple[str, ...] = (), pid: int = 0,
        tail: StderrTail | None = None,
    ) -> None:  # fmt: skip
        self.messages = MessageFilter(*streams)
        self.secrets = secrets
        self.pid = pid
        self.in_cell = False
        self.patient = False  # the server did nothing wrong and gets time to end by itself
        self._tail = tail or StderrTail()

    def clean(self, text: str) -> str:
        """Return `text` with the credentials of the connection redacted."""
        return Redaction(self.secrets).text(text) if self.secrets else text

    @property
    def why(self) -> str:
        """Return why it ended, with the last lines of the server's stderr."""
        said = self._tail.text
        last = last_words(
            self.clean(said)
        )  # redact first: cutting could leave a part of a credential
        why = self.clean(self.messages.why)
        words = f"{why}, after {last!a}" if last else why
        return words + self.network_hint(said)

    def network_hint(self, said: str) -> str:
        """Return a hint that cells have no network if the failure `said` looks like that, else ""."""
        return NO_NETWORK_HINT if self.in_cell and _NO_NETWORK.search(said) else ""

    async def __aenter__(self) -> Any:
        return self.messages, self.messages.writer

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the function that opened it closes it."""


def last_words(said: str) -> str:
    """Return the end of a program's standard error that tells why it failed: the line of the error if
    only its stack follows (Node adds its version), else the last five lines."""
    lines = [each.rstrip() for each in said.splitlines() if each.strip()]
    for line in reversed(lines):
        if not _BELOW_AN_ERROR.match(line):
            if _ERROR.match(line):
                return line[-_LAST_CHARACTERS:]
            break
    return " | ".join(each.strip() for each in lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]


def open_transport(
    config: ServerConfig, vault: Vault, launch: Launch
) -> "contextlib.AbstractAsyncContextManager[Transport]":
    """Return a transport, to be entered and left in the same task; raises LaunchError, ToolFailed."""
    return _over_http(config, vault) if config.url else _over_pipes(config, vault, launch)


@contextlib.asynccontextmanager
async def _over_pipes(
    config: ServerConfig, vault: Vault, launch: Launch
) -> AsyncIterator[Transport]:
    env, secrets = _filled(config.env, vault)
    processes: list[ServerProcess] = []
    transport: Transport | None = None
    try:
        await _launch(config, env, launch, processes)
        tail = StderrTail()
        ending = _ending(processes[0], tail)
        async with pipe_streams(processes[0].stdin, processes[0].stdout, ending) as streams:
            transport = Transport(streams, secrets, processes[0].pid, tail)
            transport.in_cell = config.sandboxed
            async with anyio.create_task_group() as tasks:
                if processes[0].stderr >= 0:
                    tasks.start_soon(tail.follow, processes[0].stderr)
                yield transport
                tasks.cancel_scope.cancel()
    finally:
        patient = transport is not None and transport.patient
        with anyio.CancelScope(shield=True):  # takes some seconds at most
            for process in processes:
                await anyio.to_thread.run_sync(partial(process.close, patient=patient))


async def _launch(
    config: ServerConfig, env: Mapping[str, str], launch: Launch, processes: list[ServerProcess]
) -> None:
    """Append the started server to `processes`, even if this is cancelled meanwhile: it has to be
    closed."""
    if config.sandboxed:  # building a cell takes time
        await anyio.to_thread.run_sync(lambda: processes.append(launch(config, env)))
    else:  # pdeathsig ends the process with the thread that started it: use this one
        processes.append(launch(config, env))


def _ending(process: ServerProcess, tail: StderrTail) -> AtEnd:
    async def ask() -> None:
        tail.text = await anyio.to_thread.run_sync(process.read_stderr, abandon_on_cancel=True)

    return tail.wait_until_complete if process.stderr >= 0 else ask


@contextlib.asynccontextmanager
async def _over_http(config: ServerConfig, vault: Vault) -> AsyncIterator[Transport]:
    headers, secrets = _filled(config.headers, vault)
    http = httpx2.AsyncClient(
        transport=_BoundedHttp(), headers=headers, trust_env=False,  # no proxy and no .netrc
        timeout=httpx2.Timeout(config.connect_timeout, read=None),
    )  # fmt: skip
    opened = streamable_http_client(config.url, http_client=http, max_sse_event_size=MAX_LINE_BYTES)
    async with http, opened as streams:
        yield Transport(streams, (*secrets, *config.secrets))


def _filled(values: Mapping[str, str], vault: Vault) -> tuple[dict[str, str], tuple[str, ...]]:
    filled = {key: from_vault(value, vault) for key, value in values.items()}
    secrets = tuple(value for each in filled.values() for value in each.values)
    return {key: each.text for key, each in filled.items()}, secrets


class _BoundedHttp(httpx2.AsyncHTTPTransport):
    """Limits the length of each answer; the SDK limits each event of a stream of events.

    Compressed answers are refused: some hundred kilobytes could expand to gigabytes behind the limit.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise httpx2.DecodingError("it sent a compressed answer", request=request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _BoundedStream(response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_LINE_BYTES
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise ProtocolViolation(f"it sent an answer of more than {MAX_LINE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
