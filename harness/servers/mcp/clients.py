"""The client and owner of a request, taken from the channel, never from the content of the request."""

import hashlib
from typing import Any, NamedTuple

from mcp.server import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ..tokens import CLIENT

_SESSION = "mcp-session-id"
# Limits of one answer.  The SDK's client reads at most 1 MiB of an event over HTTP by default; over
# pipes clients have no limit, and a picture of 8 MiB takes 11 MiB as base64.
HTTP_BYTES, PIPE_BYTES = 1_000_000, 12 * 1024 * 1024

Context = ServerRequestContext[Any, Any]


class Owner(NamedTuple):
    """The owner of sessions and paused calls.

    `client` is the name of a token, or the one client at the other end of a pipe.  `id` is narrower:
    the conversation that began with a handshake.  The stateless protocol over HTTP has no
    conversations; all holders of a token are one owner then.  So they may not list sessions
    (`may_list`), and a session's id is known only to the client that opened it.  An answer has at most
    `answer_bytes`.
    """

    client: str
    id: str
    may_list: bool = True
    answer_bytes: int = HTTP_BYTES


PIPE = Owner("pipe", "pipe", answer_bytes=PIPE_BYTES)


def owner_of(context: Context) -> Owner:
    """Return the owner of a request."""
    request = context.request
    if request is None:
        return PIPE
    client = str(request.scope[CLIENT])  # KeyError if the middleware did not admit the request
    if is_modern(context):
        return Owner(client, client, may_list=False)
    return Owner(client, owner_id(client, request.headers[_SESSION]))


def owner_id(client: str, session: str) -> str:
    """Return the id of a conversation's owner; it is hashed, because the conversation's id is a secret
    and this id goes to the trail."""
    return f"{client}/{hashlib.sha256(session.encode()).hexdigest()[:16]}"


def is_modern(context: Context) -> bool:
    """Tell whether the client uses the protocol without handshakes, in which the server cannot ask
    during a request."""
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS
