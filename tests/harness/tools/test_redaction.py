"""A credential is taken out in whatever way JSON may write it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.text.redaction import REDACTED, Redaction
from tests.work import cost_of

SECRET = 'ab/c"d\\e\nf\u00e9\U0001f600x'


def units(text: str) -> list[int]:
    data = text.encode("utf-16-be")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


WRITTEN = {
    "as JSON": json.dumps(SECRET),
    "as JSON, not in ASCII": json.dumps(SECRET, ensure_ascii=False),
    "with a solidus escaped": json.dumps(SECRET).replace("/", "\\/"),
    "all escaped": '"' + "".join(f"\\u{unit:04x}" for unit in units(SECRET)) + '"',
    "all escaped, in capitals": '"' + "".join(f"\\u{unit:04X}" for unit in units(SECRET)) + '"',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_way_to_write_it_in_json_is_taken_out(name: str) -> None:
    assert json.loads(WRITTEN[name]) == SECRET
    assert Redaction([SECRET]).text(WRITTEN[name]) == f'"{REDACTED}"'
    within = json.dumps({"text": WRITTEN[name]})
    redacted = Redaction([SECRET]).text(within)
    assert json.loads(json.loads(redacted)["text"]) == REDACTED


@given(st.text(min_size=4, max_size=20).filter(lambda text: text.isascii()), st.data())
def test_any_choice_of_escapes_is_taken_out(secret: str, data: st.DataObject) -> None:
    escaped = [data.draw(st.booleans()) for _ in secret]
    written = "".join(
        f"\\u{ord(each):04x}" if is_escaped else json.dumps(each)[1:-1]
        for each, is_escaped in zip(secret, escaped, strict=True)
    )
    assert json.loads(f'"{written}"') == secret
    assert Redaction([secret]).text(f"<{written}>") == f"<{REDACTED}>"


def test_similar_text_stays() -> None:
    for text in ("ab\\/cd", "\\u0061b", "a\\\\u0062"):
        assert Redaction(["abcd"]).text(text) == text


def test_a_text_of_escapes_is_looked_through_in_bounded_memory() -> None:
    text = ("\\u0061" * 59 + "b") * 2000
    assert cost_of(lambda: Redaction(["a" * 60]).text(text)).memory_bytes < 4 * len(text)
