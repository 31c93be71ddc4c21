"""The certificate of the listener for nodes, and its TLS settings. Nodes check only the hash of the
certificate, so it needs no authority, host name or expiry date. Only TLS 1.2 and newer are allowed
and, in TLS 1.2, only authenticated ciphers with forward secrecy.

Busybox's downloader supports only SHA-1 signatures in the handshake, which OpenSSL allows only at
security level 0. The server recognises Busybox's downloader by the first message, which contains an
IP address as the server name. RFC 6066, section 3, forbids IP addresses as server names, and no
other client sends an IP address as the server name. A connection of Busybox's downloader gets
security level 0, and may download only files whose hash the node checks. If nodes reach the server
by a host name, every client sends this name in its first message, so the server cannot tell
Busybox's downloader from other clients. If nodes know the server by a host name, all connections
get security level 0 and may use all routes. Agents and curl themselves refuse SHA-1 signatures,
even on connections with security level 0.
"""

import base64
import hashlib
import ipaddress
import os
import ssl
from datetime import UTC, datetime, timedelta

from cavvy.client.state import write_private
from cavvy.domain.values import Struct

_NAME = "cavvy"
# nodes check the hash, so the expiry date is far in the future and never matters
_VALID = timedelta(days=365 * 30)
# The certificate has a P-256 key, so other kinds of signatures cannot occur. All ciphers of TLS 1.3
# are allowed as well.
CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305"
)


class Certificate(Struct, frozen=True, kw_only=True):
    """A certificate. `file` is the path of a file that contains the certificate and its private
    key.
    """

    file: str
    pin: str  # SHA-256 of the certificate, in hexadecimal
    key_pin: str  # SHA-256 of its public key, in the form that `curl --pinnedpubkey` expects


def load_certificate(path: str) -> Certificate:
    """Load the certificate from this file. If the file is missing, it is created with a new
    certificate. Raises OSError, or ValueError if the file is damaged.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if not os.path.exists(path):
        write_private(path, _make())
    with open(path, "rb") as file:
        certificate = x509.load_pem_x509_certificate(file.read())
    public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return Certificate(
        file=path,
        pin=hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest(),
        key_pin="sha256//" + base64.b64encode(hashlib.sha256(public).digest()).decode(),
    )


def _make() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    # earlier than now, because the clocks of nodes may be behind
    start = datetime.now(UTC) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)


class TlsContexts:
    """The TLS contexts of one certificate. Connections start with the context `strict`."""

    def __init__(self, certificate: str) -> None:
        self.strict = _make_context(certificate, CIPHERS)
        self._named = _make_context(certificate, f"{CIPHERS}:@SECLEVEL=0")
        self._downloads = _make_context(certificate, f"{CIPHERS}:@SECLEVEL=0")
        self.strict.sni_callback = self._choose

    def only_downloads(self, connection: object) -> bool:
        """Return whether this TLS connection is limited to downloads of files by their hash."""
        return getattr(connection, "context", None) is self._downloads

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> int | None:
        if name is not None:
            connection.context = self._downloads if _is_address(name) else self._named
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _make_context(certificate: str, ciphers: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate)
    context.set_ciphers(ciphers)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context
