"""A policy that asks for signed images, against a real registry with what the real cosign wrote."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.api.api_state import Api, open_api
from tests.system.image_registry import LOGIN, push, read_recording, start_registry

from cavvy.domain.policies import name_key

pytestmark = pytest.mark.system
RECORDED = read_recording()
DIGEST, KEY = RECORDED["digest"], RECORDED["key"]
POLICY = "/v1/projects/default/policy"


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """An API whose machine has a container engine, as far as placing a job looks for one."""
    engine = tmp_path / "bin" / "podman"
    engine.parent.mkdir()
    engine.touch(0o755)
    monkeypatch.setenv("PATH", str(engine.parent), prepend=":")
    values = {"CAVVY_PROVIDERS_LOCAL_ENABLED": "true"}
    async with open_api("memory", tmp_path, values=values) as opened:
        secret = {"value": LOGIN}
        answer = await opened.http.put("/v1/projects/default/secrets/PULL", json=secret)
        assert answer.status_code in (200, 204), answer.text
        yield opened


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registry with a signed image, one whose signatures lie below one tag, and a bare one."""
    host = start_registry(tmp_path_factory.getbasetemp() / "images")
    push(host, "acme/train", RECORDED)
    tag = DIGEST.replace(":", "-")
    tagged = {n: t for n, t in RECORDED["manifests"].items() if n in ("1", f"{tag}.sig")}
    push(host, "acme/tagged", {**RECORDED, "manifests": tagged})
    bundles = {n: t for n, t in RECORDED["manifests"].items() if n != f"{tag}.sig"}
    push(host, "acme/bundles", {**RECORDED, "manifests": bundles})
    push(host, "acme/bare", {**RECORDED, "manifests": {"1": tagged["1"]}})
    return host


def task(image: str) -> str:
    """A task that is stored but does not run, because its day is far."""
    named = {"name": image, "login": "PULL"}
    return json.dumps({"name": "t", "run": "true", "image": named, "schedule": "0 0 29 2 *"})


async def put(api: Api, *keys: str, **rules: object) -> None:
    answer = await api.http.put(POLICY, json={"signed_by": list(keys), **rules})
    assert answer.status_code == 204, answer.text


@pytest.mark.parametrize("repository", ["train", "tagged", "bundles"])
@pytest.mark.parametrize("reference", [":1", f"@{DIGEST}"])
async def test_a_signed_image_runs_as_the_digest_that_was_verified(
    api: Api, registry: str, repository: str, reference: str
) -> None:
    await put(api, KEY)
    image = f"{registry}/acme/{repository}"
    job = await api.submit(task(image + reference))
    stored = (await api.app_state.store.job(job["id"])).task
    assert stored.image == f"{image}@{DIGEST}", "a tag that moves later changes nothing"
    assert stored.image_signers == (name_key(KEY),)


async def test_replicas_of_a_service_run_the_verified_digest(api: Api, registry: str) -> None:
    rows = pytest.importorskip("cavvy.capabilities.serving.service_rows")
    await put(api, KEY)
    image = {"name": f"{registry}/acme/train:1", "login": "PULL"}
    service = {"port": 8000, "replicas": {"min": 0, "max": 1}}
    text = json.dumps({"name": "s", "run": "true", "image": image, "service": service})
    answer = await api.http.put("/v1/projects/default/services/s", json={"text": text})
    assert answer.status_code == 200, answer.text
    (stored,) = await rows.services_of(api.app_state.store).list(["default"])
    assert stored.task.image == f"{registry}/acme/train@{DIGEST}"
    assert stored.task.image_signers == (name_key(KEY),)


async def test_what_is_not_signed_is_refused_and_audited(api: Api, registry: str) -> None:
    stranger = ed25519.Ed25519PrivateKey.generate().public_key()
    other = stranger.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    login = task(f"{registry}/acme/train:1").replace("PULL", "OTHER")
    await api.http.put("/v1/projects/default/secrets/OTHER", json={"value": "puller:wrong"})
    for keys, text, reason in (
        ([KEY], task(f"{registry}/acme/bare:1"), f"signed with the key {name_key(KEY)}"),
        ([other], task(f"{registry}/acme/train:1"), f"signed with the key {name_key(other)}"),
        ([KEY], task(f"{registry}/acme/none:1"), "has no such image"),
        ([KEY], login, "does not permit access to"),
        ([KEY], task("127.0.0.1:9/a:1"), "does not answer"),
        ([KEY], task("169.254.169.254/a:1"), "link-local or metadata address"),
        (
            [KEY],
            '{name: t, run: "true", workdir: ., image: {build: .}}',
            "no images that a node builds",
        ),
    ):
        await put(api, *keys)
        answer = await api.post_job(text)
        assert (answer.status_code, answer.json()["code"]) == (403, "policy-refused"), answer.text
        assert reason in answer.json()["message"], answer.text
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    assert [each["outcome"] for each in log].count("refused") == 7
    await put(api, KEY, images=["ghcr.io/acme/*"])
    answer = await api.post_job(task(f"{registry}/acme/train:1"))
    assert "permits only the images" in answer.json()["message"], "the registry was not called"


async def test_keyless_signatures_are_told_apart(api: Api, registry: str) -> None:
    manifests = dict(RECORDED["manifests"])
    name = f"{DIGEST.replace(':', '-')}.sig"
    found = json.loads(manifests[name])
    found["layers"][0]["annotations"] = {
        "dev.cosignproject.cosign/signature": base64.b64encode(
            b"of a key that lived an hour"
        ).decode(),
        "dev.sigstore.cosign/certificate": "-----BEGIN CERTIFICATE-----",
    }
    manifests = {"1": manifests["1"], name: json.dumps(found)}
    push(registry, "acme/keyless", {**RECORDED, "manifests": manifests})
    await put(api, KEY)
    answer = await api.post_job(task(f"{registry}/acme/keyless:1"))
    assert "keyless signatures" in answer.json()["message"]
    assert "sign the image with a key" in answer.json()["message"]


async def test_no_task_file_can_claim_a_signature(api: Api) -> None:
    text = '{name: t, run: "true", image: "h/a:1", image_signers: ["SHA256:x"]}'
    assert (await api.post_job(text)).status_code == 422


async def test_a_wrong_key_is_refused(api: Api) -> None:
    answer = await api.http.put(POLICY, json={"signed_by": ["https://issuer.example"]})
    assert answer.status_code == 422
    assert "keyless" in answer.json()["hint"]
