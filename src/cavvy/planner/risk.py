"""Estimates the cost of preemptions, and computes from measurements how often a task should save
and whether a checkpoint can be saved within a preemption notice.

The model assumes exponentially distributed failures, after each of which the run restarts (Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006, equation
13). If no rate was measured, the preemption rate is an assumed value, which is the same for all
locations and hours.

The interval of a task follows Daly's formula (`checkpoint_interval`). The loss rate is the market's
observed rate, mixed with a prior that counts as `PRIOR_NODE_HOURS` of observation: (losses + prior
x weight) / (observed node-hours + weight). The loss rate is the mean of a Poisson rate with a
conjugate Gamma prior.
"""

import math
from datetime import timedelta

from cavvy.domain.tasks import CheckpointPolicy, TaskSpec
from cavvy.domain.units import format_duration, format_memory
from cavvy.domain.values import Struct

# Preemptions per node and hour on spot capacity. 600 preemptions in 3,066 node-hours (0.196) were
# counted in the trace "preemption/4-node/aws-08-03-2023" (V100, three zones) published with Wu et
# al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024,
# github.com/skypilot-org/spot-traces. Single zones of that collection lie between 0.06 and 0.74 for
# GPUs and near 0.02 for CPUs of another cloud, so 0.2 is a cautious prior.
SPOT_PREEMPTIONS_PER_HOUR = 0.2

# The assumed time to write one checkpoint if the task states no interval.
CHECKPOINT_COST = timedelta(seconds=30)

# If the expected time of a run is more than this many times the time without preemptions, the run
# is treated as never finishing, because the formula grows without bound.
HOPELESS = 100.0


class InterruptedRun(Struct, frozen=True, kw_only=True):
    """The expected time and preemptions of a run that is interrupted and restarted."""

    wall_time: timedelta  # from the first launch to the end of the work, with all restarts
    preemptions: float


def checkpoint_interval(cost: timedelta, mtbf: timedelta) -> timedelta:
    """Return the interval between checkpoints at which a run is expected to lose the least time.

    `cost` is the time to write one checkpoint, `mtbf` the mean time between failures. If cost >=
    2·mtbf, the result is mtbf. Raises ValueError if `cost` or `mtbf` is not positive. Source: Daly
    2006 (above), equation 37; its first term is from Young, CACM 17 (1974).
    """
    delta, mean = cost.total_seconds(), mtbf.total_seconds()
    if delta <= 0 or mean <= 0:
        raise ValueError(
            "the cost of a checkpoint and the mean time between failures must be above 0"
        )
    if delta >= 2 * mean:
        return mtbf
    ratio = delta / (2 * mean)
    return timedelta(
        seconds=math.sqrt(2 * delta * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta
    )


def chosen_interval(
    checkpoint: CheckpointPolicy | None, per_hour: float
) -> tuple[timedelta | None, timedelta]:
    """Return the checkpoint interval of a task (None if the task never saves), and the time by
    which writing one checkpoint extends the run.

    If the task states an interval, the time for writing is 0, because the stated work already
    includes that time. If the task states no interval, the planner assumes that writing a
    checkpoint takes CHECKPOINT_COST. The returned interval is then the best interval for this
    writing time.
    """
    if checkpoint is None:
        return None, timedelta(0)
    if checkpoint.every:
        return checkpoint.every, timedelta(0)
    return checkpoint_interval(CHECKPOINT_COST, timedelta(hours=1 / per_hour)), CHECKPOINT_COST


def disturb(
    run_time: timedelta,
    *,
    start: timedelta,
    per_hour: float,
    every: timedelta | None,
    write: timedelta = timedelta(0),
) -> InterruptedRun | None:
    """Return the expected time of a run, and the expected number of its preemptions. Without
    preemptions, the run takes `run_time`; on average, there are `per_hour` preemptions in an hour.
    The result is None if the run is not expected to finish.

    Each attempt needs the time `start` before the work continues. A preemption loses the work since
    the last checkpoint, or all work if `every` is None. λ is the rate of preemptions. A segment is
    the work up to the next checkpoint, and the writing of this checkpoint; s is the length of a
    segment. The expected number of preemptions of a segment is exp(λs) - 1. The expected time of a
    segment is (1/λ + start)(exp(λs) - 1) (Daly 2006, equation 13).
    """
    run, rate = run_time.total_seconds(), per_hour / 3600
    if run == 0 or rate == 0:
        return InterruptedRun(wall_time=start + run_time, preemptions=0.0)
    segment = min(every.total_seconds(), run) if every else run
    exponent = rate * (segment + write.total_seconds())
    if exponent > math.log(HOPELESS):
        return None
    failures = math.expm1(exponent) * run / segment
    seconds = (1 / rate + start.total_seconds()) * failures
    if seconds > HOPELESS * max(run, start.total_seconds()):
        return None
    return InterruptedRun(wall_time=start + timedelta(seconds=seconds), preemptions=failures)


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
