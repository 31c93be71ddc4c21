"""Deployed apps over HTTP."""

from typing import Any

import pytest
from tests.api.api.test_api_accounts import add, call, code
from tests.api.api_state import Api

BASE = "/v1/projects/team/apps"
PART: dict[str, Any] = {
    "text": "{name: embed, run: 'true'}",
    "origin": {},
    "snapshot": "",
    "meet": "/tmp/x.sock:key",
    "functions": [{"name": "square"}, {"name": "count", "generator": True}],
}
ASK = {"revision": "r1", "parts": [PART]}


async def test_an_app_is_deployed_read_and_removed(api: Api) -> None:
    assert code(await api.http.get(f"{BASE}/embed")) == (404, "app-not-found")
    assert (await api.http.put(f"{BASE}/embed", json=ASK)).json() == {"replaced": []}
    found = (await api.http.get(f"{BASE}/embed")).json()
    (part,) = found["parts"]
    assert (found["name"], part["revision"], part["job"]) == ("embed", "r1", "")
    sent = ("text", "origin", "snapshot", "meet")
    assert {name: part[name] for name in sent} == {name: PART[name] for name in sent}
    assert [each["generator"] for each in part["functions"]] == [False, True]
    assert [each["name"] for each in (await api.http.get(BASE)).json()] == ["embed"]
    assert (await api.http.get("/v1/projects/other/apps")).json() == []
    assert (await api.http.delete(f"{BASE}/embed")).status_code == 204
    assert code(await api.http.delete(f"{BASE}/embed")) == (404, "app-not-found")


async def test_all_who_ask_for_the_next_job_get_the_same(api: Api) -> None:
    await api.http.put(f"{BASE}/embed", json=ASK)
    ask = {"part": 0, "revision": "r1", "ended": ""}
    first = (await api.http.post(f"{BASE}/embed/claim", json=ask)).json()["job"]
    assert first
    assert (await api.http.post(f"{BASE}/embed/claim", json=ask)).json()["job"] == first
    second = await api.http.post(f"{BASE}/embed/claim", json={**ask, "ended": first})
    assert second.json()["job"] not in ("", first)
    for wrong, name in ((1, "embed"), (0, "other")):
        answer = await api.http.post(f"{BASE}/{name}/claim", json={**ask, "part": wrong})
        assert code(answer) == (404, "app-not-found")


async def test_a_new_revision_has_no_job(api: Api) -> None:
    await api.http.put(f"{BASE}/embed", json=ASK)
    await api.http.post(f"{BASE}/embed/claim", json={"part": 0, "revision": "r1", "ended": ""})
    await api.http.put(f"{BASE}/embed", json={"revision": "r2", "parts": [PART, PART]})
    parts = (await api.http.get(f"{BASE}/embed")).json()["parts"]
    assert [(each["revision"], each["job"]) for each in parts] == [("r2", "")] * 2
    assert code(await api.http.put(f"{BASE}/embed", json={"revision": "", "parts": []})) == (
        422,
        "invalid-request",
    )


async def test_a_caller_who_read_an_older_revision_gets_no_job(api: Api) -> None:
    """Else it would submit a job of the old code, which nothing stops."""
    await api.http.put(f"{BASE}/embed", json=ASK)
    ask = {"part": 0, "revision": "r1", "ended": ""}
    first = (await api.http.post(f"{BASE}/embed/claim", json=ask)).json()["job"]
    await api.http.put(f"{BASE}/embed", json={**ASK, "revision": "r2"})
    for ended in ("", first):
        late = await api.http.post(f"{BASE}/embed/claim", json={**ask, "ended": ended})
        assert code(late) == (409, "app-changed")
    new = await api.http.post(f"{BASE}/embed/claim", json={**ask, "revision": "r2", "ended": first})
    assert new.json()["job"] not in ("", first)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"snapshot": "bogus", "origin": {"snapshot": "bogus"}}, (422, "invalid-request")),
        ({"snapshot": "bogus"}, (422, "invalid-request")),
        ({"snapshot": "a" * 64, "origin": {"snapshot": "a" * 64}}, (409, "snapshot-missing")),
        ({"text": "{name: embed, run: 'true', pool: theirs}"}, (422, "invalid-task")),
        (
            {"text": "{name: embed, run: 'true', schedule: {cron: '0 3 * * *'}}"},
            (422, "invalid-task"),
        ),
        ({"text": "{name: embed, run: 'true', service: {port: 80}}"}, (422, "invalid-task")),
        ({"text": "{name: embed, edge: {deploy: m, site: lab}}"}, (422, "invalid-task")),
        ({"text": "{name: embed, runs: 'true'}"}, (422, "invalid-task")),
    ],
)
async def test_only_plain_jobs_are_deployed(
    changed: dict[str, Any], expected: tuple[int, str], api: Api
) -> None:
    """Others submit the text, with rights that the one who deploys may not have."""
    ask = {"revision": "r1", "parts": [{**PART, **changed}]}
    assert code(await api.http.put(f"{BASE}/embed", json=ask)) == expected
    assert code(await api.http.get(f"{BASE}/embed")) == (404, "app-not-found")


async def test_a_consent_is_of_the_account_that_gave_it(api: Api) -> None:
    ada, bob = [await add(api, name, ("team", "member")) for name in ("ada", "bob")]
    ask = {"revision": "r1", "parts": [{**PART, "consent": True}]}
    path = "/projects/team/apps/embed"
    assert (await call(api, ada, "PUT", path, ask)).status_code == 200
    for token, consent in ((ada, True), (bob, False)):
        (part,) = (await call(api, token, "GET", path)).json()["parts"]
        assert (part["user"], part["consent"]) == ("ada", consent)
    (part,) = (await api.http.get(f"{BASE}/embed")).json()["parts"]  # the owner of the server
    assert part["consent"] is False


async def test_a_viewer_learns_no_key_of_the_meeting_place(api: Api) -> None:
    await api.http.put(f"{BASE}/embed", json=ASK)
    for role, meet in (("member", PART["meet"]), ("viewer", "")):
        token = await add(api, role, ("team", role))
        (part,) = (await call(api, token, "GET", "/projects/team/apps/embed")).json()["parts"]
        assert part["meet"] == meet


async def test_who_deploys_learns_which_jobs_were_replaced(api: Api) -> None:
    """Also those that were claimed since the app was read."""
    await api.http.put(f"{BASE}/embed", json=ASK)
    ask = {"part": 0, "revision": "r1", "ended": ""}
    job = (await api.http.post(f"{BASE}/embed/claim", json=ask)).json()["job"]
    answer = await api.http.put(f"{BASE}/embed", json={**ASK, "revision": "r2"})
    assert answer.json() == {"replaced": [job]}
