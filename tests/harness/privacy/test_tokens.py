"""Tokens survive what programs do to text, and cannot be guessed."""

import csv
import io
import json
import keyword

import pytest

from cellwright import Privacy
from cellwright.harness.privacy import naming
from cellwright.harness.privacy.naming import TOKEN, is_intact, make_token, tokens_in

KEY = bytes(range(32))


def test_a_token_is_an_identifier_with_its_kind_and_a_check() -> None:
    token = make_token(KEY, "", "email", "ann@example.org")
    assert TOKEN.fullmatch(token)
    assert token.isidentifier()
    assert not keyword.iskeyword(token)
    assert token.startswith("pii_email_")
    assert is_intact(token)
    assert is_intact(token.upper())


def test_a_token_depends_on_key_scope_kind_and_value() -> None:
    made = {
        make_token(key, scope, kind, value)
        for key in (KEY, KEY[::-1]) for scope in ("", "one") for kind in ("email", "name")
        for value in ("a", "b")
    }  # fmt: skip
    assert len(made) == 16


def test_every_change_of_one_character_and_most_swaps_are_noticed() -> None:
    token = make_token(KEY, "", "email", "ann@example.org")
    letters = token[-8:]
    changed = [
        token[:-8] + letters[:place] + other + letters[place + 1 :]
        for place in range(8) for other in naming._ALPHABET if other != letters[place]
    ]  # fmt: skip
    assert [each for each in changed if is_intact(each)] == []
    swapped = [
        token[:-8] + letters[:place] + letters[place + 1] + letters[place] + letters[place + 2 :]
        for place in range(7) if letters[place] != letters[place + 1]
    ]  # fmt: skip
    assert [each for each in swapped if is_intact(each)] == []


def test_another_value_with_the_same_token_gets_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(naming, "_CHARACTERS", 1)  # 32 tokens; the pattern wants eight characters
    privacy = Privacy(kinds=["email"])
    made = {privacy.vault.tokens_for("", [value])[0] for value in _emails(20)}
    assert len(made) == 20


def _emails(count: int) -> list:
    from cellwright.harness.privacy.known_values import KnownValue

    return [
        KnownValue("email", f"user{n}@example.org", f"user{n}@example.org") for n in range(count)
    ]


def test_tokens_survive_code_json_csv_and_markdown_and_come_back() -> None:
    scope = Privacy(names=["Ann Smith"], fields={"t:id": "patient"}).scope()
    text = "ann@example.org, Ann Smith; DE89370400440532013000 | 4111111111111111"
    made = scope.text(text)
    row = [each.token for each in tokens_in(made)]
    assert len(row) == 4
    buffer = io.StringIO()
    csv.writer(buffer).writerow(row)
    for carried in (
        json.loads(json.dumps(made)), next(csv.reader([buffer.getvalue()])), made.upper(), made.title(),
        f"| {' | '.join(row)} |", f"`{made}`", f"**{made}**", eval(f"{row[0]!r} + ' x'"),
    ):  # fmt: skip
        said = carried if isinstance(carried, str) else " ".join(carried)
        assert "ann@example.org" in scope.reveal(said)


def test_a_word_that_only_looks_like_a_token_stays() -> None:
    scope = Privacy().scope()
    known = scope.text("ann@example.org")
    invented = known[:-1] + ("0" if known[-1] != "0" else "1")
    for text in (invented, known + "x", "x" + known, known[:-1], "pii_email_00000000", "pii_email"):
        assert scope.reveal(text) == text
    assert "check letter" in scope.why_unknown(invented)
    assert "unknown" in scope.why_unknown(make_token(KEY, "", "email", "another"))
    assert scope.reveal(f"_{known}") == "_ann@example.org"


def test_tokens_of_another_scope_mean_nothing() -> None:
    privacy = Privacy(scope="session")
    one, other = privacy.scope("one"), privacy.scope("other")
    token = one.text("ann@example.org")
    assert other.text("ann@example.org") != token
    assert other.reveal(token) == token
    assert one.reveal(token) == "ann@example.org"
    shared = Privacy()
    assert shared.scope("one") is shared.scope("other")
    assert shared.scope("one", of="client") is not shared.scope("one")
