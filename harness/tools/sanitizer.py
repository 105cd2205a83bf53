"""`Sanitizer`: turns a tool's result or exception into JSON that its caller may see.

Personal data in the calls of one caller: tokens on the way to it, values on the way to a tool.

Checks of arguments and results against the schemas of a ToolSpec.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ...policies.errors import (
    CellwrightError,
    ToolArgumentsInvalid,
    ToolError,
    ToolFailed,
    ToolInvalid,
    ToolResultInvalid,
)
from ...runner.cell.plain_values import SCALARS, plain, quick_json
from ..privacy.detector import place_of
from ..privacy.naming import CallNaming
from ..privacy.outcomes import Restored, WithheldError
from ..schemas.spec import ToolSpec
from ..schemas.validation import compile_schema
from ..text.redaction import Redaction, changed
from .results import CapRows, Filtered, Hits, ResultFilter, name_of

if TYPE_CHECKING:
    from ..privacy.scope import PrivacyScope


def restored_of(scope: "PrivacyScope", spec: ToolSpec, arguments: dict[str, Any]) -> Restored:
    """Return the arguments of a call with values in place of tokens, where a rule names the place.

    Raises ToolArgumentsInvalid where the tool's schema allows no such value.
    """
    try:
        return scope.restored(spec.name, arguments, spec.parameters)
    except WithheldError as error:
        raise ToolArgumentsInvalid(str(error), tool=spec.name) from None
    except RecursionError:
        raise ToolArgumentsInvalid("arguments: nested too deeply", tool=spec.name) from None


class PrivateResults:
    """The filter of results for a caller that gets tokens.

    `restored` holds the values that the tool was given, each with its token: a tool may return them in
    base64 or in escapes, where no detector would know them.
    """

    def __init__(self, scope: "PrivacyScope", restored: Restored) -> None:
        self._scope = scope
        self._naming = CallNaming(partial(scope.written_in, restored.written))
        self._restored = restored.values
        self._redaction: Redaction | None = None
        if self._restored:
            self._restored = scope.own_tokens(self._restored, self._naming)
            self._redaction = Redaction(self._restored)

    def __call__(self, spec: ToolSpec, value: Any) -> Filtered:
        """Return a result with tokens in place of values; raises ToolResultInvalid if it cannot."""
        try:
            replaced = self._scope.json(value, spec.name, spec.output_schema, self._naming)
        except WithheldError as error:
            raise ToolResultInvalid(f"the result was withheld: {error}", tool=spec.name) from None
        except RecursionError:
            raise ToolResultInvalid("the result is nested too deeply", tool=spec.name) from None
        if self._redaction is None:
            return Filtered(replaced.value, replaced.counts)
        place = place_of((), spec.name, None)
        value = changed(replaced.value, place, self._without_restored, self._redaction.text)
        return Filtered(value, replaced.counts)

    def _without_restored(self, value: Any, _: object) -> Any:
        """Return a text without restored values, in whatever form; a token for a number that is one."""
        if isinstance(value, str):
            return self._redaction.text(value) if self._redaction else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return self._restored.get(str(value), value) if is_number else value

    def words(self, text: str, hits: Hits) -> str:
        """Return the text of an error with tokens in place of values."""
        replaced = self._scope.replaced_text(
            self._redaction.text(text) if self._redaction else text, self._naming
        )
        for kind, count in replaced.counts.items():
            hits[kind] = hits.get(kind, 0) + count
        return str(replaced.value)


def private_error(scope: "PrivacyScope | None", error: ToolError, written: Any) -> ToolError:
    """Return an error whose words have tokens in place of values: a gate may quote an argument.

    `written`: the caller's text in the call: its arguments, and the name of the tool.
    """
    if scope is None:
        return error
    naming = CallNaming(partial(scope.written_in, written))
    try:
        error.what, error.hint = scope.text(error.what, naming), scope.text(error.hint, naming)
    except (WithheldError, RecursionError) as withheld:
        error.what, error.hint = f"the error was withheld: {withheld}", ""
    error.args = (f"{error.what}\nhint: {error.hint}" if error.hint else error.what,)
    return error


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
        if private:  # last, because the host's filters must see the values
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
    for kind, count in filtered.hits.items():
        hits[kind] = hits.get(kind, 0) + count
    return filtered.value


def quick_check_of(schema: dict[str, Any] | None) -> Callable[[object], bool]:
    """Return a check that is True only for values that `schema` allows; None allows all.

    About other values, and all of an invalid schema, the functions below decide.
    """
    if schema is None:
        return lambda value: True
    try:
        return compile_schema(schema).is_certainly_valid
    except ToolInvalid:
        return lambda value: False


def check_arguments(spec: ToolSpec, arguments: object) -> None:
    """Raise ToolArgumentsInvalid unless the arguments match the tool's `parameters`."""
    if complaints := compile_schema(spec.parameters).complaints(arguments):
        raise ToolArgumentsInvalid("; ".join(complaints), tool=spec.name)


def check_result(spec: ToolSpec, value: object) -> None:
    """Raise ToolResultInvalid unless the result matches the tool's `output_schema`, if it has one."""
    if spec.output_schema is None:
        return
    if complaints := compile_schema(spec.output_schema).complaints(value):
        raise ToolResultInvalid(f"{spec.name}: {'; '.join(complaints)}", tool=spec.name)
