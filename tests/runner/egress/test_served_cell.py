"""Parts of the egress process without a cell: first bytes, rates, caps, records."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.network.rules import NetworkRules
from cellwright.runner.egress import cell_connection, served_cell
from cellwright.runner.egress import cell_connection as connection
from cellwright.runner.egress import connection_relay as relay
from cellwright.runner.egress import name_resolution as resolving
from cellwright.runner.egress.addresses import Budgets, SharedBudget, budgets
from cellwright.runner.egress.cell_connection import CellConnection, CellPolicy
from cellwright.runner.egress.connection_relay import RefusedError, Turns, first_bytes
from cellwright.runner.egress.name_resolution import NoAddressError, Resolver, resolving_threads
from cellwright.runner.egress.served_cell import ServedCell
from tests.runner.egress.test_client_hello import extension, hello, names, real, record

NAME = "api.example.org"


def first(data: bytes, *schemes: str, ends: bool = False, any_sni: bool = False) -> bytes:
    """Return what `first_bytes` says of a client that sends `data`."""

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(data)
            if ends:
                theirs.shutdown(socket.SHUT_WR)
            return await first_bytes(ours, NAME, schemes, Turns(), any_sni=any_sni)

    return asyncio.run(run())


def test_tls_for_the_name_passes_unchanged() -> None:
    sent = real(NAME)
    assert first(sent, "https") == sent
    assert first(sent + b"more", "https", "http") == sent + b"more"


@pytest.mark.parametrize(
    ("sent", "schemes", "why"),
    [
        (real("other.example.org"), ("https",), "SNI"),
        (real(f"x.{NAME}"), ("https",), "SNI"),
        (real(None), ("https",), "no server name"),
        (record(hello(extension(0, names(NAME.encode())) + extension(0xFE0D, b"\0"))), ("https",), "ECH"),
        (record(hello(extension(0, names(b"api.example.org\0.evil.org")))), ("https",), "SNI"),
        (b"GET / HTTP/1.1\r\n", ("https",), "not TLS"),
        (real(NAME), ("http",), "TLS, which no rule allows"),
        (b"\x80\x2e\1\0\2", ("https", "http"), "invalid"),
        (b"\x16\x03", ("https",), "incomplete"),
        (b"", ("https",), "first byte"),
    ],
)  # fmt: skip
def test_other_first_bytes_are_refused(sent: bytes, schemes: tuple[str, ...], why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        first(sent, *schemes, ends=True)


_ECH = record(hello(extension(0, names(NAME.encode())) + extension(0xFE0D, b"\0")))


@pytest.mark.parametrize("sent", [real("other.example.org"), real(None), _ECH])
def test_any_server_may_be_asked_for_where_a_rule_says_so(sent: bytes) -> None:
    assert first(sent, "https", any_sni=True) == sent
    with pytest.raises(RefusedError):
        first(sent, "https")
    for other in (b"GET / HTTP/1.1\r\n", b"\x80\x2e\1\0\2"):
        with pytest.raises(RefusedError, match="not TLS|invalid"):
            first(other, "https", ends=True, any_sni=True)


def test_a_client_hello_in_very_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has all of it parsed again."""
    monkeypatch.setattr(relay, "_CHUNK_BYTES", 1)
    with pytest.raises(RefusedError, match="pieces"):
        first(real(NAME), "https")


def test_a_client_that_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_HELLO_SECONDS", 0.01)
    with pytest.raises(RefusedError, match="within"):
        first(b"", "https")


def test_a_rule_ends_with_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = NetworkRules([NetworkRule(host=NAME, lifetime_seconds=60)])
    policy = CellPolicy(rules, (443,), 100.0)
    monkeypatch.setattr(cell_connection.time, "monotonic", lambda: 159.0)
    assert policy.why_not(NAME.upper()) == ("", NAME)
    monkeypatch.setattr(cell_connection.time, "monotonic", lambda: 161.0)
    why, name = policy.why_not(NAME)
    assert (bool(why), name) == (True, NAME)


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_RECORDS", 3)
    told_later = connection.Records()
    for n in range(10):
        told_later.refuse("resolve", f"n{n}.example", 0, "no rule")
        told_later.refuse("resolve", "n0.example", 0, "no rule")
    told = [(each.name, each.count) for each in told_later.take()]  # type: ignore[attr-defined]
    assert told == [("n0.example", 11), ("n1.example", 1), ("n2.example", 1), ("", 7)]
    assert told_later.take() == []


def test_a_cell_whose_names_resolve_slowly_leaves_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also once it waits for none of those lookups any more: they go on in their threads."""
    monkeypatch.setattr(resolving, "_THREADS", 8)
    answered = threading.Event()

    def ask(name: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
        if name.startswith("slow"):
            answered.wait()
        return [(socket.AF_INET, "192.0.2.1")]

    async def run() -> object:
        threads = resolving_threads()
        slow, other = Resolver(threads), Resolver(threads)
        for _ in range(2):
            lookups = [slow.resolve(f"slow{n}.example", 443, lambda _: None) for n in range(100)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.gather(*lookups)
        try:
            return await other.resolve(NAME, 443, lambda _: None)
        except NoAddressError as error:
            return str(error)
        finally:
            answered.set()
            threads.shutdown()

    monkeypatch.setattr(resolving, "_ask", ask)
    assert asyncio.run(run()) == [(socket.AF_INET, "192.0.2.1")]


def test_many_cells_whose_names_resolve_slowly_leave_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()

    def ask(name: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
        if name.startswith("slow"):
            answered.wait()
        return [(socket.AF_INET, "192.0.2.1")]

    async def run() -> object:
        threads = resolving_threads()
        slow = [Resolver(threads) for _ in range(20)]
        lookups = [
            asyncio.create_task(each.resolve(f"slow{n}.example", 443, lambda _: None))
            for each in slow
            for n in range(4)
        ]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                return await Resolver(threads).resolve(NAME, 443, lambda _: None)
        finally:
            answered.set()
            await asyncio.gather(*lookups)
            threads.shutdown()

    monkeypatch.setattr(resolving, "_ask", ask)
    assert asyncio.run(run()) == [(socket.AF_INET, "192.0.2.1")]


def test_a_lookup_for_which_no_thread_can_be_started_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cell has that thread again for the next one."""

    async def run() -> None:
        threads = resolving_threads()
        resolver = Resolver(threads)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: _no_thread())
            for _ in range(10):
                with pytest.raises(NoAddressError, match="temporarily unavailable"):
                    await resolver.resolve(NAME, 443, lambda _: None)
        assert await resolver.resolve(NAME, 443, lambda _: None)
        threads.shutdown()

    def _no_thread() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(resolving, "_ask", lambda *_: [(socket.AF_INET, "192.0.2.1")])
    asyncio.run(run())


def test_a_cell_that_ends_gives_back_a_connection_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was accepted in the same round of the loop in which the supervisor closed the cell."""
    shared = Budgets(SharedBudget(9, 9), SharedBudget(common=1, own=0))

    async def run() -> None:
        with _Connected(monkeypatch, shared) as connected:
            place = connected.listener.getsockname()
            guest = connected.enter_context(socket.create_connection(place))
            connected.cell._accept(connected.listener)
            assert (len(connected.cell._connections), shared.connections.common) == (1, 0)
            connected.cell.close()
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(guest.recv, 1)
            assert (len(connected.cell._connections), shared.connections.common) == (0, 1)

    asyncio.run(run())


def served(
    policy: CellPolicy, reports: socket.socket, sockets: list[socket.socket],
    shared: Budgets | None = None,
) -> ServedCell:  # fmt: skip
    resolver = Resolver(resolving_threads())
    shared = shared or budgets(1024)
    return ServedCell(policy, resolver, None, reports, sockets, shared, lambda _: None)


def test_a_flooded_socket_rests_and_has_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each turn of each socket would wake the others, which would rest in their turn."""
    timers: list[tuple[object, ...]] = []

    async def run() -> list[bool]:
        loop = asyncio.get_running_loop()
        sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        sockets += [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
        reports, supervisor = socket.socketpair()
        cell = served(_NO_RULES, reports, sockets)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_later", lambda *timer: timers.append(timer))
            for _ in range(3):
                cell._rest(*sockets)
            _, read, *sock = timers.pop()
            read(*sock)  # type: ignore[operator]
            are_read = [bool(loop.remove_reader(each)) for each in sockets]
        cell.close()
        supervisor.close()
        return are_read

    assert asyncio.run(run()) == [False] * 4 + [True]
    assert len(timers) == 4


def test_no_connection_is_taken_after_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that rested when the program ended is not read again."""

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        queries = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()
        listener = socket.create_server(("127.0.0.1", 0))
        reports, supervisor = socket.socketpair()
        cell = served(_NO_RULES, reports, [*queries, listener])
        monkeypatch.setattr(served_cell, "_REST_SECONDS", 0)
        cell._rest(listener)
        cell._accept_the_rest()
        for _ in range(3):  # the timer of the rest
            await asyncio.sleep(0)
        is_read = loop.remove_reader(listener)
        cell.close()
        supervisor.close()
        return is_read

    assert not asyncio.run(run())


class _Connected(contextlib.ExitStack):
    """A cell, served here, whose connections to one listener are connections to a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shared: Budgets | None = None) -> None:
        super().__init__()
        monkeypatch.setattr(resolving, "_ask", lambda *_: [(socket.AF_INET, "127.0.0.1")])
        self.server = self.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.server.settimeout(30)
        port = self.server.getsockname()[1]
        # No address of the range is local here, so this one stands for the name.
        self.listener = socket.create_server(("127.0.0.2", port))
        rule = NetworkRule(host=NAME, ports=(port,), schemes=("tcp",), addresses=("127.0.0.0/8",))
        policy = CellPolicy(NetworkRules([rule]), (port,), 0.0)
        reports, supervisor = socket.socketpair()
        self.enter_context(supervisor)
        queries = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()
        sockets = [*queries, self.listener]
        self.cell = served(policy, reports, sockets, shared)
        self.callback(self.cell.close)
        self.cell._names._names["127.0.0.2"] = NAME
        self.cell._names._addresses[NAME] = "127.0.0.2"

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return a connection of the cell and the server's end, after a byte has come through."""
        place = self.listener.getsockname()
        guest = self.enter_context(await asyncio.to_thread(socket.create_connection, place))
        guest.sendall(b"x")
        accepted, _ = await asyncio.to_thread(self.server.accept)
        ours = self.enter_context(accepted)
        assert await asyncio.to_thread(ours.recv, 1) == b"x"
        return guest, ours


def test_a_cell_cannot_take_the_descriptors_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond a cell's own wait once none in common are left, and those of another do not."""
    shared = Budgets(SharedBudget(9, 9), SharedBudget(common=2, own=1))

    async def run() -> None:
        with _Connected(monkeypatch, shared) as greedy, _Connected(monkeypatch, shared) as other:
            for _ in range(3):
                await greedy.connect()
            waiting = greedy.enter_context(socket.create_connection(greedy.listener.getsockname()))
            waiting.sendall(b"x")
            await other.connect()
            assert (len(greedy.cell._connections), len(other.cell._connections)) == (3, 1)
            await greedy.cell._end_connections()
            accepted, _ = await asyncio.to_thread(greedy.server.accept)
            accepted.close()
            assert shared.connections.common == 2

    monkeypatch.setattr(served_cell, "_REST_SECONDS", 0.001)
    asyncio.run(run())


@contextlib.contextmanager
def _no_descriptors() -> Iterator[None]:
    """Have this process take all that it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard)
    )
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def test_connections_wait_while_the_process_has_no_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It neither ends nor asks again and again."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with _Connected(monkeypatch) as connected:
            place = connected.listener.getsockname()
            guest = connected.enter_context(socket.create_connection(place))
            guest.sendall(b"x")
            with _no_descriptors():
                for _ in range(3):
                    await asyncio.sleep(0)
                assert not connected.cell._connections
                assert not loop.remove_reader(connected.listener)
            connected.cell._read(connected.listener)
            accepted, _ = await asyncio.to_thread(connected.server.accept)
            accepted.close()

    monkeypatch.setattr(served_cell, "_REST_SECONDS", 600)
    asyncio.run(run())


def test_a_name_that_is_denied_while_it_is_resolved_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def ask(*_: object) -> list[tuple[socket.AddressFamily, str]]:
        asked.set()
        answered.wait()
        return [(socket.AF_INET, "127.0.0.1")]

    async def run() -> None:
        with _Connected(monkeypatch) as connected:
            monkeypatch.setattr(resolving, "_ask", ask)
            place, cell = connected.listener.getsockname(), connected.cell
            guest = connected.enter_context(
                await asyncio.to_thread(socket.create_connection, place)
            )
            await asyncio.to_thread(asked.wait)
            rules = NetworkRules(cell._policy.rules.allow, [NetworkDenial(host=NAME)])
            cell._policy.rules = rules
            await asyncio.wait(cell.follow_rules())
            answered.set()
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(guest.recv, 1)
            connected.server.setblocking(False)
            with pytest.raises(BlockingIOError):
                connected.server.accept()
            (told,) = cell._records.take()
            assert told.outcome == f"ended by the rule 'deny {NAME}'"  # type: ignore[attr-defined]

    asyncio.run(run())


def test_no_end_of_an_answer_waits_for_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head and a body are two writes, and the program acknowledges the first 40 ms later."""

    async def run() -> None:
        with _Connected(monkeypatch) as connected:
            await connected.connect()
            (only,) = connected.cell._connections
            assert only.guest.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(run())


def test_many_connections_do_not_get_large_buffers_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(connection: CellConnection) -> list[int]:
        assert connection.relay
        sockets = connection.guest, connection.relay._outside
        options = socket.SO_SNDBUF, socket.SO_RCVBUF
        return [each.getsockopt(socket.SOL_SOCKET, name) for each in sockets for name in options]

    async def run() -> None:
        with _Connected(monkeypatch) as connected:
            for _ in range(3):
                await connected.connect()
            before = set(connected.cell._connections)
            await connected.connect()
            (last,) = connected.cell._connections - before
            assert sizes(last) == [2 * relay._BUFFER_BYTES] * 4
            assert all(sizes(each) != sizes(last) for each in before)

    monkeypatch.setattr(served_cell, "_FAST_CONNECTIONS", 3)
    asyncio.run(run())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_server_can_tell_a_stream_that_was_cut_off(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> bytes:
        with _Connected(monkeypatch) as connected:
            guest, ours = await connected.connect()
            (connection,) = connected.cell._connections
            if is_whole:
                guest.shutdown(socket.SHUT_WR)
                await connection.uploaded.wait()
            await connected.cell._end_connections()
            return await asyncio.to_thread(ours.recv, 1)

    if is_whole:
        assert asyncio.run(run()) == b""
    else:
        with pytest.raises(ConnectionResetError):
            asyncio.run(run())


_NO_RULES = CellPolicy(NetworkRules(), (443,), 0.0)
