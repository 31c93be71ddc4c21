"""Computes from the attempts of an elastic job what it has measured itself: how fast it works on
each number of nodes, and what a change of this number costs. No I/O."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import TypeGuard

from cavvy.domain.jobs import Attempt
from cavvy.domain.values import Struct

Progress = Mapping[str, float | str]

# Work that has run for less is no measure of its speed: programs compile, and fill caches.
LEAST_RUN_S = 30.0
# What a change costs at least beside the start: the work saves a checkpoint, and ends.
_HANDOVER_S = 5.0


class SizeMeasures(Struct, frozen=True, kw_only=True):
    """What a job has measured: the work per second by number of nodes, the work that it has done
    and still has to do (None if it does not tell), and how many seconds a change of its size costs.
    The unit of work is a sample, or the whole work if the program only tells its fraction. `starts`
    are the seconds from the start of the program to its first work, by the attempt's number."""

    rates: Mapping[int, float]
    done: float = 0.0
    remaining: float | None = None
    resize_s: float = 0.0
    starts: Mapping[int, float] = {}


def read_work(progress: Progress) -> tuple[float, float] | None:
    """Return the work that is done and the whole work, or None if the program does not tell both.
    `done` and `total` count only as `cavvy.train` reports them, in samples: other programs may mean
    an epoch."""
    done, total = progress.get("done"), progress.get("total")
    if progress.get("unit") == "samples" and _is_number(done) and _is_number(total):
        return float(done), float(total)
    fraction = progress.get("fraction")
    if _is_number(fraction) and 0 <= float(fraction) <= 1:
        return float(fraction), 1.0
    return None


def measure(
    attempts: Sequence[Attempt], progress: Mapping[int, Progress], now: datetime
) -> SizeMeasures:
    """Return what the attempts of a job, oldest first, have measured. `progress` is what the first
    rank of each attempt has told last, by the attempt's number."""
    rates: dict[int, float] = {}
    starts: dict[int, float] = {}
    before, last = 0.0, None
    for attempt in attempts:
        told = progress.get(attempt.number, {})
        work = read_work(told)
        if work is None or attempt.running_at is None:
            continue
        last = work
        ran = ((attempt.finished_at or now) - attempt.running_at).total_seconds()
        rate = told.get("samples_per_s")
        if ran >= LEAST_RUN_S and work[0] > before:
            steady = float(rate) if _is_number(rate) and work[1] != 1.0 else 0.0
            mean = (work[0] - before) / ran
            rates[attempt.nodes] = steady or mean
            starts[attempt.number] = max(ran - (work[0] - before) / rates[attempt.nodes], 0.0)
        before = max(before, work[0])
    return SizeMeasures(
        rates=rates,
        done=before,
        remaining=None if last is None else max(last[1] - before, 0.0),
        resize_s=_find_gap(attempts) + (median(starts.values()) if starts else 0.0),
        starts=starts,
    )


def _find_gap(attempts: Sequence[Attempt]) -> float:
    """Return the seconds between the end of the work of an attempt that was moved and the begin of
    the next one; before the first move, those of the first start."""
    gaps = [
        (after.running_at - attempt.finished_at).total_seconds()
        for attempt, after in pairwise(attempts)
        if attempt.moved and attempt.finished_at is not None and after.running_at is not None
    ]
    if gaps:
        return max(median(gaps), 0.0)
    firsts = [
        (each.running_at - each.created_at).total_seconds()
        for each in attempts
        if each.running_at is not None
    ]
    return (firsts[0] if firsts else 0.0) + _HANDOVER_S


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
