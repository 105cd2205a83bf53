"""The parameters of public methods: one frozen struct for each signature.

A public method packs its arguments by `of(locals())`, and all code behind it passes the struct on.  So
a new parameter is added to the public signatures, to the struct and to the code that uses it.  A test
compares the names, types and defaults of the signatures with those of the structs.  `requirements` of a
signature is another name for `packages`, and no struct has it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON

FileContent = str | bytes | os.PathLike[str]  # the last: a file or folder of the host


def _with_content(files: Mapping[str, FileContent]) -> Mapping[str, FileContent]:
    """Return `files` with the content of the host's files in place of their paths."""
    if not any(isinstance(each, os.PathLike) for each in files.values()):
        return files
    from .host_files import content_of_paths  # seldom needed

    return content_of_paths(files)


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one public method."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the parameters that are among `given`, the `locals()` of a public method."""
        named = {name: given[name] for name in cls.__struct_fields__}
        if requirements := given.get("requirements"):
            if named["packages"]:
                raise PolicyError("requirements: another name for packages, give one of the two")
            named["packages"] = requirements
        if (files := named.get("files")) and isinstance(files, Mapping):
            named["files"] = _with_content(files)
        return cls(**named)


class CallArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `execute`, `aexecute`, `start` and `Runs.start`, from the caller to the request.

    Sandboxes, sessions, durable runs, the daemon and the MCP server all pass this struct on.
    """

    code: str | bytes
    language: str = PYTHON
    stdin: str | bytes | None = None
    inputs: Mapping[str, Any] | None = None
    files: Mapping[str, FileContent] | None = None
    env: Mapping[str, str] | None = None
    timeout: float | None = None
    collect: Sequence[str] = ()
    workspace: str | None = None
    clean: bool = False
    trace_id: str | None = None
    plain: bool = False
    arguments: Sequence[str] = ()
    filename: str | None = None
    packages: Sequence[str] = ()


class CommandArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `run` and `arun`."""

    command: Sequence[str] | str
    shell: bool = False
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | bytes | None = None
    timeout: float | None = None
    trace_id: str | None = None
    packages: Sequence[str] = ()


class TerminalArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Session.terminal` and `Session.aterminal`."""

    command: Sequence[str] | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    rows: int = 24
    columns: int = 80
    trace_id: str | None = None


class SessionArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox.session`."""

    id: str | None = None
    language: str = PYTHON
    workspace: str | None = None
    clean: bool = False
    packages: Sequence[str] = ()


class ProgramArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox.program`."""

    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    files: Mapping[str, FileContent] | None = None
    trace_id: str | None = None
