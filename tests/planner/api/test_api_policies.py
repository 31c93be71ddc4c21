"""Policies of projects: who may set them, and what they refuse."""

from typing import Any

import httpx
import pytest
from tests.api.api_state import Api
from tests.api.team import make_team

from cavvy.domain.accounts import Role

PAID = "{name: t, run: 'true', resources: {cpu: 64}}"


async def submit(api: Api, text: str = PAID, project: str = "p") -> httpx.Response:
    return await api.http.post(f"/v1/projects/{project}/jobs", json={"text": text, "consent": True})


async def put(api: Api, path: str = "/v1/projects/p/policy", **rules: Any) -> httpx.Response:
    return await api.http.put(path, json=rules)


@pytest.mark.parametrize("path", ["/v1/policy", "/v1/projects/p/policy"])
@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        ({"providers": ["aws"]}, PAID, "permits only the providers aws"),
        ({"regions": ["asia"]}, PAID, "permits only the regions asia"),
        ({"max_rate_micros_per_hour": 2_000_000}, PAID, "permits at most $2.00/h a node"),
        (
            {"images": ["ghcr.io/acme/*"]},
            "{name: t, run: 'true', image: python}",
            "permits only the images ghcr.io/acme/*",
        ),
        ({"image_digests": True}, "{name: t, run: 'true', image: python}", "by their digest"),
    ],
)
async def test_a_submission_that_only_a_policy_prevents_is_refused(
    api: Api, path: str, rules: dict[str, Any], text: str, reason: str
) -> None:
    assert (await put(api, path, **rules)).status_code == 204
    answer = await submit(api, text)
    assert (answer.status_code, answer.json()["code"]) == (403, "policy-refused"), answer.text
    assert reason in answer.json()["message"]
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    assert [record["outcome"] for record in log] == ["done", "refused"]
    assert f"PUT {path.replace('/p/', '/{project}/')}" in log[0]["text"]
    assert "policy-refused" in log[1]["text"]
    assert (await api.http.delete(path)).status_code == 204
    if "image" not in text:  # at once, not after the cached offers have expired
        assert (await submit(api, text)).status_code == 201


async def test_a_job_that_no_offer_fits_is_not_blamed_on_the_policy(api: Api) -> None:
    await put(api, providers=["fake"])
    answer = await submit(api, "{name: t, run: 'true', resources: {cpu: 9999}}")
    assert answer.json()["code"] == "no-offer"


async def test_how_long_jobs_are_kept_restricts_nothing_and_is_recorded(api: Api) -> None:
    assert (await put(api, keep_jobs_days=0)).status_code == 204
    [found] = (await api.http.get("/v1/projects/p/policy")).json()
    assert found["keep_jobs_days"] == 0
    assert (await submit(api)).status_code == 201
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    assert '"keep_jobs_days":0' in log[0]["text"]


@pytest.mark.parametrize("path", ["/v1/policy", "/v1/projects/p/policy"])
async def test_fields_that_a_client_does_not_know_keep_their_values(api: Api, path: str) -> None:
    sent = {"keep_jobs_days": 7, "user_jobs": 3, "max_rate_micros_per_hour": 9, "regions": ["eu"]}
    await put(api, path, **sent, providers=["fake"])
    await put(api, path, providers=[], regions=["us"], max_rate_micros_per_hour=None)
    [found] = (await api.http.get(path)).json()
    assert (found["keep_jobs_days"], found["user_jobs"]) == (7, 3)
    assert (found["providers"], found["regions"]) == ([], ["us"])
    assert found["max_rate_micros_per_hour"] is None


async def test_other_projects_are_not_restricted(api: Api) -> None:
    await put(api, providers=["aws"])
    assert (await submit(api, project="q")).status_code == 201


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"providers": ["awss"]}, "'awss' is not a provider"),
        ({"keep_jobs_days": -1}, "`keep_jobs_days` must be 0 to 36,500"),
        ({"keep_jobs_days": 36_501}, "`keep_jobs_days` must be 0 to 36,500"),
        ({"accelerators": ["H10O"]}, "'H10O' is not the name of a GPU"),
        ({"regions": [""]}, "`regions` must have"),
        ({"images": ["x" * 201]}, "`images` must have"),
        ({"max_rate_micros_per_hour": -1}, "must not be negative"),
        ({"max_price": 3}, "max_price"),
        ({"regions": "eu"}, "regions"),
    ],
)
async def test_a_wrong_policy_is_refused_and_the_former_one_stays(
    api: Api, rules: dict[str, Any], message: str
) -> None:
    await put(api, regions=["eu"])
    answer = await put(api, **rules)
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["message"]
    (row,) = (await api.http.get("/v1/projects/p/policy")).json()
    assert (row["project"], row["regions"]) == ("p", ["eu"])


async def test_a_project_below_cannot_loosen_a_policy(api: Api) -> None:
    await make_team(api)  # `below` is a project below `team`
    await put(api, "/v1/projects/company/policy", providers=["aws"])
    await put(api, "/v1/projects/team/policy", providers=["aws", "fake"])
    rows = (await api.http.get("/v1/projects/team/policy")).json()
    assert [row["project"] for row in rows] == ["company", "team"]
    answer = await submit(api, project="team")
    assert answer.json()["code"] == "policy-refused"
    assert "project company permits only" in answer.json()["message"]


async def test_a_move_lifts_no_policy_silently(api: Api) -> None:
    team = await make_team(api)
    owner, member = await team.token(("", Role.ADMIN)), await team.token(("team", Role.ADMIN))

    async def move(token: str, name: str, **ask: object) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"}
        ask = {**ask, "accept_budgets": True}
        answer = await team.http.post(f"/v1/projects/{name}/move", json=ask, headers=headers)
        return answer.status_code, answer.json().get("code", "")

    await put(api, "/v1/projects/company/policy", providers=["aws"])
    assert await move(member, "team", parent=None) == (403, "role-needed"), "it would free itself"
    assert await move(owner, "team", parent="other") == (409, "policy-lifted")
    assert await move(owner, "team", parent="sub") == (409, "project-loop")
    nowhere = await move(owner, "team", parent="nowhere", lift_policies=True)
    assert nowhere == (404, "project-not-found")
    await put(api, "/v1/projects/other/policy", providers=["aws"])  # as strict as the former place
    assert await move(owner, "team", parent="other") == (200, "")
    assert await move(owner, "sub", parent=None, lift_policies=True) == (200, "")
    log = (await api.http.get("/v1/audit-log")).json()["records"]
    moves = [record["text"] for record in log if "/move" in record["text"]]
    assert '"before":{"parent":"company"}' in moves[-2]
    assert '"after":{"parent":"other"}' in moves[-2]
