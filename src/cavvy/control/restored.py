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
from cavvy.control.retention import ROUNDS
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.audit import AuditEntry
from cavvy.domain.jobs import Attempt
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import GangSeen, PartlyUnknown, ProviderError
from cavvy.store.base import AtomicWrite, RowNotFound
from cavvy.store.own_tables import list_own_rows
from cavvy.store.sql import Store

RESTORED = "restored_at"  # the fact that marks a restored database
_SIGN_INS_FROM = "sign_ins_from"  # the fact that refuses ID tokens from before the restore
_PAGE = 500


class StoredAccess(Struct, frozen=True, kw_only=True):
    """How many credentials and rights a database contains. Tokens and keys are counted if they are
    valid.
    """

    tokens: int
    keys: int  # of services
    accounts: int
    disabled: int  # of these accounts
    roles: int
    trusts: int


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
    the same number and thus the same gang name. ID tokens from before the restore are refused from
    now on, because the database does not know which of them were used. Old jobs, for which the
    backup may have been restored, are kept for a while. Can be repeated. Raises StaleVersion.
    """
    await store.put_fact(RESTORED, now.isoformat())
    await store.put_fact(_SIGN_INS_FROM, now.isoformat())
    await store.put_fact(ROUNDS, "")
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


async def read_sign_ins_from(store: Store) -> datetime | None:
    """Return the time before which no ID token may have been issued, or None if the database was
    never restored."""
    text = await store.fact(_SIGN_INS_FROM)
    return datetime.fromisoformat(text) if text else None


async def count_access(store: Store, now: datetime) -> StoredAccess:
    tokens = [
        each
        for each in await store.tokens()
        if each.revoked_at is None and not _has_ended(each.expires_at, now)
    ]
    keys = [await own.count_keys(now) for own in list_own_rows(store.database)]
    accounts = await store.accounts()
    return StoredAccess(
        tokens=len(tokens),
        keys=sum(keys),
        accounts=len(accounts),
        disabled=sum(each.disabled_at is not None for each in accounts),
        roles=len(await store.roles()),
        trusts=len(await store.sign_ins.trusts()),
    )


async def end_access(store: Store, now: datetime) -> None:
    """Revoke all tokens of accounts, and remove all keys of services. No server uses the database.
    Can be repeated."""
    for token in await store.tokens():
        if token.revoked_at is None:
            await store.revoke_token(token.id, None, now)
    for own in list_own_rows(store.database):
        await own.end_keys()


async def record_restore(
    store: Store, access: StoredAccess, made_at: datetime | None, now: datetime, *, ended: bool
) -> None:
    """Write to the audit log what came back with the database, and whether it was ended."""
    after: dict[str, object] = {
        "backup_of": None if made_at is None else made_at.isoformat(),
        "tokens": access.tokens,
        "keys": access.keys,
        "accounts": access.accounts,
        "roles": access.roles,
        "trusts": access.trusts,
        "tokens_and_keys": "ended" if ended else "kept",
    }
    await store.record(
        AuditEntry(at=now, signed_in=True, action="cavvy server restore", after=after)
    )


def _has_ended(at: datetime | None, now: datetime) -> bool:
    return at is not None and at <= now


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
