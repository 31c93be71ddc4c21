"""Describes a batch job and its state in the same way for all batch systems."""

from datetime import datetime
from enum import StrEnum

from cavvy.domain.values import Struct
from cavvy.providers.base import TryAgain


class BatchPhase(StrEnum):
    """The state of a job."""

    WAITS = "waits"
    BEGINS = "begins"
    WORKS = "works"
    OVER = "over"


class BatchJobRow(Struct, frozen=True, kw_only=True):
    """One job. If `start` or `end` is in the future, the time is an estimate.

    `reason` tells users why the job waits, what it is doing, or how it ended. `taken` means that
    the job ended because the batch system reclaimed the job's nodes. `cancelled` means that a
    person or Cavvy cancelled the job. `broke` means that the job's own program failed, and that the
    job's log may contain the cause.
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
    """Raised if the submission failed but the batch system may have accepted the job."""
