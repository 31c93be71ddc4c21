"""The registry of models by itself: no test here needs devices."""

from hashlib import sha256

import pytest
from tests.api.api_state import Api

from cavvy.capabilities.models.keeper import ModelKeeper
from cavvy.control.own_reconcilers import OwnReconcilers
from cavvy.spec.workdir import FolderEntry, encode_manifest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")


async def test_versions_are_published_signed_and_labelled_without_devices(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = api.app_state.control_plane
    keeper = control.find(ModelKeeper)
    assert keeper is not None
    own = OwnReconcilers(control._clock, [("models", keeper)])
    monkeypatch.setattr(control, "own", own)
    blobs, project = api.app_state.blobs.of("default"), "/v1/projects/default"
    for number in (1, 2):
        weights = bytes([number]) * 5000
        name = sha256(weights).hexdigest()
        manifest = encode_manifest([FolderEntry(path="m.onnx", size=5000, sha256=name)])
        snapshot = sha256(manifest).hexdigest()
        blobs.put(name, [weights])
        blobs.put(snapshot, [manifest])
        made = await api.http.post(f"{project}/models", json={"name": "m", "snapshot": snapshot})
        assert made.status_code == 201, made.text
        assert (made.json()["name"], made.json()["signed"]) == (f"m@{number}", True)
    moved = await api.http.put(f"{project}/models/m/labels/production", json={"number": 1})
    assert moved.json() == {"name": "m@1", "former": ""}
    listed = {each["name"]: each for each in (await api.http.get("/v1/models")).json()}
    assert {name: each["labels"] for name, each in listed.items()} == {
        "m@1": ["production"],
        "m@2": [],
    }
    assert [each["deltas"] for each in listed["m@2"]["files"]] == [{}], "no devices fetch them"
    keys = (await api.http.post(f"{project}/edge/keys")).json()["keys"]
    assert {"root", "targets", "snapshot", "timestamp"} <= keys.keys()
    taken = await api.http.delete(f"{project}/models/m/labels/production")
    assert taken.json()["former"] == "m@1"
