"""Targets of notices over HTTP: set, listed, tested and removed; who may; and that nothing tells
their addresses.
"""

from pathlib import Path

import pytest
from tests.api.api.test_api_accounts import add, call, code
from tests.api.api_state import Api, open_api
from tests.receivers import HttpReceiver

from cavvy.capabilities.notices.rows import SqlNotices
from cavvy.store.rotation import list_keys, rotate_key

BASE = "/v1/projects/team/notices"
ASK = {"channel": "slack", "address": "https://hooks.test/s3cret", "events": ["failed", "budget"]}


async def test_a_target_is_set_listed_and_removed_and_its_address_is_never_told(api: Api) -> None:
    assert (await api.http.put(f"{BASE}/ops", json=ASK)).status_code == 204
    listed = await api.http.get(BASE)
    [row] = listed.json()
    assert (row["name"], row["channel"], row["events"]) == ("ops", "slack", ["failed", "budget"])
    assert (row["user"], row["problem"]) == ("", "")
    assert (await api.http.get("/v1/projects/other/notices")).json() == []
    wrong = await api.http.put(f"{BASE}/ops", json={**ASK, "address": "s3cret"})
    assert code(wrong) == (422, "invalid-request")
    assert (await api.http.delete(f"{BASE}/ops")).status_code == 204
    assert code(await api.http.delete(f"{BASE}/ops")) == (404, "notice-not-found")
    assert code(await api.http.post(f"{BASE}/ops/test")) == (404, "notice-not-found")
    records = await api.app_state.store.audit_records()
    texts = [listed.text, wrong.text, *(each.text for each in records)]
    assert not any("s3cret" in text for text in texts)
    assert sum('"slack"' in each.text for each in records) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"channel": "pigeon"},
        {"events": ["failed", "moved"]},
        {"events": []},
        {"address": "https://hooks.test/" + "x" * 2000},
        {"address": "ftp://hooks.test/"},
        {"channel": "pagerduty"},
        {"channel": "email"},
        {"extra": 1},
    ],
)
async def test_wrong_targets_are_refused(api: Api, wrong: dict[str, object]) -> None:
    answer = await api.http.put(f"{BASE}/ops", json={**ASK, **wrong})
    assert code(answer) == (422, "invalid-request")
    assert (await api.http.get(BASE)).json() == []


async def test_a_project_has_a_limited_number_of_targets(api: Api) -> None:
    for number in range(50):
        assert (await api.http.put(f"{BASE}/t{number}", json=ASK)).status_code == 204
    assert code(await api.http.put(f"{BASE}/more", json=ASK)) == (422, "invalid-request")
    assert (await api.http.put(f"{BASE}/t1", json=ASK)).status_code == 204


async def test_members_decide_about_their_own_notices_and_operators_about_all(api: Api) -> None:
    member, operator = (
        await add(api, "ada", ("team", "member")),
        await add(api, "olga", ("team", "operator")),
    )
    viewer, stranger = (
        await add(api, "vera", ("team", "viewer")),
        await add(api, "eve", ("other", "admin")),
    )
    path, own = "/projects/team/notices", {**ASK, "user": "ada"}
    assert code(await call(api, member, "PUT", f"{path}/mine", own))[0] == 204
    for ask in (ASK, {**ASK, "user": "olga"}):
        assert code(await call(api, member, "PUT", f"{path}/all", ask)) == (403, "role-needed")
    assert code(await call(api, operator, "PUT", f"{path}/all", ASK))[0] == 204
    for method, place in (("PUT", "/all"), ("DELETE", "/all"), ("POST", "/all/test")):
        body = own if method == "PUT" else None
        answer = await call(api, member, method, f"{path}{place}", body)
        assert code(answer) == (403, "role-needed")
    assert code(await call(api, viewer, "GET", path)) == (403, "role-needed")
    for method, place in (("GET", ""), ("PUT", "/x"), ("DELETE", "/mine"), ("POST", "/mine/test")):
        body = ASK if method == "PUT" else None
        answer = await call(api, stranger, method, f"{path}{place}", body)
        assert code(answer) == (404, "project-not-found")
    assert code(await call(api, member, "DELETE", f"{path}/mine"))[0] == 204


async def test_a_test_message_and_a_failed_job_reach_the_receiver(tmp_path: Path) -> None:
    receiver = HttpReceiver()
    async with open_api("sqlite", tmp_path) as api:
        ask = {**ASK, "address": f"http://{receiver.address}/slack?key=s3cret"}
        assert (await api.http.put("/v1/projects/default/notices/ops", json=ask)).status_code == 204
        told = await api.http.post("/v1/projects/default/notices/ops/test")
        assert told.json() == {"problem": ""}
        assert "this is a test" in receiver.got[0][1]["text"]
        await add(api, "ada", ("default", "member"))  # the server now has several users
        told = await api.http.post("/v1/projects/default/notices/ops/test")
        assert "server.private_targets does not list it" in told.json()["problem"]
        assert "s3cret" not in told.text
    receiver.close()
    assert (len(receiver.got), receiver.wrong) == (1, [])


async def test_addresses_are_encrypted_again_with_a_new_key(api: Api) -> None:
    assert (await api.http.put(f"{BASE}/ops", json=ASK)).status_code == 204
    store, sealer = api.app_state.store, api.app_state.sealer
    before = await SqlNotices(*store.database).target("team", "ops")
    assert b"s3cret" not in before.sealed
    assert (await rotate_key(store, sealer)).encrypted == 1
    after = await SqlNotices(*store.database).target("team", "ops")
    assert after.sealed != before.sealed
    assert sealer.unseal("team", after.bound_name, after.sealed) == ASK["address"]
    assert [each.secrets for each in await list_keys(store, sealer)] == [1, 0]
