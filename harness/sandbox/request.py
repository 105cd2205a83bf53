"""Requests made of the arguments of `execute` and `program`, which are checked here."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import language_called, language_names
from ...policies.policy import Limits, Policy, check_names, check_variable
from ...runner.messages import Become, InputFile
from ...runner.request import LongLivedProgram, Request, Streams
from ...runner.workspace import MOST_LEVELS, MOST_PATH_BYTES, Executable
from .checks import MAX_FILES, check_flag, with_timeout
from .parameters import CallArguments, ProgramArguments

MAX_SOURCE_BYTES = 64 * 1024 * 1024
# Languages of other sandboxes, and the command of bash that runs a program of each.
_COMPILED = {
    "c": "gcc main.c -o main && ./main",
    **dict.fromkeys(("cpp", "c++"), "g++ main.cpp -o main && ./main"),
    "java": "javac Main.java && java Main", "go": "go run main.go",
    "rust": "rustc main.rs && ./main", "perl": "perl main.pl", "php": "php main.php",
    "lua": "lua main.lua",
}  # fmt: skip
_BY_COMMANDS = (
    'pass its source in files= and run it with the policy "workshop" as a program of bash: {}'
)
_MOST_ARGUMENTS = 10_000
# What execve(2) takes: MAX_ARG_STRLEN with the NUL, and half of a stack of 8 MiB / 4 for all.
_ARGUMENT_BYTES, _ARGUMENTS_BYTES = 131_071, 1024 * 1024
_NONE: frozenset[str] = frozenset()
_NAME_BYTES = 255  # in one component of a path (NAME_MAX, limits.h)


class Rejected(Exception):  # noqa: N818 - it becomes a result
    """The program cannot be run; the message says why."""


def make_request(given: CallArguments, limits: Limits) -> Request:
    """Return the request of a call; its `language` and its workspace are not part of that.

    Raises Rejected for a program that cannot be run, PolicyError for invalid arguments.
    """
    files = _files(_mapping("files", given.files), limits.workspace_bytes)
    return Request(
        code=_source(given.code),
        inputs=_inputs(_mapping("inputs", given.inputs)),
        files=files,
        given=frozenset([file.path for file in files]) if files else _NONE,
        environment=check_environment(given.env),
        stdin=None if given.stdin is None else as_bytes("stdin", given.stdin),
        limits=with_timeout(limits, given.timeout),
        trace_id=_trace_id(given.trace_id),
        collect=check_names("collect", given.collect),
        plain=check_flag("plain", given.plain),
        arguments=_arguments(given.arguments),
        filename="" if given.filename is None else check_file_name(given.filename, "filename"),
    )


def make_program(
    given: ProgramArguments,
    policy: Policy,
    environment: Mapping[str, str],
    on_streams: Callable[[Streams], None],
) -> Request:
    """Return the request of `Sandbox.program`; its variables are `environment` and `env`.

    Raises PolicyError for invalid arguments, or a policy that allows no subprocesses.
    """
    if not policy.processes.subprocesses:
        hint = "set processes.subprocesses, and name the program in processes.execute"
        raise PolicyError(f"program: the policy {policy.name!r} allows no subprocesses", hint)
    arguments = tuple(_argument("argv", each) for each in check_names("argv", given.argv))
    files = _files(_mapping("files", given.files), policy.limits.workspace_bytes)
    frame = Become(
        (_absolute("argv[0]", arguments[0] if arguments else ""), *arguments[1:]),
        {**environment, **check_environment(given.env)},
        _absolute("cwd", "/workspace" if given.cwd is None else given.cwd),
        files,
    )
    import shlex  # seldom needed

    return Request(
        code=shlex.join(arguments), files=files, limits=policy.limits,
        trace_id=_trace_id(given.trace_id), program=LongLivedProgram(frame, on_streams),
    )  # fmt: skip


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


def check_language(language: str) -> str:
    """Return the name of the language that `language`, possibly an alias, stands for.

    Raises Rejected for an unknown one.
    """
    found = language_called(language) if isinstance(language, str) else None
    if found is None:
        from ...policies.similar import did_you_mean  # only for errors

        known = ", ".join(language_names())
        meant = did_you_mean(language, language_names())
        advice = _COMPILED.get(language.lower()) if isinstance(language, str) else None
        advice = _BY_COMMANDS.format(advice) if advice else meant
        raise Rejected(
            f"unknown language {language!r}: this version runs {known}"
            + (f"; {advice}" if advice else "")
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
    """Return the arguments of a program; raises PolicyError for some that execve(2) would refuse."""
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

    The bounds are those within which the host lists a workspace (runner/workspace.py), so every file
    that is saved can be put into a cell again.
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


def as_bytes(name: str, data: str | bytes) -> bytes:
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
    """Return a hint if a path was given instead of the content of its file."""
    return "pathlib.Path.read_bytes returns the content" if isinstance(given, os.PathLike) else ""
