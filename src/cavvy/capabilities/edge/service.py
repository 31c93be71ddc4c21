"""Devices at the edge: enrols them, and carries out the rollouts that bring them published
models.

What devices report is kept in memory and written some seconds later in one transaction: it is lost
if the server is killed, and the devices report again within a minute. All other changes are written
before they have an effect.

Errors, which are subclasses of JobServiceError:

* EnrolmentRefused: the token or the device is unknown, used, expired or retired
* ModelRefused: a model cannot be rolled out
* SettingsRefused: settings of devices cannot be changed in this way
"""

import asyncio
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import islice
from weakref import WeakValueDictionary

from cavvy.capabilities.edge.deltas import add_deltas, choose_bases
from cavvy.capabilities.edge.devices import (
    NO_SETTINGS,
    DeviceSettings,
    DeviceTasks,
    SitePace,
    change_row,
    find_excess,
    merge_settings,
)
from cavvy.capabilities.edge.nouns import (
    PROGRAM,
    DeviceReport,
    EdgeDevice,
    EdgeInvitation,
    EdgeSample,
    EdgeSettings,
    EdgeSite,
    PathCounts,
    Rollout,
    RolloutPhase,
)
from cavvy.capabilities.edge.rollouts import (
    SILENT,
    choose_versions,
    count_wave,
    decide_rollout,
    list_doubtful,
    order_devices,
)
from cavvy.capabilities.edge.rows import SqlEdge
from cavvy.capabilities.models.nouns import ModelVersion
from cavvy.capabilities.models.registry import ModelRefused, ModelRegistry, ModelUser, make_manifest
from cavvy.control.agents.model_folder import read_entries
from cavvy.control.agents.work import OpenSecrets
from cavvy.control.clock import ControlClock
from cavvy.control.decide.task_places import is_within
from cavvy.control.job_service import JobServiceError
from cavvy.control.parts import KnownService
from cavvy.domain.audit import AuditEntry, AuditOutcome
from cavvy.domain.jobs import JobRecord
from cavvy.domain.services import EdgeRule
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace
from cavvy.store.base import KeyUnusable, ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.blobs import BlobStore
from cavvy.store.sql import Store

_PREFIX = "edge:"
_EVERY = timedelta(seconds=5)  # interval between two writes of reports, and two looks at rollouts
_LEAST = timedelta(seconds=1)  # interval if the waves of a rollout are that short
_FRESH = timedelta(seconds=30)  # after which the rows that other servers may have changed are read
_MOST_AUDITED = 100_000
_TRIES = 10  # tries of a write that fails because a row was changed meanwhile
# Of a site's devices that share files, one fetches a version, and others wait so long for it. After
# some turns, all fetch it. A turn outside the hours in which they update, in which none of them
# begins to fetch, does not count, but after a day all do.
_TURN, _MOST_TURNS = timedelta(minutes=10), 3
_MOST_UNUSED = timedelta(days=1) // _TURN
_MOST_PEERS, _MOST_LOOKED_AT = 4, 1000
_MAY_BE_SHARED = 4096  # bytes; a smaller file than this, such as a list of labels, tells no model
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEY = re.compile(r"[0-9a-f]{64}")
_NONE: tuple[datetime, Sequence[ModelVersion]] = datetime.min.replace(tzinfo=UTC), ()


async def _open_none(project: str, names: Sequence[str]) -> dict[str, str]:
    return {}


async def _list_none(project: str) -> list[KnownService]:
    return []


class EnrolmentRefused(JobServiceError):
    """Raised if a device may not enrol, or is no longer one of the project's devices."""


class SettingsRefused(JobServiceError):
    """Raised if settings of devices cannot be changed in this way."""


class CloudPath(Struct, frozen=True, kw_only=True):
    """The service that answers a device's requests for a model, and the key that it needs.
    The device keeps samples as `rule` says."""

    service: KnownService
    rule: EdgeRule
    key: str = ""

    def covers(self, device: EdgeDevice) -> bool:
        return self.rule.site in ("", device.site)

    def may_get(self, device: EdgeDevice) -> bool:
        """Return whether the device's requests may leave it for the service."""
        residency = device.labels.get("residency", "")
        return not residency or is_within(self.service.task, residency)


class WantedModel(Struct, frozen=True, kw_only=True):
    """A model version that a device is to serve."""

    version: ModelVersion
    rollout: Rollout


class Peers(Struct, frozen=True, kw_only=True):
    """The addresses of devices that can give a version to another one. That one should `wait` if
    there are none yet, but one of them fetches the version."""

    at: Sequence[str] = ()
    wait: bool = False


class CloudDevices(Struct, frozen=True, kw_only=True):
    """The devices of a service's rule: their number, how many keep their requests because of their
    residency, and what became of the requests since their programs started, the first of them
    `window_s` seconds ago. They have cost `spent` in these hours; None if that is not known of one
    of them. What serves several models is a part of the cost of each."""

    devices: int
    kept: int
    paths: Sequence[PathCounts]
    window_s: int = 0
    spent: Money | None = None


class _ProjectDevices:
    """The rows of one project's devices, models and rollouts as they were at `read_at`, with the
    reports that are not written yet."""

    def __init__(
        self,
        read_at: datetime,
        devices: Mapping[str, EdgeDevice],
        models: Mapping[str, ModelVersion],
        rollouts: Mapping[str, Rollout],
        clouds: Sequence[CloudPath],
        sites: Mapping[str, EdgeSite],
        settings: Sequence[EdgeSettings],
        secrets: Mapping[str, datetime],
    ) -> None:
        self.read_at, self.clouds, self.sites = read_at, clouds, sites
        self._settings, self._secrets = {each.name: each for each in settings}, secrets
        # by what devices with equal settings have in common
        self._merged: dict[tuple[str, str, frozenset[tuple[str, str]]], DeviceSettings] = {}
        self.devices, self.models, self.rollouts = dict(devices), models, dict(rollouts)
        self.reported: set[str] = set()
        # the devices that give files to others, by what must be equal for both
        self.sharing: dict[tuple[str, str], set[str]] = {}
        for each in self.devices.values():
            self.note_share(each)
        self.members: Mapping[str, frozenset[str]] = {}
        self.place()

    def note_share(self, device: EdgeDevice) -> None:
        if device.report is not None and device.report.share:
            self.sharing.setdefault(_peer_group(device), set()).add(device.name)

    def settings_of(self, device: EdgeDevice) -> DeviceSettings:
        if not self._settings:
            return NO_SETTINGS
        own = device.name if f"device/{device.name}" in self._settings else ""
        key = own, device.site, frozenset(device.labels.items())
        found = self._merged.get(key)
        if found is None:
            found = merge_settings(device, self._settings, self._secrets)
            self._merged[key] = found
        return found

    def place(self) -> None:
        """Note which devices are in the present wave of each rollout."""
        self.members = {
            name: _list_wave(each, list(self.devices.values()))
            for name, each in self.rollouts.items()
            if each.phase is RolloutPhase.RUNNING
        }


def edge_key(project: str) -> str:
    """Return the worklist's key of a project's devices."""
    return f"{_PREFIX}{project}"


def is_edge_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class EdgeService:
    """Handles requests of users and devices, and carries out rollouts. `hint` makes a key of the
    worklist due after a time, `list_services` returns those of a project, and `open_secrets`
    returns values of a project's secrets. `list_users` returns who learns of models; if None, only
    this service does."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        hint: Callable[[str, timedelta], None],
        list_services: Callable[[str], Awaitable[Sequence[KnownService]]] = _list_none,
        open_secrets: OpenSecrets = _open_none,
        list_users: Callable[[], Sequence[ModelUser]] | None = None,
    ) -> None:
        self._store, self._clock, self._hint = store, clock, hint
        self._rows = SqlEdge(*store.database)
        self.registry = ModelRegistry(self._rows, clock, list_users or (lambda: [self]))
        self._list_services, self._open_secrets = list_services, open_secrets
        self.tasks, self.pace = DeviceTasks(), SitePace(clock)
        self._audited: set[tuple[str, str, str]] = set()  # refusals that have an entry
        self._known: dict[str, _ProjectDevices] = {}
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._forgotten: Counter[str] = Counter()  # changes of rows, by project
        # by project, its models if one must not leave a place, as they were at a time
        self._bound: dict[str, tuple[datetime, Sequence[ModelVersion]]] = {}
        self._enrolling = asyncio.Lock()
        # by what devices of a site want: which fetched it, and since when
        self._turns: dict[tuple[str, ...], tuple[tuple[str, datetime], ...]] = {}
        self._begun: set[tuple[tuple[str, ...], int]] = set()  # the turns in which one did begin

    # Users' requests

    async def invite(
        self,
        project: str,
        *,
        site: str,
        labels: Mapping[str, str],
        count: int,
        valid: timedelta,
        allow_exec: bool = False,
    ) -> tuple[str, EdgeInvitation]:
        """Create a token with which `count` devices can enrol once each. Raises
        EnrolmentRefused."""
        _check_site(site)
        token = secrets.token_urlsafe(24)
        invitation = EdgeInvitation(
            project=project,
            name=_digest(token),
            site=site,
            labels=labels,
            expires_at=self._clock.now() + valid,
            left=count,
            allow_exec=allow_exec,
        )
        return token, await self._rows.invitations.put(invitation)

    async def limit_site(self, site: EdgeSite, *, keep_price: bool = False) -> EdgeSite:
        """Replace the limits of a site, perhaps one that has no devices yet, and the price of its
        devices unless that is kept. Raises EnrolmentRefused."""
        _check_site(site.name)
        for _ in range(_TRIES):
            try:
                known = await self._rows.sites.get(site.project, site.name)
                site = replace(site, version=known.version)
                if keep_price:
                    price = known.device_micros_per_hour
                    site = replace(site, device_micros_per_hour=price)
            except RowNotFound:
                site = replace(site, version=0)
            with suppress(StaleVersion):
                stored = await self._rows.sites.put(site)
                self._forget(site.project)
                return stored
        raise StaleVersion(f"site {site.name} kept changing during the request; try again")

    async def sites(self, projects: ProjectFilter) -> Sequence[EdgeSite]:
        """Return the limits of sites."""
        return await self._rows.sites.list(projects)

    async def site_of(self, project: str, name: str) -> EdgeSite:
        """Return the limits of a device's site. Raises EnrolmentRefused."""
        site = (await self.find(project, name)).site
        found = (await self._read(project)).sites.get(site)
        return found or EdgeSite(project=project, name=site)

    async def settings(self, projects: ProjectFilter) -> Sequence[EdgeSettings]:
        """Return what is set for devices."""
        return await self._rows.settings.list(projects)

    async def change_settings(
        self,
        project: str,
        name: str,
        options: Mapping[str, float | str],
        variables: Mapping[str, str],
        secrets: Sequence[str],
        unset: Sequence[str],
    ) -> EdgeSettings:
        """Set and unset what is set for devices, and return all of it. `name` is that of
        EdgeSettings. Raises RowNotFound, SettingsRefused."""
        kind, _, value = name.partition("/")
        if kind == "site":
            _check_site(value, SettingsRefused)
        for _ in range(_TRIES):
            try:
                known = await self._rows.settings.get(project, name)
            except RowNotFound:
                known = EdgeSettings(project=project, name=name)
            if missing := [each for each in unset if each not in known.names]:
                told = ", ".join(known.names) or "nothing"
                raise SettingsRefused(f"{missing[0]} is not set there; set are: {told}")
            fresh = change_row(known, options, variables, secrets, unset)
            if excess := find_excess(fresh):
                raise SettingsRefused(excess)
            with suppress(StaleVersion):
                if fresh.names:
                    fresh = await self._rows.settings.put(fresh)
                elif known.version:
                    await self._rows.settings.delete(known)
                self._forget(project)
                return fresh
        raise StaleVersion(f"the settings of {name} kept changing during the request; try again")

    async def settings_of(self, device: EdgeDevice) -> DeviceSettings:
        """Return the settings of a device."""
        return (await self._read(device.project)).settings_of(device)

    async def open_settings(
        self, project: str, name: str
    ) -> tuple[DeviceSettings, dict[str, str], Sequence[str]]:
        """Return the settings of a device, the values of its secrets, and the names of those that
        cannot be decrypted. Raises EnrolmentRefused."""
        found = await self.settings_of(await self.find(project, name))
        opened: dict[str, str] = {}
        closed: list[str] = []
        try:
            opened |= await self._open_secrets(project, found.secrets) if found.secrets else {}
        except KeyUnusable:
            for each in found.secrets:
                try:
                    opened |= await self._open_secrets(project, [each])
                except KeyUnusable:
                    closed.append(each)
        return found, opened, closed

    def secret_changed(self, project: str) -> None:
        """Let devices get another value of a secret, or none, at their next check-in."""
        self._forget(project)

    async def devices(self, projects: ProjectFilter) -> Sequence[EdgeDevice]:
        """Return the devices with their newest reports."""
        rows = await self._rows.devices.list(projects)
        return [self._newest(each) for each in rows]

    async def device(self, project: str, name: str) -> EdgeDevice:
        """Return one device. Raises RowNotFound."""
        return self._newest(await self._rows.devices.get(project, name))

    async def retire(self, project: str, name: str) -> Mapping[str, Sequence[str]]:
        """Refuse a device from now on, because it is lost or no longer used. Return the secrets
        that it may have, by the services for which it got them. Raises RowNotFound."""
        for _ in range(_TRIES):
            device = await self._rows.devices.get(project, name)
            with suppress(StaleVersion):
                await self._rows.devices.put(
                    replace(device, retired_at=device.retired_at or self._clock.now())
                )
                self._forget(project)
                return await self._find_secrets(device)
        raise StaleVersion(f"device {name} kept changing during the request; try again")

    async def _find_secrets(self, device: EdgeDevice) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for service in await self._list_services(device.project):
            for rule in service.rules:
                path = CloudPath(service=service, rule=rule)
                if rule.secret and path.covers(device) and path.may_get(device):
                    found.setdefault(rule.secret, []).append(service.task.name)
        return {secret: sorted({*names}) for secret, names in sorted(found.items())}

    async def find_confined(
        self, task: TaskSpec, blobs: BlobStore, snapshot: str
    ) -> ModelVersion | None:
        """Return a version with files of this snapshot that must not come where the task may run,
        or None. A file that another version has too may go where that version may. Raises
        RowNotFound, NotManifest."""
        now, (read_at, models) = self._clock.now(), self._bound.get(task.project, _NONE)
        if now - read_at >= _EVERY:
            found = await self._rows.models.list(task.project)
            models = found if any(each.residency for each in found) else ()
            self._bound[task.project] = now, models
        if not models:
            return None
        hashes = {each.sha256 for each in await asyncio.to_thread(read_entries, blobs, snapshot)}
        confined: dict[str, ModelVersion] = {}
        free: set[str] = set()
        for each in models:
            mine = {
                file.sha256
                for file in each.files
                if file.sha256 in hashes and (file.path == each.main or file.size >= _MAY_BE_SHARED)
            }
            if mine and (not each.residency or is_within(task, each.residency)):
                free |= mine
            else:
                confined |= dict.fromkeys(mine, each)
        return next((each for name, each in confined.items() if name not in free), None)

    async def find_collector(
        self, task: TaskSpec, blobs: BlobStore, snapshot: str, rerun_of: str | None
    ) -> JobRecord | None:
        """Return a job that has put samples into this snapshot which must not come where the task
        may run, or None. `rerun_of` is the job that the task repeats. Raises NotManifest."""
        before = {each.id or each.job for each in task.after}
        with suppress(RowNotFound):
            if rerun_of:
                earlier = await self._store.find_job(task.project, rerun_of)
                before |= {each.id or each.job for each in earlier.task.after}
        for each in sorted(before):
            with suppress(RowNotFound):
                job = await self._store.find_job(task.project, each)
                step = job.task.edge
                if step is None or not step.collect or not step.residency:
                    continue
                if not is_within(task, step.residency):
                    entries = await asyncio.to_thread(read_entries, blobs, snapshot)
                    if any(entry.path == step.into for entry in entries):
                        return job
        return None

    async def deploy(self, rollout: Rollout) -> tuple[Rollout, Sequence[str]]:
        """Begin a rollout; the number in its name is ignored. Return it with the names of devices
        that do not get the model because of its residency. Raises RowNotFound, ModelRefused."""
        model = await self._rows.models.get(rollout.project, f"{rollout.model}@{rollout.to}")
        await self.registry.check_signed(model)
        everywhere = rollout
        devices = await self.devices(rollout.project)
        doubtful = list_doubtful(devices, model)
        rollout = replace(rollout, residency=model.residency, unable=dict.fromkeys(doubtful, ""))
        mine = order_devices(rollout, devices)
        refused = [
            each.name for each in devices if everywhere.covers(each) and not rollout.covers(each)
        ]
        if not mine:
            told = f"{len(refused)} of them must not get it ({model.residency})" if refused else ""
            raise ModelRefused(
                f"no device is meant: {told or 'no enrolled device has this site and labels'}",
                "`cavvy edge list` lists devices",
            )
        for _ in range(_TRIES):
            known = await self._rows.rollouts.list(rollout.project)
            same = [each for each in known if each.model == rollout.model]
            number = max((each.number for each in same), default=0) + 1
            with suppress(StaleVersion):
                named = replace(rollout, name=f"{rollout.model}-{number}", version=0)
                stored = await self._rows.rollouts.put(named)
                await self._replace_running(stored, same)
                self._forget(rollout.project)
                self._hint(edge_key(rollout.project), timedelta(0))
                return stored, refused
        raise StaleVersion(f"rollouts of {rollout.model} kept changing; try again")

    async def rollouts(self, projects: ProjectFilter) -> Sequence[Rollout]:
        """Return the rollouts, with the devices' reports as they were last written."""
        return await self._rows.rollouts.list(projects)

    async def halt(self, project: str, name: str, reason: str) -> Rollout:
        """Take a version back from all devices of a rollout. Raises RowNotFound."""
        for _ in range(_TRIES):
            rollout = await self._rows.rollouts.get(project, name)
            with suppress(StaleVersion):
                stored = await self._rows.rollouts.put(
                    replace(rollout, phase=RolloutPhase.HALTED, reason=reason, counted={})
                )
                self._forget(project)
                return stored
        raise StaleVersion(f"rollout {name} kept changing during the request; try again")

    async def unfinished(self) -> Sequence[str]:
        """Return the keys of the projects with devices."""
        rollouts = await self._rows.rollouts.list()
        running = {each.project for each in rollouts if each.phase is RolloutPhase.RUNNING}
        return [edge_key(each) for each in sorted(running)]

    # Devices' requests

    async def enrol(
        self, project: str, token: str, key: str, hostname: str, facts: Mapping[str, str]
    ) -> EdgeDevice:
        """Enrol a device with its public key; a repeated call with the same key returns the same
        device. Raises EnrolmentRefused."""
        if _KEY.fullmatch(key) is None:
            raise EnrolmentRefused("the device's key is no Ed25519 key in hexadecimal")
        for _ in range(_TRIES):
            async with self._enrolling:
                name, known = await self._find_name(project, hostname, key)
                if known is not None:
                    return known
                invited = await self._find_invitation(project, token)
                device = EdgeDevice(
                    project=project,
                    name=name,
                    site=invited.site,
                    labels=invited.labels,
                    key=key,
                    facts=facts,
                    enrolled_at=self._clock.now(),
                    allow_exec=invited.allow_exec,
                )
                with suppress(StaleVersion):
                    stored = await self._rows.enrol(invited, device)
                    self._forgotten[project] += 1  # but what is known stays, with the device
                    if (held := self._known.get(project)) is not None:
                        held.devices[name] = stored
                    return stored
        raise StaleVersion("the token kept changing during the request; try again")

    async def read_invitation(self, project: str, token: str) -> EdgeInvitation:
        """Return the invitation with this token, also if it was used or has expired. Raises
        EnrolmentRefused."""
        try:
            return await self._rows.invitations.get(project, _digest(token))
        except RowNotFound:
            hint = "make a new one: cavvy edge token"
            raise EnrolmentRefused("this enrolment token is unknown", hint) from None

    async def _find_invitation(self, project: str, token: str) -> EdgeInvitation:
        """Return the invitation with this token if it is valid now. Raises EnrolmentRefused."""
        hint = "make a new one: cavvy edge token"
        invited = await self.read_invitation(project, token)
        if invited.left <= 0:
            raise EnrolmentRefused("this enrolment token has been used", hint)
        if self._clock.now() >= invited.expires_at:
            raise EnrolmentRefused("this enrolment token has expired", hint)
        return invited

    async def _find_name(
        self, project: str, hostname: str, key: str
    ) -> tuple[str, EdgeDevice | None]:
        """Return the name of the device with this key, and the device if it has enrolled: the host
        name or, if another device has it, the host name with a part of the key's hash."""
        plain = re.sub(r"[^a-z0-9]+", "-", hostname.lower().partition(".")[0])[:40].strip("-")
        base = plain or "device"
        longer = f"{base}-{_digest(key)[:8]}"
        free = longer
        for name in (longer, base):
            try:
                found = await self._rows.devices.get(project, name)
            except RowNotFound:
                free = name
                continue
            if found.key == key:
                return name, found
        return free, None

    async def check_in(
        self, project: str, name: str, report: DeviceReport
    ) -> Sequence[WantedModel]:
        """Note what a device reports, and return what it is to serve. Raises EnrolmentRefused."""
        device = await self.find(project, name)
        known = await self._read(project)
        known.devices[name] = replace(device, report=report)
        known.note_share(known.devices[name])
        if not known.reported:  # later, because a write of each report would cost more than it
            self._hint(edge_key(project), _EVERY)
        known.reported.add(name)
        wanted = choose_versions(device, list(known.rollouts.values()), known.members)
        return [
            WantedModel(version=version, rollout=each)
            for each in wanted.values()
            if (version := known.models.get(f"{each.model}@{each.to}")) is not None
        ]

    async def find_peers(
        self, project: str, name: str, wanted: ModelVersion, hours: bool = False
    ) -> Peers:
        """Return the devices of the site that can give a version to this one, which would take it,
        or whether it should wait until one can. With `hours`, they update in some hours only.
        Raises EnrolmentRefused."""
        device, known = await self.find(project, name), await self._read(project)
        own = device.report and device.report.of(wanted.model)
        if own and own.serving == wanted.number:
            return Peers()
        now, group = self._clock.now(), known.sharing.get(_peer_group(device), set())
        found = []
        for each in islice((each for each in group if each != name), _MOST_LOOKED_AT):
            peer = known.devices.get(each)
            report = None if peer is None or peer.retired_at else peer.report
            held = report and now - report.at < SILENT and report.of(wanted.model)
            if report and report.share and held and held.serving == wanted.number:
                found.append((_digest(f"{name} {each}"), report.share))
        if found:
            return Peers(at=[share for _, share in sorted(found)[:_MOST_PEERS]])
        may = name not in group or self._may_fetch(device, wanted, now, known.devices, hours)
        return Peers(wait=not may)

    def _may_fetch(
        self,
        device: EdgeDevice,
        wanted: ModelVersion,
        now: datetime,
        known: Mapping[str, EdgeDevice],
        hours: bool = False,
    ) -> bool:
        """Return whether a device is to fetch a version for its site. Another one has its turn if
        it takes too long, is retired or refuses the version, and after some turns all may: a device
        can be offline, or lie."""
        key = _turn_key(device, wanted)
        turns = self._turns.get(key, ())
        if turns and now - turns[-1][1] < _TURN:
            other = known.get(turns[-1][0])
            report = other and other.report and other.report.of(wanted.model)
            left = other is not None and other.retired_at is not None
            if not left and not (report and report.refused == wanted.number):
                return turns[-1][0] == device.name
        used = [at for at in range(len(turns)) if not hours or (key, at) in self._begun]
        if len(used) < _MOST_TURNS and len(turns) < _MOST_UNUSED:
            if len(self._turns) >= _MOST_AUDITED:
                self._turns.clear()
                self._begun.clear()
            self._turns[key] = (*turns, (device.name, now))
        return True

    async def find_clouds(self, project: str, name: str) -> Sequence[CloudPath]:
        """Return the services that answer what a device cannot, one for each model; one for the
        device's site precedes one for all sites. A service to which requests must not go because
        of their residency is left out, with an entry in the audit log. Raises EnrolmentRefused."""
        device, found = await self.find(project, name), dict[str, CloudPath]()
        clouds = (await self._read(project)).clouds
        for each in sorted(clouds, key=lambda cloud: not cloud.rule.site):
            if each.covers(device) and each.rule.model not in found:
                if each.may_get(device):
                    found[each.rule.model] = each
                else:
                    await self._audit_kept(device, each)
        return list(found.values())

    async def _audit_kept(self, device: EdgeDevice, cloud: CloudPath) -> None:
        known = device.project, device.name, cloud.service.id
        if known in self._audited:
            return
        if len(self._audited) >= _MOST_AUDITED:
            self._audited.clear()
        self._audited.add(known)
        residency = device.labels.get("residency", "")
        await self._store.record(
            AuditEntry(
                at=self._clock.now(),
                signed_in=False,
                action="POST /edge/v1/check-in",
                target={"device": device.name, "service": cloud.service.task.name},
                project=device.project,
                outcome=AuditOutcome.REFUSED,
                code="residency",
                after={"requests_stay_on": device.name, "residency": residency},
            )
        )

    async def list_clouds(self, service: KnownService) -> Sequence[tuple[EdgeRule, CloudDevices]]:
        """Return the devices of each of a service's rules, with their newest reports."""
        devices = [each for each in await self.devices(service.task.project) if not each.retired_at]
        sites = {each.name: each for each in await self.sites(service.task.project)}
        found = []
        for rule in service.rules:
            path = CloudPath(service=service, rule=rule)
            mine = [each for each in devices if path.covers(each)]
            kept = sum(not path.may_get(each) for each in mine)
            reports = [
                report for each in mine if each.report and (report := each.report.of(rule.model))
            ]
            paths = [each.paths for each in reports if each.paths is not None]
            told = CloudDevices(devices=len(mine), kept=kept, paths=paths)
            works = [each for each in mine if each.report and each.report.of(rule.model)]
            found.append((rule, _add_costs(told, works, rule.model, sites, self._clock.now())))
        return found

    async def _find_paths(self, project: str) -> Sequence[CloudPath]:
        found = []
        for service in await self._list_services(project):
            for rule in service.rules if service.url else ():
                key = await self._open_key(project, rule.secret) if rule.secret else ""
                found.append(CloudPath(service=service, rule=rule, key=key))
        return found

    async def _open_key(self, project: str, secret: str) -> str:
        """Return a secret's value, or "" if it cannot be had: devices must still check in."""
        try:
            return (await self._open_secrets(project, [secret])).get(secret, "")
        except KeyUnusable:
            return ""

    async def manifest_for(self, project: str, name: str, model: str, number: str) -> bytes:
        """Return the manifest of a model version for a device. Raises EnrolmentRefused,
        RowNotFound."""
        device = await self.find(project, name)
        known = await self._read(project)
        found = known.models.get(f"{model}@{number}")
        if found is None or not _may_have(device, found, _list_needed(device, known)):
            raise RowNotFound(f"no rollout gives {name} a model {model}@{number}")
        key = _turn_key(device, found)
        if (turns := self._turns.get(key)) and turns[-1][0] == name:
            self._begun.add((key, len(turns) - 1))
        return make_manifest(found)

    async def check_file(self, project: str, name: str, digest: str) -> None:
        """Raise RowNotFound unless a model that the device may have contains this file. Raises
        EnrolmentRefused."""
        device = await self.find(project, name)
        known = await self._read(project)
        needed = _list_needed(device, known)
        if not any(
            digest == file.sha256 or any(digest == delta.sha256 for delta in file.deltas)
            for each in known.models.values()
            if _may_have(device, each, needed)
            for file in each.files
        ):
            raise RowNotFound(f"no rollout gives {name} a file {digest}")

    async def add_samples(
        self, project: str, name: str, samples: Sequence[tuple[int, str, str]]
    ) -> None:
        """Store samples of a device: their numbers, models and bodies in JSON. Raises
        EnrolmentRefused."""
        device = await self.find(project, name)
        residency = device.labels.get("residency", "")
        added = [
            EdgeSample(device=name, number=number, model=model, residency=residency, body=body)
            for number, model, body in samples
        ]
        await self._rows.add_samples(project, name, added, self._clock.now())

    async def list_samples(
        self, project: str, model: str, residency: str, after: tuple[int, str, int], limit: int
    ) -> tuple[Sequence[EdgeSample], int, EdgeSample | None]:
        """Return samples that may leave for `residency`, how many may not, and the last sample that
        was looked at."""
        found = await self._rows.list_samples(project, model, after, limit)
        free = [each for each in found if each.residency in ("", residency)]
        return free, len(found) - len(free), found[-1] if found else None

    async def find(self, project: str, name: str) -> EdgeDevice:
        """Return an enrolled device. Raises EnrolmentRefused."""
        known = await self._read(project)
        device = known.devices.get(name)
        if device is None:  # enrolled while the others were read
            with suppress(RowNotFound):
                device = await self._rows.devices.get(project, name)
                known.devices[name] = device
        if device is None or device.retired_at is not None:
            raise EnrolmentRefused(f"device {name} is not one of the project's devices")
        return device

    # Rollouts

    async def reconcile(self, key: str) -> timedelta | None:
        """Write what devices have reported, and carry the project's rollouts on."""
        project = key.removeprefix(_PREFIX)
        known, now = await self._read(project), self._clock.now()
        await self._flush(known)
        running = [each for each in known.rollouts.values() if each.phase is RolloutPhase.RUNNING]
        for rollout in running:
            decided = decide_rollout(
                rollout, list(known.devices.values()), now, _list_taken(rollout, known)
            )
            if decided == rollout:
                continue
            try:
                known.rollouts[rollout.name] = await self._rows.rollouts.put(decided)
            except StaleVersion:
                self._forget(project)
        known.place()
        if not running and not known.reported:
            return None
        shortest = min((timedelta(seconds=each.soak_s) for each in running), default=_EVERY)
        return min(_EVERY, max(_LEAST, shortest))

    async def _flush(self, known: _ProjectDevices) -> None:
        names, known.reported = known.reported, set()
        devices = [known.devices[each] for each in names]
        stored = await self._rows.put_reports(devices) if devices else ()
        for each in stored:
            known.devices[each.name] = replace(known.devices[each.name], version=each.version)
        for name in names.difference(each.name for each in stored):
            known.devices.pop(name, None)  # it was changed by another server, so it is read again

    async def _read(self, project: str) -> _ProjectDevices:
        if (known := self._find_fresh(project)) is not None:
            return known
        # one reader at a time: of two, the later one would drop the reports to the first one
        async with self._reading.setdefault(project, asyncio.Lock()):
            if (known := self._find_fresh(project)) is not None:
                return known
            if (old := self._known.get(project)) is not None:
                await self._flush(old)
            now, forgotten = self._clock.now(), self._forgotten[project]
            known = await self._list_rows(project, now)
            if known.devices:  # requests that name other projects, or none, would fill the memory
                self._known[project] = known
            if forgotten != self._forgotten[project]:  # a row may have changed after it was read
                self._forget(project)
            return known

    def _find_fresh(self, project: str) -> _ProjectDevices | None:
        known = self._known.get(project)
        return known if known is not None and self._clock.now() - known.read_at < _FRESH else None

    async def _list_rows(self, project: str, now: datetime) -> _ProjectDevices:
        devices = await self._rows.devices.list(project)
        models = await self._rows.models.list(project)
        rollouts = await self._rows.rollouts.list(project)
        settings = await self._rows.settings.list(project)
        secrets: dict[str, datetime] = {}
        if any(each.secrets for each in settings):
            secrets = {each.name: each.updated_at for each in await self._store.secrets(project)}
        return _ProjectDevices(
            now,
            {each.name: each for each in devices},
            {each.name: each for each in models},
            {each.name: each for each in rollouts},
            await self._find_paths(project) if devices else (),
            {each.name: each for each in await self._rows.sites.list(project)},
            settings,
            secrets,
        )

    def _forget(self, project: str) -> None:
        """Let the rows be read again, after the reports that are not written yet are written."""
        self._forgotten[project] += 1
        if (known := self._known.get(project)) is not None:
            known.read_at = self._clock.now() - _FRESH

    async def add_files(
        self, model: ModelVersion, known: Sequence[ModelVersion], blobs: BlobStore
    ) -> ModelVersion:
        """Return a version with deltas from those that devices have."""
        bases = choose_bases(model, known, await self._rows.rollouts.list(model.project))
        return await asyncio.to_thread(add_deltas, blobs, model, bases) if bases else model

    def models_changed(self, project: str) -> None:
        self._forget(project)
        self._bound.pop(project, None)

    def _newest(self, device: EdgeDevice) -> EdgeDevice:
        known = self._known.get(device.project)
        held = None if known is None else known.devices.get(device.name)
        return device if held is None else replace(device, report=held.report)

    async def _replace_running(self, newest: Rollout, others: Sequence[Rollout]) -> None:
        """End the running rollouts of the same model, whose devices the new one takes over."""
        for each in others:
            for _ in range(_TRIES):
                found = await self._rows.rollouts.get(each.project, each.name)
                if found.phase is not RolloutPhase.RUNNING or not _includes(newest, found):
                    break
                reason = f"{newest.name} began"
                with suppress(StaleVersion):
                    await self._rows.rollouts.put(
                        replace(found, phase=RolloutPhase.REPLACED, reason=reason, counted={})
                    )
                    break


def _add_costs(
    told: CloudDevices,
    devices: Sequence[EdgeDevice],
    model: str,
    sites: Mapping[str, EdgeSite],
    now: datetime,
) -> CloudDevices:
    """Return what the devices, which have reported on the model, have cost since their programs
    started."""
    spent: Money | None = Money()
    window = timedelta(0)
    for device in devices:
        report = device.report
        assert report is not None  # only those that have reported are given
        # it may lie, but was no device before it enrolled, nor after it was heard of
        here = max(timedelta(0), report.at - device.enrolled_at)
        up = min(timedelta(seconds=report.up_s), here)
        site = sites.get(device.site)
        price = None if site is None else site.device_micros_per_hour
        served = {each.name for each in report.models if each.serving} - {PROGRAM} | {model}
        window = max(window, min(now - report.at + up, now - device.enrolled_at) if up else up)
        if spent is None or price is None or not up:
            spent = None
        else:
            spent += HourlyRate(price).divide(Fraction(1, len(served))).over(up)
    spent = spent if devices else None
    return replace(told, window_s=int(window.total_seconds()), spent=spent)


def _check_site(name: str, refused: type[Exception] = EnrolmentRefused) -> None:
    if _NAME.fullmatch(name) is None:
        raise refused(
            f"the site {name!r} must have 1 to 63 characters of a-z, 0-9 and -, and no - at "
            "either end"
        )


def _peer_group(device: EdgeDevice) -> tuple[str, str]:
    return device.site, device.labels.get("residency", "")


def _turn_key(device: EdgeDevice, wanted: ModelVersion) -> tuple[str, ...]:
    return device.project, *_peer_group(device), wanted.name


def _may_have(device: EdgeDevice, model: ModelVersion, needed: Container[tuple[str, int]]) -> bool:
    at_home = model.residency in ("", device.labels.get("residency", ""))
    return at_home and (model.model, model.number) in needed


def _list_needed(device: EdgeDevice, known: _ProjectDevices) -> Container[tuple[str, int]]:
    """Return the versions that rollouts give to the device now, and those to which it returns if
    these rollouts are halted. A device that was broken into gets nothing else of the project."""
    rollouts = known.rollouts.values()
    now = choose_versions(device, list(rollouts), known.members)
    names = {each.name for each in now.values()}
    earlier = [each for each in rollouts if each.name not in names]
    back = choose_versions(device, earlier, known.members)
    return {(each.model, each.to) for each in (*now.values(), *back.values())}


def _list_taken(rollout: Rollout, known: _ProjectDevices) -> frozenset[str]:
    """Return the devices that get their version from a newer rollout of the same model."""
    newer = [
        each
        for each in known.rollouts.values()
        if each.model == rollout.model and each.number > rollout.number
    ]
    devices = known.devices.values() if newer else ()
    return frozenset(each.name for each in devices if choose_versions(each, newer, known.members))


def _includes(newer: Rollout, older: Rollout) -> bool:
    """Return whether a rollout is for all devices that an older one is for."""
    return newer.site in ("", older.site) and newer.labels.items() <= older.labels.items()


def _list_wave(rollout: Rollout, devices: Sequence[EdgeDevice]) -> frozenset[str]:
    ordered = order_devices(rollout, devices)
    return frozenset(each.name for each in ordered[: count_wave(rollout, len(ordered))])


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
