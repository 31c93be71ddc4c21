"""Budgets over HTTP: set, seen, requested, approved and removed, each with its record."""

import pytest
from tests.api.api.test_api_accounts import add, call, code
from tests.api.api_state import Api

from cavvy.domain.ledger import month_of
from cavvy.domain.units import Money

BASE = "/v1/budgets/vision"


async def test_a_budget_is_set_requested_approved_and_removed(api: Api) -> None:
    approval = {"limit_micros": 9_000_000}
    missing = await api.http.post(f"{BASE}/approve", json=approval)
    assert (missing.status_code, missing.json()["code"]) == (404, "budget-not-found")
    ask = {"limit_micros": 5_000_000, "project": "default", "hard_percent": 110}
    assert (await api.http.put(BASE, json=ask)).status_code == 204
    wanted = "/v1/projects/{}/budgets/vision/request"
    more = {"limit_micros": 9_000_000, "reason": "a longer run"}
    assert (await api.http.post(wanted.format("other"), json=more)).status_code == 404
    early = await api.http.post(f"{BASE}/approve", json=approval)
    assert (early.status_code, early.json()["code"]) == (409, "nothing-requested")
    assert (await api.http.post(wanted.format("default"), json=more)).status_code == 204
    [seen] = (await api.http.get("/v1/budgets")).json()
    assert (seen["limit_micros"], seen["request"]["limit_micros"]) == (5_000_000, 9_000_000)
    assert (seen["spent_micros"], seen["expected_micros"]) == (0, None)
    other = await api.http.post(f"{BASE}/approve", json={"limit_micros": 8_000_000})
    assert (other.status_code, other.json()["code"]) == (409, "conflict")
    assert "`cavvy cost budget show vision`" in other.json()["hint"]
    assert "$9.00 was requested" in other.text
    assert (await api.http.post(f"{BASE}/approve", json=approval)).status_code == 204
    [seen] = (await api.http.get("/v1/budgets")).json()
    assert (seen["month_limit_micros"], seen["request"]) == (9_000_000, None)
    [stored] = await api.app_state.store.budgets.list()
    assert stored.limit_before(month_of(api.app_state.now())) == Money(5_000_000)
    assert (await api.http.put(BASE, json={"limit_micros": 1})).status_code == 204
    [stored] = await api.app_state.store.budgets.list()
    assert stored.limit_before(month_of(api.app_state.now())) == Money(5_000_000)
    records = await api.app_state.store.audit_records()
    assert [each.text.count("9000000") for each in records][-3:] == [1, 2, 1]
    assert (await api.http.delete(BASE)).status_code == 204
    assert (await api.http.get("/v1/budgets")).json() == []


async def test_a_budget_of_all_projects_takes_requests_from_those_who_may_see_it(api: Api) -> None:
    assert (await api.http.put(BASE, json={"limit_micros": 5_000_000})).status_code == 204
    member = await add(api, "ada", ("team", "member"))
    path, more = "/projects/team/budgets/vision/request", {"limit_micros": 9_000_000}
    assert code(await call(api, member, "POST", path, more)) == (404, "budget-not-found")
    assert code(await call(api, member, "GET", "/budgets")) == (200, "")
    assert (await api.http.post(f"/v1{path}", json=more)).status_code == 204


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit_micros": -1},
        {"limit_micros": 1, "alerts": [0]},
        {"limit_micros": 1, "soft_percent": 0},
        {"limit_micros": 1, "hard_percent": 0},
        {"limit_micros": 1, "tag": "team"},
        {"limit_micros": 1, "webhook": "ftp://x"},
    ],
)
async def test_wrong_budgets_are_refused(api: Api, wrong: dict[str, object]) -> None:
    answer = await api.http.put(BASE, json=wrong)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
