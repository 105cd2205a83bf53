"""The known name most similar to an unknown one: every "did you mean" of cellwright."""

from collections.abc import Iterable

_NEAR = 0.6  # of difflib's ratio: near enough for a typing error in a short name
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
    """Return what is wrong with the field `where`, whose value must be one of `choices`, and a hint."""
    known = tuple(choices)
    return f"{where}: must be one of {', '.join(known)}, got {value!r}", did_you_mean(value, known)


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")
