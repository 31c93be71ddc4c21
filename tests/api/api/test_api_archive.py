"""Archived projects, and the budgets that a move of a project changes."""

from typing import Any

import httpx
import pytest
from tests.api.api_state import Api, until

FREE = "{name: t, run: 'true', resources: {cpu: 1}}"


async def make_tree(api: Api) -> None:
    for name, parent in (("company", None), ("other", None), ("team", "company"), ("sub", "team")):
        asked = {"name": name, "parent": parent}
        assert (await api.http.post("/v1/projects", json=asked)).status_code == 201


async def archive(api: Api, project: str, **ask: Any) -> httpx.Response:
    return await api.http.post(f"/v1/projects/{project}/archive", json=ask)


async def test_an_archived_project_starts_nothing_and_stays_readable(api: Api) -> None:
    await make_tree(api)
    job = (await api.post_job(FREE, project="sub")).json()["name"]
    answer = await archive(api, "team")
    assert (answer.status_code, answer.json()["code"]) == (409, "project-busy"), answer.text
    assert f"job {job}" in answer.json()["message"]
    assert (await archive(api, "team", stop=True)).status_code == 200
    path = f"/v1/projects/sub/jobs/{job}"

    async def ended() -> bool:
        return (await api.http.get(path)).json()["phase"] == "stopped"

    await until(ended)
    for answer in (
        await api.post_job(FREE, project="team"),
        await api.post_job(FREE, project="sub"),
        await api.http.post(f"{path}/retry"),
        await api.http.post("/v1/projects", json={"name": "new", "parent": "team"}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "project-archived"), answer.text
    taken = await api.http.post("/v1/projects", json={"name": "sub"})
    assert taken.json()["code"] == "name-taken"
    assert (await api.http.get("/v1/projects/sub/cost")).status_code == 200
    rows = {row["name"]: row for row in (await api.http.get("/v1/projects")).json()}
    assert rows["sub"]["archived_at"] == rows["team"]["archived_at"] is not None
    assert rows["company"]["archived_at"] is None
    assert (await archive(api, "nowhere")).json()["code"] == "project-not-found"
    refused = await api.http.delete("/v1/projects/sub/archive")
    assert refused.json()["code"] == "project-archived", "the one above it is"
    assert (await api.http.delete("/v1/projects/team/archive")).status_code == 204
    assert (await api.post_job(FREE, project="sub")).status_code == 201
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    changes = [each["text"] for each in log if "/archive" in each["text"]]
    assert any('"archived":["sub","team"],"stop":true' in each for each in changes), changes


async def test_a_capability_that_cannot_end_its_work_keeps_no_job_running(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(project: str | None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api.app_state.control_plane.own, "end_all", fail)
    await make_tree(api)
    jobs = [
        f"/v1/projects/{project}/jobs/{(await api.post_job(FREE, project=project)).json()['name']}"
        for project in ("sub", "team")
    ]
    assert (await archive(api, "team", stop=True)).status_code == 500

    async def ended() -> bool:
        return {(await api.http.get(job)).json()["phase"] for job in jobs} == {"stopped"}

    await until(ended)


async def test_a_move_tells_which_budgets_change(api: Api) -> None:
    await make_tree(api)
    for name, project in (("ours", "company"), ("theirs", "other"), ("own", "team"), ("all", "")):
        asked = {"limit_micros": 5_000_000, "project": project}
        answer = await api.http.put(f"/v1/budgets/{name}", json=asked)
        assert answer.status_code in (200, 204), answer.text
    ask = {"parent": "other"}
    answer = await api.http.post("/v1/projects/team/move", json=ask)
    assert (answer.status_code, answer.json()["code"]) == (409, "project-budgets"), answer.text
    told = answer.json()["message"]
    assert "start to count for the budget theirs of project other" in told
    assert "no longer count for the budget ours of project company" in told
    assert "budget own" not in told
    assert "budget all" not in told
    accepted = {**ask, "accept_budgets": True}
    answer = await api.http.post("/v1/projects/team/move", json=accepted)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["default", "never-created"])
async def test_a_project_that_was_not_created_cannot_be_archived(api: Api, name: str) -> None:
    assert (await archive(api, name)).json()["code"] == "project-not-found"
