"""The state of the autoscaler for a service between two decisions."""

from cavvy.autoscaler.cold_starts import ColdStart
from cavvy.autoscaler.load import LoadRecord
from cavvy.autoscaler.objectives import GoalEstimate
from cavvy.domain.service_loads import TokenTimes
from cavvy.domain.values import Struct, field
from cavvy.planner.spot.serving import SteadyRecord


class ScalingState(Struct, frozen=True, kw_only=True):
    """The autoscaler's record of one service. A program that stores the record can restart without
    losing the service's state.

    `began_s` is the time of the first decision, and `wanted` is the result of the last decision.
    `budget` is the number of requests that may still be late; it is negative if too many requests
    were late. `needs` contains a pair for each recorded minute, oldest first: the minute, and the
    number of replicas that were needed at the end of the minute. If the target is not a wait, the
    number is the highest in the minute. `idle_since_s` is the time when the service last became
    idle, or None if it is not idle. `cold_starts` are stored by market.
    `spot` is the record of the spot policy, for the markets `spot_markets`. `tokens` are sums over
    about the last hour's answers of a language model, and `goals` is what they say about the
    service's objectives. `higher_since_s` is the time since which the load needs a few more
    replicas than are wanted, or None.
    """

    began_s: float | None = None
    wanted: int | None = None
    load: LoadRecord = LoadRecord()
    budget: float = 0.0
    needs: tuple[tuple[int, int], ...] = ()
    idle_since_s: float | None = None
    cold_starts: dict[str, ColdStart] = field(default_factory=dict)
    spot: SteadyRecord | None = None
    spot_markets: tuple[str, ...] = ()
    tokens: TokenTimes = TokenTimes()
    goals: GoalEstimate | None = None
    higher_since_s: float | None = None
