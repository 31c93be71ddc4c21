"""Routes for devices at the edge: users enrol and list devices, and roll models out;
devices enrol, check in, and fetch signed lists and files.

A device proves that it has its private key by a signature of a text of this server, and gets a
token that is valid for a day. The token names the device and its expiry, and is checked without a
look at the database.
"""

import base64
import binascii
import hmac
import json
from asyncio import to_thread
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.blobs import send_blob
from cavvy.api.routes.jobs import ProjectPath, WaitQuery
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import MACHINE, OPEN, in_path, in_query, name_user, require
from cavvy.api.wire import done, read, view
from cavvy.capabilities.edge import wire as wire
from cavvy.capabilities.edge.device_program import publish_program
from cavvy.capabilities.edge.devices import TooManyTasks
from cavvy.capabilities.edge.nouns import (
    CHECK_IN_S,
    PROGRAM,
    DeviceReport,
    EdgeDevice,
    EdgeSettings,
    EdgeSite,
    ModelReport,
    PathCounts,
    Rollout,
)
from cavvy.capabilities.edge.on_device.bundle import make_script, pack_device
from cavvy.capabilities.edge.on_device.documents import (
    CheckedIn,
    CheckIn,
    CloudService,
    DeviceToken,
    Enrolled,
    Enrolment,
    GivenTask,
    ModelTold,
    Nonce,
    PeersTold,
    Proof,
    Samples,
    TaskOutput,
    WantedVersion,
)
from cavvy.capabilities.edge.on_device.settings import SettingRefused, check_name, read_pair
from cavvy.capabilities.edge.rollouts import SILENT, count_wave, order_devices
from cavvy.capabilities.edge.service import (
    EdgeService,
    EnrolmentRefused,
    SettingsRefused,
    WantedModel,
)
from cavvy.capabilities.models.registry import ModelRefused
from cavvy.capabilities.models.repository import newest_root
from cavvy.client.addresses import is_loopback
from cavvy.domain.accounts import Permission
from cavvy.domain.service_updates import RevisionSums
from cavvy.domain.tasks import WAVES, find_wrong_waves
from cavvy.store.base import ProjectFilter, RowNotFound
from cavvy.store.documents import plain

_SAMPLES = 500  # of one answer
# A site with a limit gets pieces of at most this many bytes, or what may come in so many seconds.
_PACED, _PIECE_S = 64 * 1024, 0.25
_BODY = 256 * 1024  # maximum size of a device's request, in bytes
_TOKEN_VALID = timedelta(days=1)
_NONCE_VALID = timedelta(minutes=5)
_LEAST_SITE = 0.01  # MiB a second; with less, devices give a fetch up as too slow
_MOST_PRICE = 10**12  # micro-dollars an hour
_MOST_DEVICES = 100_000  # that one token may enrol
_LONGEST = timedelta(days=366)
_MOST_PROBLEM = 500  # characters
_MOST_COMMAND = 16 * 1024  # characters
_MOST_MODELS = 64  # of a device
_MOST_SETTINGS = 80  # of one request
_MOST_SELECTOR = 200  # characters
_DevicePath = Annotated[str, Path(max_length=63)]

router = RouteGroup("edge")


def _edge(app_state: AppState) -> EdgeService:
    found = app_state.control_plane.find(EdgeService)
    assert found is not None  # the description contributes it with these routes
    return found


# Users


@router.post(
    "/v1/projects/{project}/edge/tokens",
    rule=in_path(Permission.OPERATE),
    status=201,
    errors=("no-joining",),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def invite(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.EnrolmentAsk
) -> wire.EnrolmentView:
    """Create a token with which devices enrol."""
    if not 1 <= ask.count <= _MOST_DEVICES:
        raise ApiProblem("invalid-request", f"`count` must be 1 to {_MOST_DEVICES:,}")
    if not 0 < ask.valid_s <= _LONGEST.total_seconds():
        raise ApiProblem("invalid-request", "`valid_s` must be more than 0 and at most a year")
    await app_state.store.archive.check(project)
    allowed = {"allow_exec": "yes"} if ask.allow_exec else {}
    note_change(request, after={"site": ask.site, "devices": ask.count, **allowed})
    token, made = await _edge(app_state).invite(
        project,
        site=ask.site,
        labels=ask.labels,
        count=ask.count,
        valid=timedelta(seconds=ask.valid_s),
        allow_exec=ask.allow_exec,
    )
    address, full = _find_address(app_state), f"{project}.{token}"
    pin = app_state.node_pins[1]
    script = f"curl -fsSk --pinnedpubkey '{pin}' {address}/edge/v1/script"
    command = f"{script} | CAVVY_EDGE_TOKEN={full} sh"
    return wire.EnrolmentView(command=command, token=full, expires_at=made.expires_at)


@router.get("/v1/edge/devices", rule=in_query(Permission.VIEW))
async def list_devices(app_state: AppState, projects: ProjectFilter) -> list[wire.DeviceView]:
    """List the devices."""
    now = app_state.now()
    return [_device(each, now) for each in await _edge(app_state).devices(projects)]


@router.get(
    "/v1/projects/{project}/edge/devices/{name}",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "device-not-found"},
)
async def get_device(
    app_state: AppState, project: ProjectPath, name: _DevicePath
) -> wire.DeviceView:
    """Get one device."""
    found = await _edge(app_state).device(project, name)
    return _device(found, app_state.now())


@router.delete(
    "/v1/projects/{project}/edge/devices/{name}",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "device-not-found"},
)
async def retire(app_state: AppState, project: ProjectPath, name: _DevicePath) -> wire.RetiredView:
    """Refuse a device from now on."""
    edge = _edge(app_state)
    given = await edge.settings_of(await edge.device(project, name))
    found = await edge.retire(project, name)
    secrets = {secret: list(names) for secret, names in found.items()}
    return wire.RetiredView(secrets=secrets, variables=list(given.of("secret")))


@router.get("/v1/edge/settings", rule=in_query(Permission.VIEW))
async def list_settings(app_state: AppState, projects: ProjectFilter) -> list[wire.SettingsView]:
    """List what is set for devices, for those of sites, and for those with labels."""
    edge = _edge(app_state)
    devices = await edge.devices(projects)
    return [_settings(each, devices) for each in await edge.settings(projects)]


@router.post(
    "/v1/projects/{project}/edge/settings",
    rule=in_path(Permission.OPERATE),
    errors=("device-not-found", "secret-not-found"),
    when={SettingsRefused: "invalid-request"},
)
async def change_settings(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.SettingsAsk
) -> wire.SettingsView:
    """Change what is set for a device, or for those of a site or with a label."""
    options, variables = _read_values(ask)
    await app_state.store.archive.check(project)
    edge = _edge(app_state)
    devices = await edge.devices(project)
    name = _name_settings(ask)
    # names only
    told = {"set": sorted(ask.values), "secrets": ask.secrets, "unset": ask.unset}
    note_change(request, after={"for": name, **{key: each for key, each in told.items() if each}})
    if ask.device and not any(each.name == ask.device and not each.retired_at for each in devices):
        raise ApiProblem("device-not-found", f"project {project} has no device {ask.device}")
    known = {each.name for each in await app_state.store.secrets(project)}
    if missing := [each for each in ask.secrets if each not in known]:
        reason = f"project {project} has no secret {missing[0]}"
        raise ApiProblem("secret-not-found", reason, f"set it: cavvy secret set {missing[0]}")
    made = await edge.change_settings(project, name, options, variables, ask.secrets, ask.unset)
    return _settings(made, devices)


@router.get(
    "/v1/projects/{project}/edge/devices/{name}/settings",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "device-not-found"},
)
async def get_settings(
    app_state: AppState, project: ProjectPath, name: _DevicePath
) -> wire.DeviceSettingsView:
    """Get the settings of a device, from where each comes, and whether the device uses them."""
    edge = _edge(app_state)
    device = await edge.device(project, name)
    given, report = await edge.settings_of(device), device.report
    return wire.DeviceSettingsView(
        revision=given.revision,
        used=None if report is None else report.settings,
        problem="" if report is None else report.settings_problem,
        settings=[
            wire.DeviceSettingView(
                name=each.name,
                kind=each.kind,
                value=_say_value(each.value),
                source=each.source,
                missing=each.kind == "secret" and each.set_at is None,
            )
            for each in given.given
        ],
    )


@router.get("/v1/edge/sites", rule=in_query(Permission.VIEW))
async def list_sites(app_state: AppState, projects: ProjectFilter) -> list[wire.SiteView]:
    """List the limits of sites."""
    return [view(wire.SiteView, each) for each in await _edge(app_state).sites(projects)]


@router.put(
    "/v1/projects/{project}/edge/sites/{name}",
    rule=in_path(Permission.OPERATE),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def limit_site(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: _DevicePath,
    ask: wire.SiteAsk,
) -> wire.SiteView:
    """Set what the devices of a site may fetch together, when they update, and what each costs."""
    _check_limits(ask.mib_per_s, ask.window, _LEAST_SITE)
    await app_state.store.archive.check(project)
    price = ask.device_micros_per_hour
    if isinstance(price, int) and not 0 <= price <= _MOST_PRICE:
        told = f"`device_micros_per_hour` must be 0 to {_MOST_PRICE:,}"
        raise ApiProblem("invalid-request", told)
    kept = isinstance(price, msgspec.UnsetType)  # former clients do not know the price
    limits: dict[str, Any] = {"mib_per_s": ask.mib_per_s, "window": ask.window}
    limits |= {} if kept else {"device_micros_per_hour": price}
    note_change(request, after=limits)
    site = EdgeSite(project=project, name=name, **limits)
    edge = _edge(app_state)
    return view(wire.SiteView, await edge.limit_site(site, keep_price=kept))


@router.post(
    "/v1/projects/{project}/edge/devices/{name}/tasks",
    rule=in_path(Permission.OPERATE),
    status=201,
    when={RowNotFound: "device-not-found"},
)
async def ask_task(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: _DevicePath,
    ask: wire.DeviceTaskAsk,
) -> wire.DeviceTaskView:
    """Ask a device for its log, or to run a command, at its next check-in."""
    edge = _edge(app_state)
    device = await edge.device(project, name)
    if sum(map(len, ask.command)) > _MOST_COMMAND or any("\0" in each for each in ask.command):
        raise ApiProblem("invalid-request", "`command` is too long, or contains NUL")
    if device.retired_at is not None:
        raise ApiProblem("invalid-request", f"device {name} is retired")
    if ask.command and not device.allow_exec:
        hint = (
            "retire it, remove its folder (~/.cavvy-edge), and run the line of `cavvy edge token "
            "--site NAME --allow-exec` on it"
        )
        raise ApiProblem("invalid-request", f"device {name} runs no commands of users", hint)
    note_change(request, after={"command": ask.command or "the log"})
    try:
        made = edge.tasks.add(project, name, ask.command, app_state.now())
    except TooManyTasks as error:
        raise ApiProblem("invalid-request", str(error)) from error
    return view(wire.DeviceTaskView, made)


@router.get(
    "/v1/projects/{project}/edge/devices/{name}/tasks/{task_id}",
    rule=in_path(Permission.OPERATE),
    errors=("device-not-found",),
)
async def get_task(
    app_state: AppState,
    project: ProjectPath,
    name: _DevicePath,
    task_id: Annotated[str, Path(max_length=64)],
    wait_s: WaitQuery = 0,
) -> wire.DeviceTaskView:
    """Get what a device answered, after a change or `wait_s` seconds."""
    tasks = _edge(app_state).tasks
    with app_state.watch.listen([f"edge-task:{task_id}"], wait_s) as listener:
        found = tasks.find(project, name, task_id, app_state.now())
        if found is not None and found.exit_code is None and wait_s:
            await listener.wait()
            found = tasks.find(project, name, task_id, app_state.now())
    if found is None:
        raise ApiProblem("device-not-found", f"device {name} has no task {task_id} on this server")
    return view(wire.DeviceTaskView, found)


@router.get("/v1/rollouts", rule=in_query(Permission.VIEW))
async def list_rollouts(app_state: AppState, projects: ProjectFilter) -> list[wire.RolloutView]:
    """List the rollouts, newest first."""
    edge = _edge(app_state)
    devices = await edge.devices(projects)
    found = sorted(await edge.rollouts(projects), key=lambda each: each.created_at, reverse=True)
    return [
        _rollout(each, [device for device in devices if device.project == each.project])
        for each in found
    ]


@router.post(
    "/v1/projects/{project}/rollouts",
    rule=in_path(Permission.OPERATE),
    status=201,
    when={RowNotFound: "model-not-found", ModelRefused: "model-refused"},
)
async def deploy(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.RolloutAsk
) -> wire.RolloutView:
    """Bring a version of a model to devices, wave by wave."""
    _check_rollout(ask)
    await app_state.store.archive.check(project)
    now, edge = app_state.now(), _edge(app_state)
    number = ask.to
    if ask.packages and (ask.model != PROGRAM or number or ask.label):
        raise ModelRefused(
            f"only {PROGRAM} without a version is deployed with packages",
            "publish a model with its packages; `cavvy model publish --help` tells how",
        )
    if ask.packages:  # which run with all rights of devices, also of those without --allow-exec
        require(request, Permission.MANAGE, project)
    if ask.label:
        number = (await edge.registry.find_labelled(project, ask.model, ask.label)).number
    elif ask.model == PROGRAM and not number:
        packed, blobs = await to_thread(pack_device), app_state.blobs.of(project)
        by = name_user(request, ask.made_by)
        wheels = await edge.registry.list_files(blobs, ask.packages, "") if ask.packages else ()
        made = await publish_program(
            edge.registry, now, project, packed, by, app_state.sealer, blobs, wheels
        )
        number = made.number
    rollout = view(
        Rollout,
        ask,
        project=project,
        name=f"{ask.model}-0",
        to=number,
        waves=tuple(ask.waves) or WAVES,
        wave_at=now,
        made_by=name_user(request, ask.made_by),
        created_at=now,
    )
    stored, refused = await edge.deploy(rollout)
    told = {"rollout": stored.name, "to": number, "label": ask.label, "site": ask.site}
    told |= {"packages": ask.packages} if ask.packages else {}
    note_change(request, after={**told, "refused_by_residency": list(refused)})
    return _rollout(stored, await edge.devices(project), refused)


@router.post(
    "/v1/projects/{project}/rollouts/{name}/halt",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "rollout-not-found"},
)
async def halt(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: Annotated[str, Path(max_length=80)],
    ask: wire.HaltAsk,
) -> wire.RolloutView:
    """Take a version back from the devices of a rollout."""
    reason = ask.reason[:200] or f"halted by {name_user(request, '') or 'a user'}"
    note_change(request, after={"rollout": name, "reason": reason})
    edge = _edge(app_state)
    return _rollout(await edge.halt(project, name, reason), await edge.devices(project))


@router.get("/v1/projects/{project}/edge/samples", rule=in_path(Permission.RUN))
async def list_samples(
    app_state: AppState,
    project: ProjectPath,
    model: Annotated[str, Query(max_length=63)],
    residency: Annotated[str, Query(max_length=63)] = "",
    after: Annotated[str, Query(max_length=120)] = "",
) -> wire.SamplesView:
    """List requests of a model whose answers were uncertain, oldest first."""
    received, _, rest = after.partition(".")
    number, _, device = rest.partition(".")
    if after and not all(each.isdecimal() and len(each) < 19 for each in (received, number)):
        raise ApiProblem("invalid-request", "`after` is not a place of an earlier answer")
    place = (int(received or 0), device, int(number or 0))
    found, left_out, last = await _edge(app_state).list_samples(
        project, model, residency, place, _SAMPLES
    )
    return wire.SamplesView(
        samples=[view(wire.SampleView, each) for each in found],
        left_out=left_out,
        after="" if last is None else f"{last.received}.{last.number}.{last.device}",
    )


# Devices


@router.get("/edge/v1/script", rule=OPEN, gives=True, errors=("no-joining",))
async def script(app_state: AppState) -> Response:
    """Get the script that enrols a device and runs its program."""
    address, downloads = _find_address(app_state), app_state.downloads
    assert downloads is not None  # there is an address
    bundle = await to_thread(lambda: downloads.put(pack_device()))
    text = make_script(address, app_state.node_pins, bundle)
    return Response(text, media_type="text/x-shellscript")


@router.post(
    "/edge/v1/enrol",
    rule=MACHINE,
    sends=True,
    gives=True,
    errors=("invalid-request",),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def enrol(request: Request, app_state: AppState) -> Response:
    """Enrol a device by a token."""
    project, _, token = _read_bearer(request).partition(".")
    edge = _edge(app_state)
    await edge.read_invitation(project, token)  # before the body is read
    asked = await read(request, Enrolment, _BODY)
    facts = {name[:40]: value[:200] for name, value in list(asked.facts.items())[:40]}
    device = await edge.enrol(project, token, asked.key, asked.hostname[:200], facts)
    told = Enrolled(
        project=project, device=device.name, site=device.site, allow_exec=device.allow_exec
    )
    return _json(told)


@router.get("/edge/v1/nonce", rule=OPEN, gives=True)
async def nonce(app_state: AppState) -> Response:
    """Get a text to sign."""
    return _json(Nonce(nonce=_issue(app_state, "nonce", _NONCE_VALID)))


@router.post(
    "/edge/v1/token",
    rule=OPEN,
    sends=True,
    gives=True,
    errors=("invalid-request",),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def token(request: Request, app_state: AppState) -> Response:
    """Exchange a signature for a token of a day."""
    asked = await read(request, Proof, _BODY)
    if _read_issued(app_state, asked.nonce) != "nonce":
        raise ApiProblem("unauthorised", "the signed text is not one of this server, or too old")
    device = await _edge(app_state).find(asked.project, asked.device)
    if not _is_signed(device.key, asked):
        raise ApiProblem("unauthorised", "the signature is not that of the device's key")
    made = _issue(app_state, f"{asked.project}/{asked.device}", _TOKEN_VALID)
    return _json(DeviceToken(token=made, valid_s=_TOKEN_VALID.total_seconds()))


@router.post(
    "/edge/v1/check-in",
    rule=MACHINE,
    sends=True,
    gives=True,
    errors=("invalid-request",),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def check_in(request: Request, app_state: AppState) -> Response:
    """Report what a device does, and get what it is to serve."""
    project, name = _identify(request, app_state)
    asked = await read(request, CheckIn, _BODY)
    edge, now = _edge(app_state), app_state.now()
    wanted = await edge.check_in(project, name, _read_report(app_state, asked, now))
    models, at = await _list_wanted(edge, project, name, wanted)
    program = next((each for each in models if each.name == PROGRAM), None)
    clouds = [
        CloudService(
            model=each.rule.model, url=each.service.url, key=each.key, below=each.rule.below
        )
        for each in await edge.find_clouds(project, name)
        if _is_for_devices(app_state, each.service.url)
    ]
    settings = await edge.settings_of(await edge.find(project, name))
    peer_key = await _make_peer_key(app_state, project, name, now)
    taken = edge.tasks.take(project, name, now)
    app_state.watch.wake(*(f"edge-task:{each.id}" for each in taken))
    told = CheckedIn(
        now=now.timestamp(),
        every_s=CHECK_IN_S,
        models=[each for each in models if each is not program],
        clouds=clouds,
        program=program,
        settings=settings.revision,
        peers=PeersTold(key=peer_key, at=at),
        tasks=[GivenTask(id=each.id, command=list(each.command)) for each in taken],
    )
    return _json(told)


def _read_report(app_state: AppState, asked: CheckIn, now: datetime) -> DeviceReport:
    return view(
        DeviceReport,
        asked,
        at=now,
        models=tuple(_read_model(each) for each in asked.models),
        skew_s=asked.clock - now.timestamp() if asked.clock else 0.0,
        agent=asked.agent[:40],
        share=asked.share if _is_for_peers(app_state, asked.share) else "",
        settings_problem=asked.settings_problem[:_MOST_PROBLEM],
    )


async def _list_wanted(
    edge: EdgeService, project: str, name: str, wanted: Sequence[WantedModel]
) -> tuple[list[WantedVersion], dict[str, list[str]]]:
    """Return the versions that a device is to serve, and for each model the addresses of the
    devices of its site that can give it. Raises EnrolmentRefused."""
    site = await edge.site_of(project, name)
    models: list[WantedVersion] = []
    at: dict[str, list[str]] = {}
    for each in wanted:
        hours = bool(each.rollout.window or site.window)
        peers = await edge.find_peers(project, name, each.version, hours)
        at[each.version.model] = list(peers.at)
        models.append(
            WantedVersion(
                name=each.version.model,
                number=each.version.number,
                rollout=each.rollout.number,
                mib_per_s=each.rollout.mib_per_s,
                # a device with an older program knows one window only
                window=each.rollout.window or site.window,
                site_window=site.window,
                collect_below=each.rollout.collect_below,
                wait=peers.wait,
            )
        )
    return models, at


@router.get(
    "/edge/v1/settings",
    rule=MACHINE,
    gives=True,
    when={EnrolmentRefused: "enrolment-refused"},
)
async def give_settings(request: Request, app_state: AppState) -> Response:
    """Get the settings of this device, with the values of its secrets."""
    project, name = _identify(request, app_state)
    given, secrets, closed = await _edge(app_state).open_settings(project, name)
    # while one cannot be decrypted, it is not that of a check-in: the device asks again
    revision = given.revision + "-partial" * bool(closed)
    told = {"revision": revision, "options": given.of("option"), "secrets": secrets}
    told |= {"undecrypted": closed} if closed else {}
    answer = _json({**told, "variables": given.of("variable")})
    answer.headers["Cache-Control"] = "no-store"
    return answer


@router.post(
    "/edge/v1/tasks/{task_id}",
    rule=MACHINE,
    sends=True,
    status=204,
    errors=("invalid-request",),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def end_task(
    request: Request, app_state: AppState, task_id: Annotated[str, Path(max_length=64)]
) -> Response:
    """Send the output of what a user asked of this device."""
    project, name = _identify(request, app_state)
    edge = _edge(app_state)
    await edge.find(project, name)
    asked = await read(request, TaskOutput, _BODY)
    if (found := edge.tasks.find(project, name, task_id, app_state.now())) is not None:
        edge.tasks.end(found, asked.output, asked.exit_code)
        app_state.watch.wake(f"edge-task:{task_id}")
    return done()


@router.post(
    "/edge/v1/samples",
    rule=MACHINE,
    sends=True,
    status=204,
    errors=("invalid-request",),
    when={EnrolmentRefused: "enrolment-refused"},
)
async def add_samples(request: Request, app_state: AppState) -> Response:
    """Store requests whose answers were uncertain. A sample that is sent again is stored once."""
    project, name = _identify(request, app_state)
    asked = await read(request, Samples, _BODY)
    rows = [
        (each.number, plain(each.model), msgspec.json.encode(each).decode())
        for each in asked.samples
    ]
    await _edge(app_state).add_samples(project, name, rows)
    return done()


@router.get(
    "/edge/v1/metadata/{file}",
    rule=MACHINE,
    gives=True,
    when={EnrolmentRefused: "enrolment-refused", RowNotFound: "not-found"},
)
async def metadata(
    request: Request, app_state: AppState, file: Annotated[str, Path(max_length=100)]
) -> Response:
    """Get a signed list of models. `root.json` is the newest list of keys."""
    project, name = _identify(request, app_state)
    edge = _edge(app_state)
    await edge.find(project, name)
    repository = await edge.registry.repository(project, app_state.sealer)
    text = newest_root(repository) if file == "root.json" else repository.files.get(file)
    if text is None:
        raise ApiProblem("not-found", f"the repository has no file {file}")
    return Response(text, media_type="application/json")


@router.get(
    "/edge/v1/manifests/{model}/{number}",
    rule=MACHINE,
    gives=True,
    when={EnrolmentRefused: "enrolment-refused", RowNotFound: "model-not-found"},
)
async def manifest(
    request: Request,
    app_state: AppState,
    model: Annotated[str, Path(max_length=63)],
    number: Annotated[str, Path(max_length=20)],
) -> Response:
    """Get the description of a model version, whose hash a signed list has."""
    project, name = _identify(request, app_state)
    found = await _edge(app_state).manifest_for(project, name, model, number)
    return Response(found, media_type="application/json")


@router.get(
    "/edge/v1/files/{digest}",
    rule=MACHINE,
    gives=True,
    when={EnrolmentRefused: "enrolment-refused", RowNotFound: "blob-not-found"},
)
async def file(
    request: Request,
    app_state: AppState,
    digest: Annotated[str, Path(max_length=64)],
) -> Response:
    """Get a file of a published model, or a range of it, by its SHA-256."""
    project, name = _identify(request, app_state)
    edge = _edge(app_state)
    await edge.check_file(project, name, digest)
    blobs, wanted = app_state.blobs.of(project), request.headers.get("range", "")
    site = await edge.site_of(project, name)
    if (limit := site.mib_per_s) is None:
        return await send_blob(blobs, digest, wanted)
    turn, key = edge.pace.turn_of(project, name), (project, site.name)
    piece = max(1024, min(_PACED, int(limit * 2**20 * _PIECE_S)))
    wait = partial(edge.pace.wait, turn, key, mib_per_s=limit)
    return await send_blob(blobs, digest, wanted, piece, wait)


def _is_for_devices(app_state: AppState, url: str) -> bool:
    """Return whether a service at `url` is not on the device itself, whose programs must not get
    the requests and the key: a gateway on this machine alone is only for devices on it."""
    own = app_state.node_endpoint
    return not _is_local(url) or (own is not None and _is_local(own))


def _is_for_peers(app_state: AppState, share: str) -> bool:
    """Return whether devices may be told this address of another one: it must be one of a local
    network, because a device may name any."""
    host, _, port = share.rpartition(":")
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    if not port.isdecimal() or not 1024 <= int(port) < 65536 or not address.is_private:
        return False
    if address.is_loopback:
        return _is_for_devices(app_state, "http://127.0.0.1")
    return not (address.is_unspecified or address.is_link_local or address.is_multicast)


async def _make_peer_key(app_state: AppState, project: str, name: str, now: datetime) -> str:
    """Return the key by which devices of a site know each other today. A retired device gets
    none."""
    device = await _edge(app_state).find(project, name)
    residency = device.labels.get("residency", "")
    parts = [project, device.site, residency, now.date().isoformat()]
    return app_state.tokens.prove("edge", json.dumps(["peers", *parts]))


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or host in ("0.0.0.0", "::")


def _find_address(app_state: AppState) -> str:
    """Return the address that devices use. Raises ApiProblem."""
    if app_state.node_endpoint is None:
        raise ApiProblem(
            "no-joining",
            "this server has no address for devices outside its machine",
            "set server.tls_listen, for example to 0.0.0.0:7443, and server.advertise",
        )
    return app_state.node_endpoint


def _identify(request: Request, app_state: AppState) -> tuple[str, str]:
    """Return the project and name of the device whose token a request has. Raises ApiProblem."""
    project, slash, name = _read_issued(app_state, _read_bearer(request)).partition("/")
    if not slash:
        raise ApiProblem("forbidden", "the token is not one of a device, or too old")
    return project, name


def _read_bearer(request: Request) -> str:
    """Return the token of a request. Raises ApiProblem."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind != "Bearer" or not token:
        raise ApiProblem("unauthorised", "the request has no token")
    return token


def _issue(app_state: AppState, text: str, valid: timedelta) -> str:
    expires = int((app_state.now() + valid).timestamp())
    body = base64.urlsafe_b64encode(f"{expires} {text}".encode()).rstrip(b"=").decode()
    return f"{body}.{app_state.tokens.prove('edge', body)}"


def _read_issued(app_state: AppState, token: str) -> str:
    """Return the text for which a token was issued, or "" if it is not valid now."""
    body, _, proof = token.partition(".")
    if not hmac.compare_digest(proof.encode(), app_state.tokens.prove("edge", body).encode()):
        return ""
    try:
        told = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    expires, _, text = told.partition(" ")
    return text if app_state.now().timestamp() < int(expires) else ""


def _is_signed(key: str, proof: Proof) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(proof.signature), proof.nonce.encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _read_model(told: ModelTold) -> ModelReport:
    return view(
        ModelReport,
        told,
        problem=told.problem[:_MOST_PROBLEM],
        sums=RevisionSums() if told.sums is None else RevisionSums(**vars(told.sums)),
        paths=None if told.paths is None else PathCounts(**vars(told.paths)),
    )


def _read_values(ask: wire.SettingsAsk) -> tuple[dict[str, float | str], dict[str, str]]:
    """Return the options of the program, and the variables. Raises ApiProblem."""
    options: dict[str, float | str] = {}
    variables: dict[str, str] = {}
    if not (ask.values or ask.secrets or ask.unset):
        raise ApiProblem("invalid-request", "nothing is to be changed")
    names = Counter([*ask.values, *ask.secrets, *ask.unset])
    if twice := [name for name, count in names.items() if count > 1]:
        raise ApiProblem("invalid-request", f"{twice[0][:80]} is named twice")
    if len(names) > _MOST_SETTINGS or any(len(each) > _MOST_SELECTOR for each in names):
        raise ApiProblem("invalid-request", f"more than {_MOST_SETTINGS} settings, or a long name")
    try:
        for name, text in ask.values.items():
            is_option, value = read_pair(name, text)
            if is_option:
                options[name] = value
            else:
                variables[name] = str(value)
        for name in ask.secrets:
            check_name(name)
    except SettingRefused as error:
        raise ApiProblem("invalid-request", str(error)) from None
    return options, variables


def _name_settings(ask: wire.SettingsAsk) -> str:
    """Return the name of the settings that are meant. Raises ApiProblem."""
    named = {"device": ask.device, "site": ask.site, "label": ask.label}
    given = [(kind, value) for kind, value in named.items() if value]
    if len(given) != 1:
        raise ApiProblem("invalid-request", "expected one of `device`, `site` and `label`")
    [(kind, value)] = given
    if len(value) > _MOST_SELECTOR or not value.isprintable():
        raise ApiProblem("invalid-request", f"`{kind}` is too long, or not printable")
    if kind == "label" and not value.partition("=")[0] * value.count("="):
        raise ApiProblem("invalid-request", "`label` must be NAME=VALUE, such as kind=jetson")
    return f"{kind}/{value}"


def _settings(row: EdgeSettings, devices: Sequence[EdgeDevice]) -> wire.SettingsView:
    kind, _, value = row.name.partition("/")
    mine = [
        each
        for each in devices
        if each.project == row.project and row.covers(each) and not each.retired_at
    ]
    old = [each for each in mine if each.report is not None and each.report.settings is None]
    options = {name: _say_value(each) for name, each in row.options.items()}
    return wire.SettingsView(
        project=row.project,
        device=value if kind == "device" else "",
        site=value if kind == "site" else "",
        label=value if kind == "label" else "",
        values={**options, **row.variables},
        secrets=list(row.secrets),
        devices=len(mine),
        too_old=len(old),
    )


def _say_value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _check_rollout(ask: wire.RolloutAsk) -> None:
    if problem := find_wrong_waves(ask.waves):
        raise ApiProblem("invalid-request", problem)
    if not 0 <= ask.soak_s <= _LONGEST.total_seconds():
        raise ApiProblem("invalid-request", "`soak_s` must be 0 to a year, in seconds")
    _check_limits(ask.mib_per_s, ask.window, 0.0)
    if ask.collect_below is not None and not 0 <= ask.collect_below <= 1:
        raise ApiProblem("invalid-request", "`collect_below` must be 0 to 1")
    if not 0 < ask.alpha < 0.5:
        raise ApiProblem("invalid-request", "`alpha` must be more than 0 and less than 0.5")


def _check_limits(mib_per_s: float | None, window: tuple[int, int] | None, least: float) -> None:
    if mib_per_s is not None and not max(least, 1e-6) <= mib_per_s <= 1e6:
        raise ApiProblem("invalid-request", f"`mib_per_s` must be more than {least:g}")
    if window is not None and not all(0 <= hour <= 24 for hour in window):
        raise ApiProblem("invalid-request", "`window` has two hours of the day, 0 to 24")
    if window is not None and window != (0, 24) and (window[1] - window[0]) % 24 == 0:
        hint = "for the whole day, leave it out; otherwise, state two hours such as 1-5"
        raise ApiProblem("invalid-request", "`window` contains no time, so nothing updates", hint)


def _device(device: EdgeDevice, now: datetime) -> wire.DeviceView:
    report = device.report
    heard = None if report is None else report.at
    state = "silent" if heard is None else "online" if now - heard < SILENT else "offline"
    models = [] if report is None else [_device_model(each) for each in report.models]
    return view(
        wire.DeviceView,
        device,
        state="retired" if device.retired_at else state,
        labels=dict(device.labels),
        facts=dict(device.facts),
        heard_at=heard,
        models=models,
        free_mib=0 if report is None else report.free_mib,
        skew_s=0.0 if report is None else report.skew_s,
        waiting=0 if report is None else report.waiting,
        agent="" if report is None else report.agent,
        settings_problem="" if report is None else report.settings_problem,
    )


def _device_model(model: ModelReport) -> wire.DeviceModelView:
    sums = model.sums
    return view(
        wire.DeviceModelView,
        model,
        requests=sums.requests,
        errors=sums.errors / max(1, sums.requests),
    )


def _rollout(
    rollout: Rollout, devices: Sequence[EdgeDevice], left_out: Sequence[str] = ()
) -> wire.RolloutView:
    mine = order_devices(rollout, devices)
    told = [found for each in mine if each.report and (found := each.report.of(rollout.model))]
    trial = rollout.trial
    return view(
        wire.RolloutView,
        rollout,
        labels=dict(rollout.labels),
        waves=list(rollout.waves),
        devices=len(mine),
        in_wave=count_wave(rollout, len(mine)),
        serving=sum(each.serving == rollout.to for each in told),
        refused=sum(map(rollout.is_refused, told)),
        requests=trial.new.requests,
        errors=(
            trial.old.errors / max(1, trial.old.requests),
            trial.new.errors / max(1, trial.new.requests),
        ),
        left_out=list(left_out),
    )
