"""`Sanitizer`: turns what a tool returned or raised into JSON that its caller may see."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...policies.errors import CellwrightError, ToolError, ToolFailed, ToolResultInvalid
from ...runner.cell.values import SCALARS, plain, quick_json
from ..schemas.spec import ToolSpec
from ..text.redaction import Redaction
from .checks import check_result
from .filters import CapRows, Filtered, Hits, ResultFilter, name_of
from .private_calls import PrivateResults

_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_ERROR_CHARACTERS = 1000


class SanitizedResult(msgspec.Struct, frozen=True):
    """A result as a JSON value and as encoded JSON."""

    value: Any
    data: bytes


class Sanitizer:
    """Redacts credentials in results and errors and applies `filters`; `hits` counts by kind."""

    def __init__(self, filters: Sequence[ResultFilter]) -> None:
        self._filters = tuple(filters)

    def result(
        self, spec: ToolSpec, value: Any, redaction: Redaction | None, rows: float,
        hits: Hits, private: PrivateResults | None, is_certainly_valid: Callable[[object], bool],
    ) -> SanitizedResult:  # fmt: skip
        """Return a result without the content that its caller may not see.

        Raises ToolResultInvalid for a result that is not JSON, does not match the tool's schema,
        holds a credential that cannot be redacted, or makes a filter fail.
        """
        found = _json_of(spec, value)
        if redaction:
            found = _without_credentials(spec, found, redaction)
        if not is_certainly_valid(found.value):
            check_result(spec, found.value)
        filters = self._filters
        if len(found.data) > 2 * rows:  # a list of `rows` items has at least as many bytes
            filters = (CapRows(int(rows)), *filters)
        passed = _passed(spec, found.value, filters, hits) if filters else found.value
        if private:  # last: the filters of the host see the values
            passed = _taken(private(spec, passed), hits)
        return found if passed is found.value else _json_of(spec, passed)

    def error(
        self, spec: ToolSpec, error: BaseException, redaction: Redaction | None, hits: Hits,
        private: PrivateResults | None = None,
    ) -> ToolError:  # fmt: skip
        """Return the error to pass on for an exception of a tool, which is its cause unless filtered.

        Raises ToolResultInvalid if a filter fails.
        """
        known = isinstance(error, CellwrightError)
        words = str(error) if known else f"{type(error).__name__}: {error}"
        words = self._words(spec, words, redaction, hits, private)
        told = _nearest(error)(words, tool=spec.name)
        if redaction is None and private is None and not self._filters:
            if isinstance(told, ToolFailed):
                told.result = getattr(error, "result", None)
            if not isinstance(error, ToolError):
                told.__cause__ = error
        return told

    def _words(
        self, spec: ToolSpec, text: str, redaction: Redaction | None, hits: Hits,
        private: PrivateResults | None,
    ) -> str:  # fmt: skip
        text = redaction.text(text) if redaction else text
        passed = _passed(spec, text, self._filters, hits)
        if not isinstance(passed, str):
            raise ToolResultInvalid(
                "the text of the error was withheld: a filter returned no text", tool=spec.name
            )
        passed = private.words(passed, hits) if private else passed
        return passed if len(passed) <= _ERROR_CHARACTERS else passed[:_ERROR_CHARACTERS] + "..."


def _nearest(error: BaseException) -> type[ToolError]:
    """Return the nearest ToolError class of cellwright: a subclass of the tool's own may take other
    arguments."""
    if not isinstance(error, ToolError):
        return ToolFailed
    kinds = type(error).__mro__
    return next(kind for kind in kinds if kind.__module__.startswith(_OURS))


_OURS = f"{__package__.split('.')[0]}."


def _json_of(spec: ToolSpec, value: Any) -> SanitizedResult:
    try:
        made = value
        if type(value) not in SCALARS:
            made = msgspec.to_builtins(value, str_keys=True, enc_hook=plain)
        return SanitizedResult(made, quick_json(made) or _ENCODE(made).encode())
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError
        why = type(error).__name__ if isinstance(error, UnicodeError) else error
        raise ToolResultInvalid(f"the result is not JSON: {why}", tool=spec.name) from None


def _without_credentials(
    spec: ToolSpec, found: SanitizedResult, redaction: Redaction
) -> SanitizedResult:
    text = redaction.text(found.data.decode())
    try:
        return SanitizedResult(json.loads(text), text.encode())
    except ValueError:  # the redacted value was a number, or a part of one
        raise ToolResultInvalid(
            "the result holds a credential that cannot be redacted", tool=spec.name
        ) from None


def _passed(spec: ToolSpec, value: Any, filters: Sequence[ResultFilter], hits: Hits) -> Any:
    """Return `value` after all filters; if one of them raises, the call fails."""
    for each in filters:
        try:
            passed = each(spec, value)
        except Exception as error:  # noqa: BLE001 - a filter may raise anything
            said = (
                f"the result was withheld: the filter {name_of(each)} raised {type(error).__name__}"
            )
            raise ToolResultInvalid(said, tool=spec.name) from None
        if isinstance(passed, Filtered):
            passed = _taken(passed, hits)
        elif passed is not value:
            hits[name_of(each)] = hits.get(name_of(each), 0) + 1
        value = passed
    return value


def _taken(filtered: Filtered, hits: Hits) -> Any:
    """Return what a filter passed on, and count what it removed."""
    for kind, count in filtered.hits.items():
        hits[kind] = hits.get(kind, 0) + count
    return filtered.value
