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
import signal
import socket
import sys
from concurrent.futures import thread as _threads  # noqa: F401 - before files are out of reach
from typing import NoReturn

from .. import channel
from ..kernel import landlock, privileges, processes
from ..kernel.now import Now
from ..messages import AddCell, Booted, EgressBoot, Failed, Manage, decode, encode
from ..upstream_proxy import UpstreamProxy
from .budgets import budgets
from .cell_policy import CellPolicy, decoded_rules
from .management import MOST_BYTES, Management
from .resolving import Resolver, resolving_threads
from .served_cell import ServedCell
from .upstream import Upstream

_CONTROL = 3
_OPEN_FILES = 16_384
_MEMORY_BYTES = 1 << 30  # of data; a thread for each name that is being resolved has 8 MiB of stack
_CHECK_SECONDS = 5.0
# What getaddrinfo(3) reads, also long after the start: its configuration, and the modules of glibc.
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
    sock = socket.socket(fileno=_CONTROL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.close_range(_CONTROL + 1, 0xFFFFFFFF)
    try:
        boot = decode(channel.Receiver(sock, MOST_BYTES).receive_whole(), EgressBoot)
        if boot.network.reads_requests:
            sys.path.append(boot.http_parser)
            from . import http_relay as _http_relay  # noqa: F401 - before files are out of reach

            sys.path.pop()
        del sys.path[:own_paths]  # everything of ours is imported
        confine(boot)
        channel.send(sock, encode(Booted()))
        asyncio.run(_serve(sock, boot))
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        with contextlib.suppress(OSError):
            channel.send(sock, encode(_failed(error)))
        os._exit(1)
    os._exit(0)


def _failed(error: BaseException) -> Failed:
    about = getattr(error, "filename", None) or type(error).__name__
    return Failed(
        getattr(error, "errno", None) or 0, f"{about}: {getattr(error, 'strerror', error)}"
    )


def confine(boot: EgressBoot) -> None:
    """Give up everything that serving does not need, for good."""
    do = Now()
    privileges.set_name(do, "cell-egress")
    os.environ["LOCALDOMAIN"] = "."  # no other domain is searched (resolv.conf(5))
    with contextlib.suppress(OSError):  # loads the modules that resolve names
        socket.getaddrinfo("localhost", None)
    "".encode("idna")  # which a name is encoded by, and which is imported for that
    if boot.uid:
        privileges.become(boot.uid)
    privileges.set_dumpable(do, 0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    privileges.set_no_new_privs(do)
    if boot.landlock_abi:
        rules = [(path, landlock.READ) for path in _READ if os.path.isdir(path)]
        landlock.restrict(do, boot.landlock_abi, rules, deny_tcp=False)
    privileges.install_seccomp_filter(do, boot.network.egress_filter)


async def _serve(sock: socket.socket, boot: EgressBoot) -> None:
    gc.enable()
    policy = CellPolicy(decoded_rules(boot.network.rules), boot.network.ports, boot.made_at)
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
