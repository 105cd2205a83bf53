"""`CellCredentials`: the credentials of a sandbox, whose cells have placeholders in place of values.

A placeholder has the length, the alphabet and the known prefix of its value, so that programs accept
it, and is made anew for each sandbox.  The values go to the egress process alone.
"""

import contextlib
import math
import os
import re
import secrets
import shutil
import string
import tempfile
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import msgspec

from ....policies.compiling.environment import TRUSTING
from ....policies.errors import PolicyError
from ....policies.extras import how_to_install
from ....policies.network.canonical import canonical_name
from ....policies.network.credential import (
    CellCredential,
    EgressSecret,
    EgressSecrets,
    check_cell_credentials,
)
from ....policies.network.rules import NetworkRules
from ....policies.plan import CERTIFICATES
from ....policies.policy import Policy
from ....runner.launching.living import directory_prefix
from ...text.redaction import paired_forms
from ...text.secrets import known_prefix
from ...user_data import SecretUnreadable, named_source, read_secret

_MOST = 4096  # characters of a value: each piece of an answer is searched for its beginning
_LEAST_BITS = 64  # a placeholder of so many is not found by trying
# JSON and headers have these characters as they are.
_VALUE = re.compile(r"[!#-\[\]-~]+")
_HEXADECIMAL, _DIGITS = "0123456789abcdef", string.digits
_ALPHABETS = (
    _DIGITS, _HEXADECIMAL, _HEXADECIMAL.upper(), string.ascii_uppercase + _DIGITS,
    string.ascii_letters + _DIGITS,
)  # fmt: skip
# Variables of clients that bring authorities: cargo, the SDKs of AWS, deno.
_TRUSTING_BY_THEMSELVES = ("CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE", "DENO_CERT")
# Java's store of authorities in Debian, to which its runtimes link, and Fedora.
_JAVA_STORES = ("/etc/ssl/certs/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts")


class CellCredentials:
    """The credentials of cells and of the egress process.  Close it with the sandbox.

    `variables`: of cells, with the placeholders. `files`: of cells, each with the host's file that is
    shown there. `encoded`: EgressSecrets.
    """

    def __init__(self, given: Iterable[CellCredential], policy: Policy) -> None:
        """Raises PolicyError for a credential, or a policy by which no request would get it."""
        credentials = sorted(given, key=lambda each: each.variable)
        check_cell_credentials(credentials)
        _require_allowed(credentials, policy)
        made = [_secret(tuple(each)) for _, each in groupby(credentials, lambda one: one.variable)]
        self._made = made
        self.require_hidden(policy.environment, "of the policy")
        self.variables = {each.credentials[0].variable: each.placeholder.decode() for each in made}
        self.files: dict[str, str] = {}
        self._directory, self._owner = "", os.getpid()
        secrets = EgressSecrets(tuple(made))
        if any(each.scheme == "https" for each in credentials):
            hosts = sorted({canonical_name(each.host) for each in credentials})
            secrets = self._with_authority(secrets, hosts, policy.environment)
        self.encoded = msgspec.msgpack.encode(secrets)

    def _with_authority(
        self, found: EgressSecrets, hosts: list[str], given: Mapping[str, str]
    ) -> EgressSecrets:
        """Have cells trust an authority of their own, and the egress process a certificate of it."""
        try:
            from .cell_authority import certificate_for, java_store
        except ImportError:
            raise PolicyError(
                "credentials: the package cryptography is not installed",
                how_to_install("credentials"),
            ) from None
        trusted = _trusted_file()
        made = certificate_for(hosts)
        self._directory = tempfile.mkdtemp(prefix=directory_prefix())  # for `cellwright gc`
        bundle = Path(self._directory, "authorities.pem")
        bundle.write_bytes(Path(trusted).read_bytes().rstrip() + b"\n" + made.authority)
        self.files = {CERTIFICATES: str(bundle)}
        trusting = dict.fromkeys((*TRUSTING, *_TRUSTING_BY_THEMSELVES), CERTIFICATES)
        self.variables |= {name: path for name, path in trusting.items() if name not in given}
        if stores := [each for each in _JAVA_STORES if os.path.isfile(each)]:
            store = Path(self._directory, "authorities.jks")
            store.write_bytes(java_store(bundle.read_bytes()))
            self.files |= dict.fromkeys(stores, str(store))
        return msgspec.structs.replace(found, certificate=made.own, trusted=trusted)

    def require_hidden(
        self, variables: Mapping[str, str], whose: str, words: Iterable[str] = ()
    ) -> None:
        """Refuse variables, and words of a command, that would show a value to cells."""
        for each in self._made:
            own, value = each.credentials[0].variable, each.value.decode()
            shown = next(
                (name for name, text in variables.items() if name != own and value in text), ""
            )
            if shown:
                raise PolicyError(
                    f"credentials: {own}: the variable {shown} {whose} has its value",
                    f"leave {shown} out, or make it a credential, too",
                )
            if any(value in word for word in words):
                raise PolicyError(
                    f"credentials: {own}: the command has its value",
                    f"write ${own} in single quotes, so that the cell's shell replaces it",
                )

    def close(self) -> None:
        """Remove the files; does nothing in a forked child of the owner."""
        if self._directory and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._directory)


def _require_allowed(credentials: Iterable[CellCredential], policy: Policy) -> None:
    network = policy.network
    rules = NetworkRules(network.allow, network.deny, network.addresses)
    for each in credentials:
        for port in each.ports:
            verdict = rules.decide(each.host, port, each.scheme)
            if not verdict.is_allowed:
                raise PolicyError(
                    f"credentials: {each.variable}: the policy does not allow its host",
                    f"{verdict.reason}: add it to [[network.allow]]",
                )


def _secret(credentials: tuple[CellCredential, ...]) -> EgressSecret:
    first = credentials[0]
    place = f"credentials: {first.variable}"
    try:
        value = read_secret(named_source(first.key, place))
    except SecretUnreadable as error:
        raise PolicyError(f"{place}: {error}") from None
    if len(value) > _MOST:
        raise PolicyError(f"{place}: the value is longer than {_MOST} characters")
    if not _VALUE.fullmatch(value):
        raise PolicyError(
            f'{place}: the value must have visible characters of ASCII alone, without " and \\'
        )
    placeholder = placeholder_for(value)
    if not placeholder:
        raise PolicyError(
            f"{place}: the value is too short: a placeholder of its length could be guessed"
        )
    masks = paired_forms(value, placeholder)
    return EgressSecret(
        credentials, placeholder.encode(), value.encode(),
        tuple((form.encode(), put.encode()) for form, put in masks.items()),
    )  # fmt: skip


def placeholder_for(value: str) -> str:
    """Return a random text of the form of `value`; empty if that could be guessed."""
    prefix = known_prefix(value)
    rest = value[len(prefix) :]
    alphabet = next((each for each in _ALPHABETS if set(rest) <= set(each)), _ALPHABETS[-1])
    if len(rest) * math.log2(len(alphabet)) < _LEAST_BITS:
        return ""
    return prefix + "".join(secrets.choice(alphabet) for _ in rest)


def _trusted_file() -> str:
    """Return the host's file of authorities, as OpenSSL finds it; raises PolicyError without."""
    from ....runner.host.plans import certificates_of_host

    found = os.environ.get("SSL_CERT_FILE") or certificates_of_host()
    if not found or not os.access(found, os.R_OK):
        raise PolicyError(
            "credentials: this host has no file of certificate authorities to verify servers by",
            "install ca-certificates, or set SSL_CERT_FILE",
        )
    return os.path.realpath(found)
