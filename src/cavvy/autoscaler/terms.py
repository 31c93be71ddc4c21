"""The requirements of a service for the autoscaler, and the constants of the rule."""

from cavvy.domain.services import DEFAULT_AVAILABILITY, LatencyGoal, ReplicaRole, TargetKind
from cavvy.domain.values import Struct


class ScalingWeights(Struct, frozen=True, kw_only=True):
    """The constants of the rule. benchmarks/autoscaling.py measures each trace with constants that
    were chosen on other traces.
    """

    # the approximate time over which the average of arrivals is taken, and the time over which the
    # recent arrivals are counted to detect bursts
    slow_s: float = 150.0
    fast_s: float = 30.0
    # the recent arrivals are a burst if they exceed the average by this many standard deviations
    burst: float = 6.0
    # the period over which the unevenness of arrivals is measured, and the lengths of the steps
    uneven_s: float = 600.0
    short_s: int = 5
    long_s: int = 30
    # the assumed unevenness of a new service, and the number of counts that this assumption is
    # worth
    assumed_uneven: float = 4.0
    assumed_counts: float = 2.0
    # how strongly the used budget of late requests changes the accepted share of late requests, the
    # maximum of this share, and the period of the budget
    thrift: float = 1.5
    most_late: float = 0.8
    budget_s: float = 3600.0
    # the maximum number of excess late requests that count, as a multiple of the allowed ones
    debt: float = 3.0
    # how many minutes must agree before replicas end: see `count_agreeing`
    agree_min: float = 1.2
    most_agree_min: float = 5.0
    # how long a wait's formula must ask for a few more replicas before they start
    rise_s: float = 40.0


class ScalingTerms(Struct, frozen=True, kw_only=True):
    """The autoscaler's requirements and constants for one service.

    A request is on time if it waits at most `wait_s`; at least the share `on_time` of all requests
    should be on time. `target` is in the unit of its kind and has no effect with `QUEUE_WAIT`.
    `concurrency` is the number of requests that a replica can process at the same time. If so many
    requests wait that some would be late, there are enough replicas to process all of them within
    `drain_s`. After `idle_s` without a request, `least` replicas remain.

    `ttft` and `token_gap` are the objectives of a language model. Once its speed was measured,
    there are also enough replicas to meet them. Replicas with the `role` PREFILL only compute
    prompts, and those with the role DECODE only generate answers.

    `cold_start_s` and `service_s` are assumed until the first measurement. `availability` is the
    availability that the spot policy aims at.
    """

    kind: TargetKind = TargetKind.QUEUE_WAIT
    target: float = 1.0
    wait_s: float = 10.0
    on_time: float = 0.95
    concurrency: int = 1
    least: int = 0
    most: int = 1000
    drain_s: float = 30.0
    idle_s: float = 300.0
    cold_start_s: float = 60.0
    service_s: float = 1.0
    availability: float = DEFAULT_AVAILABILITY
    ttft: LatencyGoal | None = None
    token_gap: LatencyGoal | None = None
    role: ReplicaRole | None = None
    weights: ScalingWeights = ScalingWeights()

    @property
    def has_objectives(self) -> bool:
        return self.ttft is not None or self.token_gap is not None
