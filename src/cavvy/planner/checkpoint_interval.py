"""How often a task should save, and whether its checkpoint fits into a preemption notice, from
measurements.

The interval is Daly's (`risk.checkpoint_interval`). The rate is the market's own, mixed with a
prior that counts as a number of node-hours: a conjugate Gamma prior of a Poisson rate, whose mean
is (counted + prior x weight) / (observed + weight).
"""

from dataclasses import dataclass
from datetime import timedelta

from cavvy.domain.tasks import Task
from cavvy.domain.units import format_duration, format_memory
from cavvy.planner.risk import CHECKPOINT_COST, SPOT_PREEMPTIONS_PER_HOUR, checkpoint_interval

# 419 unexpected interruptions in 54 days of 16,384 GPUs, 8 to a node: "The Llama 3 Herd of Models",
# 2024, table 5.
FAILURES_PER_NODE_HOUR = 419 / (54 * 24 * 16384 / 8)
# The assumed upload rate of a node per second without a measurement: 1 Gbit/s.
ASSUMED_BYTES_PER_S = 125e6
PRIOR_NODE_HOURS = 24.0  # the assumed weight of a prior: as much as one day of observations
SHORTEST = timedelta(seconds=1)
_LONGEST_S = 3.2e10  # longer times than a thousand years are cut off
SAME = 0.1  # a new interval this close to the old one is not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLosses:
    """The observations of one market: nodes lost for any reason, and node-hours that ran."""

    lost: int = 0
    node_hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """How often to save and why."""

    every: timedelta
    cost: timedelta  # cost of one checkpoint to the work
    per_hour: float  # losses of the whole gang per hour
    measured: bool  # the cost was measured on the task, not assumed


def loss_rate(losses: NodeLosses, *, spot: bool) -> float:
    """Losses per node and hour."""
    prior = SPOT_PREEMPTIONS_PER_HOUR if spot else FAILURES_PER_NODE_HOUR
    return (losses.lost + prior * PRIOR_NODE_HOURS) / (losses.node_hours + PRIOR_NODE_HOURS)


def make_save_interval(
    cost: timedelta | None, losses: NodeLosses, *, spot: bool, nodes: int
) -> CheckpointInterval:
    """The interval with the least expected loss; `cost` None: not measured yet."""
    per_hour = loss_rate(losses, spot=spot) * nodes
    known = cost if cost is not None else CHECKPOINT_COST
    known = max(known, timedelta(milliseconds=1))
    every = max(SHORTEST, checkpoint_interval(known, timedelta(hours=1 / per_hour)))
    return CheckpointInterval(every=every, cost=known, per_hour=per_hour, measured=cost is not None)


def is_news(old: timedelta | None, new: timedelta) -> bool:
    """Whether to send the task the new interval."""
    return old is None or abs(new - old) > SAME * old


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeFit:
    """What must happen within a notice: the current step ends, and the state is written and made
    durable.
    """

    needed: timedelta
    notice: timedelta

    @property
    def fits(self) -> bool:
        return self.needed <= self.notice


def fit_notice(
    size: int, bytes_per_s: float, notice: timedelta, step: timedelta = timedelta(0)
) -> NoticeFit:
    """The time for the bytes at the bandwidth and for the current step, compared with the notice.
    Raises ValueError.
    """
    if bytes_per_s <= 0:
        raise ValueError("the bandwidth must be above 0")
    needed = step + timedelta(seconds=min(size / bytes_per_s, _LONGEST_S))
    return NoticeFit(needed=needed, notice=notice)


def fit_stated(task: Task, notice: timedelta) -> NoticeFit | None:
    """Whether a checkpoint of the task's stated size fits into a notice; None without a stated
    size.
    """
    if task.checkpoint is None or task.checkpoint.size_mib is None:
        return None
    step = task.checkpoint.step or timedelta(0)
    return fit_notice(task.checkpoint.size_mib << 20, ASSUMED_BYTES_PER_S, notice, step)


def say_fit(task: Task, notice: timedelta | None) -> tuple[str, ...]:
    """Whether a checkpoint of the stated size can be made durable within a notice; () without a
    stated size.

    `notice` None: its length is unknown.
    """
    fit = fit_stated(task, notice or timedelta(0))
    if fit is None or task.checkpoint is None or task.checkpoint.size_mib is None:
        return ()
    size, needed = format_memory(task.checkpoint.size_mib), format_duration(fit.needed)
    step = f" and a step of {format_duration(task.checkpoint.step)}" if task.checkpoint.step else ""
    how = f"a checkpoint of {size} at 1 Gbit/s (assumed){step} takes {needed}"
    if not step:
        how += " plus the current step, whose length is unknown (set `checkpoint.step`)"
    if notice is None:
        return (
            f"{how}; this market gives no preemption notice: work since the last checkpoint may be "
            "lost",
        )
    if fit.fits:
        return (f"{how}: within the notice of {format_duration(notice)}",)
    return (
        f"{how}, longer than the notice of {format_duration(notice)}: work since the last "
        "checkpoint may be lost",
    )
