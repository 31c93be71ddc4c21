"""The gangs of this machine: starts their agents, watches them, and tells how they are.

`LocalGangStore` blocks and runs in threads; this module is what the event loop sees of it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from cavvy.agent.documents import AgentConfigFile
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangSpec, GangState
from cavvy.providers.hosts.environ import clean_environ
from cavvy.providers.hosts.records import HostGangEnd
from cavvy.providers.local.configs import KEPT
from cavvy.providers.local.gang_store import LivingGang, LocalGangStore
from cavvy.providers.local.processes import ProcessWatch


class LocalGangs:
    """Starts, looks at and removes gangs. `environ` is the server's environment, of which agents
    get a part, and `engine` finds the container engine."""

    def __init__(
        self,
        *,
        home: Path,
        installation: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        engine: Callable[[], str | None],
        now: Callable[[], datetime],
    ) -> None:
        self._gang_store = LocalGangStore(
            home=home,
            installation=installation,
            command=command,
            environ=clean_environ(environ, KEPT),
            engine=engine,
            now=now,
        )
        self._watch = ProcessWatch()
        self._sweeping: asyncio.Task[None] | None = None

    async def is_separated(self) -> bool:
        """Return whether all gangs that have not ended are separated from each other."""
        return await asyncio.to_thread(self._gang_store.is_separated)

    async def launch(self, gang: GangSpec, configs: Sequence[AgentConfigFile]) -> None:
        """Start the agents of a gang. Raises NoCapacity, Refused, TryAgain."""
        self._attend_new(await asyncio.to_thread(self._gang_store.launch, gang, configs))

    async def replace(self, gang: GangSpec, configs: Sequence[AgentConfigFile]) -> None:
        """Start the agents of the ranks of these configurations again. Raises as `launch`."""
        self._attend_new(await asyncio.to_thread(self._gang_store.replace, gang, configs))

    async def look(self, name: str | None = None) -> Sequence[GangSeen]:
        """Return how the gang, or each gang, is."""
        found = await asyncio.to_thread(self._gang_store.look, name)
        for gang in found:
            if isinstance(gang, LivingGang):
                self._attend(gang)
        self._sweep()
        return [_seen(gang) for gang in found]

    async def remove(self, name: str) -> None:
        """Ask the gang's agents to end. Those that do not are killed later."""
        patience = await asyncio.to_thread(self._gang_store.remove, name)
        if patience is not None:
            self._watch.announce(name, max(0.0, patience.total_seconds()))
        self._sweep()

    async def changed(self) -> str:
        """Wait for a change. Return the name of its gang."""
        return await self._watch.changed()

    async def close(self) -> None:
        """Watch the gangs no longer; their agents go on."""
        self._watch.close()
        await asyncio.to_thread(self._gang_store.close)
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])

    def _attend_new(self, living: LivingGang | None) -> None:
        if living is not None:
            self._attend(living)
            if any(rank.dead_at is not None for rank in living.ranks):  # an agent exited at once
                self._watch.announce(living.intent.name)

    def _attend(self, gang: LivingGang) -> None:
        """Watch a gang's agents, and schedule a poll if processes are being killed."""
        for rank in gang.ranks:
            if rank.courier is not None:
                self._watch.add(gang.intent.name, rank.courier)
            elif rank.again_s:
                self._watch.announce(gang.intent.name, rank.again_s)
            elif rank.process is not None and rank.dead_at is None:
                self._watch.add(gang.intent.name, rank.process)

    def _sweep(self) -> None:
        """Delete the folders of ended gangs in the background, because deleting a large working
        folder takes long.
        """
        if self._gang_store.has_trash and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(asyncio.to_thread(self._gang_store.empty_trash))


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
