"""The inputs and results of the autoscaler's rule: the requirements of a service, the constants of
the rule, the facts observed at one moment, and the decisions."""

from enum import StrEnum

from cavvy.capabilities.serving.loads import BatchFit, PromptSums, TokenTimes
from cavvy.domain.services import DEFAULT_AVAILABILITY, LatencyGoal, ReplicaRole, TargetKind
from cavvy.domain.units import HourlyRate
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


class MarketObservation(Struct, frozen=True, kw_only=True):
    """The replicas of a service in one market.

    `boot_s` is the usual time from the launch of a machine until the machine can start a program.
    `starting_s` contains the age of each starting replica, oldest first, and `ready_s` the age of
    each ready replica. `lost` and `refused` are the numbers of lost replicas and refused launches
    since the last decision. `cold_starts_s` contains the cold starts that have ended since the last
    decision.
    """

    name: str
    region: str = ""
    spot: bool = False
    rate: HourlyRate = HourlyRate(0)
    boot_s: float = 0.0
    starting_s: tuple[float, ...] = ()
    ready_s: tuple[float, ...] = ()
    lost: int = 0
    refused: int = 0
    cold_starts_s: tuple[float, ...] = ()

    @property
    def held(self) -> int:
        return len(self.starting_s) + len(self.ready_s)


class ServiceObservation(Struct, frozen=True, kw_only=True):
    """The load of a service and its replicas.

    `arrivals` contains the number of requests that arrived in each second since the last decision,
    oldest first. `started` is the number of requests that replicas have started to process since
    the last decision, and `late` is the number of these requests that waited too long; with
    objectives for tokens, those of `tokens` count instead. `completed`
    is the number of requests that ended, and `completed_s` is their total service time in seconds.
    Replicas are serving `in_flight` requests, on which they have spent `in_flight_s` seconds in
    total so far. `backlog` requests wait. `reading` is the mean of the GPU utilisation or of the
    metric over the ready replicas. `batch` is the measured time of a batch. It is None if the
    gateway does not join requests to batches, or has not measured a batch yet. `tokens` are the
    sums over the answers of a language model since the last decision. `prompts` are sums over the
    requests that arrived or ended since the last decision, and `backlog_size` is the number of
    tokens in the prompts of those that wait.
    """

    now_s: float
    arrivals: tuple[int, ...] = ()
    started: int = 0
    late: int = 0
    completed: int = 0
    completed_s: float = 0.0
    in_flight: int = 0
    in_flight_s: float = 0.0
    backlog: int = 0
    reading: float | None = None
    batch: BatchFit | None = None
    tokens: TokenTimes = TokenTimes()
    prompts: PromptSums = PromptSums()
    backlog_size: float = 0.0
    markets: tuple[MarketObservation, ...] = ()

    @property
    def present(self) -> int:
        """The number of requests that run or wait."""
        return self.in_flight + self.backlog

    @property
    def ready(self) -> int:
        return sum(len(market.ready_s) for market in self.markets)

    @property
    def held(self) -> int:
        return sum(market.held for market in self.markets)


class ScaleReason(StrEnum):
    """The reason for the number of replicas that the service gets."""

    LOAD = "load"  # the average load needs the replicas
    EXPECTED = "expected"  # a burst that came again and again is due
    BURST = "burst"  # arrivals exceed their average by more than chance explains
    OBJECTIVE = "objective"  # answers would miss an objective without them
    BACKLOG = "backlog"  # waiting requests would be late without them
    HELD = "held"  # fewer replicas would be enough now, but not in each of the last minutes
    IDLE = "idle"  # no request arrived for a while
    LEAST = "least"  # the service's minimum is reached
    MOST = "most"  # the service's maximum is reached


class ScalingDecision(Struct, frozen=True, kw_only=True):
    """The wanted number of replicas, the reason for this number, and the wanted number of replicas
    in each market. The markets have the same order as in the observation. The markets may have more
    replicas than `wanted`: spares, and on-demand replicas while spot replicas start.
    """

    wanted: int
    reason: ScaleReason
    placement: tuple[int, ...]
