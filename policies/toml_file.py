"""TOML files of an operator: bounded reading, and errors that name file, line and the field that was
meant."""

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

import msgspec

from .errors import PolicyError
from .similar import no_choice, similar

MOST_BYTES = 1024 * 1024
_NEAR = 0.75  # of difflib: names of fields are long
_WHERE = re.compile(r"`\$\.?([\w.]*)(?:\[(\d+)\])?([\w.]*)[^`]*`")
_UNKNOWN = re.compile(r"unknown field `(\w+)`")
_COMPLAINT = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_NO_CHOICE = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "text",
}


def read_regular_file(path: Path, *, owned: bool = False) -> str:
    """Return the text of a regular file of at most 1 MiB; raises PolicyError.

    With `owned`, only this user or root may be able to write it.  Opening a FIFO would wait for its
    writer, and a device may never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise PolicyError(f"{path}: not a regular file")
            others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if owned and (others_write or found.st_uid not in (0, os.geteuid())):
                raise PolicyError(f"{path}: another user may write it", f"chmod go-w {path}")
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise PolicyError(f"{path}: longer than {MOST_BYTES} bytes")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: not TOML: {error}") from None


def parsed_toml(text: str, path: Path) -> dict[str, Any]:
    """Return the data of TOML; raises PolicyError, which names `path`."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise PolicyError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise PolicyError(f"{path}: not TOML: {error}") from None


def invalid_field(
    complaint: str, struct: type, below: Iterable[object], document: str
) -> tuple[str, str]:
    """Return what msgspec complains of, beginning with the field as in `limits.cpus`, and a hint.

    `struct` is the type of the whole, `below` are the types of its tables; `document` says where the
    fields are listed.
    """
    found = _COMPLAINT.fullmatch(complaint)
    what, where = (found[1], found[2] or "") if found else (complaint, "")
    if unknown := _UNKNOWN.search(what):
        fields = [each.name for table in (struct, *below) for each in _fields(table)]
        meant = similar(unknown[1], fields, _NEAR)
        hint = f"did you mean {meant}?" if meant else document
        return f"{_joined(where, unknown[1])}: unknown field", hint
    if missing := _MISSING.fullmatch(what):
        return f"{_joined(where, missing[1])}: is missing", ""
    if (value := _NO_CHOICE.fullmatch(what)) and (choices := _choices(struct, where)):
        return no_choice(where, value[1], choices)
    if wrong := _WRONG_TYPE.fullmatch(what):
        expected, got = (
            " or ".join(_TYPES.get(each, each) for each in kinds.split(" | "))
            for kinds in wrong.groups()
        )
        what = f"must be {expected}, got {got}"
    return (f"{where}: {what}" if where else what), ""


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _fields(struct: object) -> tuple[msgspec.structs.FieldInfo, ...]:
    if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
        return msgspec.structs.fields(struct)
    return ()


def _choices(struct: Any, where: str) -> tuple[str, ...]:
    """Return the values of the field `where` below `struct`, if these are words."""
    found = struct
    for name in re.split(r"[.\[]", where):
        if name.endswith("]"):  # of an item
            found = next(iter(_parts(found)), None)
        else:
            found = next((each.type for each in _fields(found) if each.name == name), None)
    return tuple(each for each in _parts(found) if isinstance(each, str))


def _parts(kind: object) -> Iterator[object]:
    """Yield the arguments of a type, such as the values of a Literal, without `None` and unions."""
    for each in get_args(kind):
        if isinstance(kind, UnionType) and get_args(each):
            yield from _parts(each)
        elif each is not NoneType:
            yield each


def place_of(path: Path, text: str, complaint: str) -> str:
    """Return the file, and the line of the key that `complaint` names if the line is found."""
    where = _WHERE.search(complaint)
    unknown = _UNKNOWN.search(complaint)
    named = f"{where[1]}{where[3]}".split(".") if where else ()
    keys = [*filter(None, named), *([unknown[1]] if unknown else [])]
    keys = keys or complaint.partition(":")[0].partition(" ")[0].split(".")
    line = _line_of(text, keys, int(where[2] or 0) if where else 0)
    return f"{path}, line {line}" if line else str(path)


def _line_of(text: str, keys: list[str], skipped: int) -> int:
    """Return the number of the line that sets `keys`, or of their table; 0 if neither is found.

    `skipped` is the index in an array of tables.
    """
    table: list[str] = []
    best = 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[(\[?)\s*([\w.]+)\s*\]", line):
            table = header[2].split(".")
            if header[1] and table == keys[: len(table)] and skipped:
                table, skipped = [], skipped - 1
            best = number if table == keys[: len(table)] and not best else best
        elif (key := re.match(r"\s*([\w.]+)\s*=", line)) and [*table, *key[1].split(".")] == keys:
            return number
    return best
