"""Signatures of images, read from what the real cosign 2.5.0 wrote, and from keys made here."""

import base64
import json
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.planner.unit.test_policies import CPU
from tests.system.image_registry import read_recording

from cavvy.api.images.registry import parse_image
from cavvy.api.images.signatures import (
    PublicKey,
    SignedStatement,
    SignerKeyUnusable,
    list_signers,
    read_bundle,
    read_key,
    read_simple,
)
from cavvy.domain.policies import BoundPolicy, ProjectPolicy, name_key
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.objections import explain_policy, explain_signatures

RECORDED = read_recording()
DIGEST, KEY = RECORDED["digest"], RECORDED["key"]
OTHER = f"sha256:{'0' * 64}"


def pem(key: PublicKey) -> str:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def recorded_simple() -> tuple[bytes, str]:
    manifest = json.loads(RECORDED["manifests"][f"{DIGEST.replace(':', '-')}.sig"])
    (layer,) = manifest["layers"]
    signature = layer["annotations"]["dev.cosignproject.cosign/signature"]
    return base64.b64decode(RECORDED["blobs"][layer["digest"]]), signature


def recorded_bundle(predicate: str) -> bytes:
    for text in RECORDED["manifests"].values():
        manifest = json.loads(text)
        annotations = manifest.get("annotations", {})
        if annotations.get("dev.sigstore.bundle.predicateType") == predicate:
            return base64.b64decode(RECORDED["blobs"][manifest["layers"][0]["digest"]])
    raise AssertionError(predicate)


def signers(statement: SignedStatement | None, *keys: str) -> list[str]:
    assert statement is not None
    return list(list_signers([statement], keys))


def test_what_cosign_signed_is_verified_with_its_key_only() -> None:
    stranger = pem(ec.generate_private_key(ec.SECP256R1()).public_key())
    payload, signature = recorded_simple()
    statement = read_simple(payload, signature, DIGEST)
    assert signers(statement, stranger, KEY) == [KEY]
    assert signers(read_simple(payload, signature, OTHER), KEY) == [], "of another image"
    assert signers(read_simple(payload.replace(b"acme", b"evil"), signature, DIGEST), KEY) == []
    kind = payload.replace(b"cosign container image signature", b"something else")
    assert signers(read_simple(kind, signature, DIGEST), KEY) == []
    for broken in (None, "", "!"):
        found = read_simple(payload, broken, DIGEST)
        assert found is None or signers(found, KEY) == []
    assert read_simple(b"[]", signature, DIGEST) is None


def test_a_bundle_must_say_that_the_image_is_signed() -> None:
    bundle = recorded_bundle("https://sigstore.dev/cosign/sign/v1")
    assert signers(read_bundle(bundle, DIGEST)[0], KEY) == [KEY]
    assert signers(read_bundle(bundle, OTHER)[0], KEY) == []
    scan = recorded_bundle("https://example.com/scan")
    assert signers(read_bundle(scan, DIGEST)[0], KEY) == [], "the result of a scan is no signature"
    # the same statement with the other predicate is not what was signed
    envelope = json.loads(scan)["dsseEnvelope"]
    forged = base64.b64decode(envelope["payload"]).replace(
        b"https://example.com/scan", b"https://sigstore.dev/cosign/sign/v1"
    )
    envelope["payload"] = base64.b64encode(forged).decode()
    body = json.dumps({"dsseEnvelope": envelope}).encode()
    statement, has_key = read_bundle(body, DIGEST)
    assert signers(statement, KEY) == []
    assert not has_key  # it names a certificate, or nothing
    assert read_bundle(b"{}", DIGEST) == (None, True)


def sign_with_ed25519() -> tuple[str, Callable[[bytes], bytes]]:
    key = ed25519.Ed25519PrivateKey.generate()
    return pem(key.public_key()), key.sign


def sign_with_rsa() -> tuple[str, Callable[[bytes], bytes]]:
    key = rsa.generate_private_key(65537, 2048)
    return pem(key.public_key()), lambda data: key.sign(data, padding.PKCS1v15(), hashes.SHA256())


@pytest.mark.parametrize("make", [sign_with_ed25519, sign_with_rsa])
def test_keys_of_other_kinds(make: Callable[[], tuple[str, Callable[[bytes], bytes]]]) -> None:
    key, sign = make()
    assert read_key(key) == key
    payload, _ = recorded_simple()
    statement = read_simple(payload, base64.b64encode(sign(payload)).decode(), DIGEST)
    assert signers(statement, KEY, key) == [key]


def test_keys_that_cannot_verify_are_refused() -> None:
    weak = [ec.generate_private_key(ec.SECP521R1()), rsa.generate_private_key(65537, 1024)]
    for text in (
        "",
        "ssh-ed25519 AAAA",
        "https://issuer.example",
        *(pem(k.public_key()) for k in weak),
    ):
        with pytest.raises(SignerKeyUnusable):
            read_key(text)


@pytest.mark.parametrize(
    ("image", "registry", "repository", "reference", "pinned"),
    [
        ("python", "docker.io", "library/python", "latest", "python@"),
        ("python:3.12", "docker.io", "library/python", "3.12", "python@"),
        ("h:5000/a/b", "h:5000", "a/b", "latest", "h:5000/a/b@"),
        ("h:5000/a/b:1@" + DIGEST, "h:5000", "a/b", DIGEST, "h:5000/a/b@"),
    ],
)
def test_names_of_images(
    image: str, registry: str, repository: str, reference: str, pinned: str
) -> None:
    name = parse_image(image)
    assert (name.registry, name.repository, name.reference) == (registry, repository, reference)
    assert name.digest == (reference if "sha256" in reference else None)
    assert name.at(DIGEST) == pinned + DIGEST


def test_each_policy_needs_a_verified_signature_of_the_pinned_image() -> None:
    other = pem(ed25519.Ed25519PrivateKey.generate().public_key())
    above = BoundPolicy("company", ProjectPolicy(signed_by=(KEY, other)))
    own = BoundPolicy("vision", ProjectPolicy(signed_by=(other,)))
    task = TaskSpec(name="t", run="true", image=f"h/a@{DIGEST}", image_signers=(name_key(KEY),))
    assert explain_signatures([above], task) is None
    refusal = explain_signatures([above, own], task)
    assert refusal is not None
    assert f"project vision permits only images that are signed with the key {name_key(other)}" in (
        refusal.reason
    )
    assert explain_policy([above, own], task, CPU) == refusal, "also when a place is chosen"
    assert explain_signatures([above], replace(task, image="h/a:1")) is not None, "not pinned"
    assert explain_signatures([above], replace(task, image=None)) is None
