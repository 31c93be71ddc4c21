"""What runs is counted to now in every view of spending, although its rows come later."""

from datetime import timedelta

import pytest
from tests.api.api_state import Api
from tests.contract.store_suite import make_attempt, make_charge, make_job, make_offer, submit

from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptPhase, JobPhase, JobRecord
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite

LEAST = 25_000_000  # micro-dollars: 25 s at a dollar a second
RATE = 3_600_000_000


async def start(api: Api, *, written_s: float = 0) -> None:
    """Write a job that has run for 25 s. The ledger has the first `written_s`."""
    task = replace(make_job("j1").task, tags={"team": "x"})
    job = await submit(
        api.app_state.store, "j1", project="default", name="train", user="ann", task=task
    )
    await run(api, job, written_s)


async def run(api: Api, job: JobRecord, written_s: float = 0) -> None:
    began = api.app_state.now() - timedelta(seconds=25)
    offer = make_offer("big", RATE)
    attempt = make_attempt(job, phase=AttemptPhase.RUNNING, running_at=began, offer=offer)
    charges = []
    if written_s:
        charge = make_charge(attempt, round(written_s * 1_000_000), rate=HourlyRate(RATE))
        end = began + timedelta(seconds=written_s)
        charges.append(replace(charge, since=began, until=end))
    job = replace(job, phase=JobPhase.RUNNING, attempt=1)
    store = api.app_state.store
    await store.commit(AtomicWrite(jobs=[job], attempts=[attempt], charges=charges))


async def read_views(api: Api) -> dict[str, float]:
    """Return the spending in micro-dollars that each view states."""
    month = {"limit_micros": 10**12, "tag": "team=x"}
    assert (await api.http.put("/v1/budgets/vision", json=month)).status_code == 204
    since = (api.app_state.now() - timedelta(hours=1)).isoformat()

    async def ask(path: str, **query: str) -> object:
        answer = await api.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    base = "/v1/projects/default"
    found = {
        "job": (await ask(f"{base}/jobs/train/cost"))["total_micros"],
        "status": (await ask(f"{base}/jobs/train"))["spent_micros"],
        "jobs": (await ask("/v1/jobs"))["jobs"][0]["spent_micros"],
        "project": (await ask(f"{base}/cost"))["total_micros"],
        "project since": (await ask(f"{base}/cost", since=since))["total_micros"],
        "budget": (await ask("/v1/budgets"))[0]["spent_micros"],
    }
    for by in ("job", "project", "user", "tag:team", "kind,month", "gpu", "subject"):
        for given in ({}, {"since": since}):
            (row,) = await ask("/v1/ledger/sums", by=by, **given)
            assert row["jobs"] == 1
            found[f"by {by} {sorted(given)}"] = row["amount_micros"]
    for line in (await api.http.get("/metrics")).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("cavvy_spent_dollars{", "cavvy_budget_spent_dollars{")):
            found[name.partition("{")[0]] = float(value) * 1_000_000
    return found


@pytest.mark.parametrize("written_s", [0, 10])
async def test_every_view_counts_what_runs_to_now(api: Api, written_s: float) -> None:
    await start(api, written_s=written_s)
    found = await read_views(api)
    assert len(found) == 22, sorted(found)
    assert {name: micros for name, micros in found.items() if micros < LEAST} == {}


async def test_an_array_costs_what_its_running_jobs_cost(api: Api) -> None:
    await api.submit("{name: x, run: 'true', schedule: 2099-01-01T00:00Z}")
    text = "{name: s, run: 'true', array: 0-1, after: x}"
    answer = await api.post_job(text)
    assert answer.status_code == 201, answer.text
    await run(api, await api.app_state.store.find_job("default", "s.1"))
    (row,) = (await api.http.get("/v1/arrays")).json()["jobs"]
    detail = (await api.http.get("/v1/projects/default/arrays/s")).json()
    waiting, running = (each["spent_micros"] for each in detail["jobs"])
    assert (waiting, min(running, row["spent_micros"]) >= LEAST) == (0, True)
    assert detail["array"]["spent_micros"] == running


async def test_a_kept_machine_costs_its_rate_since_its_newest_row(api: Api) -> None:
    """Its work ended 20 s ago, and the ledger has the time until 5 s ago."""
    await start(api, written_s=5)
    store, now = api.app_state.store, api.app_state.now()
    (attempt,) = await store.open_attempts()
    kept = make_charge(attempt, 15_000_000, kind=ChargeKind.KEPT, rate=HourlyRate(RATE))
    since, until = now - timedelta(seconds=20), now - timedelta(seconds=5)
    kept = replace(kept, since=since, until=until)
    attempt = replace(attempt, phase=AttemptPhase.KEPT, kept_since=since)
    await store.commit(AtomicWrite(attempts=[attempt], charges=[*await store.charges("j1"), kept]))
    rate = (await store.budgets.charged_rates())["j1"]
    assert (rate.until, rate.rate) == (until, HourlyRate(RATE))
    assert await store.spent("default") == Money(20_000_000)
