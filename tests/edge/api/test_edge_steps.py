"""Steps of a graph of jobs that the server does with models of devices."""

import json
from hashlib import sha256
from typing import Any

import pytest
from tests.api.api.test_api_accounts import add, call
from tests.api.api_state import Api, make_key, until
from tests.edge.api.test_hostile_devices import EDGE, enrol
from tests.edge.rig import edge_of, rows_of

from cavvy.capabilities.models.nouns import ModelFile, ModelVersion
from cavvy.capabilities.models.registry import ModelRefused, ModelRegistry
from cavvy.capabilities.models.repository import list_targets
from cavvy.domain.values import replace
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.base import AtomicWrite
from cavvy.store.blobs import read_manifest

JOBS = "/v1/projects/default/jobs"
LATE = "schedule: 2099-01-01T00:00Z"


async def submit(api: Api, *texts: str) -> None:
    ask = {"tasks": [{"text": each} for each in texts], "keys": [make_key() for _ in texts]}
    answer = await api.http.post("/v1/projects/default/job-graphs", json=ask)
    assert answer.status_code == 201, answer.text


async def ended(api: Api, name: str) -> tuple[str, str]:
    async def look() -> tuple[str, str] | None:
        job = (await api.http.get(f"{JOBS}/{name}")).json()
        return (job["phase"], job["reason"]) if job["phase"] in ("done", "failed") else None

    found: tuple[str, str] = await until(look)
    return found


async def put_model(api: Api, number: int, step: str = "") -> None:
    name = sha256(b"weights").hexdigest()
    api.app_state.blobs.of("default").put(name, [b"weights"])
    model = ModelVersion(
        project="default",
        name=f"m@{number}",
        snapshot="0" * 64,
        files=(ModelFile(path="m.onnx", sha256=name, size=7),),
        main="m.onnx",
        step=step,
        created_at=api.app_state.now(),
    )
    await rows_of(api.app_state.store).models.put(model)


async def report(api: Api, headers: dict[str, str], **model: Any) -> None:
    told = {"models": [{"name": "m", **model}]}
    answer = await api.http.post(f"{EDGE}/check-in", json=told, headers=headers)
    assert answer.status_code == 200, answer.text


async def test_a_deployment_ends_with_its_rollout(api: Api) -> None:
    _, headers = await enrol(api, "box", "lab")
    await put_model(api, 1)
    deploy = "edge: {deploy: m, site: lab, soak: 0, waves: [1]}"
    cases = (("good", {"serving": 2}), ("bad", {"serving": 2, "refused": 3}))
    for version, (name, serving) in enumerate(cases, 2):
        await put_model(api, version)
        await submit(
            api, f"{{name: {name}, {deploy}}}", f"{{name: {name}-x, run: x, after: {name}}}"
        )

        async def is_running(name: str = name) -> bool:
            job = (await api.http.get(f"{JOBS}/{name}")).json()
            return "wave 1 of 1" in job["reason"]

        assert await until(is_running)
        rollout = (await api.http.get("/v1/rollouts")).json()[0]
        number = int(rollout["name"].rpartition("-")[2])
        more = {"refused_in": number, "problem": "ended"} if "refused" in serving else {}
        await report(api, headers, **serving, **more)
        phase, reason = await ended(api, name)
        expected = ("done", "is done") if name == "good" else ("failed", "halted: 1 of 1 devices")
        assert (phase, expected[1] in reason) == (expected[0], True), reason
        assert rollout["to"] == version

    async def find_end() -> str | None:
        job = (await api.http.get(f"{JOBS}/bad-x")).json()
        return job["reason"] if job["phase"] == "stopped" else None

    told = "did not start: it starts after bad succeeds, but bad failed"
    assert await until(find_end) == told
    await submit(api, "{name: none, edge: {deploy: m, site: nowhere}}")
    assert "no device is meant" in (await ended(api, "none"))[1]
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    entries = [json.loads(each["text"]) for each in log]
    steps = [each for each in entries if each["action"] == "edge step deploy"]
    found = {each["target"]["job"]: (each["outcome"], each["after"].get("to")) for each in steps}
    assert found == {"good": ("done", 2), "bad": ("done", 3), "none": ("refused", 3)}


async def test_samples_come_to_the_jobs_that_wait_for_them(api: Api) -> None:
    _, headers = await enrol(api, "box", "lab")
    _, abroad = await enrol(api, "far", "lab")
    devices = rows_of(api.app_state.store).devices
    far = await devices.get("default", "far")
    await devices.put(replace(far, labels={"residency": "us"}))
    edge_of(api.app_state)._known.clear()

    async def send(to: dict[str, str], *numbers: int) -> None:
        samples = [
            {"number": each, "model": "m", "request": {"a": [each]}, "device": "another"}
            for each in numbers
        ]
        answer = await api.http.post(f"{EDGE}/samples", json={"samples": samples}, headers=to)
        assert answer.status_code == 204, answer.text

    await send(headers, 1)
    await submit(
        api,
        "{name: get, edge: {collect: m, samples: 2, into: data/new.jsonl}}",
        f"{{name: train, run: x, after: get, {LATE}}}",
    )
    await send(abroad, 1, 2, 3)  # which do not count
    await send(headers, 2)

    async def is_waiting() -> bool:
        reason = (await api.http.get(f"{JOBS}/get")).json()["reason"]
        return bool(reason == "1 of 2 samples of m")

    assert await until(is_waiting)
    await send(headers, 3)
    assert (await ended(api, "get"))[0] == "done"
    job = await api.app_state.store.find_job("default", "train")
    blobs = api.app_state.blobs.of("default")
    [entry] = read_manifest(blobs, job.origin.snapshot or "").files
    assert entry.path == "data/new.jsonl"
    with blobs.open(entry.sha256 or "") as file:
        lines = [json.loads(each) for each in file.read().splitlines()]
    assert [each["request"]["a"] for each in lines] == [[1], [2], [3]]
    assert {each["device"] for each in lines} == {"box"}
    await submit(
        api,
        "{name: us, edge: {collect: m, residency: us, into: new.jsonl}}",
        f"{{name: anywhere, run: x, after: us, {LATE}}}",
    )
    await send(abroad, 4)
    phase, reason = await ended(api, "us")
    assert phase == "failed"
    assert "must not leave us, but anywhere could run elsewhere" in reason


async def test_collected_samples_do_not_leave_their_place_in_a_repeated_job(api: Api) -> None:
    _, headers = await enrol(api, "box", "lab")
    await submit(
        api,
        "{name: get, edge: {collect: m, into: new.jsonl}}",
        f"{{name: train, run: x, after: get, {LATE}}}",
    )
    sample = {"number": 1, "model": "m", "request": {}}
    await api.http.post(f"{EDGE}/samples", json={"samples": [sample]}, headers=headers)
    assert (await ended(api, "get"))[0] == "done"
    store = api.app_state.store
    got, train = [await store.find_job("default", each) for each in ("get", "train")]
    assert got.task.edge is not None
    step = replace(got.task.edge, residency="us")  # no offer of the tests is there
    await store.commit(AtomicWrite(jobs=[replace(got, task=replace(got.task, edge=step))]))
    await api.http.post(f"{JOBS}/train/stop")
    answer = await api.http.post(f"{JOBS}/train/retry", json={"resources": {"cpu": 1}})
    assert (answer.status_code, answer.json()["code"]) == (403, "residency"), answer.text
    assert "the samples of get, which must not leave us" in answer.json()["message"]
    blobs = api.app_state.blobs.of("default")
    blobs.put(sha256(other := encode_manifest([])).hexdigest(), [other])
    given, empty = train.origin.snapshot, sha256(other).hexdigest()
    for text, origin, code in (
        ("", {"snapshot": given, "rerun_of": train.id}, "residency"),
        ("after: get", {"snapshot": given}, "residency"),
        ("resources: {regions: us}", {"snapshot": given, "rerun_of": train.id}, "no-offer"),
        ("after: get", {"snapshot": empty}, None),
        ("", {"snapshot": given, "rerun_of": "gone"}, None),
    ):
        ask = {"text": f"{{name: more, run: x, {LATE}, {text}}}", "user": "a", "origin": origin}
        answer = await api.http.post(JOBS, json=ask)
        assert answer.json().get("code") == code, answer.text


async def test_a_step_that_cannot_succeed_fails_and_says_why(api: Api) -> None:
    await submit(api, f"{{name: train, run: x, {LATE}}}")
    await submit(api, "{name: no, edge: {deploy: m}}", "{name: late, edge: {deploy: m@9}}")
    assert await ended(api, "no") == ("failed", "project default has published no model m")
    assert (await ended(api, "late"))[0] == "failed"
    await submit(api, "{name: pub, after: train:any, edge: {publish: train, model: m}}")
    await api.http.post(f"{JOBS}/train/stop")
    assert await ended(api, "pub") == ("failed", "job train has no checkpoint")
    await submit(api, "{name: never, limits: {deadline: 1s}, edge: {collect: m, into: a}}")
    phase, reason = await ended(api, "never")
    assert (phase, reason.partition(":")[0]) == ("failed", "its deadline has passed")


async def test_a_version_that_a_crash_left_without_a_signature_is_signed(api: Api) -> None:
    pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")
    await submit(api, f"{{name: train, run: x, {LATE}}}")
    await submit(api, "{name: pub, after: train:any, edge: {publish: train, model: m}}")
    store = api.app_state.store
    await put_model(api, 1, step=(await store.find_job("default", "pub")).id)
    await api.http.post(f"{JOBS}/train/stop")
    assert await ended(api, "pub") == ("done", "published m@1")
    lists = await rows_of(store).repositories.get("default", "models")
    assert list_targets(lists, "m") == {"m/1.json"}


async def test_a_deployment_in_a_graph_needs_the_right_to_deploy(api: Api) -> None:
    await put_model(api, 1)
    await enrol(api, "box", "lab")
    await api.submit("{name: mine, edge: {deploy: m, site: none}}")
    assert (await ended(api, "mine"))[0] == "failed"
    token = await add(api, "ada", ("default", "member"))
    body = {"text": "{name: t, edge: {deploy: m}}"}
    for path, ask in (
        ("/projects/default/jobs", body),
        ("/projects/default/job-graphs", {"tasks": [body], "keys": [make_key()]}),
        ("/projects/default/jobs/mine/retry", {}),
    ):
        answer = await call(api, token, "POST", path, ask)
        assert answer.status_code == 403, answer.text


async def test_only_admins_deploy_packages_that_run_with_all_rights_of_devices(api: Api) -> None:
    await put_model(api, 1)
    await enrol(api, "box", "lab")
    token = await add(api, "olga", ("default", "operator"))
    for packages, status in (("0" * 64, 403), ("", 201)):
        ask = {"model": "cavvy.edge" if packages else "m", "packages": packages}
        ask["to"] = 0 if packages else 1
        answer = await call(api, token, "POST", "/projects/default/rollouts", ask)
        assert answer.status_code == status, answer.text


async def test_a_link_of_a_model_stands_for_the_file_to_which_it_leads(api: Api) -> None:
    """A cache of Hugging Face consists of links, and a job can save any."""
    blobs = api.app_state.blobs.of("default")
    name = sha256(b"weights").hexdigest()
    blobs.put(name, [b"weights"])

    def list_files(**links: str) -> Any:
        entries = [FolderEntry(path="model/blobs/one", size=7, sha256=name)]
        entries += [FolderEntry(path=f"model/{path}", link=to) for path, to in links.items()]
        manifest = encode_manifest(entries)
        snapshot = sha256(manifest).hexdigest()
        blobs.put(snapshot, [manifest])
        return ModelRegistry.list_files(blobs, snapshot, "model")

    files = await list_files(weights="blobs/one", latest="weights")
    assert [(each.path, each.sha256, each.size) for each in files] == [
        ("blobs/one", name, 7),
        ("weights", name, 7),
        ("latest", name, 7),
    ]
    for links in ({"out": "../../etc/passwd"}, {"a": "b", "b": "a"}, {"folder": "blobs"}):
        with pytest.raises(ModelRefused, match=r"is a link to .* no file of the model"):
            await list_files(**links)
