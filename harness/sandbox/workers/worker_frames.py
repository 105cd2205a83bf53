"""Frames between a sandbox and its workers, in addition to those of a daemon (../remote/frames.py).

Both sides are processes of one user and one version, and trust each other.
"""

from typing import Any, Literal

import msgspec

from ....policies.plan import Plan
from ....policies.policy import Policy
from ....runner.audit.record import Span
from ....runner.cells.workspace import KeptWorkspace
from ....runner.messages import Answer, Become
from ....runner.supervisor import SupervisorsState
from ..images.image import StoredImage
from ..remote import frames

Change = Literal["save", "freeze", "close", "look", "order"]


class _WorkerFrame(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True
):
    pass


# sandbox -> worker, on the control socket


class StartWorker(_WorkerFrame, frozen=True):
    """The first frame: how a worker makes its cells.  Settings are mappings from field to value.

    `policy` is that of the sandbox without the packages that it asks for.  `variables` and `files` are
    those of credentials, which have placeholders.
    """

    policy: Policy
    packages: tuple[str, ...] | str | None
    host: dict[str, Any]
    pool: dict[str, Any]
    sessions: dict[str, Any]
    pauses: dict[str, Any]
    store: dict[str, Any] | None
    workspaces: dict[str, Any] | None
    shares_files: bool
    variables: dict[str, str]
    files: dict[str, str]
    egress: str | None  # the path of the socket that changes the network rules
    image: StoredImage | None


class OpenConnection(_WorkerFrame, frozen=True):
    """A connection for requests comes with this frame."""


class AskForSocket(_WorkerFrame, frozen=True):
    """Have the launcher make a socket in the cell of an execution that gave its
    streams away, and answer on the channel that comes with this frame (CellNetwork.ask)."""

    execution_id: str


ToWorker = OpenConnection | AskForSocket


# sandbox -> worker, on a connection


class Perform(_WorkerFrame, frozen=True):
    """Execute a program that the sandbox has checked and recorded; `program.session` is its session.

    `tools` is None if no tool can be called; else UseTool asks for each call.
    """

    program: frames.Execute
    execution_id: str
    tools: dict[str, tuple[str, ...]] | None = None
    sites: bool = False
    workspace: str | None = None
    clean: bool = False
    gives_streams: bool = False  # StreamsOpened comes first, and nothing captures its output
    command: Become | None = None  # a long-lived program instead of `program`
    terminal: tuple[int, int] | None = None


class GetStderr(_WorkerFrame, frozen=True):
    """Ask for the standard error so far of an execution that gave its streams away."""

    execution_id: str


class OpenHere(_WorkerFrame, frozen=True):
    """Open a session, or return that of the id: the arguments of `Sandbox.session`.  The trail gets
    `why` it was opened."""

    id: str | None
    language: str
    workspace: str | None
    clean: bool
    packages: tuple[str, ...]
    why: str = ""


class CopySession(_WorkerFrame, frozen=True):
    """Open `n` copies of the memory of a session: all or none."""

    session: str
    n: int
    reseed: bool


class ChangeSession(_WorkerFrame, frozen=True):
    """Save the files of a session, freeze it, or end it; or only ask for the outcome of its last save,
    or for the order of its executions."""

    session: str
    what: Change


class MakeRoom(_WorkerFrame, frozen=True):
    """Pause or end the session that was idle longest, or without `is_done` say since when it is."""

    is_done: bool


class GetState(_WorkerFrame, frozen=True):
    """Ask what the cells do and use now."""


class ReplaceFiles(_WorkerFrame, frozen=True):
    """Replace the files that cells of a language see at a place."""

    language: str
    place: str
    files: dict[str, bytes]


WorkerRequest = (
    frames.ClientRequest | Perform | GetStderr | OpenHere
    | CopySession | ChangeSession | MakeRoom | GetState
    | ReplaceFiles
)  # fmt: skip


# worker -> sandbox, on the control socket


class Started(_WorkerFrame, frozen=True):
    """The worker has its launcher, and takes connections; `python` starts a Python in cells of an
    image."""

    python: tuple[str, ...]


class OpenUpcalls(_WorkerFrame, frozen=True):
    """A connection for upcalls comes with this frame."""


FromWorker = Started | OpenUpcalls | frames.Failure


# worker -> sandbox, on a connection for upcalls: one at a time


class UseTool(_WorkerFrame, frozen=True):
    """Call a tool for the program of an execution."""

    execution_id: str
    number: int  # negative for a call through a door
    name: str
    arguments: bytes
    site: str
    alone: bool


class Note(_WorkerFrame, frozen=True):
    """Append an event to the trail: the arguments of `AuditLog.record`."""

    category: str
    action: str
    about: dict[str, Any]
    span: Span | None


class GetFiles(_WorkerFrame, frozen=True):
    """Ask for the shared files of a language, which ReplaceFiles follows with each change."""

    language: str


class GetEgress(_WorkerFrame, frozen=True):
    """Ask for a socket to the egress process, which `plan` starts if none lives."""

    plan: Plan


Upcall = UseTool | Note | GetFiles | GetEgress


# sandbox -> worker: the answer to an upcall


class ToolAnswered(_WorkerFrame, frozen=True):
    """The answer of a tool; None if the program is to be stopped without one."""

    answer: Answer | None


class Noted(_WorkerFrame, frozen=True):
    """Whether the trail kept the event."""

    kept: bool


class SharedFilesGiven(_WorkerFrame, frozen=True):
    """The files by place."""

    places: dict[str, dict[str, bytes]]


class EgressGiven(_WorkerFrame, frozen=True):
    """The socket comes with this frame."""


UpcallAnswer = ToolAnswered | Noted | SharedFilesGiven | EgressGiven | frames.Failure


# worker -> sandbox: replies beside those of a daemon


class CellsState(_WorkerFrame, frozen=True):
    state: SupervisorsState


class FilesReplaced(_WorkerFrame, frozen=True):
    """The errno of the failure, 0 without one."""

    errno: int = 0


class StreamsOpened(_WorkerFrame, frozen=True):
    """Before the reply: the descriptors of these names, in this order, come with this frame."""

    names: tuple[str, ...]
    has_network: bool


class Copied(_WorkerFrame, frozen=True):
    """The copies of a session, or why its memory cannot be copied."""

    sessions: tuple[frames.Opened, ...]
    why: str = ""


class SessionChanged(_WorkerFrame, frozen=True):
    """The outcome of the last save of a session, and whether it stands still."""

    kept: KeptWorkspace | None
    is_frozen: bool = False
    order: tuple[str, ...] = ()  # ids of the executions, if they were asked for


class RoomMade(_WorkerFrame, frozen=True):
    """Whether a session gave up its cell; or since when (time.monotonic) the longest idle one is."""

    is_done: bool
    idle_since: float | None = None


WorkerReply = (
    frames.Reply | CellsState | FilesReplaced | StreamsOpened | Copied | SessionChanged | RoomMade
)  # fmt: skip
