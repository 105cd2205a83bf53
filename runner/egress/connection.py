"""`CellConnection`: one connection of a cell, from its acceptance to its end."""

import asyncio
import socket
import time
from typing import TYPE_CHECKING

from ...policies.network.usage import RuleUse
from .cell_policy import Grant
from .relay import RefusedError, Relay

if TYPE_CHECKING:
    from .http_relay import RequestRelay

_IDLE_SECONDS = 300.0
_LIFETIME_SECONDS = 3600.0


class CellConnection:
    """A connection of the cell, from its acceptance to its end."""

    def __init__(
        self, guest: socket.socket, name: str, port: int, grant: Grant, uses: list[RuleUse]
    ) -> None:
        self.guest = guest
        self.uses = uses
        self.name = name
        self.port = port
        self.grant = grant
        self.begun_at = time.monotonic()
        self.uploaded = asyncio.Event()
        self.relay: Relay | RequestRelay | None = None
        self.task: asyncio.Task[None] | None = None
        self.why = ""  # it was ended by us
        self.is_told = False  # the program knows why, by an answer

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """Count bytes before they are passed on; raises RefusedError."""
        for use in self.uses:
            if why := use.count(sent_bytes, received_bytes):
                raise RefusedError(why)

    def why_ended(self, now: float) -> str:
        """Return why it has to end although its name and port are allowed, empty if it may go on."""
        if now - self.begun_at > _LIFETIME_SECONDS:
            return f"longer than {_LIFETIME_SECONDS:g} s"
        if self.relay and now - self.relay.used_at > _IDLE_SECONDS:
            return f"idle for {_IDLE_SECONDS:g} s"
        return self.relay.why_not_now() if self.relay else ""
