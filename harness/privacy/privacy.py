"""`Privacy`: what personal data is, which values are kept, and where they may go.

Inputs of a call: the data that the host passes into a cell, with tokens in place of values.

Programs then hold no value that they could pass on in another form.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import PolicyError
from ...policies.privacy_rules import (
    KINDS,
    Inputs,
    PrivacyRules,
    Scope,
    check_privacy,
    narrow_privacy,
)
from ..user_data import named_source
from .checked_numbers import CardDetector, IbanDetector, national_ids
from .contacts import EmailDetector, PhoneDetector, SecretDetector, host_detectors
from .detector import Detector, path_rule
from .naming import HOST, Naming
from .scope import PrivacyScope
from .value_vault import ValueVault

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
            return value  # invalid; the check of arguments reports it
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


_MOST_SCOPES = 100_000
_DAY_SECONDS = 86_400.0


class Privacy:
    """Personal data: models and programs see tokens, and tools that a rule names get the values.

    The rules are those of a policy (PrivacyRules).  `rules`: all of them at once, to which kinds,
    fields, names and places to restore are added.  `detectors`: more detectors, which may find kinds
    of their own.  `vault`: where values are kept, default in memory, or in the file that the rules
    name.

    Several sandboxes may share one Privacy, and then have the same tokens.  `close` drops the values of
    a vault that it made.  Raises PolicyError for invalid rules, or a vault that cannot be opened.
    """

    def __init__(
        self,
        *,
        kinds: Sequence[str] = (),
        fields: Mapping[str, str] | None = None,
        names: Sequence[str] = (),
        regions: Sequence[str] = ("US",),
        restore: Sequence[str] = (),
        inputs: Inputs = "tokens",
        scope: Scope = "vault",
        detectors: Sequence[Detector] = (),
        vault: ValueVault | None = None,
        rules: PrivacyRules | None = None,
    ) -> None:
        own = PrivacyRules(
            kinds=tuple(kinds), fields=dict(fields or {}), names=tuple(names), regions=tuple(regions),
            restore=tuple(restore), inputs=inputs, scope=scope, enabled=True,
        )  # fmt: skip
        self.rules = check_privacy(own if rules is None else _together(own, rules))
        self.vault = vault or _vault_of(self.rules)
        self._owns_vault = vault is None
        self._more = tuple(detectors)
        self._detectors = (*_detectors_of(self.rules), *self._more)
        self._lock = threading.Lock()
        self._scopes: dict[str, PrivacyScope] = {}

    def __repr__(self) -> str:
        return f"Privacy({self.vault!r}, restore={list(self.rules.restore)})"

    def scope(self, session: str = "", *, of: str = "") -> PrivacyScope:
        """Return the scope of a session; `of` names a client that shares nothing with others."""
        name = self._name(session, of)
        with self._lock:
            if name not in self._scopes:
                if len(self._scopes) >= _MOST_SCOPES:
                    self._scopes.clear()  # the vault keeps the values
                self._scopes[name] = self._new_scope(name)
            return self._scopes[name]

    def _name(self, session: str, of: str) -> str:
        """Return the name of a scope; names of sessions and of clients differ."""
        return f"{of}\0{session}" if session and self.rules.scope == "session" else of

    def continue_scope(self, source: str, session: str, *, of: str = "") -> None:
        """Let a new session, a branch of `source`, begin with the values of that, under their tokens.

        The two share nothing from then on.  Raises PolicyError if the vault is full.
        """
        before, after = self._name(source, of), self._name(session, of)
        if before != after:
            self.vault.copy_scope(before, after)

    def _new_scope(self, name: str) -> PrivacyScope:
        rules = self.rules
        return PrivacyScope(
            name, self.vault, self._detectors, rules.names,
            [path_rule(place, kind) for place, kind in rules.fields.items()],
            [path_rule(place) for place in rules.restore],
        )  # fmt: skip

    def within(self, policy: PrivacyRules) -> "Privacy":
        """Return this, with the rules of a policy besides: it finds what either finds, and restores
        where both do."""
        both = narrow_privacy(self.rules, policy)
        if both == self.rules:
            return self
        return Privacy(rules=both, detectors=self._more, vault=self.vault)

    def inputs(self, given: CallInputs, scope: PrivacyScope, naming: Naming = HOST) -> CallInputs:
        """Return the inputs of a call for the program; raises PolicyError for content that is not
        text."""
        if self.rules.inputs == "values":
            return given
        return tokenised_inputs(given, scope, naming, refuse_binary=self.rules.inputs == "tokens")

    def text(self, text: str) -> str:
        """Return a text with tokens in place of values."""
        return self.scope().text(text)

    def reveal(self, value: Any) -> Any:
        """Return a text or a JSON value with values in place of tokens, for a person."""
        return self.scope().reveal(value)

    def forget(self, value: str | None = None, *, session: str | None = None) -> int:
        """Erase a value, the values of a session, or all; return how many.  Their tokens stay unknown
        until a tool returns the values again."""
        scope = None if session is None else self.scope(session).name
        return self.vault.forget(value, scope=scope)

    def close(self) -> None:
        """Drop the values from memory, if this made the vault."""
        if self._owns_vault:
            self.vault.close()


def _together(own: PrivacyRules, rules: PrivacyRules) -> PrivacyRules:
    return msgspec.structs.replace(
        rules, enabled=True,
        kinds=tuple(dict.fromkeys((*rules.kinds, *own.kinds))) if rules.kinds else (),
        fields={**rules.fields, **own.fields}, names=tuple(dict.fromkeys((*rules.names, *own.names))),
        restore=tuple(dict.fromkeys((*rules.restore, *own.restore))),
    )  # fmt: skip


def _detectors_of(rules: PrivacyRules) -> list[Detector]:
    wanted = frozenset(rules.kinds or KINDS)
    # If two kinds match at one place, the first one counts.
    every: Iterable[Detector] = (
        EmailDetector(), IbanDetector(), CardDetector(), *national_ids(),
        PhoneDetector(rules.regions), *host_detectors(), SecretDetector(),
    )  # fmt: skip
    return [each for each in every if each.kinds & wanted]


def _vault_of(rules: PrivacyRules) -> ValueVault:
    kept = rules.keep_days * _DAY_SECONDS
    if not rules.vault:
        return ValueVault(keep_seconds=kept)
    from .value_vault import ValueFile

    return ValueFile(rules.vault, named_source(rules.key), keep_seconds=kept)
