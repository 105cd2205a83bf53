"""Check digits of cards, accounts and identity numbers; each function takes digits as text."""

from collections.abc import Iterable, Sequence


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
