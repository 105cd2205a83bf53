"""`Conversations`: the number of conversations of each client, and the end of each.

A conversation begins with a handshake over HTTP, and the SDK makes its id.  It ends when its client
ends it, when it has been idle, or when the SDK no longer knows it; then all that it held is released.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import anyio

from ..client_quota import ClientQuota
from ..client_turns import run_in_thread
from .stream_events import BYTES_OF_ALL, BYTES_OF_ONE, READER, ConversationEvents, EventReader

IDLE_SECONDS = 1800.0
MOST, MOST_OF_ONE = 256, 192
_BEHIND_SECONDS = 1.0  # after the SDK, which ends an idle conversation by a timer of its own


class ClientConversation:
    """One conversation of a client; `id` is empty until the SDK has answered the handshake."""

    def __init__(self, client: str, events: ConversationEvents) -> None:
        self.client = client
        self.id = ""
        self.events = events
        self.requests = 0  # that are unanswered
        self.idle_timer: asyncio.TimerHandle | None = None


class Conversations:
    """The conversations of all clients, for one event loop."""

    def __init__(
        self, on_end: Callable[[str, str], None], most_of_one: int = MOST_OF_ONE, most: int = MOST,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        """`on_end` is called in a thread, with the client and the id of a conversation that ended."""
        self._on_end = on_end
        self._idle_seconds = idle_seconds
        self._quota = ClientQuota("conversations", most_of_one, most, "end one by DELETE")
        self._event_bytes = ClientQuota("bytes of kept events", BYTES_OF_ONE, BYTES_OF_ALL)
        self._open: dict[str, ClientConversation] = {}
        self._ending: set[asyncio.Task[None]] = set()  # an event loop has only weak references

    @contextlib.contextmanager
    def used(self, client: str, id: str, gone: anyio.Event) -> Iterator[ClientConversation | None]:
        """Count a request of a conversation during the block; `gone` is set if its client disconnects.

        Without an id the request begins one: it is forgotten after the block, unless `keep` was called
        in it.  Yields None for an unknown id, or one of another client; raises BusyError if the client
        has too many.
        """
        conversation = self._open.get(id) if id else self._begin(client)
        if conversation is None or conversation.client != client:
            yield None
            return
        conversation.requests += 1
        if conversation.idle_timer:
            conversation.idle_timer.cancel()
        token = READER.set(EventReader(conversation.events, gone))
        try:
            yield conversation
        finally:
            READER.reset(token)
            conversation.requests -= 1
            self._rest(conversation)

    def keep(self, conversation: ClientConversation, id: str) -> None:
        """Keep a conversation that the SDK gave an id."""
        conversation.id = id
        self._open[id] = conversation

    async def end(self, conversation: ClientConversation) -> None:
        """Release all that a conversation holds; ending it twice is harmless."""
        if self._open.pop(conversation.id, None) is not None:
            self._release(conversation)
            await run_in_thread(self._on_end, conversation.client, conversation.id)

    def _begin(self, client: str) -> ClientConversation:
        self._quota.take(client)
        return ClientConversation(client, ConversationEvents(self._event_bytes, client))

    def _rest(self, conversation: ClientConversation) -> None:
        if not conversation.id:
            self._release(conversation)
        elif not conversation.requests and conversation.id in self._open:
            after = self._idle_seconds + _BEHIND_SECONDS
            loop = asyncio.get_running_loop()
            conversation.idle_timer = loop.call_later(after, self._end_soon, conversation)

    def _end_soon(self, conversation: ClientConversation) -> None:
        ending = asyncio.ensure_future(self.end(conversation))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _release(self, conversation: ClientConversation) -> None:
        if conversation.idle_timer:
            conversation.idle_timer.cancel()
        conversation.events.clear()
        self._quota.give_back(conversation.client)
