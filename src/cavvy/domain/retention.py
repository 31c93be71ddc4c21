"""How long ended jobs and audit records are kept."""

from datetime import datetime, timedelta

from cavvy.domain.values import Struct

JOBS_SETTING = "retention.jobs_days"
AUDIT_SETTING = "retention.audit_days"


class RetentionDays(Struct, frozen=True, kw_only=True):
    """The settings: days for which ended jobs (0: forever) and audit records are kept."""

    jobs: int = 0
    audit: int = 3650


def subtract_days(now: datetime, days: int) -> datetime | None:
    """Return the time `days` before `now`, or None if this is before the first year."""
    try:
        return now - timedelta(days=days)
    except OverflowError:
        return None


class RetentionPeriod(Struct, frozen=True):
    """How many days ended jobs are kept, and where this number is set. 0 days mean forever."""

    days: int
    rule: str  # the setting, or the project whose policy sets it

    def before(self, now: datetime) -> datetime | None:
        """Return the time before which jobs must have ended to be removed, or None."""
        return subtract_days(now, self.days) if self.days else None


class EndedJob(Struct, frozen=True, kw_only=True):
    """A job that has ended. `removed` states whether a user has removed it, so that only its bill
    is left."""

    id: str
    ended_at: datetime
    removed: bool


class RemovedJob(Struct, frozen=True, kw_only=True):
    """An ended job that was removed because of its age."""

    job_id: str
    project: str
    name: str
    ended_at: datetime
    removed_at: datetime
    rule: str  # see RetentionPeriod
    days: int
