"""A job's state, in terms that all batch systems share."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cavvy.providers.base import TryAgain


class BatchPhase(StrEnum):
    """How far a job is."""

    WAITS = "waits"
    BEGINS = "begins"
    WORKS = "works"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobRow:
    """One job. `start` and `end` are expected times where they lie ahead.

    `reason`: why it waits, what it does, or how it ended, for people. `taken`: it ended because the
    batch system took its nodes back. `broke`: it ended by a failure of its own, which its log may
    explain.
    """

    id: str
    name: str
    phase: BatchPhase
    reason: str = ""
    hosts: tuple[str, ...] = ()
    start: datetime | None = None
    end: datetime | None = None
    taken: bool = False
    broke: bool = False


class SubmissionUnsure(TryAgain):
    """The job may have been submitted."""
