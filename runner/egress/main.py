"""The egress process: serves the cells of one sandbox, confined, until the supervisor is gone.

Started by the supervisor as `python -I -S` with an empty environment and one SOCK_SEQPACKET socket as
descriptor 3.  It imports first, gives up root if it had it, and confines itself before it takes the
first cell: no file can be written, no program executed, no socket made but of TCP and UDP.
"""

import asyncio
import contextlib
import gc
import os
import resource
import socket
import sys
import threading
from collections.abc import Collection
from concurrent.futures import thread as _threads  # noqa: F401 - before files are out of reach
from typing import TYPE_CHECKING, NoReturn

from ...policies.network.upstream_proxy import UpstreamProxy
from .. import channel
from ..confined import confinement
from ..confined.confinement import serve_confined
from ..messages import (
    AddCell,
    EgressBoot,
    ListPending,
    Manage,
    SetRules,
    Settled,
    TellRefused,
    decode,
    encode,
)
from .addresses import budgets
from .cell_connection import CellPolicy, decoded_rules
from .name_resolution import STACK_BYTES, Resolver, Upstream, resolving_threads
from .served_cell import ServedCell

if TYPE_CHECKING:
    import msgspec

    from .credential_exchange import CellSecrets
    from .tls_stream import TlsContexts

    _Credentials = tuple[CellSecrets | None, TlsContexts | None]


# RLIMIT_DATA, which counts the stack of each resolving thread.
_LIMITS = {"NOFILE": 16_384, "CORE": 0, "FSIZE": 0, "DATA": 1 << 30}
_CHECK_SECONDS = 5.0
# getaddrinfo(3) reads these at any time: its configuration and glibc's modules.
_READ = (
    "/etc",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/run/systemd/resolve",
    "/run/NetworkManager",
)


def main(own_paths: int) -> NoReturn:
    """Read the boot frame, confine the process, and serve cells until the supervisor is gone."""

    credentials: _Credentials = (None, None)

    def confine_by(boot: EgressBoot) -> None:
        nonlocal credentials
        if boot.http_parser:
            sys.path.append(boot.http_parser)
            from . import http_relay as _http_relay  # noqa: F401 - before files are out of reach

            sys.path.pop()
        if boot.secrets:
            credentials = _credentials(boot.secrets)
        del sys.path[:own_paths]  # all modules of cellwright are imported
        confine(boot)

    def serve(sock: socket.socket, boot: EgressBoot) -> None:
        asyncio.run(_serve(sock, boot, *credentials))

    serve_confined(EgressBoot, confine_by, serve, MOST_BYTES)


def confine(boot: EgressBoot) -> None:
    """Give up everything that serving does not need, for good."""
    os.environ["LOCALDOMAIN"] = "."  # search no other domain (resolv.conf(5))
    with contextlib.suppress(OSError):  # the call loads the modules that resolve names
        socket.getaddrinfo("localhost", None)
    "".encode("idna")  # loads the codec that encodes names
    confinement.confine(
        "cell-egress", boot.uid, _LIMITS, boot.network.egress_filter, boot.landlock_abi, _READ
    )


def _credentials(encoded: bytes) -> "_Credentials":
    """Return the values that requests get, and the two sides of TLS."""
    from ...policies.network.credential import EgressSecrets
    from .credential_exchange import CellSecrets

    given = decode(encoded, EgressSecrets)
    if not given.certificate:
        return CellSecrets(given.secrets), None
    from .tls_stream import TlsContexts  # imports ssl

    return CellSecrets(given.secrets), TlsContexts(given)


async def _serve(
    sock: socket.socket, boot: EgressBoot, secrets: "CellSecrets | None", tls: "TlsContexts | None"
) -> None:
    gc.enable()
    policy = CellPolicy(
        decoded_rules(boot.network.rules), boot.network.ports, boot.made_at, secrets, tls
    )
    threading.stack_size(STACK_BYTES)
    threads = resolving_threads()
    cells: set[ServedCell] = set()
    management = Management(policy, cells)
    shared = budgets(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    upstream = Upstream(UpstreamProxy(*boot.proxy)) if boot.proxy else None
    loop, gone = asyncio.get_running_loop(), asyncio.Event()

    def hear() -> None:
        frame, descriptors = channel.receive_with_descriptors(sock)
        if not frame:
            gone.set()
            return
        first, *sockets = (socket.socket(fileno=each) for each in descriptors)
        if isinstance(decode(frame, AddCell | Manage), Manage):
            management.begin(first)
        else:
            resolver = Resolver(threads)
            cells.add(ServedCell(policy, resolver, upstream, first, sockets, shared, cells.discard))

    def check() -> None:
        for cell in cells:
            cell.end_overdue()
        loop.call_later(_CHECK_SECONDS, check)

    loop.add_reader(sock, hear)
    check()
    await gone.wait()


MOST_BYTES = 4 * 1024 * 1024  # longest frame with rules
_END_SECONDS = 5.0  # how long connections may take to end


class Management:
    """Changes and tells the rules of all cells."""

    def __init__(self, policy: CellPolicy, cells: Collection[ServedCell]) -> None:
        self._policy = policy
        self._cells = cells
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, sock: socket.socket) -> None:
        """Answer the question that comes on `sock`, then close it, except after TellRefused."""
        sock.setblocking(False)
        receiver = channel.Receiver(sock, MOST_BYTES)
        self._loop.add_reader(sock, self._on_packet, sock, receiver)

    def _on_packet(self, sock: socket.socket, receiver: channel.Receiver) -> None:
        try:
            frame = receiver.receive()
        except BlockingIOError:
            return
        except (OSError, channel.ProtocolError):
            frame = b""
        if frame is None:  # the frame continues in the next packet
            return
        self._loop.remove_reader(sock)
        task = asyncio.create_task(self._answer(sock, frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, sock: socket.socket, frame: bytes) -> None:
        question = decode(frame, SetRules | ListPending | TellRefused) if frame else None
        if isinstance(question, TellRefused):
            self._policy.tell_refused(sock)
            return
        with sock, contextlib.suppress(OSError):  # the supervisor no longer waits
            if question is None:
                return
            records: list[msgspec.Struct] = []
            if isinstance(question, SetRules):
                await self._set(question.rules)
            else:
                records = self._policy.pending()
            for record in (*records, Settled()):
                await self._loop.sock_sendall(sock, b"\0" + encode(record))

    async def _set(self, rules: bytes) -> None:
        self._policy.follow(decoded_rules(rules))
        ending = [task for cell in self._cells for task in cell.follow_rules()]
        if ending:
            await asyncio.wait(ending, timeout=_END_SECONDS)
