"""The inside of a confined process (`ConfinedProcess` is the outside): its boot, its limits, its end.

The supervisor starts it as `python -I -S` with an empty environment and one SOCK_SEQPACKET socket as
descriptor 3.  It serves until the supervisor is gone, which closes that socket.
"""

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from .. import channel
from ..kernel import credentials as privileges
from ..kernel import landlock
from ..kernel import process_calls as processes
from ..kernel.steps import Now
from ..messages import Booted, Failed, decode, encode

_CONTROL = 3


def serve_confined(
    kind: type[msgspec.Struct], confine_by: Callable[[Any], None],
    serve: Callable[[socket.socket, Any], None], most_bytes: int = channel.PACKET_BYTES,
) -> NoReturn:  # fmt: skip
    """Read the boot frame of type `kind`, confine the process by it, then `serve`; never return.

    After an exception the process says what failed, and ends.
    """
    sock = socket.socket(fileno=_CONTROL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.close_range(_CONTROL + 1, 0xFFFFFFFF)
    try:
        boot = decode(channel.Receiver(sock, most_bytes).receive_whole(), kind)
        confine_by(boot)
        channel.send(sock, encode(Booted()))
        serve(sock, boot)
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        with contextlib.suppress(OSError):
            channel.send(sock, encode(Failed.of(error)))
        os._exit(1)
    os._exit(0)


def confine(
    name: str, uid: int, limits: Mapping[str, int], seccomp_filter: bytes,
    landlock_abi: int = 0, readable: Sequence[str] = (),
) -> None:  # fmt: skip
    """Give up permanently everything that the process does not need.

    `uid` is whom it becomes, 0 if it is not root.  `limits` are rlimits, such as {"NOFILE": 64}.  With
    `landlock_abi` it opens no files but those that are `readable`.
    """
    do = Now()
    privileges.set_name(do, name)
    if uid:
        privileges.become(uid)
    privileges.set_dumpable(do, 0)
    for each, most in limits.items():
        number = getattr(resource, f"RLIMIT_{each}")
        hard = resource.getrlimit(number)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (limit, limit))
    privileges.set_no_new_privs(do)
    if landlock_abi:
        rules = [(path, landlock.READ) for path in readable if os.path.isdir(path)]
        landlock.restrict(do, landlock_abi, rules, deny_tcp=False)
    privileges.install_seccomp_filter(do, seccomp_filter)
