"""Deployed apps over HTTP."""

from tests.api.api.test_api_accounts import code
from tests.api.api_state import Api

BASE = "/v1/projects/team/apps"
PART = {
    "text": "run: 'true'",
    "origin": {"snapshot": "a" * 64},
    "snapshot": "a" * 64,
    "meet": "/tmp/x.sock",
    "functions": [{"name": "square"}, {"name": "count", "generator": True}],
}
ASK = {"revision": "r1", "parts": [PART]}


async def test_an_app_is_deployed_read_and_removed(api: Api) -> None:
    assert code(await api.http.get(f"{BASE}/embed")) == (404, "app-not-found")
    assert (await api.http.put(f"{BASE}/embed", json=ASK)).status_code == 204
    found = (await api.http.get(f"{BASE}/embed")).json()
    (part,) = found["parts"]
    assert (found["name"], part["revision"], part["job"]) == ("embed", "r1", "")
    assert {name: part[name] for name in ("text", "origin", "snapshot", "meet")} == {
        name: PART[name] for name in ("text", "origin", "snapshot", "meet")
    }
    assert [each["generator"] for each in part["functions"]] == [False, True]
    assert [each["name"] for each in (await api.http.get(BASE)).json()] == ["embed"]
    assert (await api.http.get("/v1/projects/other/apps")).json() == []
    assert (await api.http.delete(f"{BASE}/embed")).status_code == 204
    assert code(await api.http.delete(f"{BASE}/embed")) == (404, "app-not-found")


async def test_all_who_ask_for_the_next_job_get_the_same(api: Api) -> None:
    await api.http.put(f"{BASE}/embed", json=ASK)
    ask = {"part": 0, "ended": ""}
    first = (await api.http.post(f"{BASE}/embed/claim", json=ask)).json()["job"]
    assert first
    assert (await api.http.post(f"{BASE}/embed/claim", json=ask)).json()["job"] == first
    second = await api.http.post(f"{BASE}/embed/claim", json={"part": 0, "ended": first})
    assert second.json()["job"] not in ("", first)
    for wrong, name in ((1, "embed"), (0, "other")):
        answer = await api.http.post(f"{BASE}/{name}/claim", json={"part": wrong, "ended": ""})
        assert code(answer) == (404, "app-not-found")


async def test_a_new_revision_has_no_job(api: Api) -> None:
    await api.http.put(f"{BASE}/embed", json=ASK)
    await api.http.post(f"{BASE}/embed/claim", json={"part": 0, "ended": ""})
    await api.http.put(f"{BASE}/embed", json={"revision": "r2", "parts": [PART, PART]})
    parts = (await api.http.get(f"{BASE}/embed")).json()["parts"]
    assert [(each["revision"], each["job"]) for each in parts] == [("r2", "")] * 2
    assert code(await api.http.put(f"{BASE}/embed", json={"revision": "", "parts": []})) == (
        422,
        "invalid-request",
    )
