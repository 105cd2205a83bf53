"""`Target`: a URL that was read once, strictly; rules, credentials and the request use its parts alone.

A text that clients read in different ways is refused: user information, backslashes, control
characters, addresses, and characters that must be escaped.

Headers of requests: the checked ones of a caller, and credentials that the host adds to them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urljoin

from ....policies.errors import PolicyError, ToolArgumentsInvalid, ToolFailed
from ....policies.network.canonical import (
    FRAMING,
    HostNameError,
    canonical_header,
    canonical_name,
    overriding_header,
)
from ....policies.network.credential import HostCredential
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


_MOST = 64
_MOST_BYTES = 16_384
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
# Refused headers: they frame the message, choose another protocol, or name another client.
_RESERVED = FRAMING | {"accept-encoding", "via"}
_KEPT = frozenset(
    ("accept", "accept-language", "content-type", "user-agent")
)  # sent to other origins


class HttpCredential(HostCredential, frozen=True, kw_only=True):
    """A credential of the vault, for the requests that it is added to.

    header: the header that carries it
    template: the value of the header; `{}` stands for the credential

    It is added over https only, and never after a redirect to another host, port or scheme.
    """

    header: str = "Authorization"
    template: str = "Bearer {}"

    def belongs_to(self, target: Target, method: str) -> bool:
        """Tell whether a request gets the credential."""
        if target.scheme != "https":
            return False
        return self.is_for(target.host, target.port, method, target.path)


def check_credentials(credentials: Sequence[HttpCredential]) -> None:
    """Raise PolicyError for an invalid credential."""
    for each in credentials:
        place = f"credentials: {each.key!a}"
        each.check(place)
        if each.template.count("{}") != 1 or not _VALUE.fullmatch(each.template):
            raise PolicyError(f"{place}: template: must have {{}} once, got {each.template!a}")
        if not _NAME.fullmatch(each.header) or _is_reserved(each.header):
            raise PolicyError(f"{place}: header: must be the name of a header, got {each.header!a}")


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a caller's headers; raises ToolArgumentsInvalid."""
    if len(headers) > _MOST or sum(map(len, (*headers, *headers.values()))) > _MOST_BYTES:
        raise ToolArgumentsInvalid(
            f"headers: must be at most {_MOST} with {_MOST_BYTES} characters together"
        )
    if len({canonical_header(name) for name in headers}) < len(headers):
        raise ToolArgumentsInvalid("headers: a name must not occur twice, in whatever spelling")
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise ToolArgumentsInvalid(f"headers: {name[:60]!a} is not the name of a header")
        if _is_reserved(name):
            raise ToolArgumentsInvalid(f"headers: {name}: the host sets it, or it is not allowed")
        if not _VALUE.fullmatch(value):
            raise ToolArgumentsInvalid(f"headers: {name}: has a control character")
    return dict(headers)


def with_credential(
    headers: dict[str, str], credential: HttpCredential, secret: str
) -> dict[str, str]:
    """Return `headers` with a credential; raises ToolArgumentsInvalid if the caller set that header."""
    own = canonical_header(credential.header)
    if any(canonical_header(name) == own for name in headers):
        raise ToolArgumentsInvalid(f"headers: {credential.header}: the host sets it; leave it out")
    if not _VALUE.fullmatch(secret):
        raise ToolFailed(
            f"credential {credential.key!r} has a line break or another control character"
        )
    return headers | {credential.header: credential.template.replace("{}", secret)}


def for_another_origin(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers that may go to another origin than the caller named."""
    return {name: value for name, value in headers.items() if name.lower() in _KEPT}


def _is_reserved(name: str) -> bool:
    canonical = canonical_header(name)
    return (
        canonical in _RESERVED or canonical.startswith("proxy-") or bool(overriding_header((name,)))
    )
