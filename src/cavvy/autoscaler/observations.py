"""The facts that the autoscaler observes about a service at one moment, and the autoscaler's
decisions.
"""

from enum import StrEnum

from cavvy.domain.service_loads import BatchFit, PromptSums, TokenTimes
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct


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
