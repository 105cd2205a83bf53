"""Escapes and invisible characters around values: no letter of an escape becomes part of a value, and
the text that is left is still JSON, CSV, HTML, percent-encoded or quoted-printable."""

import csv
import html
import io
import json
import quopri
import random
import re
import urllib.parse
from collections.abc import Callable

import pytest

from cellwright import Privacy
from cellwright.harness.privacy.naming import tokens_in

VALUES = {
    "email": "ann@example.org",
    "card": "4111 1111 1111 1111",
    "iban": "DE89 3704 0044 0532 0130 00",
    "phone": "+1 202-555-0143",
    "ssn": "219-09-9999",
    "ip": "203.0.113.7",
}
DOCUMENT = "Contacts:\n{0}\n\t{0}\r\n\f{0} <{0}> ({0})"
ESC = "\x1b"


def _in_csv(text: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerow([text, "x"])
    return buffer.getvalue()


ENCODINGS: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
    "JSON": (json.dumps, json.loads),
    "JSON of JSON": (lambda text: json.dumps(json.dumps(text)), lambda said: json.loads(json.loads(said))),
    "JSON with escapes for signs": (
        lambda text: json.dumps(text).replace("<", r"\u003c").replace(">", r"\u003E"), json.loads,
    ),
    "percent-encoding": (urllib.parse.quote, urllib.parse.unquote),
    "HTML": (lambda text: html.escape(text).replace("\n", "&#10;"), html.unescape),
    "quoted-printable": (
        lambda text: quopri.encodestring(f"a=b {text}".encode()).decode(),
        lambda said: quopri.decodestring(said.encode()).decode().removeprefix("a=b "),
    ),
    "CSV": (_in_csv, lambda said: next(csv.reader(io.StringIO(said, newline="")))[0]),
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", VALUES)
def test_what_is_left_of_an_encoded_text_can_be_decoded(encoding: str, kind: str) -> None:
    encode, decode = ENCODINGS[encoding]
    scope = Privacy(kinds=[kind]).scope()
    text = DOCUMENT.format(VALUES[kind])
    made = scope.text(encode(text))
    token = scope.text(VALUES[kind])
    assert decode(made) == decode(encode(DOCUMENT.format(token)))
    assert scope.value(token) == VALUES[kind]
    assert scope.reveal(decode(made)) == decode(encode(text))
    assert decode(scope.reveal(made)) == decode(encode(text))


def test_the_addresses_of_a_json_text_are_restored_as_they_were() -> None:
    """The letter of the escape was once taken for the first letter of the address behind it."""
    source = random.Random(5)
    for _ in range(100):
        name = "".join(source.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=6))
        address = f"{name}@example.org"
        scope = Privacy(kinds=["email"]).scope()
        made = json.loads(scope.text(json.dumps({"body": f"To:\n{address}\n\t{address}"})))
        assert {scope.value(each.token) for each in tokens_in(made["body"])} == {address}


INVISIBLE = {
    "zero-width space": "\u200b", "soft hyphen": "\u00ad", "byte order mark": "\ufeff", "NUL": "\0",
    "colour": f"{ESC}[1;31m", "end of colour": f"{ESC}[0m", "colour in JSON": r"\u001b[31m",
    "link": f"{ESC}]8;;https://example.org{ESC}\\", "colon colour": f"{ESC}[38:2:1:2:3m",
    "colour of eight bits": "\x9b31m", "colour of a log": "^[[31m", "colour without ESC": "[1;31m",
    "character set": f"{ESC}(B", "entity": "&ZeroWidthSpace;", "entity by number": "&#8203;",
}  # fmt: skip


@pytest.mark.parametrize("name", INVISIBLE)
@pytest.mark.parametrize("kind", VALUES)
def test_invisible_characters_are_no_part_of_a_value(name: str, kind: str) -> None:
    hidden, value = INVISIBLE[name], VALUES[kind]
    scope = Privacy(kinds=[kind]).scope()
    around = scope.text(f"see {hidden}{value}{hidden}, bob")
    assert around == f"see {hidden}{scope.text(value)}{hidden}, bob"
    within = scope.text(f"see {value[:6]}{hidden}{value[6:9]}{hidden}{value[9:]}, bob")
    assert within == f"see {scope.text(value)}, bob"
    assert scope.value(scope.text(value)) == value


@pytest.mark.parametrize("before", ["", *(
    "phone=", "card=", "x%20", "C:\\new\\", "50%", "a=b&c=",
)])  # fmt: skip
def test_what_only_looks_like_an_escape_hides_no_value(before: str) -> None:
    for kind, value in VALUES.items():
        made = Privacy(kinds=[kind]).scope().text(f"{before}{value}")
        assert re.search(rf"pii_{kind}_\w{{8}}$", made), made


def test_the_first_writing_of_a_value_does_not_decide_what_a_tool_gets() -> None:
    scope = Privacy().scope()
    for written in (
        "a\u200bnn@example.org",
        r"ann\u0040example.org",
        "ann%40example.org",
        r"ann\u{40}example.org",
        r"ann\U00000040example.org",
        r"ann\100example.org",
    ):
        assert scope.value(scope.text(written)) == "ann@example.org"


@pytest.mark.parametrize(
    "escape", ["\\n", "\\t", "\\\\n", "\\u003c", "\\x20", "%0A", "=3D", f"{ESC}[31m"]
)
def test_a_token_behind_an_escape_is_revealed(escape: str) -> None:
    scope = Privacy().scope()
    token = scope.text("ann@example.org")
    assert scope.reveal(f'"{escape}{token}{escape}"') == f'"{escape}ann@example.org{escape}"'
    assert scope.reveal(f"n{token}") == f"n{token}"
