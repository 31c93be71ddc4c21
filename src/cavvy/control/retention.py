"""Removes ended jobs that are no longer kept: first what `cavvy rm` removes, then the remaining
rows. Only the entries of the ledger stay. Also removes old figures, and old records of the audit
log.
"""

import logging
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.job_service import JobService, RemoveFiles, StillAwaited, TooLate
from cavvy.domain.policies import PolicyBook
from cavvy.domain.retention import (
    JOBS_SETTING,
    EndedJob,
    RemovedJob,
    RetentionDays,
    RetentionPeriod,
    subtract_days,
)
from cavvy.store.base import ProjectArchived, RowNotFound, StaleVersion
from cavvy.store.sql import Store

RETENTION = "retention"  # the worklist's key
FIRST = timedelta(seconds=30)  # after the start of the server, which has more urgent work then
_EVERY = timedelta(hours=1)
# A step takes about 0.05 s of CPU time (`benchmarks/year.py`), so the steps use a fifth of one CPU.
_STEP, _PAUSE = 25, timedelta(seconds=0.25)
_TOLD = timedelta(days=365)  # how long removed jobs are remembered
_FORGOTTEN = 1000  # removed jobs that a pass forgets
_SHRINK_MIB = 8
_MONTH = timedelta(days=30)
_CUT_RECORDS = 2000  # that one transaction removes
_BLOCKS = 100  # days of a rank, up to 32 KB each, that one transaction removes
WAIT = timedelta(days=30)
# The fact SINCE LAST: the first and the last round without a break longer than WAIT. If there is
# none, or a break, the next removal waits: the database may come from a version that kept
# everything or from an old backup, or the machine's clock may be wrong.
ROUNDS = "retention_rounds"
_log = logging.getLogger(__name__)


class RetentionRules:
    """For how long the jobs of each project are kept."""

    def __init__(self, days: int, book: PolicyBook) -> None:
        self._days = days
        self._book = book

    def find(self, project: str, *, archived: bool) -> RetentionPeriod:
        """Return the period of the nearest policy that sets one, or else of the setting. The
        setting does not apply to archived projects, because they are kept.
        """
        for bound in reversed(self._book.find(project)):
            if bound.policy.keep_jobs_days is not None:
                where = f"policy of {bound.owner}"
                return RetentionPeriod(bound.policy.keep_jobs_days, where)
        return RetentionPeriod(0 if archived else self._days, JOBS_SETTING)


async def read_begin(store: Store, now: datetime) -> datetime | None:
    """Return the time before which nothing is removed, or None if it has passed."""
    since, _ = await _read_rounds(store) or (now, now)
    return since + WAIT if since + WAIT > now else None


async def _read_rounds(store: Store) -> tuple[datetime, datetime] | None:
    since, _, last = (await store.fact(ROUNDS) or "").partition(" ")
    return (datetime.fromisoformat(since), datetime.fromisoformat(last)) if last else None


class Retention:
    """Reconciles the key RETENTION in small steps: each pass removes some jobs of one project. If
    the server is killed, the next server continues.
    """

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        jobs: JobService,
        days: RetentionDays,
        remove_files: RemoveFiles | None = None,
    ) -> None:
        self._remove_files = remove_files
        self._store, self._clock, self._jobs, self._days = store, clock, jobs, days
        self._left: list[str] | None = None  # projects that this round has not finished
        self._last: EndedJob | None = None  # the last job of the current project
        self._removed = 0

    async def rules(self) -> RetentionRules:
        """Return the rules that apply now."""
        return RetentionRules(self._days.jobs, await self._store.policies())

    async def reconcile(self) -> timedelta:
        """Make one step, and return the time until the next."""
        if self._left is None:
            now = self._clock.now()
            if await self._note_round(now) + WAIT > now:
                await self._store.retention.shrink(_SHRINK_MIB)
                return _EVERY
            self._left = sorted({each.name for each in await self._store.projects()})
            await self._store.retention.forget_removed(now - _TOLD, _FORGOTTEN)
            while await self._store.figures.forget(now, _BLOCKS):
                await self._clock.sleep_until(self._clock.now() + _PAUSE)
        if not self._left:
            if self._removed:
                _log.info("removed ended jobs", extra={"jobs": self._removed})
            self._left, self._removed = None, 0
            await self._cut_audit()
            await self._store.retention.shrink(_SHRINK_MIB)
            return _EVERY
        if not await self._step(self._left[0]):
            self._left, self._last = self._left[1:], None
            return timedelta(0)
        await self._store.retention.shrink(_SHRINK_MIB)
        return _PAUSE

    async def _note_round(self, now: datetime) -> datetime:
        """Store that a round begins. Return the time of the first round, see ROUNDS."""
        since, last = await _read_rounds(self._store) or (now, now)
        if abs(now - last) > WAIT:
            since = now
        if since == now:
            await self._warn(now)
        await self._store.put_fact(ROUNDS, f"{since.isoformat()} {now.isoformat()}")
        return since

    async def _warn(self, now: datetime) -> None:
        """Log which jobs will be removed after WAIT, if there are any."""
        rules = await self.rules()
        for project in await self._store.projects():
            period = rules.find(project.name, archived=project.archived_at is not None)
            before = period.before(now)
            if before and await self._store.retention.list_ended(project.name, before, None, 1):
                _log.warning(
                    "jobs of project %s that ended more than %d days ago (%s) will be removed "
                    "after %s; to keep them: `cavvy project policy set -p %s --keep-jobs 0`",
                    *(project.name, period.days, period.rule),
                    *(f"{now + WAIT:%Y-%m-%d %H:%M} UTC", project.name),
                )

    async def _cut_audit(self) -> None:
        """Once a month, remove the old records of the audit log."""
        now = self._clock.now()
        before = subtract_days(now, self._days.audit)
        oldest = await self._store.retention.oldest_audit()
        if oldest is None or before is None or oldest - before >= -_MONTH:
            return
        cut = self._store.retention.cut_audit
        while await cut(before, now, self._days.audit, _CUT_RECORDS):
            await self._clock.sleep_until(self._clock.now() + _PAUSE)

    async def _step(self, project: str) -> bool:
        """Remove some jobs of a project. Return False if there are no more."""
        try:
            await self._store.archive.check(project)
            archived = False
        except ProjectArchived:
            archived = True
        period, now = (await self.rules()).find(project, archived=archived), self._clock.now()
        before = period.before(now)
        if before is None:
            return False
        found = await self._store.retention.list_ended(project, before, self._last, _STEP)
        for each in found:
            self._last = each  # first, so that a job whose removal fails does not stop the others
            await self._remove(project, each, period, now)
        return bool(found)

    async def _remove(
        self, project: str, job: EndedJob, period: RetentionPeriod, now: datetime
    ) -> None:
        name = ""
        if not job.removed:
            try:
                name = (await self._store.job(job.id)).name
                await self._jobs.remove(project, job.id, self._remove_files)
            except (RowNotFound, StaleVersion, StillAwaited, TooLate):
                # removed or retried meanwhile, with nodes that are not released, or awaited
                return
        purged = RemovedJob(
            job_id=job.id,
            project=project,
            name=name,
            ended_at=job.ended_at,
            removed_at=now,
            rule=period.rule,
            days=period.days,
        )
        if await self._store.retention.purge(purged):
            self._removed += 1
