"""Personal data that nobody has: values of every kind with valid checks, and their look-alikes."""

import random
import string
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ..harness.privacy.checked_numbers import luhn, mod_11_10, mod_97, national_ids
from ..harness.privacy.detector import FoundValue

_FIRST = (
    "Ann",
    "Bob",
    "Carla",
    "Dmitri",
    "Eve",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Katja",
)
_LAST = (
    "Smith",
    "Jones",
    "Weber",
    "Rossi",
    "Novak",
    "Silva",
    "Okafor",
    "Tanaka",
    "Meyer",
    "Dubois",
)
_WORDS = (
    "invoice", "meeting", "please", "order", "tomorrow", "report", "the", "and", "was", "sent", "to",
    "from", "customer", "about", "number", "with", "again", "total", "delivery", "thank", "you", "for",
)  # fmt: skip
_CAPITALS = string.ascii_uppercase
_MOST_TRIES = 100_000
# Forms whose check decides: # a digit, ! one from 2 to 7, % a hexadecimal one, & a letter, and ~, ^
# and _ two digits of a year, a month and a day.
_FORMS = {
    "fiscal": "RSSMRA~T0!A###&", "pesel": "~^_#####", "cpf": "###.###.###-##",
    "aadhaar": "!### #### ####", "sin": "!## ### ###", "personnummer": "~^_-####",
}  # fmt: skip
_LOOK_ALIKES = (
    "20~-^-_T!#:!#:!#", "!.################", "!.#.##", "##########", "1############", "%" * 40,
    "%%%%%%%%-%%%%-4%%%-a%%%-%%%%%%%%%%%%", "$!##,###.##", "!#:!#:!#", "127.0.0.1", "#######",
    "order @total", "sent@delivery", "/srv/report/####.txt", "v!.##-rc!", "ISBN 978-!-##-######-#",
)  # fmt: skip


class Planter:
    """Makes values by chance, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._makers: dict[str, Callable[[], str]] = {
            "email": self._email, "phone": self._phone, "iban": self._iban, "card": self._card,
            "ip": self._ip, "mac": self._mac, "login": self._login, "secret": self._secret,
            "name": self.name,
            "ssn": self._ssn, "nino": lambda: self._filled("AB######C"),
            "taxid": lambda: self._valid("taxid", self._tax_digits), "dni": self._dni,
            "nir": lambda: self._with_key(self._filled("2~^75######")),
            **{kind: partial(self._of_form, kind) for kind in _FORMS},
        }  # fmt: skip

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._makers)

    def value(self, kind: str) -> str:
        """Return another value of a kind."""
        return self._makers[kind]()

    def name(self) -> str:
        """Return a name of two words and a number in words, so that names differ."""
        middle = "".join(self._random.choices(string.ascii_lowercase, k=6)).title()
        return f"{self._random.choice(_FIRST)} {middle} {self._random.choice(_LAST)}"

    def sentence(self, words: int = 12) -> str:
        """Return words without personal data."""
        return " ".join(self._random.choices(_WORDS, k=words))

    def look_alike(self) -> str:
        """Return a word that is written like a value of some kind, and is none."""
        number = self._of(0, len(_LOOK_ALIKES) + 1)
        if number < len(_LOOK_ALIKES):
            return self._filled(_LOOK_ALIKES[number])
        makers = ((self._card, luhn), (self._iban, mod_97))
        make, check = makers[number - len(_LOOK_ALIKES)]
        return self._changed(make(), check)

    def _filled(self, form: str) -> str:
        """Return a form with characters by chance."""
        choices = {
            "#": string.digits,
            "!": "234567",
            "%": "0123456789abcdef",
            "&": string.ascii_uppercase,
        }
        ranges = {"~": (40, 99), "^": (1, 12), "_": (1, 28)}
        return "".join(
            self._random.choice(choices[each]) if each in choices
            else f"{self._of(*ranges[each]):02}" if each in ranges else each
            for each in form
        )  # fmt: skip

    def _of_form(self, kind: str) -> str:
        return self._valid(kind, lambda: self._filled(_FORMS[kind]))

    def _of(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def _digits(self, count: int) -> str:
        return "".join(self._random.choices(string.digits, k=count))

    def _hexadecimal(self, count: int) -> str:
        return self._filled("%" * count)

    def _changed(self, value: str, check: Callable[[str], bool]) -> str:
        """Return a value with another last digit, which fails its check."""
        plain = "".join(filter(str.isalnum, value))
        return next(made for digit in string.digits if not check(made := plain[:-1] + digit))

    def _email(self) -> str:
        user = "".join(self._random.choices(string.ascii_lowercase, k=8))
        host = f"{self._random.choice(_WORDS)}{self._of(1, 99)}.example"
        return f"{user}{self._random.choice(['', '.x', '+y', '_1'])}@{host}"

    def _ssn(self) -> str:
        area = self._random.choice("234578")  # the area 666 is not issued
        return self._filled(f"{area}##-0!-!###")

    def _phone(self) -> str:
        area = self._random.choice(("202", "212", "415", "617"))
        form = self._random.choice(
            ("+1 {0}-{1}-{2}", "({0}) {1}-{2}", "+1{0}{1}{2}", "{0}-{1}-{2}")
        )
        return form.format(area, self._of(222, 899), f"{self._of(0, 9999):04}")

    def _iban(self) -> str:
        country, body = self._random.choice((("DE", 18), ("FR", 23), ("NL", 14), ("GB", 18)))
        bank = "INGB" if country == "NL" else "WEST" if country == "GB" else ""
        rest = bank + self._digits(body - len(bank))
        account = next(
            made for key in range(2, 99) if mod_97(made := f"{country}{key:02}{rest}")
        )  # fmt: skip
        if self._of(0, 1):
            return account
        return " ".join(account[place : place + 4] for place in range(0, len(account), 4))

    def _card(self) -> str:
        start, length = self._random.choice((("4", 16), ("55", 16), ("37", 15), ("6011", 16)))
        body = start + self._digits(length - len(start) - 1)
        number = next(made for digit in string.digits if luhn(made := body + digit))
        if length == 16 and self._of(0, 1):
            return " ".join(number[place : place + 4] for place in range(0, 16, 4))
        return number

    def _ip(self) -> str:
        if self._of(0, 3):
            return f"{self._of(11, 199)}.{self._of(128, 255)}.{self._of(0, 255)}.{self._of(1, 254)}"
        return self._filled("2001:db8::a%%%:b%%%")

    def _mac(self) -> str:
        return ":".join(f"{self._of(1, 254):02x}" for _ in range(6))

    def _login(self) -> str:
        return f"{self._random.choice(_WORDS)}:{self._hexadecimal(10)}"

    def _secret(self) -> str:
        letters = string.ascii_letters + string.digits
        return "ghp_" + "".join(self._random.choices(letters, k=36))

    def _tax_digits(self) -> str:
        digits = self._random.sample(string.digits, 9)
        digits.insert(self._of(1, 9), digits[self._of(0, 8)])
        body = "".join(digits)
        return next(made for digit in string.digits if mod_11_10(made := body + digit))

    def _dni(self) -> str:
        number = self._of(10_000_000, 99_999_999)
        return f"{number}{'TRWAGMYFPDXBNJZSQVHLCKE'[number % 23]}"

    def _with_key(self, body: str) -> str:
        return f"{body}{97 - int(body) % 97:02}"

    def _valid(self, kind: str, make: Callable[[], str]) -> str:
        """Return the first value that passes the check of its kind."""
        detector = next(each for each in national_ids() if kind in each.kinds)
        tried = (make() for _ in range(_MOST_TRIES))
        return next(each for each in tried if any(_whole(detector.find(each), each)))


def _whole(found: Iterable[FoundValue], text: str) -> Iterator[bool]:
    return ((each.start, each.end) == (0, len(text)) for each in found)
