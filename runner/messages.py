"""Every frame that crosses a process boundary, one type each (README.md lists senders and receivers).

No frame of a guest decodes to many times its size: msgspec refuses an array that is longer than its
type says before it decodes any of it.

Three channels have three levels of trust: from the supervisor to the launcher; the status of a cell,
sent by the launcher and, before its program, by the guest's process; and the control channel, whose
guest side is hostile.
"""

import os
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from ..policies.plan import IdRange, NetworkPlan, Plan
from .channel import HARMLESS_BYTES, refuse_deep_json, refuse_large_json

MOST_PICTURES = 64  # pictures of one program
CHARTS = "application/vnd.cellwright.charts"  # MIME type of chart data, sent among the pictures
MOST_CHARTS, MOST_CHART_BYTES = 32, 256 * 1024
# cells that one frame asks for: the kernel takes 253 descriptors with it (unix(7))
MOST_AT_ONCE = 8


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    pass


# supervisor -> launcher


class Boot(_Frame, frozen=True):
    """The first frame: the settings that all cells of this launcher share."""

    plan: Plan
    files: tuple[str, ...]  # host files that the interpreter needs
    links: tuple[tuple[str, str], ...]  # (path, target)
    hidden: tuple[str, ...]  # directories of the interpreter that must look empty
    host_uid: int  # uid to change to, if started as root
    joins: int  # how many cgroups a cell joins by writing to `tasks` (cgroup v1)
    sources: tuple[tuple[str, str], ...] = ()  # shown path -> path on the host, if it differs
    shared: tuple[
        str, ...
    ] = ()  # mount points of shared files; a SharedFilesMade frame hands over the mounts
    cells_per_network: int = 1  # how many cells may have a network namespace, one after the other
    is_for_one_cell: bool = False  # skip work that only further cells would profit from


class ImageStage(_Frame, frozen=True):
    """Before the first frame, for a launcher of images (`launcher/image_stage.py`): the command of the
    launcher, and the ids of the image as an ImagePlan has them."""

    command: tuple[str, ...]
    kind: Literal["root", "subordinate", "one"]
    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]


class Fork(_Frame, frozen=True):
    """Make `cells`; comes with the descriptors of each in turn (`cell.enter`, STATUS to TASKS)."""

    into_cgroup: bool  # the last descriptor of each is the cgroup v2 directory to start in
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


class GuardedCall(_Frame, frozen=True):
    """A call for the guard of a cell (`launcher/guard.py`), with our copies of the arguments.  It comes
    with a descriptor for each of `starts` that is true: where the path begins, if that is relative."""

    kind: Literal["open", "reopen", "truncate", "mkdir", "mknod", "symlink", "link", "rename"]
    paths: tuple[bytes, ...]
    starts: tuple[bool, ...]
    flags: int = 0
    mode: int = 0
    umask: int = 0o022
    size: int = 0  # for truncate(2)
    number: int = 0  # the system call
    process: int = 0  # the caller, as the cell numbers it
    thread: int = 0
    terminal: int = -1  # the number of the caller's terminal in /dev/pts, if it opens /dev/tty


class GuardAnswer(_Frame, frozen=True):
    """The result of a call; comes with a descriptor if one was to be opened."""

    errno: int = 0
    rule: str = ""  # a policy refused it
    descriptor: int = -1  # the path leads to this descriptor of the caller
    waits: bool = False  # to be asked again: the caller waits until it can be opened


class GuardsReady(_Frame, frozen=True):
    """Cells can have guards (`launcher/guard.py`), which are asked for on the socket that comes with
    it.  A guard sends it with its pidfd."""


class SharedFilesMade(_Frame, frozen=True):
    """The launcher's root has shared files; comes with a writable mount for each place."""


class Viewed(_Frame, frozen=True):
    """The launcher's root keeps denied names back; comes with the root, and a memfd of `Views`."""


class Cover(_Frame, frozen=True):
    """A cover over a denied path beneath a writable directory: the path, and the cover's identity."""

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
    """The files that the supervisor checks while cells live, so that denied paths stay hidden."""

    covers: tuple[Cover, ...]
    snapshots: tuple[Snapshot, ...]


class Ready(_Frame, frozen=True):
    """Every layer is on and the guest's process waits for its program; comes with the pidfds of init
    and of itself, /workspace, and, if it `listens`, the listener for refused calls."""

    listens: bool


class ImageChanges(_Frame, frozen=True):
    """The guest's process made its root of an image; comes with the directory that gets what the cell
    changes in it.  Precedes Ready where cells have an image."""


class WaysOut(_Frame, frozen=True):
    """The guest's process made sockets for the egress process; comes with up to four of them, in the
    order of `cell.enter`.  Precedes Ready where the policy allows names of the network."""


LAYER = "keep changes in "  # begins what a launcher says of an overlay that the kernel refuses


class Failed(_Frame, frozen=True):
    """A step of building the cell failed; the cell is gone.

    `field`: the field of the policy that this host cannot satisfy, if any. `hint`: what to do.
    """

    errno: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    message: str
    field: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        about = getattr(error, "filename", None) or type(error).__name__
        words = f"{about}: {getattr(error, 'strerror', error)}"
        return cls(getattr(error, "errno", None) or 0, words)

    @property
    def words(self) -> str:
        return f"{self.message}: {os.strerror(self.errno)}" if self.errno else self.message


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Ended(_Frame, frozen=True):
    """The guest's main process ended, and init is being killed; with its usage by wait4(2)."""

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
    """The program and its inputs. `inputs` is a JSON object of variables.

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
    picture_bytes: int = 0  # bytes of all pictures together
    tools: dict[str, tuple[str, ...]] = {}  # callable tools: name -> names of parameters
    nonce: str = ""
    plain: bool = False  # the value is made JSON, or the error says why it cannot be
    arguments: tuple[str, ...] = ()  # in a session, empty keeps the arguments of the previous call
    sites: bool = False  # calls of tools report their place in the program, for durable runs
    filename: str = ""  # path below /workspace where the program is a file while it runs


class Answer(_Frame, frozen=True):
    """The outcome of a tool call. `value` is JSON; `kind`, if not empty, says how it failed."""

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
    """Write these files and become the program `arguments[0]`; PATH says where a name without a slash
    lies."""

    arguments: tuple[str, ...]
    environment: dict[str, str]  # the complete environment
    directory: str
    files: tuple[InputFile, ...] = ()
    terminal: str = ""  # the terminal that its streams are, and that controls its session


NOT_JSON = "not JSON: "  # prefix of the error of a program whose value should be plain

# guest -> supervisor


class Call(_Frame, frozen=True):
    """The program calls a tool. `arguments`: a JSON object. `number`: chosen by the guest, from 0
    up; calls through a door have negative numbers. `site` says where in the program the call stands,
    if the RunProgram frame asks for it: to find that out takes as long as the rest of the call.
    `alone`: the program has one thread, which waits for this answer, so no other call can come
    before it."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    name: str
    arguments: bytes
    site: str = ""
    alone: bool = False


class Finished(_Frame, frozen=True):
    """The guest's claim about the program's outcome; only its value is believed.

    With `ends_well` it asks to be ended now, as by exit(0); without, the kernel's word is waited for.
    In a session no process ends with a program, so `exit_code` is only a claim; `nonce` repeats that of
    the RunProgram frame.
    """

    value: bytes | None  # JSON
    representation: str | None  # set if the value has no JSON
    error: str | None
    traceback: str | None
    ends_well: bool = False
    # (MIME type, content) of pictures of the value and of figures
    pictures: Annotated[tuple[tuple[str, bytes], ...], msgspec.Meta(max_length=MOST_PICTURES)] = ()
    nonce: str = ""
    # The last field for Bash, which flushes at a newline, such as status 10; a frame is one write(2).
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    dropped_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # dropped bytes of the representation


Status = Ready | WaysOut | ImageChanges | Failed | Ended


# supervisor -> branching process


class BranchingBoot(_Frame, frozen=True):
    """The first frame: how the process confines itself."""

    filter: bytes
    uid: int  # uid to change to; 0 if the process is not root


class BranchCells(_Frame, frozen=True):
    """Make fresh cells equal to the cell of a session; comes with the pidfds of the session's
    process, of its init, and of the process of each fresh cell, then with page maps."""

    cells: int  # number of fresh cells
    maps: bool  # True if page maps of the session's process and of each fresh cell come along


class KeepMemory(_Frame, frozen=True):
    """Write the difference between a session's memory and an image; comes with the pidfds of the
    session's process and of its init, a file to write to, and the image. Without an image the whole
    memory is written."""

    has_image: bool
    most_bytes: int  # largest amount of pages


class RestoreMemory(_Frame, frozen=True):
    """Restore a kept session in a fresh cell; comes with the pidfd of the cell's process, the image,
    and the kept file."""


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
    """The first frame: settings for every cell, and how the process confines itself."""

    network: NetworkPlan
    uid: int  # uid to change to; 0 if the process is not root
    landlock_abi: int
    made_at: float  # when the sandbox was made, by time.monotonic
    http_parser: str  # the directory of the package h11, if requests are read
    proxy: tuple[str, int, str] | None  # host, port and authorization of an UpstreamProxy
    secrets: bytes = b""  # EgressSecrets, if cells have placeholders for credentials

    def __repr__(self) -> str:
        return "EgressBoot()"


class AddCell(_Frame, frozen=True):
    """Serve a cell; comes with a channel for its records, and with the cell's sockets. When the
    channel hangs up, the cell is gone."""


class Manage(_Frame, frozen=True):
    """Answer one question about the rules of all cells; comes with the channel on which it is asked:
    SetRules, ListPending or TellRefused."""


class SetRules(_Frame, frozen=True):
    """Follow these rules from now on, and end the connections that they do not allow; Settled says that
    it is done."""

    rules: bytes  # as in a NetworkPlan


class ListPending(_Frame, frozen=True):
    """Tell the names that were refused and are neither allowed nor denied by now: a Refusal each, then
    Settled."""


class TellRefused(_Frame, frozen=True):
    """Until this channel hangs up, send a Refusal on it for each name when it is refused for the first
    time, and Settled when the rules have changed."""


class Settle(_Frame, frozen=True):
    """On a cell's channel: tell what happened since the last time.  With `ends`, end its connections
    first."""

    ends: bool


# egress process -> supervisor, on a cell's channel

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Refusal(_Frame, frozen=True):
    """A name, a connection or a message that was refused, and how many times."""

    what: Literal["resolve", "connect", "connection", "record", "credential"]
    name: Annotated[str, msgspec.Meta(max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    reason: Annotated[str, msgspec.Meta(max_length=600)]
    count: _Count


class Relayed(_Frame, frozen=True):
    """A connection that the policy allowed, once it has ended."""

    name: Annotated[str, msgspec.Meta(max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    address: Annotated[str, msgspec.Meta(max_length=64)]  # the dialled address; empty if none
    sent_bytes: _Count
    received_bytes: _Count
    seconds: _Seconds
    outcome: Annotated[str, msgspec.Meta(max_length=600)]
    rule: Annotated[str, msgspec.Meta(max_length=600)]


class Settled(_Frame, frozen=True):
    """All records have been sent."""


def new_execution_id() -> str:
    """Return an id for one execution, which its frames, its records and its result have."""
    return os.urandom(16).hex()  # not from a clock, because clones of a machine would collide


def encode(frame: msgspec.Struct) -> bytes:
    # If memory runs out, growing this buffer raises MemoryError, while `encode` crashes the process
    # (measured).
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
    except (
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # raised by msgspec for some malformed input
        raise msgspec.DecodeError(str(error)) from None


def decode_json(data: bytes) -> Any:
    """Decode JSON from a guest; raises msgspec.DecodeError if it is invalid, nests too deeply, or
    becomes many times larger by decoding."""
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
