"""Divides the bills of replicas among the requests that the gateway has counted."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cavvy.capabilities.serving.bill_rows import bills_of
from cavvy.capabilities.serving.bills import (
    KeyWork,
    ReplicaBill,
    RequestCounts,
    RequestWork,
    find_counts,
    name_api,
    name_api_bill,
    share_counts,
)
from cavvy.capabilities.serving.decide.request_costs import (
    Division,
    bill_api,
    divide_bill,
    keep_undivided,
)
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.bills import ACCRUE
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.ledger import LedgerSubject
from cavvy.domain.services import SERVICE_TAG, FallbackApi, ReplicaRole
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.store.base import StaleVersion
from cavvy.store.sql import Store

# the fact with the time of the migration since which requests are counted; new databases have none
COUNTED_SINCE = "requests-counted-since"
_BILLED = frozenset({AttemptPhase.ENDED, AttemptPhase.KEPT})  # KEPT: for another job
_BILLED_WITHIN = timedelta(minutes=5)
_ALWAYS = datetime.min.replace(tzinfo=UTC)
_FIRST = timedelta(seconds=5)  # between two looks for the first answers of a service
_TOGETHER = timedelta(seconds=5)  # between the first replicas of a revision
_REMEMBERED = 50  # replicas of a service; the garbage collection divides the bills of others


class RequestBills:
    """Divides the bills of replicas whenever the bills grow. One write stores each division
    together with its ledger entries. The write fails if the bill was divided meanwhile, so no
    amount is divided twice, even if the server is killed.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._rows = store, bills_of(store)
        # the cost of replicas according to their newest charges
        self.rates: dict[str, HourlyRate] = {}
        self._replicas: dict[str, dict[str, ServiceReplica]] = {}  # by the ID of the service
        # APIs that fallbacks name or have named, whose answers may not be billed yet; by service
        self._apis: dict[str, dict[str, FallbackApi]] = {}
        self._left: set[str] = set()  # replicas whose service no longer exists
        self._since: datetime | None = None  # when requests began to be counted
        # when a service's bills were last divided, by the service's ID
        self._done: dict[str, datetime] = {}
        self._divided: set[str] = set()  # services with requests in the ledger, as far as is known

    async def divide(
        self,
        service: StoredService,
        read: Callable[[], Awaitable[RequestWork | None]],
        now: datetime,
        *,
        answered: bool = False,
        last: bool = False,
    ) -> None:
        """Divide the new amounts of the service's replica bills among requests and idle time.
        `answered` says that the service has answered requests: the first ones are divided at once,
        for those who try it.
        `read` returns the counts of the replicas' requests, or None if the counts are unknown.
        `last` means that the service ends, so no later counts will arrive and the whole amount is
        divided now.
        """
        known = self._replicas.setdefault(service.id, {})
        # including replicas that have ended and will soon be removed from the service
        for each in service.replicas:
            known.pop(each.id, None)
            known[each.id] = each
        for old in list(known)[: -max(_REMEMBERED, len(service.replicas))]:
            del known[old]
        apis = self._apis.setdefault(service.id, {})
        named = [each.api for each in service.spec.fallbacks if each.api is not None]
        apis |= {name_api(api.url, api.model): api for api in named}
        done = self._done.get(service.id)
        is_new = answered and service.id not in self._divided
        due = done is None or now - done >= (_FIRST if is_new else ACCRUE)
        if not last and not due:
            return
        # the counts are read after the bills: those of a replica that has ended are then complete
        bills = await self._rows.list(list(known))
        work = await read()
        if work is None and not last:
            return
        self._done[service.id] = now
        if bills and work:
            self._divided.add(service.id)
        await self._divide_all(service, bills, work or {}, last=last)
        for name, api in apis.items():
            await self._bill_api(service, name, api, work or {}, now)
        for each in known.values():
            if last or each.state is ReplicaState.ENDED:
                self.rates.pop(each.id, None)
        if last:
            self._left.update(known)
            self._divided.discard(service.id)
            del self._replicas[service.id], self._done[service.id], self._apis[service.id]

    async def _divide_all(
        self, service: StoredService, bills: Sequence[ReplicaBill], work: RequestWork, *, last: bool
    ) -> None:
        known = self._replicas[service.id]
        # a server that was killed may not have divided the bills of replicas that ended meanwhile
        others = {replica for counts in work.values() for replica in counts} - known.keys()
        for bill in (*bills, *await self._rows.list(sorted(others))):
            replica = known.get(bill.job_id)
            if replica is not None:
                self.rates[bill.job_id] = bill.rate
            final = last or replica is None or replica.state is ReplicaState.ENDED
            counts, earlier = find_counts(work, bill.job_id), dict[str, dict[str, KeyWork]]()
            if routers := _list_routers(replica, known.values()):
                counts = share_counts(work, [each.id for each in routers])
                earlier = share_counts(
                    work, [each.id for each in routers if _is_older(each, replica)]
                )
            await self._divide(bill, replica, service, counts, final=final, earlier=earlier)

    async def _bill_api(
        self,
        service: StoredService,
        name: str,
        api: FallbackApi,
        work: RequestWork,
        now: datetime,
    ) -> None:
        """Add the requests that an API has answered for the service to the ledger."""
        counts = find_counts(work, name)
        if not counts:
            return
        subject = LedgerSubject(
            id=name_api_bill(service.id, name),
            project=service.project,
            user=service.user,
            service=service.name,
            provider=api.host,
            account="",
            instance_type=api.model,
            tags={**service.task.tags, SERVICE_TAG: service.name},  # as those of its replicas
        )
        before = await self._rows.division(subject.id)
        since = max(service.created_at, now - ACCRUE) if before is None else before.until
        bill = bill_api(subject.id, api.prices, counts, before, (since, now))
        if bill is None:
            return
        keys = await self._name_keys(service, bill.tokens)
        with suppress(StaleVersion):  # another server has billed these requests first
            await self._rows.divide(bill.divided, bill.postings, keys, bill.tokens, subject)

    async def is_billed(self, service: StoredService, now: datetime) -> bool:
        """Return whether the bills of the service's replicas, which have all ended, are complete. A
        provider may need some time to remove a replica. Five minutes after a replica has ended, its
        bill counts as complete.
        """
        for each in service.replicas:
            if each.ended_at is not None and now - each.ended_at < _BILLED_WITHIN:
                attempts = await self._store.attempts(each.id)
                if any(attempt.phase not in _BILLED for attempt in attempts):
                    return False
        return True

    async def note_job(self, job_id: str) -> None:
        """Handle a reconciled job: if the job was a replica whose service no longer exists, divide
        the replica's bill.
        """
        if job_id in self._left:
            await self._divide_late([job_id])

    async def sweep(self) -> None:
        """Divide amounts that were added to the bills of ended replicas, such as late charges."""
        await self._divide_late(await self._rows.late_replicas())

    async def _divide_late(self, jobs: Sequence[str]) -> None:
        """Divide what is still undivided in the bills of replicas whose service has ended."""
        for bill in await self._rows.list(jobs):
            await self._divide(bill, None, None, {}, final=True, earlier={})

    async def _divide(
        self,
        bill: ReplicaBill,
        replica: ServiceReplica | None,
        service: StoredService | None,
        counts: RequestCounts,
        *,
        final: bool,
        earlier: Mapping[str, dict[str, KeyWork]],
    ) -> None:
        ready_at = None if replica is None else replica.ready_at
        if bill.divided is None and bill.since < await self._counted_since():
            division: Division | None = keep_undivided(bill, counts, ready_at or bill.until)
        elif earlier and bill.divided is None:  # what routers did before it came is not its work
            new = {epoch: work for epoch, work in counts.items() if epoch not in earlier}
            division = divide_bill(bill, new, ready_at, final=final)
            if division is not None:
                before = division.divided
                before = replace(before, counted={**before.counted, **earlier})
                division = replace(division, divided=before)
        else:
            division = divide_bill(bill, counts, ready_at, final=final)
        if division is not None:
            used = {**division.postings, **division.tokens}
            keys = {} if service is None else await self._name_keys(service, used)
            with suppress(StaleVersion):  # another server has divided the bills first
                await self._rows.divide(division.divided, division.postings, keys, division.tokens)

    async def _name_keys(self, service: StoredService, used: Iterable[str]) -> Mapping[str, str]:
        """Return the labels of keys by their IDs. Requests for which the service is a fallback have
        keys of other services of its project."""
        services = [service]
        if not {*used, ""} <= {"", *(each.id for each in service.keys)}:
            services = [*await services_of(self._store).list({service.project}), service]
        return {key.id: key.label for each in services for key in each.keys}

    async def _counted_since(self) -> datetime:
        if self._since is None:
            known = await self._store.fact(COUNTED_SINCE)
            found = _ALWAYS if known is None else datetime.fromisoformat(known)
            self._since = found if found.tzinfo else found.replace(tzinfo=UTC)  # SQLite's
        return self._since


def _list_routers(
    replica: ServiceReplica | None, known: Iterable[ServiceReplica]
) -> list[ServiceReplica]:
    """Return the routers that send requests to a worker; [] for other replicas."""
    if replica is None or not replica.is_worker:
        return []
    return [
        each
        for each in known
        if each.role is ReplicaRole.ROUTER and each.revision == replica.revision
    ]


def _is_older(router: ServiceReplica, worker: ServiceReplica | None) -> bool:
    """Return whether the router may have had requests before the worker was ready. The first
    replicas of a revision become ready together."""
    if worker is None or worker.ready_at is None or router.ready_at is None:
        return True
    return router.ready_at < worker.ready_at - _TOGETHER
