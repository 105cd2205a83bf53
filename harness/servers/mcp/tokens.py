"""Access over HTTP: the clients' tokens, each with the client's name, and the server's address."""

import hashlib
import hmac
import os
import re
import secrets
import stat
from typing import NamedTuple

from ....policies.errors import PolicyError

VARIABLE = "CELLWRIGHT_MCP_TOKEN"
_SHORTEST = 16
_LARGEST_FILE = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ONLY = "client"


class Tokens:
    """Maps tokens to the names of clients; keeps only hashes of the tokens."""

    def __init__(self, by_name: dict[str, str]) -> None:
        """Raise PolicyError for a token that is too short or not unique."""
        for name, token in by_name.items():
            if len(token) < _SHORTEST:
                raise PolicyError(
                    f"the token of {name!r} must have at least {_SHORTEST} characters"
                )
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


def tokens_of(path: str | None) -> tuple[Tokens, str]:
    """Return the tokens of a file, else of the environment, else a generated one, which is also
    returned.

    A line of the file is a token, or a name and a token.  Raises PolicyError.
    """
    if path is not None:
        return Tokens(_parsed(_read(path), path)), ""
    if given := os.environ.get(VARIABLE):
        return Tokens({_ONLY: given.strip()}), ""
    made = secrets.token_urlsafe(32)
    return Tokens({_ONLY: made}), made


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise PolicyError(f"{path} can be read by other users", f"chmod 600 {path}")
            return file.read(_LARGEST_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read {path}: {error}") from None


def _parsed(text: str, path: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines() if line.strip() and line[0] != "#"]
    found: dict[str, str] = {}
    for words in lines:
        name, token = words if len(words) == 2 else (_ONLY, words[0])
        if len(words) > 2 or not _NAME.fullmatch(name) or name in found:
            raise PolicyError(f"{path}: each line must be TOKEN or NAME TOKEN, with unique names")
        found[name] = token
    if not found:
        raise PolicyError(f"{path} contains no token")
    return found
