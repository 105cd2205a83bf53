"""`relay_maker`: the relay of a connection, of bytes or of requests, by its rules and credentials."""

import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .cell_connection import CellConnection, CellPolicy, Records
from .client_hello import begins_tls
from .connection_relay import PlainStream, RefusedError, Relay, Stream, Turns

if TYPE_CHECKING:
    from .credential_exchange import CredentialExchange
    from .http_relay import RequestRelay, WhyNot


async def relay_maker(
    connection: CellConnection, first: bytes, policy: CellPolicy, records: Records, turns: Turns
) -> "Callable[[socket.socket], Relay | RequestRelay]":
    """Return what makes the relay of a connection to a socket outside; if rules or credentials are
    about requests, after its first request was allowed.  Raises RefusedError and OSError."""
    guest, name, port = connection.guest, connection.name, connection.port
    is_tls = begins_tls(first)
    exchange = _exchange(connection, policy, records)
    speaks_http = "tcp" not in connection.grant.schemes and (policy.tls or not is_tls)
    has_secret = bool(exchange and exchange.is_read and speaks_http)
    reads_requests = connection.grant.reads_requests and not is_tls
    if not (has_secret or reads_requests):
        on_sent = exchange.watch().feed if exchange and not is_tls else bytes
        return lambda outside: Relay(guest, outside, first, connection.count, turns, on_sent)
    from .http_relay import RequestReader, RequestRelay  # imported if the policy needs it

    why_not: WhyNot = partial(policy.why_not_request, name, port)
    if not reads_requests:
        why_not = lambda _: ""  # noqa: E731 - the rules allow every request
    stream, to_server = await _ends(connection, first if is_tls else b"", policy, turns)
    reader = RequestReader(
        stream, b"" if is_tls else first, name, port, why_not, turns, exchange,
        may_upgrade=not reads_requests,
    )  # fmt: skip
    request = await reader.next()
    if request is None:
        raise RefusedError("ended before its first request")
    connection.reader = reader
    return lambda outside: RequestRelay(reader, request, to_server(outside), connection.count)


def _exchange(
    connection: CellConnection, policy: CellPolicy, records: Records
) -> "CredentialExchange | None":
    if policy.secrets is None:
        return None
    from .credential_exchange import CredentialExchange

    name, port = connection.name, connection.port

    def on_foreign(variable: str) -> None:
        why = f"the placeholder of {variable} was sent to {name}, which does not get its value"
        records.refuse("credential", name, port, why)

    return CredentialExchange(policy.secrets, name, port, on_foreign)


async def _ends(
    connection: CellConnection, hello: bytes, policy: CellPolicy, turns: Turns
) -> tuple[Stream, Callable[[socket.socket], Stream]]:
    """Return the stream of the program, and the maker of the server's; `hello` are its first bytes if
    it speaks TLS."""
    tls = policy.tls
    if not (hello and tls):
        return PlainStream(connection.guest), PlainStream
    from .tls_stream import TlsStream

    stream = TlsStream(connection.guest, tls.server, turns, first=hello)
    try:
        await stream.handshake()
    except OSError as error:
        why = getattr(error, "reason", None) or "no TLS in time"
        raise RefusedError(f"the program refused the authority of its cell: {why}") from None
    name = connection.name
    return stream, lambda outside: TlsStream(outside, tls.client, turns, name)
