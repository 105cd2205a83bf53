"""Secrets in text: keys, passwords and tokens, found by format, by the name before them, and by
randomness.

The text is hostile.  Every pattern takes time linear in the text: an unbounded repetition is possessive
and cannot begin inside a run of its own kind, or it fails after a few characters.  The formats are
those that the issuers document, and that gitleaks (https://github.com/gitleaks/gitleaks) collects.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Secret(NamedTuple):
    """The position and the kind of a secret."""

    start: int
    end: int
    kind: str


class _Format(NamedTuple):
    """The format of one kind of secret.

    A secret contains one of `hints`, so that most texts are skipped quickly.  The group `secret` of
    `pattern`, if it has one, is the part to redact.  `is_one` filters the matches.
    """

    kind: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    is_one: Callable[[str], bool] = lambda text: True


def find_secrets(text: str, *, at_random: bool = True) -> list[Secret]:
    """Return the secrets in `text`, in order, without overlaps; `at_random` adds random words."""
    if len(text) < _SHORTEST:
        return []
    found: list[Secret] = []
    if _HINTED.search(text):
        found += [leak for form in _FORMATS for leak in _of_format(form, text)]
    if "-----BEGIN " in text:
        found += _private_keys(text)
    if _NAMED_SOMEHOW.search(text):
        found += _assignments(text)
    if at_random and len(text) >= SHORTEST_RANDOM:
        found += [Secret(*place, "random") for place in random_words(text)]
    return _merged(sorted(found, key=lambda leak: leak.start)) if found else found


def secret_named(name: str, value: str) -> str:
    """Return the kind of secret that `value` is according to its `name`; "" if it is not a secret."""
    if _AUTHORIZATION.search(name) and len(value) >= _SHORTEST:
        return "authorization"
    return "assignment" if _NAMED.search(name) and _is_value(value) else ""


def names_no_secret(name: str) -> bool:
    """Tell whether `name` announces an id, a digest or a cursor: values that look random and are
    needed."""
    return bool(_NO_SECRET.search(name))


def _merged(found: list[Secret]) -> list[Secret]:
    kept: list[Secret] = []
    for leak in found:
        if kept and leak.start < kept[-1].end:
            kept[-1] = kept[-1]._replace(end=max(leak.end, kept[-1].end))
        else:
            kept.append(leak)
    return kept


# by format

_SHORTEST = 8
_START = r"(?<![A-Za-z0-9])"
_WORD = "[A-Za-z0-9_-]"


def _has_digit(text: str) -> bool:
    """Tell a key from words that dashes join."""
    return any(character.isdigit() for character in text)


def _form(
    kind: str, hints: str, pattern: str, is_one: Callable[[str], bool] = lambda text: True
) -> _Format:
    return _Format(kind, tuple(hints.split()), re.compile(_START + pattern), is_one)


_FORMATS = (
    _form("aws_key", "AKIA ASIA ABIA ACCA", r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Z0-9])"),
    _form("github_token", "ghp_ gho_ ghu_ ghs_ ghr_", r"gh[pousr]_[A-Za-z0-9]{36,}+"),
    _form("github_token", "github_pat_", r"github_pat_\w{22,}+"),
    _form("gitlab_token", "glpat-", rf"glpat-{_WORD}{{20,}}+"),
    _form("slack_token", "xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,}+", _has_digit),
    _form("slack_token", "xapp-", r"xapp-[A-Za-z0-9-]{20,}+", _has_digit),
    _form(
        "slack_webhook",
        "hooks.slack.com/services/",
        r"hooks\.slack\.com/services/(?P<secret>[A-Za-z0-9/]{20,}+)",
    ),
    _form("google_key", "AIza", rf"AIza{_WORD}{{35}}(?!{_WORD})"),
    _form("google_key", "GOCSPX-", rf"GOCSPX-{_WORD}{{20,}}+"),
    _form("google_token", "ya29.", rf"ya29\.{_WORD}{{20,}}+"),
    _form("stripe_key", "sk_live_ sk_test_ rk_live_ rk_test_",
          r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}+"),
    _form("webhook_secret", "whsec_", r"whsec_[A-Za-z0-9+/=]{20,}+"),
    _form("model_key", "sk-", rf"sk-{_WORD}{{20,}}+", _has_digit),
    _form("huggingface_token", "hf_", r"hf_[A-Za-z0-9]{30,}+"),
    _form("npm_token", "npm_", r"npm_[A-Za-z0-9]{36,}+"),
    _form("pypi_token", "pypi-AgE", rf"pypi-AgE{_WORD}{{50,}}+"),
    _form("sendgrid_key", "SG.", rf"SG\.{_WORD}{{16,32}}\.{_WORD}{{32,64}}"),
    _form("digitalocean_token", "_v1_", r"do[oprt]_v1_[a-f0-9]{64}"),
    _Format(
        "jwt",
        ("eyJ",),
        re.compile(rf"(?<!{_WORD})eyJ{_WORD}{{8,}}+\.eyJ{_WORD}{{8,}}+\.{_WORD}*+"),
    ),
    _Format(
        "url_password",
        ("://",),
        re.compile(r"://[^\s:/@\"'<>]{0,100}+:(?P<secret>[^\s/@\"'<>]{3,200}+)@"),
        lambda text: not _is_placeholder(text),
    ),
    _Format(
        "authorization",
        ("uthorization", "UTHORIZATION"),
        re.compile(
            r"(?i:authorization)[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?i:bearer|basic|token)\s{1,3}"
            r"(?P<secret>[A-Za-z0-9._~+/=-]{8,}+)"
        ),
        lambda text: not _is_placeholder(text),
    ),
)  # fmt: skip

# Prefixes that say more of a key than the hints of its format.
_PREFIXES = (
    "sk-ant-api03-", "sk-ant-", "sk-proj-", "sk-or-v1-", "xoxb-", "xoxp-", "xapp-1-", "dop_v1_",
)  # fmt: skip


def known_prefix(value: str) -> str:
    """Return the beginning of a secret that its issuer documents, and that is none itself."""
    hints = (hint for form in _FORMATS if form.kind.endswith(_KINDS) for hint in form.hints)
    return max(
        (each for each in (*_PREFIXES, *hints) if value.startswith(each)), key=len, default=""
    )


_KINDS = ("_key", "_token", "_secret")
_HINTED = re.compile("|".join(re.escape(hint) for form in _FORMATS for hint in form.hints))


def _of_format(form: _Format, text: str) -> Iterator[Secret]:
    if not any(hint in text for hint in form.hints):
        return
    for match in form.pattern.finditer(text):
        group = "secret" if "secret" in form.pattern.groupindex else 0
        if form.is_one(match[group]):
            yield Secret(*match.span(group), form.kind)


_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")


def _private_keys(text: str) -> Iterator[Secret]:
    """Yield private keys in PEM; a key without an END line reaches to the end of the text."""
    place = 0
    while begins := _KEY_BEGINS.search(text, place):
        ends = _KEY_ENDS.search(text, begins.end())
        place = ends.end() if ends else len(text)
        yield Secret(begins.start(), place, "private_key")


def unfinished_key(text: str) -> int:
    """Return where a private key begins that has no END line; the length of `text` if none does."""
    place = 0
    while begins := _KEY_BEGINS.search(text, place):
        ends = _KEY_ENDS.search(text, begins.end())
        if ends is None:
            return begins.start()
        place = ends.end()
    return len(text)


def end_of_key(text: str) -> int:
    """Return where the first END line of a private key ends; 0 if there is none."""
    ends = _KEY_ENDS.search(text)
    return ends.end() if ends else 0


# by the name before it

_NAMES = (
    r"password|passwd|passphrase|pwd|secret|credential|api[_-]?key|access[_-]?key|account[_-]?key"
    r"|private[_-]?key|secret[_-]?key|auth[_-]?key|(?:auth|access|refresh|bearer|api|id)[_-]?token"
)
_NAMED_SOMEHOW = re.compile(r"(?i)pass[wp]|pwd|secret|credential|key|token")
_NAMED = re.compile(rf"(?i)(?:{_NAMES})s?$")
_AUTHORIZATION = re.compile(r"(?i)authorization$")
_NO_SECRET = re.compile(
    r"(?:^|[a-z_-])(?i:ids?|u?uid|cursor|etag|hash|sha\d*|digest|checksum|nonce|ref|next|page_?token"
    r"|next_?token|sync_?token|ur[il]|href|path|version|revision|integrity|signature)$"
)
_ASSIGNMENT = re.compile(
    rf"(?i:{_NAMES})[\"']?\s{{0,3}}(?:=|:=|:|=>)\s{{0,3}}[\"']?"
    r"(?P<secret>[^\s\"'`,;&<>(){}\[\]\\]{8,200}+)(?P<after>[(\[]?)"
)
_PLACEHOLDER = re.compile(
    r"(?i)[$%*]|x{3}|\.{3}|_{3}|-{3}|.*(?:example|placeholder|changeme|redacted|your[_-])"
    r"|(?:none|null|test|user(?:name)?|pass(?:word)?|passwd|pwd|secret|token)\d{0,3}$"
)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_WORDS = re.compile(r"[A-Za-z]+(?:[_-][A-Za-z]+)*")


_UNFINISHED = re.compile(rf"(?i:{_NAMES})[\"']?\s{{0,3}}(?:(?:=|:=|:|=>)\s{{0,3}}[\"']?)?\Z")
_LONGEST_NAME = 40  # characters of a name with its suffix


def unfinished_assignment(text: str) -> int:
    """Return where a name begins, at the end of a text, that a secret may follow; else the length."""
    found = _UNFINISHED.search(text, max(0, len(text) - _LONGEST_NAME))
    return found.start() if found else len(text)


def _assignments(text: str) -> Iterator[Secret]:
    for match in _ASSIGNMENT.finditer(text):
        value = match["secret"]
        if not match["after"] and _is_assigned(value):
            yield Secret(*match.span("secret"), "assignment")


def _is_assigned(value: str) -> bool:
    """Tell a secret from a word or an expression, which are frequent in text and code."""
    if not _is_value(value) or _DOTTED.fullmatch(value) or "://" in value:
        return False
    return _has_digit(value) and any(character.isalpha() for character in value)


def _is_value(value: str) -> bool:
    """Tell whether the value of a secret's name is a secret, and not a word or a placeholder."""
    if len(value) < _SHORTEST or len(set(value)) < 4 or any(map(str.isspace, value)):
        return False
    if _is_placeholder(value):
        return False
    return not _WORDS.fullmatch(value) or len(value) >= 16


def _is_placeholder(value: str) -> bool:
    return bool(_PLACEHOLDER.match(value[:200]))


# by randomness

_RUN = re.compile(r"[A-Za-z0-9+/_-]++={0,2}")
SHORTEST_RANDOM, _LONGEST_RUN = 24, 120
_LEAST_BITS = 3.9  # per character; 24 random ones of 62 have 4.2 on average, and English has 3.5
_ENCODED = re.compile(r"base64,$|sha\d{1,3}[:=]$", re.IGNORECASE)  # prefix of data or a digest
_DIGEST = re.compile(r"sha\d{1,3}-", re.IGNORECASE)  # beginning of a digest (W3C SRI)
_PATH_STEPS = 3  # base64 of this length has no more slashes; a path may
_LINE, _LONG = 200, 60


def random_words(text: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of words that look random: letters of both cases and digits in no order.

    Hexadecimal (UUIDs, digests), lines of a longer base64 text, data after `base64,` or `sha256:`, and
    paths do not count.
    """
    for match in _RUN.finditer(text):
        start, end = match.span()
        if not SHORTEST_RANDOM <= end - start <= _LONGEST_RUN:
            continue
        is_encoded = _ENCODED.search(text, max(0, start - 10), start)
        if _is_random(match[0]) and not is_encoded and not _is_one_of_many(text, start, end):
            yield start, end


def _is_random(run: str) -> bool:
    run = run.strip("=-_/+")
    if len(run) < SHORTEST_RANDOM or run.count("/") > _PATH_STEPS or _DIGEST.match(run):
        return False
    digits = sum(map(str.isdigit, run))
    upper, lower = sum(map(str.isupper, run)), sum(map(str.islower, run))
    if min(digits, upper, lower) < 2 or digits > 0.6 * len(run):
        return False
    if _A_WORD.search(run):
        return False
    return _bits(run) >= _LEAST_BITS and _changes(run) >= 0.35 * len(run)


_A_WORD = re.compile(r"[a-z]{8}")


def _changes(run: str) -> int:
    sorts = [(each.isdigit(), each.isupper(), each.islower()) for each in run]
    return sum(some != other for some, other in itertools.pairwise(sorts))


def _bits(run: str) -> float:
    """Return the entropy of the characters of `run`, in bits each (Shannon)."""
    counts = Counter(run).values()
    return -sum(count / len(run) * math.log2(count / len(run)) for count in counts)


def _is_one_of_many(text: str, start: int, end: int) -> bool:
    """Tell whether a run is a line of wrapped base64: the line above or below is a long run too."""
    if start and text[start - 1] == "\n":
        begins = text.rfind("\n", max(0, start - _LINE), start - 1) + 1
        if start - 1 - begins >= _LONG and _RUN.fullmatch(text, begins, start - 1):
            return True
    below = _RUN.match(text, end + 1) if text[end : end + 1] == "\n" else None
    return bool(below) and end - start >= _LONG
