"""Gives access to buckets of S3 and Google Cloud Storage, which have the same XML interface, and
signs requests for them (Signature Version 4, and V4 of Google), without any SDK. The signature of a
request is in the query of its URL.

Sources: docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html and
cloud.google.com/storage/docs/access-control/signing-urls-manually.
"""

import hashlib
import hmac
import xml.etree.ElementTree as Xml
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape

from cavvy.domain.values import Struct, replace
from cavvy.store.objects.base import (
    ObjectDenied,
    ObjectInfo,
    ObjectMissing,
    ObjectTryAgain,
    SignedRequest,
)
from cavvy.store.objects.http import SignedStorage, ask, check, found_of, parsing

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


class XmlBucket(SignedStorage):
    """A bucket with an XML interface. `endpoint` is the root of the service's URLs, such as
    https://s3.eu-west-1.amazonaws.com. `in_host` states whether the bucket's name is part of the
    host. `regional` states whether `endpoint` is the endpoint of one Amazon region; the bucket may
    be in a different region.
    """

    bills_parts: ClassVar = True

    def __init__(
        self,
        bucket: str,
        signer: RequestSigner,
        now: Callable[[], datetime],
        *,
        endpoint: str,
        in_host: bool = False,
        regional: bool = False,
    ) -> None:
        super().__init__(bucket)
        self._signer = signer
        self._now = now
        scheme, _, host = endpoint.rstrip("/").partition("://")
        self._roots = (
            (f"{scheme}://{bucket}.{host}",) if in_host else (f"{scheme}://{host}/{bucket}",)
        )
        self._in_host, self._fixed = in_host, not regional

    def head(self, key: str) -> ObjectInfo | None:
        answer = self._ask("HEAD", key)
        if answer.status == 404:
            return None
        found = found_of(key, check(answer, self._say(key)))
        return replace(found, md5=_md5(found.tag, answer.headers))

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(limit)}
        if after:
            query["continuation-token"] = after
        root = self._listed(query, "bucket")
        with parsing(f"the bucket {self.name}"):
            found = [_read_entry(each) for each in root.iter() if _tag(each) == "Contents"]
        more = _text(root, "IsTruncated") == "true"
        return found, _text(root, "NextContinuationToken") if more else ""

    def begin(self, key: str) -> str:
        answer = check(self._ask("POST", key, {"uploads": ""}, b""), self._say(key))
        upload = _text(self._parse(answer, self._say(key)), "UploadId")
        if not upload:
            raise ObjectTryAgain(f"{self._say(key)}: no upload was started")
        return upload

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        answer = self._ask(
            "POST", key, {"uploadId": upload}, body, {"Content-Type": "application/xml"}
        )
        if answer.status == 404 and self.head(key) is not None:
            return  # an earlier request has completed the upload, but its answer was lost
        check(answer, self._say(key))
        if b"<Error>" in answer.body:  # S3 may report an error in an answer with status 200
            raise ObjectTryAgain(f"{self._say(key)}: the parts could not be combined")

    def abort(self, key: str, upload: str) -> None:
        self._drop(key, {"uploadId": upload})

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        query = {"uploadId": upload, "partNumber": str(part)} if upload else {}
        return SignedRequest(method="PUT", url=self._sign("PUT", key, query, expires_s))

    def region(self) -> str:
        """Return the bucket's region in lower case, as its storage reports it. Raises ObjectError.

        Amazon reports the region in a header of each response, including refusals; Google reports
        it as the bucket's location:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html and
        https://cloud.google.com/storage/docs/xml-api/get-bucket-location
        """
        if isinstance(self._signer, AmazonKey):
            answer = ask("HEAD", self._roots[0] + "/", targets=self.targets)
            if region := answer.headers.get("x-amz-bucket-region", ""):
                return region.lower()
            if answer.status == 404:
                raise ObjectMissing(f"the bucket {self.name} does not exist")
            raise ObjectDenied(f"the storage does not report the region of the bucket {self.name}")
        root = self._listed({"location": ""}, "bucket")
        if not (found := _text(root, "LocationConstraint") or (root.text or "").strip()):
            raise ObjectDenied(f"the storage does not report the region of the bucket {self.name}")
        return found.lower()

    def find_region(self) -> None:
        """Request the bucket's region, and use this region for signatures. Amazon S3 refuses
        signatures for any region except the bucket's region."""
        if self._fixed or not isinstance(self._signer, AmazonKey):
            return
        answer = ask("HEAD", self._roots[0] + "/", targets=self.targets)
        region = answer.headers.get("x-amz-bucket-region", "")
        if answer.status == 404:
            raise ObjectMissing(f"the bucket {self.name} does not exist")
        if region and region != self._signer.region:
            self._signer = replace(self._signer, region=region)
        if region:
            host = f"s3.{region}.amazonaws.com"
            self._roots = (
                (f"https://{self.name}.{host}",)
                if self._in_host
                else (f"https://{host}/{self.name}",)
            )
        self._fixed = True

    def _sign(self, method: str, key: str, query: Mapping[str, str], expires_s: int) -> str:
        self.find_region()
        return self._signer.sign(
            method, f"{self._roots[0]}/{quote_key(key)}", query, self._now(), expires_s
        )


def _read_entry(entry: Xml.Element) -> ObjectInfo:
    tag = _text(entry, "ETag")
    size, changed = _text(entry, "Size"), _text(entry, "LastModified")
    return ObjectInfo(
        key=_text(entry, "Key"),
        size=int(size) if size.isdigit() else None,
        tag=tag,
        md5=_md5(tag, {}),
        changed_at=datetime.fromisoformat(changed) if changed else None,
    )


def _md5(tag: str, headers: Mapping[str, str]) -> str:
    """Return the MD5 of an object, or "" if it is not known. The ETag is the MD5 if the object was
    uploaded in one piece and not encrypted with a separate key.
    """
    plain = tag.strip('"')
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    is_md5 = len(plain) == 32 and all(each in "0123456789abcdef" for each in plain)
    return plain if is_md5 and not encrypted else ""


def _tag(element: Xml.Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(parent: Xml.Element, name: str) -> str:
    return next((each.text or "" for each in parent.iter() if _tag(each) == name), "")
