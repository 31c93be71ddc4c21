"""Verifies signatures of images in the formats of cosign, with public keys.

Cosign's SIGNATURE_SPEC.md defines a "simple signing" payload with its signature. Cosign's
BUNDLE_SPEC.md defines a Sigstore bundle with an in-toto statement in a DSSE envelope. Certificates
and entries of transparency logs only prove who owns a key. The module ignores them, because the
owners of the keys in a policy are already known.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from cavvy.api.images.registry import ImageRepository, OciDescriptor, OciManifest
from cavvy.domain.values import Struct

SIMPLE_SIGNING = "application/vnd.dev.cosign.simplesigning.v1+json"
_BUNDLE = "application/vnd.dev.sigstore.bundle"  # the media types of all versions begin with this
_SIGNATURE = "dev.cosignproject.cosign/signature"
_CERTIFICATE = "dev.sigstore.cosign/certificate"
_SIMPLE_TYPE = "cosign container image signature"
_IN_TOTO = "application/vnd.in-toto+json"
_STATEMENTS = ("https://in-toto.io/Statement/v1", "https://in-toto.io/Statement/v0.1")
# Other statements, such as the result of a scan, are not signatures of the image.
_SIGN_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
_LEAST_RSA_BITS = 2048

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


class SignerKeyUnusable(Exception):
    """Raised if the text is not a public key that can verify images. The message says why the key
    is unusable.
    """


class SignedStatement(Struct, frozen=True, kw_only=True):
    """A signed statement: the bytes, and the signatures of these bytes. `names_image` is true if
    the bytes name a signed image.
    """

    signed: bytes
    signatures: tuple[bytes, ...]
    names_image: bool


class SignaturesFound(Struct, frozen=True, kw_only=True):
    """The statements about an image. `keyless` is True if a statement is signed with a certificate
    instead of a key."""

    statements: tuple[SignedStatement, ...] = ()
    keyless: bool = False


class _SimpleImage(Struct, frozen=True):
    digest: str = msgspec.field(name="docker-manifest-digest")


class _SimpleCritical(Struct, frozen=True):
    image: _SimpleImage
    type: str


class _SimplePayload(Struct, frozen=True):
    critical: _SimpleCritical


class _Subject(Struct, frozen=True):
    digest: dict[str, str]


class _Statement(Struct, frozen=True):
    kind: str = msgspec.field(name="_type")
    predicate_type: str = msgspec.field(name="predicateType")
    subject: tuple[_Subject, ...]


class _EnvelopeSignature(Struct, frozen=True):
    sig: str


class _Envelope(Struct, frozen=True):
    payload: str
    payload_type: str = msgspec.field(name="payloadType")
    signatures: tuple[_EnvelopeSignature, ...]


class _Material(Struct, frozen=True, kw_only=True):
    public_key: dict[str, str] | None = msgspec.field(name="publicKey", default=None)


class _Bundle(Struct, frozen=True, kw_only=True):
    envelope: _Envelope = msgspec.field(name="dsseEnvelope")
    material: _Material = msgspec.field(name="verificationMaterial", default=_Material())


def read_key(pem: str) -> str:
    """Return the public key in PEM form. Raises SignerKeyUnusable."""
    key = _load(pem)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form).decode()


def find_signatures(repository: ImageRepository, digest: str) -> SignaturesFound:
    """Return the statements about an image: from the manifest with cosign's tag, and from the
    manifests that refer to the image. Raises RegistrySilent.
    """
    tagged = repository.read_manifest(f"{digest.replace(':', '-')}.sig")
    manifests = [] if tagged is None else [tagged]
    for each in repository.list_referrers(digest):
        found = repository.read_manifest(each.digest)
        manifests += [] if found is None else [found]
    layers = [each for manifest in manifests for each in _list_signing(manifest)]
    unique = {(each.digest, str(each.annotations)): each for each in layers}
    statements, keyless = [], False
    for each in unique.values():
        body = repository.read_blob(each.digest)
        if each.media_type == SIMPLE_SIGNING:
            keyless |= _CERTIFICATE in (each.annotations or {})
            statements.append(read_simple(body, (each.annotations or {}).get(_SIGNATURE), digest))
        else:
            statement, has_key = read_bundle(body, digest)
            keyless |= not has_key
            statements.append(statement)
    return SignaturesFound(
        statements=tuple(each for each in statements if each is not None), keyless=keyless
    )


def read_simple(payload: bytes, signature: str | None, digest: str) -> SignedStatement | None:
    """Return a statement of the format "simple signing", or None if it is unreadable."""
    try:
        found = msgspec.json.decode(payload, type=_SimplePayload).critical
        signed = base64.b64decode(signature or "", validate=True)
    except (msgspec.MsgspecError, binascii.Error):
        return None
    names_image = found.type == _SIMPLE_TYPE and found.image.digest == digest
    return SignedStatement(signed=payload, signatures=(signed,), names_image=names_image)


def read_bundle(bundle: bytes, digest: str) -> tuple[SignedStatement | None, bool]:
    """Return the statement of a Sigstore bundle, and whether the bundle is signed with a key rather
    than with a certificate. The statement is None if it is unreadable.
    """
    try:
        found = msgspec.json.decode(bundle, type=_Bundle)
        payload = base64.b64decode(found.envelope.payload, validate=True)
        signatures = [
            base64.b64decode(each.sig, validate=True) for each in found.envelope.signatures
        ]
        statement = msgspec.json.decode(payload, type=_Statement)
    except (msgspec.MsgspecError, binascii.Error):
        return None, True
    kind = found.envelope.payload_type
    algorithm, _, value = digest.partition(":")
    names_image = (
        kind == _IN_TOTO
        and statement.kind in _STATEMENTS
        and statement.predicate_type == _SIGN_PREDICATE
        and any(each.digest.get(algorithm) == value for each in statement.subject)
    )
    # the bytes that a DSSE envelope signs: github.com/secure-systems-lab/dsse, protocol.md
    signed = b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)
    read = SignedStatement(signed=signed, signatures=tuple(signatures), names_image=names_image)
    return read, found.material.public_key is not None


def list_signers(statements: Sequence[SignedStatement], keys: Sequence[str]) -> Sequence[str]:
    """Return the keys in `keys` that signed a statement about the image."""
    return [key for key in keys if any(_is_signed(_load(key), each) for each in statements)]


def _list_signing(manifest: OciManifest) -> Iterator[OciDescriptor]:
    for each in manifest.layers:
        if each.media_type == SIMPLE_SIGNING or each.media_type.startswith(_BUNDLE):
            yield each


def _load(pem: str) -> PublicKey:
    """Raises SignerKeyUnusable."""
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignerKeyUnusable(
            "the text is not a public key in PEM form (`-----BEGIN PUBLIC KEY`)"
        ) from error
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= _LEAST_RSA_BITS:
        return key
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    raise SignerKeyUnusable(
        "only keys of the kinds ECDSA P-256, Ed25519, and RSA with at least "
        f"{_LEAST_RSA_BITS} bits are supported"
    )


def _is_signed(key: PublicKey, statement: SignedStatement) -> bool:
    return statement.names_image and any(
        _verify(key, each, statement.signed) for each in statement.signatures
    )


def _verify(key: PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        match key:
            case ec.EllipticCurvePublicKey():
                key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
            case rsa.RSAPublicKey():
                key.verify(signature, signed, padding.PKCS1v15(), hashes.SHA256())
            case ed25519.Ed25519PublicKey():
                key.verify(signature, signed)
    except InvalidSignature:
        return False
    return True
