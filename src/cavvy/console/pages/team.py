"""Who may use the server: projects, roles, accounts, tokens, and the names of secrets. Each part is
shown if the server permits it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.account_wire import AccountClient, ProjectView, TokenView
from cavvy.console.pages.page import Page, Part, try_part


@dataclass(frozen=True)
class ProjectNode:
    """A project with its subprojects."""

    project: ProjectView
    children: "Sequence[ProjectNode]"


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The roles and secrets of one project are shown, so that the number of requests does not grow
    with the number of projects.
    """
    accounts = AccountClient(client)
    projects = accounts.projects()
    usual = "default" if any(each.name == "default" for each in projects) else ""
    chosen = request.query_params.get("project") or usual or (projects[0].name if projects else "")
    tokens = try_part(accounts.tokens)
    valid = [each for each in tokens.value or [] if _is_valid(each, now)]
    nothing: Part[list[object]] = Part(None)
    return Page(
        "Team",
        "team.html",
        {
            "me": accounts.whoami(),
            "tree": list_roots(projects),
            "chosen": chosen,
            "roles": try_part(lambda: accounts.roles(chosen)) if chosen else nothing,
            "secrets": try_part(lambda: client.secrets(chosen)) if chosen else nothing,
            "everywhere": try_part(lambda: accounts.roles(None)),
            "accounts": try_part(accounts.accounts),
            "tokens": tokens,
            "valid": valid,
            "invalid_count": len(tokens.value or []) - len(valid),
        },
    )


def list_roots(projects: Sequence[ProjectView]) -> Sequence[ProjectNode]:
    """Return the projects without a visible parent, with their subprojects."""
    children: dict[str | None, list[ProjectView]] = {}
    for each in projects:
        children.setdefault(each.parent, []).append(each)

    def list_below(parent: str | None) -> Sequence[ProjectNode]:
        return [ProjectNode(each, list_below(each.name)) for each in children.get(parent, ())]

    return list_below(None)


def _is_valid(token: TokenView, now: datetime) -> bool:
    return token.revoked_at is None and (token.expires_at is None or token.expires_at > now)
