"""Finds gangs at a provider that belong to no attempt."""

from datetime import datetime, timedelta

from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import Attempt
from cavvy.domain.values import Struct

_LEAST_AGE = timedelta(seconds=30)  # minimum time between the two observations


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
