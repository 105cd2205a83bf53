"""A way to a server: a process and its pipes, or HTTP; with limits, whichever it is."""

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

from ..tools.vault import Redaction, Vault
from .config import ServerConfig
from .message_filter import MessageFilter
from .processes import ServerProcess
from .stdio import MAX_LINE_BYTES, AtEnd, ProtocolViolation, Tail, pipe_streams
from .variables import from_vault

# What getaddrinfo(3) and connect(2) come to in a cell, as Python, Node, curl and others write it.
_NO_NETWORK = re.compile(
    "EAI_AGAIN|ENOTFOUND|ENETUNREACH|fetch failed|name resolution|Name or service not known|"
    "Network is unreachable|Could not resolve|nodename nor servname|All connection attempts failed",
    re.IGNORECASE,
)
# What stands below the words of an error: its stack, its fields, and the version of Node.
_BELOW_AN_ERROR = re.compile(r"\s|[\]})]+,?$|Node\.js v[\d.]+$")
_ERROR = re.compile(r"(Uncaught )?[\w$.]*(Error|Exception)\b|(error|fatal|panic)\b", re.IGNORECASE)
_LAST_LINES = 5
_LAST_CHARACTERS = 300
Launch = Callable[[ServerConfig, Mapping[str, str]], ServerProcess]


NO_NETWORK_HINT = "; cells have no network: run it with sandboxed: false, or elsewhere by url"


class Transport:
    """One way to one server, while it lasts; `secrets` are those that it was opened with."""

    def __init__(
        self, streams: TransportStreams, secrets: tuple[str, ...] = (), pid: int = 0,
        tail: Tail | None = None,
    ) -> None:  # fmt: skip
        self.messages = MessageFilter(*streams)
        self.secrets = secrets
        self.pid = pid
        self.in_cell = False
        self.patient = False  # it has done nothing wrong, and may end by itself
        self._tail = tail or Tail()

    def clean(self, text: str) -> str:
        """Return what was said without the credentials of the connection."""
        return Redaction(self.secrets).text(text) if self.secrets else text

    @property
    def why(self) -> str:
        """Return why it ended, in the server's last words if it had any."""
        said = self._tail.text
        last = last_words(self.clean(said))  # cleaned first, or a part of one would stay
        why = self.clean(self.messages.why)
        words = f"{why}, after {last!a}" if last else why
        return words + self.network_hint(said)

    def network_hint(self, said: str) -> str:
        """Return what to add to the words of a failure: that a server in a cell has no network, if that
        is what it fails for; else nothing."""
        return NO_NETWORK_HINT if self.in_cell and _NO_NETWORK.search(said) else ""

    async def __aenter__(self) -> Any:
        return self.messages, self.messages.writer

    async def __aexit__(self, *_: object) -> None:
        """Whoever opened it closes it."""


def last_words(said: str) -> str:
    """Return why a program ended, of what it wrote to its standard error: the line of the error if its
    stack is all that follows (Node ends with its own version), else the last five lines."""
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
    """Return a way to a server, to be entered and left in one task; raises LaunchError, ToolFailed."""
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
        tail = Tail()
        ending = _ending(processes[0], tail)
        async with pipe_streams(processes[0].stdin, processes[0].stdout, ending) as streams:
            transport = Transport(streams, secrets, processes[0].pid, tail)
            transport.in_cell = config.sandboxed
            async with anyio.create_task_group() as tasks:
                if processes[0].errors >= 0:
                    tasks.start_soon(tail.follow, processes[0].errors)
                yield transport
                tasks.cancel_scope.cancel()
    finally:
        patient = transport is not None and transport.patient
        with anyio.CancelScope(shield=True):  # it takes some seconds at most
            for process in processes:
                await anyio.to_thread.run_sync(partial(process.close, patient=patient))


async def _launch(
    config: ServerConfig, env: Mapping[str, str], launch: Launch, processes: list[ServerProcess]
) -> None:
    """Put a server that was started into `processes`, even if nobody waits for it any more."""
    if config.sandboxed:  # to build a cell takes a while
        await anyio.to_thread.run_sync(lambda: processes.append(launch(config, env)))
    else:  # a process ends with the thread that started it: with this one
        processes.append(launch(config, env))


def _ending(process: ServerProcess, tail: Tail) -> AtEnd:
    async def ask() -> None:
        tail.text = await anyio.to_thread.run_sync(process.said, abandon_on_cancel=True)

    return tail.end if process.errors >= 0 else ask


@contextlib.asynccontextmanager
async def _over_http(config: ServerConfig, vault: Vault) -> AsyncIterator[Transport]:
    headers, secrets = _filled(config.headers, vault)
    http = httpx2.AsyncClient(
        transport=_Bounded(), headers=headers, trust_env=False,  # no proxy or netrc unasked
        timeout=httpx2.Timeout(config.connect_timeout, read=None),
    )  # fmt: skip
    opened = streamable_http_client(config.url, http_client=http, max_sse_event_size=MAX_LINE_BYTES)
    async with http, opened as streams:
        yield Transport(streams, (*secrets, *config.secrets))


def _filled(values: Mapping[str, str], vault: Vault) -> tuple[dict[str, str], tuple[str, ...]]:
    filled = {key: from_vault(value, vault) for key, value in values.items()}
    secrets = tuple(value for each in filled.values() for value in each.values)
    return {key: each.text for key, each in filled.items()}, secrets


class _Bounded(httpx2.AsyncHTTPTransport):
    """Answers of bounded length; those that are streams of events have a limit to each event.

    They are not compressed: a few hundred kilobytes would unfold to gigabytes behind the bound.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise httpx2.DecodingError("it sent a compressed answer", request=request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Short(response.stream)
        return response


class _Short(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        room = MAX_LINE_BYTES
        async for chunk in self._stream:
            room -= len(chunk)
            if room < 0:
                raise ProtocolViolation(f"it sent an answer of more than {MAX_LINE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
