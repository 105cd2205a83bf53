"""Arguments and results of `execute` as frames; both sides check the arguments."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from ....policies.errors import PauseError, PolicyError
from ....policies.policy import Limits, check_names
from ....runner.messages import decode_json
from ....runner.result import SandboxResult
from ....runner.workspace import Executable
from ..parameters import CallArguments
from ..request import Rejected, check_language, make_request
from .frames import Execute, ExecuteArguments, Executed

_TOKEN_CHARACTERS = 1024
_SENT = ExecuteArguments.__struct_fields__


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
    checked = replace(
        given, stdin=request.stdin, inputs=request.inputs, files=request.files,
        env=request.environment, collect=request.collect, plain=request.plain,
        arguments=request.arguments, packages=requirements_of(given.packages),
    )  # fmt: skip
    told = ExecuteArguments(**{name: getattr(checked, name) for name in _SENT})
    return Execute(request.code.encode(), True, language, told, session, stream)


def requirements_of(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages of a call or session; raises PolicyError for anything but text."""
    return (packages,) if isinstance(packages, str) else check_names("packages", packages)


def token_of(token: object) -> str:
    """Return the token of a paused session; raises PauseError for what cannot be one."""
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
