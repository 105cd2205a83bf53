"""Detectors find values in every common form, and leave alone what fails their check."""

import re
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright import Privacy
from cellwright.harness.privacy import checked_numbers

REGIONS = ("US", "GB", "DE", "FR")
VALUES = {
    "email": ["ann@example.org", "a.b+c@mail.example.co.uk", "jörg@bücher.example", "mary.o'brien@example.co.uk", "o'neill@example.org", "ann@example.photography", "bob [at] example [dot] org"],
    "phone": ["+1 202-555-0143", "(202) 555-0143", "+442079460958", "0049 30 123456", "+33 1 42 68 53 00",
              "+44 7700 900123", "+1 (555) 123-4567", "+49 (0)30 62331558", "+33 (0)5 24 52 36 52", "030-62331558", "0176/53693417", "0221 47207777",
              "(0161) 4960066", "0650528970", "01 79 27 66 46"],
    "iban": ["DE89370400440532013000", "GB82 WEST 1234 5698 7654 32", "FR1420041010050500013M02606"],
    "card": ["4111111111111111", "5500 0000 0000 0004", "3782-822463-10005", "6011000990139424"],
    "ssn": ["219-09-9999", "219 09 9999"],
    "nino": ["AB123456C", "AB 12 34 56 C"],
    "taxid": ["86095742719", "86 095 742 719"],
    "nir": ["255081416802538", "2 55 08 14 168 025 38"],
    "dni": ["12345678Z", "X1234567L", "12345678-Z", "49.875.316-T", "1.234.567-L", "X-1234567-L"],
    "fiscal": ["RSSMRA85T10A562S"],
    "pesel": ["44051401359"],
    "cpf": ["529.982.247-25"],
    "aadhaar": ["2341 2341 2346"],
    "sin": ["130 692 544", "130-692-544"],
    "personnummer": ["640823-3234", "19640823-3234"],
    "ip": ["203.0.113.7", "2001:db8::ff00:42:8329"],
    "mac": ["00:1B:44:11:3A:B7", "00-1b-44-11-3a-b7", "001b.4411.3ab7"],
    "login": ["bob:s3cret-pass"],
    "secret": ["ghp_" + "a1B2" * 9, "AKIAIOSFODNN7EXAMPLD"],
}  # fmt: skip
AROUND = ("{}", "it is {}, you see", "<b>{}</b>", '{{"a": "{}"}}', "a,{},b\n", "({})", "value={};")


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_is_found_whole_wherever_it_stands(kind: str) -> None:
    scope = Privacy(kinds=[kind], regions=REGIONS).scope()
    for value in VALUES[kind]:
        for around in AROUND if kind != "login" else ("https://{}@example.org/x",):
            text = around.format(value)
            found = [(each.kind, text[each.start : each.end]) for each in scope.find(text)]
            assert found == [(kind, value)], text


NOTHING = {
    "email": ["user@localhost", "@decorator", "a@b", "git@github.com:org/repo.git", "x @ y.org", "icon@3x.webp",
              "logo@2x.png", "jquery@3.7.1.min.js", "style@media.css", "x@self.weights", "@types/node@20.1.5"],
    "phone": ["2026-11-22", "192.168.100.100", "1234567890", "+1 111", "3.14159265358", "06/28/2025", "28.06.2025",
              "0.123456789", "order 0650528970", "Bestellnr. 0650528970", "RMA 0412-8834-221", "4111-2345-6789-0123", "502.494.195 EUR", "00 12", "177 594 897"],
    "iban": ["DE88370400440532013000", "XX82WEST12345698765432", "GB82WEST123456987654321"],
    "card": ["4111111111111112", "1234567890123456", "0.4111111111111111", "0000000000000000"],
    "ssn": ["000-12-3456", "666-12-3456", "900-12-3456", "219-00-9999", "219-09-0000", "219-09 9999", "part 219-09-9999"],
    "nhs": ["943 476 5919", "NHS 943 476 5918", "NHS: 943-476 5919"],
    "nino": ["BG123456C", "AB123456E", "DA123456C"],
    "taxid": ["86095742718", "12345678903"],
    "nir": ["255081416802539"],
    "dni": ["12345678A", "123456789Z"],
    "fiscal": ["RSSMRA85T10A562T"],
    "pesel": ["44051401358", "44991401359"],
    "cpf": ["529.982.247-26", "111.111.111-11"],
    "aadhaar": ["2341 2341 2347", "234123412346"],
    "sin": ["130 692 545", "130692544"],
    "personnummer": ["640823-3235", "641323-3234"],
    "ip": ["127.0.0.1", "0.0.0.0", "1.2.3", "1.2.3.4.5", "7.1.1.8", "section 17.1.1.8", "version 10.15.7.1",
           "v12.0.1.12", "pkg==16.2.0.1", "Chrome/125.0.0.0 Safari", "12.2.1.8 Scope", "lib-16.4.1.2.tar.gz", "10.0.0.0/8", "300.1.1.1", "::1", "[::2]", "12:30:45"],
    "mac": ["00:00:00:00:00:00", "00:1B:44:11:3A", "00:1B-44:11-3A:B7"],
    "login": ["https://example.org/a:b@c"],
    "secret": ["password: secret", "c0ffee" * 6],
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES.keys() - {"login", "secret"})
def test_a_value_is_found_beside_an_underscore_or_a_token(kind: str) -> None:
    """A program may glue something to a value so that no detector sees its end."""
    scope = Privacy(kinds=[kind], regions=REGIONS).scope()
    for value in VALUES[kind]:
        assert value not in Privacy(kinds=[kind], regions=REGIONS).text(f"k/{value}_x")
        assert value not in scope.text(f"{value}_{scope.text(value)}")
    assert "ann@example" not in Privacy().text("ann@example.orgpii_email_00000000 ann@example.org2")


@pytest.mark.parametrize("kind", NOTHING)
def test_what_fails_its_check_is_no_value(kind: str) -> None:
    scope = Privacy(kinds=[kind], regions=REGIONS).scope()
    for text in NOTHING[kind]:
        assert scope.find(text) == [], text


@pytest.mark.parametrize("kind", VALUES)
def test_every_spelling_of_a_value_has_the_same_token(kind: str) -> None:
    scope = Privacy(kinds=[kind], regions=REGIONS).scope()
    for value in VALUES[kind]:
        text = value if kind != "login" else f"https://{value}@example.org"
        assert scope.text(text) == scope.text(text)
    groups = {"card": ["4111111111111111", "4111 1111 1111 1111"], "phone": ["+12025550143", "(202) 555-0143"],
              "iban": ["DE89 3704 0044 0532 0130 00", "de89370400440532013000"], "ssn": ["219-09-9999", "219 09 9999"],
              "email": ["ANN@example.org", "ann@example.org"], "ip": ["2001:DB8::FF00:42:8329", "2001:db8:0::ff00:42:8329"]}  # fmt: skip
    assert len({scope.text(each) for each in groups.get(kind, ["x"])}) == 1


FORMS = {
    "zero-width characters between": "a\u200bnn@exam\u200dple.org",
    "full-width characters": "\uff41\uff4e\uff4e\uff20\uff45\uff58\uff41\uff4d\uff50\uff4c\uff45.org",
    "NUL between": "a\0n\0n\0@\0e\0x\0.\0o\0r\0g\0",
    "JSON escapes": r"ann\u0040example.org",
    "percent-encoding": "ann%40example.org",
    "HTML entities": "ann&#64;example.org ann&commat;example.org",
    "quoted-printable": "ann=40example.org",
    "base64": "YW5uQGV4YW1wbGUub3Jn",
    "hexadecimal": "616e6e406578616d706c652e6f7267",
    "spelt out": "ann (at) example (dot) org",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_other_ways_to_write_the_same_characters_are_undone(text: str) -> None:
    assert re.fullmatch(r"(pii_\w+[ \0]?)+", Privacy().text(text))


@pytest.mark.parametrize("before", [
    "Telefon: ", "Tel.: ", "Mobil: ", "Handy ", "Handynummer: ", "Rufnummer ", "Tél. : ", "téléphone ", "portable : ", "numéro ", "appelez le ",
    "Teléfono: ", "móvil ", "llame al ", "Phone: ", "call ", "TELEPHONE NO. ",
])  # fmt: skip
def test_a_number_is_announced_in_the_languages_of_regions(before: str) -> None:
    scope = Privacy(kinds=["phone"], regions=(*REGIONS, "ES")).scope()
    for number in ("911189610", "0176 53693417", "2025550143"):
        text = f"{before}{number} today"
        assert [text[each.start : each.end] for each in scope.find(text)] == [number]
    assert scope.find("call of order 911189610") == []


def test_a_number_of_a_patient_is_announced() -> None:
    """Without the word an American phone number would be one in one of eleven cases."""
    scope = Privacy(kinds=["nhs"]).scope()
    for text in ("NHS 943 476 5919", "NHS number: 943-476-5919", "nhs no. 9434765919"):
        assert [each.normal for each in scope.find(text)] == ["9434765919"]


@pytest.mark.parametrize(
    "text", ["f'ann@example.org'", "b'ann@example.org'", "d'ann@example.org", "x='ann@example.org'"]
)
def test_an_apostrophe_before_an_address_is_no_part_of_it(text: str) -> None:
    """In French it ends another word; in a program it begins a text."""
    scope = Privacy(kinds=["email"]).scope()
    assert [text[each.start : each.end] for each in scope.find(text)] == ["ann@example.org"]


@pytest.mark.parametrize(
    "text",
    [
        "server==203.0.113.7",
        "ip.addr==203.0.113.7",
        "203.0.113.0 - - [x]",
        "203.0.113.9/24",
        "12.34.56.78 said",
    ],
)
def test_the_address_of_a_machine_is_no_version(text: str) -> None:
    assert [each.kind for each in Privacy(kinds=["ip"]).scope().find(text)] == ["ip"]


NEVER = {
    "reversed": "gro.elpmaxe@nna",
    "rot13": "naa@rknzcyr.bet".replace("@", " "),
    "base64 of base64": "WVc1dVFHVjRZVzF3YkdVdWIzSm4=",
    "one character a line": "\n".join("ann@example.org"),
    "in words": "ann at example dot org",
    "homoglyphs": "ann\u0430@ex\u0430mple.org".replace("@", "\u0430"),
    "as codes": str(list(b"ann@example.org")),
}


@pytest.mark.parametrize("text", NEVER.values(), ids=NEVER)
def test_what_the_documents_say_is_never_found(text: str) -> None:
    """If one of these is found some day, the table in the README must say so."""
    assert Privacy(kinds=["email"]).text(text) == text


def test_names_are_found_as_words_without_regard_to_case_and_gaps() -> None:
    scope = Privacy(names=["Ann Smith", "Li", "Bob", "Zoë"]).scope()
    assert scope.text("ANN  SMITH and Ann-Smith") == scope.text("Ann Smith and Ann Smith")
    assert scope.text("Bob came").startswith("pii_name")
    assert scope.text("Zoë came").startswith("pii_name")
    for text in (
        "bob",
        "Annie Smith",
        "Bobby",
        "Ann",
        "Li came",
    ):  # Li is too short to be looked for
        assert scope.text(text) == text


def test_partly_overlapping_values_become_one() -> None:
    scope = Privacy(names=["example org Ltd"]).scope()
    text = "ann@example.org Ltd"
    assert re.fullmatch(r"pii_email_\w+", scope.text(text))
    assert scope.reveal(scope.text(text)) == text


HOSTILE = ["1" * 40_000, "1 " * 20_000, "12 " * 14_000, "202 555 " * 5000, "a@" * 20_000, "a." * 20_000, "@" * 40_000, "+1" * 20_000,
           "0:" * 20_000, "DE89" * 10_000, "%4" * 20_000, "\u200b" * 40_000, "A" * 40_000,
           "a" * 76 + "\n" + ("b" * 76 + "\n") * 500, "-----BEGIN " * 4000, "://a:" * 8000, "1." * 20_000, "a b c " * 8000,
           "\\" * 40_000, "\\n" * 20_000, "\x1b[" * 20_000, "\x1b]" * 20_000, "[1;" * 13_000, "&a" * 20_000, "%C3" * 13_000, "=\n" * 20_000, "=3D" * 13_000,
           "o'a.@" * 8000, "NHS 943 " * 5000, "tel " * 10_000, "order 0650 " * 4000, "\\nann@x.org" * 3500, "v1.2.3.4" * 5000, "a\u0301" * 20_000]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_time_is_linear_in_hostile_texts(text: str) -> None:
    """The work for twice the text is about twice: counted in CPU time of this process, with room."""
    scope = Privacy(names=["a b c", "1 2 3"]).scope()

    def seconds(each: str) -> float:
        begun = time.process_time()
        scope.find(each)
        return time.process_time() - begun

    once = min(seconds(text[: len(text) // 4]) for _ in range(2))
    assert seconds(text) < 12 * once + 0.2


def test_check_digits() -> None:
    checks = {checked_numbers.luhn: "79927398713", checked_numbers.verhoeff: "2363", checked_numbers.mod_11_10: "86095742719",
              checked_numbers.mod_97: "GB82WEST12345698765432"}  # fmt: skip
    for check, number in checks.items():
        last = (int(number[-1]) + 1) % 10
        assert [check(number), check(f"{number[:-1]}{last}")] == [True, False]


def test_without_phonenumbers_american_and_international_numbers_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    scope = Privacy(kinds=["phone"]).scope()
    assert [each.normal for each in scope.find("+442079460958, (202) 555-0143, 2026-11-22")] == [
        "+442079460958",
        "+12025550143",
    ]


ODD = "0123456789 -.:+@()/%&;\\=_\n\0\u212a\u017f\u00b2\u0663\uff11\u200b\ud800\U0001d7ce\u2160aAeEfFxXzZiIkKsS"
PIECES = (
    "DE89",
    "RSSMRA",
    "4111 1111",
    "+1 202",
    "pii_email_",
    "-----BEGIN ",
    "://a:b@",
    "%40",
    "\\u00",
    "&#",
    "AB12",
    "1::",
)


@given(
    st.lists(st.one_of(st.text(ODD, max_size=12), st.sampled_from(PIECES)), max_size=12).map(
        "".join
    )
)
@settings(deadline=None, max_examples=300)
def test_any_text_can_be_replaced_and_revealed(text: str) -> None:
    scope = Privacy(names=["AB12 x", "aA1"], regions=REGIONS).scope()
    made = scope.text(text)
    assert isinstance(scope.text(made) + scope.reveal(made), str)
    places = [place for each in scope.find(text) for place in (each.start, each.end)]
    assert places == sorted(places)


def test_groups_with_dots_are_a_card_and_no_machine() -> None:
    for number in ("4111.1111.1111.1111", "3782.822463.10005"):
        assert [each.kind for each in Privacy().scope().find(f"paid by {number}.")] == ["card"]
    assert Privacy().scope().find("4111.1111.1111.1112") == []
    assert [each.kind for each in Privacy().scope().find("at 4111.1a11.1111.")] == ["mac"]
