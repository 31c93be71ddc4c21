"""What users ask of devices at the edge: the newest lines of a device's log, or a command. A device
learns of it at its next check-in, because the server cannot connect to it, and sends the output.

All of it is kept in memory, with bounds, and is lost when the server stops.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.values import Struct, replace

MOST_OUTPUT = 64 * 1024  # characters of an output
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
