"""Every route, with every role, in every relation of the caller to the project. The routes come
from the application itself, so a new route is tested at once; the expectation comes from a table
of this test's own, and for sensitive routes also from a list written by hand.
"""

import re
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from tests.api.api_state import TOKEN, Api, open_api
from tests.api.team import OWN, PARENTS, Team, make_team
from tests.own_parts import read_own

from cavvy.api.app import list_routes
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG, ProjectSource, RouteRule, list_rules
from cavvy.client.wire import StopAsk
from cavvy.domain.accounts import INSTALLATION, Role
from cavvy.domain.messages import PROTOCOL

ROUTES = [
    (method, route.path, rule)
    for route, rule in list_routes()
    for method in sorted(route.methods or ())
]
# written here again, so that a mistake in the product's table is seen
GRANTS = {
    "view": {"viewer", "member", "operator", "admin"},
    "spending": {"viewer", "member", "operator", "admin", "billing"},
    "run": {"member", "operator", "admin"},
    "operate": {"operator", "admin"},
    "audit": {"auditor", "admin"},
    "manage": {"admin"},
}
RUNNERS = {"member", "operator", "admin"}
_JOB = "/v1/projects/{project}/jobs/{name}"
_MACHINE = "/v1/projects/{project}/machines/{name}"
# sensitive routes -> the only roles that may use them, written by hand
SENSITIVE: dict[tuple[str, str], set[str]] = {
    ("POST", "/v1/projects/{project}/jobs"): RUNNERS,
    ("POST", "/v1/projects/{project}/jobs/{name}/model"): RUNNERS,
    ("POST", "/v1/projects/{project}/job-check"): RUNNERS,
    ("POST", "/v1/projects/{project}/job-graph-check"): RUNNERS,
    ("POST", "/v1/projects/{project}/job-graphs"): RUNNERS,
    ("POST", "/v1/projects/{project}/job-batches"): RUNNERS,
    ("POST", f"{_JOB}/stop"): RUNNERS,
    ("POST", f"{_JOB}/retry"): RUNNERS,
    ("POST", "/v1/projects/{project}/arrays/{name}/stop"): RUNNERS,
    ("POST", "/v1/projects/{project}/arrays/{name}/retry"): RUNNERS,
    ("DELETE", "/v1/projects/{project}/arrays/{name}"): RUNNERS,
    ("POST", f"{_JOB}/drill/preempt"): RUNNERS,
    ("POST", f"{_JOB}/resize"): RUNNERS,
    ("DELETE", _JOB): RUNNERS,
    ("POST", f"{_JOB}/exec"): RUNNERS,
    ("GET", f"{_JOB}/exec/{{exec_id}}"): RUNNERS,
    ("POST", f"{_JOB}/exec/{{exec_id}}/input"): RUNNERS,
    ("GET", f"{_JOB}/logs"): {"viewer", *RUNNERS},
    ("GET", f"{_JOB}/events"): {"viewer", *RUNNERS},
    ("GET", f"{_JOB}/cost"): {"billing", "viewer", *RUNNERS},
    ("POST", f"{_MACHINE}/start"): RUNNERS,
    ("POST", f"{_MACHINE}/stop"): RUNNERS,
    ("POST", f"{_MACHINE}/keep"): RUNNERS,
    ("DELETE", _MACHINE): RUNNERS,
    ("POST", "/v1/projects/{project}/pools"): {"operator", "admin"},
    ("DELETE", "/v1/projects/{project}/pools/{name}"): {"operator", "admin"},
    ("GET", "/v1/projects/{project}/secrets"): RUNNERS,
    ("DELETE", "/v1/projects/{project}/volumes/{name}"): RUNNERS,
    ("PUT", "/v1/projects/{project}/recipes/{name}"): RUNNERS,
    ("DELETE", "/v1/projects/{project}/recipes/{name}"): RUNNERS,
    ("PUT", "/v1/projects/{project}/secrets/{name}"): {"operator", "admin"},
    ("DELETE", "/v1/projects/{project}/secrets/{name}"): {"operator", "admin"},
    ("POST", "/v1/projects/{project}/blobs/missing"): RUNNERS,
    ("PUT", "/v1/projects/{project}/blobs/pack"): RUNNERS,
    ("PUT", "/v1/projects/{project}/blobs/{blob}"): RUNNERS,
    ("GET", "/v1/projects/{project}/blobs/{blob}"): RUNNERS,
    ("GET", "/v1/projects/{project}/roles"): {"admin"},
    ("PUT", "/v1/projects/{project}/roles/{account}/{role}"): {"admin"},
    ("DELETE", "/v1/projects/{project}/roles/{account}/{role}"): {"admin"},
    ("POST", "/v1/down"): {"operator", "admin"},
    ("POST", "/v1/projects"): {"admin"},
    # the roles must be roles on the installation for these
    ("POST", "/v1/gc"): {"operator", "admin"},
    ("POST", "/v1/invitations"): {"operator", "admin"},
    ("DELETE", "/v1/joined/{name}"): {"operator", "admin"},
    ("POST", "/v1/hosts/cordon"): {"operator", "admin"},
    ("POST", "/v1/hosts/drain"): {"operator", "admin"},
    ("POST", "/v1/hosts/uncordon"): {"operator", "admin"},
    ("POST", "/v1/reservations"): {"operator", "admin"},
    ("DELETE", "/v1/reservations/{name}"): {"operator", "admin"},
    ("POST", "/v1/server/stop"): {"operator", "admin"},
    ("POST", "/v1/secret-keys/rotate"): {"admin"},
    ("GET", "/v1/projects/{project}/credentials"): RUNNERS,
    ("PUT", "/v1/projects/{project}/credentials/{provider}"): {"admin"},
    ("DELETE", "/v1/projects/{project}/credentials/{provider}"): {"admin"},
    ("PUT", "/v1/accounts/{account}/disabled"): {"admin"},
    ("DELETE", "/v1/accounts/{account}/disabled"): {"admin"},
    ("POST", "/v1/trusts"): {"admin"},
    ("DELETE", "/v1/trusts/{trust}"): {"admin"},
    ("PUT", "/v1/policy"): {"admin"},
    ("DELETE", "/v1/policy"): {"admin"},
    ("POST", "/v1/projects/{project}/move"): {"admin"},
    ("POST", "/v1/projects/{project}/archive"): {"admin"},
    ("DELETE", "/v1/projects/{project}/archive"): {"admin"},
    ("PUT", "/v1/projects/{project}/policy"): {"admin"},
    ("DELETE", "/v1/projects/{project}/policy"): {"admin"},
    ("PUT", "/v1/budgets/{name}"): {"admin"},
    ("DELETE", "/v1/budgets/{name}"): {"admin"},
    ("POST", "/v1/budgets/{name}/approve"): {"admin"},
    ("POST", "/v1/projects/{project}/budgets/{name}/request"): RUNNERS,
    ("GET", "/v1/accounts"): {"admin"},
    ("POST", "/v1/accounts"): {"admin"},
    ("DELETE", "/v1/accounts/{account}"): {"admin"},
    ("GET", "/v1/roles"): {"admin"},
    ("PUT", "/v1/roles/{account}/{role}"): {"admin"},
    ("DELETE", "/v1/roles/{account}/{role}"): {"admin"},
}
# routes whose answers have no row of each project in these tests
_NAMED = ("/v1/gpu-use", "/v1/shares", "/v1/hosts", "/v1/reservations")
# all other routes that read something of users -> how they find the project, and the permission that
# they need, written by hand
READS: dict[str, tuple[str, str | None]] = {
    "/v1/jobs": ("query", "view"),
    "/v1/arrays": ("query", "view"),
    "/v1/job-search": ("query", "view"),
    "/v1/gpu-use": ("query", "view"),
    "/v1/projects/{project}/jobs/{name}/figures": ("path", "view"),
    "/v1/projects/{project}/offers": ("path", "view"),
    "/v1/projects/{project}/recipes": ("path", "view"),
    "/v1/projects/{project}/volumes": ("path", "view"),
    "/v1/shares": ("query", "view"),
    "/v1/nodes": ("query", "view"),
    "/v1/hosts": ("query", "view"),
    "/v1/reservations": ("query", "view"),
    "/v1/machines": ("query", "view"),
    "/v1/pools": ("query", "view"),
    "/v1/budgets": ("query", "spending"),
    "/v1/ledger": ("query", "spending"),
    "/v1/ledger/sums": ("query", "spending"),
    "/metrics": ("query", "spending"),
    "/v1/audit-log": ("query", "audit"),
    "/v1/projects/{project}/arrays/{name}": ("path", "view"),
    "/v1/projects/{project}/jobs": ("path", "view"),
    "/v1/projects/{project}/jobs/{name}": ("path", "view"),
    "/v1/projects/{project}/jobs/{name}/forecast": ("path", "view"),
    "/v1/projects/{project}/machines/{name}": ("path", "view"),
    "/v1/projects/{project}/pools/{name}": ("path", "view"),
    "/v1/projects/{project}/cost": ("path", "spending"),
    "/v1/projects/{project}/audit": ("path", "spending"),
    "/v1/joined": ("installation", "view"),
    "/v1/markets": ("installation", "view"),
    "/v1/quotas": ("installation", "view"),
    "/v1/secret-keys": ("installation", "manage"),
    "/v1/trusts": ("installation", "manage"),
    "/v1/sign-in": ("open", None),
    "/v1/policy": ("installation", "view"),
    "/v1/projects/{project}/policy": ("path", "view"),
    "/v1/server": ("signed-in", None),
    "/v1/whoami": ("signed-in", None),
    "/v1/tokens": ("signed-in", None),
    "/v1/projects": ("signed-in", None),
    "/v1/health": ("open", None),
    "/boot/v1/{digest}": ("open", None),
    "/nodes/v1/{provider}/script": ("open", None),
}
OPEN: list[str] = []  # paths of capabilities that need no token
for _rules in read_own("route_rules"):
    SENSITIVE |= getattr(_rules, "SENSITIVE", {})
    READS |= getattr(_rules, "READS", {})
    OPEN += getattr(_rules, "OPEN", ())
# routes that every account may use and that change something; the tests below cover them
SELF_SERVICE = {("POST", "/v1/tokens"), ("DELETE", "/v1/tokens/{token}")}
# the body in which each route with the source BODY names the project
BODIES: dict[str, Any] = {
    "/v1/down": lambda project: {"project": project, "dry_run": True},
    "/v1/projects": lambda project: {"name": "company", "parent": project},
}
AGENT_QUERY = {"rank": 0, "offset": 0, "length": 1, "size": 1, "path": "x"}
REFUSED = {"unauthorised", "role-needed", "scope-needed", "project-not-found", "forbidden"}


@pytest.fixture(params=["memory", "postgres"])
async def team(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Team]:
    async with open_api(request.param, tmp_path) as api:
        yield await make_team(api)


def in_project(method: str, path: str, rule: RouteRule) -> bool:
    return rule.source in (ProjectSource.PATH, ProjectSource.BODY)


async def ask(team: Team, method: str, path: str, project: str, token: str | None) -> Any:
    """Send the request. Routes that read a body get one that no route can use, unless it names the
    project, so that a permitted request changes nothing; other changes name what does not exist.
    """
    gets = method == "GET"
    values = {
        "project": project,
        "name": team.jobs.get(project, "x") if gets or token is None else "does-not-exist",
        "provider": "join",
        "call": "x",
        "blob": "0" * 64,
        "digest": "0" * 64,
        "index": "0",
    }
    for kind in ("machine", "pool"):
        if f"/{kind}s/" in path and gets:
            values["name"] = f"{kind}-of-{project}-mark"
    if "/secrets/" in path:
        values["name"] = "DOES_NOT_EXIST"
    made = path.format_map({**values, **{"role": "admin"}, **_rest(path, values)})
    body = BODIES[path](project) if path in BODIES else None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    headers["Cavvy-Agent-Protocol"] = str(PROTOCOL)
    content: dict[str, Any] = {"json": body} if body else {"content": b"" if gets else b"["}
    if path.startswith("/agent"):
        made = f"{made}?{urlencode({**AGENT_QUERY, 'gang': team.gangs.get(project, 'g')})}"
    if path.endswith("/offers"):  # of the catalog's 123,001 rows, which name no project, read none
        made += "?provider=fake"
    return await team.http.request(method, made, headers=headers, **content)


def _rest(path: str, known: dict[str, str]) -> dict[str, str]:
    names = set(re.findall(r"{(\w+)}", path)) - set(known) - {"role"}
    return dict.fromkeys(names, "does-not-exist")


def code(answer: httpx.Response) -> str:
    """The code of an error; "" for success."""
    if answer.is_success:
        return ""
    return str(answer.json()["code"])


def roles_for(permission: str) -> Iterator[tuple[Role, bool]]:
    for role in Role:
        yield role, role in GRANTS[permission]


def check_no_marks(team: Team, answer: httpx.Response, visible: tuple[str, ...]) -> None:
    text = answer.text + repr(answer.headers)
    for project in set(PARENTS) - set(visible):
        found = [mark for mark in team.marks[project] if mark in text]
        assert not found, f"{answer.request.url} shows {found} of {project}"


def test_an_application_with_a_route_without_a_rule_does_not_start() -> None:
    router = APIRouter()
    router.add_api_route("/v1/forgotten", lambda: None, methods=["GET"])
    with pytest.raises(TypeError, match="/v1/forgotten"):
        list(list_rules(router.routes))


def test_no_body_of_an_agent_is_decoded_before_the_token_of_its_gang_is_checked() -> None:
    async def early(ask: StopAsk) -> None: ...

    with pytest.raises(TypeError, match="/v1/early"):
        RouteGroup("agent").post("/v1/early", rule=GANG)(early)


def test_every_route_that_changes_something_is_in_the_list() -> None:
    changing = {
        (method, path)
        for method, path, rule in ROUTES
        if method != "GET"
        and rule.source not in (ProjectSource.GANG, ProjectSource.MACHINE, ProjectSource.OPEN)
    }
    assert changing - set(SENSITIVE) - SELF_SERVICE == set()
    assert (set(SENSITIVE) | SELF_SERVICE) - {(method, path) for method, path, _ in ROUTES} == set()


def test_sensitive_routes_have_the_roles_of_the_list() -> None:
    for method, path, rule in ROUTES:
        if (method, path) in SENSITIVE:
            assert rule.permission is not None
            assert GRANTS[rule.permission] == SENSITIVE[method, path], (method, path)
            source = "path" if "{project}" in path else "body" if path in BODIES else "installation"
            assert rule.source == source, (method, path)
        if rule.source is ProjectSource.OPEN:
            assert path in (
                "/v1/health",
                "/v1/sign-in",
                "/boot/v1/{digest}",
                "/nodes/v1/{provider}/script",
                *OPEN,
            )


def test_routes_that_read_need_what_the_list_says() -> None:
    found = {
        path: (str(rule.source), rule.permission and str(rule.permission))
        for method, path, rule in ROUTES
        if method == "GET" and (method, path) not in SENSITIVE and rule.source != "gang"
    }
    assert found == READS


async def test_roles_apply_in_their_project_and_below_it_and_hide_all_others(team: Team) -> None:
    for role in Role:
        token = await team.token(("team", role))
        for method, path, rule in ROUTES:
            if not in_project(method, path, rule):
                continue
            allowed = role in GRANTS[str(rule.permission)]
            for project in OWN:
                answer = await ask(team, method, path, project, token)
                told = (role, method, path, project, answer.text)
                assert (code(answer) not in REFUSED) is allowed, told
                if not allowed:
                    assert (answer.status_code, code(answer)) == (403, "role-needed"), told
                check_no_marks(team, answer, OWN)
            unknown = await ask(team, method, path, "unknown", token)
            for project in ("company", "other"):
                answer = await ask(team, method, path, project, token)
                told = (role, method, path, project, answer.text)
                assert (answer.status_code, code(answer)) == (404, "project-not-found"), told
                # an existing project looks exactly as one that does not exist
                assert answer.text.replace(project, "unknown") == unknown.text, told
                assert answer.status_code == unknown.status_code
                check_no_marks(team, answer, ())


async def test_roles_on_the_installation_apply_everywhere(team: Team) -> None:
    for role in Role:
        token = await team.token((INSTALLATION, role))
        for method, path, rule in ROUTES:
            if rule.permission is None:
                continue
            allowed = role in GRANTS[rule.permission]
            for project in ("other", "unknown") if in_project(method, path, rule) else ("",):
                answer = await ask(team, method, path, project, token)
                told = (role, method, path, project, answer.text)
                if rule.source is ProjectSource.QUERY:
                    assert answer.status_code == 200, told
                    check_no_marks(team, answer, tuple(PARENTS) if allowed else ())
                else:
                    assert (code(answer) not in REFUSED) is allowed, told
                    assert allowed or code(answer) == "role-needed", told


async def test_roles_in_a_project_give_no_permission_on_the_installation(team: Team) -> None:
    for role in Role:
        token = await team.token(("team", role), ("company", role))
        for method, path, rule in ROUTES:
            if rule.source is ProjectSource.INSTALLATION:
                answer = await ask(team, method, path, "", token)
                assert (answer.status_code, code(answer)) == (403, "role-needed"), (path, role)
                check_no_marks(team, answer, ())


async def test_lists_show_what_the_caller_may_see_and_nothing_else(team: Team) -> None:
    for project, marks in team.marks.items():
        array = f"array-of-{project}-mark"
        text = f"{{name: {array}, run: 'true', array: 0-0}}"
        await team.api.submit(text, project=project, consent=True)
        marks.add(array)
    for role in Role:
        token = await team.token(("team", role))
        for method, path, rule in ROUTES:
            if rule.source is not ProjectSource.QUERY:
                continue
            answer = await ask(team, method, path, "", token)
            allowed = role in GRANTS[str(rule.permission)]
            assert answer.status_code == 200, (role, path)
            check_no_marks(team, answer, OWN if allowed else ())
            if path == "/v1/shares":  # which names projects, and none of their rows
                assert not any(f'"{each}"' in answer.text for each in ("company", "other"))
                assert all((f'"{each}"' in answer.text) is allowed for each in OWN), (role, path)
            for project in OWN if allowed and path not in _NAMED else ():
                assert any(mark in answer.text for mark in team.marks[project]), (role, path)
            for project, status in (("other", 404), ("unknown", 404), ("team", 403)):
                one = await ask(team, method, f"{path}?project={project}", "", token)
                if project == "team" and allowed:
                    assert one.status_code == 200
                    check_no_marks(team, one, OWN)
                else:
                    assert one.status_code == status, (role, path, project, one.text)
                    check_no_marks(team, one, ())


async def test_counts_and_self_service_show_nothing_of_other_projects(team: Team) -> None:
    await team.outsider()
    for role in Role:
        token = await team.token(("team", role))
        for method, path, rule in ROUTES:
            if rule.source is ProjectSource.SIGNED_IN and method == "GET":
                answer = await ask(team, method, path, "", token)
                assert answer.status_code == 200, (role, path)
                check_no_marks(team, answer, OWN)
                assert '"other"' not in answer.text
                assert '"company"' not in answer.text
        server = (await ask(team, "GET", "/v1/server", "", token)).json()
        assert server["unfinished"] == (2 if role in GRANTS["view"] else 0)
        assert (server["home"], server["pid"], server["host"], server["address"]) == ("", 0, "", "")


async def test_no_route_accepts_a_token_that_is_not_valid(team: Team) -> None:
    everything = (INSTALLATION, Role.ADMIN)
    bad = {
        "none": None,
        "unknown": "cavvy_" + "a" * 43,
        "expired": await team.expired(everything),
        "revoked": await team.revoked(everything),
        "gang": team.api.app_state.tokens.of(team.gangs["team"]),
        "prefix": TOKEN[:-1],
    }
    for method, path, rule in ROUTES:
        if rule.source in (ProjectSource.OPEN, ProjectSource.MACHINE, ProjectSource.GANG):
            continue
        for kind, token in bad.items():
            answer = await ask(team, method, path, "team", token)
            assert (answer.status_code, code(answer)) == (401, "unauthorised"), (kind, path)
            check_no_marks(team, answer, ())


async def test_limits_of_a_token_apply_on_every_route(team: Team) -> None:
    everything = (INSTALLATION, Role.ADMIN)
    inside = await team.token(everything, project="team")
    for method, path, rule in ROUTES:
        if rule.permission is None:
            continue
        others = tuple(sorted(set(GRANTS) - {rule.permission}))
        token = await team.token(everything, scopes=others)
        answer = await ask(team, method, path, "team", token)
        assert (answer.status_code, code(answer)) == (403, "scope-needed"), (method, path)
        check_no_marks(team, answer, ())
        answer = await ask(team, method, path, "other", inside)
        if in_project(method, path, rule):
            assert (answer.status_code, code(answer)) == (404, "project-not-found"), path
        elif rule.source is ProjectSource.INSTALLATION:
            assert (answer.status_code, code(answer)) == (403, "scope-needed"), path
        check_no_marks(team, answer, OWN)


async def test_agents_routes_accept_only_the_token_of_their_own_gang(team: Team) -> None:
    tokens = {
        "account": await team.token((INSTALLATION, Role.ADMIN)),
        "foreign gang": team.api.app_state.tokens.of(team.gangs["other"]),
        "owner": TOKEN,
    }
    for method, path, rule in ROUTES:
        if rule.source not in (ProjectSource.GANG, ProjectSource.MACHINE):
            continue
        for kind, token in tokens.items():
            answer = await ask(team, method, path, "team", token)
            told = (kind, method, path, answer.text)
            # the body of some routes names the gang, and ours cannot be read
            assert answer.status_code in (401, 403, 409, 422), told
            if method == "GET":
                assert answer.status_code == 403, told
            check_no_marks(team, answer, ())
        answer = await ask(team, method, path, "team", None)
        assert answer.status_code == 401, (method, path, answer.text)


async def test_a_body_cannot_name_the_gang_of_another_project(team: Team) -> None:
    asked: dict[str, Any] = {"gang": team.gangs["team"], "rank": 0, "nonce": "n"}
    bodies = {
        "/agent/v1/claim": {**asked, "address": "a"},
        "/agent/v1/messages": {**asked, "messages": []},
        "/agent/v1/checkpoints": {**asked, "made_at": "2026-01-01T00:00:00Z", "files": []},
    }
    token = team.api.app_state.tokens.of(team.gangs["other"])
    headers = {"Authorization": f"Bearer {token}", "Cavvy-Agent-Protocol": str(PROTOCOL)}
    for path, body in bodies.items():
        answer = await team.http.post(path, json=body, headers=headers)
        assert (answer.status_code, code(answer)) == (403, "forbidden"), (path, answer.text)
        check_no_marks(team, answer, ())


async def test_the_key_of_a_foreign_submission_names_no_job(team: Team) -> None:
    token = await team.token(("team", Role.MEMBER))
    page = await team.api.app_state.store.list_jobs("other")
    team.api.http.headers["Authorization"] = f"Bearer {token}"
    answer = await team.api.post_job(
        "{name: t, run: 'true'}", key=page.jobs[0].id, project="team", consent=True
    )
    assert code(answer) == "key-reused"
    assert "other" not in answer.text.replace("another", "")
    assert "mark" not in answer.text


async def test_a_hash_gives_no_access_to_files_of_another_project(team: Team) -> None:
    owner, manifest = team.api.http, b'{"files": []}'
    snapshot = sha256(manifest).hexdigest()
    await owner.put(f"/v1/projects/other/blobs/{snapshot}", content=manifest)
    token = await team.token(("team", Role.ADMIN))
    headers = {"Authorization": f"Bearer {token}"}
    asked = {"blobs": [snapshot]}
    for project, missing in (("team", [snapshot]), ("sub", [snapshot])):
        path = f"/v1/projects/{project}/blobs/missing"
        found = await team.http.post(path, json=asked, headers=headers)
        assert found.json()["missing"] == missing
    body = {"text": "{name: t, run: 'true', workdir: .}", "origin": {"snapshot": snapshot}}
    refused = await team.http.post("/v1/projects/team/jobs", json=body, headers=headers)
    assert code(refused) == "snapshot-missing"
    known = await owner.post("/v1/projects/other/blobs/missing", json=asked)
    assert known.json()["missing"] == []


async def test_jobs_belong_to_the_account_that_sends_them(team: Team) -> None:
    token = await team.token(("team", Role.MEMBER))
    team.api.http.headers["Authorization"] = f"Bearer {token}"
    me = (await team.api.http.get("/v1/whoami")).json()["account"]
    made = await team.api.submit(project="team", user="somebody-else")
    assert (await team.api.app_state.store.job(made["id"])).user == me


@pytest.mark.parametrize("kind", ["memory"])
async def test_the_owner_of_the_state_folder_needs_no_account(kind: str, tmp_path: Path) -> None:
    async with open_api(kind, tmp_path) as api:
        await _check_owner(api)


async def _check_owner(api: Api) -> None:
    made = await api.submit(project="anything", user="ada")
    assert (await api.app_state.store.job(made["id"])).user == "ada"
    me = (await api.http.get("/v1/whoami")).json()
    assert (me["account"], me["scopes"]) == (None, None)
    assert [each["name"] for each in (await api.http.get("/v1/projects")).json()] == ["anything"]


def test_the_docstring_of_a_route_is_its_documentation() -> None:
    async def get() -> None:
        """Get a thing
        of two lines.

        More of it.
        """

    router = RouteGroup("things")
    router.get("/v1/things", rule=GANG)(get)
    (route,) = router.routes
    assert isinstance(route, APIRoute)
    assert (route.summary, route.description) == ("Get a thing of two lines.", "More of it.")
