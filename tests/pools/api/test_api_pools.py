"""Elastic pools as users see them: files, consent, jobs, and what is refused."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.api.api_state import Api, until

from cavvy.api.routes import submission
from cavvy.client.paths import make_key
from cavvy.domain.jobs import JobPhase

POOL = "{name: small, max: 1, idle: 20m, resources: {cpu: 1}}"
JOB = "{run: 'true', pool: small}"


async def apply(api: Api, text: str = POOL, **ask: Any) -> tuple[int, Any]:
    answer = await api.http.post("/v1/projects/default/pools", json={"text": text, **ask})
    return answer.status_code, answer.json()


async def show(api: Api, name: str = "small") -> Any:
    return (await api.http.get(f"/v1/projects/default/pools/{name}")).json()


async def test_jobs_share_the_nodes_of_a_pool(api: Api) -> None:
    status, answer = await apply(api)
    assert (status, answer["code"]) == (402, "consent-needed")
    assert "0 to 1 node" in answer["message"]
    status, pool = await apply(api, consent=True, user="ann")
    assert (status, pool["state"], pool["max"], pool["problem"]) == (200, "open", 1, "")
    # The user who applied the pool has agreed to pay for the nodes of its jobs.
    first, second = [await api.submit(JOB) for _ in range(2)]
    await api.attempt(first["id"])

    async def is_told() -> bool:
        job = (await api.http.get(f"/v1/projects/default/jobs/{second['name']}")).json()
        return "pool small uses all of its 1 node" in str(job["reason"])

    await until(is_told)
    pool = await show(api)
    assert (pool["nodes"], pool["running_jobs"], pool["waiting_jobs"]) == (1, 1, 1)
    answer = (await api.http.delete("/v1/projects/default/pools/small")).json()
    assert answer["code"] == "pool-in-use"
    assert "2 unfinished jobs, 1 of them waiting" in answer["message"]
    for job in (second, first):
        await api.http.post(f"/v1/projects/default/jobs/{job['name']}/stop", json={})


async def test_what_a_pool_refuses(api: Api) -> None:
    wrong = [
        ("{max: 0, resources: {cpu: 1}}", "invalid-pool"),
        ("{max: 1, min: 2, resources: {cpu: 1}}", "invalid-pool"),
    ]
    for text, code in wrong:
        status, answer = await apply(api, text, consent=True)
        assert (status, answer["code"]) == (422, code)
    assert (await show(api))["code"] == "pool-not-found"
    assert (await api.post_job(JOB)).json()["code"] == "pool-not-found"
    await apply(api, consent=True)
    for text in (
        "{run: 'true', pool: small, nodes: 2}",
        "{run: 'true', pool: small, resources: {gpu: 'H100:8'}}",
    ):
        assert (await api.post_job(text)).json()["code"] == "pool-unfit"
    both = (await api.post_job("{run: 'true', pool: small, machine: dev}")).json()
    assert "`machine` has no meaning with `pool`" in both["message"]
    cap = "{name: cheap, max: 1, min: 1, resources: {cpu: 16, max_price: 1}}"
    status, pool = await apply(api, cap, consent=True)
    assert status == 200
    assert "$1.00" in pool["problem"]
    job = await api.submit("{run: 'true', pool: cheap}")

    async def is_told() -> bool:
        found = (await api.http.get(f"/v1/projects/default/jobs/{job['name']}")).json()
        return "pool cheap: " in found["reason"] and "$1.00" in found["reason"]

    await until(is_told)

    async def shows_why() -> bool:
        return "$1.00" in (await show(api, "cheap"))["problem"]

    await until(shows_why)
    [order] = (await api.app_state.store.node_pools.get("default", "cheap")).ordered
    await apply(api, cap.replace("min: 1, ", ""), consent=True)

    async def is_stopped() -> bool:
        return (await api.app_state.store.job(order)).phase is JobPhase.STOPPED

    await until(is_stopped)
    assert [each["name"] for each in (await api.http.get("/v1/pools")).json()] == ["cheap", "small"]
    await api.http.post(f"/v1/projects/default/jobs/{job['name']}/stop", json={})
    assert (await api.http.delete("/v1/projects/default/pools/cheap")).status_code == 204


async def test_waiting_jobs_follow_the_changed_file_of_their_pool(api: Api) -> None:
    dear = "resources: {cpu: 16, max_price: 1}"
    await apply(api, f"{{name: small, max: 2, {dear}}}")  # without consent, as it has no offer
    bare = await api.submit("{name: bare, run: 'true', pool: small}")
    own = await api.submit(f"{{name: own, run: 'true', pool: small, {dear}}}")
    path = "/v1/projects/default/jobs"

    async def is_told() -> bool:
        return "$1.00" in (await api.http.get(f"{path}/bare")).json()["reason"]

    await until(is_told)
    await apply(api, POOL, consent=True)
    await api.attempt(bare["id"])
    started, stated = [await api.app_state.store.job(each["id"]) for each in (bare, own)]
    assert (started.task.resources.cpus_min, started.task.keep) == (1, timedelta(minutes=20))
    assert started.consented  # as who applied the pool has agreed to pay
    assert stated.task.resources.cpus_min == 16  # it says so itself, as the old file did
    await apply(api, POOL.replace("cpu: 1", "cpu: 2"), consent=True)
    await api.http.post(f"{path}/own/stop", json={})
    assert (await api.app_state.store.job(bare["id"])).task == started.task  # it has its nodes
    events = (await api.http.get(f"{path}/bare/events")).json()
    told = "follows the changed file of pool small"
    assert [each["text"] for each in events["events"]].count(told) == 1
    await api.http.post(f"{path}/bare/stop", json={})


async def test_down_stops_pools_without_jobs(api: Api) -> None:
    """A pool without jobs would start nodes again, for its minimum or for the next job."""
    other = "{name: other, max: 1, resources: {cpu: 1}}"
    for text, project in ((POOL, "default"), (other, "b")):
        ask = {"text": text, "consent": True}
        await api.http.post(f"/v1/projects/{project}/pools", json=ask)

    async def down(**ask: Any) -> list[tuple[str, str, bool]]:
        found = (await api.http.post("/v1/down", json=ask)).json()["found"]
        return [(each["kind"], each["name"], each["done"]) for each in found]

    assert await down(project="default", dry_run=True) == [("pool", "small", False)]
    assert (await show(api))["state"] == "open"
    assert await down(project="default") == [("pool", "small", True)]
    assert (await show(api))["state"] == "stopped"
    assert await down() == [("pool", "other", True)]
    assert await down() == []
    _, pool = await apply(api, consent=True)
    assert pool["state"] == "open"


async def test_too_many_tasks_are_not_read(api: Api) -> None:
    tasks = [{"text": "not: [a task"}] * 101
    ask = {"tasks": tasks, "keys": [make_key() for _ in tasks]}
    answer = (await api.http.post("/v1/projects/default/job-graphs", json=ask)).json()
    assert (answer["code"], answer["message"]) == ("invalid-request", "101 tasks are too many")


async def test_what_has_no_price_is_not_agreed_to(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_ever(age: object = None) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(submission, "_MARKET_WAIT_S", 0.01)
    monkeypatch.setattr(api.app_state.control_plane.pool, "market", wait_for_ever)
    status, answer = await apply(api)
    assert (status, answer["code"]) == (402, "consent-needed")
    assert "each node of pool small may cost money, price unknown" in answer["message"]
    assert (await show(api))["code"] == "pool-not-found"
    status, pool = await apply(api, consent=True)
    assert (status, pool["problem"]) == (200, "the providers have not answered within 5 s")
    assert (await api.post_job(JOB)).status_code == 201  # who applied the pool has agreed
    alone = await api.post_job("{name: alone, run: 'true', resources: {gpu: H100}}", consent=False)
    assert alone.json()["code"] == "consent-needed"
    assert "price unknown" in alone.json()["message"]
    here = "{name: here, run: 'true', resources: {providers: [local]}}"
    assert (await api.post_job(here, consent=False)).status_code == 201  # it costs nothing
