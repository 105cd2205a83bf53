"""`Target`: a URL that was read once, strictly; rules, credentials and the request use its parts alone.

A text that clients read in different ways is refused: user information, backslashes, control
characters, addresses, and characters that must be escaped.
"""

import re
from typing import NamedTuple
from urllib.parse import urljoin

from ....policies.network.names import HostNameError, canonical_name
from ....policies.network.rule import Scheme

_LONGEST = 8192
_URL = re.compile(r"([A-Za-z]+)://([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.DOTALL)
# RFC 3986, 3.3 and 3.4, and what browsers send unescaped in queries.
_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?\[\]|^`{}-]|%[0-9A-Fa-f]{2})*")
_PORT = re.compile(r":([0-9]{1,5})$")
_STANDARD: dict[str, tuple[Scheme, int]] = {"http": ("http", 80), "https": ("https", 443)}


class TargetError(ValueError):
    """A URL is invalid or ambiguous; the message has the reason, and of the URL only its host."""


class Target(NamedTuple):
    """The parts of a URL in canonical spelling: `path` begins with /, `query` is empty or has its ?."""

    scheme: Scheme
    host: str
    port: int
    path: str
    query: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the scheme's own, as in the header Host."""
        standard = _STANDARD[self.scheme][1]
        return self.host if self.port == standard else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}{self.query}"


def target_of(url: str) -> Target:
    """Return the parts of a URL; raises TargetError."""
    if len(url) > _LONGEST:
        raise TargetError(f"is longer than {_LONGEST} characters")
    if not all("!" <= character <= "~" for character in url):
        raise TargetError("has a space, a control character, or one that is not ASCII: escape it")
    parts = _URL.fullmatch(url)
    if not parts or parts[1].lower() not in _STANDARD:
        raise TargetError("must begin with http:// or https://")
    scheme, standard = _STANDARD[parts[1].lower()]
    host, port = _split(parts[2], standard)
    path, query = parts[3] or "/", parts[4] or ""
    if not _PATH.fullmatch(path) or not _QUERY.fullmatch(query.removeprefix("?")):
        raise TargetError(f"{host}: the path or query has a character that must be escaped")
    return Target(scheme, host, port, path, query)


def redirected(target: Target, location: str) -> Target:
    """Return the target of a redirect from `target`; raises TargetError."""
    if not all("!" <= character <= "~" for character in location):  # urljoin drops some of them
        raise TargetError("the redirect has a character that must be escaped")
    try:
        joined = urljoin(str(target), location)
    except ValueError as error:
        raise TargetError(f"the redirect is invalid: {error}") from None
    return target_of(joined)


def _split(authority: str, standard: int) -> tuple[str, int]:
    port = _PORT.search(authority)
    name = authority[: port.start()] if port else authority
    number = int(port[1]) if port else standard
    if not 1 <= number <= 65535:
        raise TargetError(f"{authority}: the port must be from 1 to 65535")
    try:
        return canonical_name(name), number
    except HostNameError as error:
        raise TargetError(str(error)) from None
