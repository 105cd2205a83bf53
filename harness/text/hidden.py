"""Hidden characters: invisible to a person, but read by a model or obeyed by a terminal.

This is the only table, for texts of tools, servers and guests.  Hidden characters carry invisible text
(tags, variation selectors), reorder visible text (bidirectional controls, CVE-2021-42574) or move the
cursor (controls).

Hints for models: cellwright's messages without options of the command line, which a model cannot give.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable

from ...policies.policy import Policy

# Unicode categories Cc, Cf, Cs (lone surrogates), Co, Zl and Zp.
_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
# Default_Ignorable_Code_Point of Unicode's DerivedCoreProperties.txt without the categories above
# (fillers, joiners and variation selectors), and the whole plane of tags.
_IGNORABLE = (
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2065, 0x2065),
    (0x3164, 0x3164), (0xFDD0, 0xFDEF), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8),
    (0xE0000, 0xE0FFF),
)  # fmt: skip
_VISIBLE = frozenset("\n\t")
_PRESENTATION = frozenset(
    "\ufe0e\ufe0f"
)  # text and emoji variation selectors, allowed after an emoji
_KEYCAPS = frozenset("0123456789#*\u203c\u2049")  # allow a selector, though they are not symbols
_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")


@functools.lru_cache(4096)
def is_hidden(character: str) -> bool:
    """Tell whether `character` is hidden, apart from its context."""
    code = ord(character)
    return (
        (unicodedata.category(character) in _CATEGORIES and character not in _VISIBLE)
        or any(first <= code <= last for first, last in _IGNORABLE)
        or code & 0xFFFE == 0xFFFE
    )


def replace_hidden(text: str, replacement: Callable[[str], str]) -> str:
    """Return `text` with each hidden character replaced by `replacement(character)`."""

    def replaced(match: re.Match[str]) -> str:
        character, start = match[0], match.start()
        if not is_hidden(character) or (
            character in _PRESENTATION and start and _may_have_selector(text[start - 1])
        ):
            return character
        return replacement(character)

    return _UNUSUAL.sub(replaced, text)


def first_hidden(text: str) -> str:
    """Return the first hidden character of `text`; "" if there is none."""
    if text.isascii() and text.isprintable():
        return ""
    found: list[str] = []

    def kept(character: str) -> str:
        found.append(character)
        return character

    replace_hidden(text, kept)
    return found[0] if found else ""


def _may_have_selector(character: str) -> bool:
    return unicodedata.category(character)[0] == "S" or character in _KEYCAPS


def visible(text: str, limit: int = 4096) -> str:
    """Return the first `limit` characters of a text, without hidden ones."""
    seen = replace_hidden(text[:limit], lambda _: "")
    return seen + "…" if len(text) > limit else seen


def prose(text: object, limit: int = 2000) -> str:
    """Return a text without hidden characters, cut at `limit`; "" if `text` is not a string."""
    if not isinstance(text, str):
        return ""
    lines = visible(text, limit * 2).replace("\t", " ").split("\n")
    return cut("\n".join(each.rstrip() for each in lines).strip(), limit)


def line(text: object, limit: int = 300) -> str:
    """Return a text on one line, without hidden characters, cut at `limit`."""
    return cut(" ".join(prose(text, limit * 2).split()), limit)


def cut(text: str, limit: int) -> str:
    """Return `text`, cut at `limit` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


# Hints are written for people who choose options or arguments of Python; a model has neither.
_OPTION = r"--[a-z][a-z-]*(?: (?:[A-Z]+\b|-(?= |$)|'[^']*'|[a-z][\w.]*(?= \()))?"
_OWNER = "which {owner} decides"
_SET = r"([\w.]+ = \w+) in your policy"
_REWRITTEN = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"a program has no standard input but .*",
            "a program has no standard input: put the input into the program, or into files",
        ),
        (r"ask for its package with --packages (\S+) \(packages=\)", r"{packages \1}"),
        (
            rf"use the profile \w+ \(--policy \w+\), or set {_SET}",
            rf"the policy must have \1, {_OWNER}",
        ),
        (rf"(?:with|by) --policy \w+, or with {_SET}", rf"if the policy has \1, {_OWNER}"),
        (rf"with {_OPTION} \((files|collect|timeout|session|language)=\)", r"with the argument \1"),
        (rf" is higher with {_OPTION} \(\w+=\)", f" is the most, {_OWNER}"),
        (rf"(?: with| by)? ?{_OPTION} \((\w+)=\)", ""),
        (rf"(?: with| by)? ?\({_OPTION}\)", ""),
        (rf"(?: with| by)? {_OPTION}", ""),
        (r" \(\w+=\)", ""),
        (r"\b(in|of) your policy", rf"\1 the policy, {_OWNER}"),
    )
)  # fmt: skip


def for_model(
    text: str,
    policy: Policy,
    owner: str = "the owner of this server",
    *,
    has_arguments: bool = True,
) -> str:
    """Return a message as a model reads it.

    `owner` decides about the policy.  Without `has_arguments` a program cannot be given packages or
    files.
    """
    for pattern, words in _REWRITTEN:
        text = pattern.sub(words.replace("{owner}", owner), text)
    advice = (
        'ask for its package with packages=["{}"]' if has_arguments and policy.packages.allow
        else owner + " decides whether programs have the package {}"
    )  # fmt: skip
    if not has_arguments:
        text = re.sub(r",? or pass a file of your own with the argument files", "", text)
        text = re.sub(r"pass ([\w ]+) with the argument files", rf"ask {owner} for \1", text)
        text = text.replace(" and bring the file back with the argument collect", "")
    return re.sub(r"\{packages (\S+)\}", lambda found: advice.format(found[1]), text)


def advice(
    notices: Iterable[str], hints: Iterable[str], policy: Policy, *, is_ok: bool
) -> tuple[str, ...]:
    """Return the part of a result that a model should read besides output and error: the notices,
    and the hints after a failure."""
    told = (*notices, *(() if is_ok else (f"hint: {each}" for each in hints)))
    return tuple(for_model(each, policy, "the user", has_arguments=False) for each in told)
