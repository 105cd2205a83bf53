"""Every frame that crosses a process boundary, one type each (see README.md for who says what).

No frame of a guest decodes to many times its size: msgspec refuses an array that is longer than its
type says before it decodes any of it.

Three channels, three levels of trust: the supervisor's word to the launcher, what is said of a
cell by the launcher and, before its program, the guest's process (status), and the exchange with the
guest (control), whose side is hostile.
"""

import os
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from ..policies.plan import NetworkPlan, Plan
from .nesting import HARMLESS_BYTES, refuse_deep_json, refuse_large_json

MOST_PICTURES = 64  # of one program
CHARTS = "application/vnd.cellwright.charts"  # the type of the data of charts, among the pictures
MOST_CHARTS, MOST_CHART_BYTES = 32, 256 * 1024
MOST_AT_ONCE = (
    8  # cells that one frame asks for: the kernel takes 253 descriptors with it (unix(7))
)


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    pass


# supervisor -> launcher


class Boot(_Frame, frozen=True):
    """The first frame: what all cells of this launcher share."""

    plan: Plan
    files: tuple[str, ...]  # what the interpreter needs of the host
    links: tuple[tuple[str, str], ...]  # (path, what it points to)
    hidden: tuple[str, ...]  # directories of the interpreter that must look empty
    host_uid: int  # whom to become, if started as root
    joins: int  # how many cgroups a cell joins by writing to `tasks` (cgroup v1)
    sources: tuple[
        tuple[str, str], ...
    ] = ()  # shown path -> what it is on the host, if not the same
    shared: tuple[
        str, ...
    ] = ()  # places of shared files; a SharedFilesMade frame hands over their mounts
    cells_per_network: int = 1  # how many cells may have a network namespace, one after the other
    is_for_one_cell: bool = False  # nothing is done only so that further cells take less


class Fork(_Frame, frozen=True):
    """Make `cells`; comes with the descriptors of each in turn (`cell.enter`, STATUS to TASKS)."""

    into_cgroup: bool  # the last descriptor of each is a v2 cgroup directory to be born in
    cells: Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_ONCE)] = 1


class OpenSocket(_Frame, frozen=True):
    """Make a TCP socket in the network namespace of the cell whose guest has the number `guest` in the
    launcher's pid namespace; comes with a pidfd of the guest, and the socket to answer on."""

    guest: bytes  # an int32, in the machine's order, so that the launcher need not decode msgpack


class SocketMade(_Frame, frozen=True):
    """The answer to OpenSocket, or Failed; comes with the socket, which is not connected."""


# launcher, and the guest's process before its program -> supervisor, on a cell's status channel


class InitMade(_Frame, frozen=True):
    """The nursery made an init; comes with its pidfd and its pid, net, ipc and uts namespaces."""


class Booted(_Frame, frozen=True):
    """The launcher is set up and forks cells from now on."""


class SharedFilesMade(_Frame, frozen=True):
    """The launcher's root has shared files; comes with a writable mount for each place."""


class Viewed(_Frame, frozen=True):
    """The launcher's root keeps denied names back; comes with the root, and a memfd of `Views`."""


class Cover(_Frame, frozen=True):
    """What lies on a denied path beneath a writable directory: the path, and the cover's identity."""

    path: str
    device: int
    inode: int


class Listed(_Frame, frozen=True):
    """The steps that a guest's process executes: the layer of each, and the step in words."""

    steps: tuple[tuple[str, str], ...]


class Snapshot(_Frame, frozen=True):
    """A host directory that is shown entry by entry, as it was then."""

    path: str
    device: int
    inode: int
    changed_at_ns: int


class Views(_Frame, frozen=True):
    """What the supervisor looks at while cells live, so that what is denied stays so."""

    covers: tuple[Cover, ...]
    snapshots: tuple[Snapshot, ...]


class Ready(_Frame, frozen=True):
    """Every layer is on and the guest's process waits for its program; comes with the pidfds of init
    and of itself, /workspace, and, if it `listens`, the listener that hears of what is refused."""

    listens: bool


class WaysOut(_Frame, frozen=True):
    """The guest's process made sockets for the egress process; comes with up to four of them, in the
    order of `cell.enter`.  Precedes Ready where the policy allows names of the network."""


class Failed(_Frame, frozen=True):
    """A step of building the cell failed; the cell is gone.

    `field` is the policy's, if what it says cannot be; `hint` says what to do.
    """

    errno: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    message: str
    field: str = ""
    hint: str = ""


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Ended(_Frame, frozen=True):
    """The guest's main process ended, and init is being killed; what it used, as wait4(2) told."""

    wait_status: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    cpu_user_seconds: _Seconds
    cpu_system_seconds: _Seconds
    max_rss_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

    def __post_init__(self) -> None:
        """Refuse, with ValueError, the status of a process that has not ended."""
        os.waitstatus_to_exitcode(self.wait_status)


# supervisor -> guest


class InputFile(_Frame, frozen=True):
    path: str
    data: bytes
    executable: bool = False


class RunProgram(_Frame, frozen=True):
    """The program and what it is given.  `inputs` is a JSON object of variables.

    In a session `request` counts from 1, and `stdin` is given here, since a pipe ends but once.
    `nonce` is to be repeated in the Finished frame of this request.
    """

    code: str
    inputs: bytes
    files: tuple[InputFile, ...]
    environment: dict[str, str]
    value_bytes: int
    request: int = 0
    stdin: bytes = b""
    picture_bytes: int = 0  # of all pictures together
    tools: dict[str, tuple[str, ...]] = {}  # what it may call: name -> names of its parameters
    nonce: str = ""
    plain: bool = False  # the value is made JSON, or the error says why it cannot be
    arguments: tuple[str, ...] = ()  # in a session those of the call before stay if there are none
    sites: bool = False  # calls of tools tell their sites, as a durable run needs them
    filename: str = ""  # below /workspace, where the program is a file while it runs


class Answer(_Frame, frozen=True):
    """What came of a call of a tool.  `value` is JSON; `kind`, if not empty, says how it failed."""

    number: int
    value: bytes | None
    kind: str = ""
    message: str = ""


class SingleCall(_Frame, frozen=True):
    """The one call of a container with a kernel of its own, in a file that it is shown: the program,
    its standard input, and the id that it is to have there, 0 to keep the one it has."""

    plan: Plan
    program: RunProgram
    stdin: bytes
    uid: int


class Start(_Frame, frozen=True):
    """Write these files and become the interpreter of a session: request_forms.py has what follows."""

    files: tuple[InputFile, ...]


class Become(_Frame, frozen=True):
    """Write these files and become `arguments[0]`, a program that is none of our languages'."""

    arguments: tuple[str, ...]
    environment: dict[str, str]  # all of it
    directory: str
    files: tuple[InputFile, ...] = ()


NOT_JSON = "not JSON: "  # how the error of a program begins whose value was to be plain

# guest -> supervisor


class Call(_Frame, frozen=True):
    """The program calls a tool.  `arguments` is a JSON object; `number` is the guest's own, from 0 up
    (below are those that come through a door).  `site` says where in the program the call stands, if
    the RunProgram frame asks for it: to find that out takes as long as the rest of the call.
    `alone`: the program has one thread, which waits for this answer, so no other call can come
    before it."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    name: str
    arguments: bytes
    site: str = ""
    alone: bool = False


class Finished(_Frame, frozen=True):
    """What the program came to, in its own words: believed about the value and nothing else.

    With `ends_well` it asks to be ended now, as by exit(0); without, the kernel's word is waited for.
    In a session, where no process ends with a program, there is no other word than `exit_code`, and
    `nonce` says which request it is about: that of the RunProgram frame.
    """

    value: bytes | None  # JSON
    representation: str | None  # where there is no JSON for it
    error: str | None
    traceback: str | None
    ends_well: bool = False
    # (MIME type, content) of the value, and figures
    pictures: Annotated[tuple[tuple[str, bytes], ...], msgspec.Meta(max_length=MOST_PICTURES)] = ()
    nonce: str = ""
    # Bash's last: it writes what it has at a newline, as status 10 is, and a frame is one write(2).
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    dropped_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # of the representation


Status = Ready | WaysOut | Failed | Ended


# supervisor -> branching process


class BranchingBoot(_Frame, frozen=True):
    """The first frame: how the process confines itself."""

    filter: bytes
    uid: int  # whom to become; 0: the process is not root


class BranchCells(_Frame, frozen=True):
    """Make fresh cells equal to that of a session; comes with the pidfds of the session's process, of
    its init, and of the process of each fresh cell, then with page maps."""

    cells: int  # fresh ones
    maps: bool  # there are page maps, of the session's process and of each fresh cell's


class KeepMemory(_Frame, frozen=True):
    """Write what a session's memory has beyond an image; comes with the pidfds of the session's process
    and of its init, a file to write to, and the image if there is one: else all of it is written."""

    has_image: bool
    most_bytes: int  # of pages


class RestoreMemory(_Frame, frozen=True):
    """Make a fresh cell equal to what was kept of a session; comes with the pidfd of its process, the
    image, and the kept file."""


# branching process -> supervisor


class Kept(_Frame, frozen=True):
    """The file is written, and the session goes on."""


class Branched(_Frame, frozen=True):
    """The fresh cells are equal to the session's."""


class BranchRefused(_Frame, frozen=True):
    """The state of the session cannot be copied or kept; the fresh cells were killed."""

    why: str


# supervisor -> egress process


class EgressBoot(_Frame, frozen=True):
    """The first frame: what holds for every cell, and how the process confines itself."""

    network: NetworkPlan
    uid: int  # whom to become; 0: the process is not root
    landlock_abi: int
    made_at: float  # when the sandbox was made, by time.monotonic
    http_parser: str  # the directory of the package h11, if requests are read
    proxy: tuple[str, int, str] | None  # host, port and authorization of an UpstreamProxy


class AddCell(_Frame, frozen=True):
    """Serve a cell; comes with a channel for what is to be told of it, and with the cell's sockets.
    When the channel hangs up, the cell is gone."""


class Manage(_Frame, frozen=True):
    """Answer one question about the rules of all cells; comes with the channel on which it is asked:
    SetRules or ListPending."""


class SetRules(_Frame, frozen=True):
    """Follow these rules from now on, and end the connections that they do not allow; Settled says that
    it is done."""

    rules: bytes  # as in a NetworkPlan


class ListPending(_Frame, frozen=True):
    """Tell the names that were refused and are neither allowed nor denied by now: a Refusal each, then
    Settled."""


class Settle(_Frame, frozen=True):
    """On a cell's channel: tell what happened since the last time.  With `ends`, end its connections
    first."""

    ends: bool


# egress process -> supervisor, on a cell's channel

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Refusal(_Frame, frozen=True):
    """A name, a connection or a message that was refused, and how many times."""

    what: Literal["resolve", "connect", "record"]
    name: Annotated[str, msgspec.Meta(max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    reason: Annotated[str, msgspec.Meta(max_length=600)]
    count: _Count


class Relayed(_Frame, frozen=True):
    """A connection that the policy allowed, once it has ended."""

    name: Annotated[str, msgspec.Meta(max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    address: Annotated[str, msgspec.Meta(max_length=64)]  # that was dialled; empty if none was
    sent_bytes: _Count
    received_bytes: _Count
    seconds: _Seconds
    outcome: Annotated[str, msgspec.Meta(max_length=600)]
    rule: Annotated[str, msgspec.Meta(max_length=600)]


class Settled(_Frame, frozen=True):
    """Everything was told."""


def encode(frame: msgspec.Struct) -> bytes:
    # `encode` crashes the process when memory runs out; growing this is a MemoryError then (measured).
    buffer = bytearray()
    _ENCODER.encode_into(frame, buffer)
    return bytes(buffer)


def encode_behind(mark: bytes, frame: msgspec.Struct) -> bytearray:
    """Return `mark` and the frame in one buffer, without a copy."""
    buffer = bytearray(mark)
    _ENCODER.encode_into(frame, buffer, len(mark))
    return buffer


def decode(data: bytes, kind: Any) -> Any:
    """Decode a frame of type `kind`, once; raise msgspec.DecodeError if it is anything else."""
    try:
        return decoder(kind).decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # what msgspec lets through
        raise msgspec.DecodeError(str(error)) from None


def decode_json(data: bytes) -> Any:
    """Decode JSON in a guest's words; raise msgspec.DecodeError if it is none, nests too deeply, or is
    many times larger once it is decoded."""
    if len(data) > HARMLESS_BYTES:
        refuse_large_json(data)
        refuse_deep_json(data)
    try:
        return msgspec.json.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


@cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of frames of type `kind`; making one costs more than using it."""
    return msgspec.msgpack.Decoder(kind)


_ENCODER = msgspec.msgpack.Encoder()
