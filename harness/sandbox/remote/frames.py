"""Frames between a client and the daemon, one type each (harness/servers/daemon/README.md: which side
sends which, and when).

The daemon treats a client's bytes as hostile, like a cell's.  The types limit counts, so that no frame
decodes to much more than its own size; the receiver limits sizes before it decodes.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ....policies.languages import PYTHON
from ....policies.plan import Plan
from ....policies.policy import Policy
from ....runner.messages import InputFile
from ....runner.result import SandboxResult
from ....runner.workspace import WorkspaceFile

VERSION = 6
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
    """The arguments of `execute` beside the program; `inputs` is a JSON object."""

    stdin: bytes | None = None
    inputs: bytes | None = None
    files: Annotated[tuple[InputFile, ...], Meta(max_length=_MANY)] = ()
    env: Annotated[dict[str, str], Meta(max_length=_MANY)] = {}
    timeout: float | None = None
    trace_id: _Name | None = None
    collect: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    plain: bool = False
    arguments: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    filename: str | None = None
    packages: _Packages = ()


class Execute(_DaemonFrame, frozen=True):
    """Run a program in a session or in a cell of its own.  `text`: the caller passed str, not bytes."""

    code: bytes
    text: bool
    language: _Few
    given: ExecuteArguments
    session: _Few = ""  # the key from Opened
    stream: bool = False  # send output while the program runs


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


class GetStatus(_DaemonFrame, frozen=True):
    """Ask what the daemon does; another user than the daemon's is told of its own tenant
    only."""


ClientRequest = (
    Execute | Cancel | Describe | Validate | AwaitSettled | OpenSession | CheckSession
    | ListSessionFiles | Download | TakeSnapshot | ForkSession | BranchSession
    | PauseSession | ResumeSession | DiscardPaused | ExtendSession | ExposePort | ClosePort
    | OpenTerminal | CloseSession | GetStatus
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
    """A terminal, whose master comes beside this frame, and its program, as the cell tells of it."""

    id: int
    pid: int
    exit_code: int | None


class ServedPolicyStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the cells of one policy do now, those of all tenants together."""

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
    """What a tenant does now; a limit is None where it has no such quota."""

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
    """What the daemon does.  `refused`: requests that a limit refused, by tenant and limit."""

    version: str
    pid: int
    uptime_seconds: float
    configuration: str  # the path of its file, if it has one
    reloads: int
    reload_error: str  # why the last reload had no effect
    retired: int  # policies of earlier configurations that sessions still use
    policies: tuple[ServedPolicyStatus, ...]
    tenants: tuple[TenantStatus, ...]
    refused: tuple[tuple[str, str, int], ...]


class Done(_DaemonFrame, frozen=True):
    """The request succeeded; there is nothing to return."""


class Failure(_DaemonFrame, frozen=True):
    """The exception that the request raised: a class of policies/errors.py, by name."""

    kind: str
    message: str
    hint: str = ""
    gaps: tuple[tuple[str, str], ...] = ()
    cell_began: bool = False
    limit: str = ""  # of a SessionExpired, or a QuotaExceeded
    differs: tuple[str, ...] = ()  # of a PauseDiffers


Reply = (
    Welcome | OutputChunk | Executed | Description | Validated | Opened | OpenedBranches | Paused
    | LostReason | Files | Content
    | PortExposed | TerminalOpened | DaemonStatus | Done | Failure
)  # fmt: skip
