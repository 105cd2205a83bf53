"""Reading policies from TOML."""

import tomllib
from pathlib import Path

import msgspec

from .errors import PolicyError
from .policy import Policy, check_policy

_PROFILES = Path(__file__).parent / "profiles"


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def load_policy(name: str) -> Policy:
    """Return the shipped profile called `name`, or the policy in the TOML file of that path.

    Raises PolicyError naming the file and the key that makes no sense.
    """
    path = _PROFILES / f"{name}.toml" if name in profile_names() else Path(name)
    try:
        data = tomllib.loads(path.read_text())
        return check_policy(msgspec.convert(data, Policy))
    except RecursionError:
        raise PolicyError(f"{path}: nested too deeply") from None
    except (FileNotFoundError, IsADirectoryError):
        shipped = ", ".join(profile_names())
        raise PolicyError(f"no policy {name!r}: neither a file nor one of {shipped}") from None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise PolicyError(f"{name[:200]!r}: {error}") from None
