"""The checker: a confined process that compiles JSON Schemas and checks values, with jsonschema-rs.

Schemas come from agents and servers, values from cells.  A small schema can ask for any amount of time
and memory, and the library cannot be interrupted, so the process has 256 MiB and 2 s of CPU time for a
request, and no file, socket or process; the kernel ends it at a limit, and `checker_pool.py` starts
another.  Only this module imports jsonschema-rs.
"""

import difflib  # noqa: F401 - `similar` imports it, and files are out of reach then
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import OrderedDict
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import msgspec

from ...policies.argument_checks import similar
from ...runner import channel
from ...runner.confined import confinement
from ...runner.messages import decode, encode
from .bounds import patterns_in, rewritten

MOST_BYTES = 64 << 20  # bytes of a request
MEMORY_BYTES = 256 << 20
CPU_SECONDS = 2.0
_LIMITS = {"NOFILE": 16, "CORE": 0, "FSIZE": 0, "DATA": MEMORY_BYTES}
_TIRED_BYTES = (
    MEMORY_BYTES // 2
)  # a process that used more memory has too little left for the next request
_MOST_COMPILED = 1024
_MOST_COMPLAINTS = 10
_MOST_CHARACTERS = 300  # characters of a complaint
_SHOWN_CHARACTERS = 200  # characters of a value in a complaint
_SHOWN_PARTS = 8
_SHOWN_DEPTH = 3
_MASK = "\ue000"  # stands for the value in a complaint, because cells choose the length of values
_BACKTRACKS = 100_000
_PATTERN_BYTES = 1 << 20  # bytes of one compiled pattern and its cache
_statm = -1  # opened while files can still be read
_OLD_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


class CheckerBoot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame: how the process confines itself, and the directory of jsonschema-rs."""

    package: str
    uid: int  # uid to change to; 0 if the process is not root
    landlock_abi: int
    filter: bytes


class CheckRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Compile the schema with this digest, and check a value; both are JSON.

    Without `schema` it must have been compiled before; without `value` nothing is checked.
    """

    digest: bytes
    schema: bytes = b""
    value: bytes = b""


class CheckAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`invalid` tells why the schema is invalid; `unchecked` are patterns that cannot be compiled."""

    is_known: bool = True  # False: ask again, with the schema
    invalid: str = ""
    unchecked: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    is_last: bool = False  # the process ends, because it has used much memory


class _Compiled(NamedTuple):
    """A compiled schema; a value is valid if all `validators` say so."""

    schema: Any
    validators: tuple[Any, ...]
    unchecked: tuple[str, ...]


def main(own_paths: int) -> NoReturn:
    """Read the boot frame, confine the process, and serve until the supervisor is gone."""

    def confine_by(boot: CheckerBoot) -> None:
        sys.path.append(boot.package)
        import jsonschema_rs  # while files can still be read

        jsonschema_rs.is_valid({"maximum": 1}, 2**100)  # loads the code for large numbers
        global _statm  # noqa: PLW0603
        _statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        sys.path.pop()
        del sys.path[:own_paths]  # all modules of cellwright are imported
        confinement.confine("cell-checker", boot.uid, _LIMITS, boot.filter, boot.landlock_abi)

    confinement.serve_confined(CheckerBoot, confine_by, _serve)


def _serve(sock: socket.socket, _: CheckerBoot) -> None:
    known: OrderedDict[bytes, _Compiled] = OrderedDict()
    receiver = channel.Receiver(sock, MOST_BYTES)
    while frame := receiver.receive_whole():
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        begun = time.process_time()
        answer = _answer_to(decode(frame, CheckRequest), known)
        spent, is_last = time.process_time() - begun, _data_bytes() > _TIRED_BYTES
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send(
            sock, encode(msgspec.structs.replace(answer, cpu_seconds=spent, is_last=is_last))
        )
        if is_last:
            return


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts (proc(5), statm)."""
    return int(os.pread(_statm, 256, 0).split()[5]) * resource.getpagesize()


def _answer_to(request: CheckRequest, known: "OrderedDict[bytes, _Compiled]") -> CheckAnswer:
    if request.digest not in known:
        if not request.schema:
            return CheckAnswer(is_known=False)
        try:
            known[request.digest] = _compile(json.loads(request.schema))
        except Exception as error:  # noqa: BLE001 - the library raises several kinds
            return CheckAnswer(invalid=_text_of(error))
        if len(known) > _MOST_COMPILED:
            known.popitem(last=False)
    known.move_to_end(request.digest)
    compiled = known[request.digest]
    if not request.value:
        return CheckAnswer(unchecked=compiled.unchecked)
    try:
        return CheckAnswer(complaints=_complaints(compiled, json.loads(request.value)))
    except Exception as error:  # noqa: BLE001 - as above
        text = f"the value cannot be checked against its schema: {_text_of(error)}"
        return CheckAnswer(complaints=(text,))


# compiling


def _compile(schema: dict[str, Any]) -> _Compiled:
    """Return a compiled schema; raises if it is invalid in its dialect.

    A schema that names no dialect and is invalid in the newest one may be of draft 7: old generators
    leave the name out.  A value must be valid by draft 7 and by 2019-09 then, whose keywords are those
    of the newest but for `prefixItems`.
    """
    import jsonschema_rs as library

    instead = {each: _replacement(each) for each in patterns_in(schema) if not _compiles(each)}
    unchecked = tuple(each for each, other in instead.items() if not other)
    named = str(schema.get("$schema"))
    modern = rewritten(schema, lambda part: _modern(part, instead))
    modern.pop("$schema", None)
    kinds: tuple[Any, ...] = (library.Draft202012Validator,)
    if "json-schema.org/draft-0" in named:
        kinds = (library.Draft7Validator,)
    elif "2019-09" in named:
        kinds = (library.Draft201909Validator,)
    try:
        found = tuple(_validator(kind, modern) for kind in kinds)
    except ValueError as error:
        if "$schema" in schema:
            raise
        kinds = (library.Draft7Validator, library.Draft201909Validator)
        try:
            found = tuple(_validator(kind, modern) for kind in kinds)
        except ValueError:
            raise error from None
    return _Compiled(modern, found, unchecked)


def _validator(kind: Any, schema: Any) -> Any:
    import jsonschema_rs as library

    # Try the engine without backtracking first: the other one finds ..+a?.+ in "11" (measured, 0.60.3).
    linear = library.RegexOptions(_PATTERN_BYTES, _PATTERN_BYTES)
    try:
        return kind(
            schema, mask=_MASK, pattern_options=linear, validate_formats=False, offline=True
        )
    except ValueError:  # a pattern has lookaround or a backreference, or the schema is invalid
        return _backtracking(kind, schema)


def _backtracking(kind: Any, schema: Any) -> Any:
    import jsonschema_rs as library

    options = library.FancyRegexOptions(_BACKTRACKS, _PATTERN_BYTES, _PATTERN_BYTES)
    return kind(schema, mask=_MASK, pattern_options=options, validate_formats=False, offline=True)


def _compiles(pattern: str) -> bool:
    """Tell whether the engine that knows more of a pattern takes this one."""
    import jsonschema_rs as library

    try:
        _backtracking(library.Draft202012Validator, {"pattern": pattern})
    except ValueError:
        return False
    return True


# Matches a token that stays, or one that the library refuses: a hyphen beside a class in a set, which
# is literal (ECMA-262, B.1.2.8.1), or a brace that begins no repetition.
_TOKENS = re.compile(r"(\\[pPux]\{[^}]*\}|\{\d+(?:,\d*)?\}|\\.)|(-)(?=\\[dDwWsS])|(\{)", re.DOTALL)


def _replacement(pattern: str) -> str:
    """Return a pattern with the same meaning that compiles; else "", which matches every text."""
    escaped = _TOKENS.sub(lambda found: found[1] or "\\" + found[0], pattern)
    escaped = re.sub(r"(\\[dDwWsS])-(?=[^\]])", r"\1\\-", escaped)
    return escaped if escaped != pattern and _compiles(escaped) else ""


def _modern(part: dict[str, Any], instead: dict[str, str]) -> dict[str, Any]:
    """Return a subschema with other patterns, and the exclusive bounds of draft 4 as in draft 7."""
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = instead.get(pattern, pattern)
    if isinstance(named := part.get("patternProperties"), dict):
        part["patternProperties"] = {
            instead.get(name, name): each if instead.get(name, name) else True
            for name, each in named.items()
        }
    for exclusive, bound in _OLD_BOUNDS.items():
        if isinstance(part.get(exclusive), bool) and part.pop(exclusive) and bound in part:
            part[exclusive] = part.pop(bound)
    return part


# complaints


def _complaints(compiled: _Compiled, value: Any) -> tuple[str, ...]:
    found: dict[str, None] = {}  # in order, without duplicates
    for each in compiled.validators:
        if each.is_valid(value):
            continue
        errors = islice(each.iter_errors(value), _MOST_COMPLAINTS)
        found |= {_complaint(compiled.schema, error): None for error in errors}
    return tuple(found)[:_MOST_COMPLAINTS]


def _complaint(schema: Any, error: Any) -> str:
    where = "".join(map(_step, error.instance_path))
    text = _text_of(error) + _meant(schema, error)
    return _visible(f"${where}: ") + text if where else text


def _text_of(error: Any) -> str:
    text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
    text = text[: 2 * _MOST_CHARACTERS]
    if _MASK in text:
        text = text.replace(_MASK, _shown(error.instance))
    return _visible(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...")


def _visible(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _meant(schema: Any, error: Any) -> str:
    """Return a hint with the property that an unknown one was meant to be, if one is similar."""
    if not (unknown := getattr(error.kind, "unexpected", None)) or not isinstance(unknown[0], str):
        return ""
    part = schema
    for step in error.schema_path[:-1]:
        try:
            part = part[step]
        except (LookupError, TypeError):
            return ""
    known = part.get("properties", {}) if isinstance(part, dict) else {}
    found = similar(unknown[0], known)
    return f"; did you mean {_visible(repr(found))}?" if found else ""


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isidentifier() and len(step) < 100 else f"[{step[:100]!r}]"


def _shown(value: Any, depth: int = _SHOWN_DEPTH) -> str:
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARACTERS])
    if isinstance(value, list):
        parts = [_shown(each, depth - 1) for each in value[:_SHOWN_PARTS]] if depth else []
        return f"[{', '.join(parts)}{', ...' if len(parts) < len(value) else ''}]"
    if isinstance(value, dict):
        some = islice(value.items(), _SHOWN_PARTS if depth else 0)
        parts = [f"{_shown(name)}: {_shown(each, depth - 1)}" for name, each in some]
        return f"{{{', '.join(parts)}{', ...' if len(parts) < len(value) else ''}}}"
    return repr(value)
