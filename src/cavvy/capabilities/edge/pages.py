"""Devices at the edge, the rollouts that bring models to them, the models' versions, and one
device.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.capabilities.edge.wire import (
    DeviceView,
    get_device,
    halt_rollout,
    list_devices,
    list_rollouts,
    retire_device,
)
from cavvy.capabilities.models.model_keys import list_expiring
from cavvy.capabilities.models.wire import promote_model, unlabel_model
from cavvy.client import ApiClient
from cavvy.client.model_wire import ModelView, list_models
from cavvy.console.pages.page import Page, act_on_chosen, form_of, named_in, sort_rows, try_part
from cavvy.domain.units import is_whole

_MOST_DEVICES = 200  # on the page
_MOST_PROJECTS = 20  # whose signed lists are looked at
_MOST_ROLLOUTS = 20
_MOST_VERSIONS = 5  # of a model
_WRONG_CLOCK_S = 300.0
_STATES = ("online", "offline", "silent", "retired")


# what sorts the devices by their columns
_KEYS: Mapping[str, Callable[[DeviceView], Any]] = {
    "Name": lambda each: (each.project, each.site, each.name),
    "State": lambda each: each.state,
    "Site": lambda each: each.site,
    "Project": lambda each: each.project,
    "Requests": lambda each: sum(model.requests for model in each.models),
    "Last heard": lambda each: (each.heard_at is not None, each.heard_at or each.enrolled_at),
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """Devices that match the search, by site; rollouts and models, newest first. Raises
    ApiError, HTTPException."""
    return _show(client, request, now, [])


def act(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Retire the chosen devices. Raises HTTPException."""
    acts = {"retire": lambda project, name: retire_device(client, project, name)}
    problems = act_on_chosen(client, request, acts, "device")
    return _show(client, request, now, problems) if problems else f"/devices?{request.url.query}"


def _show(client: ApiClient, request: Request, now: datetime, problems: Sequence[str]) -> Page:
    given = {name: request.query_params.get(name, "") for name in ("site", "state", "text")}
    devices = list_devices(client, None)
    matching = (each for each in devices if _matches(each, given))
    sorting = sort_rows(request, matching, _KEYS, ("Name", "up"))
    found = sorting.rows
    projects = sorted({each.project for each in devices})[:_MOST_PROJECTS]
    expiring = [told for each in projects for told in list_expiring(client, each, now)]
    models = _newest(try_part(lambda: list_models(client, None)).value or [])
    rollouts = try_part(lambda: list_rollouts(client, None)).value or []
    return Page(
        "Devices",
        "cavvy.capabilities.edge:devices.html",
        {
            "problems": [*problems, *expiring],
            "heads": sorting.heads,
            "query": sorting.query,
            "given": given,
            "sites": sorted({each.site for each in devices}),
            "counts": {state: sum(each.state == state for each in found) for state in _STATES},
            "devices": found[:_MOST_DEVICES],
            "matching": len(found),
            "total": len(devices),
            "rollouts": rollouts[:_MOST_ROLLOUTS],
            "more_rollouts": len(rollouts) - _MOST_ROLLOUTS,
            "models": models,
            "labels": sorted({"production", *(label for each in models for label in each.labels)}),
        },
    )


def make_one(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `device-not-found`."""
    found = get_device(client, *named_in(request))
    values = {"device": found, "wrong_clock": abs(found.skew_s) > _WRONG_CLOCK_S}
    return Page(found.name, "cavvy.capabilities.edge:device.html", values)


def halt(client: ApiClient, request: Request, now: datetime) -> str:
    """Take the version of a rollout back from its devices. Raises ApiError."""
    halt_rollout(client, *named_in(request), "")
    return "/devices#rollouts-title"


def promote(client: ApiClient, request: Request, now: datetime) -> str:
    """Move a label to a version of a model. Raises ApiError, HTTPException."""
    project, model = named_in(request)
    label, number = (form_of(request).get(name, "").strip() for name in ("label", "number"))
    if not label or not (is_whole(number) and len(number) < 10):
        raise HTTPException(400, "A label, such as production, and the number of a version.")
    promote_model(client, project, model, label, int(number))
    return "/devices#models-title"


def unlabel(client: ApiClient, request: Request, now: datetime) -> str:
    """Remove a label of a model. Raises ApiError."""
    unlabel_model(client, *named_in(request), request.path_params["label"])
    return "/devices#models-title"


def _matches(device: DeviceView, given: dict[str, str]) -> bool:
    texts = [device.name, device.project, *device.facts.values()]
    texts += [f"{name}={value}" for name, value in device.labels.items()]
    for each in device.models:
        texts += [f"{each.name}@{each.serving}", each.problem]
    return (
        given["site"] in ("", device.site)
        and given["state"] in ("", device.state)
        and any(given["text"].strip().lower() in each.lower() for each in texts)
    )


def _newest(models: Sequence[ModelView]) -> Sequence[ModelView]:
    """Return the newest versions of each model, and all that have a label."""
    ordered = sorted(models, key=lambda each: (each.project, each.model, -each.number))
    seen: dict[tuple[str, str], int] = {}
    kept = []
    for each in ordered:
        count = seen[each.project, each.model] = seen.get((each.project, each.model), 0) + 1
        if count <= _MOST_VERSIONS or each.labels:
            kept.append(each)
    return kept
