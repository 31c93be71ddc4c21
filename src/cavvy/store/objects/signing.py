"""Signs requests for S3 (Signature Version 4) and Google Cloud Storage (V4), without any SDK. The
signature is part of the URL's query.

Sources: docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html and
cloud.google.com/storage/docs/access-control/signing-urls-manually.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from cavvy.domain.values import Struct
from cavvy.store.objects.base import ObjectDenied

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey


class RequestSigner(Protocol):
    """Signs requests; the signature is added to the query of the URL."""

    def sign(
        self, method: str, url: str, query: Mapping[str, str], now: datetime, expires_s: int
    ) -> str:
        """Return the signed URL. `url` must have no query, and its path must already be quoted."""


class _SigningScheme(NamedTuple):
    """What differs between the two signatures: the vendor in the names of the parameters, and the
    algorithm."""

    vendor: str
    algorithm: str

    def list_terms(self, credential: str, now: datetime, expires_s: int) -> Mapping[str, str]:
        """Return the parameters that are signed together with the query."""
        terms = {
            "Algorithm": self.algorithm,
            "Credential": credential,
            "Date": now.strftime("%Y%m%dT%H%M%SZ"),
            "Expires": str(expires_s),
            "SignedHeaders": "host",
        }
        return {f"X-{self.vendor}-{name}": value for name, value in terms.items()}

    def make_text(
        self, method: str, url: str, query: Mapping[str, str], scope: str
    ) -> tuple[str, str]:
        """Return the text to sign, and the query in the form that the signature requires."""
        path, host, signed = urlsplit(url).path or "/", urlsplit(url).netloc, _query(query)
        request = f"{method}\n{path}\n{signed}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(request.encode()).hexdigest()
        return f"{self.algorithm}\n{query[f'X-{self.vendor}-Date']}\n{scope}\n{digest}", signed


_AMAZON = _SigningScheme("Amz", "AWS4-HMAC-SHA256")
_GOOGLE = _SigningScheme("Goog", "GOOG4-RSA-SHA256")


class AmazonKey(Struct, frozen=True, kw_only=True):
    """An access key for S3 and compatible services. A temporary key also has a session token,
    `token`."""

    key_id: str
    secret: str
    token: str = ""
    region: str = "us-east-1"

    def sign(
        self, method: str, url: str, query: Mapping[str, str], now: datetime, expires_s: int
    ) -> str:
        day = now.strftime("%Y%m%d")
        scope = f"{day}/{self.region}/s3/aws4_request"
        asked = {**query, **_AMAZON.list_terms(f"{self.key_id}/{scope}", now, expires_s)}
        if self.token:
            asked["X-Amz-Security-Token"] = self.token
        text, signed = _AMAZON.make_text(method, url, asked, scope)
        key = f"AWS4{self.secret}".encode()
        for part in (day, self.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        return f"{url}?{signed}&X-Amz-Signature={hmac.digest(key, text.encode(), 'sha256').hex()}"


class GoogleKey(Struct, frozen=True, kw_only=True):
    """A service account's private key."""

    email: str
    private_key: str  # PEM

    def sign(
        self, method: str, url: str, query: Mapping[str, str], now: datetime, expires_s: int
    ) -> str:
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
        from cryptography.hazmat.primitives.hashes import SHA256

        scope = f"{now.strftime('%Y%m%d')}/auto/storage/goog4_request"
        asked = {**query, **_GOOGLE.list_terms(f"{self.email}/{scope}", now, expires_s)}
        text, signed = _GOOGLE.make_text(method, url, asked, scope)
        key = _load(self.private_key)
        return (
            f"{url}?{signed}&X-Goog-Signature={key.sign(text.encode(), PKCS1v15(), SHA256()).hex()}"
        )


@lru_cache(16)  # loading a key takes fifty times as long as signing with it
def _load(private_key: str) -> "RSAPrivateKey":
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(private_key.encode(), None)
    except ValueError as error:
        raise ObjectDenied("the service account's private key cannot be read") from error
    if not isinstance(key, RSAPrivateKey):
        raise ObjectDenied("the service account's private key is not an RSA key")
    return key


class NoSigner(Struct, frozen=True, kw_only=True):
    """Signs nothing. The class is used for emulators, and for buckets that anyone may read."""

    def sign(
        self, method: str, url: str, query: Mapping[str, str], now: datetime, expires_s: int
    ) -> str:
        return f"{url}?{_query(query)}" if query else url


def quote_key(key: str) -> str:
    """Return an object's key, quoted for the path of a URL."""
    return quote(key, safe="/-_.~")


def _query(query: Mapping[str, str]) -> str:
    pairs = [(quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items()]
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))
