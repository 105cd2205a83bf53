"""Exported tools: a folder with `tool.py`, the source, and `tool.json`, everything else.

A folder to import is untrusted: no text in it is used as a path, and nothing in it is executed here.
"""

import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from ...policies.errors import RegistryError, ToolInvalid
from ..schemas.spec import Grants, Provenance, ToolSpec, ToolTest
from ..schemas.tool_names import normalised

_SOURCE, _ABOUT = "tool.py", "tool.json"
_MAX_BYTES = 1024 * 1024
_FORMAT = 1


class ExportedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `tool.json`.  State and version are left out: a registry assigns its own."""

    format: int
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    grants: Grants = Grants()
    timeout: float = 30.0
    calls: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    risky: bool = False
    tags: tuple[str, ...] = ()
    tests: tuple[ToolTest, ...] = ()
    provenance: Provenance = Provenance()
    source_code: str = ""

    @property
    def asks_for(self) -> str:
        """Return the permissions, calls and packages that it asks for as text, "" if none."""
        wanted = [repr(each) for each in self.grants.permissions.permissions]
        wanted += [f"calling {name}" for name in self.calls]
        return ", ".join([*wanted, *(f"the package {name}" for name in self.requirements)])

    def with_source(self, source: str) -> "ExportedTool":
        return msgspec.structs.replace(self, source_code=source)


def encode_tool(spec: ToolSpec) -> bytes:
    """Return the content of `tool.json`."""
    about = {name: getattr(spec, name) for name in _FIELDS}
    exported = ExportedTool(format=_FORMAT, **about)
    return msgspec.json.format(msgspec.json.encode(exported), indent=2) + b"\n"


def decode_tool(data: bytes, where: str) -> ExportedTool:
    """Return the tool in the content of `tool.json`, without its source; raises ToolInvalid."""
    try:
        exported = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolInvalid(f"{where}: {error}") from None
    if exported.format != _FORMAT:
        raise ToolInvalid(f"{where}: format must be {_FORMAT}, got {exported.format}")
    return exported


def write_tool(spec: ToolSpec, directory: Path) -> Path:
    """Write a tool into a new folder of its name below `directory`; raises RegistryError."""
    folder = directory / normalised(spec.name)
    try:
        folder.mkdir(parents=True)
        for name, data in ((_SOURCE, spec.source_code.encode()), (_ABOUT, encode_tool(spec))):
            with open(folder / name, "xb") as file:
                file.write(data)
    except OSError as error:
        raise RegistryError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def read_tool(folder: Path) -> ExportedTool:
    """Return the tool in a folder; raises ToolInvalid if the folder does not hold one."""
    exported = decode_tool(_read(folder / _ABOUT), str(folder))
    try:
        return exported.with_source(_read(folder / _SOURCE).decode())
    except UnicodeDecodeError as error:
        raise ToolInvalid(f"{folder}: {error}") from None


def _read(path: Path) -> bytes:
    """Read a regular file; refuse links, which could lead to files that only this process may read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ToolInvalid(f"{path}: not a regular file")
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ToolInvalid(f"cannot read {path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ToolInvalid(f"{path}: more than {_MAX_BYTES} bytes")
    return data


_FIELDS = tuple(
    name for name in ExportedTool.__struct_fields__ if name not in ("format", "source_code")
)
_DECODER = msgspec.json.Decoder(ExportedTool)
