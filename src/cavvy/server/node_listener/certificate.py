"""Creates and loads the server's own certificate. Nodes check only the certificate's hash, so the
certificate needs no authority, host name or expiry date.
"""

import base64
import hashlib
import os
from datetime import UTC, datetime, timedelta

from cavvy.client.state import write_private
from cavvy.domain.values import Struct

_NAME = "cavvy"
# nodes check the hash, so the expiry date is far in the future and never matters
_VALID = timedelta(days=365 * 30)


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
