"""A job's state, in terms that all batch systems share."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cavvy.providers.base import TryAgain


class BatchPhase(StrEnum):
    """The state of a job."""

    WAITS = "waits"
    BEGINS = "begins"
    WORKS = "works"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobRow:
    """One job. `start` and `end` are expected times if they are in the future.

    `reason`: why it waits, what it does, or how it ended, for people. `taken`: it ended because the
    batch system reclaimed its nodes. `broke`: it failed by itself, and its log may explain why.
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
