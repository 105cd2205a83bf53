"""`PrivacyScope`: the values of one session, client or sandbox, and the tokens that stand for them.

Replaces values in texts, in JSON and in the content of files, and restores tokens.
"""

import bisect
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...policies.errors import PolicyError
from ..text.redaction import changed, spliced
from ..text.secrets import find_secrets, names_no_secret, secret_named
from .detector import Detector, FoundValue, PlaceRule, ToolPlace, merged, place_of
from .known_values import KnownValue, KnownValues, View, decoded, view
from .naming import HOST, Naming, WrittenValues, is_intact, is_linked, tokens_in
from .outcomes import Replaced, Restored, WithheldError
from .value_vault import ValueVault

_MARKS = (b"\xff\xfe", b"\xfe\xff")  # byte order marks of UTF-16


_ANNOUNCEMENT = "phone: "  # makes PhoneDetector accept digits without groups
_PHONE_NAME = re.compile(
    r"(?i)(?:phone|mobile|fax|msisdn|whatsapp|telefon|t[ée]l[ée]phone|tel[ée]fono|rufnummer|m[óo]vil|celular|handy)s?"
    r"(?:[_ -]?(?:no|nr|numbers?|nummer))?$|^(?:tel|t[ée]l|cell|mobil)$"
)
_DIGIT = re.compile("[0-9]")
_LEAST_NUMBER = 10**7  # detectors find no shorter numbers


class PrivacyScope:
    """Personal data as one scope sees it.  Safe from many threads."""

    def __init__(
        self, name: str, vault: ValueVault, detectors: Sequence[Detector], names: Iterable[str] = (),
        fields: Sequence[PlaceRule] = (), restore: Sequence[PlaceRule] = (),
    ) -> None:  # fmt: skip
        self.name = name
        self.vault = vault
        self._detectors = tuple(detectors)
        self._without_digits = [
            each for each in detectors if not getattr(each, "needs_digit", False)
        ]
        self._kinds = frozenset(kind for each in detectors for kind in each.kinds)
        self._names = [KnownValue("name", each.casefold(), each) for each in names]
        self._fields = tuple(fields)
        self._restore = tuple(restore)
        self._lock = threading.Lock()
        self._revision = -1
        self._known = KnownValues()

    # towards the model

    def text(self, text: str, naming: Naming = HOST) -> str:
        """Return a text with tokens in place of values."""
        return self.replaced_text(text, naming).value  # type: ignore[no-any-return]

    def replaced_text(self, text: str, naming: Naming = HOST) -> Replaced:
        """Do what `text` does, and count."""
        found = self.find(text, naming)
        if not found:
            return Replaced(text, {})
        values = [
            KnownValue(
                each.kind, naming.normal(each.normal), each.text or text[each.start : each.end]
            )
            for each in found
        ]
        tokens = self._tokens_for(values)
        parts = [(each.start, each.end, token) for each, token in zip(found, tokens, strict=True)]
        return Replaced(spliced(text, parts), dict(Counter(each.kind for each in found)))

    def find(self, text: str, naming: Naming = HOST) -> list[FoundValue]:
        """Return the values in a text, in order and apart; known tokens are not looked into."""
        plain = self._without_tokens(text)
        found = [*self._found_in(plain, naming), *self._encoded_in(plain, naming)]
        if read := view(plain):
            found = _read_without_escapes(found, read, self._found_in(read.text, naming))
        return merged(found, text) if found else found

    def _without_tokens(self, text: str) -> str:
        """Return a text with blanks in place of tokens of this scope: no detector may match them."""
        blanks = [
            (each.start, each.end, " " * (each.end - each.start)) for each in tokens_in(text)
            if self.vault.value_of(self.name, each.token)
        ]  # fmt: skip
        return spliced(text, blanks) if blanks else text

    def _found_in(self, text: str, naming: Naming) -> list[FoundValue]:
        found = [
            each for each in self._detected_in(text)
            if each.kind != "secret" or not naming.spares(each)
        ]  # fmt: skip
        return found + [each for each in self._known_in(text) if not naming.spares(each)]

    def _detected_in(self, text: str) -> list[FoundValue]:
        looking = self._detectors if _DIGIT.search(text) else self._without_digits
        return [each for detector in looking for each in detector.find(text)]

    def _known_in(self, text: str) -> list[FoundValue]:
        known = self._known_values().find(text)
        return [FoundValue(start, end, value.kind, value.normal) for start, end, value in known]

    def written_in(self, arguments: Any) -> WrittenValues:
        """Return the values that a program wrote into arguments, in plain or in a form that `find`
        reads."""
        guesses = False
        words: set[tuple[str, str]] = set()

        def look(text: str) -> str:
            nonlocal guesses
            stored = [self.vault.value_of(self.name, each.token) for each in tokens_in(text)]
            guesses |= any(each is not None and not is_linked(each.normal) for each in stored)
            plain = self._without_tokens(text)
            read = view(plain)
            forms = [plain, *([read.text] if read else ()), *(said for *_, said in decoded(plain))]
            for form in forms:
                found = self._detected_in(form)
                guesses |= any(each.kind != "secret" for each in found)
                words.update((each.kind, each.normal) for each in (*found, *self._known_in(form)))
            return text

        def leaf(each: Any, place: ToolPlace) -> Any:
            nonlocal guesses
            guesses |= self._kind_by_name(each, place) == "phone"
            if isinstance(each, str | int | float) and not isinstance(each, bool):
                look(str(each))
            return each

        changed(arguments, place_of((), "", None), leaf, look)
        return WrittenValues(guesses, frozenset(words))

    def _encoded_in(self, text: str, naming: Naming) -> Iterable[FoundValue]:
        """Yield the runs of base64 or hexadecimal whose content holds a value."""
        for start, end, content in decoded(text):
            if any(each.kind != "secret" for each in self._found_in(content, naming)):
                yield FoundValue(start, end, "encoded", text[start:end])

    def _known_values(self) -> KnownValues:
        """Return the dictionary and the values of the scope, without those that were forgotten."""
        with self._lock:
            if self._revision != self.vault.revision:
                self._revision = self.vault.revision
                self._known = KnownValues([*self._names, *self.vault.known(self.name)])
            return self._known

    def _tokens_for(self, values: Sequence[KnownValue]) -> list[str]:
        try:
            tokens = self.vault.tokens_for(self.name, values)
        except PolicyError as error:
            raise WithheldError(error.what) from None
        known = self._known_values()
        for each in values:
            if is_linked(each.normal):
                known.add(each)
        return tokens

    def held_from(self, text: str) -> int:
        """Return where a known value may have begun that goes on behind the end of `text`."""
        return self._known_values().held_from(text)

    def json(
        self, value: Any, tool: str = "", schema: Mapping[str, Any] | None = None,
        naming: Naming = HOST,
    ) -> Replaced:  # fmt: skip
        """Return a JSON value with tokens in place of values; `tool` and `schema` declare some.

        Raises WithheldError for a number that is personal data, where the schema allows no text.
        """
        counts: Counter[str] = Counter()

        def text(each: str) -> str:
            replaced = self.replaced_text(each, naming)
            counts.update(replaced.counts)
            return str(replaced.value)

        def leaf(each: Any, place: ToolPlace) -> Any:
            if kind := place.kind or self._kind_by_name(each, place):
                return self._declared(each, kind, place, counts, naming)
            if isinstance(each, str):
                return (
                    text(each) if not names_no_secret(place.name) else self._identifier(each, text)
                )
            if _has_many_digits(each) and (found := self.find(str(each), naming)):
                return self._declared(each, found[0].kind, place, counts, naming)
            return each

        made = changed(value, place_of(self._fields, tool, schema), leaf, text)
        return Replaced(made if counts else value, dict(counts))

    def _kind_by_name(self, value: Any, place: ToolPlace) -> str:
        """Return "secret" for a text whose entry is called a password, or the like, and "phone" for a
        number that only the name of its entry announces."""
        is_digits = isinstance(value, str | int) and not isinstance(value, bool)
        if is_digits and "phone" in self._kinds and _PHONE_NAME.search(place.name):
            return "phone" if self._normal_of(str(value), "phone") else ""
        if "secret" in self._kinds and isinstance(value, str) and secret_named(place.name, value):
            return "secret"
        return ""

    def _identifier(self, value: str, text: Callable[[str], str]) -> str:
        """Return the values under names such as `cursor`. They may look random, but are secrets only
        if they have the form of one."""
        is_secret = any(find_secrets(value, at_random=False))
        only_looks = all(each.kind == "secret" for each in self.find(value))
        return value if only_looks and not is_secret else text(value)

    def _declared(
        self, value: Any, kind: str, place: ToolPlace, counts: Counter[str], naming: Naming
    ) -> Any:
        """Return the token of the value at a declared place; empty values stay."""
        if value is None or isinstance(value, bool) or value == "":
            return value
        written = str(value)
        if not isinstance(value, str) and not place.allows("string"):
            raise WithheldError(
                f"{place} is a number of the kind {kind}, and the tool's schema allows no text there"
            )
        if any(self.value(each.token) for each in tokens_in(written)):
            return self.text(written, naming)
        normal = self._normal_of(written, kind) or written.casefold()
        counts[kind] += 1
        return self._tokens_for([KnownValue(kind, naming.normal(normal), written)])[0]

    def _normal_of(self, written: str, kind: str) -> str:
        """Return the normal form of a text that is one value of that kind; empty if it is not."""
        said = _ANNOUNCEMENT * (kind == "phone") + written
        whole = len(said) - len(written), len(said)
        found = [each for each in self.find(said) if (each.start, each.end) == whole]
        return found[0].normal if found and found[0].kind == kind else ""

    def content(self, data: bytes, naming: Naming = HOST) -> bytes:
        """Return the content of a file with tokens in place of values, if it is text.

        Content that is neither UTF-8 nor UTF-16, but has no NUL, is read as text of eight bits.
        """
        encoding = "utf-16" if data.startswith(_MARKS) else "utf-8"
        try:
            return self._encoded(data, encoding, naming)
        except UnicodeDecodeError:
            if b"\0" in data:
                return data
        made = self._encoded(data, "utf-8", naming, "surrogateescape")
        return self._encoded(made, "latin-1", naming)

    def _encoded(self, data: bytes, encoding: str, naming: Naming, errors: str = "strict") -> bytes:
        text = data.decode(encoding, errors)
        made = self.text(text, naming)
        return data if made == text else made.encode(encoding, errors)

    # towards a tool, or the person

    def value(self, token: str) -> str | None:
        """Return the value of a token, as it was first written; None if it is unknown or expired."""
        found = self.vault.value_of(self.name, token.lower())
        return found.text if found else None

    def reveal(self, value: Any) -> Any:
        """Return a text or a JSON value with values in place of tokens, for the host alone."""
        return changed(value, place_of((), "", None), self._revealed, self._revealed_text)

    def _revealed(self, value: Any, _: ToolPlace) -> Any:
        return self._revealed_text(value) if isinstance(value, str) else value

    def _revealed_text(self, text: str) -> str:
        parts = [
            (each.start, each.end, value) for each in tokens_in(text)
            if (value := self.value(each.token)) is not None
        ]  # fmt: skip
        return spliced(text, parts) if parts else text

    def restored(
        self, tool: str, arguments: dict[str, Any], schema: Mapping[str, Any] | None
    ) -> Restored:
        """Return the arguments of a call with values in place of tokens, where a rule names the place.

        Raises WithheldError where the schema allows no value of that kind.
        """
        taken: dict[str, str] = {}
        counts: Counter[str] = Counter()
        unknown = 0

        def leaf(each: Any, place: ToolPlace) -> Any:
            nonlocal unknown
            if not isinstance(each, str):
                return each
            written = list(tokens_in(each))
            unknown += sum(self.value(token.token) is None for token in written)
            if not (written and place.is_named):
                return each
            for token in written:
                if found := self.vault.value_of(self.name, token.token):
                    taken[found.text] = token.token
                    counts[found.kind] += 1
            return _typed(each, self._revealed_text(each), place)

        made = changed(arguments, place_of(self._restore, tool, schema), leaf, lambda name: name)
        return Restored(made if taken else arguments, arguments, taken, dict(counts), unknown)

    def own_tokens(self, values: Mapping[str, str], naming: Naming) -> dict[str, str]:
        """Return restored values with the tokens that a naming gives them, if it gives them others."""
        made = dict(values)
        for text, token in values.items():
            stored = self.vault.value_of(self.name, token)
            if stored and (normal := naming.normal(stored.normal)) != stored.normal:
                made[text] = self._tokens_for([stored._replace(normal=normal)])[0]
        return made

    def why_unknown(self, token: str) -> str:
        """Say why a word that is written like a token has no value here."""
        return (
            "unknown here, or expired" if is_intact(token) else "mangled: its check letter is wrong"
        )


def _read_without_escapes(
    found: list[FoundValue], read: View, seen: list[FoundValue]
) -> list[FoundValue]:
    """Return the findings in a text, and in its view `seen`. Where both found something, letters of
    an escape, such as the n of "\\nann@example.org", are no part of the value."""
    placed = []
    for each in seen:
        start, end = read.span(each.start, each.end)
        placed.append(FoundValue(start, end, *each[2:4], read.text[each.start : each.end]))
    apart = merged(placed, "")
    ends = [each.end for each in apart]

    def is_misread(each: FoundValue) -> bool:
        after = bisect.bisect_right(ends, each.start)
        return after < len(apart) and apart[after].start < each.end

    kept = [each for each in found if not (read.cuts(each.start, each.end) and is_misread(each))]
    # Of two findings in one place the first counts. A tool gets values without escapes, but parts of a
    # URL or a program as they were written.
    return [*(each for each in placed if each.kind not in _VERBATIM), *kept, *placed]


_VERBATIM = ("login", "secret")


def _has_many_digits(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) >= _LEAST_NUMBER


def _typed(written: str, restored: str, place: ToolPlace) -> Any:
    """Return a restored text in the type that the schema asks for at its place."""
    if restored == written or place.allows("string"):
        return restored
    digits = restored.replace(" ", "").replace("-", "")
    if (
        digits.isascii()
        and digits.isdigit()
        and (place.allows("integer") or place.allows("number"))
    ):
        return int(digits)
    raise WithheldError(
        f"{place}: the value of this token is text, and the tool's schema allows none"
    )
