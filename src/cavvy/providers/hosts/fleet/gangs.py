"""Launches, observes and removes the gangs of one installation on hosts with supervisors. A gang is
launched as a whole or not at all.

The ledger records an intent before any host gets a request, so that every agent that may run can be
found. Each host of a gang has a folder with the gang's name, so a repeated request starts nothing
twice.

While a host does not answer, the state of its gangs is unknown. A host counts as dead if it has
been silent for a long time and no answering host can reach it. A silent host does not count as dead
if all other hosts are also silent, because the server's own network may be down. If a dead host
answers again, Cavvy kills the agents that still run on the host, because the job may already run on
other hosts.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from weakref import WeakValueDictionary

from cavvy.domain.allocations import Host
from cavvy.domain.tasks import VolumeKind
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    NoCapacity,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.changed_gangs import ChangedGangs
from cavvy.providers.hosts.connection import CannotConnect, LoginRefused
from cavvy.providers.hosts.fleet.host_link import HostLink, HostSetup
from cavvy.providers.hosts.fleet.launch_ledger import FleetIntent, FleetLedger, HostCaches
from cavvy.providers.hosts.fleet.machines import (
    HostEntry,
    KnownHost,
    SupervisorFacts,
    make_hosts,
    make_machine,
)
from cavvy.providers.hosts.fleet.placing import (
    AgentRoute,
    PlacedRank,
    make_config,
    place_ranks,
)
from cavvy.providers.hosts.fleet.status import (
    HostLook,
    RankStatus,
    SilentHost,
    close_gang,
    make_node,
    see_ended,
    see_living,
    view_ranks,
)
from cavvy.providers.hosts.fleet.volumes import SPREAD, FleetVolumes
from cavvy.providers.hosts.isolation import FleetIsolation, read_isolation
from cavvy.providers.hosts.remote_calls import EmptyAnswer, LinkLost

_NAME = re.compile(r"[a-z0-9-]{1,63}")
_WITNESSES = 3  # the number of other hosts that try to reach a silent host
# other hosts try again after the silent host has been silent for this many more seconds
_WITNESS_EVERY_S = 60.0
_AT_ONCE = -1.0  # a grace period that makes the supervisor kill at once


class ReplaceAnswer(Struct, frozen=True, kw_only=True):
    """A supervisor's answer. `waits` means that the lost rank has not ended yet on its host."""

    waits: bool = False


class _Glance(Struct):
    """The last observation of a host, and the lock that lets concurrent callers share a poll."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    began: float = -1.0
    found: HostLook | SilentHost = field(default_factory=lambda: SilentHost(problem=""))


class HostFleet:
    """The hosts of one provider by name, and the provider's gangs on these hosts. `way` returns the
    route by which an agent reaches the control plane.
    """

    def __init__(
        self,
        provider: str,
        context: ProviderContext,
        links: Mapping[str, HostLink],
        way: Callable[[GangSpec, HostSetup, int], AgentRoute],
    ) -> None:
        self._provider, self._links, self._way = provider, links, way
        self._installation, self._now = context.installation, context.now
        self._ledger = FleetLedger(context.state, context.now)
        self.isolation = FleetIsolation(read_isolation(provider, context.settings), links)
        self._admitting = asyncio.Lock()
        self._lost_after_s = float(context.settings.get("lost_after_s", 600))
        self.known: dict[str, KnownHost] = {}  # the hosts whose facts are known
        self.volumes = FleetVolumes(provider, self._ledger, links, self.known)
        self.changes = ChangedGangs()
        self.patient = True  # False: `launch` and `look` do not wait for hosts to connect
        self._glances: dict[str, _Glance] = {}
        self._launching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # host -> how long it had been silent when other hosts last failed to reach it
        self._witnessed: dict[str, float] = {}
        # (gang, rank) -> the end that was reported first, because a reported end must not change
        self._ended_at: dict[tuple[str, int], datetime] = {}
        self._lost: set[str] = set()  # the hosts whose silence `announce_lost` has reported

    # Hosts

    async def keep(self, entry: HostEntry, facts: SupervisorFacts) -> None:
        """Store a host's facts."""
        machine = await asyncio.to_thread(make_machine, entry, facts)
        self.known[entry.name] = KnownHost(
            provider=self._provider, entry=entry, facts=facts, machine=machine, ready=False
        )

    def list_known(self) -> Sequence[KnownHost]:
        """Return the known hosts, each marked ready if it accepts work now."""
        pairs = ((known, self._links.get(name)) for name, known in sorted(self.known.items()))
        return [
            replace(known, ready=link.up and not link.leaving, problem=_say_problem(link))
            for known, link in pairs
            if link
        ]

    async def list_hosts(self) -> Sequence[Host]:
        """Return the shared hosts for the scheduler."""
        await self.isolation.refresh()
        intents = self._ledger.intents.values()
        return make_hosts(
            self.list_known(), lambda name: self.isolation.find_obstacle(name, intents)
        )

    def announce(self, host: str) -> None:
        """Report all gangs on this host as changed."""
        for intent in self._ledger.intents.values():
            if host in intent.hosts:
                self.changes.put(intent.name)

    def announce_lost(self) -> None:
        """Report the gangs of a host as changed when the host's silence has just exceeded the
        limit.
        """
        lost = {name for name, link in self._links.items() if link.silent_s >= self._lost_after_s}
        for name in lost - self._lost:
            self.announce(name)
        self._lost = lost

    # Launching

    async def launch(self, gang: GangSpec) -> None:
        """See `Provider.launch`."""
        if _NAME.fullmatch(gang.name) is None or gang.installation != self._installation:
            raise Refused(f"{gang.name} is not the name of a gang of this installation")
        async with self._launching.setdefault(gang.name, asyncio.Lock()):
            await self._ledger.refresh(gang.name)
            known = self._ledger.intents.get(gang.name)
            if gang.name in self._ledger.ended or (
                known is not None and (known.launched or known.removing)
            ):
                return
            if known is not None and known.given_up:
                raise NoCapacity(known.given_up)
            placed = place_ranks(gang, self.known)
            intent = known or await self._intend(gang, placed)
            try:
                await self.volumes.claim(intent)
            except NoCapacity as error:
                await self._conclude(intent, [error])
            hosts = {host: [each for each in placed if each.host == host] for host in intent.used}
            tasks = [self._launch_on(gang, intent, host, ranks) for host, ranks in hosts.items()]
            problems = [
                each
                for each in await asyncio.gather(*tasks, return_exceptions=True)
                if each is not None
            ]
            await self._conclude(intent, problems)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        """See `ReplacesNodes.replace`. A rank is started again on its host, with its devices; a
        host that does not answer has no capacity.
        """
        async with self._launching.setdefault(gang.name, asyncio.Lock()):
            await self._ledger.refresh(gang.name)
            intent = self._ledger.intents.get(gang.name)
            if intent is None or intent.given_up or intent.removing:
                return
            placed = [each for each in place_ranks(gang, self.known) if each.rank in ranks]
            intent = await self._take_out(gang, intent, placed)
            for each in placed:
                asked_at = self._now()
                try:
                    setup = await self._connect(each.host)
                    fields = self._list_fields(gang, intent, each, setup)
                    answer = await self._link(each.host).ask("replace", ReplaceAnswer, **fields)
                except CannotConnect as error:
                    raise NoCapacity(f"rank {each.rank}: {error}") from error
                if answer.waits:
                    raise TryAgain(f"what is left of rank {each.rank} on {each.host} ends first")
                if str(each.rank) not in intent.renewed_at:
                    renewed = {**intent.renewed_at, str(each.rank): asked_at}
                    intent = replace(intent, renewed_at=renewed)
                    await self._ledger.put(intent)
            self.changes.put(gang.name)

    async def _take_out(
        self, gang: GangSpec, intent: FleetIntent, placed: Sequence[PlacedRank]
    ) -> FleetIntent:
        """List the ranks that have ended as replaced, before new ones are started."""
        looks = await self._look_on(intent.used)
        views = view_ranks(intent, looks, self._now()) or ()
        rounds, renewed = dict(intent.rounds), dict(intent.renewed_at)
        replaced = list(intent.replaced)
        for each in placed:
            view = next((view for view in views if view.number == each.rank), None)
            if rounds.get(str(each.rank)) == gang.round or view is None or view.ended_at is None:
                continue
            replaced.append(make_node(intent, self._fixed(intent.name, view)))
            self._ended_at.pop((intent.name, each.rank), None)
            rounds[str(each.rank)] = gang.round
            renewed.pop(str(each.rank), None)
        intent = replace(intent, rounds=rounds, renewed_at=renewed, replaced=tuple(replaced))
        await self._ledger.put(intent)
        return intent

    async def _connect(self, host: str) -> HostSetup:
        """Return the setup of a host, on which agents can be started. Raises ProviderError."""
        link = self._link(host)
        if not self.patient and not link.up:
            raise CannotConnect(link.problem or f"{host} is not connected")
        setup = await link.connect()
        if not setup.agent:
            raise Refused("no agent can be started on hosts: the server has no agent command")
        return setup

    async def _intend(self, gang: GangSpec, placed: Sequence[PlacedRank]) -> FleetIntent:
        hosts = {each.host for each in placed}
        project = next((each.project for each in gang.allocations), "")
        named = [each for each in gang.volumes if each.kind is VolumeKind.NAMED]
        if named and len(hosts) > 1:
            raise Refused(SPREAD)
        async with self._admitting:
            intent = FleetIntent(
                name=gang.name,
                installation=gang.installation,
                hosts=[each.host for each in placed],
                addresses=[each.node_address for each in placed],
                launched_at=self._now(),
                grace_s=gang.grace.total_seconds(),
                project=project,
                volumes=[each.source for each in named if each.keep],
                separates=await self.isolation.admit(
                    hosts, project, list(self._ledger.intents.values())
                ),
                caches={host: await self._take_caches(host, project) for host in sorted(hosts)},
            )
            await self._ledger.put(intent)
        return intent

    async def _take_caches(self, host: str, project: str) -> HostCaches:
        """Name the caches of a project's new gang on a host. Raises TryAgain."""
        tenant = await self._ledger.take_host(host, project)
        place = _digest(self._installation, self._provider, host)[:12]
        if not self.isolation.hides:
            return HostCaches(own=f"{place}-{_digest(tenant.secret, 'open', project)[:20]}")
        return HostCaches(
            own=f"{place}-{_digest(tenant.secret, 'hidden', project)[:20]}",
            fresh=f"{place}-{tenant.fresh}",
        )

    async def _launch_on(
        self, gang: GangSpec, intent: FleetIntent, host: str, ranks: Sequence[PlacedRank]
    ) -> None:
        setup = await self._connect(host)
        asked = [self._make_rank(gang, intent, each, setup) for each in ranks]
        await self._link(host).ask(
            "launch", EmptyAnswer, gang=gang.name, intent=intent, command=setup.agent, ranks=asked
        )

    def _list_fields(
        self, gang: GangSpec, intent: FleetIntent, placed: PlacedRank, setup: HostSetup
    ) -> Mapping[str, object]:
        """Return the fields of the request that replaces a rank."""
        return {
            "gang": gang.name,
            "round": gang.round,
            "starts": intent.rounds.get(str(placed.rank)) == gang.round,
            "intent": intent,
            "command": setup.agent,
            "ranks": [self._make_rank(gang, intent, placed, setup)],
        }

    def _make_rank(
        self, gang: GangSpec, intent: FleetIntent, placed: PlacedRank, setup: HostSetup
    ) -> Mapping[str, object]:
        """Return what a supervisor needs to start a rank."""
        caches = intent.caches.get(placed.host) or HostCaches(own="")
        config = make_config(
            gang,
            placed,
            self._way(gang, setup, placed.rank),
            f"{setup.root}/gangs/{gang.name}/{placed.rank}",
            setup.cache,
            f"{setup.root}/agents/{gang.name}/{placed.rank}",
        )
        config = replace(
            config,
            volumes=f"{setup.root}/volumes/{intent.project}" if intent.project else "",
            own_cache=caches.own,
            fresh_cache=caches.fresh,
            hides=setup.folder if self.isolation.hides else "",
            covers=(intent.separates or None) if self.isolation.hides else False,
            separates=intent.separates,
        )
        devices = [device.id for device in placed.devices]
        return {"rank": placed.rank, "devices": devices, "config": config}

    async def _conclude(self, intent: FleetIntent, problems: Sequence[BaseException]) -> None:
        """Record the result of a launch. If at least one host certainly started no agent, the
        launch has failed, and the agents that other hosts started are removed.
        """
        for problem in problems:
            if not isinstance(problem, ProviderError):
                raise problem
        intent = self._ledger.intents.get(
            intent.name, intent
        )  # the gang may have been removed in the meantime
        if not problems:
            if intent.name in self._ledger.intents:
                await self._ledger.put(replace(intent, launched=True))
            return
        lost = next((each for each in problems if isinstance(each, LinkLost)), None)
        if lost is not None:
            raise TryAgain(str(lost)) from lost
        first = next(
            (
                each
                for each in problems
                if isinstance(each, Refused) and not isinstance(each, LoginRefused)
            ),
            None,
        )
        reason = str(first or problems[0])
        await self._ledger.put(replace(intent, given_up=reason))
        await asyncio.gather(*(self._undo(intent.name, host) for host in intent.used))
        if first is not None:
            raise Refused(reason) from first
        raise NoCapacity(reason) from problems[0]

    async def _undo(self, name: str, host: str) -> None:
        """Remove a gang from one of its hosts without a grace period. If the host is not connected,
        `_clean` removes the gang from the host later.
        """
        link = self._links.get(host)
        if link is None or not link.up:
            return
        try:
            await link.ask("remove", EmptyAnswer, gang=name, grace_s=_AT_ONCE, forbid=True)
        except ProviderError:
            return  # `_clean` retries

    # Polling

    async def welcome(self, host: str) -> None:
        """Finish pending removals on a reconnected host and read which volumes it has, before the
        host gets new work."""
        self._witnessed.pop(host, None)
        await self._ledger.refresh()
        await self._glance(host)

    async def look(self, name: str | None) -> Sequence[GangSeen]:
        """See `Provider.gangs`."""
        await self._ledger.refresh(name)
        if name is None:
            return await self._look_at_all()
        if name in self._ledger.ended:
            return [see_ended(self._ledger.ended[name])]
        intent = self._ledger.intents.get(name)
        if intent is None:
            return []
        seen = await self._see(intent, await self._look_on(intent.used), one=True)
        return [] if seen is None else [seen]

    async def _look_at_all(self) -> Sequence[GangSeen]:
        hosts = {host for intent in self._ledger.intents.values() for host in intent.used}
        looks = await self._look_on(hosts | {host for host, link in self._links.items() if link.up})
        await self._adopt(looks)
        intents = list(self._ledger.intents.values())
        found = [await self._see(intent, looks, one=False) for intent in intents]
        ended = [see_ended(each) for each in self._ledger.ended.values()]
        known = {each.name for each in ended}
        return [*(each for each in found if each is not None and each.name not in known), *ended]

    async def _look_on(self, hosts: Collection[str]) -> Mapping[str, HostLook | SilentHost]:
        looks = await asyncio.gather(*(self._glance(host) for host in hosts))
        return dict(zip(hosts, looks, strict=True))

    async def _see(
        self, intent: FleetIntent, looks: Mapping[str, HostLook | SilentHost], *, one: bool
    ) -> GangSeen | None:
        # a host was not polled, because the gang was launched after the poll began
        if any(host not in looks for host in intent.used):
            return None
        now = self._now()
        views = view_ranks(intent, looks, now)
        if views is None:
            return None
        views = [self._fixed(intent.name, view) for view in views]
        if all(view.ended_at is not None for view in views):
            return await self._close(intent, views, now)
        if intent.given_up:
            return None
        if one and all(not view.known for view in views):
            raise TryAgain(next(view.waits_for for view in views))
        return see_living(intent, views)

    def _fixed(self, name: str, view: RankStatus) -> RankStatus:
        if view.ended_at is None:
            return view
        return replace(view, ended_at=self._ended_at.setdefault((name, view.number), view.ended_at))

    async def _close(
        self, intent: FleetIntent, views: Sequence[RankStatus], now: datetime
    ) -> GangSeen | None:
        ended = close_gang(intent, views, now)
        if intent.given_up and not ended.owing:
            await self._ledger.drop(intent.name)
        else:
            await self._ledger.end(ended)
        for view in views:
            self._ended_at.pop((intent.name, view.number), None)
        told = [host for host in intent.used if host not in ended.owing]
        await asyncio.gather(*(self._forget(intent.name, host) for host in told))
        return None if intent.given_up else see_ended(ended)

    async def _forget(self, name: str, host: str) -> None:
        link = self._links.get(host)
        if link is None or not link.up:
            return
        try:
            await link.ask("forget", EmptyAnswer, gang=name)
        except ProviderError:
            return  # `_clean` retries

    async def _adopt(self, looks: Mapping[str, HostLook | SilentHost]) -> None:
        """Record the gangs of this installation that run on hosts but are not in the ledger, for
        example because the database was lost.
        """
        for look in looks.values():
            for there in look.gangs if isinstance(look, HostLook) else ():
                if (
                    there.intent is None
                    or there.name in self._ledger.intents
                    or there.name in self._ledger.ended
                ):
                    continue
                if all(host in self._links for host in there.intent.used):
                    await self._ledger.put(
                        replace(there.intent, launched=True, removing=there.removing)
                    )

    async def _glance(self, host: str) -> HostLook | SilentHost:
        """Return the current state of a host. A call during a poll waits until the next poll has
        finished, and returns the result of the next poll.
        """
        glance = self._glances.setdefault(host, _Glance())
        asked = asyncio.get_running_loop().time()
        async with glance.lock:
            if glance.began < asked:
                glance.began = asyncio.get_running_loop().time()
                glance.found = await self._look_at(host)
            return glance.found

    async def _look_at(self, host: str) -> HostLook | SilentHost:
        link = self._links.get(host)
        if link is None:
            return SilentHost(problem=f"{host} is no longer in the inventory", dead=True)
        try:
            if not link.up and link.problem and not self.patient:
                raise CannotConnect(link.problem)
            before = self.volumes.list_on(host)
            look = await link.ask("look", HostLook)
        except ProviderError as error:
            return SilentHost(problem=str(error), dead=await self._is_dead(link))
        await self._clean(link, look)
        await self.volumes.note(host, look.volumes, before)
        return look

    async def _is_dead(self, link: HostLink) -> bool:
        """Return whether to treat a host as dead. A dead host has been unreachable from this server
        for too long, and other hosts cannot reach the dead host either.
        """
        if link.up or link.silent_s < self._lost_after_s or not link.let_in:
            return False
        said = self._witnessed.get(link.name)
        if said is not None and said <= link.silent_s < said + _WITNESS_EVERY_S:
            return True
        others = [each for each in self._links.values() if each is not link]
        reached = [each for each in others if each.up][:_WITNESSES]
        if others and not reached:
            return False  # the server's own network may be down
        target = link.target
        if any(await asyncio.gather(*(each.reaches(*target) for each in reached))):
            link.silent_s = 0.0
            return False
        self._witnessed[link.name] = link.silent_s
        return True

    async def _clean(self, link: HostLink, look: HostLook) -> None:
        """Remove from a host all gangs that have ended, are being removed, or failed to launch."""
        host = link.name
        for there in look.gangs:
            intent, ended = self._ledger.intents.get(there.name), self._ledger.ended.get(there.name)
            over = all(rank.state == "over" for rank in there.ranks)
            try:
                if ended is not None or (intent is not None and intent.given_up):
                    if over:
                        await link.ask("forget", EmptyAnswer, gang=there.name)
                    elif not there.removing:
                        await link.ask(
                            "remove", EmptyAnswer, gang=there.name, grace_s=_AT_ONCE, forbid=True
                        )
                elif intent is not None and intent.removing and not there.removing:
                    await link.ask(
                        "remove", EmptyAnswer, gang=there.name, grace_s=intent.grace_s, forbid=True
                    )
            except ProviderError:
                return  # the connection broke again
        living = {
            there.name for there in look.gangs if any(rank.state != "over" for rank in there.ranks)
        }
        for ended in list(self._ledger.ended.values()):
            if host in ended.owing and ended.name not in living:
                await self._ledger.end(
                    replace(ended, owing=[each for each in ended.owing if each != host])
                )

    # Removing

    async def remove(self, name: str) -> None:
        """See `Provider.remove`."""
        await self._ledger.refresh(name)
        intent = self._ledger.intents.get(name)
        if intent is None or intent.given_up:
            return
        if not intent.removing:
            intent = replace(intent, removing=True)
            await self._ledger.put(intent)
        problems = await asyncio.gather(*(self._remove_from(intent, host) for host in intent.used))
        problem = next((each for each in problems if each), None)
        if problem is not None:
            raise TryAgain(problem)

    async def _remove_from(self, intent: FleetIntent, host: str) -> str:
        """Request the removal of the gang from a host. Return the reason if the request failed,
        otherwise ""."""
        link = self._links.get(host)
        if link is None:
            return ""
        try:
            if not link.up and not self.patient:
                raise CannotConnect(link.problem)
            await link.ask(
                "remove", EmptyAnswer, gang=intent.name, grace_s=intent.grace_s, forbid=True
            )
        except ProviderError as error:
            return "" if await self._is_dead(link) else str(error)
        return ""

    def _link(self, host: str) -> HostLink:
        link = self._links.get(host)
        if link is None:
            raise NoCapacity(f"{host} is not in the inventory")
        return link


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _say_problem(link: HostLink) -> str:
    """Return why the host accepts no work now, or "" if it accepts work."""
    if link.up and not link.leaving:
        return ""
    told = "the host leaves" if link.up else "the host has not answered yet"
    return " ".join((link.problem.removeprefix(f"{link.name}: ") or told).split())
