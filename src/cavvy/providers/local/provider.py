"""The provider for this machine: agents are processes; the control plane allocates the devices."""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from cavvy.agent.bundle import make_command
from cavvy.agent.documents import AgentConfigFile
from cavvy.agent.work import hide
from cavvy.agent.work.hide import is_hidden
from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind
from cavvy.domain.units import HourlyRate, format_memory, parse_rate
from cavvy.domain.values import replace
from cavvy.domain.volumes import VolumeFolder
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    Manifest,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.devices import MachineSources
from cavvy.providers.hosts.environ import clean_environ
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
from cavvy.providers.hosts.records import HostGangEnd
from cavvy.providers.hosts.supervisor.facts import find_user
from cavvy.providers.local.configs import KEPT, list_obeyed, list_offers, make_configs, make_host
from cavvy.providers.local.gang_store import LivingGang, LocalGangStore
from cavvy.providers.local.processes import ProcessWatch
from cavvy.providers.local.volumes import list_folders, remove_folder

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
    """Implements `Provider`, and the abilities listed in the manifest."""

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
        self._gang_store = LocalGangStore(
            home=self._home,
            installation=context.installation,
            command=context.agent_command,
            environ=clean_environ(self._sources.environ, KEPT),
            engine=engine,
            now=context.now,
        )
        self._watch = ProcessWatch()
        self._sweeping: asyncio.Task[None] | None = None
        self._machine: ThisMachine | None = None
        self._looked_at = context.now()
        self._refresh: asyncio.Task[None] | None = None
        (self._home / "gangs").mkdir(mode=0o700, parents=True, exist_ok=True)

    async def offers(self) -> Sequence[Offer]:
        return list_offers(await self._discovered(), self._price())

    async def hosts(self) -> Sequence[Host]:
        host = make_host(await self._discovered())
        if self._isolation is not HostIsolation.NAMESPACES:
            return [replace(host, separates=self._isolation is HostIsolation.NONE)]
        obstacle = await self._find_obstacle()
        if not obstacle and not await asyncio.to_thread(self._gang_store.is_separated):
            obstacle = MIXED
        return [replace(host, separates=not obstacle, obstacle=obstacle)]

    async def launch(self, gang: GangSpec) -> None:
        configs = await self._make_configs(gang)
        living = await asyncio.to_thread(self._gang_store.launch, gang, configs)
        self._attend_new(living)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        configs = [each for each in await self._make_configs(gang) if each.rank in ranks]
        living = await asyncio.to_thread(self._gang_store.replace, gang, configs)
        self._attend_new(living)

    def _attend_new(self, living: LivingGang | None) -> None:
        if living is not None:
            self._attend(living)
            if any(rank.dead_at is not None for rank in living.ranks):  # an agent exited at once
                self._watch.announce(living.intent.name)

    async def _make_configs(self, gang: GangSpec) -> Sequence[AgentConfigFile]:
        if not self._gang_store.command:
            raise Refused("no agent can be started: the server has no agent command")
        ability = await self._find_ability()
        return make_configs(
            gang,
            await self._discovered(),
            self._home,
            str(self._hides or ""),
            covers=bool(ability),
            alone=ability == hide.ALONE,
            separates=await self._separates(),
            obeys=await asyncio.to_thread(list_obeyed, os.environ),
        )

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        found = await asyncio.to_thread(self._gang_store.look, name)
        for gang in found:
            if isinstance(gang, LivingGang):
                self._attend(gang)
        self._sweep()
        return [_seen(gang) for gang in found]

    async def remove(self, name: str) -> None:
        patience = await asyncio.to_thread(self._gang_store.remove, name)
        if patience is not None:
            self._watch.announce(name, max(0.0, patience.total_seconds()))
        self._sweep()

    async def changed(self) -> str:
        return await self._watch.changed()

    async def folders(self, project: str) -> Sequence[VolumeFolder]:
        return await asyncio.to_thread(list_folders, self._home, project)

    async def remove_folder(self, project: str, name: str) -> bool:
        try:
            return await asyncio.to_thread(remove_folder, self._home, project, name)
        except OSError as error:
            raise Refused(f"the volume {name} cannot be removed: {error}") from error

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
        self._watch.close()
        await asyncio.to_thread(self._gang_store.close)
        for task in (self._sweeping, self._refresh):
            if task is not None:
                await asyncio.wait([task])

    async def _find_ability(self) -> str:
        """Return what namespaces can do for jobs without an image: `hide.ALONE`, `hide.HIDES`, or
        "" if the system offers no namespaces or `hide_server` is off.
        """
        if self._hides is not None and self._ability is None:
            command = [*make_command(), "--protects", str(self._hides), str(self._home)]
            answer = await _ask(command)
            self._ability = answer if answer in (hide.ALONE, hide.HIDES) else ""
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
            command = [*make_command(), "--separates", str(self._hides), str(self._home)]
            self._unseparated = say_obstacle(await _ask(command))
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

    def _sweep(self) -> None:
        """Delete the folders of ended gangs in the background, because deleting a large working
        folder takes long.
        """
        if self._gang_store.has_trash and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(asyncio.to_thread(self._gang_store.empty_trash))

    def _price(self) -> HourlyRate:
        return parse_rate(str(self._settings.get("price_usd_hr", 0)))

    def _attend(self, gang: LivingGang) -> None:
        """Watch a gang's agents, and schedule a poll if processes are being killed."""
        for rank in gang.ranks:
            if rank.courier is not None:
                self._watch.add(gang.intent.name, rank.courier)
            elif rank.again_s:
                self._watch.announce(gang.intent.name, rank.again_s)
            elif rank.process is not None and rank.dead_at is None:
                self._watch.add(gang.intent.name, rank.process)


async def _ask(command: Sequence[str]) -> str:
    """Return the line that an agent's program prints, or "?" if the program fails."""
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


def _seen(gang: LivingGang | HostGangEnd) -> GangSeen:
    if isinstance(gang, HostGangEnd):
        ended = GangSeen.make_ended(gang.name, gang.reason, gang.exit_code, gang.ranks)
        return replace(ended, replaced=gang.replaced)
    started = all(rank.process is not None or rank.dead_at is not None for rank in gang.ranks)
    waits = next((rank.waits_for for rank in gang.ranks if rank.waits_for), "")
    return GangSeen(
        name=gang.intent.name,
        state=GangState.RUNNING if started else GangState.STARTING,
        reason=waits or ("being removed" if gang.removal else ""),
        nodes=[rank.see(gang.intent) for rank in gang.ranks],
        replaced=gang.replaced,
    )


_DOCKER_SOCKET = "/var/run/docker.sock"
