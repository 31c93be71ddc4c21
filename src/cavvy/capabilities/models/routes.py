"""Routes for published models: users publish, sign and label versions."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, in_query, name_user
from cavvy.api.wire import view
from cavvy.capabilities.models import wire as wire
from cavvy.capabilities.models.keeper import ModelKeeper
from cavvy.capabilities.models.nouns import ModelVersion, find_labels
from cavvy.capabilities.models.registry import ModelRefused, ModelRegistry, choose_main
from cavvy.capabilities.models.repository import newest_lists
from cavvy.client.model_wire import ModelView, PublishedFileView
from cavvy.domain.accounts import Permission
from cavvy.store.base import ProjectFilter, RowNotFound
from cavvy.store.blobs import NotManifest

_ModelPath = Annotated[str, Path(max_length=63)]

router = RouteGroup("models")


def _registry(app_state: AppState) -> ModelRegistry:
    found = app_state.control_plane.find(ModelKeeper)
    assert found is not None  # the description contributes it with these routes
    return found.registry


@router.get("/v1/models", rule=in_query(Permission.VIEW))
async def list_models(app_state: AppState, projects: ProjectFilter) -> list[ModelView]:
    """List the published models."""
    found = await _registry(app_state).models(projects)
    labels: dict[tuple[str, str], list[str]] = {}
    for (project, _, label), each in find_labels(found).items():
        labels.setdefault((project, each.name), []).append(label)
    unsigned = await _registry(app_state).list_unsigned(found)
    return [
        _model(
            each,
            sorted(labels.get((each.project, each.name), [])),
            signed=(each.project, each.name) not in unsigned,
        )
        for each in found
    ]


@router.post(
    "/v1/projects/{project}/models",
    rule=in_path(Permission.RUN),
    status=201,
    when={
        ModelRefused: "model-refused",
        RowNotFound: "snapshot-missing",
        NotManifest: "snapshot-missing",
    },
)
async def publish(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.ModelAsk
) -> ModelView:
    """Publish the next version of a model, from a snapshot that was uploaded before."""
    await app_state.store.archive.check(project)
    blobs = app_state.blobs.of(project)
    files = await _registry(app_state).list_files(blobs, ask.snapshot, ask.below)
    model = ModelVersion(
        project=project,
        name=f"{ask.name}@0",
        snapshot=ask.snapshot,
        files=files,
        main=ask.main or choose_main(files),
        job=ask.job,
        residency=ask.residency,
        made_by=name_user(request, ask.made_by),
        created_at=app_state.now(),
        notes=ask.notes,
    )
    note_change(request, after={"model": ask.name, "snapshot": ask.snapshot})
    registry = _registry(app_state)
    made = await registry.publish(model, app_state.sealer, blobs)
    return _model(made, signed=not await registry.list_unsigned([made]))


@router.post(
    "/v1/projects/{project}/edge/keys",
    rule=in_path(Permission.MANAGE),
    when={ModelRefused: "model-refused"},
)
async def rotate_keys(
    request: Request, app_state: AppState, project: ProjectPath
) -> wire.SigningKeysView:
    """Replace the keys that sign the project's models. Devices follow at their next update."""
    registry = _registry(app_state)
    await app_state.store.archive.check(project)
    note_change(request, after={"keys": "replaced"})
    return _read_keys(newest_lists(await registry.rotate_keys(project, app_state.sealer)))


@router.get(
    "/v1/projects/{project}/edge/lists",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "model-not-found"},
)
async def read_lists(
    app_state: AppState,
    project: ProjectPath,
    model: Annotated[str, Query(max_length=63)] = "",
) -> wire.SignedListsView:
    """Get the signed lists of the project's models."""
    registry = _registry(app_state)
    lists, held, unsigned = await registry.read_lists(project, model)
    return wire.SignedListsView(lists=dict(lists), held=list(held), unsigned=dict(unsigned))


@router.put(
    "/v1/projects/{project}/edge/lists",
    rule=in_path(Permission.MANAGE),
    when={RowNotFound: "model-not-found", ModelRefused: "model-refused"},
)
async def replace_lists(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.SignedListsAsk
) -> wire.SigningKeysView:
    """Replace signed lists, with which a user takes the keys of roles over."""
    registry = _registry(app_state)
    await app_state.store.archive.check(project)
    known = newest_lists(await registry.find_repository(project))
    try:
        keys = [_read_keys(each).keys for each in (known, {**known, **ask.lists})]
    except (AttributeError, KeyError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ModelRefused(f"the lists are not valid: {type(error).__name__}: {error}") from error
    told = [{f"key of {role}": key for role, key in each.items()} for each in keys]
    note_change(request, before=told[0], after=told[1])
    made = await registry.accept_lists(project, ask.lists, ask.keys, app_state.sealer)
    return _read_keys(newest_lists(made))


@router.put(
    "/v1/projects/{project}/models/{name}/list",
    rule=in_path(Permission.RUN),
    when={RowNotFound: "model-not-found", ModelRefused: "model-refused"},
)
async def sign_model(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: _ModelPath,
    ask: wire.SignedModelAsk,
) -> wire.SigningKeysView:
    """Replace the signed list of a model by one that the model's key has signed."""
    registry = _registry(app_state)
    await app_state.store.archive.check(project)
    note_change(request, after={"model": name, "list": sha256(ask.list.encode()).hexdigest()})
    made = await registry.accept_list(project, name, ask.list, app_state.sealer)
    return _read_keys(newest_lists(made))


@router.put(
    "/v1/projects/{project}/models/{name}/labels/{label}",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "model-not-found", ModelRefused: "model-refused"},
)
async def promote(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: _ModelPath,
    label: Annotated[str, Path(max_length=63)],
    ask: wire.PromoteAsk,
) -> wire.PromotedView:
    """Move a label, such as production, to a version of a model."""
    await app_state.store.archive.check(project)
    registry, before = _registry(app_state), None
    with suppress(RowNotFound):
        before = {"model": (await registry.find_labelled(project, name, label)).name}
    note_change(request, before=before, after={"model": f"{name}@{ask.number}"})
    moved, former = await registry.promote(project, name, label, ask.number)
    return wire.PromotedView(name=moved.name, former=former.name if former else "")


@router.delete(
    "/v1/projects/{project}/models/{name}/labels/{label}",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "model-not-found"},
)
async def unlabel(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: _ModelPath,
    label: Annotated[str, Path(max_length=63)],
) -> wire.PromotedView:
    """Take a label from a model. Devices and services keep the version that they have."""
    await app_state.store.archive.check(project)
    registry = _registry(app_state)
    holder = await registry.find_labelled(project, name, label)
    note_change(request, before={"model": holder.name}, after=None)
    former = await registry.unlabel(project, name, label)
    return wire.PromotedView(name="", former=former.name)


def _read_keys(lists: Mapping[str, str]) -> wire.SigningKeysView:
    """Return the IDs of the keys of all roles that signed lists name."""
    root, targets = (json.loads(lists[role])["signed"] for role in ("root", "targets"))
    keys = {role: each["keyids"][0] for role, each in root["roles"].items()}
    delegated = targets.get("delegations") or {"roles": ()}
    keys |= {each["name"]: each["keyids"][0] for each in delegated["roles"]}
    return wire.SigningKeysView(version=root["version"], keys=keys)


def _model(model: ModelVersion, labels: Sequence[str] = (), *, signed: bool = True) -> ModelView:
    files = [
        view(
            PublishedFileView,
            each,
            deltas={f"{model.model}@{one.base}": one.size for one in each.deltas},
        )
        for each in model.files
    ]
    notes = dict(model.notes)
    told = {"files": files, "notes": notes, "labels": list(labels), "signed": signed}
    return view(ModelView, model, **told)
