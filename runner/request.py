"""`Request`: one program and its inputs, checked, as a supervisor or a daemon gets them."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..policies.policy import Limits
from .messages import Become, InputFile

if TYPE_CHECKING:  # a client of a daemon makes requests, and watches no cells
    from .cell_network import CellNetwork
    from .watching.calls import OnCall, Orphans


def new_execution_id() -> str:
    return os.urandom(16).hex()  # never from a clock: clones collide (fcvm#719)


class Streams(NamedTuple):
    """What the receiver of a long-lived program gets: two descriptors, which it closes, a function
    that returns the program's standard error so far, and the cell's network, which it closes too; None
    if the policy has no loopback."""

    stdin: int
    stdout: int
    stderr: Callable[[], str]
    network: "CellNetwork | None" = None


class LongLivedProgram(NamedTuple):
    """A long-lived program instead of source code: the command, and the function that receives its
    streams, once."""

    frame: Become
    on_streams: Callable[[Streams], None]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, checked: the program and its inputs."""

    code: str
    inputs: bytes = b"{}"  # a JSON object
    files: tuple[InputFile, ...] = ()
    given: frozenset[str] = frozenset()  # paths of files that are collected only if they changed
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
    arguments: tuple[str, ...] = ()
    filename: str = ""  # of the program, below /workspace; empty if it is no file
    plain: bool = False  # the value of a Python program must be JSON
    execution_id: str = msgspec.field(default_factory=new_execution_id)


class RequestForm(msgspec.Struct, frozen=True):
    """The bytes for the control channel, the bytes for standard input, and the line that is sent
    there again if the program is interrupted."""

    program: bytes = b""
    stdin: bytes = b""
    ending: bytes = b""
