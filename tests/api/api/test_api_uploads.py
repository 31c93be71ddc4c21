"""Uploads in parts that their agents never finish: the server aborts them when the attempt ends."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.api.api.test_api_agents import JOB, claim, report, start
from tests.api.api_state import Api, open_api, until
from tests.system.storages import GoogleStandIn, start_google

from cavvy.control.agents import bucket_checkpoints, transfers, uploads
from cavvy.control.garbage_collector import SWEEP
from cavvy.domain.gangs import ProviderDocument
from cavvy.store.base import StoreUnusable
from cavvy.store.objects.base import ObjectDenied, ObjectTryAgain
from cavvy.store.objects.locations import open_place
from cavvy.store.objects.s3 import XmlBucket

TASK = """
name: t
run: 'true'
outputs: [{source: out, target: 'gs://data/out/'}]
checkpoint: {path: state, storage: 'gs://data/kept'}
retry: {node: 0, exit: 0}
"""
LARGE = 40 << 20
OUTPUT = ("outputs/0", {"path": "large"})
CHECKPOINT = (f"checkpoint/{'a' * 64}", dict[str, str]())


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """A server with a bucket, which all tasks can use."""
    keys = start_google()
    for module in (transfers, bucket_checkpoints, uploads):
        monkeypatch.setattr(
            module, "open_place", lambda url, given, now: open_place(url, keys, now)
        )
    async with open_api("sqlite", tmp_path) as opened:
        yield opened


async def ask(api: Api, gang: str, route: str, body: dict[str, Any]) -> Any:
    answer = await api.http.post(
        f"/agent/v1/data/{route}",
        params={"gang": gang, "rank": 0},
        json=body,
        headers=api.agent(gang),
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def begin_uploads(api: Api) -> tuple[str, str]:
    """A running job that has begun to upload an output and a file of a checkpoint; its gang and the
    upload of its output.
    """
    gang = await start(api, TASK)
    assert (await claim(api, gang)).status_code == 200
    assert (await report(api, gang, {"seq": 1, "kind": "running"})).json()["ack"] == 1
    made = [
        await ask(api, gang, where, {"size": LARGE, **path}) for where, path in (OUTPUT, CHECKPOINT)
    ]
    assert set(GoogleStandIn.uploads) == {each["upload"] for each in made}
    assert len(GoogleStandIn.uploads) == 2
    return gang, str(made[0]["upload"])


async def list_found(api: Api, *, remove: bool = False) -> list[dict[str, Any]]:
    answer = await api.http.post("/v1/gc", json={"dry_run": not remove})
    return [each for each in answer.json()["found"] if each["kind"] == "upload"]


async def end(api: Api, gang: str) -> None:
    """End the work, whose agent aborts nothing."""
    ended = {"seq": 2, "kind": "exited", "outcome": "exit", "exit_code": 3, "log_bytes": 0}
    assert (await report(api, gang, ended)).json()["ack"] == 2

    async def is_over() -> bool:
        return bool((await api.http.get(JOB)).json()["attempts"][0]["phase"] == "ended")

    await until(is_over)


async def test_uploads_are_aborted_when_their_attempt_ends(api: Api) -> None:
    gang, _ = await begin_uploads(api)
    assert await list_found(api, remove=True) == []  # their attempt is running
    assert len(GoogleStandIn.uploads) == 2
    await end(api, gang)

    async def are_aborted() -> bool:
        return not GoogleStandIn.uploads

    await until(are_aborted)

    async def is_empty() -> bool:
        return not await list_found(api)

    await until(is_empty)


async def test_a_refused_abort_is_listed_and_tried_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bucket: XmlBucket, key: str, upload: str) -> None:
        raise ObjectDenied("the bucket data: status 403")

    gang, _ = await begin_uploads(api)
    with monkeypatch.context() as patched:
        patched.setattr(XmlBucket, "abort", refuse)
        await end(api, gang)
        found = await list_found(api, remove=True)
        assert [(each["where"], each["done"]) for each in found] == [("gs://data", False)] * 2
        assert "out/large" in [each["name"] for each in found]
        assert all("not aborted: the bucket data: status 403" in each["why"] for each in found)
    assert [each["done"] for each in await list_found(api)] == [False, False]
    assert len(GoogleStandIn.uploads) == 2
    assert [each["done"] for each in await list_found(api, remove=True)] == [True, True]
    assert GoogleStandIn.uploads == {}
    assert await list_found(api) == []


async def test_a_secret_that_cannot_be_read_holds_up_no_other_abort(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, data = api.app_state.control_plane.uploads, api.app_state.control_plane.data
    secrets = data._open_secrets

    async def fail_once(project: str, names: Sequence[str]) -> dict[str, str]:
        monkeypatch.setattr(data, "_open_secrets", secrets)
        raise StoreUnusable("the secret GS_KEY cannot be read")

    # Only the requests of this test abort uploads.
    monkeypatch.setattr(control, "is_recorded", lambda attempt: False)
    gang, _ = await begin_uploads(api)
    await end(api, gang)
    monkeypatch.setattr(data, "_open_secrets", fail_once)
    found = await list_found(api, remove=True)
    assert sorted(each["done"] for each in found) == [False, True]
    [left] = [each["why"] for each in found if not each["done"]]
    assert "not aborted: the secret GS_KEY cannot be read" in left
    assert [each["done"] for each in await list_found(api, remove=True)] == [True]


async def test_a_silent_storage_is_asked_once_and_delays_no_removal_of_gangs(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def wait_in_vain(bucket: XmlBucket, key: str, upload: str) -> None:
        asked.append(key)
        raise ObjectTryAgain("the storage did not answer")

    control = api.app_state.control_plane
    # Only the requests of this test abort uploads.
    monkeypatch.setattr(control.uploads, "is_recorded", lambda attempt: False)
    gang, _ = await begin_uploads(api)
    await end(api, gang)
    with monkeypatch.context() as patched:
        patched.setattr(XmlBucket, "abort", wait_in_vain)
        await control.garbage_collector.reconcile(SWEEP)
        assert asked == []
        found = await list_found(api, remove=True)
        assert len(asked) == 1
        assert all("not aborted: the storage did not answer" in each["why"] for each in found)
    await control.reconcile(SWEEP)  # starts the next try

    async def are_aborted() -> bool:
        return not GoogleStandIn.uploads and not await list_found(api)

    await until(are_aborted)


async def test_a_record_that_cannot_be_read_is_listed_and_holds_up_no_other_abort(
    api: Api,
) -> None:
    gang, _ = await begin_uploads(api)
    damaged = ProviderDocument(collection="uploads", name="0damaged", body='{"url": 5}')
    assert await api.app_state.store.swap_provider_document("data transfers", damaged)
    await end(api, gang)
    found = await list_found(api, remove=True)
    [unread] = [each for each in found if each["name"] == "unknown"]
    assert "cannot read its record 0damaged" in unread["why"]

    async def are_aborted() -> bool:
        return not GoogleStandIn.uploads

    await until(are_aborted)


async def test_an_upload_in_one_request_writes_no_record(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []

    async def write(*given: object, **options: object) -> None:
        written.append(given)

    gang, _ = await begin_uploads(api)
    monkeypatch.setattr(api.app_state.control_plane.uploads._store, "swap_provider_document", write)
    await ask(api, gang, OUTPUT[0], {"path": "small", "size": 1})
    GoogleStandIn.objects["data/out/small"] = b"x"
    body = {"upload": "", "path": "small", "size": 1, "tags": []}
    await ask(api, gang, "outputs/0/complete", body)
    assert written == []
    GoogleStandIn.uploads.clear()


async def test_finished_uploads_are_not_listed(api: Api) -> None:
    gang, upload = await begin_uploads(api)
    GoogleStandIn.uploads[upload][1] = b"x" * LARGE
    body = {"upload": upload, "path": "large", "size": LARGE, "tags": ["-"]}
    await ask(api, gang, "outputs/0/complete", body)
    (left,) = GoogleStandIn.uploads
    await ask(api, gang, f"{CHECKPOINT[0]}/abort", {"upload": left})
    assert GoogleStandIn.uploads == {}
    store = api.app_state.store
    assert await store.provider_documents("data transfers", "uploads") == []
