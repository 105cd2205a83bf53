"""Numbers of persons that states issue; each is found by its form and its own check.

A form without letters or separators is not looked for if its check lets one number in ten pass.
"""

import datetime
import re

from .checksums import luhn, mod_11_10, verhoeff, weighted
from .detector import PatternDetector, is_numbered, never

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


# Numbers of orders and parts have the same form, and one in ten passes the check, if there is one.
_LIKE_OTHERS = ("ssn", "sin", "aadhaar", "personnummer", "pesel")
_DIGIT = "[0-9LMNP-V]"  # of a fiscal code, where letters tell equal ones apart


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
