"""Names of tools: one validator for all of them, whoever made the tool.

A name stands in source code, on command lines, in paths and before a model's eyes, so it is plain
ASCII with nothing in it that means something else in one of those places.
"""

import re
from typing import NamedTuple

from ...policies.errors import ToolInvalid

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")
_SEPARATORS = re.compile(r"[._-]+")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_SHOWN = 80


class Reference(NamedTuple):
    """A tool, or with `version` one version of it: `name@2`."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def normalised(name: object) -> str:
    """Return the name that a tool has: the same in small letters.

    Raises ToolInvalid for anything but a letter or digit followed by up to 63 of letters, digits,
    `_`, `-` and single dots inside.  Nothing else is repaired: a name that merely looks like another,
    or would be one after Unicode's folding, is refused.
    """
    if isinstance(name, str) and name.isascii():
        small = name.lower()
        if _NAME.fullmatch(small) and ".." not in small:
            return small
    raise ToolInvalid(
        f"{_shown(name)} is no name of a tool",
        "begin with a letter or digit; go on with letters, digits, _ - and single dots; 64 at most",
    )


def key_of(name: str) -> str:
    """Return what no two tools share: `send-mail`, `send_mail` and `Send.Mail` are one name."""
    return _SEPARATORS.sub("_", normalised(name))


def function_name(name: str) -> str:
    """Return the name of the function that a tool called `name` is, where that can be one."""
    return re.sub(r"[.-]", "_", normalised(name))


def reference(text: object) -> Reference:
    """Return what `name` or `name@version` refers to; raises ToolInvalid if it is neither."""
    name, at, version = text.partition("@") if isinstance(text, str) else (text, "", "")
    if at and not _VERSION.fullmatch(version):
        raise ToolInvalid(f"{_shown(text)}: a version is a number from 1, as in `name@2`")
    return Reference(normalised(name), int(version) if at else None)


def _shown(name: object) -> str:
    """Return `name` so that it can stand in a message: escaped, and not all of it if it is long."""
    return ascii(name)[:_SHOWN] if isinstance(name, str) else f"a {type(name).__name__}"
