"""Names of servers and their tools that programs can use, mapped to the servers' own names.

MCP allows almost any name: of 888 tools of real servers, 378 have names that are no identifiers.  Here
a tool is `server.tool`: small letters, digits, `_` and `-`, at most 64 characters, as
schemas/tool_names.py requires of every tool.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable

from ...policies.errors import PolicyError

MAX_SERVER = 24
_MAX_NAME = 64
_OTHERS = re.compile(r"[^A-Za-z0-9_-]+")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[_-]+")
_RESERVED = ("results", "tools")  # the broker's own tools, and the module that programs import


def server_name(name: object) -> str:
    """Return the name of a server: `Sequential Thinking` becomes `sequential_thinking`.

    Raises PolicyError for a name that becomes empty, is too long, or is reserved.
    """
    small = _small(name).strip("_-") if isinstance(name, str) and name.isascii() else ""
    if not small or len(small) > MAX_SERVER or small in _RESERVED:
        raise PolicyError(
            f"{ascii(name)[:80]} is not a valid name of a server",
            f"letters, digits, _ and -, at most {MAX_SERVER}; not {' or '.join(_RESERVED)}",
        )
    return small


def tool_names(server: str, wires: Iterable[str]) -> dict[str, str]:
    """Map our names of a server's tools to its own: `listMail` becomes `list_mail`.

    Names are compared without separators.  Where several collide, each gets eight digits of the hash of
    its own name, except one whose own name is exactly ours.  The order of `wires` does not matter.
    """
    alike: dict[str, set[str]] = defaultdict(set)
    for wire in wires:
        alike[_SEPARATORS.sub("_", _mapped(wire))].add(wire)
    names: dict[str, str] = {}
    for key, group in alike.items():
        for wire in group:
            plain = _mapped(wire)
            sure = len(group) == 1 or wire == key
            names[_fitted(server, plain if sure else f"{plain}_{_hash(wire)}", wire)] = wire
    return dict(sorted(names.items()))


def _mapped(wire: str) -> str:
    small = _small(_HUMPS.sub("_", wire))
    return small if small.strip("_-") else f"tool_{_hash(wire)}"


def _small(text: str) -> str:
    return _OTHERS.sub("_", text).lower()  # in this order: lower() turns KELVIN SIGN into k


def _fitted(server: str, name: str, wire: str) -> str:
    """Return the full name; one that is too long is cut and ends in its hash."""
    whole = f"{server}.{name}"
    if len(whole) <= _MAX_NAME:
        return whole
    return f"{whole[: _MAX_NAME - 9]}_{_hash(wire)}"


def _hash(wire: str) -> str:
    return hashlib.sha256(wire.encode("utf-8", "surrogatepass")).hexdigest()[:8]
