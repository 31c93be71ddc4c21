"""Sandboxes over HTTP: their hosts tell of them, and users list them."""

from datetime import timedelta
from typing import Any

from msgspec.json import decode, encode
from tests.api.api.test_api_accounts import add, code
from tests.api.api.test_api_accounts import call as ask_as
from tests.api.api_state import Api
from tests.functions.api.test_api_state import begin
from tests.sandboxes.rig import make_report

from cavvy.capabilities.sandboxes.rows import SandboxRows

TAGS = "{cavvy-sandboxes: x}"


async def tell(api: Api, gang: str, *reports: Any) -> Any:
    place = f"/agent/v1/asks/sandboxes/report?gang={gang}&rank=0"
    body = {"sandboxes": [decode(encode(each)) for each in reports], "name": ""}
    return await api.http.post(place, json=body, headers=api.agent(gang))


async def test_a_list_has_what_hosts_tell(api: Api) -> None:
    gang = await begin(api, await add(api, "mia", ("team", "member")), "team", TAGS)
    now = api.app_state.now()
    assert (await tell(api, gang, make_report(now), make_report(now, name="5b"))).status_code == 204
    ended = make_report(now, state="ended", why="timeout", ended_s=now.timestamp())
    assert (await tell(api, gang, ended)).status_code == 204
    found = {each["id"][-2:]: each for each in (await api.http.get("/v1/sandboxes")).json()}
    assert (found["5a"]["state"], found["5a"]["why"]) == ("ended", "timeout")
    assert (found["5b"]["state"], found["5b"]["user"], found["5b"]["cpu"]) == ("running", "ada", 2)
    viewer = await add(api, "vic", ("team", "viewer"))
    other = await add(api, "eve", ("other", "member"))
    assert len((await ask_as(api, viewer, "GET", "/sandboxes")).json()) == 2
    assert (await ask_as(api, other, "GET", "/sandboxes")).json() == []


async def test_a_sandbox_ends_with_its_host_whatever_was_told_last(api: Api) -> None:
    now = api.app_state.now()
    rows = SandboxRows(*api.app_state.store.database)
    await rows.put("team", "gone", [make_report(now)], now)
    (found,) = (await api.http.get("/v1/sandboxes")).json()
    assert (found["state"], found["why"]) == ("ended", "lost")


async def test_sandboxes_are_forgotten_after_a_day(api: Api) -> None:
    now = api.app_state.now()
    rows = SandboxRows(*api.app_state.store.database)
    old = make_report(now - timedelta(days=2), name="01")
    await rows.put("team", "host", [old], now - timedelta(days=2))
    await rows.put("team", "host", [make_report(now)], now)
    assert [each.report.name for each in await rows.list_all(None, now)] == ["5a"]
    reading, _ = api.app_state.store.database
    sql = "SELECT COUNT(*) FROM sandboxes"
    assert (await reading(lambda session: session.run(sql).fetchone()))[0] == 1  # type: ignore[index]


async def test_only_hosts_tell_of_sandboxes(api: Api) -> None:
    token = await add(api, "mia", ("team", "member"))
    gang = await begin(api, token, "team")
    now = api.app_state.now()
    assert code(await tell(api, gang, make_report(now))) == (422, "invalid-request")
    host = await begin(api, token, "team", TAGS)
    for wrong in ({"name": "../x"}, {"state": "odd"}, {"until_s": -1.0}, {"title": "x" * 300}):
        assert code(await tell(api, host, make_report(now, **wrong))) == (422, "invalid-request")
