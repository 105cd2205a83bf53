"""`Request`: one program and its inputs, checked, as a supervisor or a daemon gets them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...policies.policy import Limits
from ..concurrency import NEVER
from ..messages import Become, InputFile, new_execution_id

if TYPE_CHECKING:  # a client of a daemon makes requests and never watches cells
    from ..cells.cell_network import CellNetwork
    from ..watching.open_calls import OnCall, Orphans


OnOutput = Callable[[str, bytes], None]  # gets the name of a stream and what came


class Streams(NamedTuple):
    """The arguments of a long-lived program's receiver: two descriptors, which it closes, a function
    that returns the program's standard error so far, and the cell's network, which it closes too;
    None if the policy has no loopback.  It also closes `process`, a pidfd of the program, and
    `master`, that of its terminal, -1 without one."""

    stdin: int
    stdout: int
    stderr: Callable[[], str]
    network: "CellNetwork | None" = None
    process: int = -1
    master: int = -1


class LongLivedProgram(NamedTuple):
    """A long-lived program instead of source code: the command, and the function that receives its
    streams, once.  `terminal`: rows and columns of a terminal that it gets for its streams."""

    frame: Become
    on_streams: Callable[[Streams], None]
    terminal: tuple[int, int] | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, checked: the program and its inputs."""

    code: str
    inputs: bytes = b"{}"  # a JSON object
    files: tuple[InputFile, ...] = ()
    given: frozenset[str] = frozenset()  # paths of given files, collected only if they changed
    environment: dict[str, str] = {}
    stdin: bytes | None = None
    limits: Limits = Limits()
    trace_id: str | None = None
    collect: tuple[str, ...] = ()  # globs of files below /workspace
    tools: dict[str, tuple[str, ...]] = {}  # callable tools: name -> names of parameters
    on_call: "OnCall | None" = None  # answers tool calls
    orphans: "Orphans | None" = None  # counts the calls that outlive their programs
    sites: bool = False  # calls tell where in the program they stand
    program: LongLivedProgram | None = None  # replaces `code`, which then only describes it
    become: Become | None = None  # a command instead of `code`, which it is made of
    # gets the streams, which nothing captures then
    on_streams: Callable[[Streams], None] | None = None
    arguments: tuple[str, ...] = ()
    filename: str = ""  # path of the program below /workspace; empty if it is not a file
    plain: bool = False  # the value of a Python program must be JSON
    on_output: OnOutput | None = None  # called with output as it comes; the program waits for it
    cancel: int = NEVER  # a descriptor; the execution ends when it becomes readable
    execution_id: str = msgspec.field(default_factory=new_execution_id)


class RequestForm(msgspec.Struct, frozen=True):
    """The bytes for the control channel, the bytes for standard input, and the line that is sent
    there again if the program is interrupted."""

    program: bytes = b""
    stdin: bytes = b""
    ending: bytes = b""
