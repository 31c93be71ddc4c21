"""Estimates the cost of preemptions and the best checkpoint interval.

The model assumes exponentially distributed failures, after each of which the run restarts
(Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22,
2006, equation 13). The preemption rate is an assumed value, which is the same for all locations
and hours.
"""

import math
from datetime import timedelta

from cavvy.domain.tasks import CheckpointPolicy
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
