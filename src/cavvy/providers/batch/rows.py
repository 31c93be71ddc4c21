"""A job as its batch system shows it, in the words that all batch systems share."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

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
    place took its nodes back. `broke`: it ended by a failure of its own, of which its log may tell
    more.
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


class BatchQueue(Protocol):
    """A batch system. Every method raises TryAgain and Refused."""

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        """The jobs of the installation with this mark, those that ended a while ago included."""

    async def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs; those that are over already are no error."""

    async def accounted(self, job: str) -> BatchJobRow | None:
        """What is remembered of a job that `jobs` no longer tells of; None where nothing is."""
