"""Inputs of a call: what the host passes into a cell, with tokens in place of values.

Programs then hold no value that they could pass on in another form.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...policies.errors import PolicyError
from .naming import Naming
from .scope import PrivacyScope

_Content = Mapping[str, Any] | None


class CallInputs(NamedTuple):
    """The arguments of a call that hold data.  The code is not among them: the model wrote it."""

    inputs: _Content
    files: _Content
    stdin: str | bytes | None
    env: _Content
    arguments: tuple[str, ...]


def tokenised_inputs(
    given: CallInputs, scope: PrivacyScope, naming: Naming, *, refuse_binary: bool
) -> CallInputs:
    """Return inputs with tokens in place of values; raises PolicyError for content that is no text, if
    that is to be refused."""

    def content(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return scope.text(value, naming)
        if not isinstance(value, bytes):
            return value  # invalid, which the check of the arguments says
        if refuse_binary and not _is_text(value):
            raise PolicyError(
                f"{name}: is no text, and may hold personal data that a program would see",
                'privacy.inputs = "texts" passes such content on unchanged',
            )
        made = scope.content(value, naming)
        return type(value)(made) if made != value else value

    def contents(name: str, values: _Content) -> _Content:
        if not isinstance(values, Mapping):
            return values
        return {key: content(f"{name}: {key!r}", value) for key, value in values.items()}

    def named(values: _Content) -> _Content:
        """Return files with tokens in their names too."""
        if not isinstance(values, Mapping):
            return values
        made = {
            scope.text(key, naming) if isinstance(key, str) else key: each
            for key, each in values.items()
        }
        if len(made) < len(values):
            raise PolicyError("files: two names differ in the writing of personal data alone")
        return made

    return CallInputs(
        scope.json(dict(given.inputs), naming=naming).value
        if isinstance(given.inputs, Mapping)
        else given.inputs,
        named(contents("files", given.files)),
        content("stdin", given.stdin),
        contents("env", given.env),
        tuple(scope.text(each, naming) for each in given.arguments),
    )


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
    except UnicodeDecodeError:
        return False
    return "\0" not in text
