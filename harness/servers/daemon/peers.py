"""`Peer`: the process at the other end of a connection, as the kernel tells."""

import contextlib
import socket
import struct
from typing import NamedTuple

SO_PEERGROUPS = 59  # of asm-generic/socket.h; the module socket does not name it
_UCRED = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid
_GID = struct.Struct("I")
_MOST_BYTES = 1024  # that Python lets getsockopt return: 256 groups


class Peer(NamedTuple):
    """A client: its process, its user, its groups, and the tenant whose quotas it uses."""

    pid: int
    uid: int
    groups: frozenset[int]
    tenant: str = ""


def peer_at(sock: socket.socket) -> Peer:
    """Return the process that connected, as it was then.

    A process with more than 256 groups counts with its primary group only.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    groups = {gid}
    with contextlib.suppress(OSError):  # ERANGE: more groups
        listed = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _MOST_BYTES)
        groups.update(number for (number,) in _GID.iter_unpack(listed))
    return Peer(pid, uid, frozenset(groups))
