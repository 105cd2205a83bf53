"""Requests made of the arguments of `execute` and `program`, which are checked here."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ....policies.argument_checks import check_names, check_variable
from ....policies.errors import PolicyError
from ....policies.languages import SPOKEN, language_called, language_names
from ....policies.languages.table import LanguageTable, language_table
from ....policies.policy import Limits, Policy
from ....runner.cells.workspace import MOST_LEVELS, MOST_PATH_BYTES, Executable
from ....runner.messages import Become, InputFile
from ....runner.requests.request import LongLivedProgram, Request, Streams
from ....runner.requests.result import CompileResult, Usage, Violation
from ..checks import MAX_FILES, check_flag, check_whole, with_timeout
from ..parameters import CallArguments, ProgramArguments

_MOST_ROWS = 65535  # rows, and columns: unsigned short in ioctl_tty(2)


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a command.

    exit_code: its own; 128 and the number of the signal that killed it; 127 if there is no such
        program, 126 if it cannot be executed, 124 if it took too long, 137 if its cell was killed
    stdout, stderr: its output as text; bytes that are not UTF-8 are U+FFFD
    timed_out: it took longer than `timeout`, or than the policy allows
    error: why it did not end by itself; None if it did
    usage, violations, truncated, notices, hints, execution_id: those of the SandboxResult
    """

    exit_code: int
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    error: str | None = None
    usage: Usage = Usage()
    violations: tuple[Violation, ...] = ()
    truncated: dict[str, int] = {}
    notices: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    execution_id: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.exit_code == 0

    def for_model(self) -> "CommandResult":
        """Return the text for a model, as `SandboxResult.for_model` does."""
        return self


MAX_SOURCE_BYTES = 64 * 1024 * 1024
_MOST_ARGUMENTS = 10_000
# Limits of execve(2): MAX_ARG_STRLEN with the NUL, and for all arguments half of a quarter of the 8 MiB
# stack.
_ARGUMENT_BYTES, _ARGUMENTS_BYTES = 131_071, 1024 * 1024
_NONE: frozenset[str] = frozenset()
_NAME_BYTES = 255  # bytes in one component of a path (NAME_MAX, limits.h)


class Rejected(Exception):  # noqa: N818 - it becomes a result
    """The program cannot be run; the message says why."""


def make_request(given: CallArguments, limits: Limits) -> Request:
    """Return the request of a call; its `language` and its workspace are not part of that.

    Raises Rejected for a program that cannot be run, PolicyError for invalid arguments.
    """
    options: dict[str, Any] = {}  # most calls have no options and pay nothing
    if given.inputs is not None:
        options["inputs"] = _inputs(_mapping("inputs", given.inputs))
    if given.files is not None:
        files = _files(_mapping("files", given.files), limits.workspace_bytes)
        options |= {"files": files, "given": frozenset([file.path for file in files])}
    if given.env is not None:
        options["environment"] = check_environment(given.env)
    if given.stdin is not None:
        options["stdin"] = as_bytes("stdin", given.stdin)
    if given.timeout is not None:
        limits = with_timeout(limits, given.timeout)
    if given.cpu_seconds is not None:
        limits = with_timeout(limits, given.cpu_seconds, "cpu_seconds", "cpu_seconds")
    if given.trace_id is not None:
        options["trace_id"] = _trace_id(given.trace_id)
    if given.collect != ():
        options["collect"] = check_names("collect", given.collect)
    if given.plain is not False:
        options["plain"] = check_flag("plain", given.plain)
    if given.arguments != ():
        options["arguments"] = _arguments(given.arguments)
    if given.filename is not None:
        options["filename"] = check_file_name(given.filename, "filename")
    return Request(
        code=_source(given.code), limits=limits, on_output=given.on_output, cancel=given.cancel,
        on_streams=given.on_streams,
        **options,
    )  # fmt: skip


def make_program(
    given: ProgramArguments,
    policy: Policy,
    environment: Mapping[str, str],
    on_streams: Callable[[Streams], None],
    cancel: int,
) -> Request:
    """Return the request of `Sandbox.program`; its variables are `environment` and `env`.

    Raises PolicyError for invalid arguments, or a policy that allows no subprocesses.
    """
    if not policy.processes.subprocesses:
        hint = "set processes.subprocesses, and name the program in processes.execute"
        raise PolicyError(f"program: the policy {policy.name!r} allows no subprocesses", hint)
    refuse_user(given.user)
    arguments = tuple(_argument("argv", each) for each in check_names("argv", given.argv))
    files = _files(_mapping("files", given.files), policy.limits.workspace_bytes)
    frame = Become(
        (_program("argv[0]", arguments[0] if arguments else ""), *arguments[1:]),
        {**environment, **check_environment(given.env)},
        _absolute("cwd", "/workspace" if given.cwd is None else given.cwd),
        files,
    )
    import shlex  # seldom needed

    return Request(
        code=shlex.join(arguments), files=files, limits=policy.limits,
        trace_id=_trace_id(given.trace_id), on_output=given.on_output, cancel=cancel,
        program=LongLivedProgram(frame, on_streams, _terminal_size(given, policy)),
    )  # fmt: skip


def refuse_user(user: str | None) -> None:
    """Raise PolicyError for a command that is to be of another user, without an image."""
    if user is not None:
        raise PolicyError(f"user: needs an image: other cells have one id, got {user!r}")


def _terminal_size(given: ProgramArguments, policy: Policy) -> tuple[int, int] | None:
    if given.terminal is None:
        return None
    if not policy.processes.terminal:
        raise PolicyError(
            f"terminal: the policy {policy.name!r} allows none", "set processes.terminal"
        )
    rows, columns = given.terminal
    return check_size(rows, columns)


def check_size(rows: object, columns: object) -> tuple[int, int]:
    """Return the size of a terminal; raises PolicyError for an invalid one."""
    return check_whole("rows", rows, 1, _MOST_ROWS), check_whole("columns", columns, 1, _MOST_ROWS)


def _program(name: str, path: object) -> str:
    """Return an absolute path, or a name that is looked for in PATH."""
    if isinstance(path, str) and path and "/" not in path:
        return _argument(name, path)
    return _absolute(name, path)


def _absolute(name: str, path: object) -> str:
    if not (isinstance(path, str) and path.startswith("/")):
        raise PolicyError(f"{name}: must be an absolute path, as the cell sees it, got {path!r}")
    return _argument(name, path)


def _argument(name: str, text: str) -> str:
    if b"\0" in as_bytes(name, text):
        raise PolicyError(f"{name}: {text!r} holds a NUL character")
    return text


def _trace_id(trace_id: object) -> str | None:
    if trace_id is not None and not isinstance(trace_id, str):
        raise PolicyError(f"trace_id: must be text, got {trace_id!r}")
    return trace_id


def _mapping(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise PolicyError(f"{name}: must be a mapping, got {type(given).__name__}")
    return given or {}


def check_language(language: str, table: Callable[[], "LanguageTable"] = language_table) -> str:
    """Return the name of the language that `language`, possibly an alias, stands for: one with
    sessions, or one of the table.

    Raises Rejected for an unknown one.
    """
    if isinstance(language, str) and language in SPOKEN:
        return language
    found = language_called(language) if isinstance(language, str) else None
    if found is None and isinstance(language, str) and (entry := table().called(language)):
        return entry.name
    if found is None:
        from ....policies.argument_checks import did_you_mean  # only for errors

        known = (*language_names(), *table().names())
        meant = did_you_mean(language, known)
        raise Rejected(
            f"unknown language {language!r}: this version runs {', '.join(known)}"
            + (f"; {meant}" if meant else "")
        )
    return found


def _source(code: str | bytes) -> str:
    if not isinstance(code, str | bytes):
        raise PolicyError(f"code: must be text or bytes, got {type(code).__name__}", _content(code))
    text = _decode(code).removeprefix("\ufeff")  # a byte order mark, as python(1) skips it
    if not text.strip():
        raise Rejected("the source is empty")
    if "\0" in text:
        raise Rejected("the source holds a NUL character")
    if len(text) > MAX_SOURCE_BYTES:
        raise Rejected(f"the source is longer than {MAX_SOURCE_BYTES} characters")
    return text


def _decode(code: str | bytes) -> str:
    try:
        if isinstance(code, bytes):
            return code.decode()
        code.encode()
    except UnicodeDecodeError as error:
        raise Rejected(f"the source is not UTF-8: byte {error.start}") from None
    except UnicodeEncodeError as error:
        raise Rejected(f"the source holds a lone surrogate at character {error.start}") from None
    return code


def _inputs(inputs: Mapping[str, Any]) -> bytes:
    if not inputs:
        return b"{}"
    for name in inputs:
        if not (isinstance(name, str) and name.isidentifier()):
            raise PolicyError(f"inputs: {name!r} is not a Python identifier")
    import json  # seldom needed

    try:
        return json.dumps(dict(inputs), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PolicyError(f"inputs: not JSON: {error}") from None


def _arguments(given: Sequence[str]) -> tuple[str, ...]:
    if not given:
        return ()
    if not (isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)):
        raise PolicyError(f"arguments: must be a list of text, got {repr(given)[:200]}")
    if len(given) > _MOST_ARGUMENTS:
        raise PolicyError(f"arguments: must be at most {_MOST_ARGUMENTS}, got {len(given)}")
    sizes = [len(as_bytes("arguments", _argument("arguments", each))) for each in given]
    if max(sizes) > _ARGUMENT_BYTES or sum(sizes) > _ARGUMENTS_BYTES:
        raise PolicyError(
            f"arguments: must have at most {_ARGUMENT_BYTES} bytes each and {_ARGUMENTS_BYTES} "
            f"together, got {max(sizes)} and {sum(sizes)}",
            "pass large texts as inputs, files or stdin",
        )
    return tuple(given)


def check_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables of `env`; raises PolicyError for an invalid one."""
    variables = dict(_mapping("env", env))
    for name, value in variables.items():
        check_variable(name, value, "env")
    return variables


def _files(files: Mapping[str, str | bytes], limit: int) -> tuple[InputFile, ...]:
    if not files:
        return ()
    checked = tuple(map(_file, files, files.values()))
    _check_together(checked, limit)
    return checked


def source_files(files: Mapping[str, Any]) -> tuple[InputFile, ...]:
    """Return the files from which a program is compiled; raises PolicyError for invalid ones."""
    return _files(_mapping("files", files), MAX_SOURCE_BYTES)


def with_files(request: Request, files: Mapping[str, bytes]) -> Request:
    """Return `request` with more files; where both have a path, the file of `request` stays.

    Raises PolicyError if together they do not fit into the workspace of a cell.
    """
    given = {file.path: file for file in map(_file, files, files.values())}
    given.update((file.path, file) for file in request.files)
    together = tuple(given.values())
    _check_together(together, request.limits.workspace_bytes)
    return msgspec.structs.replace(request, files=together)


def _file(name: str, data: str | bytes) -> InputFile:
    content = as_bytes(f"files: {name!r}", data)
    return InputFile(check_file_name(name), bytes(content), isinstance(data, Executable))


def _check_together(files: tuple[InputFile, ...], limit: int) -> None:
    if len(files) > MAX_FILES:
        raise PolicyError(f"files: {len(files)} files, at most {MAX_FILES} are possible")
    check_tree({file.path for file in files})
    if sum(len(file.data) for file in files) > limit:
        raise PolicyError(
            f"files: together larger than the workspace, which has {limit} bytes",
            "raise limits.workspace_bytes of the policy (workspace_mb=), or show files without a copy: "
            "filesystem.read (allowed_paths=)",
        )


def check_tree(names: Collection[str]) -> None:
    """Raise PolicyError if one of these files would have to be a directory too."""
    for name in names:
        if any(parent in names for parent in _parents(name)):
            raise PolicyError(f"files: a directory in {name!r} is also given as a file")


def check_file_name(name: str, where: str = "files") -> str:
    """Return `name` if it is a plain relative path below the workspace; `where` names the parameter.

    The bounds are those within which the host lists a workspace (runner/cells/workspace.py), so every
    file that is saved can be put into a cell again.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise PolicyError(
            f"{where}: {name!r} is not a plain relative path: no empty parts, `.` or `..`"
        )
    try:
        too_long = len(name.encode()) > MOST_PATH_BYTES
    except UnicodeEncodeError:
        raise PolicyError(f"{where}: {name!r} holds a lone surrogate") from None
    if too_long or any(len(part.encode()) > _NAME_BYTES for part in parts):
        raise PolicyError(
            f"{where}: {name[:80]!r}... is too long",
            f"at most {MOST_PATH_BYTES} bytes, and {_NAME_BYTES} between two slashes",
        )
    if len(parts) > MOST_LEVELS + 1:
        raise PolicyError(f"{where}: {name[:80]!r}... has more than {MOST_LEVELS} levels")
    return name


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def as_bytes(name: str, data: object) -> bytes:
    """Return content as bytes; raises PolicyError naming the invalid argument."""
    if not isinstance(data, str | bytes):
        raise PolicyError(
            f"{name}: must be text or bytes, got {type(data).__name__}", _content(data)
        )
    try:
        return data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise PolicyError(f"{name}: holds a lone surrogate") from None


def _content(given: object) -> str:
    return "pathlib.Path.read_bytes returns the content" if isinstance(given, os.PathLike) else ""


def cpu_seconds_of(compiled: CompileResult | None, *usages: Usage) -> float:
    """Return the CPU time of a call: of its programs, and of its compiler if that ran."""
    if compiled and not compiled.cached:
        usages = (*usages, compiled.usage)
    return sum(each.cpu_user_seconds + each.cpu_system_seconds for each in usages)
