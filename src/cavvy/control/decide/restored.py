"""Compares a restored database with the gangs that the providers run. The restored database does
not record which gangs were started or ended after the backup was created.

Finds gangs at a provider that belong to no attempt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import Attempt, AttemptPhase, attempt_id
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct

# How many attempts a job may have made since the backup for their gangs to be recognised. Each
# restart of a job is an attempt, so the number covers a day of spot interruptions.
_LATER = 32
# After this long without an unknown gang, automatic garbage collection is complete again.
QUIET = timedelta(days=1)

_LEAST_AGE = timedelta(seconds=30)  # minimum time between the two observations


class JobNumber(Struct, frozen=True, kw_only=True):
    """Identifies an attempt by its job and its number."""

    job_id: str
    project: str
    job: str
    number: int


class UnknownGang(Struct, frozen=True, kw_only=True):
    """A gang that exists at a provider, but has no unfinished attempt in the database. `attempt` is
    set if the gang belongs to a job in the database. `rate` is the hourly cost of all nodes of the
    gang, if the provider reports it.
    """

    provider: str
    gang: str
    state: GangState
    nodes: int
    rate: HourlyRate | None
    attempt: JobNumber | None


class LostAttempt(Struct, frozen=True, kw_only=True):
    """An attempt that is unfinished in the database, but whose gang does not exist at the provider.
    The attempt is treated like an attempt whose nodes were lost.
    """

    provider: str
    gang: str
    attempt: JobNumber


class RestoreComparison(Struct, frozen=True, kw_only=True):
    """The differences between the providers' gangs and the gangs in the database. `found` is the
    number of gangs that are both at a provider and in the database.
    """

    unknown: Sequence[UnknownGang]
    lost: Sequence[LostAttempt]
    found: int
    # numbers that attempts since the backup have used, keyed by job ID
    used: Mapping[str, int]


def compare(
    seen: Iterable[tuple[str, GangSeen]],
    attempts: Mapping[str, tuple[Attempt, str]],
    silent: Iterable[str],
    later: Mapping[str, JobNumber],
) -> RestoreComparison:
    """Compare the gangs that providers report with the database.

    `attempts` maps the names of gangs to their attempts and the names of their jobs. `attempts`
    must contain all unfinished attempts, and the ended attempts whose gangs a provider reported.
    `silent` contains the providers that did not report all their gangs; the attempts of these
    providers' gangs are not considered lost. `later` are the names that `name_later` returned.
    """
    seen, silent = list(seen), frozenset(silent)
    running = [(provider, gang) for provider, gang in seen if gang.state is not GangState.ENDED]
    unfinished = {
        name: each for name, each in attempts.items() if each[0].phase is not AttemptPhase.ENDED
    }
    there = {gang.name for _, gang in running}
    used: dict[str, int] = {}
    for _, gang in seen:
        if gang.name not in attempts and (known := later.get(gang.name)):
            used[known.job_id] = max(known.number, used.get(known.job_id, 0))
    return RestoreComparison(
        unknown=[
            _describe(provider, gang, attempts, later)
            for provider, gang in running
            if gang.name not in unfinished
        ],
        lost=[
            LostAttempt(provider=attempt.offer.account, gang=name, attempt=_number(attempt, job))
            for name, (attempt, job) in sorted(unfinished.items())
            if name not in there and attempt.offer.account not in silent
        ],
        found=len(there & unfinished.keys()),
        used=used,
    )


def name_later(
    jobs: Iterable[JobNumber], name_gang: Callable[[str], str]
) -> Mapping[str, JobNumber]:
    """Return the names of the gangs that the jobs may have started since the backup. `jobs`
    contains each job with the number of its last attempt in the database.
    """
    return {
        name_gang(attempt_id(job.job_id, number)): JobNumber(
            job_id=job.job_id, project=job.project, job=job.job, number=number
        )
        for job in jobs
        for number in range(job.number + 1, job.number + 1 + _LATER)
    }


def is_settled(restored_at: datetime, now: datetime, unknown: int, silent: int) -> bool:
    """Return whether the server can stop treating the database as restored from a backup. For some
    time, all providers must have answered, and must not have reported an unknown gang.
    """
    return not unknown and not silent and now - restored_at >= QUIET


def _describe(
    provider: str,
    gang: GangSeen,
    attempts: Mapping[str, tuple[Attempt, str]],
    later: Mapping[str, JobNumber],
) -> UnknownGang:
    ended = attempts.get(gang.name)
    nodes = [node for node in gang.nodes if node.ended_at is None]
    rate = gang.rates[-1][1].times(len(nodes)) if gang.rates else None
    return UnknownGang(
        provider=provider,
        gang=gang.name,
        state=gang.state,
        nodes=len(nodes),
        rate=rate,
        attempt=_number(*ended) if ended else later.get(gang.name),
    )


def _number(attempt: Attempt, job: str) -> JobNumber:
    return JobNumber(job_id=attempt.job_id, project=attempt.project, job=job, number=attempt.number)


class OrphanGang(Struct, frozen=True, kw_only=True):
    """A gang at a provider that may be unwanted. `sure` means that two observations have found the
    gang unwanted.
    """

    provider: str
    gang: str
    state: GangState
    nodes: int
    why: str
    job_id: str | None = None
    sure: bool = False
    spared: bool = False  # the gang is removed only at a person's request
    removed: bool = False
    problem: str = ""


def is_orphan(
    seen: GangSeen,
    attempt: Attempt | None,
    now: datetime,
    *,
    first: datetime,
    visibility_delay: timedelta,
) -> bool:
    """Return whether a gang without an open attempt can be removed: two observations, sufficiently
    far apart in time, must have found the gang unwanted.

    `first` is the time of the earlier observation; if the gang is not in the database, the start of
    one of its nodes also counts as an observation.
    """
    started = [node.started_at for node in seen.nodes if node.started_at]
    oldest = min([first, *started]) if attempt is None else first
    return now - oldest >= max(_LEAST_AGE, visibility_delay)


def describe_gang(
    provider: str,
    seen: GangSeen,
    attempt: Attempt | None,
    *,
    sure: bool = False,
    restored_at: datetime | None = None,
) -> OrphanGang:
    """Return a readable description of the gang. `restored_at` is the time of the backup from which
    the database was restored, if the gang is kept because of this restore.
    """
    unknown = "not in the database"
    if restored_at is not None:
        unknown += f", which was restored at {restored_at:%Y-%m-%d %H:%M} UTC"
    return OrphanGang(
        provider=provider,
        gang=seen.name,
        state=seen.state,
        nodes=len(seen.nodes),
        why=unknown if attempt is None else f"attempt {attempt.number} has ended",
        job_id=attempt.job_id if attempt else None,
        sure=sure,
        spared=restored_at is not None,
    )
