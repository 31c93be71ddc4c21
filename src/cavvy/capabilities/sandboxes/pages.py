"""Sandboxes: what runs, who made it, how long and at which cost."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from starlette.requests import Request

from cavvy.capabilities.sandboxes.ending import end_sandbox
from cavvy.capabilities.sandboxes.hosts import TAG
from cavvy.capabilities.sandboxes.wire import SandboxView, list_sandboxes
from cavvy.client import ApiClient
from cavvy.console.pages.page import Page, act_on_chosen, memory_of, sort_rows

_MOST = 200  # on the page
_COSTS_S = 10.0  # for which the costs of hosts are kept
_STATES = ("running", "ended")


class PricedSandbox(NamedTuple):
    """A sandbox, and its share of what its host has cost; None if that is not known."""

    view: SandboxView
    cost_micros: int | None


_KEYS: Mapping[str, Callable[[PricedSandbox], Any]] = {
    "Sandbox": lambda row: (row.view.title, row.view.id),
    "State": lambda row: (row.view.state, row.view.why),
    "Project": lambda row: row.view.project,
    "By": lambda row: row.view.user,
    "Made": lambda row: row.view.began_at,
    "Time left": lambda row: row.view.until_at,
    "Cost": lambda row: row.cost_micros or 0,
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The sandboxes that match the search, the newest first. Raises ApiError, HTTPException."""
    return _show(client, request, now, [])


def act(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """End the chosen sandboxes. Raises HTTPException."""
    acts = {"end": lambda project, name: end_sandbox(client, project, name)}
    problems = act_on_chosen(client, request, acts, "sandbox")
    if problems:
        return _show(client, request, now, problems)
    return f"/sandboxes?{request.url.query}"


def _show(client: ApiClient, request: Request, now: datetime, problems: Sequence[str]) -> Page:
    given = {name: request.query_params.get(name, "").strip() for name in ("state", "text")}
    found = list_sandboxes(client)
    rows = share_costs(found, _read_costs(client, request), now)
    matching = [each for each in rows if _matches(each.view, given)]
    sorting = sort_rows(request, matching, _KEYS, ("Made", "down"))
    return Page(
        "Sandboxes",
        "cavvy.capabilities.sandboxes:sandboxes.html",
        {
            "problems": problems,
            "sandboxes": sorting.rows[:_MOST],
            "heads": sorting.heads,
            "query": sorting.query,
            "given": given,
            "states": _STATES,
            "counts": {each: sum(row.view.state == each for row in matching) for each in _STATES},
            "matching": len(matching),
            "total": len(found),
        },
    )


def share_costs(
    found: Sequence[SandboxView], costs: Mapping[str, int], now: datetime
) -> list[PricedSandbox]:
    """Divide what each host has cost among its sandboxes, by their CPUs and the time that they
    lived. What a host cost while it had none is divided, too."""
    weights = {each.id: each.cpu * max(_lived_s(each, now), 1e-3) for each in found}
    sums: dict[str, float] = {}
    for each in found:
        sums[each.job] = sums.get(each.job, 0.0) + weights[each.id]
    return [
        PricedSandbox(
            each,
            round(costs[each.job] * weights[each.id] / sums[each.job])
            if each.job in costs
            else None,
        )
        for each in found
    ]


def _lived_s(view: SandboxView, now: datetime) -> float:
    return ((view.ended_at or now) - view.began_at).total_seconds()


def _read_costs(client: ApiClient, request: Request) -> Mapping[str, int]:
    """Return what the newest hosts have cost, by their job. It may be some seconds old."""

    def fetch() -> Mapping[str, int]:
        return {each.id: each.spent_micros for each in client.search_jobs(tag=TAG, limit=200).jobs}

    return memory_of(request).recall("costs of sandboxes", fetch, _COSTS_S)


def _matches(view: SandboxView, given: Mapping[str, str]) -> bool:
    texts = (view.id, view.title, view.user, view.project, view.image)
    return given["state"] in ("", view.state) and any(
        given["text"].lower() in each.lower() for each in texts
    )
