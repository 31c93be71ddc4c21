"""Jobs over HTTP: submit once, list by cursor, look, stop, retry, drill, and every error in the
one form.
"""

import asyncio
import os
import threading
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from types import ModuleType
from typing import Any

import pytest
from tests.api.api_state import Api, until
from tests.own_parts import read_own, reads_other_tools
from tests.planner.unit.test_planner_transfers import Bucket
from tests.store.unit.test_bucket_regions import Storages, storages

from cavvy.api.routes import submission
from cavvy.api.routes.submission import MOST_RANKED
from cavvy.client.paths import make_id, make_key
from cavvy.control import queue
from cavvy.control.decide import placement
from cavvy.control.decide.placement import find_placement
from cavvy.control.retention import ROUNDS, WAIT, Retention
from cavvy.domain.elastic import MOST_SIZES
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.overrides import apply_overrides
from cavvy.store.base import AtomicWrite, StaleVersion
from cavvy.store.objects.locations import ObjectLocation

__all__ = ["storages"]


async def test_a_submission_is_stored_and_shown(api: Api) -> None:
    made = await api.submit(
        "{name: train, run: echo hi, params: {lr: 0.1}, tags: {team: a}}", params={"lr": "0.5"}
    )
    assert made["name"] == "train"
    assert made["created"] is True
    found = (await api.http.get("/v1/projects/default/jobs/train")).json()
    assert found["id"] == made["id"]
    assert found["task"]["params"] == {"lr": 0.5}
    assert found["origin"]["task_text"].startswith("{name: train")
    by_id = (await api.http.get(f"/v1/projects/default/jobs/{made['id']}")).json()
    assert by_id["name"] == "train"


@reads_other_tools
async def test_what_the_command_line_said_is_honoured_and_kept(api: Api) -> None:
    origin = {"dialect": "SkyPilot", "overrides": '{"env": {"A": "b"}, "limits": {"budget": "3"}}'}
    made = await api.submit("{name: Train, run: echo $A}", origin=origin)
    found = (await api.http.get(f"/v1/projects/default/jobs/{made['name']}")).json()
    assert found["task"]["env"] == {"A": "b"}
    assert found["task"]["limits"]["budget"] == {"micros": 3_000_000}
    assert "SKYPILOT_NODE_RANK=" in found["task"]["run"]
    assert {key: found["origin"][key] for key in origin} == origin
    for wrong in ({"dialect": "perl"}, {"overrides": "nodes: 0"}, {"overrides": "[]"}):
        answer = await api.post_job("{name: a, run: 'true'}", origin=wrong)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task")


async def test_other_requests_do_not_wait_while_a_long_file_is_read(api: Api) -> None:
    commands = "".join(f"- echo {number}\n" for number in range(9000))
    sent = asyncio.create_task(api.post_job(f"type: task\nwrong: 1\ncommands:\n{commands}"))
    answered = 0
    while not sent.done():
        assert (await api.http.get("/v1/health")).is_success
        answered += 1
        await asyncio.sleep(0.001)
    assert sent.result().json()["code"] == "invalid-task"
    assert answered > 5


async def test_a_task_may_be_an_object(api: Api) -> None:
    answer = await api.http.post(
        "/v1/projects/p/jobs", json={"task": {"name": "obj", "run": "true"}}
    )
    assert answer.status_code == 201
    assert (await api.http.get("/v1/projects/p/jobs/obj")).json()["task"]["run"] == "true"


async def test_the_same_key_makes_one_job(api: Api) -> None:
    key = make_key()
    answers = await asyncio.gather(
        *(api.post_job("{name: once, run: 'true'}", key=key) for _ in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 200, 201]
    assert {answer.json()["id"] for answer in answers} == {key}
    assert len((await api.http.get("/v1/jobs")).json()["jobs"]) == 1


async def test_a_key_is_good_for_one_submission(api: Api) -> None:
    key = make_key()
    await api.submit("{name: a, run: 'true'}", key=key)
    other = await api.post_job("{name: b, run: 'true'}", key=key)
    assert (other.status_code, other.json()["code"]) == (409, "key-reused")
    elsewhere = await api.post_job("{name: a, run: 'true'}", key=key, project="other")
    assert elsewhere.json()["code"] == "key-reused"


async def test_an_old_key_cannot_jump_the_queue_but_still_finds_its_job(api: Api) -> None:
    now = api.app_state.now()
    old = make_id((now - timedelta(hours=2)).timestamp(), b"abcd")
    answer = await api.post_job("{name: a, run: 'true'}", key=old)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    key = make_key()
    await api.submit("{name: a, run: 'true'}", key=key)
    api.app_state.now = api.app_state.machine_now = lambda: now + timedelta(hours=2)
    again = await api.post_job("{name: a, run: 'true'}", key=key)
    assert (again.status_code, again.json()["created"]) == (200, False)


async def test_jobs_are_accepted_after_the_clock_was_set_back(api: Api) -> None:
    """The server's time never goes back, but commands use the machine's clock."""
    before = api.app_state.now()
    api.app_state.now = lambda: before + timedelta(hours=1)
    assert (await api.submit("{name: a, run: 'true'}"))["created"]
    api.app_state.machine_now = api.app_state.now
    wrong = await api.post_job("{name: b, run: 'true'}")
    assert "set the clock" in wrong.json()["message"]


async def test_names_are_unique_in_their_project(api: Api) -> None:
    names = [(await api.submit("{name: n, run: 'true'}"))["name"] for _ in range(3)]
    assert names == ["n", "n-2", "n-3"]
    assert (await api.submit("{name: n, run: 'true'}", project="other"))["name"] == "n"


async def test_pages_by_cursor_hold_every_job_once_newest_first(api: Api) -> None:
    made = [(await api.submit())["id"] for _ in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        query = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await api.http.get("/v1/projects/default/jobs", params=query)).json()
        seen += [job["id"] for job in page["jobs"]]
        if (cursor := page["cursor"]) is None:
            break
    assert seen == sorted(made, reverse=True)


async def test_lists_by_phase_and_project(api: Api) -> None:
    for project in ("a", "b"):
        await api.submit("{name: n, run: 'true', resources: {cpu: 4}}", project=project)
    await api.http.post("/v1/projects/a/jobs/n/stop", json={})
    stopping = (await api.http.get("/v1/jobs", params={"phase": ["stopping", "stopped"]})).json()[
        "jobs"
    ]
    assert [job["project"] for job in stopping] == ["a"]
    assert [
        job["project"] for job in (await api.http.get("/v1/projects/b/jobs")).json()["jobs"]
    ] == ["b"]
    assert (
        await api.http.get("/v1/projects/b/jobs", params={"phase": "nonsense"})
    ).status_code == 422


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: a, run: 'true', resorces: {}}", "did you mean `resources`?"),
        ("{name: a}", "`run` is missing"),
        ("]", "task:1:1"),
        ("{name: a, run: 'true', params: {x: 1}, env: {A: '${{ params.y }}'}}", "y"),
    ],
)
async def test_a_wrong_task_is_explained(api: Api, text: str, said: str) -> None:
    answer = await api.post_job(text)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task")
    assert said in answer.json()["message"]


async def test_what_costs_money_needs_consent_and_shows_its_price(api: Api) -> None:
    text = "{name: big, run: 'true', resources: {cpu: 32}, limits: {budget: 5 USD}}"
    answer = await api.post_job(text)
    assert (answer.status_code, answer.json()["code"]) == (402, "consent-needed")
    assert "$2.50/h" in answer.json()["message"]
    assert "$5.00" in answer.json()["message"]
    assert (await api.http.get("/v1/jobs")).json()["jobs"] == []
    made = await api.submit(text, consent=True, ceiling_micros=4_000_000)
    found = (await api.http.get(f"/v1/projects/default/jobs/{made['id']}")).json()
    assert (found["consented"], found["ceiling_micros"]) == (True, 4_000_000)


async def test_of_several_wishes_the_price_of_the_one_that_would_be_taken_is_shown(
    api: Api,
) -> None:
    text = "{name: big, run: 'true', resources: {WORD: [{instance: dear}, {instance: paid}]}}"
    assert "$2.50/h" in (await api.post_job(text.replace("WORD", "any_of"))).json()["message"]
    assert "$9.00/h" in (await api.post_job(text.replace("WORD", "ordered"))).json()["message"]


async def test_what_no_place_can_carry_is_refused_at_once(api: Api) -> None:
    answer = await api.post_job("{name: huge, run: 'true', resources: {cpu: 1000}}")
    assert (answer.status_code, answer.json()["code"]) == (422, "no-offer")
    assert "cpu" in answer.json()["message"]


async def test_the_price_of_copies_counts_for_the_budget_at_submission(api: Api) -> None:
    text = (
        "{name: far, run: 'true', work: {duration: 1m}, limits: {budget: 5 USD}, inputs: [{source: "
        "'s3://b/', target: d, size: %s, region: us-east-1}], resources: {instance: paid}}"
    )
    answer = await api.post_job(text % "1GB", consent=True)
    assert answer.status_code < 300
    answer = await api.post_job(text % "10TB", consent=True)
    assert (answer.status_code, answer.json()["code"]) == (422, "no-offer")
    assert "your budget leaves $5.00" in answer.json()["message"]


async def test_a_bucket_outside_the_allowed_regions_is_found_at_submission(
    api: Api, storages: Storages
) -> None:
    text = (
        "{name: far, run: 'true', resources: {regions: [WHERE], cpu: 1}, "
        "inputs: [{source: 'gs://data/', target: d}]}"
    )
    storages.location = "US"
    answer = await api.post_job(text.replace("WHERE", "eu"))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task")
    assert "gs://data/ is in us, but" in answer.json()["message"]


@pytest.mark.parametrize(
    "data",
    [
        "inputs: [{source: 'gs://data/', target: d}]",
        "outputs: [{source: d, target: 'gs://data/'}]",
        "checkpoint: {path: c, storage: 'gs://data/'}",
    ],
)
async def test_a_bucket_of_unknown_region_is_refused_until_its_region_is_stated(
    api: Api, storages: Storages, data: str
) -> None:
    storages.location = "NOWHERE9"
    text = f"{{name: far, run: 'true', resources: {{regions: [eu], cpu: 1}}, {data}}}"
    answer = await api.post_job(text)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task")
    assert "gs://data/ (the bucket is in nowhere9, whose location Cavvy does not know)" in str(
        answer.json()["message"]
    )
    assert "set `region`" in answer.json()["hint"]
    stated = text.replace("'gs://data/'", "'gs://data/', region: REGION")
    answer = await api.post_job(stated.replace("REGION", "us-east1"))
    assert answer.status_code == 422
    assert "is in us-east1, but `resources.regions` allows only eu" in str(answer.json())
    answer = await api.post_job(stated.replace("REGION", "europe-west4"))
    assert answer.json()["code"] == "no-offer"  # the bucket is accepted; no machine is in the eu


async def test_inputs_in_buckets_are_measured_at_submission(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = ObjectLocation(place=Bucket(), key="train")  # type: ignore[arg-type] # reads only
    monkeypatch.setattr("cavvy.store.objects.locations.open_place", lambda *_: opened)
    made = await api.submit(
        "{name: far, run: 'true', resources: {cpu: 1}, inputs: [{source: 's3://b/train', "
        "target: d, region: us-east-1}, {source: 's3://b/train', target: e, size: 1GiB, "
        "region: us-east-1}]}"
    )
    task = (await api.app_state.store.job(made["id"])).task
    assert [each.size_mib for each in task.inputs] == [1500, 1024]


async def test_a_missing_secret_is_named(api: Api) -> None:
    text = "{name: s, run: 'true', secrets: [TOKEN]}"
    answer = await api.post_job(text)
    assert answer.json()["code"] == "secret-missing"
    assert "cavvy secret set TOKEN" in answer.json()["hint"]
    await api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": "x"})
    await api.submit(text)


async def test_events_wait_for_news(api: Api) -> None:
    made = await api.submit()
    await api.attempt(made["id"])
    base = f"/v1/projects/default/jobs/{made['id']}"
    page = (await api.http.get(base + "/events")).json()
    assert [event["kind"] for event in page["events"]][:2] == ["queued", "placed"]
    waiting = asyncio.create_task(
        api.http.get(base + "/events", params={"after": page["last"], "wait_s": 20})
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await api.http.post(base + "/stop", json={"reason": "enough"})
    news = (await waiting).json()
    assert "enough" in [event["text"] for event in news["events"]]


async def test_stop_retry_and_their_errors(api: Api) -> None:
    made = await api.submit("{name: j, run: 'true'}")
    base = "/v1/projects/default/jobs/j"
    early = await api.http.post(base + "/retry")
    assert (early.status_code, early.json()["code"]) == (409, "job-not-ended")
    assert early.json()["hint"] == "wait for the job, or stop it with `cavvy stop j`"
    stopped = (await api.http.post(base + "/stop")).json()
    assert stopped["phase"] in ("stopping", "stopped")
    await until(lambda: _phase(api, base, "stopped"))
    again = await api.http.post(base + "/retry")
    assert (again.status_code, again.json()["id"]) == (200, made["id"])
    assert (await api.http.post(base + "/stop")).status_code == 200


async def test_a_retry_with_other_resources_is_checked_and_agreed_to_anew(api: Api) -> None:
    await api.submit("{name: j, run: 'true', resources: {cpu: 1}}")
    base = "/v1/projects/default/jobs/j"

    async def retry(resources: object, **rest: object) -> tuple[int, str]:
        answer = await api.http.post(base + "/retry", json={"resources": resources, **rest})
        return answer.status_code, answer.json().get("code", "")

    assert await retry({"cpu": 2}) == (409, "job-not-ended")
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))
    for odd in ("here", [1], {"nodes": 2}, {"run": "other"}, {"cpu": "-1"}):
        assert await retry(odd) == (422, "invalid-task")
    assert await retry({"cpu": 1000}) == (422, "no-offer")
    assert (await api.http.get(base)).json()["phase"] == "stopped"
    assert await retry({"cpu": 32}) == (402, "consent-needed")
    assert await retry({"cpu": 32}, consent=True) == (200, "")
    found = (await api.http.get(base)).json()
    assert (found["task"]["resources"]["cpus_min"], found["consented"]) == (32, True)
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))
    assert await retry({"cpu": 1}) == (200, "")
    assert (await api.http.get(base)).json()["consented"] is False  # it was for the other nodes


async def test_large_resources_of_a_retry_do_not_stop_other_requests(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of them takes seconds to parse."""
    await api.submit("{name: j, run: 'true', resources: {cpu: 1}}")
    base, threads = "/v1/projects/default/jobs/j", list[threading.Thread]()
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))

    def parse(*given: Any) -> TaskSpec:
        threads.append(threading.current_thread())
        return apply_overrides(*given)

    monkeypatch.setattr(submission, "apply_overrides", parse)
    for count in (1, 2_000):
        names = [f"cloud-{number}" for number in range(count)]
        answer = await api.http.post(base + "/retry", json={"resources": {"providers": names}})
        assert answer.status_code == 422
    assert [each is threading.current_thread() for each in threads] == [True, False]


async def test_only_ended_jobs_are_removed(api: Api) -> None:
    await api.submit("{name: j, run: 'true', tags: {team: vision}}")
    base = "/v1/projects/default/jobs/j"
    early = await api.http.delete(base)
    assert (early.status_code, early.json()["code"]) == (409, "job-not-ended")
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))
    [row] = (await api.http.get("/v1/jobs")).json()["jobs"]
    assert row["tags"] == {"team": "vision"}
    assert await until(lambda: _removed(api, base)) == {"freed_bytes": 0, "kept": ""}
    assert (await api.http.delete(base)).json()["code"] == "job-not-found"
    assert (await api.http.get("/v1/jobs")).json()["jobs"] == []
    paid = (await api.http.get("/v1/ledger/sums?project=default&by=job,tag:team")).json()
    assert {each["groups"]["job"] for each in paid} <= {"j"}
    wrong = await api.http.get("/v1/ledger/sums?by=beauty")
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid-request")
    entries = (await api.http.get("/v1/ledger?project=default")).json()
    assert {each["tags"]["team"] for each in entries} <= {"vision"}


async def test_a_job_that_waits_for_another_says_so(api: Api) -> None:
    base = "/v1/projects/default/jobs"
    await api.submit("{name: a, run: sleep 600, schedule: 2099-01-01T00:00Z}")
    await api.submit("{name: b, run: 'true', after: a}")
    b = (await api.http.get(f"{base}/b")).json()
    shown = (b["phase"], b["reason"], b["held"], b["not_before"], b["queue_position"])
    assert shown == ("queued", "waits until a succeeds", True, None, None)
    await api.http.post(f"{base}/a/stop")
    await until(lambda: _phase(api, f"{base}/b", "stopped"))
    b = (await api.http.get(f"{base}/b")).json()
    assert b["stop_cause"] == "dependency"
    refused = await api.http.post(f"{base}/b/retry")
    reason = "it starts after a succeeds, but a was stopped or did not start"
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert refused.json()["message"] == f"job b cannot be retried: {reason}"
    assert refused.json()["hint"] == "`cavvy retry a` retries both"
    await api.http.post(f"{base}/a/retry")
    await until(lambda: _phase(api, f"{base}/b", "queued"))
    await api.submit("{name: c, run: 'true', after: [a:any, b]}")
    await api.http.post(f"{base}/b/stop")
    await until(lambda: _phase(api, f"{base}/c", "stopped"))


async def test_a_job_that_others_wait_for_stays(api: Api) -> None:
    base = "/v1/projects/default/jobs"
    for name in "ax":
        await api.submit(f"{{name: {name}, run: 'true', schedule: 2099-01-01T00:00Z}}")
    await api.http.post(f"{base}/a/stop")
    await api.submit("{name: b, run: 'true', after: [a:any, x]}")
    refused = (await api.http.delete(f"{base}/a")).json()
    assert refused["message"] == "job a cannot be removed: job b waits for it"
    assert (refused["code"], refused["hint"]) == ("conflict", "wait, or stop b first")
    await api.submit("{name: s, run: 'true', array: 0-1, after: x}")
    await api.http.post("/v1/projects/default/arrays/s/stop")
    for after in ("s:any", "s.1:any"):
        await api.submit(f"{{name: c, run: 'true', after: ['{after}', x]}}")
    for path, name in (("arrays/s", "array s"), ("jobs/s.1", "job s.1")):
        refused = (await api.http.delete(f"/v1/projects/default/{path}")).json()
        assert refused["message"].startswith(f"{name} cannot be removed: job c")
        assert refused["code"] == "conflict"
    await api.http.post(f"{base}/b/stop")
    await until(lambda: _removed(api, f"{base}/a"))


async def test_a_job_waits_only_for_jobs_that_end(api: Api) -> None:
    await api.submit("{name: prepare, run: 'true'}")
    await api.submit("{name: night, run: 'true', schedule: '0 3 * * *'}")
    hidden = await api.submit("{name: hidden, run: 'true'}", project="other")
    for after, told in (
        ("prepar", "after: project default has no job prepar"),
        ("night", "after: job night repeats and never ends"),
        ("train", "after: the job train cannot wait for itself"),
        ("[prepare, prepare]", "prepare is in the list twice"),
        (hidden["id"], f"after: project default has no job {hidden['id']}"),
    ):
        text = f"{{run: 'true', after: {after}}}"
        for path in ("jobs", "job-check"):
            where, ask = f"/v1/projects/default/{path}", {"text": text, "name": "train"}
            answer = await api.http.post(where, json=ask)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task")
            assert told in answer.json()["message"]
    names = {each["name"] for each in (await api.http.get("/v1/jobs")).json()["jobs"]}
    assert names == {"prepare", "night", "hidden"}


async def test_a_graph_is_stored_in_one_step_or_not_at_all(api: Api) -> None:
    async def post(*texts: str, keys: list[str], to: str = "job-graphs") -> tuple[int, Any]:
        ask = {"tasks": [{"text": each} for each in texts], "keys": keys}
        answer = await api.http.post(f"/v1/projects/default/{to}", json=ask)
        return answer.status_code, answer.json()

    await api.submit("{name: old, run: 'true', schedule: 2099-01-01T00:00Z}")
    await api.submit("{name: a, run: 'true', schedule: 2099-01-01T00:00Z}")
    keys = [make_key() for _ in range(3)]
    texts = (
        "{name: c, run: 'true', after: [a, b]}",
        "{name: a, run: 'true', after: old}",
        "{name: b, run: 'true', after: a:any, array: 0-1}",
    )
    for wrong, told in (
        ("{name: b, run: 'true', after: c}", "after: the tasks wait for each other: "),
        ("{name: b, run: 'true', after: none}", "after: project default has no job none"),
        ("{name: a, run: 'true'}", "name: two tasks have the name a"),
        ("{name: b, run: 'true', secrets: NONE}", "project default has no secret NONE"),
    ):
        for to in ("job-graphs", "job-graph-check"):
            status, found = await post(*texts[:2], wrong, keys=keys, to=to)
            assert status == 422
            assert told in found["message"]
    status, found = await post(*texts, keys=keys[:1])
    assert (status, found["code"]) == (422, "invalid-request")
    status, checked = await post(*texts, keys=keys, to="job-graph-check?placements=2")
    assert [each["name"] for each in checked] == ["c", "a", "b"]
    assert [len(each["placements"]) for each in checked] == [2, 2, 2]
    none = await post(*texts, keys=keys, to="job-graph-check")
    assert none == (200, [{**each, "placements": []} for each in checked])
    many = [f"{{name: t{n}, run: 'true'}}" for n in range(MOST_RANKED + 1)]
    _, checked = await post(
        *many, keys=[make_key() for _ in many], to="job-graph-check?placements=1"
    )
    assert [len(each["placements"]) for each in checked] == [1] * MOST_RANKED + [0]
    assert len((await api.http.get("/v1/jobs")).json()["jobs"]) == 2
    status, made = await post(*texts, keys=keys)
    assert status == 201
    assert [each["name"] for each in made] == ["c", "a-2", "b"]
    assert [each["members"] for each in made] == [None, None, 2]
    status, again = await post(*texts, keys=keys)
    assert status == 200
    assert [each["id"] for each in again] == [each["id"] for each in made] == keys
    base = "/v1/projects/default/jobs"
    for name, reason in (
        ("c", "waits until a-2 succeeds and b succeeds"),
        ("b.1", "waits until a-2 ends"),
    ):
        await until(lambda name=name, reason=reason: _reason(api, f"{base}/{name}", reason))
    await api.http.post(f"{base}/a-2/stop")
    await until(lambda: _phase(api, f"{base}/c", "stopped"))


async def test_a_group_starts_together_and_others_join_it(api: Api) -> None:
    async def post(*texts: str) -> tuple[int, Any]:
        ask = {"tasks": [{"text": each} for each in texts], "keys": [make_key() for _ in texts]}
        answer = await api.http.post("/v1/projects/default/job-graphs", json=ask)
        return answer.status_code, answer.json()

    late = "{name: late, group: rl, run: 'true'}"
    answer = await api.post_job(late)
    assert answer.status_code == 422
    assert "project default has no group rl that a job could join" in answer.json()["message"]
    await api.submit("{name: prepare, run: 'true', schedule: 2099-01-01T00:00Z}")
    for wrong, told in (
        ("{name: a, run: 'true', group: {name: rl, helper: true}}", "all tasks of the group rl"),
        ("{name: rl, run: 'true', group: rl}", "rl is the name of"),
        ("{name: a, run: 'true', group: rl, after: b}", "a waits for b, but starts together"),
    ):
        status, found = await post("{name: b, run: 'true', group: {name: rl, helper: true}}", wrong)
        assert status == 422
        assert told in found["message"]
    texts = (
        "{name: trainer, run: 'true', group: rl, after: prepare}",
        "{name: reward, run: 'true', group: {name: rl, helper: true}}",
    )
    assert (await post(*texts))[0] == 201
    assert (await post(*texts))[0] == 201  # a second group
    assert (await api.submit(late))["name"] == "late"
    base = "/v1/projects/default"
    detail = (await api.http.get(f"{base}/arrays/rl")).json()
    assert detail["group"] is True
    assert {each["name"] for each in detail["jobs"]} == {"trainer", "reward", "late"}
    other = (await api.http.get(f"{base}/arrays/rl-2")).json()
    assert {each["name"] for each in other["jobs"]} == {"trainer-2", "reward-2"}
    for name, reason in (
        ("reward", "waits for trainer of its group"),
        ("late", "waits until its group has started"),
    ):
        await until(lambda name=name, reason=reason: _reason(api, f"{base}/jobs/{name}", reason))
    for name in ("trainer", "reward"):
        assert (await api.http.post(f"{base}/jobs/{name}/stop", json={})).is_success
    await until(lambda: _phase(api, f"{base}/jobs/late", "stopped"))
    reason = "the jobs with which its group began have ended before they started"
    assert (await api.http.get(f"{base}/jobs/late")).json()["reason"] == reason
    answer = await api.post_job("{name: later, group: rl, run: 'true'}")
    assert answer.json()["message"] == "group: all jobs of the group rl have ended"
    answer = await api.http.post(f"{base}/jobs/trainer/retry")
    assert answer.status_code == 409
    assert answer.json()["hint"] == "`cavvy retry rl` retries all jobs of its group"
    assert (await api.http.get(f"{base}/jobs/prepare")).json()["phase"] == "queued"


async def test_a_job_that_is_stopped_before_its_launch_needs_no_second_poll(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its nodes would count as running until the provider must have shown them."""
    control = api.app_state.control_plane

    async def come_second(*given: object) -> None:
        raise StaleVersion("another write came first")

    with monkeypatch.context() as patched:
        patched.setattr(control._jobs._operator, "launch", come_second)
        made = await api.submit("{name: j, run: 'true'}")
        await until(lambda: api.app_state.store.attempts(made["id"]))
        await api.http.post("/v1/projects/default/jobs/j/stop")

        async def is_over() -> bool:
            [attempt] = await api.app_state.store.attempts(made["id"])
            return attempt.phase == "ended"

        await until(is_over)
    [attempt] = await api.app_state.store.attempts(made["id"])
    assert attempt.missed_looks == 1


async def test_a_removal_that_was_interrupted_can_only_be_completed(api: Api) -> None:
    await api.submit("{name: j, run: 'true'}", project="team")
    base = "/v1/projects/team/jobs/j"
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))
    store = api.app_state.store
    job = await store.find_job("team", "j")
    await store.commit(AtomicWrite(jobs=[replace(job, removing=True)]))
    refused = await api.http.post(base + "/retry")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert refused.json()["hint"] == "`cavvy rm j -p team` completes the removal"
    assert await until(lambda: _removed(api, base))


async def test_a_job_that_is_no_longer_kept_says_so(api: Api) -> None:
    await api.submit("{name: j, run: 'true'}", project="team")
    base = "/v1/projects/team/jobs/j"
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))
    app_state, plane = api.app_state, api.app_state.control_plane
    job = await app_state.store.find_job("team", "j")
    app_state.logs.append("team", job.id, 1, 0, 0, b"text")
    old = datetime(2026, 1, 2, tzinfo=UTC)
    await until(lambda: _age(api, job.id, old))
    now = app_state.now()
    await app_state.store.put_fact(ROUNDS, f"{(now - WAIT).isoformat()} {now.isoformat()}")
    policy = await api.http.put("/v1/projects/team/policy", json={"keep_jobs_days": 30})
    assert policy.status_code == 204
    assert await until(lambda: _is_gone(api, base, plane.retention))
    for answer in (
        await api.http.get(base),
        await api.http.get(base + "/logs"),
        await api.http.get(base + "/events"),
        await api.http.get(base + "/cost"),
        await api.http.post(base + "/retry"),
    ):
        told = answer.json()
        assert (answer.status_code, told["code"]) == (404, "job-not-found")
        assert "job j of project team ended on 2026-01-02 and was removed on " in told["message"]
        assert "are kept for 30 days (policy of project team)" in told["message"]
        assert told["hint"] == "`cavvy cost --by job -p team` still shows its cost"
    assert app_state.logs.read("team", job.id, 1, 0).data == b""


async def _age(api: Api, job_id: str, ended_at: datetime) -> bool:
    """Let the job have ended at this time, once the control plane no longer changes it."""
    job = await api.app_state.store.job(job_id)
    try:
        await api.app_state.store.commit(AtomicWrite(jobs=[replace(job, ended_at=ended_at)]))
    except StaleVersion:
        return False
    return True


async def _is_gone(api: Api, base: str, retention: Retention) -> bool:
    while await retention.reconcile() < timedelta(minutes=10):
        pass
    return (await api.http.get(base)).status_code == 404


async def _removed(api: Api, base: str) -> object:
    """The answer once the job's nodes are released."""
    answer = await api.http.delete(base)
    return answer.json() if answer.status_code == 200 else None


async def test_hints_name_the_job_and_its_project_as_commands_take_them(api: Api) -> None:
    await api.submit("{name: j, run: 'true', nodes: 2}", project="team")
    base = "/v1/projects/team/jobs/j"

    async def hint(path: str, body: object = None) -> str:
        answer = await (
            api.http.get(base + path) if body is None else api.http.post(base + path, json=body)
        )
        assert answer.status_code >= 400
        return str(answer.json()["hint"])

    command = {"command": ["ls"]}
    assert "`cavvy status j -p team`" in await hint("/logs?rank=7")
    assert "`cavvy status j -p team`" in await hint("/logs?attempt=7")
    assert "`cavvy status j -p team` lists the job's nodes" in await hint(
        "/exec", {**command, "rank": 7}
    )
    assert "`cavvy status j -p team` shows the job's nodes" in await hint("/exec", command)
    assert "`cavvy stop j -p team`" in await hint("/retry", {})
    await api.http.post(base + "/stop")
    await until(lambda: _phase(api, base, "stopped"))
    for path, body in (("/exec", command), ("/drill/preempt", {"notice_s": 1})):
        assert (
            "`cavvy logs j -p team` shows the job's output; `cavvy rerun j -p team` runs"
            in await hint(path, body)
        )


async def _reason(api: Api, base: str, reason: str) -> bool:
    found: str = (await api.http.get(base)).json()["reason"]
    return found == reason


async def _phase(api: Api, base: str, phase: str) -> bool:
    found: str = (await api.http.get(base)).json()["phase"]
    return found == phase


async def test_a_drill_needs_nodes(api: Api) -> None:
    await api.submit("{name: later, run: 'true', schedule: {at: 2199-01-01T00:00:00Z}}")
    answer = await api.http.post(
        "/v1/projects/default/jobs/later/drill/preempt", json={"notice_s": 1}
    )
    assert (answer.status_code, answer.json()["code"]) == (409, "job-not-running")
    assert "`cavvy status later` shows the job's nodes" in answer.json()["hint"]
    made = await api.submit("{name: now, run: 'true'}")
    await api.attempt(made["id"])
    answer = await api.http.post(
        "/v1/projects/default/jobs/now/drill/preempt", json={"notice_s": 60}
    )
    assert answer.status_code == 200
    attempt = (await api.http.get("/v1/projects/default/jobs/now")).json()["attempts"][0]
    assert attempt["drill_until"] is not None


async def test_a_drill_of_one_node_names_a_rank_whose_work_runs(api: Api) -> None:
    made = await api.submit("{name: pair, run: 'true', nodes: 2}")
    await api.attempt(made["id"])
    for rank, text in ((7, "has no rank 7"), (1, "its work does not run")):
        answer = await api.http.post(
            "/v1/projects/default/jobs/pair/drill/preempt", json={"notice_s": 0, "rank": rank}
        )
        assert (answer.status_code, answer.json()["code"]) == (409, "job-not-running")
        assert text in answer.json()["message"]


async def test_only_elastic_jobs_are_resized_and_only_within_their_range(api: Api) -> None:
    later = "schedule: {at: 2199-01-01T00:00:00Z}"
    await api.submit(f"{{name: fixed, run: 'true', {later}}}")
    await api.submit(f"{{name: any, run: 'true', nodes: 2..4, {later}}}")

    async def resize(name: str, nodes: int) -> tuple[int, str]:
        path = f"/v1/projects/default/jobs/{name}/resize"
        answer = await api.http.post(path, json={"nodes": nodes})
        return answer.status_code, answer.json().get("message", "")

    assert await resize("fixed", 2) == (422, "job fixed has a fixed number of nodes, 1")
    assert await resize("any", 5) == (422, "job any can have 2..4 nodes, not 5")
    assert await resize("any", 3) == (200, "")
    events = (await api.http.get("/v1/projects/default/jobs/any/events")).json()
    assert events["events"][-1]["text"] == "the job gets at most 3 nodes when it starts next"
    assert (await resize("none", 2))[0] == 404


async def test_queue_position_nodes_down(api: Api) -> None:
    made = [await api.submit() for _ in range(4)]  # two places
    await api.attempt(made[1]["id"])
    last = (await api.http.get(f"/v1/projects/default/jobs/{made[3]['id']}")).json()
    assert last["queue_position"] == 2
    nodes = (await api.http.get("/v1/nodes")).json()
    assert {node["job_id"] for node in nodes} == {made[0]["id"], made[1]["id"]}
    dry = (await api.http.post("/v1/down", json={"dry_run": True})).json()["found"]
    assert {found["name"] for found in dry if found["kind"] == "job"} == {
        job["name"] for job in made
    }
    assert not any(found["done"] for found in dry)
    await api.http.post("/v1/down", json={})
    waited = await api.app_state.store.job(made[3]["id"])
    assert (waited.phase, waited.attempt) == ("stopped", 0)
    assert waited.stop_reason == "all jobs are being stopped"
    await until(lambda: _nobody(api))


async def _nobody(api: Api) -> bool:
    return (
        not (await api.http.get("/v1/nodes")).json() and not await api.app_state.store.unfinished()
    )


async def test_down_for_one_project_leaves_the_others(api: Api) -> None:
    await api.submit(project="mine")
    theirs = await api.submit(project="theirs")
    found = (await api.http.post("/v1/down", json={"project": "mine"})).json()["found"]
    assert [job["name"] for job in found] == ["t"]
    assert (await api.app_state.store.job(theirs["id"])).stop_reason is None


async def test_cost_adds_up(api: Api) -> None:
    made = await api.submit("{name: paid, run: 'true', resources: {cpu: 32}}", consent=True)
    await api.attempt(made["id"])
    cost = (await api.http.get("/v1/projects/default/jobs/paid/cost")).json()
    spells = sum(
        cost[name] for name in ("queued_s", "starting_s", "running_s", "lost_s", "ending_s")
    )
    timeline = cost["timeline"]
    assert spells > 0
    assert [each["since"] for each in timeline[1:]] == [each["until"] for each in timeline[:-1]]
    project = (await api.http.get("/v1/projects/default/cost")).json()
    later = (await api.http.get("/v1/projects/default/jobs/paid/cost")).json()
    assert (
        cost["total_micros"] <= project["total_micros"] <= later["total_micros"]
    )  # the node runs meanwhile


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/projects/default/jobs/none", 404, "job-not-found"),
        ("GET", "/v1/projects/default/jobs/none/logs", 404, "job-not-found"),
        ("POST", "/v1/projects/default/jobs/none/stop", 404, "job-not-found"),
        ("POST", "/v1/projects/default/jobs/none/retry", 404, "job-not-found"),
        ("POST", "/v1/projects/default/jobs/none/drill/preempt", 404, "job-not-found"),
        ("GET", "/v1/nothing", 404, "not-found"),
        ("DELETE", "/v1/jobs", 405, "wrong-method"),
        *(row for each in read_own("route_rules") for row in getattr(each, "REFUSED", ())),
        ("GET", "/v1/jobs?limit=0", 422, "invalid-request"),
        ("GET", "/v1/jobs?limit=x", 422, "invalid-request"),
        ("GET", "/v1/projects/No_Such/jobs", 422, "invalid-request"),
        ("POST", "/v1/projects/default/jobs", 422, "invalid-request"),
    ],
)
async def test_every_error_has_one_form(
    api: Api, method: str, path: str, status: int, code: str
) -> None:
    answer = await api.http.request(method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == code
    assert answer.json()["message"]
    assert answer.json()["hint"]


async def test_a_misspelt_name_of_a_job_is_told(api: Api) -> None:
    await api.submit("{name: train, run: 'true'}")
    await api.submit("{name: train, run: 'true'}", project="theirs")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/logs"), ("GET", "/events")):
        answer = await api.http.request(method, f"/v1/projects/default/jobs/tarin{path}")
        assert answer.json()["hint"].startswith("did you mean train? `cavvy ps`")
    answer = await api.http.get("/v1/projects/default/jobs/serve")
    assert answer.json()["hint"].startswith("`cavvy ps` lists")
    answer = await api.http.get("/v1/projects/empty/jobs/tarin")
    assert "train" not in answer.json()["hint"], "jobs of other projects are not named"


async def test_unknown_fields_are_refused(api: Api) -> None:
    answer = await api.post_job("{name: a, run: 'true'}", consnt=True)
    assert answer.json()["code"] == "invalid-request"
    assert "consnt" in answer.json()["message"]


async def test_a_body_over_the_limit_is_refused(api: Api) -> None:
    limit = api.app_state.settings.whole("server.request_mib") * 1024 * 1024
    answer = await api.http.post("/v1/projects/default/jobs", content=b" " * (limit + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")

    async def without_length() -> object:
        for _ in range(limit // 65536 + 1):
            yield b" " * 65536

    answer = await api.http.post("/v1/projects/default/jobs", content=without_length())  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")


async def test_a_job_that_may_not_start_yet_has_no_place_in_the_queue(api: Api) -> None:
    day = f"{datetime.now(UTC) + timedelta(days=3):%a}".lower()
    await api.submit(f"{{name: nightly, run: 'true', window: '{day} 03:00-04:00'}}")
    await api.submit("{name: later, run: 'true', schedule: {at: 2199-01-01T00:00:00Z}}")
    for name in ("nightly", "later"):
        job = (await api.http.get(f"/v1/projects/default/jobs/{name}")).json()
        assert (job["phase"], job["queue_position"]) == ("queued", None)
        assert job["not_before"] is not None


async def test_what_was_uploaded_for_a_job_that_never_came_is_forgotten(api: Api) -> None:
    blobs = api.app_state.blobs.of("default")
    for data, age in ((b"of long ago", 8), (b"of yesterday", 1)):
        name = sha256(data).hexdigest()
        blobs.put(name, [data])
        at = (datetime.now(UTC) - timedelta(days=age)).timestamp()
        os.utime(blobs.path(name), (at, at))
    await api.app_state.control_plane.reconcile("sweep")
    names = [sha256(data).hexdigest() for data in (b"of long ago", b"of yesterday")]
    assert blobs.missing(names) == names[:1]


async def test_other_requests_do_not_wait_while_the_sizes_of_an_elastic_job_are_compared(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size is compared with all offers, by the submission and at each pass of the queue."""
    seen: dict[str, list[int]] = {}
    turn = 0

    def watch(module: ModuleType) -> None:
        def find(*args: Any) -> object:
            seen.setdefault(module.__name__, []).append(turn)
            return find_placement(*args)

        monkeypatch.setattr(module, "find_placement", find)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def is_queued() -> bool:
        return len(seen.get(queue.__name__, ())) >= MOST_SIZES

    watch(placement)
    watch(queue)
    counting = asyncio.create_task(count_turns())
    await api.submit("{name: wide, run: 'true', nodes: 1..10000, resources: {cpu: 1}}")
    await until(is_queued)
    counting.cancel()
    assert len(seen) == 2
    for found in seen.values():
        first = found[:MOST_SIZES]
        assert len(first) == len({*first}) == MOST_SIZES, first
