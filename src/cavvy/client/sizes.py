"""The sizes that a job has had over time, and what each change of size or of a node has cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client.wire import AttemptView, JobDetail

_HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class SizeSpan:
    """One attempt that has run: on how many nodes, for how long, and what its start has cost.

    `waited` is the time from the end of the work before until the programs of this attempt were
    started or went on, without the steps that they repeat; None for the first attempt. `kept` nodes
    of the attempt before have waited meanwhile, and `wait_micros` is what all nodes of this attempt
    cost until the work ran, in micro-dollars, at the attempt's price. `speed` is what the program
    has told last, in samples per second, None if it told no speed.
    """

    number: int
    nodes: int
    began: datetime
    ran: timedelta
    waited: timedelta | None
    kept: int
    wait_micros: int
    speed: float | None = None

    @property
    def change(self) -> str:
        """What has changed, compared with the attempt before: "start", "repair" or "new nodes"."""
        if self.waited is None:
            return "start"
        if self.kept:
            return f"{self.nodes - self.kept} of {self.nodes} replaced"
        return "new nodes"


def list_spans(job: "JobDetail", now: datetime) -> Sequence[SizeSpan]:
    """Return the sizes of a job on several nodes, or of one that may have several, oldest first.
    Attempts whose work has not run are left out, since the job waited during them."""
    spans: list[SizeSpan] = []
    before: AttemptView | None = None
    for attempt in job.attempts:
        if attempt.running_at is None:
            continue
        spans.append(_make_span(attempt, before, now))
        before = attempt
    several = any(each.nodes > 1 for each in spans)
    return spans if several and len(spans) > 1 else ()


def _make_span(attempt: "AttemptView", before: "AttemptView | None", now: datetime) -> SizeSpan:
    assert attempt.running_at is not None
    end, began, nodes = _find_end(attempt, now), attempt.running_at, len(attempt.nodes)
    rate, kept, waited = attempt.rate_micros_per_hour, 0, None
    asked = attempt.launched_at or attempt.created_at
    cost = nodes * rate * max(began - asked, timedelta(0)) / _HOUR
    if before is not None:
        stopped = _find_end(before, now)
        waited = max(began - stopped, timedelta(0))
        if attempt.repairs and before.gang.partition("@")[0] == attempt.gang.partition("@")[0]:
            kept = nodes - len(attempt.repairs)
            cost += kept * rate * max(asked - stopped, timedelta(0)) / _HOUR
    return SizeSpan(
        number=attempt.number,
        nodes=nodes,
        began=began,
        ran=max(end - began, timedelta(0)),
        waited=waited,
        kept=kept,
        wait_micros=round(cost),
        speed=_find_speed(attempt),
    )


def _find_speed(attempt: "AttemptView") -> float | None:
    told = [each.progress.get("samples_per_s") for each in attempt.nodes if each.rank == 0]
    return next((float(each) for each in told if isinstance(each, int | float)), None)


def _find_end(attempt: "AttemptView", now: datetime) -> datetime:
    """Return when the work of an attempt ended, or `now`."""
    ends = [node.exited_at for node in attempt.nodes if node.exited_at is not None]
    whole = len(ends) == len(attempt.nodes)
    return attempt.finished_at or (max(ends) if ends and whole else attempt.ended_at) or now
