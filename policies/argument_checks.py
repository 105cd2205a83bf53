"""Checks of arguments, and the known name most similar to an unknown one: every "did you mean"."""

from collections.abc import Iterable

from .errors import PolicyError

_NEAR = 0.6  # difflib's ratio, near enough for a typing error in a short name
_LONGEST = 100  # characters: difflib takes quadratic time
_MOST = 1000  # known names
_MOST_WORK = 1_000_000  # pairs of characters: 0.2 s of difflib, at most
_PREFIX = 3  # characters that suffice as the beginning of a name


def similar(word: str, known: Iterable[str], near: float = _NEAR) -> str:
    """Return the name of `known` that `word` was probably meant to be, else "".

    Case, and `_` or `-`, make no difference.  `near` is the least ratio of difflib.
    """
    if not 0 < len(word) <= _LONGEST:
        return ""
    import difflib  # only for errors
    import itertools

    folded: dict[str, str] = {}
    most = _MOST_WORK
    for name in itertools.islice(known, _MOST):
        most -= len(word) * min(len(name), 2 * _LONGEST)
        if most < 0:
            break
        folded.setdefault(_folded(name), name)
    wanted = _folded(word)
    begun = [name for name in folded if len(wanted) >= _PREFIX and name.startswith(wanted)]
    found = sorted(begun, key=len) or difflib.get_close_matches(wanted, folded, 1, near)
    return folded[found[0]] if found else ""


def did_you_mean(word: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint with the known name most similar to `word`; `otherwise` if none is similar."""
    found = similar(word, known) if isinstance(word, str) else ""
    return f"did you mean {found}?" if found else otherwise


def no_choice(where: str, value: object, choices: Iterable[str]) -> tuple[str, str]:
    """Return the error for the field `where`, whose value must be one of `choices`, and a hint."""
    known = tuple(choices)
    return f"{where}: must be one of {', '.join(known)}, got {value!r}", did_you_mean(value, known)


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")


def check_choice(where: str, given: object, known: tuple[str, ...]) -> None:
    """Raise PolicyError unless `given` is one of `known`."""
    if given not in known:
        raise PolicyError(*no_choice(where, given, known))


def check_names(where: str, names: object) -> tuple[str, ...]:
    """Return `names` as a tuple; raises PolicyError unless it is a list or tuple of strings."""
    if names == ():
        return ()
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise PolicyError(f"{where}: must be a list of names, got {names!r}")


def check_variable(name: object, value: object, where: str = "environment") -> None:
    """Raise PolicyError unless `name` and `value` form a valid environment variable (environ(7)).

    `where` is the caller's name for the mapping that has them.
    """
    if not (isinstance(name, str) and isinstance(value, str)):
        kind = type(value).__name__  # not the value, which may be a secret
        raise PolicyError(f"{where}: must map text to text, got {name!r}: a {kind}")
    if not name or any(forbidden in name for forbidden in "=\n\0"):
        raise PolicyError(
            f"{where}: a name must not be empty or hold '=', newline or NUL, got {name!r}"
        )
    if "\0" in value or "\n" in value:
        raise PolicyError(f"{where}: the value of {name!r} must not hold NUL or newline")
    check_encodable(where, name + value)


def check_encodable(where: str, text: str) -> None:
    """Raise PolicyError for a text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PolicyError(f"{where}: must not hold a lone surrogate, got {text!r}") from None
