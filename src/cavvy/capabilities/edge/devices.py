"""What the server keeps of devices at the edge: which settings each gets, what users ask of it, and
what its site may fetch.

Of the settings for a device's site, its labels and itself, the last one wins. Users ask for the
newest lines of a device's log, or a command: a device learns of it at its next check-in, because
the server cannot connect to it, and sends the output. These tasks are kept in memory, with bounds,
and are lost when the server stops. What the devices of a site fetch together stays below the site's
limit.
"""

import hashlib
import json
import secrets
from asyncio import Lock
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from cavvy.capabilities.edge.nouns import EdgeDevice, EdgeSettings
from cavvy.control.clock import ControlClock
from cavvy.domain.values import Struct, replace

_OF_DEVICE = 8  # open tasks of one device
_OF_PROJECT = 200  # tasks, also answered ones
_IN_ALL = 2000  # tasks of all projects
_KEPT = timedelta(minutes=10)
# `cavvy edge exec` waits no longer: a command does not run after its user gave up.
GIVEN = timedelta(seconds=180)


class DeviceTask(Struct, frozen=True, kw_only=True):
    """A command, or () for the log. `told` means that the device has it; `exit_code` is None until
    the device has answered."""

    id: str
    project: str
    device: str
    command: tuple[str, ...]
    made_at: datetime
    told: bool = False
    output: str = ""
    exit_code: int | None = None


class TooManyTasks(Exception):
    """Raised if a device, a project or the server has too many tasks."""


class DeviceTasks:
    """The tasks of the last minutes, by ID."""

    def __init__(self) -> None:
        self._all: dict[str, DeviceTask] = {}

    def add(self, project: str, device: str, command: Sequence[str], now: datetime) -> DeviceTask:
        """Raises TooManyTasks."""
        self._prune(now)
        mine = [
            each
            for each in self._of(project, device)
            if each.exit_code is None and (each.told or now - each.made_at < GIVEN)
        ]
        if len(mine) >= _OF_DEVICE:
            raise TooManyTasks(f"{len(mine)} tasks wait for {device}; try again in ten minutes")
        if sum(each.project == project for each in self._all.values()) >= _OF_PROJECT:
            raise TooManyTasks(f"{project} has had {_OF_PROJECT} tasks; try again in ten minutes")
        if len(self._all) >= _IN_ALL:
            self._make_room(project)
        made = DeviceTask(
            id=secrets.token_hex(8),
            project=project,
            device=device,
            command=tuple(command),
            made_at=now,
        )
        self._all[made.id] = made
        return made

    def find(self, project: str, device: str, task_id: str, now: datetime) -> DeviceTask | None:
        self._prune(now)
        found = self._all.get(task_id)
        mine = found is not None and (found.project, found.device) == (project, device)
        return found if mine else None

    def take(self, project: str, device: str, now: datetime) -> Sequence[DeviceTask]:
        """Return the tasks that the device does not have yet, and for which the user still waits.
        Each is given to it once, because a command must not run twice."""
        self._prune(now)
        mine = self._of(project, device)
        fresh = [each for each in mine if not each.told and now - each.made_at < GIVEN]
        for each in fresh:
            self._all[each.id] = replace(each, told=True)
        return fresh

    def end(self, task: DeviceTask, output: str, exit_code: int) -> None:
        """Note the answer of a device; only the first one counts."""
        if task.told and task.exit_code is None:
            self._all[task.id] = replace(task, output=output, exit_code=exit_code)

    def _make_room(self, project: str) -> None:
        """Forget the oldest task of the device with the most tasks, of the project with the most,
        preferably one that was answered. Raises TooManyTasks if no project has more than this
        one."""
        projects = Counter(each.project for each in self._all.values())
        most = max(projects, key=lambda each: projects[each])
        if projects[most] <= projects[project] + 1:
            raise TooManyTasks("the server has too many tasks; try again in ten minutes")
        theirs = [each for each in self._all.values() if each.project == most]
        devices = Counter(each.device for each in theirs)
        worst = max(devices, key=lambda each: devices[each])
        mine = [each for each in theirs if each.device == worst]
        del self._all[min(mine, key=lambda each: (each.exit_code is None, each.made_at)).id]

    def _prune(self, now: datetime) -> None:
        if any(now - each.made_at >= _KEPT for each in self._all.values()):
            self._all = {key: each for key, each in self._all.items() if now - each.made_at < _KEPT}

    def _of(self, project: str, device: str) -> Sequence[DeviceTask]:
        mine = project, device
        return [each for each in self._all.values() if (each.project, each.device) == mine]


class SitePace:
    """When each site may get its next bytes. Devices are not trusted: one that opens many
    connections gets no more than another, because it waits for one piece at a time."""

    def __init__(self, clock: ControlClock) -> None:
        self._clock = clock
        self._free_at: dict[tuple[str, str], datetime] = {}
        self._turns: WeakValueDictionary[tuple[str, str], Lock] = WeakValueDictionary()

    def turn_of(self, project: str, device: str) -> Lock:
        """Return the lock that a device's connections share; it is kept as long as one has it."""
        return self._turns.setdefault((project, device), Lock())

    async def wait(self, turn: Lock, site: tuple[str, str], size: int, mib_per_s: float) -> None:
        """Return when so many bytes may be sent to a device of the site. A device that has gone
        meanwhile leaves its time to others."""
        async with turn:
            start = self.reserve(site, size, mib_per_s)
            try:
                await self._clock.sleep_until(start)
            except BaseException:
                self._free_at[site] -= _need(size, mib_per_s)
                raise

    def reserve(self, site: tuple[str, str], size: int, mib_per_s: float) -> datetime:
        """Reserve the time that so many bytes take at the site's rate, after all that was reserved
        before. Return when it begins."""
        now = self._clock.now()
        start = max(now, self._free_at.get(site, now))
        self._free_at[site] = start + _need(size, mib_per_s)
        return start


def _need(size: int, mib_per_s: float) -> timedelta:
    return timedelta(seconds=size / mib_per_s / 2**20)


MOST_VARIABLES = 64  # that are set in one place, also those that are secrets
_MOST_BYTES = 32 * 1024  # of the values of those that are not


class GivenSetting(Struct, frozen=True, kw_only=True):
    """A setting of a device, and the name of the settings that it comes from. `kind` is option,
    variable or secret. A secret has the time when it was set, and no value; without this time, the
    project does not have it any more."""

    name: str
    kind: str
    source: str
    value: float | str = ""
    set_at: datetime | None = None


class DeviceSettings(Struct, frozen=True, kw_only=True):
    """The settings of a device. Their `revision` is "" if there are none, and changes with each of
    them, also if a secret is set anew; it tells nothing about the value of a secret."""

    revision: str = ""
    given: tuple[GivenSetting, ...] = ()

    def of(self, kind: str) -> Mapping[str, float | str]:
        """Return the values of one kind by name; those of secrets are ""."""
        return {each.name: each.value for each in self.given if each.kind == kind}

    @property
    def secrets(self) -> Sequence[str]:
        """The names of the secrets that the project has."""
        return [each.name for each in self.given if each.kind == "secret" and each.set_at]


NO_SETTINGS = DeviceSettings()


def merge_settings(
    device: EdgeDevice, rows: Mapping[str, EdgeSettings], secrets: Mapping[str, datetime]
) -> DeviceSettings:
    """Return what a device gets: what is set for it precedes what is set for one of its labels (of
    several, the last by name), and that what is set for its site. `secrets` has the times when the
    project's secrets were set."""
    labels = sorted(f"label/{label}={value}" for label, value in device.labels.items())
    found: dict[tuple[bool, str], GivenSetting] = {}
    for source in (f"site/{device.site}", *labels, f"device/{device.name}"):
        row = rows.get(source)
        if row is None:
            continue
        for name, option in row.options.items():
            made = GivenSetting(name=name, kind="option", source=source, value=option)
            found[True, name] = made
        for name, value in row.variables.items():
            made = GivenSetting(name=name, kind="variable", source=source, value=value)
            found[False, name] = made
        for name in row.secrets:
            set_at = secrets.get(name)
            made = GivenSetting(name=name, kind="secret", source=source, set_at=set_at)
            found[False, name] = made
    if not found:
        return NO_SETTINGS
    given = tuple(found[key] for key in sorted(found))
    told = [[each.kind, each.name, each.value, str(each.set_at)] for each in given]
    revision = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return DeviceSettings(revision=revision, given=given)


def find_excess(row: EdgeSettings) -> str:
    """Return why these are too many settings, or ""."""
    count = len(row.variables) + len(row.secrets)
    if count > MOST_VARIABLES:
        return f"it would have {count} variables; expected at most {MOST_VARIABLES}"
    size = sum(len(each.encode()) for each in row.variables.values())
    if size > _MOST_BYTES:
        return f"its variables would have {size:,} bytes; expected at most {_MOST_BYTES:,}"
    return ""


def change_row(
    row: EdgeSettings,
    options: Mapping[str, float | str],
    variables: Mapping[str, str],
    secrets: Sequence[str],
    unset: Sequence[str],
) -> EdgeSettings:
    """Return settings without those that are `unset`, and with others. A variable is either a
    secret or not."""
    gone = {*unset}
    kept = {name: each for name, each in row.variables.items() if name not in gone}
    known = {name: each for name, each in row.options.items() if name not in gone}
    fresh = {**kept, **variables}
    named = [name for name in row.secrets if name not in gone and name not in variables]
    return replace(
        row,
        options={**known, **options},
        variables={name: value for name, value in fresh.items() if name not in secrets},
        secrets=tuple(sorted({*named, *secrets})),
    )
