"""Headers of requests: the checked ones of a caller, and credentials that the host adds to them."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from ....policies.errors import PolicyError, ToolArgumentsInvalid, ToolFailed
from ....policies.network.names import HostNameError
from ....policies.network.overrides import FRAMING, canonical_header, overriding_header
from ....policies.network.paths import PathError, canonical_path
from ....policies.network.rules import canonical_pattern, matches_host, matches_path
from .targets import Target

_MOST = 64
_MOST_BYTES = 16_384
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
# They frame the message, choose another protocol, or tell servers another client.
_RESERVED = FRAMING | {"accept-encoding", "via"}
_KEPT = frozenset(("accept", "accept-language", "content-type", "user-agent"))  # by another origin


class HttpCredential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A credential of the vault, for the requests that it is added to.

    key: its name in the vault
    host: as in a NetworkRule, but not `*`
    ports: default 443
    methods, paths: default all; a path that ends in `*` stands for all that begin with it
    header: the header that carries it
    template: the value of the header; `{}` stands for the credential

    It is added over https only, and never after a redirect to another host, port or scheme.
    """

    key: str
    host: str
    ports: tuple[int, ...] = (443,)
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    header: str = "Authorization"
    template: str = "Bearer {}"

    def belongs_to(self, target: Target, method: str) -> bool:
        """Tell whether a request gets the credential."""
        if target.scheme != "https" or target.port not in self.ports:
            return False
        if not matches_host(canonical_pattern(self.host), target.host):
            return False
        if self.methods is not None and method not in self.methods:
            return False
        if self.paths is None:
            return True
        try:
            path = canonical_path(target.path)
        except PathError:
            return False
        return any(matches_path(each, path) for each in self.paths)


def check_credentials(credentials: Sequence[HttpCredential]) -> None:
    """Raise PolicyError for an invalid credential."""
    for each in credentials:
        place = f"credentials: {each.key!a}"
        try:
            pattern = canonical_pattern(each.host)
        except HostNameError as error:
            raise PolicyError(f"{place}: host: {error}") from None
        if pattern == "*":
            raise PolicyError(f"{place}: host: must not be '*': every host would get it")
        if each.template.count("{}") != 1 or not _VALUE.fullmatch(each.template):
            raise PolicyError(f"{place}: template: must have {{}} once, got {each.template!a}")
        if not _NAME.fullmatch(each.header) or _is_reserved(each.header):
            raise PolicyError(f"{place}: header: must be the name of a header, got {each.header!a}")
        for path in each.paths or ():
            if not path.startswith("/"):
                raise PolicyError(f"{place}: paths: must begin with /, got {path!a}")


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
