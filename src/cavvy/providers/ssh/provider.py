"""The provider for hosts reached by SSH: agents are processes on the hosts; the control plane
allocates the devices.

Connects to a host as the user's own `ssh` does: with the user's configuration, keys, SSH agents,
jump hosts and known hosts.

Each connection has its own OpenSSH configuration, which sets Cavvy's requirements and includes the
user's configuration. ProxyJump uses the whole configuration for jump hosts too, so Cavvy's
requirements also apply to jump hosts.
"""

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path

import msgspec

from cavvy.domain.allocations import Host, VolumeLocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind
from cavvy.domain.values import Struct
from cavvy.domain.volumes import VolumeFolder, find_time
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    Manifest,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.bundles import Bundle, make_bundle
from cavvy.providers.hosts.connection import (
    OPEN_TIMEOUT_S,
    HostAddress,
    HostConnection,
    LoginRefused,
    make_sockets,
    open_connection,
    spawn,
    write_rules,
)
from cavvy.providers.hosts.fleet.gangs import HostFleet
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.fleet.launch_ledger import HostVolume
from cavvy.providers.hosts.fleet.machines import SupervisorFacts, list_offers
from cavvy.providers.hosts.fleet.placing import AgentRoute
from cavvy.providers.hosts.fleet.volumes import SPREAD
from cavvy.providers.hosts.records import read, write
from cavvy.providers.hosts.ssh_link import CountedVolume, LinkDependencies, SshLink, SshRoute
from cavvy.providers.ssh.inventory import InventoryHost, read_inventory

# how long a host's facts are cached: devices change rarely, and drivers answer slowly
_LEARN_AGAIN = timedelta(minutes=10)
# time limits for hosts whose facts are unknown: for the first read, and for later ones
_FIRST_WAIT_S, _HOSTS_WAIT_S = 18.0, 6.0
_TICK_S, _CALM_S = (
    0.5,
    5.0,
)  # interval between checks while a link is down, and while all are up

_UNCHECKED = {"none", "/dev/null"}
_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")


class SshProvider:
    """Implements `Provider`, and the abilities listed in the manifest."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self.manifest = manifest
        self._context = context
        self._now = context.now
        self._mark = hashlib.sha256(context.installation.encode()).hexdigest()[:8]
        self._home = context.home.absolute()
        for folder in ("facts", "bundles"):
            (self._home / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        # in /tmp, because the path of a socket may have at most 104 bytes
        self._sockets = make_sockets()
        self._links: dict[str, SshLink[InventoryHost]] = {}
        self._idle: Sequence[str] = ()  # patterns in the settings that match no host
        self._learnt_at: dict[str, datetime] = {}
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._agent = cache(self._pack_agent)
        self._fleet = HostFleet(manifest.name, context, self._links, self._way)
        self._known = self._fleet.known

    async def offers(self) -> Sequence[Offer]:
        await self._learn(_FIRST_WAIT_S)
        offers = list_offers(self._fleet.list_known())
        if not offers and (silent := self.silent()):
            raise TryAgain("; ".join(silent))
        return offers

    def silent(self) -> Sequence[str]:
        unknown = [link for name, link in self._links.items() if name not in self._known]
        return [_silence(link) for link in unknown]

    async def hosts(self) -> Sequence[Host]:
        await self._learn(_HOSTS_WAIT_S)
        return await self._fleet.list_hosts()

    async def volumes(self) -> Sequence[VolumeLocation]:
        self._follow()
        return await self._fleet.volumes.list_locations()

    async def folders(self, project: str) -> Sequence[VolumeFolder]:
        self._follow()
        records = await self._fleet.volumes.list_of(project)
        hosts = list(dict.fromkeys(each.host for each in records))
        counts = await asyncio.gather(*(self._count(host, project) for host in hosts))
        counted = dict(zip(hosts, counts, strict=True))
        return [_view_volume(each, counted[each.host]) for each in records]

    async def _count(self, host: str, project: str) -> Mapping[str, CountedVolume] | str:
        """Return the volumes of a project on a host by name, or why they cannot be counted."""
        link = self._links.get(host)
        if link is None:
            return f"{host} is no longer in the inventory"
        if not link.up:
            return _silence(link)
        try:
            return {each.name: each for each in await link.count_volumes(project)}
        except (ProviderError, OSError, msgspec.MsgspecError) as error:
            return str(error) or f"{host} did not answer in time"

    async def remove_folder(self, project: str, name: str) -> bool:
        self._follow()
        return await self._fleet.volumes.remove(project, name)

    async def launch(self, gang: GangSpec) -> None:
        await self._learn(_FIRST_WAIT_S)
        await self._fleet.launch(gang)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        await self._learn(_FIRST_WAIT_S)
        await self._fleet.replace(gang, ranks)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        self._follow()
        return await self._fleet.look(name)

    async def remove(self, name: str) -> None:
        self._follow()
        await self._fleet.remove(name)

    async def changed(self) -> str:
        return await self._fleet.changes.get()

    async def relay(self) -> None:
        """Keep every host connected, because agents send their requests through the connections."""
        self._fleet.patient = False
        try:
            while True:
                self._follow()
                for name, link in self._links.items():
                    if link.due and name not in self._learning:
                        self._learning[name] = asyncio.create_task(self._learn_one(name))
                self._collect()
                self._fleet.announce_lost()
                self._wake.clear()
                with suppress(TimeoutError):
                    calm = all(link.up for link in self._links.values())
                    async with asyncio.timeout(_CALM_S if calm else _TICK_S):
                        await self._wake.wait()
        finally:
            self._fleet.patient = True

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        named = [each for each in task.volumes if each.kind is VolumeKind.NAMED]
        if named and task.nodes > 1:
            return [Objection("volumes", SPREAD)]
        if any(each.type for each in named):
            reason = "named volumes of hosts are folders, which have no `type`; leave it out"
            return [Objection("volumes", reason)]
        wanted = task.image is not None or task.image_build is not None
        if wanted and self._known and not any(each.facts.engine for each in self._known.values()):
            return [
                Objection(
                    "image",
                    "needs podman or docker, but no host has either; install one or leave `image` "
                    "out",
                )
            ]
        return []

    async def whoami(self) -> Sequence[tuple[str, str]]:
        await self._learn(_FIRST_WAIT_S, of_all=True)
        idle = [
            (word, "the pattern matches no Host of the SSH configuration") for word in self._idle
        ]
        if not self._links:
            unmatched = "; ".join(f"{word}: {text}" for word, text in idle)
            raise Refused(
                unmatched
                or "no host is listed; list hosts in `hosts` or an `inventory` "
                "(see docs/guides/ssh-hosts.md)"
            )
        if not any(link.up for link in self._links.values()):
            raise TryAgain("no host can be used: " + "; ".join(map(_silence, self._links.values())))
        await self._fleet.isolation.refresh()
        relays = await asyncio.gather(*(link.can_relay() for link in self._links.values()))
        notes = {name: each for name, each in zip(self._links, relays, strict=True) if each}
        ready = [name for name, link in self._links.items() if link.up]
        said = await asyncio.gather(*map(self._fleet.isolation.say_protection, ready))
        protected = zip(ready, said, strict=True)
        return [
            *(fact for name in self._links for fact in self._whoami(name)),
            *((name, f"settings and programs: {each}") for name, each in protected if each),
            *notes.items(),
            *idle,
        ]

    def _whoami(self, name: str) -> Sequence[tuple[str, str]]:
        link, known = self._links[name], self._known.get(name)
        problem = link.problem.removeprefix(f"{name}: ") or (
            "" if link.up else "the host has not answered yet"
        )
        if known is None:
            return [(name, problem)]
        text = f"{known.facts.user}@{link.target[0]}: {known.describe()}"
        shares = f"jobs of different projects: {self._fleet.isolation.say(name)}"
        notes = [shares, *known.machine.notes, *([problem] if problem else [])]
        return [(name, text), *((name, note) for note in notes)]

    async def close(self) -> None:
        for task in self._learning.values():
            task.cancel()
        if self._learning:
            await asyncio.wait(self._learning.values())
        for link in self._links.values():
            await link.close()
        self._learning.clear()
        self._sockets.cleanup()

    def _way(self, gang: GangSpec, setup: HostSetup, rank: int) -> AgentRoute:
        carried = bool(self._context.server_address)
        return AgentRoute(
            address=f"unix:{setup.root}/sock" if carried else gang.agent_endpoint.address,
            token=gang.agent_endpoint.token,
        )

    # Hosts and their facts

    def _follow(self) -> None:
        """Update the links to hosts from the inventory. If the inventory cannot be read, keep the
        links to the hosts of the last inventory.
        """
        try:
            self._update()
        except Refused:
            if not self._links:
                raise

    def _update(self) -> None:
        """Apply the inventory: add, replace and drop hosts. Raises Refused."""
        inventory = read_inventory(self._context.settings)
        self._idle = inventory.idle
        ways = SshOptions(
            ssh_config=inventory.ssh_config,
            accept_new=inventory.accept_new,
            known_hosts=self._home / "known_hosts",
            sockets=Path(self._sockets.name),
        )
        base = LinkDependencies(
            mark=self._mark,
            agent=self._agent,
            server_address=self._context.server_address,
            cache=self._home / "bundles",
            now=self._now,
            changed=self._changed,
        )
        for name in [
            name for name, link in self._links.items() if inventory.entries.get(name) != link.entry
        ]:
            self._links.pop(name).hang_up()
            self._known.pop(name, None)
            self._learnt_at.pop(name, None)
        for name, entry in inventory.entries.items():
            if name not in self._links:
                self._links[name] = SshLink(entry, base, partial(dial, entry, ways))

    async def _learn(self, patience_s: float, *, of_all: bool = False) -> None:
        """Read the facts of all hosts: wait for the hosts whose facts are unknown, and refresh
        known facts in the background.
        """
        self._update()
        self._collect()
        now = self._now()
        for name, link in self._links.items():
            at = self._learnt_at.get(name)
            old = at is None or now - at >= _LEARN_AGAIN
            if name not in self._learning and (link.up or link.due) and (old or not link.up):
                self._learning[name] = asyncio.create_task(self._learn_one(name))
            if name not in self._known:
                await self._recall(name)
        waited = [task for name, task in self._learning.items() if of_all or self._is_new(name)]
        if waited:
            await asyncio.wait(waited, timeout=patience_s)
        self._collect()

    def _is_new(self, name: str) -> bool:
        """Return whether a host has not answered yet."""
        link = self._links[name]
        return not link.problem and not (link.up and name in self._known)

    async def _learn_one(self, name: str) -> None:
        link = self._links[name]
        try:
            was_up = link.up
            await link.connect()
            if not was_up:
                await self._fleet.welcome(name)
            at = self._learnt_at.get(name)
            if at is not None and self._now() - at < _LEARN_AGAIN:
                return
            self._learnt_at[name] = self._now()
            facts = await link.read_facts()
            await self._fleet.keep(link.entry, facts)
            write(self._home / "facts" / f"{name}.json", facts)
        except (ProviderError, OSError, msgspec.MsgspecError) as error:
            link.problem = link.problem or str(error)
            if not link.up:
                self._learnt_at.pop(name, None)

    async def _recall(self, name: str) -> None:
        """Use the last facts that the host reported, until the host answers again."""
        facts = read(self._home / "facts" / f"{name}.json", SupervisorFacts)
        if facts is not None:
            await self._fleet.keep(self._links[name].entry, facts)

    def _collect(self) -> None:
        for name, task in list(self._learning.items()):
            if task.done():
                del self._learning[name]
                if not task.cancelled():
                    task.result()

    def _pack_agent(self) -> Bundle | None:
        make = self._context.agent_archive
        return None if make is None else make_bundle(make(), ".pyz")

    # Changes

    def _changed(self, host: str, gang: str | None) -> None:
        self._wake.set()
        if gang is None:
            self._fleet.announce(host)
        else:
            self._fleet.changes.put(gang)


def _view_volume(volume: HostVolume, counted: Mapping[str, CountedVolume] | str) -> VolumeFolder:
    """Return a volume with its size, or with the reason why its size is unknown."""
    if isinstance(counted, str):
        return VolumeFolder(name=volume.volume, host=volume.host, problem=counted)
    found = counted.get(volume.volume)
    if found is None:  # a job that starts now makes it
        return VolumeFolder(name=volume.volume, host=volume.host, files=0, size_bytes=0)
    return VolumeFolder(
        name=volume.volume,
        host=volume.host,
        files=found.files,
        size_bytes=found.size_bytes,
        changed_at=find_time(found.changed_at),
    )


def _silence(link: SshLink[InventoryHost]) -> str:
    """Return the reason why a host does not answer, to show to users."""
    return link.problem or f"{link.entry.name} has not answered yet"


class SshOptions(Struct, frozen=True, kw_only=True):
    """The settings for reaching hosts."""

    ssh_config: Path
    accept_new: bool
    known_hosts: Path  # the file with the accepted keys of new hosts
    sockets: Path  # the folder of master sockets; its path is short


async def dial(entry: InventoryHost, ways: SshOptions) -> tuple[HostConnection, SshRoute]:
    """Connect to a host. Raises CannotConnect, LoginRefused, Refused."""
    target, overrides = entry.address or entry.name, _overrides(entry)
    user_config = ways.sockets / f"{entry.name}.user"
    user_config.write_text(_includes(ways.ssh_config))
    base = ("-F", str(user_config))
    route = await _find_route(entry.name, [*overrides, *base, target])
    known = list(route.known_hosts)
    for jump in route.jumps:
        uri = jump if jump.startswith("ssh://") else f"ssh://{jump}"
        known += (await _find_route(entry.name, [*base, uri])).known_hosts
    config = user_config.with_suffix(".config")
    config.write_text(_write_config(ways, known, checked=route.checked))
    address = HostAddress(
        name=entry.name,
        ssh=["ssh", "-T", "-F", str(config), *overrides],
        destination=target,
        control=ways.sockets / os.urandom(4).hex(),
        host_key_hint=', or set host_keys = "accept-new" for new hosts',
    )
    return await open_connection(address, timeout_s=OPEN_TIMEOUT_S), route


def _overrides(entry: InventoryHost) -> Sequence[str]:
    """Return the options of `ssh` for the host's settings in the inventory."""
    given = (("-l", entry.user), ("-p", entry.port), ("-J", entry.jump))
    words = [word for option, value in given if value for word in (option, str(value))]
    if entry.identity_file is not None:
        words += ["-o", "IdentitiesOnly=yes", "-i", str(Path(entry.identity_file).expanduser())]
    return words


def _write_config(ways: SshOptions, known: Sequence[str], *, checked: bool) -> str:
    """Return the connection's SSH configuration. Cavvy's requirements come before the user's
    configuration, because `ssh` uses the first value of each option.
    """
    os.close(os.open(ways.known_hosts, os.O_WRONLY | os.O_CREAT, 0o600))
    checking = "accept-new" if ways.accept_new else "yes"
    files = dict.fromkeys([str(ways.known_hosts), *known])
    rules = write_rules(checking if checked else "no", files)
    return rules + _includes(ways.ssh_config)


def _includes(config: Path) -> str:
    """Return `Include` lines for the configuration files that `ssh` would read, and a line that
    names the known-hosts file in `~/.ssh`. The system's configuration is included only if `config`
    is the user's own `~/.ssh/config`.
    """
    home = Path("~/.ssh").expanduser()
    wanted = [config, _SYSTEM_CONFIG] if config.expanduser() == home / "config" else [config]
    lines = [f'Include "{path}"' for path in wanted if path.is_file()]
    return "\n".join([*lines, f'UserKnownHostsFile "{home}/known_hosts"', ""])


async def _find_route(name: str, words: Sequence[str]) -> SshRoute:
    """Resolve a host name with `ssh -G`. Raises LoginRefused if the configuration is invalid."""
    process = await spawn(["ssh", "-G", *words])
    out, err = await process.communicate()
    if process.returncode != 0:
        raise LoginRefused(f"{name}: {err.decode('utf-8', 'replace').strip()[-500:]}")
    pairs = (line.partition(" ") for line in out.decode().splitlines())
    said = {key: value for key, _, value in pairs}
    known = said.get("userknownhostsfile", "").split()
    jump = said.get("proxyjump", "none")
    return SshRoute(
        address=said.get("hostname", ""),
        port=int(said.get("port", 22)),
        jumps=() if jump == "none" else jump.split(","),
        known_hosts=[file for file in known if file not in _UNCHECKED],
        checked=not _UNCHECKED & set(known)
        or said.get("stricthostkeychecking") not in ("no", "off", "false"),
    )
