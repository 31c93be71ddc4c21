"""Bills beside the providers' own records, by the API."""

from tests.api.api.test_api_agents import claim, report, start
from tests.api.api_state import Api, until

from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite

AUDIT = "/v1/projects/default/audit"
EXIT = {"seq": 1, "kind": "exited", "outcome": "succeeded", "exit_code": 0}


async def _ended(api: Api, gang: str) -> bool:
    return (await api.app_state.store.attempt_of_gang(gang)).phase == "ended"


async def test_a_bill_is_compared_with_the_providers_record(api: Api) -> None:
    assert (await api.http.get(AUDIT)).json() == {"bills": [], "problems": []}
    gang = await start(api, "{name: t, run: 'true', resources: {cpu: 32+}}", consent=True)
    await claim(api, gang)
    await report(api, gang, EXIT)
    assert await until(lambda: _ended(api, gang))
    for query in ({}, {"job": "t"}):
        [row] = (await api.http.get(AUDIT, params=query)).json()["bills"]
        assert (row["job"], row["attempt"], row["gang"]) == ("t", 1, gang)
        assert row["verdict"] == "agrees"
        assert abs(row["reported_micros"] - row["billed_micros"]) <= 100
    [charge, *_] = await api.app_state.store.charges(
        (await api.app_state.store.attempt_of_gang(gang)).job_id
    )
    wrong = replace(charge, amount=Money(charge.amount.micros + 5000))
    await api.app_state.store.commit(AtomicWrite(charges=[wrong]))
    assert (await api.http.get(AUDIT)).json()["bills"][0]["verdict"] == "differs"
    missing = await api.http.get(AUDIT, params={"job": "nobody"})
    assert (missing.status_code, missing.json()["code"]) == (404, "job-not-found")
