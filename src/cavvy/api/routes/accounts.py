"""Routes for accounts, their tokens, the tree of projects, and roles in projects."""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from secrets import token_hex
from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change, note_project
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.fleet import empty_project, list_unfinished
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import (
    SIGNED_IN,
    in_body,
    in_path,
    on_installation,
    principal_of,
    require,
    require_above,
)
from cavvy.api.tokens import hash_token, make_token
from cavvy.api.wire import view
from cavvy.client import account_wire as wire
from cavvy.control.own_reconcilers import take_all
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
    list_below,
    list_current,
    list_line,
    list_roles,
)
from cavvy.domain.budgets import SpendingBudget, compare_lines
from cavvy.domain.policies import find_lifted
from cavvy.store.base import NameConflict, RowNotFound

router = RouteGroup("accounts", prefix="/v1")
ACCOUNT_NAME = re.compile(r"[a-z0-9]([a-z0-9._@+-]{0,61}[a-z0-9])?")
PROJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LONGEST_LABEL = 80
_LONGEST_S = 10 * 366 * 86400  # ten years
AccountPath = Annotated[str, Path(max_length=63)]
TokenPath = Annotated[str, Path(max_length=63)]
RolePath = Annotated[Role, Path()]


@router.get("/whoami", rule=SIGNED_IN)
async def whoami(principal: Principal) -> wire.WhoAmIView:
    """The caller's account, roles and token."""
    token, name = principal.token, principal.account or ""
    roles = [
        wire.RoleView(account=name, project=project, role=role)
        for project, found in sorted(principal.roles.items())
        if principal.within is None or project in principal.within
        for role in sorted(found)
    ]
    return wire.WhoAmIView(
        account=principal.account,
        token_id=None if token is None else token.id,
        expires_at=None if token is None else token.expires_at,
        scopes=None if principal.scopes is None else sorted(principal.scopes),
        within=None if principal.within is None else sorted(principal.within),
        roles=roles,
    )


# Accounts


@router.get("/accounts", rule=on_installation(Permission.MANAGE))
async def list_accounts(app_state: AppState) -> list[wire.AccountView]:
    """List all accounts."""
    found = await app_state.store.accounts()
    return [view(wire.AccountView, each) for each in found]


@router.post(
    "/accounts",
    rule=on_installation(Permission.MANAGE),
    status=201,
    when={NameConflict: "name-taken"},
)
async def add_account(
    request: Request, app_state: AppState, ask: wire.AccountAsk
) -> wire.AccountView:
    """Add an account of a person or a service. A new account has no roles."""
    if not ACCOUNT_NAME.fullmatch(ask.name):
        told = "must have 1 to 63 characters from a-z, 0-9 and . _ @ + -"
        raise ApiProblem("invalid-request", f"`name` {told}, not {ask.name!r}")
    if ask.kind not in set(AccountKind):
        raise ApiProblem("invalid-request", f"`kind` must be user or service, not {ask.kind!r}")
    account = Account(name=ask.name, kind=AccountKind(ask.kind), created_at=app_state.now())
    note_change(request, after={"name": account.name, "kind": str(account.kind)})
    await app_state.store.add_account(account)
    return view(wire.AccountView, account)


@router.put(
    "/accounts/{account}/disabled",
    rule=on_installation(Permission.MANAGE),
    when={RowNotFound: "account-not-found"},
)
async def disable_account(app_state: AppState, account: AccountPath) -> None:
    """Disable an account: its tokens are refused, and it cannot sign in. The account keeps its
    roles. Its running jobs and its services continue; nothing else of it starts.
    """
    await app_state.store.disable_account(account, app_state.now())


@router.delete(
    "/accounts/{account}/disabled",
    rule=on_installation(Permission.MANAGE),
    when={RowNotFound: "account-not-found"},
)
async def enable_account(app_state: AppState, account: AccountPath) -> None:
    """Enable an account again."""
    await app_state.store.disable_account(account, None)


@router.delete(
    "/accounts/{account}",
    rule=on_installation(Permission.MANAGE),
    when={RowNotFound: "account-not-found"},
)
async def remove_account(request: Request, app_state: AppState, account: AccountPath) -> None:
    """Remove an account with its tokens and roles. Its running jobs and its services continue;
    nothing else of it starts.
    """
    store = app_state.store
    lost = [each for each in await store.roles() if each.account == account and not each.trust]
    note_change(request, before={"roles": [f"{each.role} {each.project}".strip() for each in lost]})
    await store.remove_account(account)


# Tokens


@router.get("/tokens", rule=SIGNED_IN, errors=("role-needed",))
async def list_tokens(
    request: Request,
    app_state: AppState,
    principal: Principal,
    account: Annotated[str | None, Query(max_length=63)] = None,
) -> list[wire.TokenView]:
    """List the caller's tokens, without their secrets. Admins of the installation can list the
    tokens of all accounts, or of one account.
    """
    if not _manages_accounts(principal):
        if account not in (None, principal.account):
            require(request, Permission.MANAGE, INSTALLATION)
        account = principal.account
    own = (
        principal.token and principal.token.id
        # the entry's own copy of the row, because the database's time of last use was just updated
    )
    found = await app_state.store.tokens(account)
    shown = [each for each in found if not principal.is_limited or each.id == own]
    return [_token_view(each) for each in shown]


@router.post(
    "/tokens",
    rule=SIGNED_IN,
    status=201,
    errors=("role-needed", "scope-needed", "account-not-found"),
)
async def add_token(
    request: Request, app_state: AppState, principal: Principal, ask: wire.TokenAsk
) -> wire.TokenMade:
    """Create a token. The answer contains the token's secret, which cannot be read again. Admins of
    the installation can create tokens for every account.
    """
    _check_token(ask)
    account = ask.account or principal.account
    if account is None:
        raise ApiProblem(
            "invalid-request",
            "`account` must name the account of the token, as in "
            "`cavvy server token create --user NAME`",
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
    return wire.TokenMade(token=secret, view=_token_view(token))


@router.delete("/tokens/{token}", rule=SIGNED_IN, when={RowNotFound: "token-not-found"})
async def revoke_token(app_state: AppState, principal: Principal, token: TokenPath) -> None:
    """Revoke a token. Admins of the installation can revoke any token; other callers can revoke
    only their own. A token with limits can revoke only itself.
    """
    own = principal.token is not None and principal.token.id == token
    if principal.is_limited and not own:
        raise RowNotFound(f"no token {token}")
    account = None if _manages_accounts(principal) else principal.account
    await app_state.store.revoke_token(token, account, app_state.now())


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


@router.get("/projects", rule=SIGNED_IN)
async def list_projects(app_state: AppState, principal: Principal) -> list[wire.ProjectView]:
    """List the projects in which the caller has a role."""
    rows = {each.name: each for each in await app_state.store.projects()}
    rows = {**{name: Project(name=name) for name in principal.roles if name}, **rows}
    seen = {
        name: each
        for name, each in rows.items()
        if list_roles(principal, name) and (principal.within is None or name in principal.within)
    }
    return [
        wire.ProjectView(
            name=name,
            parent=each.parent if each.parent in seen else None,
            roles=[str(each) for each in sorted(list_roles(principal, name))],
            archived_at=each.archived_at,
        )
        for name, each in sorted(seen.items())
    ]


@router.post(
    "/projects", rule=in_body(Permission.MANAGE), status=201, when={NameConflict: "name-taken"}
)
async def add_project(
    request: Request, app_state: AppState, principal: Principal, ask: wire.ProjectAsk
) -> wire.ProjectView:
    """Create a project, below another project or at the top level."""
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
    except RowNotFound:
        raise ApiProblem(
            "project-not-found",
            f"the parent {ask.parent} was not created as a project",
            f"create the parent first with `cavvy project create {ask.parent}`",
        ) from None
    app_state.control_plane.budgets.expire()  # the parent now includes the new project
    roles = [str(each) for each in sorted(list_roles(principal, ask.parent or INSTALLATION))]
    return wire.ProjectView(name=ask.name, parent=ask.parent, roles=roles)


# Roles


@router.get("/roles", rule=on_installation(Permission.MANAGE))
async def list_installation_roles(app_state: AppState) -> list[wire.RoleView]:
    """List the roles that apply in all projects."""
    return await _list_roles(app_state, INSTALLATION)


@router.put(
    "/roles/{account}/{role}",
    rule=on_installation(Permission.MANAGE),
    errors=("account-not-found",),
)
async def grant_everywhere(request: Request, account: AccountPath, role: RolePath) -> None:
    """Grant a role in all projects."""
    await _grant(request, INSTALLATION, account, role)


@router.delete(
    "/roles/{account}/{role}",
    rule=on_installation(Permission.MANAGE),
    when={RowNotFound: "role-not-found"},
)
async def revoke_everywhere(request: Request, account: AccountPath, role: RolePath) -> None:
    """Revoke a role that applies in all projects."""
    await _revoke(request, INSTALLATION, account, role)


@router.get("/projects/{project}/roles", rule=in_path(Permission.MANAGE))
async def list_project_roles(app_state: AppState, project: ProjectPath) -> list[wire.RoleView]:
    """List the roles that were granted in a project, without inherited roles."""
    return await _list_roles(app_state, project)


@router.put(
    "/projects/{project}/roles/{account}/{role}",
    rule=in_path(Permission.MANAGE),
    errors=("account-not-found",),
)
async def grant(
    request: Request, project: ProjectPath, account: AccountPath, role: RolePath
) -> None:
    """Grant a role in a project and its subprojects."""
    await _grant(request, project, account, role)


@router.delete(
    "/projects/{project}/roles/{account}/{role}",
    rule=in_path(Permission.MANAGE),
    when={RowNotFound: "role-not-found"},
)
async def revoke(
    request: Request, project: ProjectPath, account: AccountPath, role: RolePath
) -> None:
    """Revoke a role that was granted in a project."""
    await _revoke(request, project, account, role)


async def _list_roles(app_state: AppState, project: str) -> list[wire.RoleView]:
    found = list_current(await app_state.store.roles(project), app_state.now())
    return [view(wire.RoleView, each) for each in found]


async def _grant(request: Request, project: str, account: str, role: Role) -> None:
    # a token must not grant rights that it does not have
    for permission in sorted(PERMISSIONS[role]):
        require(request, permission, project)
    binding = RoleBinding(account=account, project=project, role=role)
    await _note_roles(request, project, account, lambda roles: roles | {role})
    try:
        await app_state_of(request).store.grant_role(binding)
    except RowNotFound:
        raise ApiProblem("account-not-found", f"no account {account}") from None


async def _revoke(request: Request, project: str, account: str, role: Role) -> None:
    binding = RoleBinding(account=account, project=project, role=role)
    await _note_roles(request, project, account, lambda roles: roles - {role})
    await app_state_of(request).store.revoke_role(binding)


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


@router.post(
    "/projects/{project}/move",
    rule=in_path(Permission.MANAGE),
    errors=("policy-lifted", "project-archived", "project-budgets"),
    when={RowNotFound: "project-not-found", NameConflict: "project-loop"},
)
async def move_project(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.ProjectMove
) -> wire.ProjectView:
    """Move a project and its subprojects below another project or to the top level.

    Move the project. The caller must be an admin of the new parent and of the old parent. After the
    move, the old parent's roles and policies no longer apply to the project.
    """
    former = await _find(app_state, project)
    require_above(request, former.parent, f"move {project}")
    require(request, Permission.MANAGE, ask.parent or INSTALLATION)
    await _check_policies(app_state, former, ask)
    await _check_budgets(request, former, ask)
    note_change(request, before={"parent": former.parent}, after={"parent": ask.parent})
    await app_state.store.move_project(former, ask.parent)
    app_state.control_plane.pool.expire()  # the cached offers are those of the former policies
    app_state.control_plane.budgets.expire()
    roles = list_roles(principal_of(request), ask.parent or INSTALLATION)
    told = [str(each) for each in sorted(roles)]
    return wire.ProjectView(
        name=project, parent=ask.parent, roles=told, archived_at=former.archived_at
    )


@router.post(
    "/projects/{project}/archive", rule=in_path(Permission.MANAGE), errors=("project-busy",)
)
async def archive(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.ProjectArchiveAsk
) -> wire.ProjectView:
    """Archive a project and its subprojects: nothing new starts in them, and all their data stays
    readable.
    """
    found = await _find(app_state, project)
    parents = {each.name: each.parent for each in await app_state.store.projects()}
    names, now = list_below(project, parents), app_state.now()
    note_change(request, after={"archived": sorted(names), "stop": ask.stop})
    # this happens first, so that nothing can start while the rest stops
    await app_state.store.archive.put(names, now, busy=ask.stop)

    async def empty(name: str) -> None:
        await empty_project(app_state, name, await list_unfinished(app_state, name))

    await take_all(*(partial(empty, name) for name in sorted(names) if ask.stop))
    roles = [str(each) for each in sorted(list_roles(principal_of(request), project))]
    at = found.archived_at or now
    return wire.ProjectView(name=project, parent=found.parent, roles=roles, archived_at=at)


@router.delete(
    "/projects/{project}/archive", rule=in_path(Permission.MANAGE), errors=("project-archived",)
)
async def unarchive(request: Request, app_state: AppState, project: ProjectPath) -> None:
    """Unarchive a project, with the subprojects that were archived at the same time."""
    note_change(request, after={"archived": None})
    await app_state.store.archive.lift(project)


async def _find(app_state: AppState, name: str) -> Project:
    for each in await app_state.store.projects():
        if each.name == name:
            return each
    raise ApiProblem("project-not-found", f"there is no project {name}")


async def _check_policies(app_state: AppState, former: Project, ask: wire.ProjectMove) -> None:
    """Raise ApiProblem if policies would no longer apply to the project and the caller has not
    permitted this change.
    """
    book = await app_state.store.policies()
    lifted = find_lifted(book, former.name, ask.parent)
    if lifted and not ask.lift_policies:
        owners = " and ".join(each.owner for each in lifted)
        raise ApiProblem(
            "policy-lifted", f"the policy of {owners} would no longer apply to {former.name}"
        )


async def _check_budgets(request: Request, former: Project, ask: wire.ProjectMove) -> None:
    """Raise ApiProblem if the move changes which budgets count the project's spending, unless the
    caller has accepted this change. The change also affects this month's spending.
    """
    app_state = app_state_of(request)
    parents = {each.name: each.parent for each in await app_state.store.projects()}
    above = list_line(ask.parent or INSTALLATION, parents)
    # the store refuses a move that would create a loop
    if ask.accept_budgets or former.name in above:
        return
    line = [former.name, *above]
    found = await app_state.store.budgets.list()
    gained, lost = compare_lines(found, list_line(former.name, parents), line)
    told = [
        f"{verb} {_name_budgets(principal_of(request), each)}"
        for verb, each in (("start to count for", gained), ("no longer count for", lost))
        if each
    ]
    if told:
        spent = f"the spending of {former.name}, including this month's costs"
        raise ApiProblem("project-budgets", f"{spent}, would {', and '.join(told)}")


def _name_budgets(principal: Principal, budgets: Sequence[SpendingBudget]) -> str:
    """Return a text that lists the budgets. Budgets of projects that are hidden from the caller are
    not named.
    """
    return " and ".join(
        f"the budget {each.name} of project {each.project}"
        if list_roles(principal, each.project)
        else "a budget above"
        for each in budgets
    )
