"""Makes an authority and certificates of it for tests of TLS."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """A certificate authority whose certificate is the file `ca`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        made = self._builder(self._name, self._key.public_key()).add_extension(constraints, True)
        made = made.add_extension(_SIGNS, True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str = "server",
        *,
        days: int = 30,
        host: str | None = None,
        address: str = "127.0.0.1",
    ) -> tuple[Path, Path]:
        """Write a certificate for `host`, or for the address and localhost; its file and that of
        its key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ip_address(address))]
        alternatives = x509.SubjectAlternativeName(names if host is None else [x509.DNSName(host)])
        made = self._builder(subject, key.public_key(), days).add_extension(alternatives, False)
        certificate, file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return certificate, file

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int = 30
    ) -> x509.CertificateBuilder:
        """The extensions are those that Python 3.13 requires of a certificate and its authority."""
        end = datetime.now(UTC) + timedelta(days=days)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - timedelta(days=60))
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False
            )
        )
