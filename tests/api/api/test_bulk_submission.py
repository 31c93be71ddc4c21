"""Many tasks in one request: all of them, or each that is accepted."""

import asyncio
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from tests.api.api_state import Api

from cavvy.api.errors import ApiProblem
from cavvy.api.routes import bulk_submission, jobs, submission
from cavvy.api.routes.bulk_submission import MOST_TASKS
from cavvy.client.paths import make_id, make_key, make_keys, read_time

_LATER = "schedule: 2099-01-01T00:00Z"


def make_ask(*texts: str, each: bool = False, **more: object) -> dict[str, Any]:
    tasks = [{"text": text, **more} for text in texts]
    return {"tasks": tasks, "keys": make_keys(len(texts)), "each": each}


async def post(api: Api, ask: dict[str, Any], project: str = "default") -> tuple[int, Any]:
    answer = await api.http.post(f"/v1/projects/{project}/job-batches", json=ask)
    return answer.status_code, answer.json()


async def list_names(api: Api, project: str = "default") -> Sequence[str]:
    found = await api.http.get("/v1/jobs", params={"project": project, "limit": 500})
    return sorted(each["name"] for each in found.json()["jobs"])


async def test_tasks_become_jobs_in_their_order(api: Api) -> None:
    ask = make_ask(
        *(f"{{name: row-{row}, run: echo {row}, env: {{ROW: '{row}'}}, {_LATER}}}" for row in "ab"),
        "{name: row-a, run: 'true', array: 0-2}",
    )
    ask["tasks"][1]["name"] = "other"
    status, made = await post(api, ask)
    assert (status, made.get("refused")) == (201, []), made
    assert [each["id"] for each in made["jobs"]] == ask["keys"]
    assert [each["name"] for each in made["jobs"]] == ["row-a", "other", "row-a-2"]
    assert [each["members"] for each in made["jobs"]] == [None, None, 3]
    for name, row in (("row-a", "a"), ("other", "b")):
        task = (await api.http.get(f"/v1/projects/default/jobs/{name}")).json()["task"]
        assert (task["name"], task["run"], task["env"]) == (name, f"echo {row}", {"ROW": row})
    assert await list_names(api) == ["other", "row-a", "row-a-2.0", "row-a-2.1", "row-a-2.2"]


async def test_a_batch_that_is_sent_again_makes_nothing_new(api: Api) -> None:
    ask = make_ask(
        f"{{name: a, run: 'true', {_LATER}}}",
        f"{{name: a, run: 'true', {_LATER}}}",
        "{name: a, run: 'true', array: 0-1}",
    )
    _, made = await post(api, ask)
    status, again = await post(api, ask)
    assert status == 200
    assert [each["created"] for each in again["jobs"]] == [False] * 3
    for key in ("id", "name", "members"):
        assert [each[key] for each in again["jobs"]] == [each[key] for each in made["jobs"]]
    more = {**ask, "tasks": [*ask["tasks"], {"text": f"{{name: b, run: 'true', {_LATER}}}"}]}
    more["keys"] = [*ask["keys"], make_key()]
    status, more_made = await post(api, more)
    assert (status, [each["created"] for each in more_made["jobs"]]) == (201, [False] * 3 + [True])
    changed = {**ask, "tasks": [{"text": "{name: c, run: 'true'}"}, *ask["tasks"][1:]]}
    status, refused = await post(api, changed)
    assert (status, refused["code"]) == (409, "key-reused")


async def test_one_refused_task_refuses_all_unless_each_is_asked_for(api: Api) -> None:
    wrong = (
        ("{name: b, run: 'true', gpu: 1}", "invalid-task", "unknown key 'gpu'"),
        ("{name: b, run: 'true', after: none}", "invalid-task", "no job none"),
        ("{name: b, run: 'true', secrets: NONE}", "secret-missing", "no secret NONE"),
        ("{name: b, run: 'true', resources: {gpu: H100:8}}", "no-offer", ""),
    )
    good = f"{{name: a, run: 'true', {_LATER}}}"
    for text, code, told in wrong:
        status, refused = await post(api, make_ask(good, text))
        assert (status >= 400, refused["code"]) == (True, code), refused
        assert refused["message"].startswith("task 2 of the request: ")
        assert told in refused["message"]
    for text, _, _ in wrong:
        ask = make_ask(good, text, text)
        for each in ask["tasks"][1:]:
            each["path"] = "b.yaml"
        _, refused = await post(api, ask)
        message = refused["message"]
        assert re.match(r"b\.yaml(:1:\d+| and 1 others|): ", message), message
        assert message.count("b.yaml") == 1
    assert await list_names(api) == []
    texts = [good, *(text for text, _, _ in wrong), good, wrong[2][0]]
    status, made = await post(api, make_ask(*texts, each=True))
    assert status == 201
    assert [each["name"] for each in made["jobs"]] == ["a", "a-2"]
    found = sorted((each["tasks"], each["code"]) for each in made["refused"])
    assert [tasks for tasks, _ in found] == [[1], [2], [3, 6], [4]]
    assert [code for _, code in found] == [code for _, code, _ in wrong]
    status, none = await post(api, make_ask(wrong[0][0], each=True))
    assert (status, none["jobs"], len(none["refused"])) == (200, [], 1)


async def test_a_request_that_is_not_a_batch_is_refused(api: Api) -> None:
    good = make_ask(f"{{name: a, run: 'true', {_LATER}}}")
    many = [make_key()] * (MOST_TASKS + 1)
    for ask, told in (
        ({**good, "tasks": [], "keys": []}, "`tasks` is empty"),
        ({**good, "keys": []}, "`keys` has 0 keys for 1 tasks"),
        ({"tasks": good["tasks"] * 2, "keys": good["keys"] * 2}, " 2 times"),
        ({**good, "keys": ["../x"]}, "expected keys of the form"),
        (
            {"tasks": [good["tasks"][0], {**good["tasks"][0], "user": "b"}], "keys": make_keys(2)},
            "must have the same `user`",
        ),
        ({"tasks": good["tasks"] * len(many), "keys": many}, "10,001 tasks are too many"),
    ):
        status, refused = await post(api, ask)
        assert (status, refused["code"]) == (422, "invalid-request")
        assert told in refused["message"]


async def test_a_batch_counts_as_its_jobs_for_the_limit_of_a_user(api: Api) -> None:
    assert (await api.http.post("/v1/projects", json={"name": "p"})).status_code == 201
    policy = await api.http.put("/v1/projects/p/policy", json={"user_waiting": 3})
    assert policy.status_code == 204
    text = f"{{name: a, run: 'true', {_LATER}}}"
    status, refused = await post(api, make_ask(*[text] * 4, user="ann"), "p")
    assert (status, refused["code"]) == (403, "policy-refused")
    assert refused["message"].endswith("ann has 0, and the submission adds 4")
    assert (await post(api, make_ask(text, text, user="ann"), "p"))[0] == 201
    status, refused = await post(api, make_ask(text, text, user="ann"), "p")
    assert refused["message"].endswith("ann has 2, and the submission adds 2")
    assert (await post(api, make_ask(text, text, user="bob"), "p"))[0] == 201


async def test_tasks_that_need_the_same_are_admitted_together(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not if users, or their consent to the costs, differ."""
    asked = list[bool]()
    check = submission.check_offers

    async def note(
        app_state: Any, task: Any, now: datetime, *, consented: bool, **more: Any
    ) -> None:
        asked.append(consented)
        await check(app_state, task, now, consented=consented, **more)

    monkeypatch.setattr(submission, "check_offers", note)
    ask = make_ask(*(f"{{name: r{n}, run: echo {n}, {_LATER}}}" for n in range(20)))
    ask["tasks"][3]["consent"] = True
    _, made = await post(api, ask)
    assert len(made["jobs"]) == 20
    assert sorted(asked) == [False, True]
    consents = [(await api.app_state.store.job(key)).consented for key in ask["keys"]]
    assert consents == [number == 3 for number in range(20)]


async def test_a_key_that_is_too_old_makes_no_job(api: Api) -> None:
    ask = make_ask(f"{{name: a, run: 'true', {_LATER}}}")
    old = make_id(time.time() - 86400, b"0123")
    status, refused = await post(api, {**ask, "keys": [old]})
    assert (status, refused["code"]) == (422, "invalid-request")
    assert "make a new key" in refused["message"]


def test_keys_of_a_batch_differ_and_are_in_order() -> None:
    keys = make_keys(10_000)
    assert len({*keys}) == 10_000
    assert keys == sorted(keys)
    assert all(abs((read_time(key) or 0) - time.time()) < 60 for key in (keys[0], keys[-1]))


async def test_the_files_of_tasks_are_checked_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[str]()
    check = bulk_submission.check_parts

    async def note(app_state: Any, task: Any, origin: Any) -> None:
        checked.append(task.name)
        await check(app_state, task, origin)

    monkeypatch.setattr(bulk_submission, "check_parts", note)
    texts = [f"{{name: r{n}, run: echo {n}, {_LATER}}}" for n in range(5)]
    texts += [f"{{name: s, run: x, secrets: NONE, {_LATER}}}"] * 3
    _, made = await post(api, make_ask(*texts, each=True))
    assert checked == ["r0", "s"]
    assert [each["tasks"] for each in made["refused"]] == [[5, 6, 7]]


async def test_silent_providers_are_asked_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()

    async def market(*_: object) -> None:
        asked.append(0)
        await asyncio.sleep(60)

    monkeypatch.setattr(submission, "_MARKET_WAIT_S", 0.1)
    monkeypatch.setattr(type(api.app_state.control_plane.pool), "market", market)
    cpus = [f"{{name: c{n}, run: x, resources: {{cpu: {n + 1}}}, {_LATER}}}" for n in range(6)]
    status, made = await post(api, make_ask(*cpus, consent=True))
    assert (status, len(made["jobs"])) == (201, 6)
    assert len(asked) == 1


async def test_a_price_that_comes_late_is_waited_for_before_a_refusal(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own host that is met for the first time answers later than a cloud, and costs nothing."""
    pool = type(api.app_state.control_plane.pool)
    soon = pool.market

    async def market(*given: Any) -> Any:
        await asyncio.sleep(0.2)
        return await soon(*given)

    monkeypatch.setattr(submission, "_MARKET_WAIT_S", 0.1)
    monkeypatch.setattr(submission, "_PRICE_WAITS", 1000)
    monkeypatch.setattr(submission, "list_elsewhere", lambda *_: ["ssh"])
    monkeypatch.setattr(pool, "market", market)
    task = {"text": f"{{name: late, run: x, {_LATER}}}"}
    assert (await api.http.post("/v1/projects/default/jobs", json=task)).status_code == 201


async def test_a_task_joins_a_group_that_exists(api: Api) -> None:
    texts = [f"{{name: {name}, run: x, group: rl, after: gate}}" for name in ("a", "b")]
    await api.submit(f"{{name: gate, run: x, {_LATER}}}")
    graph = {"tasks": [{"text": text} for text in texts], "keys": make_keys(2)}
    assert (await api.http.post("/v1/projects/default/job-graphs", json=graph)).status_code == 201
    _, made = await post(api, make_ask("{name: c, run: x, group: rl}"))
    found = (await api.http.get("/v1/projects/default/arrays/rl")).json()
    assert {each["name"] for each in found["jobs"]} == {"a", "b", "c"}, made


async def test_a_task_that_the_caller_may_not_run_refuses_no_other(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, task: Any) -> None:
        if task.name == "b":
            raise ApiProblem("forbidden", "not permitted")

    monkeypatch.setattr(jobs, "_check_step", refuse)
    texts = [f"{{name: {name}, run: x, {_LATER}}}" for name in "abc"]
    _, made = await post(api, make_ask(*texts, each=True))
    assert [each["name"] for each in made["jobs"]] == ["a", "c"]
    assert [(each["tasks"], each["code"]) for each in made["refused"]] == [([1], "forbidden")]
