"""Describes a batch job and its state in the same way for all batch systems, and parses host lists
in the notation of batch systems: "gpu[01-03,7],login" means gpu01, gpu02, gpu03, gpu7 and login.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import product

from cavvy.domain.values import Struct
from cavvy.providers.base import TryAgain

_PARTS = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_PIECES = re.compile(r"\[([^\]]*)\]|([^\[]+)")


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


def expand(text: str) -> Sequence[str]:
    """Return the host names, in the order of the list."""
    return [host for part in _PARTS.findall(text) for host in _expand(part)]


def _expand(part: str) -> Iterator[str]:
    choices = [
        list(_numbers(inside)) if inside else [plain] for inside, plain in _PIECES.findall(part)
    ]
    return ("".join(pieces) for pieces in product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if not dash:
            yield first
            continue
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
