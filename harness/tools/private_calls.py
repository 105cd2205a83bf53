"""Personal data in the calls of one caller: tokens on the way to it, values on the way to a tool."""

from functools import partial
from typing import TYPE_CHECKING, Any

from ...policies.errors import ToolArgumentsInvalid, ToolError, ToolResultInvalid
from ..privacy.naming import CallNaming
from ..privacy.outcomes import Restored, WithheldError
from ..privacy.paths import place_of
from ..schemas.spec import ToolSpec
from ..text.redaction import Redaction
from ..text.walking import changed
from .filters import Filtered, Hits

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

    `written` is what the caller wrote into the call: its arguments, and the name of the tool.
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
