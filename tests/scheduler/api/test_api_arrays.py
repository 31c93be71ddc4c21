"""Arrays of jobs over HTTP."""

import asyncio
from typing import Any

import pytest
from tests.api.api_state import Api, until

from cavvy.client.paths import make_key
from cavvy.domain.checkpoints import RemovedCheckpoints
from cavvy.domain.jobs import JOB_ENDS, JobRecord
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import Store

TASK = "{name: train, params: {lr: 0.1}, sweep: {lr: [0.1, 0.01, 0.001]}, parallel: 1, run: 'x'}"


async def submit(api: Api, text: str = TASK, key: str | None = None) -> dict[str, Any]:
    answer = await api.post_job(text, key=key)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def read(api: Api, path: str) -> dict[str, Any]:
    answer = await api.http.get(f"/v1/projects/default/{path}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_an_array_is_submitted_once_and_listed_as_one(api: Api) -> None:
    key = make_key()
    made = await submit(api, key=key)
    assert (made["name"], made["members"], made["created"]) == ("train", 3, True)
    again = await submit(api, key=key)
    assert (again["id"], again["created"]) == (made["id"], False)
    await submit(api, "{name: other, run: 'x'}")
    [other, array] = (await read(api, "jobs?arrays=true"))["jobs"]
    assert (other["name"], other["members"]) == ("other", {})
    assert (array["name"], sum(array["members"].values())) == ("train", 3)
    names = [job["name"] for job in (await read(api, "jobs"))["jobs"]]
    assert names == ["other", "train.2", "train.1", "train.0"]
    found = await read(api, "arrays/train")
    assert [(job["name"], job["params"]) for job in found["jobs"]] == [
        ("train.0", {"lr": 0.1}),
        ("train.1", {"lr": 0.01}),
        ("train.2", {"lr": 0.001}),
    ]


async def test_a_key_creates_either_a_job_or_an_array(api: Api) -> None:
    key, other = make_key(), make_key()
    made = await submit(api, key=key)
    await submit(api, "{name: one, run: 'x'}", key=other)
    member = (await read(api, "arrays/train"))["jobs"][0]["id"]
    for text, used in (("{run: 'x'}", key), (TASK, other), ("{array: 0-1, run: 'x'}", member)):
        answer = await api.post_job(text, key=used)
        assert (answer.status_code, answer.json()["code"]) == (409, "key-reused")
    assert (await submit(api, key=key))["id"] == made["id"]


async def test_an_array_has_the_place_of_its_next_job_in_the_queue(api: Api) -> None:
    made = [await api.submit() for _ in range(3)]  # two places
    await api.attempt(made[1]["id"])
    await submit(api, TASK)
    [array, *_] = (await read(api, "jobs?arrays=true"))["jobs"]
    assert (array["queue_position"], array["queue_ahead"]) == (2, {"default": 1})
    assert (await api.http.post("/v1/projects/default/arrays/train/stop", json={})).is_success
    [array, *_] = (await read(api, "jobs?arrays=true"))["jobs"]
    assert array["queue_position"] is None


async def test_pages_contain_each_job_and_each_array_once(api: Api) -> None:
    for number in range(3):
        await submit(api, f"{{name: a{number}, array: 0-4, run: 'x'}}")
        await submit(api, f"{{name: b{number}, run: 'x'}}")
    names, cursor = [], ""
    while True:
        page = await read(api, f"jobs?arrays=true&limit=2{cursor}")
        names += [job["name"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert names == ["b2", "a2", "b1", "a1", "b0", "a0"]
    first = (await api.http.get("/v1/arrays?limit=2")).json()
    rest = (await api.http.get(f"/v1/arrays?project=default&cursor={first['cursor']}")).json()
    assert [each["name"] for each in (*first["jobs"], *rest["jobs"])] == ["a2", "a1", "a0"]
    assert rest["cursor"] is None
    assert (await api.http.get("/v1/arrays?project=other")).json()["jobs"] == []
    assert (await api.http.post("/v1/projects/default/arrays/a2/stop", json={})).status_code == 200
    names, cursor = [], ""
    while True:  # the newest array is stopping or has stopped, and is passed over
        page = await read(api, f"jobs?arrays=true&limit=1&phase=queued&phase=starting{cursor}")
        names += [job["name"] for job in page["jobs"] if job["members"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert names == ["a1", "a0"]


async def test_an_array_is_stopped_and_retried_as_one(api: Api) -> None:
    await submit(api, "{name: train, array: 0-2, parallel: 1, run: 'x'}")
    where = "/v1/projects/default/arrays/train"
    for _ in range(2):  # a repeated request changes nothing
        answer = (await api.http.post(f"{where}/stop", json={"reason": "enough"})).json()
        assert answer["members"].get("queued") is None
    jobs = (await read(api, "arrays/train"))["jobs"]
    assert {job["reason"] for job in jobs if job["phase"] == "stopped"} == {"enough"}
    stopped = sum(job["phase"] == "stopped" for job in jobs)
    answer = (await api.http.post(f"{where}/retry")).json()
    assert sum(answer["members"].get(phase, 0) for phase in ("queued", "starting")) >= stopped


async def test_an_array_is_removed_as_one_when_its_jobs_have_ended(api: Api) -> None:
    await submit(api, "{name: train, array: 0-2, parallel: 1, run: 'x'}")
    where = "/v1/projects/default/arrays/train"
    answer = await api.http.delete(where)
    assert (answer.status_code, answer.json()["code"]) == (409, "job-not-ended")
    assert answer.json()["hint"] == "stop the array with `cavvy stop train`, then remove it"
    assert len((await read(api, "arrays/train"))["jobs"]) == 3
    await api.http.post(f"{where}/stop", json={})
    for _ in range(500):
        answer = await api.http.delete(where)
        if answer.status_code == 200:
            break
        await asyncio.sleep(0.02)
    assert answer.json() == {"freed_bytes": 0, "kept": ""}
    assert (await read(api, "jobs"))["jobs"] == []
    assert (await api.http.delete(where)).status_code == 404
    assert (await submit(api, "{name: train, run: 'x'}"))["name"] == "train"


async def test_a_removal_that_was_interrupted_is_completed(api: Api) -> None:
    await submit(api, "{name: train, array: 0-2, parallel: 1, run: 'x'}")
    jobs, store = api.app_state.control_plane.jobs, api.app_state.store
    await jobs.stop_array("default", "train")
    await until(lambda: _ended(store))
    found = [await store.find_job("default", f"train.{index}") for index in range(3)]
    await store.commit(AtomicWrite(jobs=[replace(job, attempt=1) for job in found]))
    whole, files = jobs._remove_files, list[str]()

    async def fail_once(job: JobRecord, **how: Any) -> RemovedCheckpoints:
        files.append(job.name)
        if len(files) == 2:
            raise ConnectionError("the server is killed here")
        return await whole(job, **how)

    jobs._remove_files = fail_once
    with pytest.raises(ConnectionError):
        await jobs.remove_array("default", "train")
    await jobs.retry_array("default", "train")  # takes no job whose files may be gone
    found = [await store.find_job("default", f"train.{index}") for index in range(3)]
    assert all(job.removing and job.phase in JOB_ENDS for job in found)
    await jobs.remove_array("default", "train")
    assert files == ["train.0", "train.1", "train.0", "train.1", "train.2"]
    assert (await read(api, "jobs"))["jobs"] == []


async def _ended(store: Store) -> bool:
    array = await store.arrays.find("default", "train")
    return array.counts == {"stopped": 3} and not await store.arrays.holds_nodes(array.id)


async def test_what_is_refused_is_not_stored(api: Api) -> None:
    for text in (
        "{array: '0', run: x}",
        "{array: 0-99999, run: x}",
        "{sweep: {a: 0..999999}, run: x}",
    ):
        assert (await api.post_job(text)).status_code == 422
    assert (await read(api, "jobs"))["jobs"] == []
    answer = await api.http.get("/v1/projects/default/arrays/none")
    assert (answer.status_code, answer.json()["code"]) == (404, "job-not-found")
