"""Named machines over HTTP: one gang by name, its queue, its price, and its end."""

from collections.abc import Awaitable
from typing import Any

from tests.api.api_state import Api, until

MACHINE = "/v1/projects/default/machines/dev"
TASK = "{name: first, run: 'true', machine: dev, keep: 10m}"


async def find(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = (await api.http.get(MACHINE)).json()
    return found


async def wait_for(api: Api, state: str) -> dict[str, Any]:
    async def reached() -> bool:
        return bool((await find(api))["state"] == state)

    await until(reached)
    return await find(api)


async def test_a_machine_is_got_stopped_started_and_forgotten(api: Api) -> None:
    await api.submit(TASK)
    found = await wait_for(api, "starting")
    assert (found["keep_s"], found["nodes"], found["waiting"], found["job"]) == (600, 1, 0, "first")
    await api.submit("{name: second, run: 'true', machine: dev}")
    assert (await find(api))["waiting"] == 1
    [listed] = (await api.http.get("/v1/machines?project=default")).json()
    assert listed["name"] == "dev"
    assert (await api.http.get("/v1/machines?project=other")).json() == []
    [row] = (await api.http.get("/v1/jobs?limit=1")).json()["jobs"]
    assert row["machine"] == "dev"
    kept = await api.http.post(f"{MACHINE}/keep", json={"keep_s": 60})
    assert kept.json()["keep_s"] == 60
    assert (await api.http.delete(MACHINE)).json()["code"] == "machine-in-use"
    await api.http.post(f"{MACHINE}/stop")
    assert (await wait_for(api, "stopped"))["waiting"] == 0, "jobs that wait are stopped too"
    late = await api.http.post(f"{MACHINE}/keep", json={"keep_s": 60})
    assert late.json()["code"] == "machine-stopped"
    started = await api.http.post(f"{MACHINE}/start", json={})
    assert started.json()["name"] == "dev-start"
    assert (await wait_for(api, "starting"))["keep_s"] == 60, "the last keep time stays"
    await api.http.post(f"{MACHINE}/stop")
    await wait_for(api, "stopped")
    assert (await api.http.delete(MACHINE)).status_code == 204
    assert (await find(api))["code"] == "machine-not-found"


async def test_a_machine_that_costs_money_is_started_with_consent_only(api: Api) -> None:
    task = "{name: paid, run: 'true', machine: dev, resources: {cpu: 64}}"
    assert (await api.post_job(task)).json()["code"] == "consent-needed"
    assert (await find(api))["code"] == "machine-not-found"
    await api.submit(task, consent=True)
    assert (await wait_for(api, "starting"))["rate_micros_per_hour"] == 2_500_000
    await api.submit("{name: next, run: 'true', machine: dev}")
    await api.http.post(f"{MACHINE}/stop")
    await wait_for(api, "stopped")
    refused = await api.http.post(f"{MACHINE}/start", json={})
    assert refused.json()["code"] == "consent-needed"


async def test_a_later_policy_holds_for_jobs_on_a_machine_that_runs(api: Api) -> None:
    task = "{name: paid, run: 'true', machine: dev, resources: {cpu: 64}}"
    await api.submit(task, consent=True)
    await wait_for(api, "starting")
    policy = {"max_rate_micros_per_hour": 1_000_000}
    answer = await api.http.put("/v1/projects/default/policy", json=policy)
    assert answer.status_code == 204, answer.text
    refused = await api.post_job("{name: next, run: 'true', machine: dev}", consent=True)
    assert refused.json()["code"] == "policy-refused"
    assert "at most $1" in refused.json()["message"]


async def test_a_task_that_does_not_fit_is_refused_with_what_the_machine_has(api: Api) -> None:
    await api.submit(TASK)
    await wait_for(api, "starting")
    answer = await api.post_job("{name: big, run: 'true', machine: dev, resources: {cpu: 64}}")
    assert answer.json()["code"] == "machine-unfit"
    assert answer.json()["message"] == "machine dev has 4 CPUs, you asked for at least 64"


async def test_a_machine_whose_last_job_was_removed_can_be_stopped_and_forgotten(api: Api) -> None:
    await api.submit(TASK)
    await wait_for(api, "starting")
    await api.http.post(f"{MACHINE}/stop")
    await wait_for(api, "stopped")

    async def removed() -> bool:
        return (await api.http.delete("/v1/projects/default/jobs/first")).status_code == 200

    await until(removed)  # once its nodes are released
    assert (await api.http.post(f"{MACHINE}/stop")).status_code < 300
    assert (await api.http.delete(MACHINE)).status_code == 204


async def test_another_user_must_agree_to_pay_for_a_machine(api: Api) -> None:
    task = "{name: paid, run: 'true', machine: dev, resources: {cpu: 64}}"
    await api.submit(task, consent=True, user="ada")
    await wait_for(api, "starting")
    more = "{name: more, run: 'true', machine: dev}"
    assert (await api.post_job(more, user="bob")).json()["code"] == "consent-needed"
    assert (await api.post_job(more, user="ada")).status_code < 300


async def test_a_request_of_an_agent_does_not_use_the_consent_for_a_machine(api: Api) -> None:
    """Also without a question beforehand: the submission itself is refused."""
    task = "{name: paid, run: 'true', machine: dev, resources: {cpu: 64}}"
    await api.submit(task, consent=True, user="ada")
    await wait_for(api, "starting")
    more = "{name: more, run: 'true', machine: dev}"
    check = "/v1/projects/default/job-check"
    told = await api.http.post(check, json={"text": more, "user": "ada", "own_consent": True})
    assert "$2.50" in told.json()["consent_needed"]
    told = await api.http.post(check, json={"text": more, "user": "ada"})
    assert told.json()["consent_needed"] == ""
    refused = await api.post_job(more, user="ada", own_consent=True)
    assert refused.json()["code"] == "consent-needed"
    agreed = await api.post_job(more, user="ada", own_consent=True, consent=True)
    assert agreed.status_code < 300


async def test_the_start_of_a_machine_counts_as_a_waiting_job(api: Api) -> None:
    await api.submit(TASK)
    await wait_for(api, "starting")
    await api.http.post(f"{MACHINE}/stop")
    await wait_for(api, "stopped")
    policy = {"user_waiting": 0}
    assert (await api.http.put("/v1/projects/default/policy", json=policy)).status_code == 204
    refused = await api.http.post(f"{MACHINE}/start", json={})
    assert refused.json()["code"] == "policy-refused"
    assert "and the start adds 1" in refused.json()["message"]
    names = [each["name"] for each in (await api.http.get("/v1/jobs")).json()["jobs"]]
    assert names == ["first"]


async def test_a_session_is_found_by_its_machines_name_only_on_request(api: Api) -> None:
    session = "{name: dev, run: 'true', machine: dev, session: true, keep: 10m}"
    jobs = "/v1/projects/default/jobs"

    async def ask(name: str) -> dict[str, Any]:
        found: dict[str, Any] = (await api.http.get(f"{jobs}/{name}")).json()
        return found

    async def phase(name: str) -> str:
        return str((await ask(name))["phase"])

    old = await api.submit(session)
    await api.http.post(f"{MACHINE}/stop")
    await wait_for(api, "stopped")
    new = await api.submit(session)
    await api.submit("{name: work, run: 'true', machine: dev}")
    assert new["name"] == "dev-2"
    assert (await ask("dev?session=true"))["name"] == "dev-2"
    assert (await ask(f"{old['id']}?session=true"))["name"] == "dev"
    assert (await ask("dev"))["name"] == "dev"
    assert (await api.http.post(f"{jobs}/dev/stop")).json()["name"] == "dev"

    async def removed() -> bool:
        return (await api.http.delete(f"{jobs}/dev")).status_code == 200

    await until(removed)  # once its nodes are released
    assert (await ask("dev"))["code"] == "job-not-found"
    assert (await ask("dev?session=true"))["name"] == "dev-2"
    await api.http.post(f"{jobs}/{new['id']}/stop")
    await until(lambda: _is(phase("dev-2"), "stopped"))
    assert (await ask("dev-2?session=true"))["name"] == "dev-2"
    assert (await ask("dev?session=true"))["code"] == "job-not-found"
    assert await phase("work") != "stopped"


async def _is(asked: Awaitable[str], wanted: str) -> bool:
    return await asked == wanted
