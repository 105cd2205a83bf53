"""Tools as files: a folder with `tool.py`, the source, and `tool.json`, the rest.

A folder that is read comes from anywhere: nothing in it is a path, and nothing is run here.
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
    """What `tool.json` says.  State and version are left out: they are earned where it is used."""

    format: int
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    grants: Grants = Grants()
    timeout: float = 30.0
    calls: tuple[str, ...] = ()
    risky: bool = False
    tags: tuple[str, ...] = ()
    tests: tuple[ToolTest, ...] = ()
    provenance: Provenance = Provenance()
    source_code: str = ""

    @property
    def asks_for(self) -> str:
        """Say in words what it wants to be allowed, nothing if that is nothing."""
        wanted = [repr(each) for each in self.grants.permissions.permissions]
        return ", ".join([*wanted, *(f"calling {name}" for name in self.calls)])


def write_tool(spec: ToolSpec, directory: Path) -> Path:
    """Write a tool into a new folder of its name below `directory`; raises RegistryError."""
    folder = directory / normalised(spec.name)
    about = {name: getattr(spec, name) for name in _FIELDS}
    exported = ExportedTool(format=_FORMAT, **about)
    text = msgspec.json.format(msgspec.json.encode(exported), indent=2)
    try:
        folder.mkdir(parents=True)
        for name, data in ((_SOURCE, spec.source_code.encode()), (_ABOUT, text + b"\n")):
            with open(folder / name, "xb") as file:
                file.write(data)
    except OSError as error:
        raise RegistryError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def read_tool(folder: Path) -> ExportedTool:
    """Return what a folder says; raises ToolInvalid if it is not one of a tool's."""
    try:
        exported = _DECODER.decode(_read(folder / _ABOUT))
        source = _read(folder / _SOURCE).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolInvalid(f"{folder}: {error}") from None
    if exported.format != _FORMAT:
        raise ToolInvalid(f"{folder}: format {exported.format} is not known, {_FORMAT} is")
    return msgspec.structs.replace(exported, source_code=source)


def _read(path: Path) -> bytes:
    """Read a regular file that is no link: a link would lead to what only we may read."""
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
