"""The order of the queue as users see it: shares of projects, and what is before a job."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from tests.api.api.test_api_agents import claim, report
from tests.api.api_state import Api, until
from tests.api.team import make_team

from cavvy.client.paths import make_key
from cavvy.domain.accounts import Role
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite

JOB = "{run: 'true'}"


async def shares(api: Api, query: str = "") -> dict[str, dict[str, Any]]:
    answer = await api.http.get(f"/v1/shares{query}")
    assert answer.status_code == 200, answer.text
    return {row["project"]: row for row in answer.json()["projects"]}


async def put(api: Api, project: str, **rules: Any) -> int:
    return (await api.http.put(f"/v1/projects/{project}/policy", json=rules)).status_code


async def begin(api: Api, *projects: str, **ask: Any) -> list[str]:
    """Submit a job in each project, and return the jobs' names; two of all jobs can start."""
    return [(await api.post_job(JOB, project=each, **ask)).json()["name"] for each in projects]


async def is_full(api: Api) -> bool:
    return sum(row["jobs"] for row in (await shares(api)).values()) == 2


async def test_shares_and_use_of_projects(api: Api) -> None:
    assert await put(api, "a", share=3, quota_gpus=2) == 204
    await begin(api, "a", "a", "a", "b")
    await until(lambda: is_full(api))
    rows = await shares(api)
    assert {name: (row["weight"], row["part"]) for name, row in rows.items()} == {
        "a": (3, 0.75),
        "b": (1, 0.25),
    }
    assert sum(row["waiting_jobs"] for row in rows.values()) == 2
    assert (rows["a"]["quota_gpus"], rows["b"]["quota_gpus"]) == (2, None)
    debts = [row["debt_gpu_hours"] for row in rows.values()]
    assert sum(debts) == pytest.approx(0)
    # within the quota of 2 GPUs, two jobs without GPUs hold an eighth each
    assert sum(loan["gpus"] for loan in rows["a"]["lent"]) == rows["b"]["gpus"]
    assert [loan["project"] for loan in rows["b"]["borrowed"]] == ["a"] * (rows["b"]["gpus"] > 0)
    assert [*await shares(api, "?project=b")] == ["b"]


async def test_limits_of_a_policy_are_checked_and_shown_with_the_job(api: Api) -> None:
    for wrong in (
        {"share": -1},
        {"max_gpus": 1e7},
        {"user_jobs": 1.5},
        {"quota_gpus": "2"},
        {"user_waiting": -1},
        {"max_micros_per_hour": -1},
        {"quota_accelerators": {"H100": -1}},
        {"user_accelerators": {"H100": 1, "h100": 2}},
        {"max_accelerators": {"A100-80GB": 1}},
        {"max_accelerators": {"": 1}},
        {"max_accelerators": {"H" * 201: 1}},
        {"users": {"": {"jobs": 1}}},
        {"users": {"a\x1b[31m": {"jobs": 1}}},
        {"users": {"a" * 201: {"jobs": 1}}},
        {"users": {"ann": {"jobs": -1}}},
        {"users": {"ann": {"gpus": 1e7}}},
        {"users": {"ann": {"accelerators": {"H10O": 1}}}},
        {"users": {"ann": {"share": 1}}},
        {"users": {f"u{number}": {"jobs": 1} for number in range(201)}},
    ):
        assert await put(api, "p", **wrong) == 422
    wrong = {"max_accelerators": {"H10O": 1}}
    answer = await api.http.put("/v1/projects/p/policy", json=wrong)
    assert answer.json()["hint"] == "did you mean H100?"
    named = {"h100": 1, "RTX 4090": 2, "A100-SXM4": 3, "h100-sxm": 4, "TPU": 5}
    assert await put(api, "q", max_accelerators=named) == 204
    (own,) = (await api.http.get("/v1/projects/q/policy")).json()
    assert own["max_accelerators"] == {
        "H100": 1,
        "RTX4090": 2,
        "A100": 3,
        "H100-SXM": 4,
        "tpu": 5,
    }
    answer = await api.http.put("/v1/policy", json={"share": 2})
    assert (answer.status_code, "-p PROJECT" in answer.json()["hint"]) == (422, True)
    assert await put(api, "p", user_jobs=1) == 204
    await begin(api, "p", "p", user="ann")

    async def waiting() -> list[str]:
        path = "/v1/projects/p/jobs?phase=queued"
        return [job["reason"] for job in (await api.http.get(path)).json()["jobs"]]

    reason = "waits for the limit of project p: user ann runs 1 of at most 1 jobs"
    await until(lambda: _equal(waiting, [reason]))
    assert await put(api, "p", users={"ann": {"jobs": 2}, "bob": {}}) == 204
    await until(lambda: _equal(waiting, []))
    (own,) = (await api.http.get("/v1/projects/p/policy")).json()
    assert [*own["users"]] == ["ann"]
    assert (own["user_jobs"], own["users"]["ann"]["jobs"]) == (1, 2)


async def test_a_quota_fits_into_the_quotas_and_limits_above_it(api: Api) -> None:
    assert (await api.http.post("/v1/projects", json={"name": "top"})).status_code == 201
    below = {"name": "below", "parent": "top"}
    assert (await api.http.post("/v1/projects", json=below)).status_code == 201
    assert await put(api, "top", quota_accelerators={"H100": 8}, max_gpus=16) == 204

    async def refuse(project: str, **rules: Any) -> str:
        answer = await api.http.put(f"/v1/projects/{project}/policy", json=rules)
        assert answer.status_code == 422
        return str(answer.json()["message"])

    assert await refuse("below", quota_accelerators={"H100": 9}) == (
        "the quota of project below is 9 H100, but project top has a quota of 8 H100"
    )
    assert await refuse("below", quota_gpus=17) == (
        "the quota of project below is 17 GPUs, but project top has a limit of 16 GPUs"
    )
    assert await put(api, "below", quota_accelerators={"H100": 6}, quota_gpus=16) == 204
    assert "below is 6 H100" in await refuse("top", quota_accelerators={"H100": 5})
    assert "below is 16 GPUs" in await refuse("top", max_gpus=15)
    assert "a limit of 1 GPUs" in await refuse("below", max_gpus=1)
    assert await put(api, "below", user_jobs=1) == 204


async def test_limits_below_what_is_in_use_are_refused_without_a_confirmation(api: Api) -> None:
    await begin(api, "p", "p", user="ann")
    await until(lambda: is_full(api))
    path = "/v1/projects/p/policy"
    holds = "project p holds 0.25 GPUs, more than its"
    would = "running jobs would continue, and others wait until there is room"
    for rules, told in (
        ({"max_gpus": 0}, f"{holds} limit of 0 GPUs; {would}"),
        ({"quota_gpus": 0.2}, f"{holds} quota of 0.2 GPUs; other projects could get back for"),
        ({"user_jobs": 1}, "user ann holds 2 jobs in project p, more than the limit of 1 job; "),
        ({"users": {"ann": {"gpus": 0.125}}}, "user ann holds 0.25 GPUs in project p, more than"),
    ):
        answer = await api.http.put(path, json={"regions": ["eu"], **rules})
        assert (answer.status_code, answer.json()["code"]) == (409, "policy-exceeded")
        assert answer.json()["message"].startswith(told), answer.text
        assert "accept_exceeded" in answer.json()["hint"]
        assert (await api.http.get(path)).json() == []  # nothing was stored
        assert (await api.http.put(f"{path}?accept_exceeded=true", json=rules)).status_code == 204
        assert (await api.http.put(path, json=rules)).status_code == 204  # as it is
        assert (await api.http.delete(path)).status_code == 204
    everywhere = await api.http.put("/v1/policy", json={"max_gpus": 0.2})
    assert (everywhere.status_code, everywhere.json()["code"]) == (409, "policy-exceeded")
    assert everywhere.json()["message"].startswith("the installation holds 0.25 GPUs, ")


async def test_waiting_jobs_of_each_user_are_limited(api: Api) -> None:
    for made in ({"name": "p"}, {"name": "below", "parent": "p"}):
        assert (await api.http.post("/v1/projects", json=made)).status_code == 201
    assert await put(api, "p", user_waiting=2) == 204
    await begin(api, "q", "q")
    await until(lambda: is_full(api))
    assert (await api.post_job(JOB, project="p", user="ann")).status_code == 201
    array = {"run": "true", "array": "0-1"}
    refused = await api.post_job(str(array), project="p", user="ann")
    assert (refused.status_code, refused.json()["code"]) == (403, "policy-refused")
    assert refused.json()["message"] == (
        "project p allows each user at most 2 waiting jobs: ann has 1, and the submission adds 2"
    )
    assert (await api.post_job(JOB, project="p", user="ann")).status_code == 201
    assert (await api.post_job(JOB, project="p", user="ann")).status_code == 403
    assert await put(api, "p", users={"gus": {"waiting": 0}}) == 204
    refused = await api.post_job(JOB, project="p", user="gus")
    assert refused.json()["message"].startswith("project p allows gus at most 0 waiting jobs: ")
    key = make_key()
    for status in (201, 200):  # the first answer was lost
        answer = await api.post_job(str(array), project="p", user="cat", key=key)
        assert answer.status_code == status
    texts = [{"text": f"{{name: {name}, run: x}}", "user": "dan"} for name in "abc"]
    graph = {"tasks": texts, "keys": [make_key() for _ in texts]}
    answer = await api.http.post("/v1/projects/p/job-graphs", json=graph)
    assert (answer.status_code, answer.json()["code"]) == (403, "policy-refused")
    text = {"text": "{name: both, run: x, array: 0-1}", "user": "eve"}
    graph = {"tasks": [text], "keys": [make_key()]}
    for status in (201, 200):
        answer = await api.http.post("/v1/projects/p/job-graphs", json=graph)
        assert answer.status_code == status
    for project, status in (("below", 201), ("p", 201), ("below", 403), ("p", 403)):
        assert (await api.post_job(JOB, project=project, user="fay")).status_code == status
    for project, user in (("p", "bob"), ("q", "ann")):
        assert (await api.post_job(JOB, project=project, user=user)).status_code == 201


async def test_an_array_that_is_sent_again_does_not_count_twice(api: Api) -> None:
    """The answer to the first request may have been lost."""
    assert await put(api, "p", user_waiting=2) == 204
    await begin(api, "q", "q")
    await until(lambda: is_full(api))
    array, key = "{run: 'true', array: 0-1}", make_key()
    sent = [await api.post_job(array, project="p", user="ann", key=key) for _ in range(2)]
    assert [each.status_code for each in sent] == [201, 200]
    assert sent[0].json()["id"] == sent[1].json()["id"]
    assert (await api.post_job(array, project="p", user="ann")).status_code == 403


async def test_jobs_submitted_at_once_do_not_pass_the_limit_of_a_user(api: Api) -> None:
    assert await put(api, "p", user_waiting=2) == 204
    await begin(api, "q", "q")
    await until(lambda: is_full(api))
    sent = (api.post_job(JOB, project="p", user="ann") for _ in range(8))
    answers = [each.status_code for each in await asyncio.gather(*sent)]
    assert sorted(answers) == [201] * 2 + [403] * 6


async def test_retries_count_as_waiting_jobs(api: Api) -> None:
    await begin(api, "q", "q")
    await until(lambda: is_full(api))
    job = (await api.post_job(JOB, project="p", user="ann")).json()
    array = (await api.post_job("{run: 'true', array: 0-1}", project="p", user="ann")).json()
    paths = (f"jobs/{job['name']}", f"arrays/{array['name']}")
    for path in paths:
        answer = await api.http.post(f"/v1/projects/p/{path}/stop", json={})
        assert answer.status_code == 200, answer.text
    assert await put(api, "p", user_waiting=2) == 204
    answers = [await api.http.post(f"/v1/projects/p/{path}/retry") for path in paths]
    assert [each.status_code for each in answers] == [200, 403]
    assert answers[1].json()["message"].endswith("ann has 1, and the retry adds 2")


async def _equal(read: Callable[[], Awaitable[list[str]]], expected: list[str]) -> bool:
    return await read() == expected


async def test_no_project_can_raise_its_own_share(api: Api) -> None:
    """What one project gains, the projects beside it lose: the admins above them decide."""
    team = await make_team(api)
    own, above = [await team.token((name, Role.ADMIN)) for name in ("team", "company")]

    async def send(token: str, project: str, **rules: Any) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        path = f"/v1/projects/{project}/policy"
        if not rules:
            return (await team.http.delete(path, headers=headers)).status_code
        path += "?accept_exceeded=true"  # a job of the team may run
        return (await team.http.put(path, json=rules, headers=headers)).status_code

    assert [await send(own, "team", **each) for each in ({"share": 9}, {"quota_gpus": 9})] == [
        403
    ] * 2
    assert await send(own, "team", user_jobs=3) == 204
    assert await send(own, "sub", share=2) == 204
    assert await send(above, "team", share=0.5) == 204
    assert await send(own, "team", user_jobs=4) == 204
    assert [await send(own, "team"), await send(own, "team", share=None)] == [403] * 2
    for rule in ({"quota_accelerators": {"H100": 1}}, {"quota_micros_per_hour": 1}):
        assert (await send(own, "team", **rule), await send(above, "team", **rule)) == (403, 204)
    # its limits, too: it may lower them, and must not lift them
    for lower, higher in (
        ({"max_gpus": 8}, {"max_gpus": 9}),
        ({"max_accelerators": {"H100": 8}}, {"max_accelerators": {"A100": 8}}),
        ({"max_micros_per_hour": 5}, {"max_micros_per_hour": None}),
    ):
        assert [await send(own, "team", **each) for each in (lower, higher)] == [204, 403]
        assert await send(above, "team", **higher) == 204
    assert await send(above, "company", share=2) == 403
    assert await send(above, "team") == 204


async def test_what_is_before_a_job(api: Api) -> None:
    """Members see the names of their own projects only."""
    team = await make_team(api)
    await begin(api, "team", "team")
    *_, last = await begin(api, "team", "team", "other", "team")
    place = await _find_place(api.http, last)
    assert place["queue_position"] - 1 == sum(place["queue_ahead"].values())
    assert place["queue_ahead"]["other"] >= 1
    team.http.headers["Authorization"] = f"Bearer {await team.token(('team', Role.VIEWER))}"
    seen = await _find_place(team.http, last)
    assert seen["queue_position"] == place["queue_position"]
    assert seen["queue_ahead"][""] == place["queue_ahead"]["other"]
    assert "other" not in seen["queue_ahead"]


async def test_when_a_waiting_job_probably_starts(api: Api) -> None:
    """Two jobs run for at most an hour, and two wait. A job without limit could run for ever."""
    task = "{run: 'true', limits: {duration: 1h}}"
    jobs = [await api.submit(task) for _ in range(4)]
    await until(lambda: is_full(api))
    for job in jobs[:2]:
        gang = (await api.attempt(job["id"])).gang
        await claim(api, gang)
        await report(api, gang, {"seq": 1, "kind": "running"})

    async def list_estimated() -> list[dict[str, Any]]:
        jobs = (await api.http.get("/v1/jobs")).json()["jobs"]
        return [job for job in jobs if job["estimated_start"] is not None][::-1]

    await until(list_estimated)
    first, last = await list_estimated()
    assert (first["queue_position"], last["queue_position"]) == (1, 2)
    start = first["estimated_start"]
    now = api.app_state.now().isoformat()
    assert now < start["earliest"] < start["likely"] < start["latest"]
    assert start["likely"] < last["estimated_start"]["likely"]
    assert (await _find_place(api.http, first["name"], "default"))["estimated_start"] is not None

    # The job runs, fails and waits again between two estimates.
    offers = (await api.app_state.control_plane.pool.market()).market.offers
    until_then = api.app_state.now() + timedelta(days=1)
    avoid = {offer.key: until_then for offer in offers}
    job = replace(await api.app_state.store.job(first["id"]), avoid=avoid)
    await api.app_state.store.commit(AtomicWrite(jobs=[job]))

    async def rests() -> bool:
        found = (await _find_place(api.http, first["name"], "default"))["estimated_start"]
        return found is not None and found["earliest"] > until_then.isoformat()

    await until(rests)


async def _find_place(http: httpx.AsyncClient, name: str, project: str = "team") -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(f"/v1/projects/{project}/jobs/{name}")).json()
    return found
