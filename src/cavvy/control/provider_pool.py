"""Combines all providers behind one interface. Calls have time limits, and offers are cached for a
few seconds. A provider that is used with the credential of a project is a separate provider, under
the name of its account (`domain.credentials`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from cavvy.control.clock import ControlClock
from cavvy.control.decide.attempt_snapshot import GangAbsence, Seen
from cavvy.control.decide.maintenance import apply_states
from cavvy.control.decide.placement import MarketSnapshot
from cavvy.domain.allocations import Host, SilentPlace
from cavvy.domain.credentials import CredentialBook, mark_account, split_account
from cavvy.domain.maintenance import NodeState
from cavvy.domain.offers import Offer, Quota
from cavvy.domain.policies import PolicyBook
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.domain.volumes import KeptVolume, VolumeFolder
from cavvy.planner.candidates import OfferedMarket
from cavvy.providers.abilities import (
    ANSWERS_REQUESTS,
    BILLS_VOLUMES,
    HAS_PARTS,
    HOLDS_VOLUMES,
    KEEPS_FOLDERS,
    KEEPS_NODES,
    RELAYS_AGENTS,
    REPLACES_NODES,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
    TELLS_QUOTAS,
    AnswersRequests,
    KeepsFolders,
    RelaysAgents,
    SignalsChanges,
    ability,
)
from cavvy.providers.base import (
    Feature,
    GangSeen,
    GangSpec,
    NotFound,
    Provider,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.objections import list_makers, list_objections, list_unlisted
from cavvy.scheduler.offer_lines import take
from cavvy.store.sql import Store

T = TypeVar("T")
CALL_TIMEOUT = timedelta(seconds=120)  # clouds can take this long to accept a launch of many nodes
OFFERS_TIMEOUT = timedelta(seconds=20)
_ACCOUNTS_AGE = timedelta(seconds=5)  # maximum age of the cached list of accounts
OFFERS_AGE = timedelta(seconds=5)
FREED_AGE = timedelta(seconds=1)  # maximum age of offers after capacity was freed


class _Placed(Struct, frozen=True, kw_only=True):
    """The nodes assigned to a gang: the key of their offer, their number and the time of the
    assignment.
    """

    key: str
    nodes: int
    at: datetime


class ProviderPool:
    """The configured providers, by the names of their accounts."""

    def __init__(
        self,
        providers: MutableMapping[str, Provider],
        clock: ControlClock,
        store: Store | None = None,
    ) -> None:
        self.providers = providers
        # accounts of projects that cannot be used, with the reasons
        self.unusable: dict[str, str] = {}
        # when the accounts of projects were last compared with the stored credentials, and the
        # function that compares them again, because another server may have set a credential
        self.accounts_read_at: datetime | None = None
        self.read_accounts: Callable[[], None] = lambda: None
        # notifies the other servers that this server has set or removed a credential
        self.tell_accounts: Callable[[], None] = lambda: None
        self._store = store
        self._clock = clock
        self._snapshot: MarketSnapshot | None = None
        # what the providers offer, and what operators have ordered for the hosts among it
        self._asked = OfferedMarket(offers=())
        self._states: Mapping[str, NodeState] = {}
        self._asking = asyncio.Lock()
        self._freed = False
        # gangs that their providers may not list yet, keyed by name
        self._placed: dict[str, _Placed] = {}
        # returns why offers are in doubt, by their keys (`catalog.doubts`)
        self.find_doubts: Callable[[Sequence[Offer]], Awaitable[Mapping[str, str]]] = _trust
        # tells the server that places jobs that its offers are outdated
        self.tell_expired: Callable[[], None] = lambda: None
        # whether no other server can have taken over the jobs of this server
        self.may_launch: Callable[[], bool] = lambda: True
        # the number of this server's calls and the seconds that they took, by provider, operation
        # and result
        self.calls: dict[tuple[str, str, str], tuple[int, float]] = {}

    async def market(self, age: timedelta = OFFERS_AGE) -> MarketSnapshot:
        """Return the available offers, at most `age` old. What operators order for hosts applies at
        once."""
        async with self._asking:
            now = self._clock.now()
            age = min(age, FREED_AGE) if self._freed else age
            if self._snapshot is None or now - self._snapshot.as_of >= age:
                self._freed = False
                before = self._not_launched(now)
                self._asked = await self._ask_all()
                self._states = await self._read_states()
                market = apply_states(self._asked, self._states)
                self._snapshot = MarketSnapshot(market=market, as_of=now)
                capacities = {offer.key: offer for offer in self._snapshot.market.offers}
                for each in {
                    **before,
                    **self._placed,
                }.values():  # include gangs that were placed while the providers were being asked
                    if each.key in capacities:
                        take(self._snapshot.used, capacities[each.key], each.nodes)
            elif self._asked.hosts and (states := await self._read_states()) != self._states:
                self._states = states
                self._snapshot = MarketSnapshot(
                    market=apply_states(self._asked, states),
                    as_of=self._snapshot.as_of,
                    used=self._snapshot.used,
                )
            return self._snapshot

    async def reported_hosts(self) -> Sequence[Host]:
        """Return the hosts as their providers report them."""
        await self.market()
        return self._asked.hosts

    def shares_hosts(self, name: str) -> bool:
        """Return whether the nodes of this provider are hosts."""
        provider = self.providers.get(name)
        return provider is not None and ability(provider, SHARES_HOSTS) is not None

    async def _read_states(self) -> Mapping[str, NodeState]:
        return {} if self._store is None else await self._store.maintenance.states()

    def place(self, gang: str, offer: Offer, nodes: int) -> None:
        """From now on, count the gang's nodes as used. Until the gang is launched, the provider
        still reports the gang's nodes as free.
        """
        if self._snapshot is not None:
            take(self._snapshot.used, offer, nodes)
        self._placed[gang] = _Placed(key=offer.key, nodes=nodes, at=self._clock.now())

    def free(self, gang: str, offer: Offer) -> bool:
        """Stop counting the nodes of this gang as used, because the gang has ended or will not be
        launched. Returns whether the freed nodes may make room for a waiting job.
        """
        self._placed.pop(gang, None)
        limited = offer.capacity is not None and not offer.shared
        self._freed |= limited
        if limited:
            self.tell_expired()
        return limited

    @property
    def is_outdated(self) -> bool:
        """Whether the last result of `market` may lack nodes that have become free since."""
        return self._freed or self._snapshot is None

    def next_news(self, otherwise: timedelta) -> timedelta:
        """Return the time until free capacity should be checked again, or `otherwise` if no
        capacity was freed recently.
        """
        if not self._freed or self._snapshot is None:
            return otherwise
        return max(timedelta(0), self._snapshot.as_of + FREED_AGE - self._clock.now())

    def notice(self, name: str) -> timedelta | None:
        """Return the minimum notice that the provider gives before it reclaims a node. The result
        is None if the provider gives no notice, or if the provider is unknown.
        """
        provider = self.providers.get(name)
        return provider.manifest.notice if provider is not None else None

    def find_endpoints(self, account: str) -> AnswersRequests | None:
        """Return the account's provider if it runs each gang as an endpoint that only the
        provider's own API can call. Otherwise, return None.
        """
        provider = self.providers.get(account)
        return None if provider is None else ability(provider, ANSWERS_REQUESTS)

    def reports_cancelled(self, name: str) -> bool:
        """Return whether this provider reports, at a gang's end, that a person cancelled the
        gang."""
        provider = self.providers.get(name)
        return provider is not None and provider.manifest.reports_cancelled

    def expire(self) -> None:
        """Discard the cached offers, because capacity or prices have changed."""
        self._snapshot = None
        self.tell_expired()

    def learn_freed(self) -> None:
        """Apply another server's observation that capacity or prices have changed."""
        self._freed = True

    def can_replace(self, account: str) -> bool:
        """Return whether the account's provider can replace single nodes of gangs."""
        provider = self.providers.get(account)
        return provider is not None and ability(provider, REPLACES_NODES) is not None

    def why_not_replace(self, account: str) -> str:
        """Return why the account's provider replaces no single nodes, or "" if it does."""
        provider = self.providers.get(account)
        if provider is None or self.can_replace(account):
            return ""
        lacking = provider.manifest.unsupported
        why = lacking.get(Feature.REPAIR) or lacking.get(Feature.GANG) or "it does not say why"
        return f"{account} replaces no single nodes: {why}"

    async def launch(self, spec: GangSpec, replaces: Sequence[int] = ()) -> None:
        """See `Provider.launch` or, for the ranks in `replaces`, `ReplacesNodes.replace`. Raises
        TryAgain if another server can have taken over the job and ended the gang, for example
        because the database answered late.
        """
        if not self.may_launch():
            raise TryAgain("another server may have taken over this server's jobs")
        account = spec.offer.account
        mark = mark_account(spec.installation, spec.offer.credential)
        try:
            provider = self._provider(account)
            # the provider expects the offer in the form in which it listed the offer
            offer = replace(spec.offer, credential="")
            ours = replace(spec, installation=mark, offer=offer)
            replacer = ability(provider, REPLACES_NODES) if replaces else None
            if replaces and replacer is None:
                raise Refused(f"{account} cannot replace single nodes of a gang")
            call = replacer.replace(ours, replaces) if replacer else provider.launch(ours)
            await self._call(account, call)
        finally:
            self._placed.pop(spec.name, None)

    async def look(self, provider: str, gang: str) -> Seen:
        """Poll the provider for the gang's state. Raises TryAgain, Refused."""
        found = await self._call(provider, self._provider(provider).gangs(gang))
        return next((seen for seen in found if seen.name == gang), GangAbsence.ABSENT)

    async def gangs(self, provider: str) -> Sequence[GangSeen]:
        """Return all gangs of this installation at one provider. Raise TryAgain, Refused, or
        PartlyUnknown with the gangs that are known.
        """
        return await self._call(provider, self._provider(provider).gangs(None))

    async def remove(self, provider: str, gang: str, *, release: bool = False) -> None:
        """Remove the gang; see `Provider.remove`. If `release` is set, also release nodes that the
        provider keeps after the gang's work.
        """
        await self._call(provider, self._provider(provider).remove(gang))
        keeping = ability(self._provider(provider), KEEPS_NODES) if release else None
        if keeping is not None:
            await self._call(provider, keeping.release(gang))

    def visibility_delay(self, provider: str) -> timedelta:
        """Return how long a new gang may be missing from the provider's lists."""
        known = self.providers.get(provider)
        return known.manifest.visibility_delay if known else timedelta(minutes=2)

    async def quotas(self, provider: str) -> Sequence[Quota] | None:
        """Return the account's quotas at the provider, or None if the provider does not report
        quotas. Raises TryAgain, Refused.
        """
        telling = ability(self._provider(provider), TELLS_QUOTAS)
        return None if telling is None else await self._call(provider, telling.quotas())

    def untold_quotas(self, provider: str) -> Sequence[str]:
        """Return the regions whose quotas the last call of `quotas` could not read, with the
        reasons."""
        telling = ability(self._provider(provider), TELLS_QUOTAS)
        return () if telling is None else telling.untold_quotas()

    def objections(self, task: TaskSpec, provider: str) -> Sequence[Objection]:
        """Return the reasons why this provider could not run the task even if all its capacity were
        free."""
        return list_objections(task, self._provider(provider))

    def _not_launched(self, now: datetime) -> Mapping[str, _Placed]:
        """Return the gangs that were placed but whose launch the provider has not answered yet. A
        gang that is neither launched nor freed is dropped after CALL_TIMEOUT.
        """
        self._placed = {
            gang: each for gang, each in self._placed.items() if now - each.at < CALL_TIMEOUT
        }
        return dict(self._placed)

    async def _ask_all(self) -> OfferedMarket:
        """Query all providers at the same time. Each call has a time limit of OFFERS_TIMEOUT, so a
        slow provider delays the result by at most that time."""
        stored = self._store
        credentials = (
            CredentialBook() if stored is None else await stored.provider_credentials.book()
        )
        asked = {name: each for name, each in self.providers.items() if credentials.holds(name)}
        answers = await asyncio.gather(*(self._ask(name, place) for name, place in asked.items()))
        offers = tuple(offer for answer in answers for offer in answer.offers)
        real = [
            offer
            for place, answer in zip(asked.values(), answers, strict=True)
            if not place.manifest.test_double
            for offer in answer.offers
        ]
        return OfferedMarket(
            policies=PolicyBook() if stored is None else await stored.policies(),
            credentials=credentials,
            offers=offers,
            doubts=await self.find_doubts(real),
            hosts=tuple(host for answer in answers for host in answer.hosts),
            volumes=tuple(volume for answer in answers for volume in answer.volumes),
            blind=frozenset(name for answer in answers for name in answer.blind),
            unlisted=list_unlisted(asked),
            makers=list_makers(asked),
            problems=(
                *(problem for answer in answers for problem in answer.problems),
                *(SilentPlace(account, why) for account, why in self.unusable.items()),
            ),
        )

    async def _ask(self, name: str, place: Provider) -> OfferedMarket:
        try:
            offers = await self._call(name, place.offers(), OFFERS_TIMEOUT)
            offers = _assign(offers, name)
            shares = ability(place, SHARES_HOSTS)
            hosts = await self._call(name, shares.hosts(), OFFERS_TIMEOUT) if shares else ()
        except ProviderError as error:
            blind = frozenset({name} if ability(place, HOLDS_VOLUMES) else ())
            return OfferedMarket(offers=(), blind=blind, problems=(SilentPlace(name, str(error)),))
        parts = ability(place, HAS_PARTS)
        silent = parts.silent() if parts else ()
        market = OfferedMarket(
            offers=offers, hosts=hosts, problems=tuple(SilentPlace(name, each) for each in silent)
        )
        holder = ability(place, HOLDS_VOLUMES)
        if holder is None:
            return market
        try:
            volumes = await self._call(name, holder.volumes(), OFFERS_TIMEOUT)
            return replace(market, volumes=[replace(each, provider=name) for each in volumes])
        except ProviderError as error:  # offers can still be used for tasks without volumes
            problems = (*market.problems, SilentPlace(name, str(error)))
            return replace(market, blind=frozenset({name}), problems=problems)

    async def kept_volumes(self, name: str) -> Sequence[KeptVolume]:
        """Return the volumes that this installation has created in an account. Raises TryAgain,
        Refused.
        """
        holder = ability(self._provider(name), BILLS_VOLUMES)
        return () if holder is None else await self._call(name, holder.kept_volumes())

    async def folders(self, project: str) -> Mapping[str, Sequence[VolumeFolder]]:
        """Return a project's volumes that are folders of this machine or of own hosts, by provider.
        Raises TryAgain."""
        return {
            name: await self._call(name, keeper.folders(project))
            for name, keeper in self._find_keepers()
        }

    async def remove_folder(self, project: str, name: str, provider: str = "") -> bool:
        """Remove such a volume, of the provider if there are several of this name. Return whether
        there was one. Raises TryAgain, Refused."""
        keepers = dict(self._find_keepers())
        having = [each for each in keepers if provider in ("", each)]
        if len(having) > 1:
            having = [each for each in having if await self._has_volume(each, project, name)]
        if len(having) > 1:
            raise Refused(
                f"{' and '.join(having)} each have a volume {name}; name the provider whose volume "
                "is to be removed"
            )
        removed = [
            await self._call(each, keepers[each].remove_folder(project, name)) for each in having
        ]
        if any(removed):
            self.expire()  # a job that names it now may run elsewhere
        return any(removed)

    async def _has_volume(self, account: str, project: str, name: str) -> bool:
        holder = ability(self._provider(account), HOLDS_VOLUMES)
        found = () if holder is None else await self._call(account, holder.volumes())
        return any(name in each.names and each.project == project for each in found)

    def _find_keepers(self) -> list[tuple[str, KeepsFolders]]:
        found = ((name, ability(each, KEEPS_FOLDERS)) for name, each in self.providers.items())
        return [(name, keeper) for name, keeper in found if keeper is not None]

    def _provider(self, name: str) -> Provider:
        if name in self.providers:
            return self.providers[name]
        provider, project = split_account(name)
        if project:
            # the credential is stored, so its jobs wait until it works
            if why := self.unusable.get(name):
                raise TryAgain(f"project {project}: {why}")
            read_at, now = self.accounts_read_at, self._clock.now()
            if read_at is None or now - read_at > _ACCOUNTS_AGE:
                self.read_accounts()
                raise TryAgain(f"the credential of project {project} for {provider} is being read")
            raise Refused(
                f"project {project} has no credential for {provider}; "
                f"set it again: cavvy project credential set {provider} -p {project} "
                "--key-file FILE"
            )
        raise Refused(
            f"the provider {name!r} is no longer configured; enable it again in the settings"
        )

    async def _call(self, name: str, call: Awaitable[T], limit: timedelta = CALL_TIMEOUT) -> T:
        """Await a call of a provider, with a time limit. Raise TryAgain when the limit is reached.
        NotFound is converted to TryAgain, because a missing object in the cloud does not mean that
        the gang is missing.
        """
        began, result = time.monotonic(), "error"
        try:
            async with asyncio.timeout(limit.total_seconds()):
                answer = await call
            result = "ok"
            return answer
        except TimeoutError:
            result = "timeout"
            raise TryAgain(f"{name} did not answer within {limit.total_seconds():.0f} s") from None
        except NotFound as error:
            raise TryAgain(f"{name} reports a missing object: {error}") from error
        finally:
            key = name, getattr(call, "__name__", "call"), result
            count, seconds = self.calls.get(key, (0, 0.0))
            self.calls[key] = count + 1, seconds + time.monotonic() - began


async def _trust(_: Sequence[Offer]) -> Mapping[str, str]:
    return {}


def _assign(offers: Sequence[Offer], account: str) -> Sequence[Offer]:
    """Return the offers, with their field `credential` set to the account's credential."""
    credential = split_account(account)[1]
    return [replace(each, credential=credential) for each in offers] if credential else offers


_PAUSE = timedelta(seconds=15)  # pause before a failed task is restarted
_log = logging.getLogger(__name__)


class ProviderTasks:
    """The tasks of all accounts. The tasks run in the group that is passed to `start`; no tasks
    exist before `start` is called.

    `changed` is called with the name of a gang whose provider signals a change. If there are
    several servers, only one of them relays agents.
    """

    def __init__(self, clock: ControlClock, changed: Callable[[str], Awaitable[None]]) -> None:
        self._clock = clock
        self._changed = changed
        self._group: asyncio.TaskGroup | None = None
        self._relaying = False
        self._following: dict[str, asyncio.Task[None]] = {}  # keyed by account, like `_relays`
        self._relays: dict[str, asyncio.Task[None]] = {}

    def start(
        self, group: asyncio.TaskGroup, providers: Mapping[str, Provider], *, relay: bool
    ) -> None:
        """Start to follow the signals of these providers. If `relay` is set, also relay the
        messages of the providers' agents.
        """
        self._group, self._relaying = group, relay
        for account, provider in providers.items():
            self.add(account, provider)

    def add(self, account: str, provider: Provider) -> None:
        """Serve one more provider."""
        if self._group is None:
            return
        if signals := ability(provider, SIGNALS_CHANGES):
            self._following[account] = self._group.create_task(self._follow(account, signals))
        if self._relaying:
            self._start_relay(self._group, account, provider)

    def drop(self, account: str) -> None:
        """Stop serving the provider of this account."""
        for tasks in (self._following, self._relays):
            if account in tasks:
                tasks.pop(account).cancel()

    def set_relaying(self, providers: Mapping[str, Provider], relay: bool) -> None:
        """Start or stop relaying the agents of these providers."""
        while self._relays:
            self._relays.popitem()[1].cancel()
        self._relaying = relay
        if self._group is not None and relay:
            for account, provider in providers.items():
                self._start_relay(self._group, account, provider)

    def _start_relay(self, group: asyncio.TaskGroup, account: str, provider: Provider) -> None:
        if relay := ability(provider, RELAYS_AGENTS):
            self._relays[account] = group.create_task(self._relay(account, relay))

    async def _follow(self, account: str, provider: SignalsChanges) -> None:
        """Report each gang that the provider signals. If signals fail, the regular polls find the
        changes later.
        """
        while True:
            try:
                gang = await provider.changed()
            except (ProviderError, OSError) as error:
                told = "a provider's signals failed; its gangs are polled instead"
                _log.warning(told, exc_info=error, extra={"provider": account})
                await self._pause()
                continue
            await self._changed(gang)

    async def _relay(self, account: str, provider: RelaysAgents) -> None:
        """Run a provider's relay, which connects agents with the server, and restart it whenever it
        fails. Agents continue their work during a restart of the relay.
        """
        while True:
            try:
                await provider.relay()
            except (ProviderError, OSError) as error:
                told = "a provider's relay failed and is restarted"
                _log.warning(told, exc_info=error, extra={"provider": account})
            await self._pause()

    async def _pause(self) -> None:
        await self._clock.sleep_until(self._clock.now() + _PAUSE)
