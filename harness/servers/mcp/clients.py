"""On whose behalf a request is made: known from the channel, never from what a request says."""

import hashlib
from typing import Any, NamedTuple

from mcp.server import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

CLIENT = (
    "cellwright.client"  # in the scope of an HTTP request: the name of the token that it came with
)
_SESSION = "mcp-session-id"
# Of one answer.  The SDK's client reads 1 MiB of an event over HTTP by default, and clients of pipes
# whatever comes: a picture of 8 MiB is 11 in base64.
HTTP_BYTES, PIPE_BYTES = 1_000_000, 12 * 1024 * 1024

Context = ServerRequestContext[Any, Any]


class Owner(NamedTuple):
    """Whose sessions are whose.

    `client` is the name of a token, or the one client at the other end of a pipe.  `id` is narrower:
    the conversation that began with a handshake.  Without one, in the stateless protocol over HTTP, all
    who hold a token are one owner: nobody is shown a list then, and an id is known to who opened it.
    An answer has at most `answer_bytes`.
    """

    client: str
    id: str
    may_list: bool = True
    answer_bytes: int = HTTP_BYTES


PIPE = Owner("pipe", "pipe", answer_bytes=PIPE_BYTES)


def owner_of(context: Context) -> Owner:
    """Return who asks."""
    request = context.request
    if request is None:
        return PIPE
    client = str(request.scope[CLIENT])  # a KeyError: nobody let this request in
    if is_modern(context):
        return Owner(client, client, may_list=False)
    return Owner(client, owner_id(client, request.headers[_SESSION]))


def owner_id(client: str, session: str) -> str:
    """Return the id of the owner that a conversation is: one that may stand in a trail."""
    return f"{client}/{hashlib.sha256(session.encode()).hexdigest()[:16]}"


def is_modern(context: Context) -> bool:
    """Tell whether the client speaks the protocol without handshakes, and cannot be asked back."""
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS
