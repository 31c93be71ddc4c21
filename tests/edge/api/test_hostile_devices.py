"""Devices at the edge that send wrong, huge or foreign values, and requests without a device."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.json import decode
from starlette.responses import FileResponse
from tests.api.api_state import Api, until
from tests.edge.rig import edge_of, rows_of

from cavvy.capabilities.edge.devices import SitePace
from cavvy.capabilities.edge.nouns import EdgeDevice, EdgeSite, Rollout, RolloutPhase
from cavvy.capabilities.edge.on_device.bundle import pack_device
from cavvy.capabilities.edge.service import EdgeService
from cavvy.capabilities.models.model_keys import ListChange, make_key
from cavvy.capabilities.models.nouns import ModelFile, ModelVersion
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.parts import KnownService
from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.values import replace
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.base import AtomicWrite
from cavvy.store.chunks import CHUNK
from cavvy.store.open import MemoryStore
from cavvy.task_files import ReadOptions, parse_task

EDGE = "/edge/v1"


async def enrol(api: Api, hostname: str, site: str = "lab") -> tuple[str, dict[str, str]]:
    """Enrol a device, and return its name and the headers of its requests."""
    edge = edge_of(api.app_state)
    token, _ = await edge.invite("default", site=site, labels={}, count=1, valid=timedelta(hours=1))
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw().hex()
    made = await edge.enrol("default", token, public, hostname, {})
    nonce = (await api.http.get(f"{EDGE}/nonce")).json()["nonce"]
    proof = {"project": "default", "device": made.name, "nonce": nonce}
    proof["signature"] = key.sign(nonce.encode()).hex()
    answer = await api.http.post(f"{EDGE}/token", json=proof, headers={"Authorization": ""})
    return made.name, {"Authorization": f"Bearer {answer.json()['token']}"}


def told(**sums: float) -> dict[str, Any]:
    return {"models": [{"name": "m", "serving": 2, "sums": sums}]}


HOSTILE = {
    "disk": {"free_mib": 10**30},
    "clock": {"clock": 1e308},
    "version": {"models": [{"name": "m", "serving": 10**30}]},
    "texts": {"agent": "\0", "models": [{"name": "m\0", "problem": "\0" * 5000}] * 2},
    "requests": told(requests=10**30),
    "many": told(requests=1 << 50, errors=1 << 49),
    "negative": told(requests=100, errors=-(10**12)),
    "logs": told(requests=100, timed=100, logs=1e300),
    "latency": told(requests=100, timed=100, logs=1e6, squares=1e12),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
async def test_no_report_of_a_device_stops_the_rollouts_of_its_project(
    api: Api, hostile: dict[str, Any]
) -> None:
    _, bad = await enrol(api, "bad")
    name, good = await enrol(api, "good")
    edge, now = edge_of(api.app_state), api.app_state.now()
    own = {"project": "default", "created_at": now}
    await rows_of(api.app_state.store).models.put(
        ModelVersion(**own, name="m@2", snapshot="", files=(), main="")
    )
    await edge.deploy(Rollout(**own, name="m-0", model="m", to=2, wave_at=now, waves=(1.0,)))
    for each in range(3):
        sums = {"requests": 100 * each, "timed": 100 * each}
        report = {"models": [{"name": "m", "serving": 1, "sums": sums}]}
        answer = await api.http.post(f"{EDGE}/check-in", json=report, headers=good)
        assert answer.status_code == 200, answer.text
        sent = hostile if each else {}
        answer = await api.http.post(f"{EDGE}/check-in", content=json.dumps(sent), headers=bad)
        assert answer.status_code in (200, 422), answer.text
        await edge.reconcile("edge:default")

    async def is_shown() -> bool:  # a report may be lost beside the server's own look at rollouts
        await api.http.post(f"{EDGE}/check-in", json=report, headers=good)
        device = (await api.http.get(f"/v1/projects/default/edge/devices/{name}")).json()
        return bool(device["models"][0]["requests"] == 200)

    assert await until(is_shown)
    [rollout] = (await api.http.get("/v1/rollouts")).json()
    assert (rollout["phase"], rollout["errors"]) == ("running", [0.0, 0.0])


SAMPLES = (
    b'"number": -1',
    b'"number": %d' % 10**30,
    b'"number": 1, "version": %d' % 10**30,
    b'"number": 1, "request": "\xff"',
    b'"number": 1, "request": %s' % (b"9" * 5000),
    b'"number": 1, "request": %s%s' % (b"[" * 50_000, b"]" * 50_000),
)


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
async def test_a_sample_that_readers_could_not_decode_is_refused(api: Api, sample: bytes) -> None:
    _, headers = await enrol(api, "bad")
    good = b'{"number": 2, "model": "m\\u0000", "request": {"a":\n [1]}}'
    for body in (b'{"samples": [{"model": "m", %s}]}' % sample, b'{"samples": [%s]}' % good):
        answer = await api.http.post(f"{EDGE}/samples", content=body, headers=headers)
        assert answer.status_code == (204 if good in body else 422), answer.text
    path = "/v1/projects/default/edge/samples"
    assert (await api.http.get(path, params={"model": "m"})).json()["samples"] == []
    [kept] = (await api.http.get(path, params={"model": "m\ufffd"})).json()["samples"]
    assert json.loads(kept["body"])["request"] == {"a": [1]}
    assert "\n" not in kept["body"]  # `cavvy edge collect` writes lines
    for after in (f"{'9' * 50}.1.d", f"1.{'9' * 50}.d", "1.-1.d"):
        answer = await api.http.get(path, params={"model": "m", "after": after})
        assert answer.status_code == 422, answer.text


async def test_requests_that_name_no_device_leave_nothing_in_memory(api: Api) -> None:
    nonce = (await api.http.get(f"{EDGE}/nonce")).json()["nonce"]
    for project in ("x", "y" * 64, "z\0", "default"):
        proof = {"project": project, "device": "d\0", "nonce": nonce, "signature": "é"}
        answer = await api.http.post(f"{EDGE}/token", json=proof, headers={"Authorization": ""})
        assert answer.status_code in (403, 422), answer.text
        token = {"Authorization": f"Bearer {project.strip(chr(0))}.t"}
        asked = {"key": "0" * 64, "hostname": "h"}
        answer = await api.http.post(f"{EDGE}/enrol", json=asked, headers=token)
        assert answer.status_code == 403, answer.text
    assert not edge_of(api.app_state)._known


async def test_a_device_gets_nothing_of_a_model_that_must_not_come_to_it(api: Api) -> None:
    _, headers = await enrol(api, "abroad")
    name = sha256(b"weights").hexdigest()
    api.app_state.blobs.of("default").put(name, [b"weights"])
    files = (ModelFile(path="m.onnx", sha256=name, size=7),)
    now, edge = api.app_state.now(), edge_of(api.app_state)
    model = {"project": "default", "files": files, "main": "m.onnx", "created_at": now}
    store = rows_of(api.app_state.store)
    for number, residency, status in ((1, "eu", 404), (2, "", 200)):
        version = ModelVersion(**model, name=f"m@{number}", snapshot="", residency=residency)
        await store.models.put(version)
        await store.rollouts.put(make_done(number, now))
        edge._known.clear()
        for path in (f"manifests/m/{number}", f"files/{name}"):
            answer = await api.http.get(f"{EDGE}/{path}", headers=headers)
            assert answer.status_code == status, answer.text
    answer = await api.http.get(f"{EDGE}/files/{name}", headers={**headers, "Range": "bytes=3-"})
    assert (answer.status_code, answer.content) == (206, b"ghts")


async def test_a_device_gets_only_what_is_rolled_out_to_it(api: Api) -> None:
    """And what it served before, in case it has to go back; not the rest of the project's models,
    nor what other devices are to get."""
    _, headers = await enrol(api, "gate")
    now, edge = api.app_state.now(), edge_of(api.app_state)
    store = rows_of(api.app_state.store)
    digests = dict[int, str]()
    for number in range(1, 6):
        data = b"weights %d" % number
        digests[number] = sha256(data).hexdigest()
        api.app_state.blobs.of("default").put(digests[number], [data])
        file = ModelFile(path="m.onnx", sha256=digests[number], size=len(data))
        version = {"project": "default", "files": (file,), "main": "m.onnx", "created_at": now}
        await store.models.put(ModelVersion(**version, name=f"m@{number}", snapshot=""))

    async def list_got() -> list[int]:
        edge._known.clear()
        got = list[int]()
        for number, digest in digests.items():
            paths = (f"{EDGE}/manifests/m/{number}", f"{EDGE}/files/{digest}")
            codes = {(await api.http.get(path, headers=headers)).status_code for path in paths}
            assert len(codes) == 1, (number, codes)
            got += [number] if codes == {200} else []
        return got

    assert await list_got() == []
    for number in (1, 2, 3):
        await store.rollouts.put(make_done(number, now))
    assert await list_got() == [2, 3]
    await store.rollouts.put(replace(make_done(4, now), site="another"))
    # its first wave has one of two devices
    await enrol(api, "door")
    fifth = replace(make_done(5, now), phase=RolloutPhase.RUNNING, waves=(0.5, 1.0))
    await store.rollouts.put(fifth)
    edge._known.clear()
    known = await edge._read("default")
    in_wave = "gate" in known.members["m-5"]
    assert await list_got() == ([3, 5] if in_wave else [2, 3])
    halted = await store.rollouts.get("default", "m-5")
    await store.rollouts.put(replace(halted, phase=RolloutPhase.HALTED))
    assert await list_got() == [2, 3]


def make_done(number: int, now: datetime) -> Rollout:
    """Return a rollout of a version of the model `m` that all devices of the project have."""
    made = {"project": "default", "name": f"m-{number}", "model": "m", "to": number}
    return Rollout(**made, phase=RolloutPhase.DONE, wave_at=now, created_at=now)


async def test_a_model_does_not_leave_its_residency_in_the_folder_of_a_job_or_service(
    api: Api,
) -> None:
    """Whoever calls the routes, and whatever the file is called in the folder."""
    blobs, now = api.app_state.blobs.of("default"), api.app_state.now()
    contents = {"w": b"weights", "labels.txt": b"cat dog", "big": b"b" * 5000}
    names = {path: sha256(content).hexdigest() for path, content in contents.items()}
    for path, content in contents.items():
        blobs.put(names[path], [content])

    def pack(**files: str) -> str:
        manifest = encode_manifest(
            [FolderEntry(path=path, size=1, sha256=names[each]) for path, each in files.items()]
        )
        blobs.put(sha256(manifest).hexdigest(), [manifest])
        return sha256(manifest).hexdigest()

    files = tuple(ModelFile(path=path, sha256=names[path], size=5000) for path in ("w", "big"))
    files += (ModelFile(path="labels.txt", sha256=names["labels.txt"], size=7),)
    common = {"project": "default", "main": "w", "created_at": now, "snapshot": ""}
    versions = rows_of(api.app_state.store).models
    await versions.put(ModelVersion(**common, name="m@1", files=files, residency="eu"))
    hidden, shared, labels = pack(renamed="w"), pack(a="big"), pack(labels="labels.txt")
    serve = "{name: s, run: serve, resources: {cpu: 0.1%s}, service: {port: 80%s}}"
    abroad, within = serve % ("", ", residency: us"), serve % ("", ", residency: de")

    async def serve_with(text: str, snapshot: str) -> tuple[int, str]:
        ask = {"text": text, "user": "a", "origin": {"snapshot": snapshot}}
        answer = await api.http.put("/v1/projects/default/services/s", json=ask)
        return answer.status_code, answer.json().get("code", "")

    for text in (serve % ("", ""), abroad, serve % (", regions: [eu, us]", "")):
        for snapshot in (hidden, shared):
            assert await serve_with(text, snapshot) == (403, "residency")
    for text in (within, serve % (", regions: [eu-west-1]", "")):
        assert (await serve_with(text, hidden))[1] != "residency"
    assert (await serve_with(abroad, labels))[1] != "residency"  # many models have such a file
    run = {"text": "{name: j, run: 'true'}", "user": "a", "origin": {"snapshot": hidden}}
    answer = await api.http.post("/v1/projects/default/jobs", json=run)
    assert (answer.status_code, answer.json()["code"]) == (403, "residency")
    assert "m@1, which must not leave eu" in answer.json()["message"]
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    entries = [json.loads(each["text"]) for each in log]
    assert sum(each["code"] == "residency" for each in entries) == 7
    # a version that may go anywhere has the same file: so may the file
    edge_of(api.app_state)._bound.clear()
    await versions.put(ModelVersion(**common, name="m@2", files=files[1:2]))
    assert (await serve_with(abroad, shared))[1] != "residency"
    assert (await serve_with(abroad, hidden))[1] == "residency"


async def test_the_limits_of_a_site_hold_for_all_its_devices(api: Api) -> None:
    _, one = await enrol(api, "one")
    edge, now, data = (
        edge_of(api.app_state),
        api.app_state.now(),
        bytes(range(256)) * 1024,
    )
    digest = sha256(data).hexdigest()
    api.app_state.blobs.of("default").put(digest, [data])
    own = {"project": "default", "created_at": now}
    file = ModelFile(path="m.onnx", sha256=digest, size=len(data))
    await rows_of(api.app_state.store).models.put(
        ModelVersion(**own, name="m@2", snapshot="", files=(file,), main="m.onnx")
    )
    await edge.deploy(Rollout(**own, name="m-0", model="m", to=2, wave_at=now, window=(2, 3)))
    path = "/v1/projects/default/edge/sites/lab"
    for wrong in (
        {"mib_per_s": 0.001},
        {"mib_per_s": 1e9},
        {"window": [1, 99]},
        {"window": [5, 5]},
        {"window": [24, 0]},
        {"mib_per_s": "x"},
        {"device_micros_per_hour": -1},
        {"device_micros_per_hour": 10**13},
        {"device_micros_per_hour": 0.5},
    ):
        assert (await api.http.put(path, json=wrong)).status_code == 422
    assert (await api.http.put(path[:-3] + "A_", json={})).status_code == 403
    limits = {"mib_per_s": 1e3, "window": [1, 5]}
    prices = [{"device_micros_per_hour": each} for each in (7, 0, None)]
    for price in prices:  # former clients do not send the price, which stays then
        await api.http.put(path, json=price)
        found = (await api.http.put(path, json=limits)).json()
        assert found["device_micros_per_hour"] == price["device_micros_per_hour"]
    assert found["mib_per_s"] == 1e3
    [found] = (await api.http.get("/v1/edge/sites")).json()
    assert (found["name"], found["window"]) == ("lab", [1, 5])
    wanted = (await api.http.post(f"{EDGE}/check-in", json={}, headers=one)).json()["models"]
    assert [(each["window"], each["site_window"]) for each in wanted] == [([2, 3], [1, 5])]
    for offset in (0, 1000):
        more = {**one, "Range": f"bytes={offset}-"}
        got = await api.http.get(f"{EDGE}/files/{digest}", headers=more)
        assert (got.status_code, got.content) == (206 if offset else 200, data[offset:])
    assert ("default", "lab") in edge.pace._free_at
    records = await api.app_state.store.audit_records()
    assert any("mib_per_s" in each.text for each in records)


async def read(api: Api, path: str, kind: type[Any]) -> Any:
    return decode((await api.http.get(path)).content, type=kind)


async def test_both_paths_of_a_service_tell_what_they_cost_in_the_same_hours(api: Api) -> None:
    commands, wire = (
        pytest.importorskip(f"cavvy.capabilities.serving.{each}")
        for each in ("services_command", "wire")
    )
    path = "/v1/projects/default/services/s"
    text = "{name: s, run: x, resources: {cpu: 0.1}, service: {port: 80, edge: [{model: m}]}}"
    assert (await api.http.put(path, json={"text": text, "user": "ada"})).status_code == 200
    named = {each: await enrol(api, each) for each in ("one", "two")}
    store, hour = api.app_state.store, timedelta(hours=1)
    (service,) = await api.app_state.control_plane.list_services("default")
    minutes = [int(api.app_state.now().timestamp()) // 60 - each for each in (200, 20, 10)]
    values = {"requests_per_s": [9.0, 5.0, 5.0], "failed_per_s": [0.0, 5.0, 0.0]}
    columns = {name: FigureColumns(low=each, mean=each, high=each) for name, each in values.items()}
    block = FigureBlock(attempt_id=service.id, rank=0, minutes=minutes, columns=columns)
    await store.commit(AtomicWrite(figures=[block]))
    edge = edge_of(api.app_state)
    for name, _ in named.values():  # each has been here for two hours
        row = await rows_of(store).devices.get("default", name)
        await rows_of(store).devices.put(replace(row, enrolled_at=row.enrolled_at - 2 * hour))
    edge._known.clear()

    async def shown(up_s: int, price: int | None = None) -> dict[str, Any]:
        site = {"device_micros_per_hour": price}
        await api.http.put("/v1/projects/default/edge/sites/lab", json=site)
        models = [{"name": "m", "serving": 1, "paths": {"device": {"3": 500}}}]
        models += [{"name": "n", "serving": 1}, {"name": "o"}, {"name": "cavvy.edge", "serving": 3}]
        for _, headers in named.values():
            sent = {"models": models, "up_s": up_s}
            done = await api.http.post(f"{EDGE}/check-in", json=sent, headers=headers)
            assert done.status_code == 200, done.text
        [found] = (await api.http.get(path)).json()["edge"]
        return dict(found)

    assert (await shown(3600))["micros"] is None, "nobody has told the price"
    assert (await shown(0, 12_000))["micros"] is None, "an older program tells no hours"
    found = await shown(3600, 12_000)
    # an hour of two devices, each of which serves a second model; answers of one good minute
    assert (found["micros"], found["answered"], found["window_s"] >= 3600) == (12_000, 1000, True)
    assert (found["cloud_micros"], found["cloud_requests"]) == (0, 300)
    told = dict(
        commands.list_pairs(decode((await api.http.get(path)).content, type=wire.ServedView))
    )
    assert "; $0.0120 per 1,000 answers in the last 1h" in told["device path"], told
    assert "in all, $0.0000 per 1,000 answers in the last 1h" in told["cloud path"], told
    lied = (await shown(1 << 32, 12_000))["micros"]
    assert 24_000 <= lied < 240_000, "no longer than since it enrolled"
    for name, _ in named.values():
        row = await rows_of(store).devices.get("default", name)
        await rows_of(store).devices.put(replace(row, enrolled_at=row.enrolled_at - 960 * hour))
    edge._known.clear()
    found, days = await shown(1 << 32, 12_000), 86_400
    assert (found["window_s"] > 39 * days, found["cloud_window_s"]) == (True, 30 * days)
    told = dict(
        commands.list_pairs(decode((await api.http.get(path)).content, type=wire.ServedView))
    )
    assert "in the last 40d" in told["device path"], told
    assert "in the last 30d" in told["cloud path"], told
    assert (await shown(3600, 0))["micros"] == 0
    await shown(3600)
    told = dict(
        commands.list_pairs(decode((await api.http.get(path)).content, type=wire.ServedView))
    )
    assert "cost unknown" in told["device path"], told
    wrong = {"up_s": -1}, {"up_s": 1 << 60}, {"up_s": 0.5}, {"up_s": "x"}
    for sent in wrong:
        answer = await api.http.post(f"{EDGE}/check-in", json=sent, headers=named["one"][1])
        assert answer.status_code == 422, sent


async def test_a_device_learns_of_those_of_its_site_that_have_what_it_wants(api: Api) -> None:
    edge, now = edge_of(api.app_state), api.app_state.now()
    named = {each: await enrol(api, each) for each in ("first", "second", "liar", "closed")}
    named["far"] = await enrol(api, "far", "away")
    own = {"project": "default", "created_at": now}
    await rows_of(api.app_state.store).models.put(
        ModelVersion(**own, name="m@2", snapshot="", files=(), main="")
    )
    await edge.deploy(Rollout(**own, name="m-0", model="m", to=2, wave_at=now, waves=(1.0,)))

    async def check_in(
        name: str, share: str, serving: int = 1, refused: int = 0
    ) -> tuple[bool, list[str], str]:
        model = {"name": "m", "serving": serving, "refused": refused}
        sent = {"share": share, "models": [model]}
        answer = await api.http.post(f"{EDGE}/check-in", json=sent, headers=named[name][1])
        told = answer.json()
        return told["models"][0]["wait"], told["peers"]["at"]["m"], told["peers"]["key"]

    wait, at, key = await check_in("first", "10.0.0.1:8090")
    assert (wait, at) == (False, []), "it fetches for the site"
    assert await check_in("second", "10.0.0.2:8090") == (True, [], key)
    assert await check_in("closed", "") == (False, [], key), "it could take from no other"
    far = await check_in("far", "10.0.0.9:8090")
    assert far[:2] == (False, [])
    assert far[2] != key
    for share in (
        "8.8.8.8:8090",
        "169.254.169.254:8080",
        "0.0.0.0:8090",
        "127.0.0.1:8090",
        "[::ffff:7f00:1]:8090",
    ):
        await check_in("liar", share, 2)
        assert await check_in("second", "10.0.0.2:8090") == (True, [], key), share
    for share in ("10.0.0.1:22", "10.0.0.1", "router:8090", "10.0.0.1:x", "[::1", ":"):
        await check_in("liar", share, 2)
        assert await check_in("second", "10.0.0.2:8090") == (True, [], key), share
    for share in ("10.0.0.3:8090", ""):  # it gives files no longer
        await check_in("liar", share, int(not share) + 1)
        assert await check_in("second", "10.0.0.2:8090") == (True, [], key), share
    await check_in("first", "10.0.0.1:8090", refused=2)
    assert await check_in("second", "10.0.0.2:8090") == (False, [], key), "its turn"
    assert await check_in("first", "10.0.0.1:8090", 2) == (False, [], key)
    assert await check_in("second", "10.0.0.2:8090") == (False, ["10.0.0.1:8090"], key)
    assert (await check_in("far", "10.0.0.9:8090"))[1] == []
    await edge.retire("default", named["first"][0])
    assert (await check_in("second", "10.0.0.2:8090"))[1] == []


def test_a_site_waits_for_few_of_its_devices() -> None:
    async def play() -> None:
        clock = VirtualClock(datetime(2030, 1, 1, tzinfo=UTC))
        edge = EdgeService(MemoryStore(), clock, lambda *_: None)
        own = {"project": "p", "site": "lyon", "key": "0" * 64, "enrolled_at": clock.now()}
        devices = [EdgeDevice(name=f"d{each}", **own) for each in range(9)]
        model = ModelVersion(
            project="p", name="m@2", snapshot="", files=(), main="", created_at=clock.now()
        )
        begun, turns = clock.now(), []
        while len(turns) < len(devices):
            for each in devices:
                if each.name not in turns and edge._may_fetch(each, model, clock.now(), {}):
                    turns.append(each.name)
            minutes = (clock.now() - begun) / timedelta(minutes=1)
            assert minutes < 31, "devices that never have it hold the others up"
            await clock.sleep_until(clock.now() + timedelta(minutes=1))

    run_virtual(play())


@pytest.mark.parametrize("opens", [6, 100])
def test_turns_outside_the_hours_of_a_site_do_not_count_for_a_day(opens: int) -> None:
    async def play() -> None:
        store, clock = MemoryStore(), VirtualClock(datetime(2030, 1, 1, tzinfo=UTC))
        edge, begun = EdgeService(store, clock, lambda *_: None), clock.now()
        own = {"project": "p", "site": "lyon", "key": "0" * 64, "enrolled_at": begun}
        devices = [EdgeDevice(name=f"d{each}", **own) for each in range(9)]
        for each in devices:
            await rows_of(store).devices.put(each)
        model = await rows_of(store).models.put(
            ModelVersion(project="p", name="m@2", snapshot="", files=(), main="", created_at=begun)
        )
        await rows_of(store).rollouts.put(replace(make_done(2, begun), project="p"))

        def list_free() -> list[EdgeDevice]:
            return [each for each in devices if edge._may_fetch(each, model, clock.now(), {}, True)]

        while len(may := list_free()) == 1 and clock.now() - begun < timedelta(hours=opens):
            await clock.sleep_until(clock.now() + timedelta(minutes=5))
        if opens > 24:
            assert (len(may), (clock.now() - begun).days) == (len(devices), 1)
            return
        for left in (1, 1, len(devices)):  # some begin, and never end
            assert len(may) == 1
            await edge.manifest_for("p", may[0].name, "m", "2")
            await clock.sleep_until(clock.now() + timedelta(minutes=11))
            may = list_free()
            assert len(may) == left

    run_virtual(play())


def test_a_device_with_many_connections_gets_no_more_of_its_site_than_another() -> None:
    order = []

    async def play() -> None:
        clock = VirtualClock(datetime(2030, 1, 1, tzinfo=UTC))
        pace, begun = SitePace(clock), clock.now()

        async def fetch(device: str) -> None:
            turn = pace.turn_of("p", device)
            for _ in range(4):
                await pace.wait(turn, ("p", "s"), 2**20, 1.0)
                order.append((device, round((clock.now() - begun).total_seconds())))

        await asyncio.gather(*(fetch(each) for each in ["greedy"] * 6 + ["honest"]))
        assert not pace._turns

    run_virtual(play())
    assert [at for _, at in order] == list(range(28)), "a MiB in each second"
    assert max(at for device, at in order if device == "honest") <= 8


async def test_devices_get_the_program_of_the_server_like_a_model(api: Api) -> None:
    _, headers = await enrol(api, "one")

    async def deploy(**more: object) -> tuple[int, dict[str, Any]]:
        ask = {"model": "cavvy.edge", "soak_s": 0, **more}
        answer = await api.http.post("/v1/projects/default/rollouts", json=ask)
        return answer.status_code, answer.json()

    async def check_in(*models: dict[str, Any]) -> dict[str, Any]:
        answer = await api.http.post(f"{EDGE}/check-in", json={"models": models}, headers=headers)
        return dict(answer.json())

    assert (await check_in())["program"] is None
    status, made = await deploy()
    assert (status, made["to"]) == (201, 1)
    told = await check_in()
    # a program that knows nothing of this key must not refuse the answer for a model's name
    assert (told["models"], told["program"]["number"]) == ([], 1)
    signed = (await api.http.get(f"{EDGE}/manifests/cavvy.edge/1", headers=headers)).json()
    path = f"{EDGE}/files/{signed['files'][0]['sha256']}"
    assert (await api.http.get(path, headers=headers)).content == pack_device()
    # the same bytes are the same version; a version that was not made is none
    assert (await deploy())[1]["to"] == 1
    assert (await deploy(to=2))[0] == 404
    assert (await deploy(site="nowhere"))[0] == 422
    # what a member publishes never becomes the program
    name = sha256(b"evil").hexdigest()
    blobs = api.app_state.blobs.of("default")
    manifest = encode_manifest([FolderEntry(path="program.zip", size=4, sha256=name)])
    snapshot = sha256(manifest).hexdigest()
    blobs.put(name, [b"evil"])
    blobs.put(snapshot, [manifest])
    ask = {"name": "cavvy.edge", "snapshot": snapshot, "main": "program.zip"}
    answer = await api.http.post("/v1/projects/default/models", json=ask)
    assert (answer.status_code, answer.json()["code"]) == (422, "model-refused")
    # a device that refuses it halts the rollout
    refused = {"name": "cavvy.edge", "serving": 0, "refused": 1, "problem": "it did not check in"}
    await check_in(refused)
    await edge_of(api.app_state).reconcile("edge:default")
    newest = (await api.http.get("/v1/rollouts")).json()[0]
    assert (newest["phase"], newest["refused"]) == ("halted", 1)
    assert "it did not check in" in newest["reason"]
    assert (await check_in())["program"] is None
    # packages do not bring a program; later versions keep the packages
    assert (await deploy(packages=snapshot))[0] == 422
    wheel = FolderEntry(path="packages/a-1-py3-none-any.whl", size=4, sha256=name)
    manifest = encode_manifest([wheel])
    blobs.put(packages := sha256(manifest).hexdigest(), [manifest])
    assert (await deploy(packages=packages, to=1))[0] == 422
    assert (await deploy(packages=packages, model="m"))[0] == 422
    assert (await deploy(packages="0" * 64))[0] == 404
    assert (await deploy(packages=packages))[1]["to"] == 2
    assert (await deploy())[1]["to"] == 2
    signed = (await api.http.get(f"{EDGE}/manifests/cavvy.edge/2", headers=headers)).json()
    assert [each["path"] for each in signed["files"]] == ["program.zip", wheel.path]
    assert (await api.http.get(f"{EDGE}/files/{name}", headers=headers)).content == b"evil"


async def test_a_token_needs_the_key_of_the_device_and_ends(api: Api) -> None:
    name, headers = await enrol(api, "box")
    other = Ed25519PrivateKey.generate()

    async def ask(nonce: str, signed: str) -> int:
        proof = {"project": "default", "device": name, "nonce": nonce}
        proof["signature"] = other.sign(signed.encode()).hex()
        answer = await api.http.post(f"{EDGE}/token", json=proof, headers={"Authorization": ""})
        return int(answer.status_code)

    nonce = (await api.http.get(f"{EDGE}/nonce")).json()["nonce"]
    assert await ask(nonce, nonce) == 401  # signed by another key
    assert await ask(headers["Authorization"].split()[1], nonce) == 401  # a token is no nonce
    as_token = {"Authorization": f"Bearer {nonce}"}  # and a nonce is no token
    assert (await api.http.post(f"{EDGE}/check-in", json={}, headers=as_token)).status_code == 403
    assert (await api.http.post(f"{EDGE}/check-in", json={}, headers=headers)).status_code == 200
    later = api.app_state.now() + timedelta(days=1, seconds=1)
    api.app_state.now = lambda: later
    assert (await api.http.post(f"{EDGE}/check-in", json={}, headers=headers)).status_code == 403


async def test_a_device_gets_no_service_that_would_be_on_itself(api: Api) -> None:
    _, headers = await enrol(api, "box")
    edge = edge_of(api.app_state)
    text = "{name: s, run: x, resources: {cpu: 1}, service: {edge: {model: m}}}"
    task = replace(parse_task(text, options=ReadOptions(serves=True)), project="default")
    for own, url, given in (
        ("https://203.0.113.5:7443", "http://127.0.0.1:8081/default/s", False),
        ("https://203.0.113.5:7443", "http://0.0.0.0:8081/default/s", False),
        ("https://203.0.113.5:7443", "https://203.0.113.5:8081/default/s", True),
        ("https://127.0.0.1:7443", "http://127.0.0.1:8081/default/s", True),
    ):
        api.app_state.node_endpoint = own

        async def list_services(project: str, url: str = url) -> list[KnownService]:
            return [KnownService(id="s", task=task, url=url)]

        edge._list_services = list_services
        edge._known.clear()
        answer = await api.http.post(f"{EDGE}/check-in", json={}, headers=headers)
        assert [each["url"] for each in answer.json()["clouds"]] == [url] * given


async def test_a_report_that_is_not_written_yet_outlives_a_change(api: Api) -> None:
    _, headers = await enrol(api, "box", "lab")
    told = {"models": [{"name": "m", "serving": 7}]}
    answer = await api.http.post(f"{EDGE}/check-in", json=told, headers=headers)
    assert answer.status_code == 200
    await edge_of(api.app_state).limit_site(EdgeSite(project="default", name="lab"))
    await edge_of(api.app_state).find_clouds("default", "box")  # reads the rows again
    stored = await rows_of(api.app_state.store).devices.get("default", "box")
    assert [each.serving for each in stored.report.models] == [7]


async def test_a_fault_of_a_route_that_fastapi_does_not_call_is_told_in_the_usual_form(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a fault")

    _, headers = await enrol(api, "one")
    monkeypatch.setattr(edge_of(api.app_state), "check_in", fail)
    answer = await api.http.post(f"{EDGE}/check-in", json={}, headers=headers)
    assert answer.status_code == 500
    assert answer.json()["code"] == "internal"
    assert "ZeroDivisionError in POST /edge/v1/check-in" in answer.json()["message"]


async def test_labels_and_keys_are_changed_with_an_entry_in_the_audit_log(api: Api) -> None:
    own = {"project": "default", "created_at": api.app_state.now()}
    for number in (1, 2):
        await rows_of(api.app_state.store).models.put(
            ModelVersion(**own, name=f"m@{number}", snapshot="", files=(), main="")
        )
    path = "/v1/projects/default/models/m/labels/production"
    answers = [await api.http.put(path, json={"number": number}) for number in (1, 2, 3)]
    assert [each.status_code for each in answers] == [200, 200, 404]
    assert answers[1].json() == {"name": "m@2", "former": "m@1"}
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    entries = [json.loads(each["text"]) for each in log]
    moves = [each for each in entries if "labels" in each["action"] and each["outcome"] == "done"]
    assert [(each.get("before"), each["after"]["model"]) for each in moves] == [
        (None, "m@1"),
        ({"model": "m@1"}, "m@2"),
    ]
    ask = {"model": "m", "label": "production", "site": "lab"}
    assert (await api.http.post("/v1/projects/default/rollouts", json=ask)).status_code == 422
    await enrol(api, "one")
    made = await api.http.post("/v1/projects/default/rollouts", json=ask)
    assert (made.status_code, made.json()["to"]) == (201, 2)
    answers = [await api.http.delete(path) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 404]
    assert answers[0].json() == {"name": "", "former": "m@2"}
    assert (await api.http.post("/v1/projects/default/rollouts", json=ask)).status_code == 404
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    entries = [json.loads(each["text"]) for each in log]
    taken = [each for each in entries if each["action"].startswith("DELETE") and each["before"]]
    assert [each["before"] for each in taken] == [{"model": "m@2"}]
    missing = await api.http.get("/v1/projects/default/edge/lists")
    assert (missing.status_code, missing.json()["code"]) == (404, "model-not-found")
    assert (await api.http.post("/v1/projects/default/edge/keys")).status_code == 200


class Publisher:
    """A user who publishes models and changes the signed lists."""

    project = "/v1/projects/default"

    def __init__(self, api: Api) -> None:
        self.api = api
        blobs, weights = api.app_state.blobs.of("default"), sha256(b"weights").hexdigest()
        snapshot = encode_manifest([FolderEntry(path="m.onnx", size=7, sha256=weights)])
        self.snapshot = sha256(snapshot).hexdigest()
        blobs.put(weights, [b"weights"])
        blobs.put(self.snapshot, [snapshot])

    async def publish(self, name: str) -> Any:
        ask = {"name": name, "snapshot": self.snapshot}
        return await self.api.http.post(f"{self.project}/models", json=ask)

    async def read(self) -> tuple[ListChange, dict[str, str]]:
        path = f"{self.project}/edge/lists"
        told = (await self.api.http.get(path, params={"model": "m"})).json()
        return ListChange(told["lists"], told["held"]), told["unsigned"]

    async def put(self, change: ListChange) -> Any:
        lists, keys = change.result()
        ask = {"lists": lists, "keys": keys}
        return await self.api.http.put(f"{self.project}/edge/lists", json=ask)


async def test_a_device_goes_on_anywhere_in_a_file_that_is_stored_as_chunks(api: Api) -> None:
    _, headers = await enrol(api, "one")
    user, blobs = Publisher(api), api.app_state.blobs.of("default")
    content = Random(1).randbytes(2 * CHUNK) + b"the next chunk"
    name = sha256(content).hexdigest()
    snapshot = encode_manifest([FolderEntry(path="m.onnx", size=len(content), sha256=name)])
    user.snapshot = sha256(snapshot).hexdigest()
    blobs.put_all({name: content, user.snapshot: snapshot})
    assert blobs.path(name) is not None
    for _ in range(2):
        assert (await user.publish("m")).status_code == 201
        assert blobs.path(name) is None
    await rows_of(api.app_state.store).rollouts.put(make_done(1, api.app_state.now()))
    for start in (0, 5, CHUNK - 1, CHUNK, len(content) - 1):
        wanted = {**headers, "Range": f"bytes={start}-"}
        answer = await api.http.get(f"{EDGE}/files/{name}", headers=wanted)
        assert answer.status_code == (206 if start else 200), start
        assert answer.content == content[start:]
    answer = await api.http.get(f"/v1/projects/default/blobs/{name}")
    assert answer.content == content
    # a chunk is no file that a device or a member can ask for
    chunk = sha256(content[-14:]).hexdigest()
    for path, more in ((f"{EDGE}/files/{chunk}", headers), (f"{user.project}/blobs/{chunk}", None)):
        assert (await api.http.get(path, headers=more)).status_code == 404
    [damaged] = blobs._root.glob(f"*/{chunk}.chunk")
    damaged.write_bytes(b"THE NEXT CHUNK")
    answer = await api.http.get(f"{EDGE}/files/{name}", headers=wanted)
    assert (answer.status_code, str(damaged) in answer.text) == (404, False)
    assert "damaged" in answer.text


@pytest.mark.parametrize("call", ["stat", "open"])
async def test_a_file_that_is_replaced_by_chunks_while_a_request_begins_is_sent(
    api: Api, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    blobs, content = api.app_state.blobs.of("default"), Random(1).randbytes(CHUNK + 1)
    name = sha256(content).hexdigest()
    for start in (0, 9):
        blobs.put(name, [content])
        path = blobs.path(name)
        if path is None:  # the former turn stored it as chunks
            [listed] = blobs._root.glob(f"*/{name}.chunks")
            listed.unlink()
            blobs.put(name, [content])
            path = blobs.path(name)
        real = FileResponse.__call__ if call == "stat" else FileResponse._open_file

        def divide(self: FileResponse, *rest: Any, real: Any = real) -> Any:
            monkeypatch.undo()
            assert blobs.split(name, lambda _: [])
            return real(self, *rest)

        monkeypatch.setattr(FileResponse, real.__name__, divide)
        wanted = {"Range": f"bytes={start}-"} if start else {}
        answer = await api.http.get(f"/v1/projects/default/blobs/{name}", headers=wanted)
        assert (answer.status_code, blobs.path(name)) == (206 if start else 200, None)
        assert answer.content == content[start:]


async def test_a_version_that_the_key_of_its_model_has_not_signed_reaches_no_device(
    api: Api, tmp_path: Path
) -> None:
    user = Publisher(api)
    project, publish, read, put = user.project, user.publish, user.read, user.put
    await enrol(api, "one")
    team, owner = (make_key(tmp_path / each, "") for each in ("team", "owner"))
    assert (await publish("m")).json()["signed"]
    change, unsigned = await read()
    assert not unsigned
    text = change.result()[0] or {"model-m": "{}"}
    refused = await api.http.put(f"{project}/models/m/list", json={"list": text["model-m"]})
    assert refused.status_code == 422, "the server's own models are signed by no user"
    change.set_key("m", team, None)
    assert (await put(change)).json()["keys"]["model-m"] == team.key_id
    assert (await put(change)).status_code == 422, "sent twice"
    assert not (await publish("m")).json()["signed"]
    listed = (await api.http.get("/v1/models")).json()
    assert {each["name"]: each["signed"] for each in listed} == {"m@1": True, "m@2": False}
    rollout = {"model": "m", "to": 2, "site": "lab"}
    label = f"{project}/models/m/labels/production"
    for _ in range(2):
        answer = await api.http.post(f"{project}/rollouts", json=rollout)
        assert (answer.status_code, "is not signed" in answer.text) == (422, True)
        answer = await api.http.put(label, json={"number": 2})
        assert (answer.status_code, "is not signed" in answer.text) == (422, True)
        for wrong in ("", "{}", "\0", "[" * 10_000, json.dumps({"signed": {}, "signatures": 1})):
            answer = await api.http.put(f"{project}/models/m/list", json={"list": wrong})
            assert (answer.status_code, answer.json()["code"]) == (422, "model-refused"), wrong
            answer = await api.http.put(f"{project}/edge/lists", json={"lists": {"root": wrong}})
            assert (answer.status_code, answer.json()["code"]) == (422, "model-refused"), wrong
    change, unsigned = await read()
    change.sign_version("m", "m/2.json", unsigned["m/2.json"].encode(), team)
    signed = {"list": change.result()[0]["model-m"]}
    assert (await api.http.put(f"{project}/models/m/list", json=signed)).status_code == 200
    assert (await api.http.put(label, json={"number": 2})).status_code == 200
    assert (await api.http.post(f"{project}/rollouts", json=rollout)).status_code == 201
    change, _ = await read()
    change.take_keys(owner, None)
    taken = await put(change)
    assert taken.json()["keys"]["root"] == taken.json()["keys"]["targets"] == owner.key_id
    answer = await publish("new")
    assert (answer.status_code, "cavvy model key set new" in answer.text) == (422, True)
    assert (await api.http.post(f"{project}/edge/keys")).status_code == 422
    stored = await rows_of(api.app_state.store).repositories.get("default", "models")
    assert sorted(stored.keys) == ["snapshot", "timestamp"]
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    entries = [json.loads(each["text"]) for each in log]
    changes = [each for each in entries if each["action"].endswith("/edge/lists")]
    done = [each for each in changes if each["outcome"] == "done"]
    assert [each["after"]["key of root"] == owner.key_id for each in done] == [False, True]
    assert [each["after"]["key of model-m"] for each in done] == [team.key_id] * 2
    assert "PRIVATE" not in json.dumps(entries)


async def change(api: Api, status: int = 200, **ask: Any) -> Any:
    answer = await api.http.post("/v1/projects/default/edge/settings", json=ask)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_device_gets_its_settings_and_secrets_and_no_other_one_does(api: Api) -> None:
    async def give(headers: dict[str, str], status: int = 200) -> Any:
        answer = await api.http.get(f"{EDGE}/settings", headers=headers)
        assert answer.status_code == status, answer.text
        assert status != 200 or answer.headers["cache-control"] == "no-store"
        return answer.json()

    async def check_in(headers: dict[str, str], **report: Any) -> str:
        answer = await api.http.post(f"{EDGE}/check-in", json=report, headers=headers)
        return str(answer.json()["settings"])

    one, mine = await enrol(api, "one", "lyon")
    other, theirs = await enrol(api, "other", "oslo")
    await api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": "hush-hush"})
    assert (await check_in(mine), (await give(mine))["variables"]) == ("", {})
    made = await change(api, site="lyon", values={"every_s": "30", "A": "plain"}, secrets=["TOKEN"])
    assert (made["devices"], made["too_old"], made["secrets"]) == (1, 1, ["TOKEN"])
    first = await check_in(mine, settings="", settings_problem="x" * 10**5)
    given = await give(mine)
    assert given == {
        "revision": first,
        "options": {"every_s": 30.0},
        "variables": {"A": "plain"},
        "secrets": {"TOKEN": "hush-hush"},
    }
    await change(api, device=one, values={"A": "own"})
    assert (await give(mine))["variables"] == {"A": "own"}
    assert (await check_in(theirs), (await give(theirs))["secrets"]) == ("", {})
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer x.y"}):
        await give(headers, 401 if "Bearer" not in headers["Authorization"] else 403)
    path = f"/v1/projects/default/edge/devices/{one}"
    shown = (await api.http.get(f"{path}/settings")).json()
    found = {each["name"]: (each["value"], each["source"]) for each in shown["settings"]}
    assert found == {
        "A": ("own", f"device/{one}"),
        "TOKEN": ("", "site/lyon"),
        "every_s": ("30", "site/lyon"),
    }
    assert (shown["used"], len(shown["problem"])) == ("", 500)
    before = await check_in(mine)
    for value in ("changed", "changed"):  # another value, or the same one set anew
        await api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": value})
        assert await check_in(mine) != before
        before = await check_in(mine)
        assert (await give(mine))["secrets"] == {"TOKEN": "changed"}
    await api.http.delete("/v1/projects/default/secrets/TOKEN")
    assert await check_in(mine) != before
    assert (await give(mine))["secrets"] == {}
    shown = (await api.http.get(f"{path}/settings")).json()["settings"]
    assert [each["name"] for each in shown if each["missing"]] == ["TOKEN"]
    await api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": "hush-hush"})
    assert (await api.http.delete(path)).json()["variables"] == ["TOKEN"]
    assert (await give(mine, 403))["code"] == "enrolment-refused"
    for each in ("/v1/audit-log", "/v1/edge/settings", "/v1/edge/devices", path):
        assert "hush" not in (await api.http.get(each)).text, each
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    entries = [json.loads(each["text"]) for each in log]
    entries = [each for each in entries if each["action"].endswith("/edge/settings")]
    told = {"for": "site/lyon", "set": ["A", "every_s"], "secrets": ["TOKEN"]}
    assert told in [each["after"] for each in entries]
    assert "plain" not in str(entries)
    assert "own" not in str(entries)
    assert other not in str(await rows_of(api.app_state.store).settings.list())


async def test_a_secret_whose_key_is_lost_keeps_no_other_one_on_a_device(api: Api) -> None:
    _, mine = await enrol(api, "one", "lyon")
    for each in ("TOKEN", "KEY"):
        await api.http.put(f"/v1/projects/default/secrets/{each}", json={"value": each})
    await change(api, site="lyon", secrets=["TOKEN", "KEY"])
    store = api.app_state.store
    secret, _ = sorted(await store.secrets("default"), key=lambda each: each.name)
    assert await store.reseal_secret(secret, secret.sealed.replace(b"aes-", b"aes+", 1))
    revisions = []
    for known in ({"TOKEN": "TOKEN"}, {}):
        answer = await api.http.post(f"{EDGE}/check-in", json={}, headers=mine)
        given = (await api.http.get(f"{EDGE}/settings", headers=mine)).json()
        assert (given["secrets"], given["undecrypted"]) == (known, ["KEY"])
        revisions += [answer.json()["settings"], given["revision"]]  # unequal: it asks again
        await api.http.delete("/v1/projects/default/secrets/TOKEN")
    assert len({*revisions}) == 4


WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "range": ({"values": {"every_s": "5"}}, "every_s is '5'; expected a number from 10 to 480"),
    "number": ({"values": {"every_s": "nan"}}, "expected a number"),
    "huge": ({"values": {"spool_mib": "1e999"}}, "expected a number"),
    "text": ({"values": {"look_s": "a\0"}}, "expected a number"),
    "local": ({"values": {"engine": "sh"}}, "there is no setting 'engine'"),
    "listen": ({"values": {"listen": "0.0.0.0:80"}}, "there is no setting 'listen'"),
    "misspelt": ({"values": {"evry_s": "30"}}, "there is no setting 'evry_s'; expected every_s"),
    "share": ({"values": {"share": "0.0.0.0:80"}}, "a port from 1024"),
    "preload": ({"values": {"LD_PRELOAD": "x"}}, "LD_PRELOAD cannot be set"),
    "python": ({"values": {"PYTHONSTARTUP": "x"}}, "PYTHONSTARTUP cannot be set"),
    "path": ({"values": {"PATH": "x"}}, "PATH cannot be set"),
    "own": ({"values": {"CAVVY_EDGE_TOKEN": "x"}}, "cannot be set"),
    "name": ({"values": {"A B": "x"}}, "cannot be a variable"),
    "nul": ({"values": {"A": "x\0"}}, "without NUL"),
    "long": ({"values": {"A": "x" * 5000}}, "at most 4,096 characters"),
    "many": ({"values": {f"V{number}": "x" for number in range(70)}}, "expected at most 64"),
    "large": ({"values": {f"V{number}": "x" * 4000 for number in range(9)}}, "32,768"),
    "none": ({}, "nothing is to be changed"),
    "twice": ({"values": {"A": "x"}, "secrets": ["A"]}, "named twice"),
    "unset": ({"unset": ["GONE"]}, "GONE is not set there"),
    "two": ({"values": {"A": "x"}, "label": "a=b"}, "expected one of"),
    "label": ({"values": {"A": "x"}, "site": "", "label": "=b"}, "must be NAME=VALUE"),
    "selector": ({"values": {"A": "x"}, "site": "l\0"}, "not printable"),
    "site": ({"values": {"A": "x"}, "site": "../x"}, "must have 1 to 63 characters"),
}


@pytest.mark.parametrize(("ask", "told"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
async def test_settings_that_no_device_could_use_are_refused_before_they_are_stored(
    api: Api, ask: dict[str, Any], told: str
) -> None:
    assert told in str(await change(api, 422, **{"site": "lyon", **ask}))
    assert not await rows_of(api.app_state.store).settings.list()


async def test_settings_name_devices_and_secrets_that_exist(api: Api) -> None:
    name, _ = await enrol(api, "one")
    assert (await change(api, 404, device="gone", values={"A": "x"}))["code"] == "device-not-found"
    assert (await change(api, 404, device=name, secrets=["GONE"]))["code"] == "secret-not-found"
    await change(api, device=name, values={"A": "x"})
    await change(api, device=name, unset=["A"])
    assert not await rows_of(api.app_state.store).settings.list()
