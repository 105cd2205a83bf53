"""Policies read from TOML, with `extends`; errors name file, line and key."""

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

import msgspec

from ..argument_checks import did_you_mean, no_choice, similar
from ..errors import PolicyError
from ..network.rule import NetworkDenial, NetworkRule
from ..policy import Policy, check_policy
from ..tool_rules import ToolRule

_PROFILES = Path(__file__).parent
_DOCUMENT = "policies/README.md lists every field"
_DEEPEST = 8
_MORE = "+"  # as the first item of a list: adds the other items to the parent's list
_NOT_A_TABLE = re.compile(r"Expected `object`.*`\$\.([\w.]+)\[")
_TABLES = {
    "network.allow": 'write a table for each host: [[network.allow]], then host = "api.example.org"',
    "network.deny": 'write a table for each host: [[network.deny]], then host = "api.example.org"',
    "http.allow": 'write a table for each host: [[http.allow]], then host = "api.example.org"',
    "http.deny": 'write a table for each host: [[http.deny]], then host = "api.example.org"',
    "tools.rules": 'write a table for each rule: [[tools.rules]], then tool = "mail.*"',
}


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def load_policy(name: str) -> Policy:
    """Return the shipped profile called `name`, or the policy in the TOML file of that path.

    Raises PolicyError with the file, line and key of the first error.
    """
    return check_named(name, _merged(name, ()))


def policy_files(name: str) -> tuple[str, ...]:
    """Return the files of the policy `name` and of those that it extends, but for shipped profiles;
    raises PolicyError."""
    path, found = _path(name), list[str]()
    while path.parent != _PROFILES and str(path) not in found:
        found.append(str(path))
        parent = _read(path, name).get("extends", "strict")
        path = _path(parent, path.parent) if isinstance(parent, str) else _PROFILES / "strict.toml"
    return tuple(found)


def policy_of_data(data: Mapping[str, Any]) -> Policy:
    """Return the policy in `data`, which has the shape of a TOML file; raises PolicyError.

    `extends` names a profile, or a TOML file by its path.
    """
    merged = _over_parent(dict(data), "policy", ())
    try:
        return check_policy(msgspec.convert(with_units(merged), Policy))
    except msgspec.ValidationError as error:
        raise PolicyError(*_explained(str(error))) from None


def check_named(name: str, data: dict[str, Any]) -> Policy:
    """Return the policy in `data`; an error names the file that the data came from."""
    try:
        return check_policy(msgspec.convert(with_units(data), Policy))
    except msgspec.ValidationError as error:
        what, hint = _explained(str(error))
        raise PolicyError(f"{_place(name, str(error))}: {what}", hint) from None
    except PolicyError as error:
        raise PolicyError(f"{_place(name, error.what)}: {error.what}", error.hint) from None


def _explained(complaint: str) -> tuple[str, str]:
    """Return what msgspec complains of, beginning with the field, and a hint: how a table is written,
    or the known field or value most similar to an unknown one."""
    sections = [each.type for each in msgspec.structs.fields(Policy)]
    what, hint = invalid_field(
        complaint, Policy, (*sections, NetworkRule, NetworkDenial, ToolRule), _DOCUMENT
    )
    table = _NOT_A_TABLE.search(complaint)
    return what, (_TABLES.get(table[1], "") if table else hint)


def _merged(name: str, below: tuple[str, ...], beside: Path | None = None) -> dict[str, Any]:
    """Return the data of a policy merged over its parent's: section by section, key by key."""
    path = _path(name, beside)
    if str(path) in below or len(below) > _DEEPEST:
        raise PolicyError(f"{path}: extends: must not lead back, or to more than {_DEEPEST} others")
    if beside and path.exists() and not path.is_file():
        raise PolicyError(f"{path}: not a regular file")  # reading a FIFO waits for its writer
    return _over_parent(_read(path, name), str(path), (*below, str(path)), path.parent)


def _over_parent(
    data: dict[str, Any], where: str, below: tuple[str, ...], beside: Path | None = None
) -> dict[str, Any]:
    parent = data.pop("extends", None)
    if parent is None:
        return _tables({}, data)
    if not isinstance(parent, str):
        raise PolicyError(
            f"{_place(where, '`$.extends`')}: extends: must be a name, got {parent!r}"
        )
    base = _merged(parent, below, beside)
    return _tables(base, data)


def _tables(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    return {**base, **{key: _over(base.get(key), value) for key, value in data.items()}}


def _over(base: object, value: object) -> object:
    """Return `value` over `base`: tables are merged, and a list that begins with "+" adds to the
    other."""
    if isinstance(value, dict):
        return _tables(base if isinstance(base, dict) else {}, value)
    if isinstance(value, list) and value[:1] == [_MORE]:
        return [*(base if isinstance(base, list) else ()), *value[1:]]
    return value


def _path(name: str, beside: Path | None = None) -> Path:
    if name in profile_names():
        return _PROFILES / f"{name}.toml"
    return beside / name if beside else Path(name)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except RecursionError:
        raise PolicyError(f"{path}: nested too deeply") from None
    except (FileNotFoundError, IsADirectoryError):
        shipped = ", ".join(profile_names())
        raise PolicyError(
            f"no policy {name!r}: neither a file nor one of {shipped}",
            did_you_mean(name, profile_names()),
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not TOML: {error}"
        raise PolicyError(f"{name[:200]!r}: {reason}") from None


def _place(name: str, complaint: str) -> str:
    path = _path(name)
    try:
        return place_of(path, path.read_text(), complaint)
    except OSError:
        return str(path)


# TOML files of an operator are read within bounds; errors name the file, the line and the intended
# field.
MOST_BYTES = 1024 * 1024
_NEAR = 0.75  # difflib's ratio; high, because names of fields are long
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
        if meant == unknown[1]:  # a field of another table
            tables = [
                each
                for each in _fields(struct)
                if meant in {inner.name for inner in _fields(each.type)}
            ]
            meant = f"{tables[0].name}.{meant}" if tables else f"{meant} outside of every table"
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
        if name.endswith("]"):  # the error is in an item of a list
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


# Sizes and durations with units: "512M" and "2GB" are bytes, "90s" and "10m" seconds.
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(?:i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|min|h)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size such as "2G", "2GB" or "2GiB", units of 1024; None for other text."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * 1024 ** _POWERS[found[2].lower()]) if found else None


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as "10m"; None for other text."""
    found = _DURATION.fullmatch(text.strip())
    return float(found[1]) * _SECONDS[found[2].lower()] if found else None


def with_units(data: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return the data of a TOML file with numbers in place of sizes and durations with units, which are
    the texts of fields that end in `_bytes` and `_seconds`; raises PolicyError for other text there."""
    made = dict(data)
    for key, value in data.items():
        if isinstance(value, dict):
            made[key] = with_units(value, f"{where}{key}.")
        elif isinstance(value, str) and key.endswith(("_bytes", "_seconds")):
            made[key] = _number(f"{where}{key}", value)
    return made


def _number(field: str, text: str) -> float:
    is_size = field.endswith("_bytes")
    number = bytes_of(text) if is_size else seconds_of(text)
    if number is None:
        example = '512M" or "2GB' if is_size else '90s" or "10m'
        raise PolicyError(f'{field}: must be a number, or text such as "{example}", got {text!r}')
    return number
