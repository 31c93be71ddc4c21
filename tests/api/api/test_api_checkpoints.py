"""Checkpoints that agents hand over: complete or not there, of their own job only, and nothing
of them left behind.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.api.api.test_api_agents import claim, report, start
from tests.api.api_state import Api, until

from cavvy.store.base import RowNotFound
from cavvy.store.blobs import read_manifest

TASK = "{name: t, run: 'true', checkpoint: {path: state, every: 1m}, retry: {preemption: 9}}"
MADE = "2026-03-01T12:00:00Z"


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    return {
        "path": path,
        "sha256": name_of(data),
        "size": len(data),
        "mode": 0o640,
        "mtime_ns": 1_700_000_000,
    }


async def begin(api: Api, text: str = TASK) -> str:
    gang = await start(api, text)
    granted = (await claim(api, gang)).json()
    assert granted["work"]["checkpoint"] == {
        "path": "state",
        "storage": None,
        "sync": True,
        "every_s": 60.0,
    }
    await report(api, gang, {"seq": 1, "kind": "running"})
    return gang


async def send(api: Api, gang: str, data: bytes, name: str = "") -> Any:
    path = f"/agent/v1/blobs/{name or name_of(data)}"
    return await api.http.put(path, params={"gang": gang}, content=data, headers=api.agent(gang))


async def commit(api: Api, gang: str, files: list[dict[str, Any]], nonce: str = "n1") -> Any:
    body = {"gang": gang, "rank": 0, "nonce": nonce, "made_at": MADE, "files": files}
    return await api.http.post("/agent/v1/checkpoints", json=body, headers=api.agent(gang))


async def latest(api: Api, gang: str) -> Any:
    answer = await api.http.get(
        "/agent/v1/checkpoints/latest", params={"gang": gang}, headers=api.agent(gang)
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["checkpoint"]


async def missing(api: Api, gang: str, *names: str) -> Any:
    body = {"blobs": list(names)}
    path, headers = "/agent/v1/blobs/missing", api.agent(gang)
    return (await api.http.post(path, params={"gang": gang}, json=body, headers=headers)).json()[
        "missing"
    ]


async def fetch(api: Api, gang: str, name: str) -> Any:
    return await api.http.get(
        f"/agent/v1/blobs/{name}", params={"gang": gang}, headers=api.agent(gang)
    )


async def test_a_checkpoint_counts_when_all_of_it_is_here(api: Api) -> None:
    gang = await begin(api)
    assert await latest(api, gang) is None
    files = [entry("a", b"one"), entry("deep/b", b"two"), {"path": "new", "link": "a"}]
    assert await missing(api, gang, name_of(b"one"), name_of(b"two")) == [
        name_of(b"one"),
        name_of(b"two"),
    ]
    assert (await send(api, gang, b"one")).json() == {"offset": 3}
    assert (await commit(api, gang, files)).json() == {"number": None, "missing": [name_of(b"two")]}
    assert await latest(api, gang) is None
    wrong = await send(api, gang, b"changed", name_of(b"two"))
    assert (wrong.status_code, wrong.json()["code"]) == (422, "blob-mismatch")
    assert (await send(api, gang, b"two")).status_code == 200
    assert (await commit(api, gang, files)).json() == {"number": 1, "missing": []}
    assert (await commit(api, gang, files)).json()[
        "number"
    ] == 1  # the answer was lost, it is asked again
    held = await latest(api, gang)
    assert (held["number"], held["attempt"], held["bytes"], held["made_at"]) == (1, 1, 6, MADE)
    assert [{**{"sha256": "", "size": 0}, **each}["path"] for each in held["files"]] == [
        "a",
        "deep/b",
        "new",
    ]
    assert held["files"][0] == {**entry("a", b"one"), "link": None, "data": None}
    assert (await fetch(api, gang, name_of(b"two"))).content == b"two"


async def test_the_newest_two_are_kept_and_what_they_need(api: Api) -> None:
    gang = await begin(api)
    for number in range(1, 5):
        data = f"state {number}".encode()
        await missing(api, gang, name_of(b"same"), name_of(data))
        for each in (b"same", data):
            await send(api, gang, each)
        answer = await commit(api, gang, [entry("same", b"same"), entry("state", data)])
        assert answer.json()["number"] == number
    codes = [
        (await fetch(api, gang, name_of(f"state {n}".encode()))).status_code for n in range(1, 5)
    ]
    assert codes == [404, 404, 200, 200]
    assert (await fetch(api, gang, name_of(b"same"))).status_code == 200


async def test_a_large_file_comes_in_parts(api: Api) -> None:
    gang = await begin(api)
    data = b"0123456789" * 3
    path = f"/agent/v1/blobs/{name_of(data)}"

    async def part(offset: int, body: bytes, size: int = 30) -> Any:
        query: dict[str, str | int] = {"gang": gang, "offset": offset, "size": size}
        return await api.http.put(path, params=query, content=body, headers=api.agent(gang))

    assert (await part(0, data[:12])).json() == {"offset": 12}
    assert (await part(0, data[:12])).json() == {"offset": 12}  # again, for the answer was lost
    assert (await part(25, data[25:])).json() == {"offset": 12}  # a gap is not filled with nothing
    assert (await missing(api, gang, name_of(data))) == [name_of(data)]
    assert (await part(10, data[10:20])).json() == {"offset": 20}
    assert (await part(20, data[20:])).json() == {"offset": 30}
    assert (await part(20, data[20:])).json() == {"offset": 30}
    assert (await fetch(api, gang, name_of(data))).content == data
    path = f"/agent/v1/blobs/{name_of(b'other')}"
    assert (await part(0, b"wrong", 5)).status_code == 422
    assert (await part(0, b"other", 5)).json() == {"offset": 5}  # nothing stays of the wrong one


async def test_what_is_coming_outlives_a_commit(api: Api) -> None:
    gang = await begin(api)
    await send(api, gang, b"first")
    await send(api, gang, b"early")
    assert await missing(api, gang, name_of(b"first"), name_of(b"early"), name_of(b"late")) == [
        name_of(b"late")
    ]
    assert (await commit(api, gang, [entry("a", b"first")])).json()["number"] == 1
    assert (await fetch(api, gang, name_of(b"early"))).status_code == 200
    assert (await commit(api, gang, [entry("b", b"first")])).json()["number"] == 2
    assert (
        await fetch(api, gang, name_of(b"early"))
    ).status_code == 404  # nobody waits for it any more


@pytest.mark.parametrize(
    "paths",
    [
        ["../a"],
        ["/etc/a"],
        ["a/../../b"],
        ["a//b"],
        [""],
        ["."],
        ["a\0b"],
        ["a", "a"],
        ["a", "a/b"],
    ],
)
async def test_paths_that_lead_elsewhere_are_refused(api: Api, paths: list[str]) -> None:
    gang = await begin(api)
    await send(api, gang, b"x")
    answer = await commit(api, gang, [entry(path, b"x") for path in paths])
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert await latest(api, gang) is None


async def test_a_file_below_a_link_is_refused(api: Api) -> None:
    gang = await begin(api)
    await send(api, gang, b"x")
    answer = await commit(api, gang, [{"path": "out", "link": "/etc"}, entry("out/passwd", b"x")])
    assert answer.status_code == 422
    assert "is below a file or a link" in answer.json()["message"]


async def test_only_the_gangs_own_job_is_open(api: Api) -> None:
    gang, other = await begin(api), await begin(api, TASK.replace("name: t", "name: u"))
    await send(api, gang, b"mine")
    assert (await commit(api, gang, [entry("a", b"mine")])).json()["number"] == 1
    assert await latest(api, other) is None
    assert (await fetch(api, other, name_of(b"mine"))).status_code == 404
    assert await missing(api, other, name_of(b"mine")) == [name_of(b"mine")]
    assert (await commit(api, other, [entry("a", b"mine")])).json()["missing"] == [name_of(b"mine")]
    path = f"/agent/v1/blobs/{name_of(b'x')}"
    stolen = await api.http.put(path, params={"gang": gang}, content=b"x", headers=api.agent(other))
    assert (stolen.status_code, stolen.json()["code"]) == (403, "forbidden")
    assert (await commit(api, gang, [entry("a", b"mine")], nonce="other")).status_code == 409


async def test_the_next_attempt_begins_with_it_and_the_last_one_is_not_heard_any_more(
    api: Api,
) -> None:
    gang = await begin(api)
    await send(api, gang, b"first")
    await commit(api, gang, [entry("a", b"first")])
    now = datetime.now(UTC).isoformat()
    told = {
        "seq": 2,
        "at": now,
        "kind": "checkpoint",
        "number": 1,
        "files": 1,
        "bytes": 5,
        "sent": 5,
        "seconds": 0.5,
    }
    await report(
        api, gang, told, {"seq": 3, "kind": "exited", "outcome": "preempted", "exit_code": 75}
    )
    job = (await api.http.get("/v1/projects/default/jobs/t")).json()["id"]
    second = await until(lambda: _gang_of(api, job, 2))
    await claim(api, second, nonce="n2")
    assert (await latest(api, second))["files"][0]["sha256"] == name_of(b"first")
    late = await commit(api, gang, [entry("b", b"first")])
    assert (late.status_code, late.json()["code"]) == (409, "claimed")
    assert (await latest(api, second))["files"][0]["path"] == "a"
    assert (await commit(api, second, [entry("b", b"first")], nonce="n2")).json()["number"] == 2
    assert (await latest(api, second))[
        "number"
    ] == 1  # what the attempt began with, whichever rank asks, and when
    events = (await api.http.get("/v1/projects/default/jobs/t/events")).json()["events"]
    said = "checkpoint 1 is safe: the checkpoint is complete with 1 file, 5 B; 5 B sent in 0.5 s, 10 B/s"
    assert said in [each["text"] for each in events]


async def _gang_of(api: Api, job: str, number: int) -> str | None:
    attempts = await api.app_state.store.attempts(job)
    found = [each for each in attempts if each.number == number and each.phase == "booting"]
    return found[0].gang if found else None


async def test_a_removed_job_leaves_no_checkpoint_behind(api: Api) -> None:
    gang = await begin(api)
    await send(api, gang, b"state")
    assert (await commit(api, gang, [entry("a", b"state")])).status_code == 200
    attempt = await api.app_state.store.attempt_of_gang(gang)
    blobs = await api.app_state.control_plane.checkpoints.blobs(gang)
    assert blobs.path(name_of(b"state")).exists()
    base = f"/v1/projects/default/jobs/{attempt.job_id}"
    await api.http.post(base + "/stop")
    await report(api, gang, {"seq": 2, "kind": "exited", "outcome": "stopped", "code": 143})

    async def removed() -> Any:
        answer = await api.http.delete(base)
        return answer.json() if answer.status_code == 200 else None

    found = await until(removed)
    assert (found["freed_bytes"] > len(b"state"), found["kept"]) == (True, "")
    with pytest.raises(RowNotFound):
        blobs.path(name_of(b"state"))


async def test_a_checkpoint_becomes_a_part_of_a_folder(api: Api) -> None:
    gang = await begin(api)
    job = "/v1/projects/default/jobs/t/model"
    ask: dict[str, Any] = {"snapshots": [], "below": "model"}
    assert (await api.http.post(job, json=ask)).json()["code"] == "no-model"
    await send(api, gang, b"weights")
    await commit(api, gang, [entry("a/w.bin", b"weights")])
    found = (await api.http.post(job, json=ask)).json()
    assert found["files"] == [{"path": "a/w.bin", "size": 7}]
    again = (await api.http.post(job, json={"snapshots": [found["snapshot"]], "below": "m"})).json()
    blobs = api.app_state.blobs.of("default")
    manifest = read_manifest(blobs, again["snapshot"])
    assert [each.path for each in manifest.files] == ["m/a/w.bin", "model/a/w.bin"]
    assert blobs.missing(sorted(manifest.parts)) == [], "the files are the project's now"
    for wrong, code in (
        ({**ask, "below": "../up"}, "invalid-request"),
        ({**ask, "snapshots": ["x"]}, "invalid-request"),
        ({**ask, "snapshots": [name_of(b"other")]}, "snapshot-missing"),
    ):
        assert (await api.http.post(job, json=wrong)).json()["code"] == code
    missing_job = await api.http.post("/v1/projects/default/jobs/other/model", json=ask)
    assert missing_job.json()["code"] == "job-not-found"
