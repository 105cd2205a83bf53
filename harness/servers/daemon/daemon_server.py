"""The daemon's event loop: connections, requests, and shutdown; and its state, as gauges and for
`cellwright status`.

One thread accepts connections (daemon_listener.py), assembles frames and keeps every deadline; it
never waits for a client.  A complete request goes to a thread of its own together with its connection,
which comes back to the loop when the reply was sent.
"""

import collections
import contextlib
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from ....policies.errors import BusyError, CellwrightError, PolicyError
from ....runner import channel
from ....runner.messages import decode
from ....runner.supervisor import SupervisorsState
from ...sandbox.remote import frames
from ...sandbox.remote.call_frames import failure_of
from ...version import installed_version
from ..measurements import (
    DRAINING,
    OPEN_CONNECTIONS,
    REQUESTS_REFUSED,
    RUNNING_REQUESTS,
    TENANT_CALLS,
    TENANT_SESSIONS,
    Measurements,
    Reading,
    readings_of,
)
from .daemon_listener import INVALID, SLOW, ClientConnection, ClientListener, RequestObserver
from .open_cells import OpenCells
from .quotas import Peer
from .tenants import Tenant, Tenants

_LAST_SECONDS = 5.0  # from cancelling the running requests to ending their cells
_SWEEP_SECONDS = 5.0  # pause between two sweeps of what a reload left unused
_LAST_PACKETS = 64  # packets of a client accepted during shutdown: a request sent before it
_NEVER = float("inf")
_SERVING, _DRAINING, _CANCELLING, _OVER = range(4)


class Server:
    """Serves until `stop` is called, then closes its services."""

    def __init__(
        self, listener: socket.socket, tenants: Tenants, observer: RequestObserver,
        open_cells: OpenCells,
    ) -> None:  # fmt: skip
        self._tenants = tenants
        self._open_cells = open_cells
        self._observer = observer
        self._limits = tenants.limits
        self._began_at = time.monotonic()
        self._connections: dict[int, ClientConnection] = {}  # all of them, by descriptor
        self._running: dict[int, ClientConnection] = {}  # connections that a thread owns
        self._returned: collections.deque[ClientConnection] = collections.deque()
        self._wake, self.waker = os.pipe2(
            os.O_CLOEXEC | os.O_NONBLOCK
        )  # signal handlers may write to it
        self._threads = ThreadPoolExecutor(self._limits.running, "cellwright-serve")
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._listener = ClientListener(listener, self._poll, tenants, observer)
        self._turned = threading.Event()  # set at each turn of the loop
        self._sweep_at = _NEVER
        self.reloads = ReloadState()
        self._stops = 0  # calls of `stop`
        self._stage = _SERVING
        self._deadline = _NEVER  # deadline of the stage

    def stop(self) -> None:
        """Stop accepting, and end after the running requests; a second call cancels them.

        For signal handlers and other threads.
        """
        self._stops += 1
        self._wake_loop()

    @property
    def is_draining(self) -> bool:
        """Tell whether it takes no new requests any more."""
        return self._stops > 0 or self._stage != _SERVING

    def is_well(self, seconds: float = 1.0) -> bool:
        """Tell whether the event loop turns within `seconds`; for other threads."""
        self._turned.clear()
        self._wake_loop()
        return self._turned.wait(seconds)

    def sweep_soon(self) -> None:
        """Have the services that a reload left unused closed; may be called by other threads."""
        self._sweep_at = 0.0
        self._wake_loop()

    def counts(self) -> tuple[int, int]:
        """Return how many connections there are, and how many requests are at work."""
        return len(self._connections), len(self._running)

    def connections_of(self) -> Counter[str]:
        """Return how many connections each tenant has."""
        return Counter(each.peer.tenant for each in [*self._connections.values()])

    def run(self) -> None:
        """Serve until stopped; on return every connection is closed and every thread has ended."""
        listener = self._listener.fileno()
        try:
            while self._stage < _OVER:
                for descriptor, _ in self._poll.poll(self._poll_timeout_ms()):
                    if descriptor == self._wake:
                        self._take_returned()
                    elif descriptor == listener:
                        self._accept()
                    elif connection := self._connections.get(descriptor):
                        self._receive(connection)
                self._keep_deadlines()
                self._turned.set()
        finally:
            self._end()

    # requests

    def _accept(self) -> None:
        for connection in self._listener.accept():
            self._connections[connection.fileno()] = connection
            self._poll.register(connection, select.POLLIN)

    def _receive(self, connection: ClientConnection) -> None:
        try:
            frame = connection.receive()
            if frame == b"":
                self._forget(connection)
            elif frame and connection.policy is not None:
                self._begin(connection, frame)
            elif frame:
                self._greet(connection, frame)
        except (channel.ProtocolError, msgspec.DecodeError) as error:
            self._refuse(connection, PolicyError(f"invalid frame: {error}"), INVALID)
        except CellwrightError as error:
            self._refuse(connection, error, INVALID)

    def _greet(self, connection: ClientConnection, frame: bytes) -> None:
        hello: frames.Hello = decode(frame, frames.Hello)
        if hello.version != frames.VERSION:
            raise PolicyError(
                f"the daemon has version {frames.VERSION} of the protocol, the client {hello.version}",
                "install the same version of cellwright on both sides",
            )
        self._tenants.check(connection.peer, hello.policy)
        connection.welcome(hello.policy)
        connection.tell_at_once(
            frames.Welcome(frames.VERSION, os.getpid(), self._limits.request_bytes)
        )

    def _begin(self, connection: ClientConnection, frame: bytes) -> None:
        try:
            connection.begin()
        except BusyError as error:
            self._observer.note_refused(connection.peer, error)
            if not connection.tell_at_once(failure_of(error)):
                self._forget(connection)
            return
        self._poll.unregister(connection)
        self._running[connection.fileno()] = connection
        with contextlib.suppress(RuntimeError):  # no thread could be started; the request waits
            self._threads.submit(self._work, connection, frame)

    # in a thread

    def _work(self, connection: ClientConnection, frame: bytes) -> None:
        try:
            begun = time.monotonic()
            kind, reply = self._reply_to(connection, frame)
            if reply is not None:
                connection.tell(reply, last=True)
                policy = connection.policy or next(iter(self._tenants.plan.policies))
                seconds = time.monotonic() - begun
                self._observer.note_reply(connection.peer, policy, kind, reply, seconds)
        finally:
            self._returned.append(connection)
            self._wake_loop()

    def _reply_to(
        self, connection: ClientConnection, frame: bytes
    ) -> tuple[str, msgspec.Struct | None]:
        """Return the name of a request, and the reply; no reply to a Cancel that came too late."""
        try:
            request = decode(frame, frames.ClientRequest)
        except msgspec.DecodeError as error:
            connection.hang_up()
            return INVALID, failure_of(PolicyError(f"invalid frame: {error}"))
        kind = type(request).__name__
        if isinstance(request, frames.Cancel):
            return kind, None
        try:
            # Looked up for each request, because a reload may have changed the policy or its users.
            if isinstance(request, frames.GetStatus):
                return kind, self._status(connection.peer)
            if isinstance(request, frames.RunOnProject):
                self.sweep_soon()
                uid = connection.peer.uid
                return kind, self._open_cells.answer(request, uid, connection)
            with self._tenants.lent(connection.peer, connection.policy or "") as service:
                return kind, service.answer(request, connection)
        except Exception as error:  # noqa: BLE001 - reported to the client; bugs also to stderr
            return kind, failure_of(error)

    def _status(self, peer: Peer) -> frames.DaemonStatus:
        return status_for(
            peer, self._tenants, self._observer.measurements, self.connections_of(),
            uptime_seconds=time.monotonic() - self._began_at, reload=self.reloads,
        )  # fmt: skip

    def _take_returned(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while self._returned:
            connection = self._returned.popleft()
            del self._running[connection.fileno()]
            connection.rest()
            if self._stage == _SERVING:
                self._poll.register(connection, select.POLLIN)
            else:
                self._forget(connection)

    # shutdown

    def _refuse(self, connection: ClientConnection, error: CellwrightError, limit: str) -> None:
        self._observer.note_refused(connection.peer, error, limit)
        connection.tell_at_once(failure_of(error))
        self._forget(connection)

    def _forget(self, connection: ClientConnection) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()

    def _poll_timeout_ms(self) -> float | None:
        deadlines = [each.deadline for each in self._connections.values()]
        next_look = min((self._deadline, self._listener.deadline, self._sweep_at, *deadlines))
        if next_look == _NEVER:
            return None
        return max(0.0, next_look - time.monotonic()) * 1000 + 1

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._connections.values() if each.deadline <= now]:
            error = BusyError("the client took too long to send a request")
            self._refuse(connection, error, SLOW)
        self._listener.keep_deadline(now)
        if self._sweep_at <= now:
            self._sweep_at = now + _SWEEP_SECONDS
            self._threads.submit(self._sweep)
        if self._stops:
            self._stop(now)

    def _stop(self, now: float) -> None:
        """Drain: let running requests finish; then cancel them and send their results; then end their
        cells."""
        if self._stage == _SERVING:
            self._drain(now)
        if self._stage == _DRAINING and (self._stops > 1 or now >= self._deadline):
            self._stage, self._deadline = _CANCELLING, now + _LAST_SECONDS
            for connection in self._running.values():
                connection.hang_up()
        if not self._running or (self._stage == _CANCELLING and now >= self._deadline):
            self._stage = _OVER

    def _drain(self, now: float) -> None:
        """Stop accepting, and answer earlier requests."""
        seconds = self._tenants.plan.configuration.drain_seconds
        self._stage, self._deadline = _DRAINING, now + seconds
        self._listener.close()
        for connection in self._idle():
            self._receive_what_is_there(connection)
        for connection in self._idle():
            self._forget(connection)

    def _receive_what_is_there(self, connection: ClientConnection) -> None:
        for _ in range(_LAST_PACKETS):
            if connection not in self._idle() or not connection.is_gone():
                return
            self._receive(connection)

    def _idle(self) -> list[ClientConnection]:
        return [each for each in self._connections.values() if each.fileno() not in self._running]

    def _sweep(self) -> None:
        if not any((self._tenants.sweep(), self._open_cells.sweep())):
            self._sweep_at = _NEVER

    def _end(self) -> None:
        """Close everything; threads that wait for a client that does not read stop waiting."""
        self._listener.close()
        for connection in self._connections.values():
            connection.cut()
        self._open_cells.close()
        self._tenants.close()
        self._threads.shutdown()
        for connection in self._connections.values():
            connection.close()
        for end in (self._wake, self.waker):
            os.close(end)
        self._wake = self.waker = -1

    def _wake_loop(self) -> None:
        with contextlib.suppress(OSError):  # already closed
            os.write(self.waker, b"\0")


class ReloadState(NamedTuple):
    """How often the configuration was reloaded, and why the last time had no effect."""

    path: str = ""
    applied: int = 0
    error: str = ""


def status_for(
    peer: Peer, tenants: Tenants, measurements: Measurements, connections: Counter[str],
    *, uptime_seconds: float, reload: ReloadState,
) -> frames.DaemonStatus:  # fmt: skip
    """Return the status for a client; only the daemon's user sees other tenants.

    Raises PolicyError if a reload has taken the client its right to connect.
    """
    sees_all = peer.uid in (0, os.geteuid())
    own = tenants.tenant_of(peer.uid, peer.groups)  # its tenant may have changed since it connected
    policies = tenants.plan.policies if sees_all else tenants.policies_of(own)
    shown = [each for each in tenants.all() if sees_all or each.name == own]
    counted = dict(measurements.counters())[REQUESTS_REFUSED]
    return frames.DaemonStatus(
        installed_version(), os.getpid(), uptime_seconds, reload.path if sees_all else "",
        reload.applied, reload.error if sees_all else "", sum(len(each.retired) for each in shown),
        tuple(_policy_status(name, shown) for name in policies),
        tuple(_tenant_status(each, connections[each.name]) for each in shown),
        tuple(
            (tenant, limit, int(count))
            for (tenant, limit), count in sorted(counted.items())
            if sees_all or tenant == own
        ),
    )  # fmt: skip


def gauges_of(
    tenants: Tenants, measurements: Measurements, counts: tuple[int, int], *, is_draining: bool
) -> Iterator[Reading]:
    """Yield the gauges of a daemon; `counts`: connections, and requests at work."""
    yield Reading(DRAINING, (), float(is_draining))
    yield Reading(OPEN_CONNECTIONS, (), counts[0])
    yield Reading(RUNNING_REQUESTS, (), counts[1])
    for tenant in tenants.all():
        label = measurements.known_tenant(tenant.name)
        running, waiting = tenant.quota.load()
        yield Reading(TENANT_CALLS, (label, "running"), running)
        yield Reading(TENANT_CALLS, (label, "waiting"), waiting)
        yield Reading(
            TENANT_SESSIONS, (label,), sum(each.sessions() for each in tenant.all_services())
        )
        for name, state in _states([tenant]):
            yield from readings_of(measurements.known_policy(name), state)


def _states(tenants: Sequence[Tenant]) -> Iterator[tuple[str, SupervisorsState]]:
    for tenant in tenants:
        for service in tenant.all_services():
            if state := service.state():
                yield service.name, state


def _policy_status(name: str, tenants: Sequence[Tenant]) -> frames.ServedPolicyStatus:
    states = [state for known, state in _states(tenants) if known == name]
    each = [supervisor for state in states for supervisor in state.supervisors]
    memory = [one.memory_bytes for one in each if one.memory_bytes is not None]
    seconds = [one.cpu_seconds for one in each if one.cpu_seconds is not None]
    return frames.ServedPolicyStatus(
        name, sum(one.ready for one in each), sum(one.wanted for one in each),
        sum(one.running for one in each), sum(one.waiting for one in each),
        sum(state.sessions for state in states), sum(state.frozen for state in states),
        sum(memory) if memory else None, sum(seconds) if seconds else None,
    )  # fmt: skip


def _tenant_status(tenant: Tenant, connections: int) -> frames.TenantStatus:
    settings = tenant.quota.settings
    running, waiting = tenant.quota.load()
    return frames.TenantStatus(
        tenant.name, connections, running, settings.calls, waiting,
        sum(each.sessions() for each in tenant.all_services()), settings.sessions,
        tenant.quota.cpu_seconds_left(), settings.cpu_seconds_per_minute,
    )  # fmt: skip
