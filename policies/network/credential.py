"""`HostCredential`: a credential that the host adds to requests, and the requests that get it.  Pure.

`CellCredential`: one for which a cell has a placeholder.  The egress process puts the value in its
place; `EgressSecrets` are the values as that process gets them.  No cell and no trail has them.
"""

import re
from collections.abc import Iterable

import msgspec

from ..errors import PolicyError
from .canonical import HostNameError, PathError, canonical_path
from .rule import NetworkRule, Scheme
from .rules import canonical_pattern, matches_host, matches_path


class HostCredential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A credential and the requests that it belongs to.

    key: its name in the vault
    host: as in a NetworkRule, but not `*`
    ports: default 443
    methods, paths: default all; a path that ends in `*` stands for all that begin with it
    """

    key: str
    host: str
    ports: tuple[int, ...] = (443,)
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None

    def is_for(self, host: str, port: int, method: str, path: str) -> bool:
        """Tell whether a request to a canonical `host` gets the credential, whatever its scheme."""
        if not self.is_for_host(host, port):
            return False
        if self.methods is not None and method not in self.methods:
            return False
        if self.paths is None:
            return True
        try:
            path = canonical_path(path)
        except PathError:
            return False
        return any(matches_path(each, path) for each in self.paths)

    def is_for_host(self, host: str, port: int) -> bool:
        return port in self.ports and matches_host(canonical_pattern(self.host), host)

    def check(self, place: str) -> None:
        """Raise PolicyError, which names the `place`, for an invalid one."""
        try:
            pattern = canonical_pattern(self.host)
        except HostNameError as error:
            raise PolicyError(f"{place}: host: {error}") from None
        if pattern == "*":
            raise PolicyError(f"{place}: host: must not be '*': every host would get it")
        for path in self.paths or ():
            if not path.startswith("/"):
                raise PolicyError(f"{place}: paths: must begin with /, got {path!a}")


class CellCredential(HostCredential, frozen=True, kw_only=True):
    """A credential that programs of a cell use by a placeholder.

    variable: the environment variable of the cell that has the placeholder
    key: the source of the value: env:NAME, file:/PATH or keyring:SERVICE/USER
    host: one name, without a wildcard
    scheme: `https`, default; `http` sends the value in clear text
    """

    variable: str
    scheme: Scheme = "https"

    @property
    def rule(self) -> NetworkRule:
        """The rule that allows its requests."""
        return NetworkRule(host=self.host, ports=self.ports, schemes=(self.scheme,))


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT = re.compile(
    r"(?P<variable>[^=@]+)=(?P<key>.+)@(?P<plain>http://)?(?P<host>[^@/:]+)(?::(?P<port>[0-9]{1,5}))?"
)
_FORM = "NAME=ENV@HOST, such as GITHUB_TOKEN=GITHUB_TOKEN@api.github.com"


def credential_of(text: str) -> CellCredential:
    """Return the credential of NAME=ENV@[http://]HOST[:PORT]; raises PolicyError, without the text:
    it may have the secret itself."""
    found = _TEXT.fullmatch(text)
    if not found:
        raise PolicyError("credential: has another form", _FORM)
    key = found["key"]
    port = int(found["port"] or (80 if found["plain"] else 443))
    return CellCredential(
        variable=found["variable"], key=key if ":" in key else f"env:{key}", host=found["host"],
        ports=(port,), scheme="http" if found["plain"] else "https",
    )  # fmt: skip


def check_cell_credentials(credentials: Iterable[CellCredential]) -> None:
    """Raise PolicyError for an invalid credential, or two sources of one variable."""
    keys: dict[str, str] = {}
    for each in credentials:
        place = f"credentials: {each.variable[:60]!a}"
        if not _VARIABLE.fullmatch(each.variable):
            raise PolicyError(f"{place}: variable: must be the name of an environment variable")
        each.check(place)
        if "*" in each.host:
            raise PolicyError(f"{place}: host: must be one name, without a wildcard")
        if each.scheme not in ("http", "https"):
            raise PolicyError(f"{place}: scheme: must be http or https, got {each.scheme!a}")
        if not each.ports or not all(0 < port < 65536 for port in each.ports):
            raise PolicyError(f"{place}: ports: must be from 1 to 65535")
        if keys.setdefault(each.variable, each.key) != each.key:
            raise PolicyError(f"{place}: must have one source for all its hosts")


class EgressSecret(msgspec.Struct, frozen=True, array_like=True):
    """The value of one variable, and `masks`: its encoded forms, each with that of the placeholder,
    which has the same length."""

    credentials: tuple[CellCredential, ...]
    placeholder: bytes
    value: bytes
    masks: tuple[tuple[bytes, bytes], ...]

    def __repr__(self) -> str:
        return f"EgressSecret({self.credentials[0].variable})"


class EgressSecrets(msgspec.Struct, frozen=True, array_like=True):
    """All that the egress process needs for the credentials of a sandbox.

    `certificate`: the key and the certificates, in PEM, by which it is the server to programs; empty
    if no credential is for https.  `trusted`: the host's file of authorities, for the real servers.
    """

    secrets: tuple[EgressSecret, ...]
    certificate: bytes = b""
    trusted: str = ""

    def __repr__(self) -> str:
        return f"EgressSecrets({self.secrets})"
