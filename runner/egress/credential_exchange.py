"""`CredentialExchange`: puts values in place of placeholders in the requests of one connection, and
placeholders in place of values in their answers.

A value goes to the hosts of its credential alone.  In answers all encodings of `EgressSecret.masks`
are replaced by others of the same length, so that no length of a message changes.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from urllib.parse import quote_from_bytes

from ...policies.network.credential import CellCredential, EgressSecret
from ...policies.network.rules import HttpRequest

_HEAD_BYTES = 8
Headers = list[tuple[bytes, bytes]]
_BASIC = re.compile(rb"([Bb][Aa][Ss][Ii][Cc] +)([A-Za-z0-9+/]{4,}={0,2})")
_FORM = b"application/x-www-form-urlencoded"
# Left out: encodings in which no value is found, parts of answers, and compressed frames of WebSocket.
_LEFT_OUT = frozenset(
    (b"accept-encoding", b"if-range", b"range", b"sec-websocket-extensions", b"te")
)


class Forms:
    """Byte strings to look for."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self.texts = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, self.texts)) or b"(?!)")

    def unfinished(self, data: bytes, end: int) -> int:
        """Return where one begins at or after `end` that goes on behind `data`; else its length."""
        found = len(data)
        for text in self.texts:  # by their heads, since comparing at each place takes long
            head, start = text[:_HEAD_BYTES], max(end, len(data) - len(text) + 1) - 1
            while -1 < (start := data.find(head, start + 1)) < found:
                if text.startswith(data[start:]):
                    found = start
        for start in range(max(end, len(data) - _HEAD_BYTES + 1), found):
            rest = data[start:]
            if any(each.startswith(rest) for each in self.texts):
                return start
        return found


class Replacer:
    """Replaces byte strings in a stream; keeps back only the beginning of one that is not complete."""

    def __init__(self, forms: Forms, put: Callable[[bytes], bytes]) -> None:
        self._forms = forms
        self._put = put
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on by now."""
        data = self._kept + data
        if not any(each in data for each in self._forms.texts):  # ten times as fast as the pattern
            cut = self._forms.unfinished(data, 0)
            self._kept = data[cut:]
            return data[:cut]
        made, end = [], 0
        for match in self._forms.pattern.finditer(data):
            made += [data[end : match.start()], self._put(match[0])]
            end = match.end()
        cut = self._forms.unfinished(data, end)
        self._kept = data[cut:]
        return b"".join((*made, data[end:cut]))

    def end(self) -> bytes:
        """Return what was kept back."""
        kept, self._kept = self._kept, b""
        return kept

    def whole(self, data: bytes) -> bytes:
        """Return a text that is no part of a stream with everything replaced."""
        return self._forms.pattern.sub(lambda match: self._put(match[0]), data)


class UnfitValueError(Exception):
    """A value cannot be put into a request; says why."""


class CellSecrets:
    """The credentials of all cells."""

    def __init__(self, secrets: Iterable[EgressSecret]) -> None:
        self.by_placeholder = {each.placeholder: each for each in secrets}
        self.placeholders = Forms(self.by_placeholder)
        self.masks = {
            form: put for each in self.by_placeholder.values() for form, put in each.masks
        }
        self.values = Forms(self.masks)
        self._credentials = [
            credential for each in self.by_placeholder.values() for credential in each.credentials
        ]

    def knows(self, name: str, port: int | None = None) -> bool:
        """Tell whether a host gets values, on `port` if that is given."""
        return any(
            each.is_for_host(name, each.ports[0] if port is None else port)
            for each in self._credentials
        )


class CredentialExchange:
    """The credentials of one connection to a host."""

    def __init__(
        self, cell: CellSecrets, name: str, port: int, on_foreign: Callable[[str], None]
    ) -> None:
        """`on_foreign` gets the variable of each placeholder that was sent although the host, or the
        request, does not get its value."""
        self._cell = cell
        self._name, self._port = name, port
        self._on_foreign = on_foreign
        # Answers are masked on every port: a program could have the host store a value.
        self.is_read = cell.knows(name)
        self._now: dict[bytes, bytes] = {}  # the values of the request, by placeholder
        self._basic: dict[bytes, bytes] = {}  # passwords sent by Basic, and those of the program

    def watch(self) -> Replacer:
        """Return what changes nothing, and reports placeholders."""
        return Replacer(self._cell.placeholders, self._value_of)

    def begin(self, asked: HttpRequest, scheme: str) -> None:
        """Choose the values of a request."""
        place = self._name, self._port, asked.method, asked.path

        def belongs(credential: CellCredential) -> bool:
            return credential.scheme == scheme and credential.is_for(*place)

        self._basic = {}
        self._now = {
            placeholder: each.value
            for placeholder, each in self._cell.by_placeholder.items()
            if any(map(belongs, each.credentials))
        }

    def target(self, target: bytes) -> bytes:
        """Return the target of the request as the host gets it."""
        return self._replacer(lambda found: _quoted(found, self._value_of(found))).whole(target)

    def headers(self, headers: Headers) -> Headers:
        """Return the headers of the request as the host gets them."""
        put = self._replacer(self._value_of)
        if not self.is_read:
            return [(name, self._with_basic(put, put.whole(value))) for name, value in headers]
        passed = [
            (name, self._with_basic(put, put.whole(value))) for name, value in headers
            if name.lower() not in _LEFT_OUT
        ]  # fmt: skip
        return [*passed, (b"Accept-Encoding", b"identity")]

    def _with_basic(self, put: Replacer, value: bytes) -> bytes:
        """Return a header with the user and password of the scheme Basic (RFC 7617) replaced."""
        found = _BASIC.fullmatch(value)
        if not found:
            return value
        try:
            decoded = base64.b64decode(found[2], validate=True)
        except binascii.Error:
            return value
        if (made := put.whole(decoded)) == decoded:
            return value
        encoded = base64.b64encode(made)
        self._basic[encoded] = found[2]
        return found[1] + encoded

    def body(self, headers: Headers) -> Replacer:
        """Return what changes the body of the request; it raises UnfitValueError."""
        kinds = [value.lower() for name, value in headers if name.lower() == b"content-type"]
        is_form = any(each.startswith(_FORM) for each in kinds)
        return self._replacer(self._in_form if is_form else self._value_of)

    def answer(self) -> Replacer:
        """Return what takes values out of the answer."""
        masks, forms = self._cell.masks, self._cell.values
        if not self.is_read:
            return Replacer(_NOTHING, bytes)
        if self._basic:
            masks = masks | self._basic
            forms = Forms(masks)
        return Replacer(forms, masks.__getitem__)

    def _replacer(self, put: Callable[[bytes], bytes]) -> Replacer:
        return Replacer(self._cell.placeholders, put)

    def _value_of(self, placeholder: bytes) -> bytes:
        if placeholder not in self._now:
            self._on_foreign(_variable(self._cell.by_placeholder[placeholder]))
        return self._now.get(placeholder, placeholder)

    def _in_form(self, placeholder: bytes) -> bytes:
        value = self._value_of(placeholder)
        if value != placeholder and _quoted(placeholder, value) != value:
            variable = _variable(self._cell.by_placeholder[placeholder])
            raise UnfitValueError(f"the value of {variable} would have to be escaped in a form")
        return value


_NOTHING = Forms(())


def _quoted(placeholder: bytes, value: bytes) -> bytes:
    """Return a value for the target of a request; what stays a placeholder stays as it is."""
    return value if value == placeholder else quote_from_bytes(value, safe="").encode()


def _variable(secret: EgressSecret) -> str:
    return secret.credentials[0].variable
