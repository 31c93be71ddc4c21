"""A server without the capability that knows devices at the edge."""

import pytest
from tests.api.api_state import Api, until

from cavvy.control.clock import WallClock
from cavvy.control.own_reconcilers import OwnReconcilers
from cavvy.control.parts import NO_DEVICES
from cavvy.server.open_state import make_tidy

COLLECTS = "{name: s, edge: {collect: m, samples: 1, into: s.jsonl}}"


def take_out(api: Api, patch: pytest.MonkeyPatch) -> None:
    """Leave all capabilities' reconcilers out, as if their folders were deleted."""
    patch.setattr(api.app_state.control_plane, "own", OwnReconcilers(WallClock()))


async def test_what_needs_devices_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(api, monkeypatch)
    step = await api.post_job(COLLECTS)
    text = "{name: c, run: x, service: {port: 80, edge: {site: lyon, model: m}}}"
    service = await api.http.put("/v1/projects/default/services/c", json={"text": text})
    for answer, field in ((step, "edge"), (service, "service.edge")):
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task"), answer.text
        assert answer.json()["message"] == f"`{field}`: {NO_DEVICES}"
    secret = "/v1/projects/default/secrets/KEY"
    assert (await api.http.put(secret, json={"value": "a value"})).is_success
    assert (await api.http.delete(secret)).is_success


async def test_a_stored_step_waits_and_says_why(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    if api.app_state.control_plane.devices is None:
        pytest.skip("no capability that takes the step in is installed")
    job = await api.submit(COLLECTS)
    take_out(api, monkeypatch)

    async def look() -> str | None:
        api.app_state.control_plane.hint(job["id"])
        found = await api.app_state.store.job(job["id"])
        return found.phase if found.reason == NO_DEVICES else None

    assert await until(look) == "queued"


async def test_no_files_are_removed_while_tables_are_left_out(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tables may name them."""
    swept: list[str] = []

    class Blobs:
        def sweep(self, snapshots: object, **_: object) -> int:
            swept.append("swept")
            return 0

    left_out = ["edge"]

    async def list_left_out() -> list[str]:
        return left_out

    store, now = api.app_state.store, api.app_state.now()
    monkeypatch.setattr(store, "list_left_out", list_left_out)
    await make_tidy(store, Blobs())(now)  # type: ignore[arg-type]
    assert swept == []
    left_out.clear()
    await make_tidy(store, Blobs())(now)  # type: ignore[arg-type]
    assert swept == ["swept"]
