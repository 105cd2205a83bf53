"""The certificate authority of one sandbox, which only its cells trust, and Java's store of
authorities.

Its key is dropped as soon as it has signed the one certificate, which is for the hosts of the
credentials alone; so nothing can sign another one.
"""

import base64
import datetime
import hashlib
import ipaddress
import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

_DAYS = 90  # longer than a cell lives
_EARLIER = datetime.timedelta(days=1)  # clocks of programs may be wrong
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_EVERY_ADDRESS = ("0.0.0.0/0", "::/0")
# Java KeyStore: JavaKeyStore.java of OpenJDK, engineStore and getPreKeyedHash.
_JKS_MAGIC, _JKS_VERSION, _TRUSTED_ENTRY = 0xFEEDFEED, 2, 2
_JAVA_PASSWORD = "changeit"  # noqa: S105 - the documented one of every store


class MadeCertificate(NamedTuple):
    """`authority` in PEM, and `own`: the key and the certificate for the hosts, in PEM."""

    authority: bytes
    own: bytes


def certificate_for(hosts: Sequence[str]) -> MadeCertificate:
    """Make an authority and the certificate for `hosts`."""
    key, own_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cellwright cell authority")])
    names = [x509.DNSName(each) for each in hosts]
    now = datetime.datetime.now(datetime.UTC)

    def signed(
        subject: x509.Name, public: ec.EllipticCurvePublicKey,
        *extensions: tuple[x509.ExtensionType, bool],
    ) -> bytes:  # fmt: skip
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        builder = x509.CertificateBuilder(
            issuer, subject, public, x509.random_serial_number(), now - _EARLIER,
            now + datetime.timedelta(days=_DAYS),
        )  # fmt: skip
        for extension, is_critical in (
            *extensions,
            (x509.SubjectKeyIdentifier.from_public_key(public), False),
            (issuer_id, False),
        ):
            builder = builder.add_extension(extension, is_critical)
        made = builder.sign(key, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    nowhere = [x509.IPAddress(ipaddress.ip_network(each)) for each in _EVERY_ADDRESS]
    authority = signed(
        issuer, key.public_key(), (x509.BasicConstraints(True, 0), True),
        (x509.NameConstraints(names, nowhere), True), (_usage(signs=True), True),
    )  # fmt: skip
    own = signed(
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cellwright egress")]),
        own_key.public_key(), (x509.BasicConstraints(False, None), True),
        (x509.SubjectAlternativeName(names), False), (_usage(signs=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
    )  # fmt: skip
    own_pem = own_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return MadeCertificate(authority, own_pem + own + authority)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def java_store(bundle: bytes) -> bytes:
    """Return the authorities of a file in PEM as a Java KeyStore, with the usual password."""
    made = [base64.b64decode(b"".join(each.split())) for each in _PEM.findall(bundle)]
    data = struct.pack(">III", _JKS_MAGIC, _JKS_VERSION, len(made))
    for number, certificate in enumerate(made):
        data += struct.pack(">I", _TRUSTED_ENTRY) + _java_text(f"authority{number}")
        data += struct.pack(">Q", 0) + _java_text("X.509")
        data += struct.pack(">I", len(certificate)) + certificate
    secret = _JAVA_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite"
    return data + hashlib.sha1(secret + data, usedforsecurity=False).digest()


def _java_text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode("ascii")
