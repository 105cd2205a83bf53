"""Events of answer streams, kept so that a client whose connection broke can resume a stream.

The SDK names the streams of each conversation by the ids of its requests, and has one store for all
conversations.  So events belong to the conversation of the current context, and the id of an event is
unknown in another conversation.
"""

import secrets
from collections import deque
from contextvars import ContextVar
from typing import NamedTuple

import anyio
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

from ....policies.errors import BusyError
from ..client_quota import ClientQuota

RETRY_MILLISECONDS = 500  # until a client whose connection broke should come back
RESUME_SECONDS = 5.0  # after which the work of a request is ended if its client has not come back
_MOST_EVENTS, _MOST_BYTES = 1000, 2_000_000  # of one conversation: an answer has 1 MB
BYTES_OF_ONE, BYTES_OF_ALL = 48 * 1024 * 1024, 192 * 1024 * 1024  # of all conversations
_EVENT_BYTES = 200  # of one event besides its message


class _KeptEvent(NamedTuple):
    id: str
    stream: str
    message: JSONRPCMessage | None  # None for the first event of a stream, which has no content
    size: int


class EventReader:
    """A request whose client gets events; the client sets `gone` by disconnecting.  `last` is the id
    of the last event of the stream that the request resumed, once there is one."""

    def __init__(self, events: "ConversationEvents", gone: anyio.Event) -> None:
        self.events = events
        self.gone = gone
        self.last = ""


# The SDK runs the work of a conversation in the context of the request that began it.
READER: ContextVar[EventReader | None] = ContextVar("event_reader", default=None)


class _OpenStream:
    """A stream without its last event; `resumed` is set when another request reads it."""

    def __init__(self, reader: EventReader) -> None:
        self.reader = reader
        self.resumed = anyio.Event()


class ConversationEvents:
    """The latest events of one conversation, the oldest first."""

    def __init__(self, bytes_kept: ClientQuota, client: str) -> None:
        self._quota = bytes_kept
        self._client = client
        self._events: deque[_KeptEvent] = deque()
        self._size = 0
        self._streams: dict[str, _OpenStream] = {}

    def keep(self, stream: str, message: JSONRPCMessage | None, reader: EventReader) -> str:
        """Keep an event and return its id; "" if there is no room for it.  Without a message it begins
        the stream of the reader."""
        id = self._keep(stream, message)
        if message is None:
            self._streams.setdefault(stream, _OpenStream(reader))
        elif _is_last(message) and (over := self._streams.pop(stream, None)):
            over.reader.last = id
        return id

    def _keep(self, stream: str, message: JSONRPCMessage | None) -> str:
        size = _EVENT_BYTES
        if message is not None:
            size += len(message.model_dump_json(by_alias=True, exclude_unset=True))
        while self._events and (
            len(self._events) >= _MOST_EVENTS or self._size + size > _MOST_BYTES
        ):
            self._drop_oldest()
        try:
            self._quota.take(self._client, size)
        except BusyError:
            return ""
        event = _KeptEvent(secrets.token_hex(16), stream, message, size)
        self._events.append(event)
        self._size += size
        return event.id

    def after(self, id: str) -> tuple[str, list[_KeptEvent]] | None:
        """Return the stream of an event, and its events from this one on; None if it is not kept."""
        kept = list(self._events)
        at = next((at for at, each in enumerate(kept) if each.id == id), None)
        if at is None:
            return None
        stream = kept[at].stream
        return stream, [each for each in kept[at:] if each.stream == stream]

    def resume(self, stream: str, reader: EventReader) -> None:
        """Note that the client reads a stream by another request."""
        followed = self._streams.setdefault(stream, _OpenStream(reader))
        followed.reader = reader
        followed.resumed.set()

    async def until_abandoned(self, stream: str, reader: EventReader) -> None:
        """Wait until the client of a request has disconnected, and cannot resume its stream or has not
        done so in time."""
        followed = self._streams.setdefault(stream, _OpenStream(reader))
        while True:
            await followed.reader.gone.wait()
            if not any(each.stream == stream for each in self._events):
                return
            with anyio.move_on_after(RESUME_SECONDS):
                await followed.resumed.wait()
            if followed.reader.gone.is_set():
                return
            followed.resumed = anyio.Event()

    def clear(self) -> None:
        """Drop all events."""
        while self._events:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._events.popleft()
        self._size -= oldest.size
        self._quota.give_back(self._client, oldest.size)


class KeptEvents(EventStore):
    """The SDK's interface to the events of the current conversation."""

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        reader = READER.get()
        return reader.events.keep(stream_id, message, reader) if reader else ""

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        """Send the later events of a stream; return it if more will follow."""
        reader = READER.get()
        found = reader.events.after(last_event_id) if reader else None
        if reader is None or found is None:
            return None
        stream, (first, *later) = found
        for each in later:
            if each.message is not None:
                await send_callback(EventMessage(each.message, each.id))
        if any(each.message is not None and _is_last(each.message) for each in (first, *later)):
            return None
        reader.events.resume(stream, reader)
        return stream


def _is_last(message: JSONRPCMessage) -> bool:
    """Tell whether a message is the answer to the request of its stream."""
    return isinstance(message, JSONRPCResponse | JSONRPCError)
