"""Answers that are sent in pieces: a client that takes nothing for a while is dropped.

uvicorn buffers what it is given at once.  A large answer in one piece would stay in memory for a client
that does not read, and the idle timeout would cut off one that reads slowly.
"""

from collections.abc import Mapping

import anyio
from starlette.responses import Response

from ..http_server import Receive, Scope, Send, drop

_PIECE = 64 * 1024


class PiecewiseResponse(Response):
    """A response that is sent as quickly as its client reads it."""

    def __init__(
        self, content: bytes, status: int, headers: Mapping[str, str], media_type: str,
        stalled_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__(content, status, headers, media_type)
        self._stalled_seconds = stalled_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, or drop the connection."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for at in range(0, len(self.body), _PIECE):
            piece = bytes(self.body[at : at + _PIECE])
            if not await is_sent(piece, self._stalled_seconds, scope, send):
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def is_sent(data: bytes, stalled_seconds: float, scope: Scope, send: Send) -> bool:
    """Send a part of a body; if the client takes nothing for so long, drop it and return False."""
    with anyio.move_on_after(stalled_seconds) as stalled:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    if stalled.cancelled_caught:
        drop(scope)
    return not stalled.cancelled_caught
