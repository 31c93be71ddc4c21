"""Compares the bills of ended attempts with the providers' own records of the same gangs."""

from collections.abc import Collection, Mapping, Sequence

from cavvy.control.decide.bills import AuditedBill, audit_bill
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import AttemptPhase
from cavvy.providers.base import PartlyUnknown, ProviderError
from cavvy.store.sql import Store


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
