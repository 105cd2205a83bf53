"""`Vault`: credentials that the broker adds to calls and redacts from what comes back.

They never enter a cell, a record or an error message, as far as `Redaction` recognises them: verbatim,
in any JSON escapes (also of JSON within JSON), in base64, in hexadecimal and in percent-encoding, in
upper or lower case.  A credential that a tool returns in another form reaches the caller.
"""

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...policies.errors import ToolFailed

_SHORTEST = 4  # characters; a shorter one would match everywhere
REDACTED = "[credential]"
CredentialSource = Callable[[], str]


def from_environment(name: str) -> CredentialSource:
    """Read a credential from an environment variable, each time it is needed."""
    return lambda: os.environ[name]


def from_file(path: str | os.PathLike[str]) -> CredentialSource:
    """Read a credential from a file that only its owner may read, each time it is needed."""

    def read() -> str:
        if os.stat(path).st_mode & 0o077:
            raise PermissionError(f"{path} is readable by users other than its owner: chmod 600")
        return Path(path).read_text().strip()

    return read


def from_keyring(service: str, user: str) -> CredentialSource:
    """Read a credential from the desktop keyring; needs the extra `keyring`."""

    def read() -> str:
        import keyring

        found: str | None = keyring.get_password(service, user)
        if found is None:
            raise KeyError(service)
        return found

    return read


class Vault:
    """Credentials by name; each is text, or a function that returns it."""

    def __init__(self, credentials: Mapping[str, str | CredentialSource] = {}) -> None:
        self._sources = dict(credentials)

    def __repr__(self) -> str:
        return f"Vault({', '.join(sorted(self._sources))})"

    def get(self, name: str) -> str:
        """Return a credential; raises ToolFailed, without the credential, if it cannot be read."""
        source = self._sources.get(name)
        if source is None:
            raise ToolFailed(f"credential {name!r} is not in the vault", "Vault({name: ...})")
        try:
            value = source if isinstance(source, str) else source()
        except Exception as error:  # noqa: BLE001 - a source may raise anything
            why = str(error) if isinstance(error, OSError) else type(error).__name__
            raise ToolFailed(f"credential {name!r} cannot be read: {why}") from None
        if len(value) < _SHORTEST:
            raise ToolFailed(f"credential {name!r} is shorter than {_SHORTEST} characters")
        return value


class Redaction:
    """Redacts the credentials of one call from its result and its errors."""

    def __init__(self, secrets: Iterable[str]) -> None:
        secrets = list(secrets)
        forms = {form for secret in secrets for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._encoded = [re.compile(_in_percents(secret)) for secret in secrets]
        self._escaped = [re.compile(_in_json(secret)) for secret in secrets]

    def __bool__(self) -> bool:
        return bool(self._forms)

    def text(self, text: str) -> str:
        if "\\" in text:  # first: an escaped form may begin like a plain one
            for escaped in self._escaped:
                text = escaped.sub(REDACTED, text)
        for form in self._forms:
            text = text.replace(form, REDACTED)
        if "%" in text:
            for encoded in self._encoded:
                text = encoded.sub(REDACTED, text)
        return text


def _forms(secret: str) -> set[str]:
    """Return the forms of a secret that have no variants."""
    data = secret.encode()
    plain = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    encoded = {data.hex(), data.hex().upper()}
    return {form for form in (*plain, *encoded, *_in_base64(data)) if len(form) >= _SHORTEST}


_MOST_ESCAPES = 8  # backslashes before an escape: three times JSON within JSON
_MOST_MIXED = 4  # backslashes in a row that may each be escaped differently
_SHORT_ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def _in_json(secret: str) -> str:
    """Return a pattern of every way to write a secret in JSON: the encoder chooses which characters it
    escapes, and the case of the digits (RFC 8259, 7)."""
    runs = re.findall(r"\\+|[^\\]", secret, re.DOTALL)
    return "".join(map(_run_in_json, runs))


def _run_in_json(run: str) -> str:
    escape = rf"\\{{1,{_MOST_ESCAPES}}}"
    if run[0] == "\\":
        if len(run) > _MOST_MIXED:
            return "(?:" + "|".join(rf"\\{{{len(run) * times}}}" for times in (4, 2, 1)) + ")"
        return rf"(?:{escape}u005[cC]|\\{{4}}|\\{{2}}|\\)" * len(run)
    units = run.encode("utf-16-be", "surrogatepass").hex()
    written = "".join(
        f"{escape}u" + "".join(f"[{digit}{digit.upper()}]" for digit in units[start : start + 4])
        for start in range(0, len(units), 4)
    )
    plain = re.escape(run)
    if run in '"/':
        plain = rf"\\{{0,{_MOST_ESCAPES}}}{plain}"
    elif run in _SHORT_ESCAPES:
        plain = rf"(?:{plain}|{escape}{_SHORT_ESCAPES[run]})"
    return f"(?:{written}|{plain})"


def _in_percents(secret: str) -> str:
    """Return a pattern of every way to percent-encode a secret: the encoder chooses which bytes it
    encodes, and the case of the digits (RFC 3986, 2.1)."""
    return "".join(map(_byte_in_percents, secret.encode()))


def _byte_in_percents(byte: int) -> str:
    escaped = "%" + "".join(f"[{digit}{digit.upper()}]" for digit in f"{byte:02x}")
    if byte >= 0x80:
        return escaped
    plain = r" |\+" if byte == 0x20 else re.escape(chr(byte))
    return f"(?:{plain}|{escaped})"


def _in_base64(data: bytes) -> Iterable[str]:
    """Yield the base64 forms of `data` at any place of a text: three alignments, two alphabets."""
    for skipped in range(3):
        encoded = base64.b64encode(b"\0" * skipped + data)
        # The first and the last group also depend on the neighbouring bytes.
        whole = encoded[
            (4 if skipped else 0) : len(encoded) - (0 if (skipped + len(data)) % 3 == 0 else 4)
        ]
        yield whole.decode()
        yield whole.translate(bytes.maketrans(b"+/", b"-_")).decode()
