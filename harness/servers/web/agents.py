"""`AgentsByClient`: an agent for each client, with runs and made tools of its own."""

import threading
from collections.abc import Callable

from ....policies.closing import Closing
from ....policies.errors import ClosedError
from ...agent.agent import Agent


class AgentsByClient(Closing):
    """Agents, each made by `make` at the first task of its client; clients are tokens, so they are
    few."""

    def __init__(self, make: Callable[[str], Agent]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[str, Agent] = {}
        self._closed = False

    def of(self, client: str) -> Agent:
        """Return the agent of a client."""
        with self._lock:
            if self._closed:
                raise ClosedError("the server is shutting down")
            if client not in self._made:
                self._made[client] = self._make(client)
            return self._made[client]

    def opened(self) -> dict[str, Agent]:
        """Return the agents that were made, by client."""
        with self._lock:
            return dict(self._made)

    def close(self) -> None:
        """Close all agents."""
        with self._lock:
            self._closed = True
            made = list(self._made.values())
        for each in made:
            each.close()
