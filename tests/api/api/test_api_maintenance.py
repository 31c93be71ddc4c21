"""Own hosts as operators see them: cordon, drain, who holds what, and what is refused."""

from datetime import timedelta
from typing import Any, cast

from tests.api.api_state import Api, until
from tests.records import make_offer

from cavvy.control.reconcile import HOSTS
from cavvy.domain.allocations import Host
from cavvy.domain.jobs import JobPhase
from cavvy.domain.messages import AgentMessage, HostFacts, MessageKind
from cavvy.domain.values import replace
from cavvy.providers.fake import FakeAccount

BOX = Host(name="fake/box", cpus=4, memory_mib=8192, devices=("g0", "g1"))
OWN = make_offer("fake/box/cpu", 0, vcpus=4, memory_mib=8192, shared=True, owned=True)
JOB = "{name: held, run: 'true', resources: {cpu: 2, regions: [box]}, limits: {duration: 1h}}"


async def add_host(api: Api) -> None:
    providers = api.app_state.control_plane.pool.providers
    account = cast(FakeAccount, providers["fake"])  # an account of a cloud has no hosts
    cloud = providers["fake"] = account._cloud
    cloud.script = replace(cloud.script, hosts=(BOX,))
    cloud._offers[OWN.key] = OWN
    api.app_state.control_plane.pool.expire()
    api.app_state.control_plane.hint(HOSTS)


async def post(api: Api, what: str, **ask: Any) -> tuple[int, Any]:
    answer = await api.http.post(f"/v1/hosts/{what}", json=ask)
    return answer.status_code, answer.json()


async def test_a_host_is_cordoned_drained_and_used_again(api: Api) -> None:
    await add_host(api)
    held = await api.submit(JOB)
    await api.attempt(held["id"])
    status, host = await post(api, "cordon", node="box", reason="fan", user="ann")
    assert (status, host["name"], host["state"]) == (200, "fake/box", "cordoned")
    assert host["why"] == "cordoned by ann (fan)"
    (holder,) = host["holders"]
    assert (holder["job"], holder["cpus"], holder["until_from"]) == ("held", 2, "limit")
    late = await api.submit(JOB.replace("held", "late"))

    async def is_told() -> bool:
        job = (await api.http.get(f"/v1/projects/default/jobs/{late['name']}")).json()
        return "fake/box cannot be used: cordoned by ann (fan)" in str(job["reason"])

    await until(is_told)
    status, host = await post(api, "drain", node="fake/box", within_s=0)
    assert (status, host["state"]) == (200, "draining")

    async def is_leaving() -> bool:
        (shown,) = (await api.http.get("/v1/hosts")).json()
        return all(each["until_from"] == "notice" for each in shown["holders"])

    await until(is_leaving)
    for name in ("held", "late"):
        await api.http.post(f"/v1/projects/default/jobs/{name}/stop", json={})

    async def is_drained() -> bool:
        (shown,) = (await api.http.get("/v1/hosts")).json()
        return bool(shown["state"] == "drained")

    await until(is_drained)
    status, host = await post(api, "uncordon", node="box")
    assert (status, host["state"], host["why"], host["drain_by"]) == (200, "ready", "", None)
    await api.attempt((await api.submit(JOB.replace("held", "next")))["id"])


async def test_what_maintenance_refuses(api: Api) -> None:
    status, answer = await post(api, "cordon", node="box")
    assert (status, answer["code"]) == (404, "node-not-found")
    await add_host(api)
    status, answer = await post(api, "drain", node="bix", within_s=60)
    assert (status, answer["hint"]) == (404, "did you mean box?")
    for within_s in (-1, 1e12):
        status, answer = await post(api, "drain", node="box", within_s=within_s)
        assert status == 422
        assert "expected 0 to 30 days" in answer["message"]
    for reason in ("a\nb", "x" * 201):
        assert (await post(api, "cordon", node="box", reason=reason))[0] == 422
    assert (await post(api, "cordon", node="box", unknown=1))[0] == 422
    status, answer = await post(api, "cordon", node="box", gpus=[2])
    assert (status, answer["message"]) == (404, "fake/box has no GPU 2")
    for node, hint in (("aws/us-east-1", "drill preempt"), ("kubernetes/gpu-1", "kubectl drain")):
        status, answer = await post(api, "cordon", node=node)
        assert (status, answer["code"]) == (409, "node-not-own")
        assert hint in answer["hint"]
    rented = await api.submit()
    gang = (await api.attempt(rented["id"])).gang
    status, answer = await post(api, "drain", node=gang, within_s=60)
    assert (status, answer["code"]) == (409, "node-not-own")
    assert f"cavvy stop {rented['name']}" in answer["hint"]
    (host,) = (await api.http.get("/v1/hosts")).json()
    assert host["state"] == "ready"


def make_ask(api: Api, **changes: Any) -> dict[str, Any]:
    begins = api.app_state.now() + timedelta(hours=1)
    ask = {"project": "default", "nodes": ["box"], "begins_at": begins.isoformat(), "length_s": 60}
    return ask | changes


async def reserve(api: Api, **changes: Any) -> tuple[int, Any]:
    answer = await api.http.post("/v1/reservations", json=make_ask(api, **changes))
    return answer.status_code, answer.json()


async def test_a_reserved_host_is_kept_free_for_its_project(api: Api) -> None:
    await add_host(api)
    await api.http.post("/v1/projects", json={"name": "lab"})
    status, made = await reserve(api, project="lab", reason="demo")
    assert (status, made["name"], made["gpus"]) == (201, "lab-1", 0)
    assert made["parts"] == [{"host": "fake/box", "devices": []}]
    held = await api.submit(JOB.replace("1h", "5h"))

    async def is_told() -> bool:
        job = (await api.http.get(f"/v1/projects/default/jobs/{held['name']}")).json()
        reason = str(job["reason"])
        return "fake/box is reserved for another project from" in reason and "lab" not in reason

    await until(is_told)
    short = await api.submit(JOB.replace("1h", "10m").replace("held", "short"))
    await api.attempt(short["id"])
    status, answer = await reserve(api, project="lab", nodes=["fake/box"])
    assert (status, answer["code"]) == (409, "reservation-clash")
    assert "(reservation lab-1)" in answer["message"]
    later = (api.app_state.now() + timedelta(minutes=5)).isoformat()
    status, answer = await reserve(api, project="lab", begins_at=later, length_s=30)
    assert (status, answer["message"]) == (
        409,
        "1 job may still run there at the begin: short",
    )
    assert (await reserve(api, project="lab", begins_at=later, length_s=30, moves=True))[0] == 201
    found = (await api.http.get("/v1/reservations")).json()
    assert [each["name"] for each in found] == ["lab-2", "lab-1"]
    (host,) = (await api.http.get("/v1/hosts")).json()
    assert [each["name"] for each in host["reservations"]] == ["lab-2", "lab-1"]
    for name in ("lab-1", "lab-2"):
        assert (await api.http.delete(f"/v1/reservations/{name}")).status_code == 204
    gone = await api.http.delete("/v1/reservations/lab-1")
    assert (gone.status_code, gone.json()["code"]) == (404, "reservation-not-found")
    await api.attempt(held["id"])


async def test_what_reservations_refuse(api: Api) -> None:
    await add_host(api)
    past = (api.app_state.now() - timedelta(hours=1)).isoformat()
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"begins_at": past}, 422, "in the past"),
        ({"begins_at": "2026-12-01T08:00:00"}, 422, "time zone"),
        ({"begins_at": "9999-12-01T08:00:00Z"}, 422, "more than 366 days"),
        ({"length_s": 0}, 422, "`length_s`"),
        ({"length_s": 1e300}, 422, "`length_s`"),
        ({"project": "nowhere"}, 422, "there is no project nowhere"),
        ({"nodes": ["bax"]}, 404, "there is no node bax"),
        ({"nodes": ["aws/x"]}, 409, "maintains its own nodes"),
        ({"nodes": []}, 422, "nodes or a number of GPUs"),
        ({"gpus": 2}, 422, "not both"),
        ({"nodes": [], "gpus": 3}, 422, "have 2 GPUs that can be used"),
        ({"nodes": [], "gpus": -2}, 422, "cannot be reserved"),
        ({"name": "A b"}, 422, "`name`"),
        ({"reason": "a\nb"}, 422, "`reason`"),
        ({"user": "ann\x1b[2J"}, 422, "`user`"),
        ({"begins_at": "0001-01-01T00:00:00+14:00"}, 422, "time zone"),
        ({"begins_at": "9999-12-31T23:59:59-14:00"}, 422, "time zone"),
    ]
    for change, status, text in wrong:
        got, answer = await reserve(api, **change)
        assert (got, text in answer["message"]) == (status, True), (change, answer)
    await post(api, "cordon", node="box", gpus=[0])
    got, answer = await reserve(api, nodes=[], gpus=2)
    assert (got, "have 1 GPU that can be used" in answer["message"]) == (422, True)
    got, made = await reserve(api, nodes=[], gpus=1, name="mine")
    assert (got, made["parts"]) == (201, [{"host": "fake/box", "devices": ["g1"]}])
    got, answer = await reserve(api, nodes=[], gpus=1)
    assert (got, "because of the reservations mine" in answer["message"]) == (409, True)
    far = (api.app_state.now() + timedelta(days=2)).isoformat()
    got, answer = await reserve(api, name="mine", begins_at=far)
    assert (got, answer["code"], "named mine" in answer["message"]) == (
        409,
        "reservation-clash",
        True,
    )


async def test_closed_gpus_stay_closed_until_the_host_is_uncordoned(api: Api) -> None:
    await add_host(api)
    for at in (0, 1):
        status, host = await post(api, "cordon", node="box", gpus=[at], reason=f"fault {at}")
        assert (status, host["state"]) == (200, "ready")
        assert [*host["sick"]] == ["g0", "g1"][: at + 1]
    maintenance = api.app_state.control_plane.maintenance
    assert await maintenance.unfinished() == ["node:fake/box"], "their work may have to leave"
    _, host = await post(api, "cordon", node="box")
    assert (host["state"], [*host["sick"]]) == ("cordoned", ["g0", "g1"])
    assert host["sick"]["g1"] == "cordoned by an operator (fault 1)"
    _, host = await post(api, "uncordon", node="box")
    assert (host["state"], host["sick"]) == ("ready", {})
    assert await maintenance.unfinished() == []


async def test_work_that_saves_leaves_a_gpu_that_its_driver_calls_faulty(api: Api) -> None:
    await add_host(api)
    plane = api.app_state.control_plane
    cloud = cast(FakeAccount, plane.pool.providers["fake"])
    gpu = replace(OWN, instance_type="t4", accelerator="T4", accelerator_count=1)
    cloud._offers[gpu.key] = gpu
    plane.pool.expire()
    saves = "checkpoint: {path: ckpt, every: 1m}, resources: {gpu: T4, regions: [box]}"
    held = await api.submit(f"{{name: held, run: 'true', {saves}}}")
    gang = (await api.attempt(held["id"])).gang
    await plane.agents.claim(gang, 0, "n", "a", HostFacts(hostname="h"))
    begun = AgentMessage(seq=1, at=api.app_state.now(), kind=MessageKind.RUNNING)
    await plane.agents.messages(gang, 0, "n", [begun])

    async def is_leaving() -> bool:
        return (await api.app_state.store.attempt_of_gang(gang)).moved

    async def runs() -> bool:
        return (await api.app_state.store.job(held["id"])).phase is JobPhase.RUNNING

    await until(runs)
    assert not await is_leaving()
    sick = replace(BOX, sick=(("g0", "3 uncorrected memory errors"),))
    cloud.script = replace(cloud.script, hosts=(sick,))
    plane.pool.expire()
    plane.hint(HOSTS)
    await until(is_leaving)
