"""Nodes of pools that other clusters order and release by name."""

import asyncio
from collections.abc import Mapping

import pytest
from tests.api.api_state import Api, until
from tests.pools.api.test_api_pools import apply

from cavvy.control import node_pools
from cavvy.control.node_pools import pool_key
from cavvy.domain.jobs import JobPhase

CLUSTER = "{name: burst, max: 2, resources: {cpu: 1}, join: exec slurmd, secrets: [MUNGE_KEY]}"
NODES = "/v1/projects/default/pools/burst/nodes"


async def test_another_cluster_orders_and_releases_nodes_by_name(api: Api) -> None:
    status, answer = await apply(api, CLUSTER, consent=True)
    assert (status, answer["code"]) == (422, "secret-missing")
    await api.http.put("/v1/projects/default/secrets/MUNGE_KEY", json={"value": "k"})
    status, pool = await apply(api, CLUSTER, consent=True)
    assert (status, pool["join"]) == (200, "exec slurmd")
    assert (await api.post_job("{run: 'true', pool: burst}")).json()["code"] == "pool-unfit"
    shape = (await api.http.get("/v1/projects/default/pools/burst/shape")).json()
    assert (shape["cpus"], shape["memory_mib"], shape["gpus"]) == (4, 8192, 0)

    async def send(path: str, *nodes: str) -> dict[str, str]:
        answer = await api.http.post(path, json={"nodes": nodes})
        assert answer.status_code == 200, answer.text
        return {each["name"]: each["job"] for each in answer.json()}

    two = await send(NODES, "burst-1", "burst-2", "burst-2")
    assert list(two) == ["burst-1", "burst-2"]
    assert await send(NODES, "burst-2", "burst-1") == two, "no node is started twice"
    job = await api.app_state.store.find_job("default", two["burst-1"])
    assert (job.task.run, job.task.keep.total_seconds()) == ("exec slurmd", 0)
    assert job.task.env["CLUSTER_PROVIDER_ID"] == "cavvy://default/burst/burst-1"
    await api.attempt(job.id)
    assert list(await send(f"{NODES}/release", "burst-1", "burst-9")) == ["burst-2"]

    async def is_stopped() -> bool:
        return (await api.app_state.store.job(job.id)).phase is JobPhase.STOPPED

    await until(is_stopped)
    again = await send(NODES, "burst-1")
    assert (await api.app_state.store.find_job("default", again["burst-1"])).id != job.id
    for name in ("-x", "a b", "$(id)", ""):
        answer = await api.http.post(NODES, json={"nodes": [name]})
        assert answer.json()["code"] == "invalid-request", name
    await apply(api, CLUSTER, consent=True)
    assert await send(NODES, "burst-1") == again, "a pool that is applied again keeps its nodes"
    assert (await api.http.delete("/v1/projects/default/pools/burst")).status_code == 409
    await send(f"{NODES}/release", *again)
    await apply(api, consent=True)
    answer = await api.http.post(NODES.replace("burst", "small"), json={"nodes": ["small-1"]})
    assert "has no `join`" in answer.json()["message"]


async def test_a_cluster_cannot_order_nodes_without_end(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pools, "MOST_NODES", 2)
    await apply(api, CLUSTER.replace(", secrets: [MUNGE_KEY]", ""), consent=True)
    for names, code in (
        (["burst-1", "burst-2"], None),
        (["burst-2", "burst-1"], None),
        (["burst-1", "burst-3"], "pool-unfit"),
    ):
        answer = await api.http.post(NODES, json={"nodes": names})
        assert (answer.json()["code"] if answer.status_code != 200 else None) == code
    assert "has 2 nodes" in answer.json()["message"]
    assert "release nodes" in answer.json()["hint"]
    left = await api.http.post(f"{NODES}/release", json={"nodes": ["burst-1", "burst-2"]})
    assert left.json() == []


async def test_a_node_that_has_ended_is_told_until_it_is_ordered_again(api: Api) -> None:
    await apply(api, CLUSTER.replace(", secrets: [MUNGE_KEY]", ""), consent=True)
    [node] = (await api.http.post(NODES, json={"nodes": ["burst-1"]})).json()
    await api.http.post(f"/v1/projects/default/jobs/{node['job']}/stop", json={})

    async def has_ended() -> bool:
        [told] = (await api.http.get(NODES)).json()
        return bool(told["state"] == "ended" and told["reason"] == "stopped by the user")

    await until(has_ended)
    [again] = (await api.http.post(NODES, json={"nodes": ["burst-1"]})).json()
    assert again["state"] in ("waiting", "starting")
    await api.http.post(f"{NODES}/release", json={"nodes": ["burst-1"]})


async def test_a_node_that_is_ordered_while_the_pool_is_checked_stays(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply(api, CLUSTER.replace(", secrets: [MUNGE_KEY]", ""), consent=True)
    nodes, store = api.app_state.control_plane.node_pools, api.app_state.store.node_pools
    await nodes.order_nodes("default", "burst", ["burst-1"])
    list_jobs, meanwhile, ordered = store.jobs, ["burst-2"], asyncio.Event()

    async def order_first(project: str, name: str) -> Mapping[str, JobPhase]:
        if meanwhile:
            await nodes.order_nodes(project, name, [meanwhile.pop()])
            ordered.set()
        return await list_jobs(project, name)

    monkeypatch.setattr(store, "jobs", order_first)
    await nodes.reconcile(pool_key("default", "burst"))
    await ordered.wait()  # the server checks the pool, too
    await nodes.reconcile(pool_key("default", "burst"))
    told = (await api.http.get(NODES)).json()
    assert [each["name"] for each in told] == ["burst-1", "burst-2"]
    assert {each["state"] for each in told} <= {"waiting", "starting"}
    await api.http.post(f"{NODES}/release", json={"nodes": ["burst-1", "burst-2"]})
