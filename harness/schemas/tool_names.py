"""Names of tools: one validator for made tools, functions of the host and tools of servers.

A name appears in source code, on command lines, in paths and in a model's context, so it is plain ASCII
without characters that have a meaning in one of these places.
"""

import re
from typing import NamedTuple

from ...policies.errors import ToolInvalid

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")
_SEPARATORS = re.compile(r"[._-]+")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_SHOWN = 80


class Reference(NamedTuple):
    """A tool, or one version of it: `name@2`."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def normalised(name: object) -> str:
    """Return the name of a tool in lower case.

    Raises ToolInvalid unless the name is an ASCII letter or digit, followed by up to 63 letters,
    digits, `_`, `-` and single dots inside.  Nothing else is repaired: a name that only looks like
    another one, or equals it after Unicode folding, is refused.
    """
    if isinstance(name, str) and name.isascii():
        small = name.lower()
        if _NAME.fullmatch(small) and ".." not in small:
            return small
    raise ToolInvalid(
        f"{_shown(name)} is not a valid tool name",
        "begin with a letter or digit; go on with letters, digits, _ - and single dots; 64 at most",
    )


def key_of(name: str) -> str:
    """Return the key that is unique among tools: `send-mail`, `send_mail` and `Send.Mail` share one."""
    return _SEPARATORS.sub("_", normalised(name))


def function_name(name: str) -> str:
    """Return the name of the function for a tool called `name`, with `_` for dots and hyphens."""
    return re.sub(r"[.-]", "_", normalised(name))


def reference(text: object) -> Reference:
    """Parse `name` or `name@version`; raises ToolInvalid if the text is neither."""
    name, at, version = text.partition("@") if isinstance(text, str) else (text, "", "")
    if at and not _VERSION.fullmatch(version):
        raise ToolInvalid(f"{_shown(text)}: the version must be a number from 1, as in `name@2`")
    return Reference(normalised(name), int(version) if at else None)


def _shown(name: object) -> str:
    """Return `name` for a message: escaped, and cut if it is long."""
    return ascii(name)[:_SHOWN] if isinstance(name, str) else f"a {type(name).__name__}"
