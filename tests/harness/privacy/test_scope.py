"""Texts, JSON and arguments of tools: values to tokens, and back where a rule names the place."""

import itertools
import unicodedata
from typing import Any

import pytest

from cellwright import Privacy
from cellwright.harness.privacy.outcomes import WithheldError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customers": {"type": "array", "items": {"$ref": "#/$defs/customer"}},
        "total": {"type": "integer"},
    },
    "$defs": {"customer": {"type": "object", "properties": {
        "name": {"type": "string", "x-pii": "name"},
        "born": {"anyOf": [{"type": "string", "x-pii": "Birth-Date"}, {"type": "null"}]},
        "number": {"type": ["integer", "string"], "x-pii": "customer"},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/customer"}},
    }}},
}  # fmt: skip
FOUND = {"total": 1, "customers": [{"name": "Ann Smith", "born": "1980-02-03", "number": 17, "friends": [
    {"name": "Bob Jones", "born": None}]}]}  # fmt: skip


def test_what_the_schema_declares_becomes_a_token_of_its_kind() -> None:
    scope = Privacy().scope()
    made, counts = scope.json(FOUND, "crm.find", SCHEMA)
    customer = made["customers"][0]
    assert counts == {"name": 2, "birthdate": 1, "customer": 1}
    assert customer["born"].startswith("pii_birthdate_")
    assert customer["number"].startswith("pii_customer_")
    assert customer["friends"][0]["born"] is None
    assert scope.text("about Bob Jones") == f"about {customer['friends'][0]['name']}"


def test_places_that_rules_name_are_declared_too() -> None:
    scope = Privacy(fields={"crm.*:rows[].who": "name", "crm.find:*.address": "address"}).scope()
    made = scope.json(
        {"rows": [{"who": "Ann"}], "x": {"address": "1 Main St"}, "who": "Eve"}, "crm.find"
    ).value
    assert made["rows"][0]["who"].startswith("pii_name_")
    assert made["x"]["address"].startswith("pii_address_")
    assert made["who"] == "Eve"
    assert scope.json({"rows": [{"who": "Cid Roe"}]}, "other").counts == {}


@pytest.mark.parametrize("declared", [
    {"properties": {"home": {"type": "object", "x-pii": "address"}}},
    {"properties": {"home": {"x-pii": "address", "properties": {"lines": {"type": "array"}}}}},
    {"patternProperties": {"^h": {"x-pii": "address"}}},
    {"unevaluatedProperties": {"x-pii": "address"}},
    {"if": {}, "then": {"properties": {"home": {"x-pii": "address"}}}},
    {"dependentSchemas": {"home": {"properties": {"home": {"x-pii": "address"}}}}},
])  # fmt: skip
def test_all_parts_of_a_declared_object_are_values(declared: dict[str, Any]) -> None:
    found = {"home": {"lines": ["12 Elm Road", "Springfield"], "town": {"name": "Quahog"}}}
    made = Privacy().scope().json(found, "crm.get", declared).value["home"]
    parts = [*made["lines"], made["town"]["name"]]
    assert all(each.startswith("pii_address_") for each in parts), made
    by_rule = Privacy(fields={"crm.get:home": "address"}).scope().json(found, "crm.get")
    assert by_rule.counts == {"address": 3}


@pytest.mark.parametrize("name", ["José Ñandú", "Zoë", "Łukasz Żak", "강민준", "Straße Öl"])
def test_a_declared_name_is_found_however_its_accents_are_written(name: str) -> None:
    for declared, written in itertools.product(("NFC", "NFD"), repeat=2):
        scope = Privacy(names=[unicodedata.normalize(declared, name)]).scope()
        text = unicodedata.normalize(written, f"to {name}, today")
        assert scope.text(text).startswith("to pii_name_"), (declared, written)
        assert scope.text(text).endswith(", today")
    assert Privacy(names=["José Ñandú"]).scope().text("JOSE NANDU").startswith("pii_name_")


@pytest.mark.parametrize(("name", "written"), [
    ("Ann Smith", "Smith, Ann"), ("Ann Smith", "SMITH Ann"), ("Ann Maria Smith", "Smith, Ann Maria"),
    ("Jürgen Müller", "Juergen Mueller"), ("Jürgen Müller", "MUELLER, JUERGEN"), ("Jürgen Müller", "Jurgen Muller"),
    ("Łukasz Żak", "Lukasz Zak"), ("Søren Ås", "Soren As"), ("Søren Ås", "Soeren Aas"), ("Straße Öl", "Strasse Oel"),
    ("Bob Jones-Lee", "Bob Jones Lee"), ("Æsa Þór", "Aesa Thor"),
])  # fmt: skip
def test_the_other_spellings_of_a_name_are_the_same_value(name: str, written: str) -> None:
    scope = Privacy(names=[name]).scope()
    assert scope.text(f"to {written}.") == f"to {scope.text(name)}."


@pytest.mark.parametrize(
    "written", ["A. Smith", "Ann", "Mr Smith", "Ann B. Smith", "Annie Smith", "AnnSmith"]
)
def test_parts_of_a_name_are_not_found(written: str) -> None:
    text = f"to {written}, today"
    assert Privacy(names=["Ann Smith"]).scope().text(text) == text


def test_names_of_entries_and_numbers_are_values_too() -> None:
    scope = Privacy(kinds=["email", "card"]).scope()
    made = scope.json({"ann@example.org": {"n": 4111111111111111, "f": 1.5, "b": True}}).value
    (key,) = made
    assert key.startswith("pii_email_")
    assert made[key]["n"].startswith("pii_card_")
    assert made[key]["f"] == 1.5
    assert scope.json({"a": [1, 2.5, None, True, "x"]}).value == {"a": [1, 2.5, None, True, "x"]}


def test_a_number_is_withheld_where_the_schema_allows_no_text() -> None:
    schema = {"properties": {"card": {"type": "integer"}}}
    with pytest.raises(WithheldError, match=r"^card is a number of the kind card") as refused:
        Privacy().scope().json({"card": 4111111111111111}, "pay", schema)
    assert "4111" not in str(refused.value)


@pytest.mark.parametrize("name", ["id", "next_token", "cursor"])
def test_a_secret_by_its_form_goes_under_any_name(name: str) -> None:
    secret = "ghp_" + "a8Zk3LmQ9rT2vX7yB4nC6dF1gH5jK0pW2sE8"
    assert Privacy().scope().json({name: secret}).counts == {"secret": 1}


@pytest.mark.parametrize("dash", ["\u2010", "\u2011", "\u2013", "\u2014", "\u2212", "\uff0d"])
def test_dashes_of_word_processors_separate_groups(dash: str) -> None:
    for kind, value in (("card", "4111-1111-1111-1111"), ("ssn", "536-22-8726")):
        scope = Privacy(kinds=[kind]).scope()
        assert scope.text(value.replace("-", dash)) == scope.text(value)
        assert scope.text(value).startswith(f"pii_{kind}_")


@pytest.mark.parametrize("name", ["phone", "phoneNumber", "home_phones", "mobile", "Fax-No", "tel"])
def test_the_name_of_an_entry_announces_a_phone_number(name: str) -> None:
    scope = Privacy(kinds=["phone"]).scope()
    token = scope.text("call (415) 555-2671").split()[1]
    assert scope.json({name: "415-555-2671"}).value == {name: token}
    assert scope.json({name: ["4155552671", 4155552671, None, "unknown", 7]}).value == {
        name: [token, token, None, "unknown", 7]
    }
    assert scope.json({f"{name}_id": "9155552671"}).counts == {}


def test_cursors_stay_and_passwords_go() -> None:
    scope = Privacy().scope()
    cursor = "aB3dE6gH9jK2mN5pQ8rS1tU4vW7x"
    made = scope.json({"next_token": cursor, "note": cursor, "password": "correct horse1"}).value
    assert made["next_token"] == cursor
    assert made["note"].startswith("pii_secret_")
    assert scope.json({"password": "hunter2hunter2"}).value["password"].startswith("pii_secret_")


def test_tokens_are_not_replaced_again() -> None:
    scope = Privacy().scope()
    made = scope.json({"password": "hunter2hunter2", "mail": "ann@example.org"}).value
    assert scope.json(made).value == made
    assert scope.text(f"password: {made['password']}") == f"password: {made['password']}"
    assert (
        scope.json({"who": made["mail"]}, "t", {"properties": {"who": {"x-pii": "name"}}}).value[
            "who"
        ]
        == made["mail"]
    )


RESTORE = ["mail.send:to", "mail.send:cc[]", "mail.send:headers.*", "pay.*:amounts[].card"]


def test_tokens_become_values_only_where_a_rule_names_the_place() -> None:
    scope = Privacy(restore=RESTORE).scope()
    token = scope.text("ann@example.org")
    given = {
        "to": f"Ann <{token.upper()}>",
        "cc": [token],
        "headers": {"X": token},
        "body": token,
        "bcc": [token],
    }
    restored = scope.restored("mail.send", given, None)
    assert restored.arguments == {
        "to": "Ann <ann@example.org>", "cc": ["ann@example.org"], "headers": {"X": "ann@example.org"},
        "body": token, "bcc": [token],
    }  # fmt: skip
    assert restored.counts == {"email": 3}
    assert restored.values == {"ann@example.org": token}
    assert scope.restored("other", given, None).arguments == given


def test_mangled_and_invented_tokens_stay_and_are_counted() -> None:
    scope = Privacy(restore=RESTORE).scope()
    token = scope.text("ann@example.org")
    given = {"to": f"pii_email_00000000 {token[:-1]}z {token}"}
    restored = scope.restored("mail.send", given, None)
    assert restored.unknown >= 1
    assert restored.arguments["to"].startswith("pii_email_00000000 ")


def test_a_restored_value_has_the_type_of_the_schema_or_is_withheld() -> None:
    scope = Privacy(restore=RESTORE).scope()
    card, mail = scope.text("4111 1111 1111 1111"), scope.text("ann@example.org")
    schema = {"properties": {"amounts": {"items": {"properties": {"card": {"type": "integer"}}}}}}
    restored = scope.restored("pay.now", {"amounts": [{"card": card}]}, schema)
    assert restored.arguments == {"amounts": [{"card": 4111111111111111}]}
    with pytest.raises(WithheldError, match=r"^amounts\[\]\.card: the value of this token is text"):
        scope.restored("pay.now", {"amounts": [{"card": mail}]}, schema)


def test_files_of_text_are_replaced_and_others_stay() -> None:
    scope = Privacy().scope()
    for encoding in ("utf-8", "utf-16"):
        made = scope.content("to ann@example.org".encode(encoding))
        assert made.decode(encoding).startswith("to pii_email_")
    picture = b"\x89PNG\0\xff ann@example.org"
    assert scope.content(picture) == picture


@pytest.mark.parametrize("data", [b"M\xfcller;ann@example.org\n", b"ann\xff@example.org \xc3\xa9"])
def test_text_of_another_encoding_is_replaced_too(data: bytes) -> None:
    scope = Privacy(names=["Müller"]).scope()
    made = scope.content(data)
    assert b"example.org" not in made
    assert b"pii_email_" in made
    assert b"ller" not in made
    assert scope.content(b"M\xfcnster \xff\xfe") == b"M\xfcnster \xff\xfe"


def test_schemas_that_refer_to_themselves_end() -> None:
    schema: dict[str, Any] = {"$ref": "#", "anyOf": [{"$ref": "#/anyOf/0"}, {"$ref": "#/x/y"}, 1]}
    schema["items"] = schema
    value: Any = "ann@example.org"
    for _ in range(100):
        value = [value]
    assert "example" not in repr(Privacy().scope().json(value, "t", schema).value)
