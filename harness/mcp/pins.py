"""`Pins`: the definitions of every server's tools at its first use.

The first use is trusted.  After that a tool that is new or has changed is not offered until a person
has seen the difference and pinned it again.  The same file lists a server's tools without starting it.
"""

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...policies.errors import RegistryError, ToolInvalid
from ..state import state_directory
from .config import ServerConfig
from .definitions import Definition, definition_of

_MAX_BYTES = 64 * 1024 * 1024
_MAX_OF_ONE = 16 * 1024 * 1024  # of one server, as JSON
_MOST_LINES = 400
Definitions = Mapping[str, Definition]


class _Pinned(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    servers: dict[str, list[dict[str, object]]] = {}


class Drift(NamedTuple):
    """How a server's tools differ from their pins, by the server's own names."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (f"{word}: {', '.join(map(ascii, names))}" for word, names in
                 zip(self._fields, self, strict=True) if names)  # fmt: skip
        return "; ".join(parts)


class Pins:
    """A file of definitions by server and its address; several processes may share it."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path else state_directory() / "servers.json"

    def of(self, config: ServerConfig) -> dict[str, Definition] | None:
        """Return the pins of a server, None if it has none.  Raises RegistryError.

        A pinned definition that later versions of the checks refuse is left out; the server's own is
        then left out too.
        """
        said = self._read().servers.get(_key(config))
        if said is None:
            return None
        pinned: dict[str, Definition] = {}
        for each in said:
            with contextlib.suppress(ToolInvalid):
                definition = definition_of(each)
                pinned[definition.wire] = definition
        return pinned

    def pin(self, config: ServerConfig, definitions: Iterable[Definition]) -> None:
        """Replace a server's pins; raises RegistryError."""
        with self._locked():
            pinned = self._read()
            said = [each.said for each in definitions]
            _check_size(f"the tools of {config.name}", msgspec.json.encode(said), _MAX_OF_ONE)
            pinned.servers[_key(config)] = said
            data = msgspec.json.format(msgspec.json.encode(pinned, order="sorted"), indent=1)
            _check_size(f"{self.path} with the tools of {config.name}", data, _MAX_BYTES)
            self._write(data)

    def forget(self, config: ServerConfig) -> bool:
        """Remove a server's pins; tell whether it had any."""
        with self._locked():
            pinned = self._read()
            known = pinned.servers.pop(_key(config), None)
            self._write(msgspec.json.encode(pinned, order="sorted"))
        return known is not None

    def _read(self) -> _Pinned:
        try:
            with open(self.path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return _Pinned()
        except OSError as error:
            raise RegistryError(f"cannot read {self.path}: {error.strerror}") from None
        try:
            if len(data) > _MAX_BYTES:
                raise ValueError(f"larger than {_MAX_BYTES} bytes")
            return msgspec.json.decode(data, type=_Pinned)
        except (ValueError, msgspec.DecodeError) as error:
            raise self._unreadable(str(error)) from None

    def _unreadable(self, why: str) -> RegistryError:
        hint = "inspect the file; if you delete it, every server is pinned anew at its next use"
        return RegistryError(f"{self.path} is not a valid file of pins: {why}", hint)

    def _write(self, data: bytes) -> None:
        """Replace the file atomically, or leave it unchanged."""
        try:
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except OSError as error:
            raise RegistryError(f"cannot write {self.path}: {error.strerror}") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegistryError(f"cannot write {lock}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _check_size(what: str, data: bytes, most: int) -> None:
    """Raise RegistryError for a file too large to be read again: no server could be used then."""
    if len(data) > most:
        raise RegistryError(f"{what}: {len(data)} bytes, more than {most}")


def _key(config: ServerConfig) -> str:
    """Return a server's key: a changed command or address makes it another server."""
    where = json.dumps([config.command, *config.args, config.url.partition("?")[0]])
    return f"{config.name} {hashlib.sha256(where.encode()).hexdigest()[:16]}"


def drift_of(pinned: Definitions, now: Definitions) -> Drift:
    """Return how `now` differs from `pinned`."""
    both = pinned.keys() & now.keys()
    return Drift(
        tuple(sorted(now.keys() - pinned.keys())),
        tuple(sorted(wire for wire in both if pinned[wire].digest != now[wire].digest)),
        tuple(sorted(pinned.keys() - now.keys())),
    )


def difference(pinned: Definitions, now: Definitions) -> str:
    """Return a unified diff for a person, in ASCII, which makes hidden characters visible."""
    lines: list[str] = []
    for wire in sorted({*pinned, *now}):
        old, new = _lines(pinned.get(wire)), _lines(now.get(wire))
        names = (f"pinned/{ascii(wire)[1:-1]}", f"now/{ascii(wire)[1:-1]}")
        lines += difflib.unified_diff(old, new, *names, lineterm="")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} lines more"]
    return "".join(f"{line}\n" for line in lines)


def _lines(definition: Definition | None) -> list[str]:
    if definition is None:
        return []
    return json.dumps(definition.said, indent=2, sort_keys=True, ensure_ascii=True).split("\n")
