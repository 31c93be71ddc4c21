"""What follows from the measured checkpoints of a job: how often it saves them, and a warning if
the provider's notice is too short for one.
"""

from datetime import datetime, timedelta

from cavvy.control.agents.reports import ReportOutcome, step_of, tell
from cavvy.domain.jobs import Attempt
from cavvy.domain.offers import Purchase
from cavvy.domain.units import format_duration
from cavvy.domain.values import replace
from cavvy.planner.risk import CheckpointInterval, fit_notice, is_news


def change_interval(report: ReportOutcome, best: CheckpointInterval | None, now: datetime) -> None:
    """Change the checkpoint interval if the best one is clearly better than the current one."""
    if best is None or not is_news(report.attempt.checkpoint_every, best.every):
        return
    report.attempt = replace(report.attempt, checkpoint_every=best.every)
    cost = f"each {'takes' if best.measured else 'is assumed to take'} {format_duration(best.cost)}"
    often = (
        "the job is expected to lose a node in this market about every "
        f"{format_duration(timedelta(hours=1 / best.per_hour))}"
    )
    text = f"saving a checkpoint every {format_duration(best.every)}: {cost}; {often}"
    tell(report, now, "pace", text)


def warn_of_size(
    report: ReportOutcome, before: Attempt, notice: timedelta | None, now: datetime
) -> None:
    """Report that the provider's notice is too short to save a checkpoint of the measured size.
    The event is recorded only once, after the first measurement; `before` is the attempt as it was
    before the report.
    """
    attempt = report.attempt
    if attempt.checkpoint_rate is None or before.checkpoint_rate is not None or notice is None:
        return
    step = step_of(report.job, report.node)
    fit = fit_notice(attempt.checkpoint_bytes, attempt.checkpoint_rate, notice, step)
    if attempt.offer.purchase is Purchase.SPOT and not fit.fits:
        took = f"this checkpoint took {format_duration(fit.needed - step)}"
        took += f" after a step of {format_duration(step)}" if step else ""
        text = f"{took}, and {attempt.offer.provider} gives "
        text += (
            f"only {format_duration(notice)} of notice: a checkpoint that is not complete when "
            "the node ends is lost"
        )
        tell(report, now, "unsafe", text)
