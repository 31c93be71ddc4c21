"""The rules of routes: which permission a request needs, and how the server finds the request's
project.

Each route declares its rule in `document`. `authorize` applies the rule before the route reads any
other part of the request. `list_rules` refuses an application with a route that has no rule.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import assert_never

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute

from cavvy.api.audit import note_refusal
from cavvy.api.errors import ApiProblem
from cavvy.domain.accounts import INSTALLATION, Permission
from cavvy.domain.authorization import LEAST_ROLE, Principal, Verdict, decide, list_visible
from cavvy.domain.values import Struct
from cavvy.store.base import ProjectFilter


class ProjectSource(StrEnum):
    """How the server determines a route's project or, for a route without a project, who may use
    the route.
    """

    PATH = "path"  # the project is part of the path
    QUERY = "query"  # the project is a parameter; without it, the route covers all visible projects
    BODY = "body"  # the route reads the project from the body and calls `require`
    INSTALLATION = "installation"  # the route is not about a project
    SIGNED_IN = "signed-in"  # every account may use the route, which limits its own answer
    GANG = "gang"  # the route requires the token of a gang
    MACHINE = "machine"  # the route requires the token of a joined machine
    OPEN = "open"  # the route needs no token


class RouteRule(Struct, frozen=True):
    """The permission that a request to a route needs. `permission` is None if `source` needs no
    permission.
    """

    source: ProjectSource
    permission: Permission | None = None


def in_path(permission: Permission) -> RouteRule:
    return RouteRule(ProjectSource.PATH, permission)


def in_query(permission: Permission) -> RouteRule:
    return RouteRule(ProjectSource.QUERY, permission)


def in_body(permission: Permission) -> RouteRule:
    return RouteRule(ProjectSource.BODY, permission)


def on_installation(permission: Permission) -> RouteRule:
    return RouteRule(ProjectSource.INSTALLATION, permission)


SIGNED_IN = RouteRule(ProjectSource.SIGNED_IN)
GANG = RouteRule(ProjectSource.GANG)
MACHINE = RouteRule(ProjectSource.MACHINE)
OPEN = RouteRule(ProjectSource.OPEN)


class RuleCheck:
    """Checks one route's rule. FastAPI calls the check before it reads the route's parameters."""

    def __init__(self, rule: RouteRule) -> None:
        self.rule = rule

    async def __call__(self, request: Request) -> None:
        authorize(request, self.rule)


def authorize(request: Request, rule: RouteRule) -> None:
    """Raise ApiProblem unless the rule allows the request."""
    match rule.source:
        case ProjectSource.GANG | ProjectSource.MACHINE | ProjectSource.OPEN:
            return  # the route itself checks these tokens
        case ProjectSource.SIGNED_IN | ProjectSource.BODY:
            principal_of(request)
        case ProjectSource.PATH:
            assert rule.permission is not None
            require(request, rule.permission, request.path_params["project"])
        case ProjectSource.QUERY:
            assert rule.permission is not None
            filter_projects(request, rule.permission, request.query_params.get("project"))
        case ProjectSource.INSTALLATION:
            assert rule.permission is not None
            require(request, rule.permission, INSTALLATION)
        case _:
            assert_never(rule.source)


def principal_of(request: Request) -> Principal:
    """Return who sends the request. Raises ApiProblem if the request was not authenticated."""
    principal = request.scope.get("principal")
    if not isinstance(principal, Principal):
        raise ApiProblem("unauthorised", "the request has no token")
    return principal


def require(request: Request, permission: Permission, project: str) -> None:
    """Raise ApiProblem unless the request has the permission in the project, or on the
    INSTALLATION.
    """
    principal = principal_of(request)
    where = f"in project {project}" if project else "on the installation"
    match decide(principal, permission, project):
        case Verdict.ALLOWED:
            return
        case Verdict.HIDDEN:
            note_refusal(request.scope, "project-not-found")
            raise ApiProblem("project-not-found", f"there is no project {project}")
        case Verdict.ROLE_NEEDED:
            needed = LEAST_ROLE[permission]
            raise ApiProblem("role-needed", f"this request needs the role {needed} {where}")
        case Verdict.SCOPE_NEEDED:
            raise ApiProblem("scope-needed", f"the token does not permit `{permission}` {where}")


def require_above(request: Request, parent: str | None, what: str) -> None:
    """Raise ApiProblem unless the caller is an admin of the project's parent. The error does not
    name the parent, because the caller may not have the right to see the parent.
    """
    try:
        require(request, Permission.MANAGE, parent or INSTALLATION)
    except ApiProblem:
        told = f"to {what}, you need the role admin in the project above it; a project at the top "
        told += "level requires the role admin in the installation"
        raise ApiProblem("role-needed", told) from None


def filter_projects(
    request: Request, permission: Permission, project: str | None = None
) -> ProjectFilter:
    """Return the projects whose rows the request may read; if `project` is given, only this
    project. Raises ApiProblem.
    """
    if project is not None:
        require(request, permission, project)
        return project
    principal = principal_of(request)
    if principal.scopes is not None and permission not in principal.scopes:
        raise ApiProblem("scope-needed", f"the token does not permit `{permission}`")
    return list_visible(principal, permission)


def name_user(request: Request, given: str) -> str:
    """Return the user of a new job: the account, or the given name if the owner of the state folder
    sends the request.
    """
    return principal_of(request).account or given


def say_who_stopped(request: Request) -> str:
    """Return the reason of a job that the sender of the request stops."""
    return f"stopped by {principal_of(request).account or 'the user'}"


def rule_of(route: APIRoute) -> RouteRule | None:
    """Return the rule that a route declares."""
    checks = (each.dependency for each in route.dependencies)
    return next((each.rule for each in checks if isinstance(each, RuleCheck)), None)


def list_rules(routes: Iterable[BaseRoute]) -> Iterator[tuple[APIRoute, RouteRule]]:
    """Yield every route with its rule. Raises TypeError if a route has no rule, or if its rule
    contradicts its path.
    """
    for route in routes:
        rule = rule_of(route) if isinstance(route, APIRoute) else None
        if rule is None or not isinstance(route, APIRoute):
            raise TypeError(f"the route {route} has no rule; pass a rule to `document` as `rule`")
        if (rule.source is ProjectSource.PATH) != ("{project}" in route.path):
            raise TypeError(
                f"the rule of {route.path} must be in_path, because its path contains the project"
            )
        yield route, rule
