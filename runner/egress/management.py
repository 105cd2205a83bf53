"""`Management`: answers the supervisor's questions about the rules, each on a channel of its own."""

import asyncio
import contextlib
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING

from .. import channel
from ..messages import ListPending, SetRules, Settled, decode, encode
from .cell_policy import CellPolicy, decoded_rules
from .served_cell import ServedCell

if TYPE_CHECKING:
    import msgspec

MOST_BYTES = 4 * 1024 * 1024  # of a frame with rules
_END_SECONDS = 5.0  # for connections that have to end


class Management:
    """Changes and tells the rules of all cells."""

    def __init__(self, policy: CellPolicy, cells: Collection[ServedCell]) -> None:
        self._policy = policy
        self._cells = cells
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, sock: socket.socket) -> None:
        """Answer the question that comes on `sock`, then close it."""
        sock.setblocking(False)
        receiver = channel.Receiver(sock, MOST_BYTES)
        self._loop.add_reader(sock, self._hear, sock, receiver)

    def _hear(self, sock: socket.socket, receiver: channel.Receiver) -> None:
        try:
            frame = receiver.receive()
        except BlockingIOError:
            return
        except (OSError, channel.ProtocolError):
            frame = b""
        if frame is None:  # it goes on in the next packet
            return
        self._loop.remove_reader(sock)
        task = asyncio.create_task(self._answer(sock, frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, sock: socket.socket, frame: bytes) -> None:
        with sock, contextlib.suppress(OSError):  # the supervisor does not wait any more
            if not frame:
                return
            question = decode(frame, SetRules | ListPending)
            records: list[msgspec.Struct] = []
            if isinstance(question, SetRules):
                await self._set(question.rules)
            else:
                records = self._policy.pending()
            for record in (*records, Settled()):
                await self._loop.sock_sendall(sock, b"\0" + encode(record))

    async def _set(self, rules: bytes) -> None:
        """Follow other rules, and end the connections that they do not allow."""
        self._policy.rules = decoded_rules(rules)
        ending = [task for cell in self._cells for task in cell.follow_rules()]
        if ending:
            await asyncio.wait(ending, timeout=_END_SECONDS)
