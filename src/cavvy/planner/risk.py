"""The expected cost of preemptions, and how often to write a checkpoint.

The model is exponential failures with restart: J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 22 (2006), equation 13. The rate is a prior, equal for
all locations and hours.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

from cavvy.domain.tasks import CheckpointPolicy

# Preemptions per node and hour on spot capacity. 600 preemptions in 3,066 node-hours (0.196) were
# counted in the trace "preemption/4-node/aws-08-03-2023" (V100, three zones) published with Wu et
# al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024,
# github.com/skypilot-org/spot-traces. Single zones of that collection lie between 0.06 and 0.74 for
# GPUs and near 0.02 for CPUs of another cloud: a cautious prior.
SPOT_PREEMPTIONS_PER_HOUR = 0.2

# The assumed cost of one checkpoint if the task states no interval.
CHECKPOINT_COST = timedelta(seconds=30)

# A job that takes more than this many times the undisturbed run counts as never finishing; the
# formula grows without bound.
HOPELESS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRun:
    """The expected course of a run with interruptions."""

    wall_time: timedelta  # includes the first start
    preemptions: float


def checkpoint_interval(cost: timedelta, mtbf: timedelta) -> timedelta:
    """The work between two checkpoints that loses least: Daly's estimate, sqrt(2·cost·mtbf)·(1 +
    ...) - cost.

    `cost` is the time to write one, `mtbf` the mean time between failures; from cost >= 2·mtbf on
    it is mtbf. Source: Daly 2006 (above), equation 37; its first term is J. W. Young, CACM 17
    (1974).
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
    """The interval at which a task checkpoints (None: never), and what writing one adds to the run.

    A stated interval is part of the task: its cost is inside the stated work. Without one, the best
    interval for CHECKPOINT_COST is assumed.
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
    """The expected course of `run_time` of work that is preempted `per_hour` times an hour; None:
    it never finishes.

    Each attempt needs `start` before work continues. Work since the last checkpoint is lost;
    `every` None loses all. With rate λ a segment s (work and the writing of its checkpoint) takes
    (1/λ + start)(exp(λs) - 1) in expectation, its failures being exp(λs) - 1: Daly 2006, equation
    13.
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
