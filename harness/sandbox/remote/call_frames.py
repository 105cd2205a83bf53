"""Arguments and results of `execute` as frames; both sides check the arguments.

Conversion between exceptions of policies/errors.py and Failure frames.
"""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import asdict, replace

from ....policies import errors
from ....policies.argument_checks import check_names
from ....policies.errors import CellwrightError, PauseError, PolicyError
from ....policies.policy import Limits
from ....runner.cells.workspace import Executable
from ....runner.messages import decode_json
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ..calls.call_request import Rejected, check_language, make_request, source_files
from ..parameters import CallArguments
from .frames import Execute, ExecuteArguments, Executed, Failure

_TOKEN_CHARACTERS = 1024


def packed(
    given: CallArguments, limits: Limits, session: str = "", *, stream: bool = False
) -> Execute:
    """Return the frame; raises what `execute` raises for invalid arguments.

    A program that will be rejected is sent unchanged: the daemon rejects it and records that in its
    trail.
    """
    code, language = given.code, given.language
    try:
        check_language(language)
        request = make_request(given, limits)
    except Rejected:
        raw = code if isinstance(code, bytes) else code.encode(errors="surrogatepass")
        about = ExecuteArguments(trace_id=given.trace_id)
        return Execute(raw, isinstance(code, str), str(language), about, session, stream)
    return packed_request(request, replace(given, language=language), session, stream=stream)


def packed_request(
    request: Request, given: CallArguments, session: str = "", *, stream: bool = False
) -> Execute:
    """Return the frame of a request that was made of `given`; raises PolicyError for its options of
    packages and compilers, of which a request has none."""
    told = ExecuteArguments(
        stdin=request.stdin, inputs=request.inputs, files=request.files, env=request.environment,
        timeout=given.timeout, cpu_seconds=given.cpu_seconds, trace_id=given.trace_id,
        collect=request.collect, plain=request.plain, arguments=request.arguments,
        filename=given.filename, packages=requirements_of(given.packages) if given.packages else (),
        flags=check_names("flags", given.flags) if given.flags else (),
        sources=source_files(given.sources) if given.sources else (),
        compile_timeout=given.compile_timeout,
    )  # fmt: skip
    return Execute(request.code.encode(), True, given.language, told, session, stream)


def requirements_of(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages of a call or session; raises PolicyError for anything but text."""
    return (packages,) if isinstance(packages, str) else check_names("packages", packages)


def token_of(token: object) -> str:
    """Return the token of a paused session; raises PauseError for an invalid one."""
    if isinstance(token, str) and len(token) <= _TOKEN_CHARACTERS:
        return token
    raise PauseError("token: is no token of a paused session", "session.pause() returns it")


def text_of(data: bytes) -> str:
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise PolicyError(f"code: not text: byte {error.start}") from None


def given_of(frame: Execute) -> CallArguments:
    """Return the arguments of the call, which is still to check them; raises PolicyError."""
    told = frame.given
    converted = {
        "inputs": None if told.inputs is None else _object(told.inputs),
        "files": {
            file.path: Executable(file.data) if file.executable else file.data
            for file in told.files
        },
        "sources": {file.path: file.data for file in told.sources} or None,
    }
    code = text_of(frame.code) if frame.text else frame.code
    return CallArguments(code=code, language=frame.language, **(asdict(told) | converted))


def weight_of(frame: Execute) -> int:
    """Return the most bytes that decoding adds to a frame.  An empty list takes two bytes of JSON and
    56 of memory; one character beyond U+FFFF makes Python store four bytes for every other."""
    given = frame.given
    copied = len(given.stdin or b"") + sum(len(file.data) for file in given.files)
    return 5 * len(frame.code) + 32 * len(given.inputs or b"") + copied


def _object(data: bytes) -> dict[str, Any]:
    import json  # only in a daemon

    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"inputs: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise PolicyError("inputs: not a JSON object")
    return found


def packed_result(result: SandboxResult) -> Executed:
    value = msgspec.json.encode(result.value)
    return Executed(replace(result, value=None), value)


def result_of(frame: Executed) -> SandboxResult:
    value = decode_json(frame.value)
    return frame.result if value is None else replace(frame.result, value=value)


_LONGEST = 10_000  # characters of a message, which may quote what a client sent
_KINDS: dict[str, type[CellwrightError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CellwrightError)
}


def failure_of(error: Exception) -> Failure:
    """Return the frame for a client; a bug of cellwright is also printed to stderr."""
    if isinstance(error, CellwrightError):
        what, hint = error.what[:_LONGEST], error.hint[:_LONGEST]
        return Failure(_known(type(error)), what, hint, tuple(_packed(error)))
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "try again later, or raise LimitNOFILE= of its service"
        return Failure("BusyError", "the daemon has no free file descriptor", hint)
    import traceback  # only in a daemon, and only for a bug

    traceback.print_exception(error)
    return Failure("InternalError", f"the daemon failed: {type(error).__name__}: {error}")


def error_of(failure: Failure) -> CellwrightError:
    """Return the exception that a frame describes."""
    kind = _KINDS.get(failure.kind, errors.InternalError)
    error = kind.__new__(kind)  # a class may take other arguments
    CellwrightError.__init__(
        error, failure.message, failure.hint, **dict(_unpacked(kind, failure.fields))
    )
    return error


def _known(kind: type[CellwrightError]) -> str:
    """Return the name of a class of policies/errors.py: the class itself, or the one it extends."""
    return next(each.__name__ for each in kind.__mro__ if each.__name__ in _KINDS)


def _packed(error: CellwrightError) -> Iterator[tuple[str, Any]]:
    for name in error.fields & vars(error).keys():
        value = getattr(error, name)
        yield name, packed_result(value) if isinstance(value, SandboxResult) else value


def _unpacked(
    kind: type[CellwrightError], fields: tuple[tuple[str, Any], ...]
) -> Iterator[tuple[str, Any]]:
    types = get_type_hints(kind) if fields else {}
    for name, value in fields:
        if name in kind.fields:
            with contextlib.suppress(msgspec.ValidationError):  # fields of another version
                is_result = name == "result" and value is not None
                read = msgspec.convert(value, Executed if is_result else types[name])
                yield name, result_of(read) if is_result else read
