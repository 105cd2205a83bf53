"""Every frame between a client and the daemon, one type each (README.md: who says what, and when).

To the daemon a client's bytes are as hostile as a cell's: counts are limited in the types, so that no
frame decodes to much more than its own size; sizes are limited before.
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

VERSION = 2
_MANY = 65_536
_Few = Annotated[str, Meta(max_length=1024)]
_Name = Annotated[str, Meta(max_length=_MANY)]


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    pass


# client -> daemon: Hello once, then one request at a time, and Cancel while it runs


class Hello(_Frame, frozen=True):
    """The first frame: which protocol, and which of the daemon's policies; without a name the first."""

    version: int
    policy: _Few = ""


class ExecuteArguments(_Frame, frozen=True):
    """The arguments of `execute` beside the program; `inputs` is a JSON object."""

    stdin: bytes | None = None
    inputs: bytes | None = None
    files: Annotated[tuple[InputFile, ...], Meta(max_length=_MANY)] = ()
    env: Annotated[dict[str, str], Meta(max_length=_MANY)] = {}
    timeout: float | None = None
    trace_id: _Name | None = None
    collect: Annotated[tuple[str, ...], Meta(max_length=_MANY)] = ()
    plain: bool = False


class Execute(_Frame, frozen=True):
    """Run a program, in a session or in a cell of its own.  `text`: it was given as text."""

    code: bytes
    text: bool
    language: _Few
    given: ExecuteArguments
    session: _Few = ""  # a key that Opened told
    stream: bool = False  # tell output as it comes


class Cancel(_Frame, frozen=True):
    """End what runs; harmless if nothing does."""


class Describe(_Frame, frozen=True):
    """Tell the policy and what it came to."""


class Validate(_Frame, frozen=True):
    """Judge Python source; text as UTF-8, lone surrogates passed on."""

    code: bytes


class AwaitSettled(_Frame, frozen=True):
    """Say when the pool is full and nothing of any past call is left."""


class SessionArguments(_Frame, frozen=True):
    """The arguments of `session` beside its id."""

    language: _Few = PYTHON


class OpenSession(_Frame, frozen=True):
    """Find or open a session."""

    id: _Few | None
    given: SessionArguments


class CheckSession(_Frame, frozen=True):
    """Tell whether a session is lost."""

    session: _Few


class ListSessionFiles(_Frame, frozen=True):
    session: _Few


class Download(_Frame, frozen=True):
    session: _Few
    path: _Name


class TakeSnapshot(_Frame, frozen=True):
    session: _Few


class ForkSession(_Frame, frozen=True):
    session: _Few


class CloseSession(_Frame, frozen=True):
    """End a session."""

    session: _Few


ClientRequest = (
    Execute | Cancel | Describe | Validate | AwaitSettled | OpenSession | CheckSession
    | ListSessionFiles | Download | TakeSnapshot | ForkSession | CloseSession
)  # fmt: skip


# daemon -> client: Welcome to Hello; to a request any number of Output, then one other frame


class Welcome(_Frame, frozen=True):
    """The policy is there."""

    version: int
    pid: int
    request_bytes: int  # the longest frame that will be read


class Output(_Frame, frozen=True):
    stream: Literal["stdout", "stderr"]
    data: bytes


class Executed(_Frame, frozen=True):
    """What came of a program; its value apart, as JSON, which knows larger numbers."""

    result: SandboxResult
    value: bytes


class Description(_Frame, frozen=True):
    policies: tuple[str, ...]
    policy: Policy
    plan: Plan


class Validated(_Frame, frozen=True):
    passes: bool
    finding: str | None


class Opened(_Frame, frozen=True):
    """A session: `session` is the key that requests name it by.  Another one of the same id that is
    opened after this one was lost has another key."""

    session: str
    id: str
    diverged: tuple[int, ...] = ()
    language: str = PYTHON


class LostReason(_Frame, frozen=True):
    """Why a session is lost; empty while it lives."""

    lost: str


class Files(_Frame, frozen=True):
    files: tuple[WorkspaceFile, ...]


class Content(_Frame, frozen=True):
    data: bytes


class Done(_Frame, frozen=True):
    """Nothing else is to be said."""


class Failure(_Frame, frozen=True):
    """What the request raised: a class of policies/errors.py, by name."""

    kind: str
    message: str
    hint: str = ""
    gaps: tuple[tuple[str, str], ...] = ()
    cell_began: bool = False


Reply = (
    Welcome | Output | Executed | Description | Validated | Opened | LostReason | Files | Content | Done
    | Failure
)  # fmt: skip
