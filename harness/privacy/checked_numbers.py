"""Numbers of persons that states issue; each is found by its form and its own check.

A form without letters or separators is not looked for if its check lets one number in ten pass.

Payment cards and bank accounts.

Check digits of cards, accounts and identity numbers; each function takes digits as text.
"""

import datetime
import re
from collections.abc import Iterable, Sequence

from .detector import FoundValue, PatternDetector, digit_runs, is_numbered, never, windows

_ALONE, _ENDS = "(?<![A-Za-z0-9.+-])", r"(?![A-Za-z0-9-]|\.\d)"


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))


def _ssn(text: str) -> str | None:
    """US social security number: areas, groups and serials that are issued (SSA, POMS RM 10201.035)."""
    area, group, serial = re.split("[- ]", text)
    is_issued = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
    return area + group + serial if is_issued else None


def _nino(text: str) -> str | None:
    """UK national insurance number (HMRC, NIM39110)."""
    number = text.replace(" ", "").upper()
    unused = ("BG", "GB", "KN", "NK", "NT", "TN", "ZZ")
    return None if number[:2] in unused else number


def _tax_id(text: str) -> str | None:
    """German tax number (Steuer-ID): one digit of the first ten occurs two or three times."""
    digits = _digits(text)
    counts = sorted(digits[:10].count(digit) for digit in set(digits[:10]))
    one_repeats = counts[-1] in (2, 3) and counts[:-1] == [1] * (len(counts) - 1)
    return digits if digits[0] != "0" and one_repeats and mod_11_10(digits) else None


def _nir(text: str) -> str | None:
    """French social security number (NIR): key modulo 97; 2A and 2B are Corsica."""
    number = text.replace(" ", "").upper()
    body = number[:13].replace("2A", "19").replace("2B", "18")
    return number if body.isdigit() and 97 - int(body) % 97 == int(number[13:]) else None


def _dni(text: str) -> str | None:
    """Spanish DNI and NIE: the letter is the number modulo 23."""
    number = re.sub("[ .-]", "", text).upper().zfill(9)
    value = int(number[:-1].translate(str.maketrans("XYZ", "012")))
    return number if "TRWAGMYFPDXBNJZSQVHLCKE"[value % 23] == number[-1] else None


_ODD = dict(zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", (
    1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8,
    12, 14, 16, 10, 22, 25, 24, 23,
), strict=True))  # fmt: skip


def _fiscal_code(text: str) -> str | None:
    """Italian codice fiscale (DM 23/12/1976): the last letter checks the others."""
    code = text.upper()
    even = sum(int(each, 36) - (10 if each.isalpha() else 0) for each in code[1:15:2])
    total = even + sum(_ODD[each] for each in code[:15:2])
    return code if chr(ord("A") + total % 26) == code[15] else None


def _pesel(text: str) -> str | None:
    """Polish PESEL: a date of birth, whose month tells the century, and a weighted sum."""
    year, month, day = int(text[:2]), int(text[2:4]), int(text[4:6])
    if not _is_date(year, (month - 1) % 20 + 1, day):
        return None
    return text if weighted(text, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)) % 10 == 0 else None


def _cpf(text: str) -> str | None:
    """Brazilian CPF: two check digits modulo 11."""
    digits = _digits(text)
    for count in (9, 10):
        rest = weighted(digits[:count], range(count + 1, 1, -1)) * 10 % 11 % 10
        if rest != int(digits[count]):
            return None
    return digits if len(set(digits)) > 1 else None


def _aadhaar(text: str) -> str | None:
    """Indian Aadhaar number, in three groups."""
    digits = _digits(text)
    return digits if verhoeff(digits) else None


def _sin(text: str) -> str | None:
    """Canadian social insurance number, in three groups."""
    digits = _digits(text)
    return digits if digits[0] not in "08" and luhn(digits) else None


def _personal_number(text: str) -> str | None:
    """Swedish personnummer: a date of birth (60 is added to the day of a coordination number)."""
    digits = _digits(text)[-10:]
    year, month, day = int(digits[:2]), int(digits[2:4]), int(digits[4:6])
    return digits if _is_date(year, month, (day - 1) % 60 + 1) and luhn(digits) else None


def _nhs(text: str) -> str | None:
    """UK NHS number: ten digits, the last of which is the check modulo 11 (NHS Data Dictionary)."""
    digits = _digits(text)
    check = 11 - weighted(digits[:9], range(10, 1, -1)) % 11
    return digits if check % 11 == int(digits[9]) and check != 10 else None


_NHS_BEFORE = re.compile(r"(?i)\bNHS\b[^\d\n]{0,16}\Z")


def _is_no_patient(text: str, start: int, end: int) -> bool:
    """Tell whether no word before a number says that it is of the NHS: an American phone number has
    the same form."""
    return not _NHS_BEFORE.search(text, max(0, start - 24), start)


def _is_date(year: int, month: int, day: int) -> bool:
    try:
        datetime.date(2000 + year, month, day)
    except ValueError:
        return False
    return True


# Numbers of orders and parts have the same form, and one in ten passes a check digit.
_LIKE_OTHERS = ("ssn", "sin", "aadhaar", "personnummer", "pesel")
_DIGIT = "[0-9LMNP-V]"  # fiscal codes may have letters for digits


def national_ids() -> tuple[PatternDetector, ...]:
    """Return the detectors of this module."""
    forms = (
        ("ssn", r"\d{3}([- ])\d{2}\1\d{4}", _ssn),
        ("nino", r"(?i:[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]) ?\d\d ?\d\d ?\d\d ?[A-Da-d]", _nino),
        ("taxid", r"\d{2} ?\d{3} ?\d{3} ?\d{3}", _tax_id),
        ("nir", r"[12] ?\d\d ?\d\d ?(?:\d\d|2[ABab]) ?\d{3} ?\d{3} ?\d\d", _nir),
        ("dni", r"(?:\d{8}|\d{1,2}\.\d{3}\.\d{3}|[XYZxyz][ -]?\d\.?\d{3}\.?\d{3})[ -]?[A-Za-z]", _dni),
        ("fiscal", rf"(?i:[A-Z]{{6}}{_DIGIT}{{2}}[A-EHLMPR-T]{_DIGIT}{{2}}[A-Z]{_DIGIT}{{3}}[A-Z])",
         _fiscal_code),
        ("pesel", r"\d{11}", _pesel),
        ("cpf", r"\d{3}\.\d{3}\.\d{3}-\d\d", _cpf),
        ("aadhaar", r"[2-9]\d{3}([ -])\d{4}\1\d{4}", _aadhaar),
        ("sin", r"\d{3}([- ])\d{3}\1\d{3}", _sin),
        ("personnummer", r"(?:\d\d)?\d{6}[-+]\d{4}", _personal_number),
    )  # fmt: skip
    nhs = PatternDetector(
        "nhs", rf"{_ALONE}\d{{3}}([ -]?)\d{{3}}\1\d{{4}}{_ENDS}", _nhs, ("NHS", "nhs"), _is_no_patient,
        needs_digit=True,
    )  # fmt: skip
    others = (
        PatternDetector(
            kind,
            rf"{_ALONE}(?:{form}){_ENDS}",
            normal,
            is_other=is_numbered if kind in _LIKE_OTHERS else never,
            needs_digit=kind != "fiscal",
        )
        for kind, form, normal in forms
    )
    return (nhs, *others)


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


def luhn(digits: str) -> bool:
    """Check by ISO/IEC 7812-1, annex B."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        number = int(digit) * (1 + place % 2)
        total += number - 9 if number > 9 else number
    return total % 10 == 0


def weighted(digits: Iterable[str], weights: Sequence[int]) -> int:
    """Return the sum of the digits, each times its weight."""
    return sum(int(digit) * weight for digit, weight in zip(digits, weights, strict=True))


def mod_97(account: str) -> bool:
    """Check an IBAN in its compact form (ISO 13616-1, ISO/IEC 7064 MOD 97-10)."""
    rearranged = account[4:] + account[:4]
    return int("".join(str(int(character, 36)) for character in rearranged)) % 97 == 1


def mod_11_10(digits: str) -> bool:
    """Check by ISO/IEC 7064 MOD 11,10, whose last digit is the check digit."""
    product = 10
    for digit in digits[:-1]:
        total = (int(digit) + product) % 10 or 10
        product = 2 * total % 11
    return (11 - product) % 10 == int(digits[-1])


def verhoeff(digits: str) -> bool:
    """Check by the dihedral group of order 10 (Verhoeff, 1969)."""
    check = 0
    for place, digit in enumerate(reversed(digits)):
        check = _product(check, _PERMUTED[place % 8][int(digit)])
    return check == 0


def _product(some: int, other: int) -> int:
    """Return the product of two elements of the dihedral group: 0 to 4 rotate, 5 to 9 also reflect."""
    if some < 5:
        return (some + other) % 5 + (5 if other >= 5 else 0)
    return (some - other) % 5 + (0 if other >= 5 else 5)


def _permutations() -> list[list[int]]:
    first = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)
    found = [list(range(10))]
    for _ in range(7):
        found.append([first[each] for each in found[-1]])
    return found


_PERMUTED = _permutations()


def luhn_of(values: Sequence[int], size: int) -> int:
    """Return the check value that follows `values`, each below `size` (Luhn mod N)."""
    total = 0
    for place, value in enumerate(reversed(values)):
        number = value * (2 - place % 2)
        total += number // size + number % size
    return -total % size
