"""Routes for accounts, their tokens, projects, and roles in projects."""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from secrets import token_hex
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.access_tokens import hash_token, make_token
from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change, note_project
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.rules import (
    SIGNED_IN,
    in_body,
    in_path,
    on_installation,
    principal_of,
    require,
)
from cavvy.api.wire import done, read, reply, view
from cavvy.client import account_wire as wire
from cavvy.domain.accounts import (
    INSTALLATION,
    Account,
    AccountKind,
    AccountToken,
    Permission,
    Project,
    Role,
    RoleBinding,
)
from cavvy.domain.authorization import (
    PERMISSIONS,
    Principal,
    Verdict,
    decide,
    list_current,
    list_roles,
)
from cavvy.store.base import NameConflict, RowNotFound

router = APIRouter(prefix="/v1", tags=["accounts"])
ACCOUNT_NAME = re.compile(r"[a-z0-9]([a-z0-9._@+-]{0,61}[a-z0-9])?")
PROJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LONGEST_LABEL = 80
_LONGEST_S = 10 * 366 * 86400  # ten years
AccountPath = Annotated[str, Path(max_length=63)]
TokenPath = Annotated[str, Path(max_length=63)]
RolePath = Annotated[Role, Path()]


@router.get(
    "/whoami",
    **document("The caller's account, roles and token.", rule=SIGNED_IN, answer=wire.WhoAmIView),
)
async def whoami(request: Request) -> Response:
    principal = principal_of(request)
    token, name = principal.token, principal.account or ""
    roles = [
        wire.RoleView(account=name, project=project, role=role)
        for project, found in sorted(principal.roles.items())
        if principal.within is None or project in principal.within
        for role in sorted(found)
    ]
    return reply(
        wire.WhoAmIView(
            account=principal.account,
            token_id=None if token is None else token.id,
            expires_at=None if token is None else token.expires_at,
            scopes=None if principal.scopes is None else sorted(principal.scopes),
            within=None if principal.within is None else sorted(principal.within),
            roles=roles,
        )
    )


# Accounts


@router.get(
    "/accounts",
    **document(
        "List all accounts.",
        rule=on_installation(Permission.MANAGE),
        answer=list[wire.AccountView],
    ),
)
async def list_accounts(request: Request) -> Response:
    found = await app_state_of(request).store.accounts()
    return reply([view(wire.AccountView, each) for each in found])


@router.post(
    "/accounts",
    **document(
        "Add an account of a person or a service. A new account has no roles.",
        rule=on_installation(Permission.MANAGE),
        ask=wire.AccountAsk,
        answer=wire.AccountView,
        status=201,
        errors=("name-taken",),
    ),
)
async def add_account(request: Request) -> Response:
    app_state = app_state_of(request)
    ask = await read(request, wire.AccountAsk)
    if not ACCOUNT_NAME.fullmatch(ask.name):
        told = "must have 1 to 63 characters from a-z, 0-9 and . _ @ + -"
        raise ApiProblem("invalid-request", f"`name` {told}, not {ask.name!r}")
    if ask.kind not in set(AccountKind):
        raise ApiProblem("invalid-request", f"`kind` must be user or service, not {ask.kind!r}")
    account = Account(name=ask.name, kind=AccountKind(ask.kind), created_at=app_state.now())
    note_change(request, after={"name": account.name, "kind": str(account.kind)})
    try:
        await app_state.store.add_account(account)
    except NameConflict as error:
        raise ApiProblem("name-taken", str(error)) from error
    return reply(view(wire.AccountView, account), 201)


@router.put(
    "/accounts/{account}/disabled",
    **document(
        "Disable an account: its tokens are refused, and it cannot sign in. The account "
        "keeps its roles. Its running jobs and its services continue; nothing else of it starts.",
        rule=on_installation(Permission.MANAGE),
        status=204,
        errors=("account-not-found",),
    ),
)
async def disable_account(request: Request, account: AccountPath) -> Response:
    return await _disable(request, account, app_state_of(request).now())


@router.delete(
    "/accounts/{account}/disabled",
    **document(
        "Enable an account again.",
        rule=on_installation(Permission.MANAGE),
        status=204,
        errors=("account-not-found",),
    ),
)
async def enable_account(request: Request, account: AccountPath) -> Response:
    return await _disable(request, account, None)


async def _disable(request: Request, account: str, at: datetime | None) -> Response:
    try:
        await app_state_of(request).store.disable_account(account, at)
    except RowNotFound as error:
        raise ApiProblem("account-not-found", str(error)) from error
    return done()


@router.delete(
    "/accounts/{account}",
    **document(
        "Remove an account with its tokens and roles. Its running jobs and its services continue; "
        "nothing else of it starts.",
        rule=on_installation(Permission.MANAGE),
        status=204,
        errors=("account-not-found",),
    ),
)
async def remove_account(request: Request, account: AccountPath) -> Response:
    store = app_state_of(request).store
    lost = [each for each in await store.roles() if each.account == account and not each.trust]
    note_change(request, before={"roles": [f"{each.role} {each.project}".strip() for each in lost]})
    try:
        await store.remove_account(account)
    except RowNotFound as error:
        raise ApiProblem("account-not-found", str(error)) from error
    return done()


# Tokens


@router.get(
    "/tokens",
    **document(
        "List the caller's tokens, without their secrets. Admins of the installation can list the "
        "tokens of all accounts, or of one account.",
        rule=SIGNED_IN,
        answer=list[wire.TokenView],
        errors=("role-needed",),
    ),
)
async def list_tokens(
    request: Request, account: Annotated[str | None, Query(max_length=63)] = None
) -> Response:
    principal = principal_of(request)
    if not _manages_accounts(principal):
        if account not in (None, principal.account):
            require(request, Permission.MANAGE, INSTALLATION)
        account = principal.account
    own = (
        principal.token and principal.token.id
        # the entry's own copy of the row, because the database's time of last use was just updated
    )
    found = await app_state_of(request).store.tokens(account)
    shown = [each for each in found if not principal.is_limited or each.id == own]
    return reply([_token_view(each) for each in shown])


@router.post(
    "/tokens",
    **document(
        "Create a token. The answer contains the token's secret, which cannot be read again. "
        "Admins of the installation can create tokens for every account.",
        rule=SIGNED_IN,
        ask=wire.TokenAsk,
        answer=wire.TokenMade,
        status=201,
        errors=("role-needed", "scope-needed", "account-not-found"),
    ),
)
async def add_token(request: Request) -> Response:
    app_state, principal = app_state_of(request), principal_of(request)
    ask = await read(request, wire.TokenAsk)
    _check_token(ask)
    account = ask.account or principal.account
    if account is None:
        raise ApiProblem(
            "invalid-request",
            "`account` must name the account of the token, as in `cavvy token create --user NAME`",
        )
    if principal.is_limited:
        raise ApiProblem("scope-needed", "a token with limits cannot create tokens")
    if account != principal.account:
        require(request, Permission.MANAGE, INSTALLATION)
    now = app_state.now()
    ends = [] if ask.expires_s is None else [now + timedelta(seconds=ask.expires_s)]
    parent = principal.token if account == principal.account else None
    if parent is not None and parent.expires_at:
        ends.append(parent.expires_at)  # a token must not prolong its own life
    token = AccountToken(
        id=token_hex(8),
        account=account,
        label=ask.label,
        scopes=tuple(sorted(set(ask.scopes))),
        project=ask.project,
        created_at=now,
        expires_at=min(ends, default=None),
        parent=None if parent is None else parent.id,
    )

    note_change(request, after=_token_facts(token))
    secret = make_token()
    try:
        await app_state.store.add_token(token, hash_token(secret))
    except RowNotFound:
        raise ApiProblem("account-not-found", f"no account {account}") from None
    return reply(wire.TokenMade(token=secret, view=_token_view(token)), 201)


@router.delete(
    "/tokens/{token}",
    **document(
        "Revoke a token. Admins of the installation can revoke any token; other callers can revoke "
        "only their own. A token with limits can revoke only itself.",
        rule=SIGNED_IN,
        status=204,
        errors=("token-not-found",),
    ),
)
async def revoke_token(request: Request, token: TokenPath) -> Response:
    app_state, principal = app_state_of(request), principal_of(request)
    own = principal.token is not None and principal.token.id == token
    try:
        if principal.is_limited and not own:
            raise RowNotFound(f"no token {token}")
        account = None if _manages_accounts(principal) else principal.account
        await app_state.store.revoke_token(token, account, app_state.now())
    except RowNotFound as error:
        raise ApiProblem("token-not-found", str(error)) from error
    return done()


def _manages_accounts(principal: Principal) -> bool:
    return decide(principal, Permission.MANAGE, INSTALLATION) is Verdict.ALLOWED


def _check_token(ask: wire.TokenAsk) -> None:
    unknown = sorted(set(ask.scopes) - set(Permission))
    if unknown:
        known = ", ".join(Permission)
        raise ApiProblem("invalid-request", f"unknown scope {unknown[0]!r}; scopes are {known}")
    if ask.expires_s is not None and not 0 < ask.expires_s <= _LONGEST_S:
        raise ApiProblem("invalid-request", "`expires_s` must be from 1 second to 10 years")
    if len(ask.label) > _LONGEST_LABEL:
        raise ApiProblem("invalid-request", f"`label` is longer than {_LONGEST_LABEL} characters")
    if ask.project is not None and not PROJECT_NAME.fullmatch(ask.project):
        raise ApiProblem("invalid-request", f"{ask.project!r} cannot be the name of a project")


def _token_facts(token: AccountToken) -> dict[str, object]:
    """Return the facts about a token for the audit log: everything except its secret."""
    return {
        "id": token.id,
        "account": token.account,
        "label": token.label,
        "scopes": list(token.scopes),
        "within": token.project,
        "expires_at": None if token.expires_at is None else token.expires_at.isoformat(),
    }


def _token_view(token: AccountToken) -> wire.TokenView:
    return view(wire.TokenView, token, scopes=list(token.scopes))


# Projects


@router.get(
    "/projects",
    **document(
        "List the projects in which the caller has a role.",
        rule=SIGNED_IN,
        answer=list[wire.ProjectView],
    ),
)
async def list_projects(request: Request) -> Response:
    principal = principal_of(request)
    rows = {each.name: each for each in await app_state_of(request).store.projects()}
    rows = {**{name: Project(name=name) for name in principal.roles if name}, **rows}
    seen = {
        name: each
        for name, each in rows.items()
        if list_roles(principal, name) and (principal.within is None or name in principal.within)
    }
    return reply(
        [
            wire.ProjectView(
                name=name,
                parent=each.parent if each.parent in seen else None,
                roles=[str(each) for each in sorted(list_roles(principal, name))],
                archived_at=each.archived_at,
            )
            for name, each in sorted(seen.items())
        ]
    )


@router.post(
    "/projects",
    **document(
        "Create a project, below another project or at the top level.",
        rule=in_body(Permission.MANAGE),
        ask=wire.ProjectAsk,
        answer=wire.ProjectView,
        status=201,
        errors=("name-taken",),
    ),
)
async def add_project(request: Request) -> Response:
    app_state, principal = app_state_of(request), principal_of(request)
    ask = await read(request, wire.ProjectAsk)
    require(request, Permission.MANAGE, ask.parent or INSTALLATION)
    if not PROJECT_NAME.fullmatch(ask.name):
        told = "must have 1 to 63 characters from a-z, 0-9 and -"
        raise ApiProblem("invalid-request", f"`name` {told}, not {ask.name!r}")
    project = Project(name=ask.name, parent=ask.parent)
    note_project(request, ask.name)
    note_change(request, after={"name": ask.name, "parent": ask.parent})
    try:
        # Otherwise, an admin of the parent would get a role in a project that is already in use.
        await app_state.store.add_project(project, adopt=_manages_accounts(principal))
    except NameConflict as error:
        raise ApiProblem("name-taken", str(error)) from error
    except RowNotFound:
        raise ApiProblem(
            "project-not-found",
            f"the parent {ask.parent} was not created as a project",
            f"create the parent first with `cavvy project create {ask.parent}`",
        ) from None
    app_state.control_plane.budgets.expire()  # the parent now includes the new project
    roles = [str(each) for each in sorted(list_roles(principal, ask.parent or INSTALLATION))]
    return reply(wire.ProjectView(name=ask.name, parent=ask.parent, roles=roles), 201)


# Roles


@router.get(
    "/roles",
    **document(
        "List the roles that apply in all projects.",
        rule=on_installation(Permission.MANAGE),
        answer=list[wire.RoleView],
    ),
)
async def list_installation_roles(request: Request) -> Response:
    return await _list_roles(request, INSTALLATION)


@router.put(
    "/roles/{account}/{role}",
    **document(
        "Grant a role in all projects.",
        rule=on_installation(Permission.MANAGE),
        status=204,
        errors=("account-not-found",),
    ),
)
async def grant_everywhere(request: Request, account: AccountPath, role: RolePath) -> Response:
    return await _grant(request, INSTALLATION, account, role)


@router.delete(
    "/roles/{account}/{role}",
    **document(
        "Revoke a role that applies in all projects.",
        rule=on_installation(Permission.MANAGE),
        status=204,
        errors=("role-not-found",),
    ),
)
async def revoke_everywhere(request: Request, account: AccountPath, role: RolePath) -> Response:
    return await _revoke(request, INSTALLATION, account, role)


@router.get(
    "/projects/{project}/roles",
    **document(
        "List the roles that were granted in a project, without inherited roles.",
        rule=in_path(Permission.MANAGE),
        answer=list[wire.RoleView],
    ),
)
async def list_project_roles(request: Request, project: ProjectPath) -> Response:
    return await _list_roles(request, project)


@router.put(
    "/projects/{project}/roles/{account}/{role}",
    **document(
        "Grant a role in a project and its subprojects.",
        rule=in_path(Permission.MANAGE),
        status=204,
        errors=("account-not-found",),
    ),
)
async def grant(
    request: Request, project: ProjectPath, account: AccountPath, role: RolePath
) -> Response:
    return await _grant(request, project, account, role)


@router.delete(
    "/projects/{project}/roles/{account}/{role}",
    **document(
        "Revoke a role that was granted in a project.",
        rule=in_path(Permission.MANAGE),
        status=204,
        errors=("role-not-found",),
    ),
)
async def revoke(
    request: Request, project: ProjectPath, account: AccountPath, role: RolePath
) -> Response:
    return await _revoke(request, project, account, role)


async def _list_roles(request: Request, project: str) -> Response:
    app_state = app_state_of(request)
    found = list_current(await app_state.store.roles(project), app_state.now())
    return reply([view(wire.RoleView, each) for each in found])


async def _grant(request: Request, project: str, account: str, role: Role) -> Response:
    for permission in sorted(
        PERMISSIONS[role]
    ):  # a token must not grant rights that it does not have
        require(request, permission, project)
    binding = RoleBinding(account=account, project=project, role=role)
    await _note_roles(request, project, account, lambda roles: roles | {role})
    try:
        await app_state_of(request).store.grant_role(binding)
    except RowNotFound:
        raise ApiProblem("account-not-found", f"no account {account}") from None
    return done()


async def _revoke(request: Request, project: str, account: str, role: Role) -> Response:
    binding = RoleBinding(account=account, project=project, role=role)
    await _note_roles(request, project, account, lambda roles: roles - {role})
    try:
        await app_state_of(request).store.revoke_role(binding)
    except RowNotFound as error:
        raise ApiProblem("role-not-found", str(error)) from error
    return done()


async def _note_roles(
    request: Request,
    project: str,
    account: str,
    change: Callable[[frozenset[Role]], frozenset[Role]],
) -> None:
    """Record, for the audit log, which roles the account itself has in a project before and after a
    change.
    """
    bindings = await app_state_of(request).store.roles(project)
    own = (each for each in bindings if each.account == account and not each.trust)
    had = frozenset(each.role for each in own)
    before, after = ({"roles": sorted(map(str, roles))} for roles in (had, change(had)))
    note_change(request, before=before, after=after)
