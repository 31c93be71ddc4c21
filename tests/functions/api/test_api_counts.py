"""What brokers count of their calls, over HTTP: nodes tell it, and users read it."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.json import decode, encode
from tests.api.api.test_api_accounts import add, code
from tests.api.api.test_api_accounts import call as ask_as
from tests.api.api_state import Api
from tests.functions.api.test_api_calls import PATH, end, make_call
from tests.functions.api.test_api_calls import calls as calls  # a fixture
from tests.functions.api.test_api_state import begin
from tests.functions.console_rows import make_minute

from cavvy.capabilities.functions.counts import rows
from cavvy.capabilities.functions.counts.rows import HOUR, MINUTE, TEN_MINUTES, CountRows
from cavvy.capabilities.functions.rows import FAILED

TAGS = "{cavvy-app: embed}"


async def tell(api: Api, gang: str, **fields: Any) -> Any:
    body = {"workers": 2, "gauges": {"resize": [3, 1, 1]}, "minutes": [], "name": "", **fields}
    place = f"/agent/v1/asks/apps/report?gang={gang}&rank=0"
    return await api.http.post(place, json=body, headers=api.agent(gang))


def minute(api: Api, **fields: Any) -> Any:
    return decode(encode(make_minute(api.app_state.now(), function="resize", **fields)))


async def find(api: Api) -> Any:
    (found,) = (await api.http.get("/v1/apps?project=team")).json()
    return found


async def test_a_list_of_apps_has_what_they_do(calls: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_COUNTED_S", 0.0)
    assert (await find(calls))["workers"] == 0
    gang = await begin(calls, await add(calls, "mia", ("team", "member")), "team", TAGS)
    assert (await tell(calls, gang, minutes=[minute(calls)])).status_code == 204
    asked = [make_call("a"), make_call("b"), make_call("c")]
    taken = (await calls.http.post(f"{PATH}/calls", json={"calls": asked})).json()
    await end(calls, taken[0]["id"], b"", FAILED, kind="error", text="no", trace="at line 1")
    found = await find(calls)
    assert (found["name"], found["functions"]) == ("embed", ["resize", "count"])
    # two kept calls have no result, of which one runs
    assert [found[each] for each in ("workers", "waiting", "running")] == [2, 4, 1]
    assert (found["done"], found["failed"]) == (3, 2)
    await tell(calls, gang, minutes=[minute(calls, done=5)])
    assert (await find(calls))["done"] == 5, "a minute that is told again is not counted twice"
    assert (await tell(calls, gang, workers=0, gauges={})).status_code == 204
    assert (await find(calls))["jobs"] == [], "it has ended"


async def test_figures_have_the_times_of_each_function(calls: Api) -> None:
    gang = await begin(calls, await add(calls, "mia", ("team", "member")), "team", TAGS)
    await tell(calls, gang, minutes=[minute(calls)])
    found = (await calls.http.get(f"{PATH}/figures")).json()
    (function,) = found["functions"]
    assert (function["name"], function["done"], function["failed"]) == ("resize", 3, 1)
    assert function["ran"][0] < function["ran"][1]
    assert len(function["ran_p50"]) == len(function["took_p99"])
    assert sum(each is not None for each in function["ran_p50"]) == 1
    (recent,) = found["recent"]
    assert (recent["state"], recent["trace"]) == ("failed", "")
    (recent,) = (await calls.http.get(f"{PATH}/figures?traces=true")).json()["recent"]
    assert recent["trace"] == "Traceback\n  zebra.py, line 1"
    missing = await calls.http.get("/v1/projects/team/apps/other/figures")
    assert code(missing) == (404, "app-not-found")


async def test_longer_times_are_the_sums_of_what_was_told_last(calls: Api) -> None:
    gang = await begin(calls, await add(calls, "mia", ("team", "member")), "team", TAGS)
    now = calls.app_state.now()
    hour = int(now.timestamp() // 3600 - 3) * 3600
    first = {"minute": hour, "done": 1, "failed": 0, "ran": {"40": 1}, "took": {"40": 1}}
    again = {**first, "done": 2, "ran": {"40": 1, "60": 1}}
    second = {**first, "minute": hour + 60, "failed": 7, "ran": {"40": 4}}
    for told in (first, again, second):
        await tell(calls, gang, minutes=[minute(calls, **told)])
    found = {
        hours: (await calls.http.get(f"{PATH}/figures?hours={hours}")).json()["functions"][0]
        for hours in (1, 12, 168)
    }
    assert [(each["done"], each["failed"]) for each in found.values()] == [(0, 0), (3, 7), (3, 7)]
    sums = await CountRows(*calls.app_state.store.database).list_steps(
        "team", "embed", HOUR, now - timedelta(days=1)
    )
    assert [(each.begin_s, rows.read_times(each.times).ran) for each in sums] == [
        (hour, [40, 5, 60, 1])
    ]


async def test_an_app_that_a_program_runs_is_seen_while_it_runs(api: Api) -> None:
    gang = await begin(api, await add(api, "mia", ("team", "member")), "team", TAGS)
    await tell(api, gang)
    found = await find(api)
    assert (found["name"], found["revision"], found["functions"]) == ("embed", "", ["resize"])
    steps = {
        hours: (await api.http.get(f"{PATH}/figures?hours={hours}")).json()["step_s"]
        for hours in (1.5, 1.6, 26, 27)
    }
    assert steps == {1.5: MINUTE, 1.6: TEN_MINUTES, 26: TEN_MINUTES, 27: HOUR}
    stored = CountRows(*api.app_state.store.database)
    await stored.sweep(api.app_state.now() + timedelta(hours=2))
    assert (await api.http.get("/v1/apps")).json() == []


async def test_a_job_tells_only_of_its_own_app(api: Api) -> None:
    token = await add(api, "mia", ("team", "member"))
    gang = await begin(api, token, "team")
    assert code(await tell(api, gang)) == (422, "invalid-request")
    for wrong in ({"workers": -1}, {"minutes": [{}]}, {"gauges": {"f": [1]}}):
        assert code(await tell(api, gang, **wrong)) == (422, "invalid-request")
    buckets = {str(number): 1 for number in range(300)}
    assert code(await tell(api, gang, minutes=[minute(api, ran=buckets)]))[0] == 422
    place = f"/agent/v1/asks/apps/report?gang={gang}&rank=0"
    wrong_token = {**api.agent(gang), "Authorization": f"Bearer {token}"}
    assert (await api.http.post(place, json={}, headers=wrong_token)).status_code in (401, 403)


async def test_others_do_not_see_apps_of_a_project(calls: Api) -> None:
    viewer = await add(calls, "vic", ("team", "viewer"))
    other = await add(calls, "eve", ("other", "member"))
    assert [each["name"] for each in (await ask_as(calls, viewer, "GET", "/apps")).json()] == [
        "embed"
    ]
    assert (await ask_as(calls, other, "GET", "/apps")).json() == []
    hidden = await ask_as(calls, other, "GET", "/projects/team/apps/embed/figures")
    assert code(hidden) == (404, "project-not-found")


async def test_what_is_known_of_an_app_goes_with_it(calls: Api) -> None:
    gang = await begin(calls, await add(calls, "mia", ("team", "member")), "team", TAGS)
    await tell(calls, gang, minutes=[minute(calls)])
    assert (await calls.http.delete(PATH)).status_code == 204
    assert (await calls.http.get("/v1/apps")).json() == []
    assert code(await calls.http.get(f"{PATH}/figures")) == (404, "app-not-found")


async def test_a_list_of_calls_can_leave_out_tracebacks(calls: Api) -> None:
    taken = (await calls.http.post(f"{PATH}/calls", json={"calls": [make_call()]})).json()
    await end(calls, taken[0]["id"], b"", FAILED, kind="error", text="no", trace="at line 1")
    (whole,) = (await calls.http.get(f"{PATH}/calls")).json()
    (brief,) = (await calls.http.get(f"{PATH}/calls?traces=false")).json()
    assert (whole["end"]["trace"], brief["end"]["trace"]) == ("at line 1", "")
    assert brief["end"]["text"] == "no"
