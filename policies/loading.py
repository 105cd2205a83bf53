"""Loading of policies from TOML, with `extends`; errors name file, line and key."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .errors import PolicyError
from .network.rule import NetworkDenial, NetworkRule
from .policy import Policy, check_policy
from .quantities import with_units
from .similar import did_you_mean
from .toml_file import invalid_field, place_of
from .tools import ToolRule

_PROFILES = Path(__file__).parent / "profiles"
_DOCUMENT = "policies/README.md lists every field"
_DEEPEST = 8
_MORE = "+"  # first in a list: what follows is added to the list of the parent
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
    """Return the file, and the line of the key that `complaint` names if the line is found."""
    path = _path(name)
    try:
        return place_of(path, path.read_text(), complaint)
    except OSError:
        return str(path)
