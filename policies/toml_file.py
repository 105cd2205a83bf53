"""TOML files of an operator: bounded reading, and errors that name file, line and the field that was
meant."""

import os
import re
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from .errors import PolicyError
from .similar import similar

MOST_BYTES = 1024 * 1024
_NEAR = 0.75  # of difflib: names of fields are long
_WHERE = re.compile(r"`\$\.?([\w.]*)(?:\[(\d+)\])?([\w.]*)[^`]*`")
_UNKNOWN = re.compile(r"unknown field `(\w+)`")


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


def similar_field(complaint: str, structs: Iterable[object]) -> str:
    """Return the known field most similar to the unknown one that msgspec complains of, else ""."""
    if not (unknown := _UNKNOWN.search(complaint)):
        return ""
    known = [
        each.name
        for struct in structs
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        for each in msgspec.structs.fields(struct)
    ]
    return similar(unknown[1], known, _NEAR)


def is_about_unknown_field(complaint: str) -> bool:
    """Tell whether msgspec complains of an unknown field."""
    return bool(_UNKNOWN.search(complaint))


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
