"""The audit log over HTTP: each change and each refusal has one record, in the same transaction, and
nothing secret is in it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.api.api.test_route_matrix import ROUTES, ask, code
from tests.api.api_state import TOKEN, open_api
from tests.api.team import Team, make_team

from cavvy.api.audit import PER_ADDRESS, AuditMiddleware
from cavvy.api.rules import ProjectSource
from cavvy.domain.accounts import INSTALLATION, Role
from cavvy.domain.audit import AuditEntry, SealedRecord, check_chain
from cavvy.store.audit import PENDING
from cavvy.store.base import StoreError

# routes that change nothing by a method that could; written by hand
READING = {
    ("POST", "/v1/projects/{project}/blobs/missing"),
    ("POST", "/v1/projects/{project}/jobs/{name}/exec/{exec_id}/input"),
}
PLANTED = "planted-secret-value"


@pytest.fixture(params=["memory", "postgres"])
async def team(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Team]:
    async with open_api(request.param, tmp_path) as api:
        yield await make_team(api)


async def records(team: Team) -> list[SealedRecord]:
    found = list(await team.api.app_state.store.audit_records())
    list(check_chain(found))  # the chain is intact at every moment
    return found


async def new_records(team: Team, before: int) -> list[dict[str, Any]]:
    return [json.loads(each.text) for each in (await records(team))[before:]]


async def send(team: Team, method: str, path: str, body: Any = None, token: str = TOKEN) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    return await team.http.request(method, f"/v1{path}", json=body, headers=headers)


async def test_every_route_that_succeeds_with_a_change_has_one_record(team: Team) -> None:
    """The owner sends every route that is not a pure reading one. What succeeds has one record,
    what fails has none, and no reading route has one.
    """
    succeeded = set()
    for method, path, rule in ROUTES:
        if rule.source in (ProjectSource.GANG, ProjectSource.MACHINE) or path == "/v1/server/stop":
            continue
        before = len(await records(team))
        answer = await ask(team, method, path, "team", TOKEN)
        found = await new_records(team, before)
        changes = answer.is_success and method != "GET" and (method, path) not in READING
        if path == "/v1/down":  # the matrix sends a dry run
            changes = False
        if path.startswith("/hooks/"):  # signed by its sender: the refusal of others is recorded
            assert len(found) == (method == "POST"), (method, found)
            continue
        assert len(found) == changes, (method, path, answer.status_code, found)
        if changes:
            succeeded.add((method, path))
            assert found[0]["action"] == f"{method} {path}"
            assert (found[0]["signed_in"], found[0]["account"]) == (True, "")
    assert ("PUT", "/v1/projects/{project}/blobs/{blob}") not in succeeded


async def test_changes_tell_who_what_and_from_where(team: Team) -> None:
    start = len(await records(team))
    await send(team, "POST", "/accounts", {"name": "eve", "kind": "service"})
    await send(team, "PUT", "/projects/team/roles/eve/member")
    await send(team, "PUT", "/projects/team/roles/eve/viewer")
    await send(team, "DELETE", "/projects/team/roles/eve/member")
    made = await send(team, "POST", "/tokens", {"account": "eve", "label": "ci", "scopes": ["run"]})
    await send(team, "POST", "/projects", {"name": "new", "parent": "team"})
    await send(team, "PUT", "/projects/team/secrets/KEY", {"value": PLANTED})
    await send(team, "DELETE", f"/tokens/{made.json()['view']['id']}")
    await send(team, "DELETE", "/accounts/eve")
    found = await new_records(team, start)
    told = [(each["action"], each["project"], each["before"], each["after"]) for each in found]
    token, secret = told[4][3], told[6][3]
    assert told == [
        ("POST /v1/accounts", "", None, {"name": "eve", "kind": "service"}),
        (_ROLE.format("PUT"), "team", {"roles": []}, {"roles": ["member"]}),
        (_ROLE.format("PUT"), "team", {"roles": ["member"]}, {"roles": ["member", "viewer"]}),
        (_ROLE.format("DELETE"), "team", {"roles": ["member", "viewer"]}, {"roles": ["viewer"]}),
        ("POST /v1/tokens", "", None, token),
        ("POST /v1/projects", "new", None, {"name": "new", "parent": "team"}),
        ("PUT /v1/projects/{project}/secrets/{name}", "team", {"set_at": None}, secret),
        ("DELETE /v1/tokens/{token}", "", None, None),
        ("DELETE /v1/accounts/{account}", "", {"roles": ["viewer team"]}, None),
    ]
    assert (token["account"], token["scopes"], token["label"]) == ("eve", ["run"], "ci")
    assert found[1]["target"] == {"project": "team", "account": "eve", "role": "member"}
    assert {each["address"] for each in found} == {"127.0.0.1"}
    text = "".join(each.text for each in await records(team))
    for secret_text in (PLANTED, made.json()["token"], TOKEN):
        assert secret_text not in text


async def test_a_key_of_a_service_is_recorded_with_its_limits_and_without_its_secret(
    team: Team,
) -> None:
    pytest.importorskip("cavvy.capabilities.language_models", reason="it counts tokens")
    text = "{name: web, run: 'true', service: {port: 80, keys: true}}"
    await send(team, "PUT", "/projects/team/services/web", {"text": text, "consent": True})
    start = len(await records(team))
    keys = "/projects/team/services/web/keys"
    asked = {"label": "ada", "per_s": 2.5, "burst": 3, "residency": "eu", "expires_s": 60}
    asked |= {"tokens_per_min": 1000, "micros_per_day": 5_000_000, "weight": 2.0}
    asked |= {"priority": "high"}
    wrong_limits = (("tokens_per_min", 0), ("micros_per_day", -1), ("weight", 0.001))
    for name, wrong in (*wrong_limits, ("priority", "urgent")):
        refused = await send(team, "POST", keys, {**asked, name: wrong})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid-request")
        assert name in refused.json()["message"]
    start = len(await records(team))
    made = (await send(team, "POST", keys, asked)).json()
    await send(team, "DELETE", f"{keys}/{made['view']['id']}")
    created, revoked = await new_records(team, start)
    assert created["after"] == {"key": made["view"]["id"], **asked}
    assert revoked["target"] == {"project": "team", "name": "web", "key": made["view"]["id"]}
    assert made["key"] not in "".join(each.text for each in await records(team))


_ROLE = "{} /v1/projects/{{project}}/roles/{{account}}/{{role}}"


async def test_a_submission_and_its_stop_are_of_the_account(team: Team) -> None:
    token = await team.token(("team", Role.MEMBER), account=None)
    start = len(await records(team))
    text = "{name: mine, run: 'sleep 9'}"
    answer = await send(team, "POST", "/projects/team/jobs", {"text": text, "consent": True}, token)
    assert answer.status_code == 201, answer.text
    await send(team, "POST", "/projects/team/jobs/mine/stop", {}, token)
    submitted, stopped = await new_records(team, start)
    assert submitted["account"] == stopped["account"] != ""
    assert submitted["token"] != ""
    assert submitted["after"]["id"] == answer.json()["id"]
    assert submitted["after"]["name"] == "mine"
    assert len(submitted["after"]["file_sha256"]) == 64
    assert stopped["target"] == {"project": "team", "name": "mine"}


async def test_every_refusal_has_a_record_and_tells_of_no_other_project(team: Team) -> None:
    token = await team.token(("team", Role.VIEWER))
    for method, path, status, told, account in (
        ("GET", "/projects/other/jobs", 404, "project-not-found", True),
        ("GET", "/projects/unknown/jobs", 404, "project-not-found", True),
        ("POST", "/projects/unknown/jobs", 404, "project-not-found", True),
        ("GET", "/accounts", 403, "role-needed", True),
        ("POST", "/accounts", 403, "role-needed", True),
        ("DELETE", "/accounts/ada", 403, "role-needed", True),
        ("POST", "/projects/team/jobs", 403, "role-needed", True),
        ("GET", "/jobs", 401, "unauthorised", False),
        ("POST", "/server/stop", 401, "unauthorised", False),
    ):
        start = len(await records(team))
        shown = token if account else "cavvy_" + "a" * 43
        answer = await send(team, method, path, token=shown)
        assert answer.status_code == status
        (found,) = await new_records(team, start)
        assert (found["outcome"], found["code"]) == ("refused", told)
        assert (found["signed_in"], found["account"] != "") == (account, account)
        assert "cavvy_" not in json.dumps(found)
    start = len(await records(team))
    assert (await send(team, "GET", "/projects/team/jobs/none", token=token)).status_code == 404
    assert (await send(team, "POST", "/projects", {"name": "?"})).status_code == 422
    assert await new_records(team, start) == []  # mistakes are no refusals


async def test_a_flood_of_refusals_leaves_few_records_and_their_number(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = len(await records(team))
    for _ in range(3 * PER_ADDRESS):
        await send(team, "GET", "/jobs", token="wrong")
    assert len(await new_records(team, start)) == PER_ADDRESS
    later = team.api.app_state.now() + timedelta(minutes=2)
    monkeypatch.setattr(team.api.app_state, "now", lambda: later)
    await send(team, "GET", "/jobs", token="wrong")
    *_, summary, last = await new_records(team, start)
    assert (summary["code"], summary["left_out"]) == ("left-out", 2 * PER_ADDRESS)
    assert (last["code"], last["left_out"]) == ("unauthorised", 0)


async def test_a_write_that_fails_leaves_no_record_and_none_is_written_without_one(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = len(await records(team))
    assert (await send(team, "POST", "/accounts", {"name": "ann"})).status_code == 201
    assert (await send(team, "POST", "/accounts", {"name": "ann"})).status_code == 409
    assert len(await new_records(team, start)) == 1

    def fail(*_: object) -> None:
        raise StoreError("no record can be written")

    monkeypatch.setattr("cavvy.store.audit.seal", fail)
    assert (await send(team, "POST", "/accounts", {"name": "bob"})).status_code >= 500
    monkeypatch.undo()
    names = {each.name for each in await team.api.app_state.store.accounts()}
    assert "ann" in names
    assert "bob" not in names


async def test_writers_at_the_same_time_form_one_chain(team: Team) -> None:
    start = len(await records(team))
    answers = await asyncio.gather(
        *(send(team, "POST", "/accounts", {"name": f"p{number}"}) for number in range(40)),
        *(send(team, "GET", "/jobs", token="wrong") for _ in range(10)),
    )
    assert {answer.status_code for answer in answers} == {201, 401}
    assert len(await new_records(team, start)) == 50  # `records` checks the chain


async def test_records_cannot_be_changed_or_removed_by_sql(team: Team) -> None:
    await send(team, "POST", "/accounts", {"name": "ann"})
    store: Any = team.api.app_state.store
    before = await records(team)
    for sql in ("UPDATE audit_log SET account = 'x'", "DELETE FROM audit_log"):
        with pytest.raises(Exception, match="append-only"):
            await store._change(sql)
    assert await records(team) == before


async def test_auditors_read_and_others_do_not(team: Team) -> None:
    await send(team, "PUT", "/projects/team/secrets/KEY", {"value": PLANTED})
    await send(team, "PUT", "/projects/other/secrets/KEY", {"value": PLANTED})
    everything = await team.token((INSTALLATION, Role.AUDITOR))
    one = await team.token(("team", Role.AUDITOR))
    for role in set(Role) - {Role.AUDITOR, Role.ADMIN}:
        token = await team.token(("team", role))
        answer = await send(team, "GET", "/audit-log?project=team", token=token)
        assert (answer.status_code, code(answer)) == (403, "role-needed")
    whole = (await send(team, "GET", "/audit-log", token=everything)).json()["records"]
    assert {"team", "other"} <= {each["project"] for each in whole}
    mine = (await send(team, "GET", "/audit-log", token=one)).json()["records"]
    assert {each["project"] for each in mine} == {"team", "sub"}
    assert (await send(team, "GET", "/audit-log?project=other", token=one)).status_code == 404
    for path in ("/accounts", "/projects/team/jobs", "/projects/team/secrets"):
        assert (await send(team, "GET", path, token=everything)).status_code == 403


async def test_pages_and_filters(team: Team) -> None:
    for number in range(5):
        await send(team, "POST", "/accounts", {"name": f"n{number}"})
    await send(team, "GET", "/jobs", token="wrong")

    async def numbers(query: str) -> list[int]:
        answer = await send(team, "GET", f"/audit-log?{query}")
        assert answer.status_code == 200, answer.text
        return [each["number"] for each in answer.json()["records"]]

    every = await numbers("")
    assert await numbers("limit=2") == every[:2]
    assert await numbers(f"limit=2&after={every[1]}") == every[2:4]
    assert await numbers("limit=2&newest=true") == every[-2:]
    assert await numbers("outcome=refused") == every[-1:]
    assert await numbers("account=nobody") == []
    assert await numbers("since=2999-01-01T00:00:00Z") == []


async def test_writes_outside_of_a_request_have_no_record(team: Team) -> None:
    start = len(await records(team))
    assert PENDING.get() is None
    await team.token(("team", Role.VIEWER))  # by the store itself, as the control plane writes
    assert await new_records(team, start) == []


async def test_a_write_after_the_answer_is_not_of_the_request(team: Team) -> None:
    """A task that a request leaves behind inherits its context, but not its entry."""
    app_state = team.api.app_state
    left: list[asyncio.Task[None]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def late() -> None:
            await asyncio.sleep(0.05)
            await app_state.store.remove_account("ann")

        left.append(asyncio.create_task(late()))
        await send({"type": "http.response.start", "status": 403, "headers": []})

    async def ignore(message: Any) -> None: ...

    await send(team, "POST", "/accounts", {"name": "ann"})
    start = len(await records(team))
    scope = {"type": "http", "method": "POST", "path": "/x", "client": None}
    await AuditMiddleware(app, app_state)(scope, ignore, ignore)  # type: ignore[arg-type]
    await left[0]
    (only,) = await new_records(team, start)
    assert only["outcome"] == "refused"


def test_an_entry_has_no_place_for_a_body() -> None:
    """What a request sends is never recorded as a whole, because it may be secret."""
    assert {"body", "headers", "query"} & set(AuditEntry.__struct_fields__) == set()
