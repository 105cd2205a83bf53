"""Payment cards and bank accounts."""

import re
from collections.abc import Iterable

from .checksums import luhn, mod_97
from .detector import FoundValue, digit_runs, windows

# Digits at the start of a number, and lengths (ISO/IEC 7812; the issuers' own tables).
_BRANDS = (
    (re.compile("4"), (13, 16, 19)),  # Visa
    (re.compile("5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), (16,)),  # Mastercard
    (re.compile("3[47]"), (15,)),  # American Express
    (re.compile("6011|64[4-9]|65"), (16, 19)),  # Discover
    (re.compile("35(?:2[89]|[3-8])"), (16,)),  # JCB
    (re.compile("3(?:0[0-5]|[689])"), (14,)),  # Diners Club
    (re.compile("62"), (16, 17, 18, 19)),  # UnionPay
    (re.compile("50|5[6-9]|6[37]"), (16, 18, 19)),  # Maestro
)
CARD_LENGTHS = range(13, 20)
_DOTTED = re.compile(
    r"(?<![A-Za-z0-9.])\d{4}\.(?:\d{4}\.\d{4}\.\d{4}|\d{6}\.\d{4,5})(?![A-Za-z0-9]|\.\d)"
)


def is_card(digits: str) -> bool:
    """Tell whether digits are the number of a payment card: issuer, length and check digit."""
    issued = any(len(digits) in lengths and brand.match(digits) for brand, lengths in _BRANDS)
    return issued and len(set(digits)) > 1 and luhn(digits)


class CardDetector:
    """Numbers of payment cards, in groups or not."""

    kinds = frozenset(["card"])
    needs_digit = True

    def find(self, text: str) -> Iterable[FoundValue]:
        for run in digit_runs(text):
            for start, end, digits in windows(run, CARD_LENGTHS):
                if is_card(digits):
                    yield FoundValue(start, end, "card", digits)
        for match in _DOTTED.finditer(text):
            if is_card(digits := match[0].replace(".", "")):
                yield FoundValue(*match.span(), "card", digits)


# Characters of an IBAN by country (SWIFT, IBAN registry).
_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27,
    "BR": 29, "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28,
    "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23,
    "GL": 18, "GR": 27, "GT": 28, "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21,
    "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MN": 20, "MR": 27, "MT": 31, "MU": 30, "NI": 28,
    "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22,
    "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "SO": 23, "ST": 25,
    "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20, "YE": 30,
}  # fmt: skip
_IBAN = re.compile(r"(?<![A-Za-z0-9])(?=([A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]){11,30}))")


class IbanDetector:
    """International bank account numbers, in groups or not."""

    kinds = frozenset(["iban"])
    needs_digit = True

    def find(self, text: str) -> Iterable[FoundValue]:
        for match in _IBAN.finditer(text):
            start = match.start()
            length = _LENGTHS.get(match[1][:2].upper(), 0)
            account, end = _compact(text, start, length)
            if len(account) == length > 0 and mod_97(account) and not text[end : end + 1].isalnum():
                yield FoundValue(start, end, "iban", account)


def _compact(text: str, start: int, length: int) -> tuple[str, int]:
    """Return `length` letters and digits from `start` on, and where they end."""
    taken: list[str] = []
    place = start
    while len(taken) < length and place < len(text):
        if text[place].isascii() and text[place].isalnum():
            taken.append(text[place].upper())
        elif text[place] not in " -":
            break
        place += 1
    return "".join(taken), place
