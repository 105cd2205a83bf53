"""`Redaction`: replaces given secrets in a text, in whatever form an encoder may have written them:
verbatim, in any JSON escapes (also of JSON within JSON), in base64, in hexadecimal and in
percent-encoding, in upper or lower case.

Walking through values: every text of a JSON value, and the parts of a text that are replaced.
"""

import base64
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

SHORTEST = 4  # characters of a secret; a shorter one would match everywhere
REDACTED = "[credential]"


class Redaction:
    """Replaces secrets: each by `REDACTED`, or by its value in a mapping.

    A replacement must be of letters, digits and `_` or brackets, which no encoding changes.
    """

    def __init__(self, secrets: Iterable[str] | Mapping[str, str]) -> None:
        given = secrets if isinstance(secrets, Mapping) else dict.fromkeys(secrets, REDACTED)
        forms = {form: given[secret] for secret in given for form in _forms(secret)}
        self._forms = sorted(forms.items(), key=lambda pair: len(pair[0]), reverse=True)
        self._encoded = [(re.compile(_in_percents(each)), put) for each, put in given.items()]
        self._escaped = [(re.compile(_in_json(each)), put) for each, put in given.items()]

    def __bool__(self) -> bool:
        return bool(self._forms)

    def text(self, text: str) -> str:
        if "\\" in text:  # first, because an escaped form may begin like a plain one
            for escaped, put in self._escaped:
                text = escaped.sub(put, text)
        for form, put in self._forms:
            text = text.replace(form, put)
        if "%" in text:
            for encoded, put in self._encoded:
                text = encoded.sub(put, text)
        return text


def _forms(secret: str) -> set[str]:
    """Return the forms of a secret that have no variants."""
    return {form for form in _each_form(secret) if len(form) >= SHORTEST}


def _each_form(secret: str) -> tuple[str, ...]:
    data = secret.encode()
    plain = (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    return (*plain, data.hex(), data.hex().upper(), *_in_base64(data))


def paired_forms(secret: str, put: str) -> dict[str, str]:
    """Return forms of a secret, each with the same form of `put`, which has the same length, for
    streams of bytes, in which nothing may get longer: those of `_forms`, base64 of the secret alone,
    the usual one of percent-encoding, and JSON with escaped slashes."""

    def each_form(text: str) -> tuple[str, ...]:
        escaped = json.dumps(text)[1:-1].replace("/", r"\/")
        percents = quote(text, safe="")
        lower = re.sub("%..", lambda found: found[0].lower(), percents)
        whole = base64.b64encode(text.encode()).decode().rstrip("=")
        urls = whole.translate(str.maketrans("+/", "-_"))
        return (*_each_form(text), whole, urls, escaped, percents, lower)

    pairs = zip(each_form(secret), each_form(put), strict=True)
    return {
        form: twin.ljust(len(form), "x")[: len(form)]
        for form, twin in pairs if len(form) >= SHORTEST
    }  # fmt: skip


_MOST_ESCAPES = 8  # backslashes before an escape: three times JSON within JSON
_MOST_MIXED = 4  # backslashes in a row that may each be escaped differently
_SHORT_ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def _in_json(secret: str) -> str:
    """Return a pattern of every way to write a secret in JSON: the encoder chooses which characters it
    escapes, and the case of the digits (RFC 8259, 7)."""
    runs = re.findall(r"\\+|[^\\]", secret, re.DOTALL)
    return "".join(map(_run_in_json, runs))


def _run_in_json(run: str) -> str:
    escape = rf"\\{{1,{_MOST_ESCAPES}}}"
    if run[0] == "\\":
        if len(run) > _MOST_MIXED:
            return "(?:" + "|".join(rf"\\{{{len(run) * times}}}" for times in (4, 2, 1)) + ")"
        return rf"(?:{escape}u005[cC]|\\{{4}}|\\{{2}}|\\)" * len(run)
    units = run.encode("utf-16-be", "surrogatepass").hex()
    written = "".join(
        f"{escape}u" + "".join(f"[{digit}{digit.upper()}]" for digit in units[start : start + 4])
        for start in range(0, len(units), 4)
    )
    plain = re.escape(run)
    if run in '"/':
        plain = rf"\\{{0,{_MOST_ESCAPES}}}{plain}"
    elif run in _SHORT_ESCAPES:
        plain = rf"(?:{plain}|{escape}{_SHORT_ESCAPES[run]})"
    return f"(?:{written}|{plain})"


def _in_percents(secret: str) -> str:
    """Return a pattern of every way to percent-encode a secret: the encoder chooses which bytes it
    encodes, and the case of the digits (RFC 3986, 2.1)."""
    return "".join(map(_byte_in_percents, secret.encode()))


def _byte_in_percents(byte: int) -> str:
    escaped = "%" + "".join(f"[{digit}{digit.upper()}]" for digit in f"{byte:02x}")
    if byte >= 0x80:
        return escaped
    plain = r" |\+" if byte == 0x20 else re.escape(chr(byte))
    return f"(?:{plain}|{escaped})"


def _in_base64(data: bytes) -> Iterable[str]:
    """Yield the base64 forms of `data` at any place of a text: three alignments, two alphabets."""
    for skipped in range(3):
        encoded = base64.b64encode(b"\0" * skipped + data)
        # The first and the last group also depend on the neighbouring bytes.
        whole = encoded[
            (4 if skipped else 0) : len(encoded) - (0 if (skipped + len(data)) % 3 == 0 else 4)
        ]
        yield whole.decode()
        yield whole.translate(bytes.maketrans(b"+/", b"-_")).decode()


class Place(Protocol):
    """The place of a value within another one."""

    def entry(self, name: str) -> Self:
        """Return the place of the entry of that name."""

    def item(self) -> Self:
        """Return the place of the items of a list."""


_P = TypeVar("_P", bound=Place)


def changed(
    value: Any, place: _P, change: Callable[[Any, _P], Any], rename: Callable[[str], str]
) -> Any:
    """Return a JSON value with each text, number and constant changed by `change`, which gets its
    place, and each name of an entry by `rename`; names that become equal are numbered."""
    if isinstance(value, list):
        return [changed(each, place.item(), change, rename) for each in value]
    if not isinstance(value, dict):
        return change(value, place)
    made: dict[str, Any] = {}
    numbers = itertools.count(2)
    for name, each in value.items():
        word = own = rename(name)
        while own in made:
            own = f"{word} {next(numbers)}"
        made[own] = changed(each, place.entry(name), change, rename)
    return made


def spliced(text: str, parts: Iterable[tuple[int, int, str]]) -> str:
    """Return `text` with each part, from start to end, replaced; parts are in order and apart."""
    made, end = [], 0
    for start, stop, put in parts:
        made += [text[end:start], put]
        end = stop
    return "".join([*made, text[end:]])
