"""`ServedCell`: answers the DNS queries of one cell and relays its connections, as the policy allows.

The cell made the sockets in its own network namespace, before any guest.  The address to which a
connection was made stands for a name; nothing else that the cell sends decides where it leads.
"""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from ...policies.network.address_ranges import refusal_of
from ...policies.network.rule import NetworkRule
from ...policies.network.rules import Allowance, NetworkVerdict, RuleUse
from .. import channel
from ..messages import Relayed, Settle, Settled, decode, encode
from . import dns
from .addresses import Budgets, NoFreeAddressError, SyntheticAddresses, is_own_address
from .cell_connection import CellConnection, CellPolicy, Records
from .connection_relay import (
    RefusedError,
    Turns,
    dial,
    first_bytes,
    leave,
    limit_buffers,
    reset,
    was_reset,
)
from .name_resolution import NoAddressError, Resolver, Upstream
from .relay_choice import relay_maker

_CONNECT_SECONDS = 10.0
_MOST_CONNECTIONS = 256
_FAST_CONNECTIONS = 16  # concurrent connections whose buffers the kernel may grow
_MOST_QUERIES_OVER_TCP = 4
_TCP_QUERY_SECONDS = 10.0
_REST_SECONDS = 0.1  # pause when descriptors have run out, or a cell sends too many queries
_UPLOAD_SECONDS = 1.0  # time to send the last bytes of a program that has ended
_QUERIES = 100.0, 1000.0  # queries a second, and burst: each costs work of the host
_CONNECTIONS = 100.0, 200.0
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ServedCell:
    """One cell's sockets, names and connections."""

    def __init__(
        self, policy: CellPolicy, resolver: Resolver, upstream: Upstream | None, reports: socket.socket,
        sockets: list[socket.socket], budgets: Budgets, on_end: Callable[["ServedCell"], None],
    ) -> None:  # fmt: skip
        """`sockets` are those for queries, by UDP and by TCP, and a listening one for each port."""
        self._policy = policy
        self._resolver = resolver
        self._upstream = upstream
        self._reports = reports
        self._datagrams, self._streams, *self._listeners = sockets
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._room = budgets.connections.share()
        self._names_room = budgets.names.share()
        self._names = SyntheticAddresses(self._names_room)
        self._records = Records()
        self._turns = Turns()
        self._connections: set[CellConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queries_over_tcp = 0
        self._queries = Allowance(*_QUERIES)
        self._accepts = Allowance(*_CONNECTIONS)
        self._uses: dict[NetworkRule, RuleUse] = {}  # this cell's use of rules with caps
        self._is_open = True
        self._readers: dict[socket.socket, Callable[[], None]] = {
            self._datagrams: self._take_query,
            self._streams: self._accept_query,
            **{each: partial(self._accept, each) for each in self._listeners},
        }
        for each in (reports, *sockets):
            each.setblocking(False)
        self._loop.add_reader(reports, self._on_report)
        for each in self._readers:
            self._read(each)

    def _read(self, sock: socket.socket) -> None:
        if reader := self._readers.get(sock):
            self._loop.add_reader(sock, reader)

    def _rest(self, *sockets: socket.socket) -> None:
        """Stop reading from `sockets` for a moment; does nothing for one that rests."""
        for each in sockets:
            if self._loop.remove_reader(each):
                self._loop.call_later(_REST_SECONDS, self._read, each)

    def _stop_reading(self, *sockets: socket.socket) -> None:
        for each in sockets:
            self._readers.pop(each, None)
            self._loop.remove_reader(each)

    # names

    def _take_query(self) -> None:
        if not self._queries.take():
            self._rest(self._datagrams, self._streams)
            return
        with contextlib.suppress(OSError):  # the sender is gone, or has no room
            message, sender = self._datagrams.recvfrom(dns.MOST_BYTES + 1)
            if answer := self._answer(message):
                self._datagrams.sendto(answer, sender)

    def _accept_query(self) -> None:
        if self._queries_over_tcp >= _MOST_QUERIES_OVER_TCP or not self._queries.take():
            self._rest(self._streams)
            return
        if sock := self._accept_from(self._streams):
            self._queries_over_tcp += 1
            self._begin(self._serve_queries(sock))

    async def _serve_queries(self, sock: socket.socket) -> None:
        """Answer the queries of one TCP connection; each has its length before it."""
        try:
            async with asyncio.timeout(_TCP_QUERY_SECONDS):
                while size := int.from_bytes(await self._receive_exactly(sock, 2), "big"):
                    if size > dns.MOST_BYTES:
                        self._records.refuse("resolve", "", 0, f"a query of {size} bytes")
                        return
                    answer = self._answer(await self._receive_exactly(sock, size))
                    if not answer:
                        return
                    await self._loop.sock_sendall(sock, len(answer).to_bytes(2, "big") + answer)
                    while not self._queries.take():
                        await asyncio.sleep(_REST_SECONDS)
        except (OSError, EOFError):  # TimeoutError is an OSError
            pass
        finally:
            self._queries_over_tcp -= 1
            sock.close()

    async def _receive_exactly(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await self._turns.receive(sock, size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _answer(self, message: bytes) -> bytes:
        """Return the answer to a query, empty for none.

        The policy decides before anything else happens, so a name that is not allowed is never
        looked up anywhere.
        """
        try:
            query = dns.parse(message)
        except dns.QueryError as error:
            self._records.refuse("resolve", "", 0, str(error))
            return error.answer
        why, name = self._policy.why_not(query.name)
        if why:
            if not query.is_reverse:  # libraries ask for names of addresses on their own
                self._records.refuse("resolve", name, 0, why)
                self._policy.note_refused(name, 0, why)
            return dns.answer(query, dns.NO_SUCH_NAME)
        if query.kind != dns.A:
            return dns.answer(query, dns.NO_ERROR)
        try:
            address = self._names.address_of(name)
        except NoFreeAddressError:
            self._records.refuse("resolve", name, 0, "every address of the cell has connections")
            return dns.answer(query, dns.NO_SUCH_NAME)
        return dns.answer(query, dns.NO_ERROR, socket.inet_aton(address))

    # connections

    def _accept(self, listener: socket.socket) -> None:
        if not self._has_room() or not self._accepts.take():
            self._rest(listener)
            return
        if guest := self._accept_from(listener):
            self._admit(guest)

    def _has_room(self) -> bool:
        return len(self._connections) < _MOST_CONNECTIONS and self._room.has_room()

    def _accept_from(self, listener: socket.socket) -> socket.socket | None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in _SHORT_OF:  # connections wait until descriptors are free again
                self._rest(listener)
            return None
        sock.setblocking(False)
        # Without it the end of an answer waits 40 ms for the program's delayed acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _admit(self, guest: socket.socket) -> None:
        address, port = guest.getsockname()
        name = self._names.name_of(address)
        if name is None:
            self._records.refuse("connect", address, port, "the address stands for no name")
            reset(guest)
            return
        verdict = self._policy.decide(name, port)
        if not verdict.is_allowed:
            self._records.refuse("connect", name, port, verdict.reason)
            self._policy.note_refused(name, port, verdict.reason)
            reset(guest)
            return
        begun: list[RuleUse] = []
        for rule in verdict.matching:
            use = self._uses.setdefault(rule, RuleUse(rule))
            if why := use.begin():
                for each in begun:
                    each.end()
                self._records.refuse("connect", name, port, why)
                reset(guest)
                return
            begun.append(use)
        grant = self._policy.grant(verdict, port)
        connection = CellConnection(guest, name, port, grant, begun)
        self._connections.add(connection)
        self._room.take()
        self._names.hold(name)
        connection.task = self._begin(self._connect(connection, verdict))

    async def _connect(self, connection: CellConnection, verdict: NetworkVerdict) -> None:
        name, port, address = connection.name, connection.port, ""
        outcome, outside = "failed", None  # the outcome of an unexpected exception
        schemes = connection.grant.schemes
        try:
            # If the rule allows any bytes, the server may speak first.
            first = b"" if "tcp" in schemes else await self._first_bytes(connection)
            relay_to = await relay_maker(
                connection, first, self._policy, self._records, self._turns
            )
            outside, address = await self._dialled(connection, verdict)
            if len(self._connections) > _FAST_CONNECTIONS:
                limit_buffers(connection.guest, outside)
            connection.relay = relay_to(outside)
            await connection.relay.run(connection.uploaded)
            outcome = "ok"
        except NoAddressError as error:
            outcome = str(error)
            if error.is_refused:
                self._records.refuse("connect", name, port, outcome)
                self._policy.note_connection(name, port, outcome)
        except RefusedError as error:
            outcome, connection.is_answered = str(error), error.is_answered
            self._records.refuse("connect", name, port, outcome)
            self._policy.note_connection(name, port, outcome)
        except OSError as error:
            outcome = error.strerror or type(error).__name__
            if was_reset(connection.guest):
                outcome = "reset by the program"
        except asyncio.CancelledError:
            outcome = connection.why or "the program had ended"
        finally:
            self._finish(connection, outside, outcome, address, verdict.rule or "")

    async def _dialled(
        self, connection: CellConnection, verdict: NetworkVerdict
    ) -> tuple[socket.socket, str]:
        """Return the socket and the address of `_dial`; if that fails, tell a program that waits for an
        answer why."""
        try:
            return await self._dial(connection, verdict)
        except (NoAddressError, OSError) as error:
            if connection.reader:
                await connection.reader.refused(502, f"{connection.name}: {_unreached(error)}")
                connection.is_answered = True
            raise

    async def _dial(
        self, connection: CellConnection, verdict: NetworkVerdict
    ) -> tuple[socket.socket, str]:
        name, port, resolver = connection.name, connection.port, self._resolver
        if self._upstream:
            return await self._upstream.connect(name, port, resolver, _CONNECT_SECONDS)
        networks = self._policy.rules.networks(verdict)
        addresses = await resolver.resolve(
            name, port, lambda address: refusal_of(address, networks, is_own=is_own_address)
        )
        return await dial(addresses, port, _CONNECT_SECONDS)

    async def _first_bytes(self, connection: CellConnection) -> bytes:
        grant = connection.grant
        return await first_bytes(
            connection.guest, connection.name, grant.schemes, self._turns, any_sni=grant.any_sni
        )

    def _finish(
        self, connection: CellConnection, outside: socket.socket | None, outcome: str, address: str,
        rule: str,
    ) -> None:  # fmt: skip
        if outcome == "ok" or connection.is_answered:
            connection.guest.close()
        else:
            reset(connection.guest)
        if outside:  # a peer must not take a truncated stream for a complete one
            close = leave if connection.relay and connection.relay.is_uploaded else reset
            close(outside)
        connection.uploaded.set()
        self._connections.discard(connection)
        self._room.give_back()
        self._names.release(connection.name)
        for use in connection.uses:
            use.end()
        relay = connection.relay
        seconds = time.monotonic() - connection.begun_at
        self._records.relay(
            Relayed(
                connection.name, connection.port, address,
                relay.sent_bytes if relay else 0, relay.received_bytes if relay else 0,
                seconds, outcome, rule,
            )
        )  # fmt: skip

    def end_overdue(self) -> list[asyncio.Task[None]]:
        """End connections that were idle or open for too long, and those that the rules no longer
        allow; return the tasks that end them."""
        now = time.monotonic()
        ending: list[asyncio.Task[None]] = []
        for connection in self._connections:
            why = connection.why_ended(now) or self._policy.why_ended(
                connection.name, connection.port, connection.grant
            )
            if connection.task and why:
                connection.why = why
                ending.append(connection.task)
        self._end(ending)
        return ending

    def _end(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Cancel tasks, not at once: one that is cancelled before its first step does not clean up."""
        for task in tasks:
            self._loop.call_soon(task.cancel)

    def follow_rules(self) -> list[asyncio.Task[None]]:
        """`end_overdue` by the rules as they are now; forget the counts of rules that are gone."""
        of_rules = set(self._policy.rules.allow)
        self._uses = {rule: use for rule, use in self._uses.items() if rule in of_rules}
        return self.end_overdue()

    # the supervisor

    def _on_report(self) -> None:
        try:
            packet = self._reports.recv(channel.PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self.close()
            return
        self._begin(self._settle(decode(packet[1:], Settle)))

    async def _settle(self, settle: Settle) -> None:
        """Send every record; if the program `ends`, end its connections before that.

        The last bytes of the program still go out; they may be in the kernel or in the backlog.
        """
        if settle.ends:
            self._accept_the_rest()
            waiting = [asyncio.create_task(each.uploaded.wait()) for each in self._connections]
            if waiting:
                await asyncio.wait(waiting, timeout=_UPLOAD_SECONDS)
            for each in waiting:
                each.cancel()
            await self._end_connections()
        for record in (*self._records.take(), Settled()):
            await self._loop.sock_sendall(self._reports, b"\0" + encode(record))
            await asyncio.sleep(0)  # there can be thousands of records, and other cells wait

    def _accept_the_rest(self) -> None:
        for listener in self._listeners:
            self._stop_reading(listener)
            for _ in range(_MOST_CONNECTIONS):
                guest = self._accept_from(listener) if self._has_room() else None
                if guest is None:
                    break
                self._admit(guest)

    async def _end_connections(self) -> None:
        tasks = [each.task for each in self._connections if each.task]
        self._end(tasks)
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """End everything of the cell."""
        if not self._is_open:
            return
        self._is_open = False
        sockets = self._reports, self._datagrams, self._streams, *self._listeners
        self._stop_reading(*sockets)
        for each in sockets:
            each.close()
        self._end(self._tasks)
        self._names_room.give_back_all()
        self._on_end(self)


def _unreached(error: NoAddressError | OSError) -> str:
    """Return for a program why a host is not reached; an address is not its business."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else "it does not answer"
    return "its address is not allowed" if error.is_refused else str(error)
