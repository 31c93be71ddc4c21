"""A batch job and its state, in terms that all batch systems share."""

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
    """One job. Times in the future, in `start` and `end`, are estimates.

    `reason` describes to users why the job waits, what it is doing, or how it ended. `taken` means
    that the job ended because the batch system reclaimed its nodes. `cancelled` means that a person
    or Cavvy cancelled the job. `broke` means that the job failed by itself, and its log may explain
    the failure.
    """

    id: str
    name: str
    phase: BatchPhase
    reason: str = ""
    hosts: tuple[str, ...] = ()
    start: datetime | None = None
    end: datetime | None = None
    taken: bool = False
    cancelled: bool = False
    broke: bool = False


class SubmissionUnsure(TryAgain):
    """The submission failed, but the batch system may have accepted the job."""
