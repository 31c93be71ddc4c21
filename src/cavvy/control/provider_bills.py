"""Compares bills with what providers list: posts to the ledger the costs of volumes that no job
uses, and audits the bills of ended attempts. The garbage collection posts the costs of volumes,
because only one server at a time collects garbage."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from cavvy.control.clock import ControlClock
from cavvy.control.decide.bills import AuditedBill, audit_bill
from cavvy.control.provider_pool import ProviderPool
from cavvy.costs.extras import begin_bill, bill_volume, observe_volume, post_storage, settle_bill
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.credentials import split_account
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.ledger import VOLUME_SUBJECT, LedgerSubject
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume, VolumeBill, VolumeOwner
from cavvy.providers.base import PartlyUnknown, ProviderError
from cavvy.store.base import StaleVersion
from cavvy.store.sql import Store

_SINCE = "storage-metered-since"  # the fact that records since when the installation meters volumes
_log = logging.getLogger(__name__)


class StorageMeter:
    """Recomputes the bills of all volumes at each call, and posts the differences from the stored
    bills.
    """

    def __init__(self, store: Store, pool: ProviderPool, clock: ControlClock) -> None:
        self._store, self._pool, self._clock = store, pool, clock

    async def run(self) -> None:
        """Post the costs of volumes up to the current time. If a provider does not answer, the
        bills of its volumes are computed at the next call.
        """
        since, now = await self._metered_since(), self._clock.now()
        stored = {each.subject.id: each for each in await self._store.meters.volumes()}
        bills = dict(stored)
        for account in list(self._pool.providers):
            try:
                volumes = await self._pool.kept_volumes(account)
            except ProviderError as error:
                _log.info("volumes at %s are not known: %s", account, error)
                continue
            for volume in volumes:
                key = f"{VOLUME_SUBJECT}{account}:{volume.id}"
                bill = bills.get(key) or await self._begin(key, account, volume, since)
                if bill is not None:
                    bills[key] = observe_volume(bill, volume, now)
        for key, bill in bills.items():
            await self._post(bill, stored.get(key))

    async def _metered_since(self) -> datetime:
        known = await self._store.fact(_SINCE)
        if known is not None:
            return datetime.fromisoformat(known)
        now = self._clock.now()
        await self._store.put_fact(_SINCE, now.isoformat())
        return now

    async def _begin(
        self, key: str, account: str, volume: KeptVolume, since: datetime
    ) -> VolumeBill | None:
        owner = await self._store.meters.owner(volume.made_for)
        if owner is None:
            if not volume.project:
                return None  # the volume of a job that is not in this database
            owner = VolumeOwner(project=volume.project, user="", tags={})
        return begin_bill(volume, _make_subject(key, account, volume, owner), since)

    async def _post(self, bill: VolumeBill, stored: VolumeBill | None) -> None:
        """Store the bill if anything except the time of the last check has changed."""
        uses = await self._store.meters.uses(bill.gangs)
        bill = settle_bill(bill, uses)
        lines = bill_volume(bill, [use for each in uses.values() for use in each])
        postings = post_storage(bill.lines, lines)
        bill = replace(bill, lines=lines)
        if stored is None or replace(bill, seen_at=stored.seen_at) != stored:
            with suppress(StaleVersion):  # another server was first
                await self._store.meters.put_volume(bill, postings)


def _make_subject(key: str, account: str, volume: KeptVolume, owner: VolumeOwner) -> LedgerSubject:
    return LedgerSubject(
        id=key,
        project=owner.project,
        user=owner.user,
        provider=split_account(account)[0],
        account=account,
        region=volume.region,
        zone=volume.zone,
        instance_type=volume.type,
        purchase="on-demand",
        tags=owner.tags,
        volume=volume.name,
    )


class BillAudit:
    """Compares bills with providers' records. Each provider is queried once for its gangs;
    providers list ended gangs for at least an hour."""

    def __init__(self, store: Store, pool: ProviderPool) -> None:
        self._store = store
        self._pool = pool

    async def audit(self, jobs: Sequence[str]) -> tuple[list[AuditedBill], list[SilentPlace]]:
        """Return the bills of these jobs' ended attempts, and the providers whose answers are
        missing or incomplete. A gang that is absent from an incomplete answer is not audited.
        `jobs` are job IDs.
        """
        attempts = [
            attempt
            for job in jobs
            for attempt in await self._store.attempts(job)
            if attempt.phase is AttemptPhase.ENDED
        ]
        reported, silent = await self._ask({each.offer.account for each in attempts})
        incomplete = {each.provider for each in silent}
        bills = []
        for attempt in attempts:
            provider = attempt.offer.account
            gang = reported.get(provider, {}).get(attempt.bought_as)
            if gang is not None or provider not in incomplete:
                charges = await self._store.charges(attempt.job_id)
                bills.append(audit_bill(attempt, gang, charges))
        return bills, silent

    async def _ask(
        self, providers: Collection[str]
    ) -> tuple[Mapping[str, Mapping[str, GangSeen]], list[SilentPlace]]:
        """Return the known gangs by provider and gang name, and the providers with incomplete
        answers.
        """
        found: dict[str, Mapping[str, GangSeen]] = {}
        silent = []
        for provider in sorted(providers):
            try:
                gangs = await self._pool.gangs(provider)
            except ProviderError as error:
                silent.append(SilentPlace(provider, str(error)))
                gangs = error.seen if isinstance(error, PartlyUnknown) else ()
            found[provider] = {gang.name: gang for gang in gangs}
        return found, silent
