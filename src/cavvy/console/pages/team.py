"""Who may use the server: projects, roles, accounts, tokens, and the names of secrets. Each part is
shown if the server permits it. Also the audit log: who changed what, newest first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.account_wire import (
    AccountClient,
    AuditLogRow,
    ProjectView,
    TokenView,
    read_newest,
)
from cavvy.client.policy_wire import PolicyAsk, list_policies, put_policy
from cavvy.console.pages.page import Page, Part, form_of, list_projects, try_part
from cavvy.domain.units import UnitError, is_whole, parse_rate, read_number

# the keys of a policy that the page edits, and what they mean
_LISTS = {"providers": "Providers", "regions": "Regions", "accelerators": "GPUs"}
_NUMBERS = {
    "share": "Share of the queue",
    "quota_gpus": "First up to GPUs",
    "max_gpus": "At most GPUs",
    "user_gpus": "GPUs of each user",
    "user_jobs": "Running jobs of each user",
    "user_waiting": "Waiting jobs of each user",
}


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
            "policies": try_part(lambda: list_policies(client, chosen)) if chosen else nothing,
            "policy_keys": (_LISTS, _NUMBERS),
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


def set_secret(client: ApiClient, request: Request, now: datetime) -> str:
    """Store a secret; its value is never shown again. Raises ApiError, HTTPException."""
    form, project = form_of(request), request.path_params["project"]
    name, value = form.get("name", "").strip(), form.get("value", "").replace("\r\n", "\n")
    if not name or not value:
        raise HTTPException(400, "A secret needs a name and a value.")
    client.put_secret(project, name, value)
    return _at(project)


def remove_secret(client: ApiClient, request: Request, now: datetime) -> str:
    """Raises ApiError."""
    project = request.path_params["project"]
    client.delete_secret(project, request.path_params["name"])
    return _at(project)


def set_policy(client: ApiClient, request: Request, now: datetime) -> str:
    """Change what the form has of a project's policy; the rest keeps its values. Raises ApiError,
    HTTPException.
    """
    form, project = form_of(request), request.path_params["project"]
    price = form.get("max_rate", "").strip()
    try:
        ask = PolicyAsk(
            providers=_split(form.get("providers", "")),
            regions=_split(form.get("regions", "")),
            accelerators=_split(form.get("accelerators", "")),
            max_rate_micros_per_hour=parse_rate(price).micros_per_hour if price else None,
            share=_number(form.get("share", "")),
            quota_gpus=_number(form.get("quota_gpus", "")),
            max_gpus=_number(form.get("max_gpus", "")),
            user_gpus=_number(form.get("user_gpus", "")),
            user_jobs=_count(form.get("user_jobs", "")),
            user_waiting=_count(form.get("user_waiting", "")),
        )
    except (UnitError, ValueError) as error:
        raise HTTPException(400, f"The policy: {error}.") from None
    put_policy(client, project, ask, accept_exceeded=bool(form.get("accept_exceeded")))
    return _at(project)


def _at(project: str) -> str:
    return f"/team?project={quote(project)}#project-title"


def _split(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _number(text: str) -> float | None:
    """Raises ValueError."""
    if not text.strip():
        return None
    number = read_number(text.strip())
    if not 0 <= number <= 1_000_000:
        raise ValueError(f"expected a number from 0 to 1,000,000, not {text.strip()!r}")
    return number


def _count(text: str) -> int | None:
    """Raises ValueError."""
    if not text.strip():
        return None
    if not (is_whole(text.strip()) and len(text.strip()) < 8):
        raise ValueError(f"expected a whole number, not {text.strip()!r}")
    return int(text)


_SHOWN = 300
_OWN = ("number", "at", "account", "project", "outcome", "prior")  # in columns, or only for checks


def make_audit(client: ApiClient, request: Request, now: datetime) -> Page:
    """The newest records of a project or an account. Raises ApiError."""
    asked = request.query_params
    given = {name: text for name in ("project", "account") if (text := asked.get(name, "").strip())}
    found = try_part(lambda: read_newest(client, _SHOWN, **given))
    return Page(
        "Audit log",
        "audit.html",
        {
            "found": found,
            "rows": [(each, _list_facts(each)) for each in reversed(found.value or [])],
            "given": {"project": "", "account": "", **given},
            "projects": list_projects(client, request),
            "most": _SHOWN,
        },
    )


def _list_facts(row: AuditLogRow) -> list[tuple[str, str]]:
    """Return what the record says besides the columns of the table."""
    try:
        record: dict[str, Any] = msgspec.json.decode(row.text)
    except msgspec.DecodeError:
        return [("text", row.text)]
    return [
        (name, value if isinstance(value, str) else msgspec.json.encode(value).decode())
        for name, value in record.items()
        if name not in _OWN and value not in (None, "", [], {})
    ]
