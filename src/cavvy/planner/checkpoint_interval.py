"""Computes from measurements how often a task should save, and whether a checkpoint can be saved
within a preemption notice.

The interval follows Daly's formula (`risk.checkpoint_interval`). The loss rate is the market's
observed rate, mixed with a prior that counts as `PRIOR_NODE_HOURS` of observation: (losses + prior
x weight) / (observed node-hours + weight). The loss rate is the mean of a Poisson rate with a
conjugate Gamma prior.
"""

from datetime import timedelta

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import format_duration, format_memory
from cavvy.domain.values import Struct
from cavvy.planner.risk import CHECKPOINT_COST, SPOT_PREEMPTIONS_PER_HOUR, checkpoint_interval

# 419 unexpected interruptions in 54 days of 16,384 GPUs, 8 per node: "The Llama 3 Herd of Models",
# 2024, table 5.
FAILURES_PER_NODE_HOUR = 419 / (54 * 24 * 16384 / 8)
# The upload rate of a node is assumed to be 1 Gbit/s until it is measured.
ASSUMED_BYTES_PER_S = 125e6
PRIOR_NODE_HOURS = 24.0  # the weight of a prior: one day of observations (assumed)
SHORTEST = timedelta(seconds=1)
_LONGEST_S = 3.2e10  # about a thousand years; longer times are replaced by this
SAME = 0.1  # if the interval changed by at most this share, the task is not notified


class NodeLosses(Struct, frozen=True, kw_only=True):
    """The observations of one market: nodes lost for any reason, and node-hours in operation."""

    lost: int = 0
    node_hours: float = 0.0


class CheckpointInterval(Struct, frozen=True, kw_only=True):
    """The interval at which a task should save, with the values from which the interval was
    computed.
    """

    every: timedelta
    cost: timedelta  # how long one checkpoint pauses the work
    per_hour: float  # expected losses of the whole gang per hour
    measured: bool  # whether `cost` was measured on the task; otherwise it is assumed


def loss_rate(losses: NodeLosses, *, spot: bool) -> float:
    """Return the expected losses per node and hour: the observed rate, mixed with the prior."""
    prior = SPOT_PREEMPTIONS_PER_HOUR if spot else FAILURES_PER_NODE_HOUR
    return (losses.lost + prior * PRIOR_NODE_HOURS) / (losses.node_hours + PRIOR_NODE_HOURS)


def make_save_interval(
    cost: timedelta | None, losses: NodeLosses, *, spot: bool, nodes: int
) -> CheckpointInterval:
    """Return the checkpoint interval with the least expected loss of time. `cost` is None if it was
    not measured yet.
    """
    per_hour = loss_rate(losses, spot=spot) * nodes
    known = cost if cost is not None else CHECKPOINT_COST
    known = max(known, timedelta(milliseconds=1))
    every = max(SHORTEST, checkpoint_interval(known, timedelta(hours=1 / per_hour)))
    return CheckpointInterval(every=every, cost=known, per_hour=per_hour, measured=cost is not None)


def is_news(old: timedelta | None, new: timedelta) -> bool:
    """Return whether the interval has changed enough to send the new interval to the task."""
    return old is None or abs(new - old) > SAME * old


class NoticeFit(Struct, frozen=True, kw_only=True):
    """The time needed to finish the current step and save a checkpoint, compared with the length of
    the preemption notice.
    """

    needed: timedelta
    notice: timedelta

    @property
    def fits(self) -> bool:
        return self.needed <= self.notice


def fit_notice(
    size: int, bytes_per_s: float, notice: timedelta, step: timedelta = timedelta(0)
) -> NoticeFit:
    """Return whether the notice is long enough for two things: to finish the current step, which
    takes at most `step`, and then to write `size` bytes. Raises ValueError if the bandwidth is not
    positive.
    """
    if bytes_per_s <= 0:
        raise ValueError("the bandwidth must be above 0")
    needed = step + timedelta(seconds=min(size / bytes_per_s, _LONGEST_S))
    return NoticeFit(needed=needed, notice=notice)


def fit_stated(task: TaskSpec, notice: timedelta) -> NoticeFit | None:
    """Compare the length of the notice with the time needed to save a checkpoint of the size that
    the task states. Returns None if the task states no size.
    """
    if task.checkpoint is None or task.checkpoint.size_mib is None:
        return None
    step = task.checkpoint.step or timedelta(0)
    return fit_notice(task.checkpoint.size_mib << 20, ASSUMED_BYTES_PER_S, notice, step)


def say_fit(task: TaskSpec, notice: timedelta | None) -> tuple[str, ...]:
    """Describe whether a checkpoint of the size that the task states can be saved within the
    notice. Returns () if the task states no size.

    `notice` is None if the market gives no notice.
    """
    fit = fit_stated(task, notice or timedelta(0))
    if fit is None or task.checkpoint is None or task.checkpoint.size_mib is None:
        return ()
    size, needed = format_memory(task.checkpoint.size_mib), format_duration(fit.needed)
    step = (
        f" and finishing a step of {format_duration(task.checkpoint.step)}"
        if task.checkpoint.step
        else ""
    )
    how = f"at an assumed 1 Gbit/s, saving a checkpoint of {size}{step} takes {needed}"
    if not step:
        how += " plus the current step, whose length is unknown (set `checkpoint.step`)"
    if notice is None:
        return (
            f"{how}; this market gives no preemption notice: work since the last checkpoint may be "
            "lost",
        )
    if fit.fits:
        return (f"{how}, which is less than the preemption notice of {format_duration(notice)}",)
    return (
        f"{how}; this is longer than the preemption notice of {format_duration(notice)}: work "
        "since the last checkpoint may be lost",
    )
