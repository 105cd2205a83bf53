"""Messages between a fleet and its nodes: frozen structs as msgpack, and never a pickle.

They carry the frames of a daemon (harness/sandbox/remote/frames.py).  Both sides limit the size of a
message before they decode it, and refuse fields and types that are not declared here.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...policies.errors import InternalError, PolicyError
from ...policies.policy import Policy
from ...runner.messages import decode, encode
from ..sandbox.remote.frames import (
    AwaitSettled,
    CheckSession,
    CloseSession,
    Content,
    Describe,
    Description,
    Done,
    Download,
    Execute,
    Executed,
    ExtendSession,
    Failure,
    Files,
    ForkSession,
    ListSessionFiles,
    LostReason,
    Opened,
    OpenSession,
    TakeSnapshot,
)

VERSION = 1
MOST_BYTES = 65 * 1024 * 1024  # of a message, as of a frame of a daemon
MOST_KEY = 256  # characters
_Key = Annotated[str, Meta(min_length=1, max_length=MOST_KEY)]

# Terminals and ports are not among these: they need descriptors, which stay on their host.
NodeRequest = (
    Execute | Describe | AwaitSettled | OpenSession | CheckSession | ListSessionFiles | Download
    | TakeSnapshot | ForkSession | ExtendSession | CloseSession
)  # fmt: skip
NodeReply = Executed | Description | Opened | LostReason | Files | Content | Done | Failure


class _FleetFrame(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True
):
    pass


class NodeCall(_FleetFrame, frozen=True):
    """One request to a node; two calls with one key are the same call, which the node runs once."""

    version: int
    key: _Key
    request: NodeRequest


class Answered(_FleetFrame, frozen=True):
    """The call ended; `is_repeated`: an earlier call with the same key had this answer."""

    reply: NodeReply
    is_repeated: bool = False


class NotBegun(_FleetFrame, frozen=True):
    """Nothing of the call has run, so that it can be tried elsewhere."""

    failure: Failure


class Forgotten(_FleetFrame, frozen=True):
    """The call began earlier, and its outcome is no longer kept."""


NodeAnswer = Answered | NotBegun | Forgotten


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node is made of.

    slots: calls that it runs at once
    pool: cells that wait ready
    sessions: sessions that live at once
    audit: the path of the trail, empty for none; `{node}` in it becomes the name of the node
    cgroup_root: a directory in which to make cgroups, empty for one that is found
    find_links, index: a folder of wheels, empty for none; whether the index of packages is asked, too
    keys, key_bytes: how many outcomes are kept by key, and their bytes
    """

    name: str
    policy: Policy
    slots: Annotated[int, Meta(ge=1, le=4096)]
    pool: int
    sessions: int
    audit: str = ""
    cgroup_root: str = ""
    find_links: str = ""
    index: bool = True
    keys: int = 10_000
    key_bytes: int = 64 * 1024 * 1024


def packed_message(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message; raises PolicyError if it is longer than a node reads."""
    try:
        data = encode(message)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise PolicyError(f"fleet: an argument cannot be sent: {error}") from None
    if len(data) > MOST_BYTES:
        raise PolicyError(f"fleet: the arguments take {len(data)} bytes, at most {MOST_BYTES}")
    return data


def message_of(data: object, kind: Any) -> Any:
    """Return the message in `data`; raises InternalError for anything but bytes of that kind."""
    if not isinstance(data, bytes):
        raise InternalError(f"a message of a fleet must be bytes, got {type(data).__name__}")
    if len(data) > MOST_BYTES:
        raise InternalError(f"a message of a fleet has {len(data)} bytes, at most {MOST_BYTES}")
    try:
        return decode(data, kind)
    except msgspec.DecodeError as error:
        raise InternalError(f"invalid message in a fleet: {error}") from None
