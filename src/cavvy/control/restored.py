"""Compares a restored database with the providers' gangs before a server uses the database."""

from collections.abc import AsyncIterator, Callable
from datetime import datetime

from cavvy.control.decide.restored import (
    JobNumber,
    RestoreComparison,
    compare,
    name_later,
)
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.jobs import Attempt
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, PartlyUnknown, ProviderError
from cavvy.store.base import AtomicWrite, RowNotFound, Store

RESTORED = "restored_at"  # the fact that marks a restored database
_PAGE = 500


async def compare_with_providers(
    store: Store, pool: ProviderPool, name_gang: Callable[[str], str]
) -> tuple[RestoreComparison, list[SilentPlace]]:
    """Query all providers for their gangs, and compare the gangs with the database. Also return the
    providers that did not respond. Changes nothing.
    """
    seen: list[tuple[str, GangSeen]] = []
    silent: list[SilentPlace] = []
    for provider in pool.providers:
        try:
            gangs = await pool.gangs(provider)
        except ProviderError as error:
            silent.append(SilentPlace(provider, str(error)))
            gangs = error.seen if isinstance(error, PartlyUnknown) else ()
        seen += [(provider, gang) for gang in gangs]
    silent += [SilentPlace(account, why) for account, why in pool.unusable.items()]
    attempts = {each.gang: await _with_job(store, each) for each in await store.open_attempts()}
    for _, gang in seen:
        if gang.name not in attempts and (ended := await _find(store, gang.name)):
            attempts[gang.name] = await _with_job(store, ended)
    later = name_later([job async for job in _jobs(store)], name_gang)
    asked = {each.provider for each in silent}
    asked |= {each.offer.account for each, _ in attempts.values()} - set(pool.providers)
    return compare(seen, attempts, asked, later), silent


async def mark_restored(store: Store, comparison: RestoreComparison, now: datetime) -> None:
    """Record that the database was restored, so that unknown gangs are not removed automatically.
    Also reserve the attempt numbers that were used since the backup, so that no later attempt gets
    the same number and thus the same gang name. Can be repeated. Raises StaleVersion.
    """
    await store.put_fact(RESTORED, now.isoformat())
    for job_id, number in comparison.used.items():
        job = await store.job(job_id)
        if job.last_number < number:
            await store.commit(AtomicWrite(jobs=[replace(job, numbered=number)]))


async def read_restored_at(store: Store) -> datetime | None:
    """Return when the database was restored, or None if it was not restored or the restore no
    longer matters."""
    text = await store.fact(RESTORED)
    return datetime.fromisoformat(text) if text else None


async def forget_restored(store: Store) -> None:
    """Forget that the database was restored, so that unknown gangs may be removed automatically."""
    await store.put_fact(RESTORED, "")


async def _jobs(store: Store) -> AsyncIterator[JobNumber]:
    cursor: str | None = None
    while True:
        page = await store.list_jobs(None, (), cursor, _PAGE)
        for job in page.jobs:
            yield JobNumber(job_id=job.id, project=job.project, job=job.name, number=job.attempt)
        if (cursor := page.cursor) is None:
            return


async def _find(store: Store, gang: str) -> Attempt | None:
    try:
        return await store.attempt_of_gang(gang)
    except RowNotFound:
        return None


async def _with_job(store: Store, attempt: Attempt) -> tuple[Attempt, str]:
    return attempt, (await store.job(attempt.job_id)).name
