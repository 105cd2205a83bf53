"""The tokens that let clients in over HTTP, each with the name of who holds it."""

import hashlib
import hmac
import os
import re
import secrets
import stat

from ....policies.errors import PolicyError

VARIABLE = "CELLWRIGHT_MCP_TOKEN"
_SHORTEST = 16
_LARGEST_FILE = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ONLY = "client"


class Tokens:
    """Knows clients by their tokens, of which it keeps hashes only."""

    def __init__(self, by_name: dict[str, str]) -> None:
        """Raises PolicyError for a token that could be guessed."""
        for name, token in by_name.items():
            if len(token) < _SHORTEST:
                raise PolicyError(f"the token of {name!r} is shorter than {_SHORTEST} characters")
        self._hashes = {name: _hash(token) for name, token in by_name.items()}
        if len(set(self._hashes.values())) < len(self._hashes):
            raise PolicyError("two clients have the same token", "give each its own")

    def client_of(self, authorization: str) -> str | None:
        """Return whose the token of an Authorization header is; None if it is nobody's.

        Every token is compared, each in the same time.
        """
        scheme, _, token = authorization.partition(" ")
        given = _hash(token.strip())
        found = [name for name, known in self._hashes.items() if hmac.compare_digest(given, known)]
        return found[0] if found and scheme.lower() == "bearer" else None


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def tokens_of(path: str | None) -> tuple[Tokens, str]:
    """Return the tokens of a file, or of the environment, else a new one, which is returned too.

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
                raise PolicyError(
                    f"{path} can be read by others than its owner", f"chmod 600 {path}"
                )
            return file.read(_LARGEST_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read {path}: {error}") from None


def _parsed(text: str, path: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines() if line.strip() and line[0] != "#"]
    found: dict[str, str] = {}
    for words in lines:
        name, token = words if len(words) == 2 else (_ONLY, words[0])
        if len(words) > 2 or not _NAME.fullmatch(name) or name in found:
            raise PolicyError(f"{path}: a line is TOKEN, or NAME TOKEN, and no name stands twice")
        found[name] = token
    if not found:
        raise PolicyError(f"{path} holds no token")
    return found
