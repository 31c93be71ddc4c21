"""The provider for hosts reached by SSH: agents are processes on the hosts; the control plane
allocates the devices.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path

import msgspec

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
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
from cavvy.providers.hosts.connection import make_sockets
from cavvy.providers.hosts.fleet.gangs import HostFleet
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.fleet.machines import SupervisorFacts, list_offers
from cavvy.providers.hosts.fleet.placing import AgentRoute
from cavvy.providers.hosts.records import read, write
from cavvy.providers.hosts.ssh_link import LinkDependencies, SshLink
from cavvy.providers.ssh.dial import SshOptions, dial
from cavvy.providers.ssh.inventory import InventoryHost, read_inventory

# how long a host's facts are cached: devices change rarely, and drivers answer slowly
_LEARN_AGAIN = timedelta(minutes=10)
# time limits for hosts whose facts are unknown: for the first read, and for later ones
_FIRST_WAIT_S, _HOSTS_WAIT_S = 18.0, 6.0
_TICK_S, _CALM_S = (
    0.5,
    5.0,
)  # interval between checks while a link is down, and while all are up


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

    async def launch(self, gang: GangSpec) -> None:
        await self._learn(_FIRST_WAIT_S)
        await self._fleet.launch(gang)

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
            return idle or [
                (
                    "hosts",
                    "no host is listed; list hosts in `hosts` or an `inventory` "
                    "(see docs/guides/ssh-hosts.md)",
                )
            ]
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


def _silence(link: SshLink[InventoryHost]) -> str:
    """Return the reason why a host does not answer, to show to users."""
    return link.problem or f"{link.entry.name} has not answered yet"
