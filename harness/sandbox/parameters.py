"""The parameters of public methods: one frozen struct for each signature.

A public method packs its arguments by `of(locals())`, and all code behind it passes the struct on.  So
a new parameter is added to the public signatures, to the struct and to the code that uses it.  A test
compares the names, types and defaults of the signatures with those of the structs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from ...policies.languages import PYTHON


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one public method."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the parameters that are among `given`, the `locals()` of a public method."""
        return cls(**{name: given[name] for name in cls.__struct_fields__})


class CallArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `execute`, `aexecute`, `start` and `Runs.start`, from the caller to the request.

    Sandboxes, sessions, durable runs, the daemon and the MCP server all pass this struct on.
    """

    code: str | bytes
    language: str = PYTHON
    stdin: str | bytes | None = None
    inputs: Mapping[str, Any] | None = None
    files: Mapping[str, str | bytes] | None = None
    env: Mapping[str, str] | None = None
    timeout: float | None = None
    collect: Sequence[str] = ()
    workspace: str | None = None
    clean: bool = False
    trace_id: str | None = None
    plain: bool = False


class CommandArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `run` and `arun`."""

    command: Sequence[str] | str
    shell: bool = False
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | bytes | None = None
    timeout: float | None = None
    trace_id: str | None = None


class SessionArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox.session`."""

    id: str | None = None
    language: str = PYTHON
    workspace: str | None = None
    clean: bool = False


class ProgramArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox.program`."""

    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    files: Mapping[str, str | bytes] | None = None
    trace_id: str | None = None
