"""Frames between a client and the daemon, one type each (harness/servers/daemon/README.md: which side
sends which, and when).

The daemon treats a client's bytes as hostile, like a cell's.  The types limit counts, so that no frame
decodes to much more than its own size; the receiver limits sizes before it decodes.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....policies.languages import PYTHON
from ....policies.plan import Plan
from ....policies.policy import Policy
from ....runner.cells.workspace import WorkspaceFile
from ....runner.messages import InputFile
from ....runner.requests.result import CompileResult, SandboxResult
from ..judging.verdicts import Judgement
from .lean_frames import VERSION as VERSION

_MANY = 65_536
_Few = Annotated[str, Meta(max_length=1024)]
_Name = Annotated[str, Meta(max_length=_MANY)]
_Packages = Annotated[tuple[_Few, ...], Meta(max_length=1024)]


class _DaemonFrame(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True
):
    pass


# client -> daemon: Hello once, then one request at a time, and Cancel while it runs


class Hello(_DaemonFrame, frozen=True):
    """The first frame: the protocol's version, and the name of one of the daemon's policies; an empty
    name selects the first."""

    version: int
    policy: _Few = ""


class ExecuteArguments(_DaemonFrame, frozen=True):
    """The arguments of `execute` without the program; `inputs` is a JSON object."""

    stdin: bytes | None = None
    inputs: bytes | None = None
    files: Annotated[tuple[InputFile, ...], Meta(max_length=_MANY)] = ()
    env: Annotated[dict[str, str], Meta(max_length=_MANY)] = {}
    timeout: float | None = None
    cpu_seconds: float | None = None
    trace_id: _Name | None = None
    collect: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    plain: bool = False
    arguments: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    filename: str | None = None
    packages: _Packages = ()
    flags: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    sources: Annotated[tuple[InputFile, ...], Meta(max_length=_MANY)] = ()
    compile_timeout: float | None = None


class Execute(_DaemonFrame, frozen=True):
    """Run a program in a session or in a cell of its own.  `text`: the caller passed str, not bytes."""

    code: bytes
    text: bool
    language: _Few
    given: ExecuteArguments
    session: _Few = ""  # the key from Opened
    stream: bool = False  # send output while the program runs


class CompileProgram(_DaemonFrame, frozen=True):
    """Compile a program; `source` is None if it is among the files."""

    source: bytes | None
    language: _Few
    files: Annotated[tuple[InputFile, ...], Meta(max_length=_MANY)] = ()
    flags: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    compile_timeout: float | None = None


class JudgeProgram(_DaemonFrame, frozen=True):
    """Judge a program by its cases; `given` has the arguments of `judge` (judge_frames.py)."""

    given: bytes


class Cancel(_DaemonFrame, frozen=True):
    """Cancel the running request; without effect if none runs."""


class Describe(_DaemonFrame, frozen=True):
    """Ask for the policy and its plan."""


class Validate(_DaemonFrame, frozen=True):
    """Validate Python source: UTF-8, lone surrogates included."""

    code: bytes


class AwaitSettled(_DaemonFrame, frozen=True):
    """Reply once the pool is full and no past call has left anything behind."""


class OpenSession(_DaemonFrame, frozen=True):
    """Return the session of that id, or open one."""

    id: _Few | None
    language: _Few = PYTHON
    packages: _Packages = ()


class CheckSession(_DaemonFrame, frozen=True):
    """Ask whether a session is lost."""

    session: _Few


class ListSessionFiles(_DaemonFrame, frozen=True):
    session: _Few


class Download(_DaemonFrame, frozen=True):
    session: _Few
    path: _Name


class TakeSnapshot(_DaemonFrame, frozen=True):
    session: _Few


class ForkSession(_DaemonFrame, frozen=True):
    session: _Few


class BranchSession(_DaemonFrame, frozen=True):
    """Open `n` sessions that go on from the state of another one: all or none."""

    session: _Few
    n: Annotated[int, Meta(ge=1, le=8)] = 1
    reseed: bool = False
    replay: bool = True


class PauseSession(_DaemonFrame, frozen=True):
    """Keep the state of a session on the daemon's disk, and end the session."""

    session: _Few


class ResumeSession(_DaemonFrame, frozen=True):
    """Open the session that was paused."""

    token: _Few


class DiscardPaused(_DaemonFrame, frozen=True):
    """Remove the state of a paused session."""

    token: _Few


class ExtendSession(_DaemonFrame, frozen=True):
    session: _Few
    seconds: float


class ExposePort(_DaemonFrame, frozen=True):
    """Have the daemon listen for a port of a session; `path` is absolute."""

    session: _Few
    port: int
    path: _Name | None = None
    host_port: int | None = None


class ClosePort(_DaemonFrame, frozen=True):
    port: _Few  # the key from PortExposed


class OpenTerminal(_DaemonFrame, frozen=True):
    """Open a terminal in a session.  The request goes on, and the session is in use, until the client
    sends anything or no program has the terminal open."""

    session: _Few
    command: Annotated[tuple[_Name, ...], Meta(max_length=_MANY)] | None = None
    cwd: _Name | None = None
    env: Annotated[dict[str, str], Meta(max_length=_MANY)] = {}
    rows: int = 24
    columns: int = 80
    trace_id: _Name | None = None


class CloseSession(_DaemonFrame, frozen=True):
    """End a session."""

    session: _Few


class RunOnProject(_DaemonFrame, frozen=True):
    """Run `cellwright exec` with these arguments, directory and environment in the open cell of the
    project; `terminal` is the size of one.  Only for the daemon's own user, whose files it shows."""

    arguments: Annotated[tuple[bytes, ...], Meta(max_length=_MANY)]
    cwd: bytes
    environment: Annotated[tuple[bytes, ...], Meta(max_length=_MANY)]  # NAME=VALUE
    terminal: tuple[int, int] | None = None


class GetStatus(_DaemonFrame, frozen=True):
    """Ask for the daemon's state; users other than the daemon's get only their own tenant's."""


ClientRequest = (
    Execute | Cancel | Describe | Validate | AwaitSettled | OpenSession | CheckSession
    | ListSessionFiles | Download | TakeSnapshot | ForkSession | BranchSession
    | PauseSession | ResumeSession | DiscardPaused | ExtendSession | ExposePort | ClosePort
    | OpenTerminal | CloseSession | GetStatus | CompileProgram | JudgeProgram | RunOnProject
)  # fmt: skip


# daemon -> client: Welcome to Hello; to a request any number of OutputChunk, then one other frame


class Welcome(_DaemonFrame, frozen=True):
    """The daemon has the policy and accepts requests."""

    version: int
    pid: int
    request_bytes: int  # the longest frame that the daemon reads


class OutputChunk(_DaemonFrame, frozen=True):
    stream: Literal["stdout", "stderr"]
    data: bytes


class Executed(_DaemonFrame, frozen=True):
    """The result of a program; its value is apart, as JSON, which has larger integers than msgpack."""

    result: SandboxResult
    value: bytes


class Compiled(_DaemonFrame, frozen=True):
    """How a compiler ended; `main` is the name that its language gives to the main source."""

    language: str
    main: str
    result: CompileResult


class Judged(_DaemonFrame, frozen=True):
    judgement: Judgement


class Description(_DaemonFrame, frozen=True):
    policies: tuple[str, ...]
    policy: Policy
    plan: Plan


class Validated(_DaemonFrame, frozen=True):
    passes: bool
    finding: str | None


class Opened(_DaemonFrame, frozen=True):
    """A session: `session` is the key by which requests name it.  A session that is opened under the
    same id after this one was lost has another key."""

    session: str
    id: str
    diverged: tuple[int, ...] = ()
    language: str = PYTHON
    forked_by: Literal["", "memory", "replay"] = ""
    not_copied: str = ""


class OpenedBranches(_DaemonFrame, frozen=True):
    sessions: tuple[Opened, ...]


class Paused(_DaemonFrame, frozen=True):
    token: str


class LostReason(_DaemonFrame, frozen=True):
    """Why a session is lost, empty while it lives, the setting that ended it, if one did, and whether
    it is paused until its next request."""

    lost: str
    expired: str = ""
    paused: bool = False


class Files(_DaemonFrame, frozen=True):
    files: tuple[WorkspaceFile, ...]


class Content(_DaemonFrame, frozen=True):
    data: bytes


class PortExposed(_DaemonFrame, frozen=True):
    """An exposed port: the key that closes it, and where the daemon listens."""

    port: str
    address: str | tuple[str, int]


class TerminalOpened(_DaemonFrame, frozen=True):
    """A terminal, whose master comes with this frame, and its program, as the cell reports it."""

    id: int
    pid: int
    exit_code: int | None


class CommandStarted(_DaemonFrame, frozen=True):
    """A command runs in an open cell; a connection to the cell comes with this frame, and the streams
    (harness/sandbox/projects/open_cell.py)."""


class NoOpenCell(_DaemonFrame, frozen=True):
    """No open cell was used. `why`: how those of the project differ, if there are any.  `closed`: how
    many were closed."""

    why: str = ""
    closed: int = 0


class ServedPolicyStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The current state of one policy's cells, of all tenants together."""

    name: str
    ready: int
    wanted: int
    running: int
    waiting: int
    sessions: int
    frozen: int
    memory_bytes: int | None
    cpu_seconds: float | None


class TenantStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The current state of a tenant; a limit is None if it has no such quota."""

    name: str
    connections: int
    calls: int
    most_calls: int | None
    waiting: int
    sessions: int
    most_sessions: int | None
    cpu_seconds_left: float | None
    cpu_seconds_per_minute: float | None


class DaemonStatus(_DaemonFrame, frozen=True):
    """The daemon's state. `refused`: requests that a limit refused, by tenant and limit."""

    version: str
    pid: int
    uptime_seconds: float
    configuration: str  # the path of its file, if it has one
    reloads: int
    reload_error: str  # why the last reload failed; empty if it did not
    retired: int  # policies of earlier configurations that sessions still use
    policies: tuple[ServedPolicyStatus, ...]
    tenants: tuple[TenantStatus, ...]
    refused: tuple[tuple[str, str, int], ...]


class Done(_DaemonFrame, frozen=True):
    """The request succeeded; there is nothing to return."""


class Failure(_DaemonFrame, frozen=True):
    """The exception that the request raised: a class of policies/errors.py by name, and its fields."""

    kind: str
    message: str
    hint: str = ""
    fields: tuple[tuple[str, Any], ...] = ()


Reply = (
    Welcome | OutputChunk | Executed | Description | Validated | Opened | OpenedBranches | Paused
    | LostReason | Files | Content
    | PortExposed | TerminalOpened | DaemonStatus | Done | Failure | Compiled | Judged
    | CommandStarted | NoOpenCell
)  # fmt: skip
