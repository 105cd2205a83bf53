"""Access over HTTP: the clients' tokens, each with the client's name, and the server's address."""

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, Set
from typing import NamedTuple

from ...policies.errors import PolicyError

MCP_VARIABLE, WEB_VARIABLE = "CELLWRIGHT_MCP_TOKEN", "CELLWRIGHT_WEB_TOKEN"
OPERATOR = "operator"  # a role
# In the scope of an admitted request: the name of its token, and an event that is set once the client
# has disconnected.
CLIENT, GONE = "cellwright.client", "cellwright.gone"
_SHORTEST = 16
_LARGEST_FILE = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ONLY = "client"


class Tokens:
    """Maps tokens to the names of clients; keeps only hashes of the tokens."""

    def __init__(self, by_name: dict[str, str], operators: Set[str] = frozenset()) -> None:
        """Raise PolicyError for a token that is too short or not unique.

        `operators`: the clients that act for a person who looks after the server.
        """
        for name, token in by_name.items():
            if len(token) < _SHORTEST:
                raise PolicyError(
                    f"the token of {name!r} must have at least {_SHORTEST} characters"
                )
        self._operators = operators
        self._hashes = {name: _hash(token) for name, token in by_name.items()}
        if len(set(self._hashes.values())) < len(self._hashes):
            raise PolicyError("two clients have the same token", "give each client its own")

    def client_of(self, authorization: str) -> str | None:
        """Return the client's name for an Authorization header, None for an unknown token.

        It compares every token, each in constant time.
        """
        scheme, _, token = authorization.partition(" ")
        given = _hash(token.strip())
        found = [name for name, known in self._hashes.items() if hmac.compare_digest(given, known)]
        return found[0] if found and scheme.lower() == "bearer" else None

    def is_operator(self, client: str) -> bool:
        """Tell whether a client is an operator."""
        return client in self._operators


class HttpSettings(NamedTuple):
    """Where the server listens and who may connect.  `made` is a generated token, "" if the clients
    have theirs; `hosts` are the allowed names of this server, `origins` the allowed origins of web
    pages."""

    host: str
    port: int
    tokens: Tokens
    made: str
    hosts: tuple[str, ...]
    origins: tuple[str, ...]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def make_token() -> str:
    return secrets.token_urlsafe(32)


def tokens_of(
    path: str | None,
    variable: str,
    roles: Set[str] = frozenset(),
    make: Callable[[], str] = make_token,
) -> tuple[Tokens, str]:
    """Return the tokens of a file, else of the environment, else one that `make` generates, which is
    also returned.

    A line of the file is a token, or a name and a token, or with `roles` a name, a token and one of
    them; without a file, the only client has every role.  Raises PolicyError.
    """
    if path is not None:
        return _parsed(_read(path), path, roles), ""
    operators = frozenset((_ONLY,) if OPERATOR in roles else ())
    if given := os.environ.get(variable):
        return Tokens({_ONLY: given.strip()}, operators), ""
    made = make()
    return Tokens({_ONLY: made}, operators), made


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise PolicyError(f"{path} can be read by other users", f"chmod 600 {path}")
            return file.read(_LARGEST_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read {path}: {error}") from None


def _parsed(text: str, path: str, roles: Set[str]) -> Tokens:
    lines = [line.split() for line in text.splitlines() if line.strip() and line[0] != "#"]
    found: dict[str, str] = {}
    operators = set()
    for words in lines:
        name, token, *role = words if len(words) > 1 else (_ONLY, words[0])
        if len(role) > 1 or not roles >= {*role} or not _NAME.fullmatch(name) or name in found:
            forms = " or ".join(("TOKEN", "NAME TOKEN", *(f"NAME TOKEN {each}" for each in roles)))
            raise PolicyError(f"{path}: each line must be {forms}, with unique names")
        found[name] = token
        if OPERATOR in role:
            operators.add(name)
    if not found:
        raise PolicyError(f"{path} contains no token")
    return Tokens(found, operators)
