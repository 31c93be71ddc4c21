"""Accounts, tokens, projects and roles over HTTP: nothing that they grant exceeds what the caller
has."""

from datetime import timedelta
from typing import Any

import httpx
import pytest
from tests.api.api_state import Api

from cavvy.api.tokens import hash_token, is_token, make_token
from cavvy.control.schedules import find_bar


async def call(api: Api, token: str, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return await api.http.request(method, f"/v1{path}", json=body, headers=headers)


async def add(api: Api, name: str, *roles: tuple[str, str], **limits: Any) -> str:
    """A new account with roles in projects ("" for all), and a token of it."""
    made = await api.http.post("/v1/accounts", json={"name": name})
    assert made.status_code in (201, 409), made.text
    for project, role in roles:
        place = f"/projects/{project}/roles" if project else "/roles"
        granted = await api.http.put(f"/v1{place}/{name}/{role}")
        assert granted.status_code == 204, granted.text
    token = await api.http.post("/v1/tokens", json={"account": name, **limits})
    assert token.status_code == 201, token.text
    return str(token.json()["token"])


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, "" if answer.is_success else answer.json()["code"]


def test_tokens_are_random_and_have_a_form_of_their_own() -> None:
    first, second = make_token(), make_token()
    assert first != second
    assert is_token(first)
    assert not is_token(first[:-1])
    assert not is_token("x" * len(first))
    assert len(hash_token(first)) == 64


async def test_a_token_is_stored_as_a_hash_only(api: Api) -> None:
    token = await add(api, "ada", ("team", "viewer"))
    credential = await api.app_state.store.credential(hash_token(token))
    assert credential is not None
    assert token not in repr(credential)
    assert await api.app_state.store.credential(token) is None


async def test_a_role_takes_effect_and_ends_with_the_next_request(api: Api) -> None:
    token = await add(api, "ada")
    assert code(await call(api, token, "GET", "/projects/team/jobs")) == (404, "project-not-found")
    await api.http.put("/v1/projects/team/roles/ada/viewer")
    assert code(await call(api, token, "GET", "/projects/team/jobs")) == (200, "")
    await api.http.delete("/v1/projects/team/roles/ada/viewer")
    assert code(await call(api, token, "GET", "/projects/team/jobs")) == (404, "project-not-found")
    again = await api.http.delete("/v1/projects/team/roles/ada/viewer")
    assert code(again) == (404, "role-not-found")


async def test_revoked_tokens_and_removed_accounts_are_refused_at_once(api: Api) -> None:
    token = await add(api, "ada", ("team", "viewer"))
    [row] = (await api.http.get("/v1/tokens?account=ada")).json()
    assert (await api.http.delete(f"/v1/tokens/{row['id']}")).status_code == 204
    answer = await call(api, token, "GET", "/whoami")
    assert code(answer) == (401, "unauthorised")
    assert "revoked" in answer.json()["message"]
    second = await add(api, "ada")
    assert (await api.http.delete("/v1/accounts/ada")).status_code == 204
    answer = await call(api, second, "GET", "/whoami")
    assert code(answer) == (401, "unauthorised")
    assert "`cavvy server token create`" in answer.json()["hint"]
    assert code(await api.http.delete("/v1/accounts/ada")) == (404, "account-not-found")


async def test_a_token_ends_with_the_one_that_it_was_created_with(api: Api) -> None:
    token = await add(api, "ada")
    [first] = (await api.http.get("/v1/tokens?account=ada")).json()
    child = (await call(api, token, "POST", "/tokens", {})).json()["token"]
    second = await add(api, "ada")  # by the owner, and so by no token of ada
    assert (await api.http.delete(f"/v1/tokens/{first['id']}")).status_code == 204
    for each, status in ((token, 401), (child, 401), (second, 200)):
        assert (await call(api, each, "GET", "/whoami")).status_code == status


async def test_the_last_use_of_a_token_is_known(api: Api) -> None:
    token = await add(api, "ada")
    before = (await api.http.get("/v1/tokens?account=ada")).json()[0]
    assert before["last_used_at"] is None
    await call(api, token, "GET", "/whoami")
    first = (await api.http.get("/v1/tokens?account=ada")).json()[0]["last_used_at"]
    await call(api, token, "GET", "/whoami")
    again = (await api.http.get("/v1/tokens?account=ada")).json()[0]["last_used_at"]
    assert first is not None
    assert first == again


async def test_accounts_see_and_revoke_only_their_own_tokens(api: Api) -> None:
    ada, bob = await add(api, "ada"), await add(api, "bob")
    [own] = (await call(api, ada, "GET", "/tokens")).json()
    assert own["account"] == "ada"
    assert code(await call(api, ada, "GET", "/tokens?account=bob")) == (403, "role-needed")
    refused = await call(api, bob, "DELETE", f"/tokens/{own['id']}")
    unknown = await call(api, bob, "DELETE", "/tokens/ffff")
    assert code(refused) == code(unknown) == (404, "token-not-found")
    assert (await call(api, ada, "DELETE", f"/tokens/{own['id']}")).status_code == 204


async def test_a_token_creates_none_that_is_stronger(api: Api) -> None:
    ada = await add(api, "ada", ("", "admin"), expires_s=3600)
    assert code(await call(api, ada, "POST", "/tokens", {"account": "nobody"})) == (
        404,
        "account-not-found",
    )
    made = await call(api, ada, "POST", "/tokens", {"expires_s": 86400})
    now = api.app_state.now()
    credential = await api.app_state.store.credential(hash_token(made.json()["token"]))
    assert credential is not None
    expires_at = credential.token.expires_at
    assert expires_at is not None
    assert expires_at <= now + timedelta(hours=1)
    bob = await add(api, "bob", ("team", "admin"))
    assert code(await call(api, bob, "POST", "/tokens", {"account": "ada"})) == (403, "role-needed")
    for limits in ({"scopes": ["manage"]}, {"project": "team"}):
        limited = await add(api, "ada", **limits)
        assert code(await call(api, limited, "POST", "/tokens", {})) == (403, "scope-needed")
        [shown] = (await call(api, limited, "GET", "/tokens")).json()
        other = (await call(api, bob, "GET", "/tokens")).json()[0]["id"]
        refused = await call(api, limited, "DELETE", f"/tokens/{other}")
        assert code(refused) == (404, "token-not-found")
        assert (await call(api, limited, "DELETE", f"/tokens/{shown['id']}")).status_code == 204


async def test_a_limited_token_grants_no_role_that_permits_more(api: Api) -> None:
    await add(api, "bob")
    await add(api, "ada", ("", "admin"))
    limited = await add(api, "ada", scopes=["manage", "view", "spending"])
    for place in ("/projects/team/roles", "/roles"):
        refused = await call(api, limited, "PUT", f"{place}/bob/admin")
        assert code(refused) == (403, "scope-needed")
        assert code(await call(api, limited, "PUT", f"{place}/bob/viewer")) == (204, "")
        found = (await api.http.get(f"/v1{place}")).json()
        assert [each["role"] for each in found if each["account"] == "bob"] == ["viewer"]


async def test_a_limited_token_sees_itself_also_when_it_was_not_used_for_long(api: Api) -> None:
    limited = await add(api, "ada", scopes=["view"])
    [shown] = (await call(api, limited, "GET", "/tokens")).json()  # the first use
    assert shown["scopes"] == ["view"]
    assert shown["last_used_at"] is not None


async def test_a_token_of_one_project_shows_no_other_project(api: Api) -> None:
    for name in ("team", "secret-plans"):
        await api.http.post("/v1/projects", json={"name": name})
    await api.http.post("/v1/projects", json={"name": "sub", "parent": "team"})
    inside = await add(api, "ada", ("", "viewer"), ("secret-plans", "admin"), project="team")
    answer = await call(api, inside, "GET", "/whoami")
    assert "secret-plans" not in answer.text
    roles = [(each["project"], each["role"]) for each in answer.json()["roles"]]
    assert roles == [("sub", "viewer"), ("team", "viewer")]
    assert "secret-plans" not in (await call(api, inside, "GET", "/projects")).text


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "account"),
        ({"account": "ada", "scopes": ["root"]}, "scope"),
        ({"account": "ada", "expires_s": 0}, "expires_s"),
        ({"account": "ada", "label": "x" * 81}, "label"),
        ({"account": "ada", "project": "A B"}, "project"),
    ],
)
async def test_a_wrong_token_is_explained(api: Api, body: Any, word: str) -> None:
    await add(api, "ada")
    answer = await api.http.post("/v1/tokens", json=body)
    assert code(answer) == (422, "invalid-request")
    assert word in answer.json()["message"]


async def test_an_admin_of_a_project_manages_what_is_below_it_only(api: Api) -> None:
    await add(api, "bob")
    await api.submit(project="taken")
    assert (await api.http.post("/v1/projects", json={"name": "team"})).status_code == 201
    ada = await add(api, "ada", ("team", "admin"))

    async def create(name: str, parent: str | None) -> tuple[int, str]:
        return code(await call(api, ada, "POST", "/projects", {"name": name, "parent": parent}))

    assert await create("sub", "team") == (201, "")
    assert await create("sub", "team") == (409, "name-taken")
    assert await create("taken", "team") == (409, "name-taken")  # or its jobs would be theirs
    assert await create("other", None) == (403, "role-needed")
    assert await create("other", "elsewhere") == (404, "project-not-found")
    assert code(await call(api, ada, "PUT", "/projects/sub/roles/bob/admin")) == (204, "")
    assert code(await call(api, ada, "PUT", "/projects/sub/roles/eve/admin")) == (
        404,
        "account-not-found",
    )
    assert code(await call(api, ada, "PUT", "/roles/ada/admin")) == (403, "role-needed")
    shown = (await call(api, ada, "GET", "/projects")).json()
    assert [(each["name"], each["parent"]) for each in shown] == [("sub", "team"), ("team", None)]
    # the owner may put a project that is in use below another one
    adopted = await api.http.post("/v1/projects", json={"name": "taken", "parent": "team"})
    assert adopted.status_code == 201
    assert code(await call(api, ada, "GET", "/projects/taken/jobs")) == (200, "")


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "-a", "a" * 64])
async def test_a_wrong_name_is_explained(api: Api, name: str) -> None:
    for path in ("/v1/accounts", "/v1/projects"):
        answer = await api.http.post(path, json={"name": name})
        assert code(answer) == (422, "invalid-request")
    wrong = await api.http.post("/v1/accounts", json={"name": "a", "kind": "robot"})
    assert code(wrong) == (422, "invalid-request")


async def test_the_reason_of_a_stopped_job_says_who_has_stopped_it(api: Api) -> None:
    ada, bob = [await add(api, name, ("team", "member")) for name in ("ada", "bob")]
    store = api.app_state.store
    for name, ask, reason in (
        ("one", {}, "stopped by bob"),
        ("two", {"reason": "enough"}, "enough"),
    ):
        task = f"{{name: {name}, run: x, schedule: {{cron: '0 * * * *'}}}}"
        await call(api, ada, "POST", "/projects/team/jobs", {"text": task})
        await call(api, bob, "POST", f"/projects/team/jobs/{name}/stop", ask)
        assert (await store.find_job("team", name)).reason == reason
    array = {"text": "{name: many, run: x, array: 0-1, window: '03:00-03:01'}"}
    made = await call(api, ada, "POST", "/projects/team/jobs", array)
    assert made.status_code in (200, 201), made.text
    await call(api, bob, "POST", "/projects/team/arrays/many/stop", {})
    assert (await store.find_job("team", "many.0")).reason == "stopped by bob"
    own = {"text": "{name: own, run: x, schedule: {cron: '0 * * * *'}}"}
    await api.http.post("/v1/projects/team/jobs", json=own)
    await api.http.post("/v1/projects/team/jobs/own/stop", json={})
    assert (await store.find_job("team", "own")).reason == "stopped by the user"


async def test_a_job_belongs_to_the_account_that_submits_or_retries_it(api: Api) -> None:
    ada, bob = [await add(api, name, ("team", "member")) for name in ("ada", "bob")]
    hourly = {"text": "{name: hourly, run: x, schedule: {cron: '0 * * * *'}}", "user": "eve"}
    made = await call(api, ada, "POST", "/projects/team/jobs", hourly)
    assert made.status_code in (200, 201), made.text
    store = api.app_state.store
    job = await store.find_job("team", "hourly")
    assert (job.user, job.account, job.barred) == ("ada", "ada", False)
    assert await find_bar(store, job) == ""
    await api.http.put("/v1/accounts/ada/disabled")
    assert await find_bar(store, job) == "the account ada is disabled"
    await api.http.delete("/v1/accounts/ada/disabled")
    assert await find_bar(store, job) == ""
    await api.http.delete("/v1/accounts/ada")
    assert await find_bar(store, job) == "the account ada was removed"
    await add(api, "ada", ("team", "member"))  # perhaps another person
    assert await find_bar(store, job) == "the account ada was removed"
    assert (await call(api, bob, "POST", "/projects/team/jobs/hourly/stop")).status_code == 200
    assert (await call(api, bob, "POST", "/projects/team/jobs/hourly/retry")).status_code == 200
    job = await store.find_job("team", "hourly")
    assert (job.account, await find_bar(store, job)) == ("bob", "")
    own = {"text": "{name: own, run: x, schedule: {cron: '0 * * * *'}}", "user": "eve"}
    await api.http.post("/v1/projects/team/jobs", json=own)
    job = await store.find_job("team", "own")
    assert (job.user, job.account) == ("eve", ""), "the owner of the server has no account"
    assert await find_bar(store, job) == ""
