"""The provider for this machine: agents are processes; the control plane allocates the devices."""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.domain.allocations import Host, VolumeLocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind
from cavvy.domain.units import HourlyRate, format_memory, parse_rate
from cavvy.domain.values import replace
from cavvy.domain.volumes import VolumeFolder
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    Manifest,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.devices import MachineSources
from cavvy.providers.hosts.isolation import (
    MIXED,
    HostIsolation,
    read_isolation,
    say_isolation,
    say_obstacle,
    say_protection,
)
from cavvy.providers.hosts.machine import ThisMachine, discover, this_machine
from cavvy.providers.hosts.models import say_models
from cavvy.providers.hosts.supervisor.facts import find_user
from cavvy.providers.local.offers import list_offers, make_host
from cavvy.providers.local.volumes import list_folders, list_names, remove_folder

if TYPE_CHECKING:
    from cavvy.agent.documents import AgentConfigFile
    from cavvy.providers.local.gangs import LocalGangs

# how long the hardware's description is cached: devices change rarely, and drivers answer slowly
_LOOK_AGAIN = timedelta(seconds=60)
_DRIVER_TIMEOUT_S = 30
_HIDDEN = "hidden from jobs, containers, `cavvy exec` and `cavvy ssh`"
_READABLE = "readable by {}: run untrusted jobs elsewhere, or run the server as another user"


def find_engine() -> str | None:
    """Return the container engine for agents on this machine: podman, or docker if its daemon can
    be reached, or None if neither is available.
    """
    if shutil.which("podman"):
        return "podman"
    return (
        "docker"
        if shutil.which("docker") and _daemon_answers(os.environ.get("DOCKER_HOST"))
        else None
    )


def _daemon_answers(address: str | None) -> bool:
    """Return whether a daemon listens at the address to which docker's client would connect. A
    remote daemon is not checked.
    """
    if address is not None and not address.startswith("unix://"):
        return True
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1)
            line.connect((address or _DOCKER_SOCKET).removeprefix("unix://"))
    except OSError:
        return False
    return True


def check_task(
    task: TaskSpec, engine: Callable[[], str | None], hides: Path | None
) -> Sequence[Objection]:
    """Return the objections that result from the state of this machine rather than from the
    manifest. `engine` finds the container engine. `engine` is called only for a task with an image,
    because searching PATH at every attempt to place a task would take too long. `hides` is the
    folder that containers must not be able to read.
    """
    if any(each.kind is VolumeKind.NAMED and each.type for each in task.volumes):
        reason = "named volumes of this machine are folders, which have no `type`; leave it out"
        return [Objection("volumes", reason)]
    if task.image is None and task.image_build is None:
        return []
    if engine() is None:
        reason = (
            "needs podman, or docker with a running daemon; install or start one, or leave `image` "
            "out"
        )
        return [Objection("image", reason)]
    from cavvy.agent.work.hide import is_hidden

    return [
        Objection(
            "volumes",
            f"with the mount of {each.source}, the container would see {hides}, the folder of "
            "Cavvy's server; choose another folder, or set `hide_server = false` in "
            "`[providers.local]`",
        )
        for each in task.volumes
        if hides is not None
        and each.kind is VolumeKind.HOST
        and is_hidden(str(hides), [], each.source)
    ]


class LocalProvider:
    """Implements `Provider`, and the abilities listed in the manifest. What only gangs need is
    imported with the first of them, since commands load the provider for its offers alone.
    """

    def __init__(
        self,
        manifest: Manifest,
        context: ProviderContext,
        sources: MachineSources | None = None,
        engine: Callable[[], str | None] = find_engine,
    ) -> None:
        self.manifest = replace(
            manifest, shares_files=not context.settings.get("hand_over_checkpoints")
        )
        self._settings = context.settings
        self._home = context.home.absolute()
        self._now = context.now
        self._sources = sources or this_machine(context.home)
        self._engine = engine
        # the server's folder, if jobs must not be able to read it
        self._hides = context.server_folder if self._settings.get("hide_server", True) else None
        self._ability: str | None = None  # what namespaces can do here; None: not tried yet
        self._isolation = read_isolation(manifest.name, context.settings)
        # why jobs cannot be separated; "" if nothing prevents the separation; None: not tried
        self._unseparated: str | None = None
        self._context = context
        self._machine: ThisMachine | None = None
        self._looked_at = context.now()
        self._refresh: asyncio.Task[None] | None = None
        (self._home / "gangs").mkdir(mode=0o700, parents=True, exist_ok=True)

    @cached_property
    def _gangs(self) -> "LocalGangs":
        from cavvy.providers.local.gangs import LocalGangs

        context = self._context
        return LocalGangs(
            home=self._home,
            installation=context.installation,
            command=context.agent_command,
            environ=self._sources.environ,
            engine=self._engine,
            now=context.now,
        )

    async def offers(self) -> Sequence[Offer]:
        return list_offers(await self._discovered(), self._price())

    async def hosts(self) -> Sequence[Host]:
        host = make_host(await self._discovered())
        if self._isolation is not HostIsolation.NAMESPACES:
            return [replace(host, separates=self._isolation is HostIsolation.NONE)]
        obstacle = await self._find_obstacle()
        if not obstacle and not await self._gangs.is_separated():
            obstacle = MIXED
        return [replace(host, separates=not obstacle, obstacle=obstacle)]

    async def launch(self, gang: GangSpec) -> None:
        await self._gangs.launch(gang, await self._make_configs(gang))

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        configs = await self._make_configs(gang)
        await self._gangs.replace(gang, [each for each in configs if each.rank in ranks])

    async def _make_configs(self, gang: GangSpec) -> "Sequence[AgentConfigFile]":
        from cavvy.agent.work.hide import ALONE
        from cavvy.providers.local.configs import list_obeyed, make_configs

        if not self._context.agent_command:
            raise Refused("no agent can be started: the server has no agent command")
        ability = await self._find_ability()
        return make_configs(
            gang,
            await self._discovered(),
            self._home,
            str(self._hides or ""),
            covers=bool(ability),
            alone=ability == ALONE,
            separates=await self._separates(),
            obeys=await asyncio.to_thread(list_obeyed, os.environ),
        )

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return await self._gangs.look(name)

    async def remove(self, name: str) -> None:
        await self._gangs.remove(name)

    async def changed(self) -> str:
        return await self._gangs.changed()

    async def volumes(self) -> Sequence[VolumeLocation]:
        region = (await self._discovered()).hostname
        with _listing():
            found = await asyncio.to_thread(list_names, self._home)
        return [
            VolumeLocation(
                provider=self.manifest.name, names=(name,), region=region, project=project
            )
            for project, name in found
        ]

    async def folders(self, project: str) -> Sequence[VolumeFolder]:
        with _listing():
            return await asyncio.to_thread(list_folders, self._home, project)

    async def remove_folder(self, project: str, name: str) -> bool:
        try:
            return await asyncio.to_thread(remove_folder, self._home, project, name)
        except OSError as error:
            left = self._home / "volumes" / project / name
            raise Refused(
                f"the volume {name} cannot be removed: {error}; what is left of it is in {left}"
            ) from error

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return check_task(task, self._engine, self._hides)

    async def whoami(self) -> Sequence[tuple[str, str]]:
        machine = await self._discovered()
        return [
            ("host", machine.hostname),
            ("user", find_user()),
            ("CPUs", f"{machine.cpus:g}"),
            ("memory", format_memory(machine.memory_mib)),
            ("free disk", f"{machine.disk_gib} GiB"),
            ("accelerators", say_models(machine)),
            ("containers", self._engine() or "neither podman nor a running docker"),
            ("server's folder", await self._say_hidden()),
            ("settings and programs", say_protection(await self._find_ability())),
            ("jobs of different projects", await self._say_isolation()),
            *(("note", note) for note in machine.notes),
        ]

    async def close(self) -> None:
        if "_gangs" in vars(self):
            await self._gangs.close()
        if self._refresh is not None:
            await asyncio.wait([self._refresh])

    async def _find_ability(self) -> str:
        """Return what namespaces can do for jobs without an image: `ALONE` or `HIDES` of
        `agent.work.hide`, or "" if the system offers no namespaces or `hide_server` is off.
        """
        if self._hides is not None and self._ability is None:
            from cavvy.agent.work.hide import ALONE, HIDES

            answer = await _ask("--protects", self._hides, self._home)
            self._ability = answer if answer in (ALONE, HIDES) else ""
        return self._ability or ""

    async def _separates(self) -> bool:
        """Return True if the settings require separate jobs and the system can separate jobs."""
        required = self._isolation is HostIsolation.NAMESPACES
        return required and not await self._find_obstacle()

    async def _find_obstacle(self) -> str:
        """Return why this machine cannot separate jobs, or "" if it can."""
        if self._hides is None:
            return "`hide_server` is off"
        if self._unseparated is None:
            answer = await _ask("--separates", self._hides, self._home)
            self._unseparated = say_obstacle(answer)
        return self._unseparated

    async def _say_isolation(self) -> str:
        required = self._isolation is HostIsolation.NAMESPACES
        return say_isolation(self._isolation, await self._find_obstacle() if required else "")

    async def _say_hidden(self) -> str:
        if await self._find_ability():
            return _HIDDEN
        return _READABLE.format("jobs" if self._hides is None else "jobs without an image")

    async def _discovered(self) -> ThisMachine:
        """Return the machine's hardware. Only the first call waits until the machine's drivers
        answer. A later call returns the last result; if this result is old, the call also starts a
        refresh in the background.
        """
        if self._refresh is not None and self._refresh.done():
            self._refresh.result()
            self._refresh = None
        if self._machine is None:
            await self._discover()
        elif self._now() - self._looked_at >= _LOOK_AGAIN and self._refresh is None:
            self._refresh = asyncio.create_task(self._discover())
        assert self._machine is not None
        return self._machine

    async def _discover(self) -> None:
        now = self._now()
        try:
            async with asyncio.timeout(_DRIVER_TIMEOUT_S):
                machine = await asyncio.to_thread(discover, self._sources)
        except TimeoutError as error:
            raise TryAgain(
                f"this machine's drivers did not answer within {_DRIVER_TIMEOUT_S} s"
            ) from error
        self._machine, self._looked_at = limited(machine, self._settings), now

    def _price(self) -> HourlyRate:
        return parse_rate(str(self._settings.get("price_usd_hr", 0)))


async def _ask(question: str, hides: Path, home: Path) -> str:
    """Return the line that an agent's program prints, or "?" if the program fails."""
    from cavvy.agent.bundle import make_command

    command = [*make_command(), question, str(hides), str(home)]
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    try:
        asked = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe)
    except OSError:
        return "?"
    said, _ = await asked.communicate()
    return "?" if asked.returncode else said.decode().strip()


def limited(machine: ThisMachine, settings: Mapping[str, str | int | float | bool]) -> ThisMachine:
    """Return the machine, reduced to the resources that the settings allow jobs to use."""
    cpus, memory_gib = settings.get("cpus"), settings.get("memory_gib")
    return machine.limit(
        cpus=None if cpus is None else float(cpus),
        memory_gib=None if memory_gib is None else float(memory_gib),
        accelerators=bool(settings.get("accelerators", True)),
    )


_DOCKER_SOCKET = "/var/run/docker.sock"


@contextmanager
def _listing() -> Iterator[None]:
    """Convert the errors of a disk to TryAgain: other providers go on."""
    try:
        yield
    except OSError as error:
        raise TryAgain(f"the volumes of this machine cannot be listed: {error}") from error
