"""Texts with values of the package Faker, and hard negatives: by other authors than the detectors.

Each text says which values it holds, and where.  Words around the values are in the language of their
region.  The hard negatives have the form of what logs, programs, changelogs and orders contain.
"""

import html
import importlib.util
import json
import random
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..harness.privacy.contacts import PhoneDetector

REGIONS = ("US", "DE", "FR", "ES", "GB")
_LOCALES = {"US": "en_US", "DE": "de_DE", "FR": "fr_FR", "ES": "es_ES", "GB": "en_GB", "IT": "it_IT",
            "PL": "pl_PL", "BR": "pt_BR", "IN": "en_IN", "CA": "en_CA", "SE": "sv_SE",
            "NL": "nl_NL"}  # fmt: skip
_PHONE_WORDS = {
    "US": (
        "Phone: ", "call ", "mobile: ", "Cell ", "contact ",
    ),
    "GB": (
        "Tel. ", "telephone ", "ring ", "Mobile: ", "at ",
    ),
    "DE": (
        "Telefon: ", "Tel.: ", "Mobil: ", "Handy ", "Rufnummer ", "erreichbar unter ",
    ),
    "FR": (
        "Tél. : ", "téléphone ", "portable : ", "numéro ", "appelez le ", "au ",
    ),
    "ES": (
        "Teléfono: ", "móvil ", "Tel. ", "llame al ", "número ", "en el ",
    ),
}  # fmt: skip
# The words of a text around a value, as logs, tables and programs have them.
_CONTEXTS = (
    "{}", "{} ", "- {}\n", "({})", "<{}>", "\"{}\"", "'{}'", "key: {}\nnext: 1", "a;b;{};c\n",
    "a,{},c\n", "\t{}\t", "value={}", "2026-03-04 11:02:19,113 INFO user {} logged in", "x = [{}]",
    "<td>{}</td>", "| {} | yes |", "see {}.", "{}, {{}}",
)  # fmt: skip
_NEGATIVES = (
    "icon@{d}x.webp", "logo@2x.png", "img/hero@{d}x.jpg", "npm i react@{d}.2.{d}",
    "jquery@3.{d}.1.min.js", "@types/node@20.{d}.5", "actions/checkout@v{d}",
    "git@github.com:org/repo.git", "root@localhost", "y = A@B.T", "self.w@self.x", "@property",
    "a@b", "image@sha256:{h}", "postgres://db@localhost/x", "style@media.css", "cat foo@1.tar.gz",
    "section {d}.1.{d}.8", "version 1.{d}.3.4", "v{d}.0.1.12", "pkg=={d}.2.0.1",
    "Chrome/12{d}.0.0.0 Safari/537.36", "§ {d}.4.2.1", "{d}.2.1.{d} Scope of the standard",
    "chapter 3.{d}.2.2", "release {d}.10.0.3", "firmware 2.{d}.11.5", "{d}.{d}.{d}", "127.0.0.1",
    "0.0.0.0", "build 10.0.{dddd}.1", "OID 1.3.6.1.4.1.{dddd}", "10.0.0.0/8",
    "lib-{d}.4.1.2.tar.gz", "06/2{d}/2025", "2{d}.06.2025", "2025-06-2{d}",
    "20250{d}28 1{d}:22:07", "2025/0{d}/14", "1{d}:22:07.123456", "Q{d} 2024-2025", "1990-2025",
    "order 112-{ddddddd}-{ddddddd}", "Order #{dddd} {dddd} {dddd}", "invoice 2025-{dddd}-{dd}",
    "INV-{dddd}-{ddddd}", "PO 4500-{ddd}-{dddd}", "ticket {dddddddd}", "RMA {dddd}-{dddd}-{ddd}",
    "SKU {dd}-{ddd}-{dddd}", "part {ddd}-{dd}-{dddd}", "case no. {ddd} {ddd} {ddd}",
    "order {dddddd}-{dddd}", "Bestellung {dddddddddd}", "Bestellnr. {ddd}-{ddd}-{ddd}",
    "Rechnung {dddd}/{dddddd}", "commande {dddddddddd}", "pedido {ddddddddd}",
    "ISBN 978-{d}-{ddd}-{ddddd}-{d}", "EAN {ddddddddddddd}", "GTIN {dddddddddddddd}",
    "pid {ddddd} tid {dddddd}", "size {dddddddd} bytes", "{ddd},{ddd},{ddd}",
    "{ddd}.{ddd}.{ddd} EUR", "1{d}.{dddddd}, -{d}.{dddddd}", "id={dddddddddd}",
    "\"id\": {dddddddddddd}", "ts=17{dddddddd}", "17{ddddddddddd}", "0x{h}", "{h}", "sha1 {h}{h}",
    "{h8}-{h4}-4{h3}-9{h3}-{h12}", "M{d} {dd}.{d} {dd}.{d}l{d}-{d}", "[{ddd}, {ddd}, {dddd}]",
    "{dd} {dd} {dd} {dd} {dd}", "{dddd} {dddd}", "1920x1080", "{ddddd}-{dddd} ZIP",
    "pages {ddd}-{ddd}", "{ddd}-{dddd} items", "port {dddd} to {dddd}",
    "@@ -{dd},{d} +{dd},{dd} @@", "+{dd} -{ddd}", "{dd}:{dd}:{dd}:{dd}", "std::vector::iterator",
    "a::b", "::before", "{h4}:{h4}", "rgb({dd}, {ddd}, {dd})", "{dd}%20{dd}", "k={dddd}&v={dddd}",
    "DE{dd} test", "GB{dd} ABCD 12", "IT-{dddd}",
    "[{ddddd}.{dddddd}] usb 1-1: device {dddd}:{dddd}", "{dddd}-{dddd}-{dddd}-{dddd} (coupon)",
    "0{ddddddd}", "lot 000{ddddd}", "ISBN 0{ddddddddd}", "account 00{dddddddd}", "0{ddd}-{dddd}",
    "0{d}/1{d}/2{d}", "no. 0000{dddddd}", "Artikelnr. 0{ddddddddd}", "password: none",
    "token=None", "secret_key: str", "api_key = os.environ['API_KEY']",
    "https://example.org/a:b@c", "tracking {dddd} {dddd} {dddd} {dddd} {dd}",
)  # fmt: skip


_PLANS = PhoneDetector()  # only to leave out numbers that no plan has
_ANNOUNCED = 0.7  # share of phone numbers with a word before them


class Planted(NamedTuple):
    """A text, the kind of the value in it, and where that stands; hard negatives have no kind."""

    text: str
    kind: str
    start: int
    end: int
    group: str


class FakerTexts:
    """Values and texts of one seed."""

    def __init__(self, seed: int) -> None:
        from faker import Faker

        self._random = random.Random(seed)
        self._of = {region: Faker(locale) for region, locale in _LOCALES.items()}
        for number, each in enumerate(self._of.values()):
            each.seed_instance(seed * 100 + number)

    def planted(self, each: int) -> Iterator[Planted]:
        """Yield `each` texts for every kind of value."""
        for group, make in self._makers().items():
            for _ in range(each):
                value, before = make()
                yield self._text(group, before, value)

    def negatives(self, each: int) -> Iterator[Planted]:
        """Yield each hard negative `each` times, with other digits."""
        for form in _NEGATIVES:
            for _ in range(each):
                text = self._within(self._filled(form))
                yield Planted(text, "", 0, 0, form)

    def _text(self, group: str, before: str, value: str) -> Planted:
        marked = self._within(f"{before}\0{value}\1")
        start, end = marked.index("\0"), marked.index("\1") - 1
        text = marked.replace("\0", "").replace("\1", "")
        return Planted(text, group.split()[0].strip(","), start, end, group)

    def _within(self, said: str) -> str:
        region = self._random.choice(REGIONS)
        words = " ".join(self._of[region].words(5))
        context = self._random.choice(_CONTEXTS).replace("{}", said, 1).replace("{{}}", "{}")
        return f"{words} {context} {' '.join(self._of[region].words(3))}."

    def _filled(self, form: str) -> str:
        def run(name: str) -> str:
            if name[0] == "h":
                count = int(name[1:] or 20)
                return "".join(self._random.choices("0123456789abcdef", k=count))
            return "".join(self._random.choices("123456789", k=1)) + "".join(
                self._random.choices("0123456789", k=len(name) - 1)
            )

        parts = form.replace("}", "{").split("{")
        return "".join(run(part) if number % 2 else part for number, part in enumerate(parts))

    def _makers(self) -> dict[str, Callable[[], tuple[str, str]]]:
        fakers = self._of

        def plain(region: str, name: str, before: str = "") -> Callable[[], tuple[str, str]]:
            return lambda: (str(getattr(fakers[region], name)()), before)

        return {
            "email": self._email,
            "phone with +": lambda: self._phone(is_national=False),
            "phone, national": lambda: self._phone(is_national=True),
            "iban": lambda: (self._any("DE", "FR", "GB", "ES", "NL", "IT").iban(), ""),
            "card": lambda: (self._card(), ""),
            "ip": lambda: (self._address(), ""),
            "mac": plain("US", "mac_address"),
            "ssn": plain("US", "ssn"),
            "nino": lambda: (self._national("GB", "ssn"), ""),
            "nir": plain("FR", "ssn"),
            "dni": lambda: (self._dni(), ""),
            "fiscal": plain("IT", "ssn"),
            "pesel": plain("PL", "pesel"),
            "cpf": plain("BR", "cpf"),
            "sin": plain("CA", "ssn"),
            "personnummer": plain("SE", "ssn"),
            "nhs": lambda: (self._nhs(), self._random.choice(("NHS number: ", "NHS No. ", "NHS "))),
            "secret": lambda: (self._of["US"].password(24, special_chars=False), "password: "),
        }  # fmt: skip

    def _any(self, *regions: str) -> Any:
        return self._of[self._random.choice(regions)]

    def _email(self) -> tuple[str, str]:
        faker = self._any(*_LOCALES)
        made = self._random.choice((faker.email, faker.company_email, faker.ascii_safe_email))()
        if self._random.random() < 0.1:
            made = f"{faker.first_name()}.O'{faker.last_name()}@{made.partition('@')[2]}".replace(
                " ", ""
            )
        return made, self._random.choice(("", "mailto:", "E-Mail: ", "from "))

    def _phone(self, *, is_national: bool) -> tuple[str, str]:
        """Return a number that the numbering plans know, as people of its region write it."""
        while True:
            region = self._random.choice(REGIONS)
            written = self._of[region].phone_number().partition("x")[0].strip()
            if written.startswith("+") != is_national and _PLANS.checked(written, region):
                is_announced = self._random.random() < _ANNOUNCED
                return written, self._random.choice(_PHONE_WORDS[region]) if is_announced else ""

    def _card(self) -> str:
        number = self._any("US").credit_card_number(
            self._random.choice(("visa16", "mastercard", "amex", "discover"))
        )
        return _in_fours(number) if self._random.random() < 0.5 and len(number) == 16 else number

    def _address(self) -> str:
        if self._random.random() < 0.7:
            return str(self._of["US"].ipv4_public())
        return f"2{self._of['US'].ipv6()[1:]}"  # global unicast (RFC 4291)

    def _national(self, region: str, name: str) -> str:
        return str(getattr(self._of[region], name)()).replace("ZZ", "AB").replace("T", "C").strip()

    def _dni(self) -> str:
        made = str(self._random.choice((self._of["ES"].nif, self._of["ES"].nie))())
        if made[0].isdigit() and self._random.random() < 0.4:
            return f"{made[:2]}.{made[2:5]}.{made[5:8]}-{made[8]}"
        return made

    def _nhs(self) -> str:
        while True:
            body = [self._random.randint(0, 9) for _ in range(9)]
            check = (
                11
                - sum(digit * weight for digit, weight in zip(body, range(10, 1, -1), strict=True))
                % 11
            )
            if body[0] in (4, 6, 7) and check != 10:
                digits = "".join(map(str, [*body, check % 11]))
                return f"{digits[:3]} {digits[3:6]} {digits[6:]}"


def _in_fours(digits: str) -> str:
    return " ".join(digits[place : place + 4] for place in range(0, len(digits), 4))


_SIGNS = "".join(map(chr, range(0x21, 0x7F)))
# How a document writes a value, for the texts in which a value is written in another way.
RENDERINGS: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "JSON, behind a line break": lambda value: json.dumps(f"to\n{value}\n"),
    "JSON escapes": lambda value: _each(value, "@.+ -", lambda sign: f"\\u{ord(sign):04x}"),
    "percent-encoding": lambda value: urllib.parse.quote(value, safe=""),
    "HTML entities": lambda value: _each(
        html.escape(value), "@. ", {"@": "&commat;", ".": "&#46;", " ": "&nbsp;"}.__getitem__
    ),
    "quoted-printable": lambda value: f"=3D{value[:4]}=\n{value[4:]}=20",
    "zero width": "\u200b".join,
    "soft hyphens": "\u00ad".join,
    "full width": lambda value: _each(value, _SIGNS, lambda sign: chr(ord(sign) + 0xFEE0)),
    "no-break spaces": lambda value: f"\u00a0{value.replace(' ', chr(0xA0))}\u00a0",
    "colours of a terminal": lambda value: (
        f"\x1b[1;31m{value[:4]}\x1b[0m\x1b[32m{value[4:]}\x1b[0m"
    ),
    "a table of HTML": lambda value: f"<tr><td>{value}</td></tr>",
}


def _each(value: str, signs: str, write: Callable[[str], str]) -> str:
    return "".join(write(each) if each in signs else each for each in value)


def has_faker() -> bool:
    """Tell whether the package Faker is installed."""
    return importlib.util.find_spec("faker") is not None
