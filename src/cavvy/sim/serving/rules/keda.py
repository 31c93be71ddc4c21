"""KEDA's HTTP add-on with the Horizontal Pod Autoscaler of Kubernetes."""

from math import ceil

from cavvy.domain.values import Struct, replace
from cavvy.sim.serving.history import LoadView, RuleState


class KedaRule(Struct, frozen=True, kw_only=True):
    """KEDA's HTTP add-on (kedacore/http-add-on at 59b2f6a) reports the number of requests in the
    service to the Horizontal Pod Autoscaler (kubernetes, pkg/controller/podautoscaler, with the
    defaults of autoscaling/v2).

    Every 15 s: wanted = ceil(requests / target); a deviation of up to 10 % changes nothing. In one
    step, the number of replicas at most doubles or grows by four, whichever is more. When replicas
    are removed, as many remain as the highest number that was wanted in the last 300 s. KEDA itself
    adds the first replica, and removes the last replica 300 s after the last request.
    """

    target: float = 0.7
    tolerance: float = 0.1
    stabilisation_s: float = 300.0
    cooldown_s: float = 300.0
    metric_s: float = 1.0
    interval_s: int = 15
    holds: bool = True

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        target, held = self.target * seen.slots, seen.held
        load = seen.history.concurrency(self.metric_s)
        busy_s = seen.now_s if seen.history.concurrency(self.interval_s) else state.busy_s
        state = replace(state, busy_s=busy_s)
        if not held:
            return int(busy_s == seen.now_s), state
        if seen.now_s - busy_s >= self.cooldown_s:
            return 0, state
        wanted = held
        if abs(load / (target * held) - 1) > self.tolerance:
            wanted = max(1, min(ceil(load / target), max(2 * held, held + 4)))
        votes = tuple(each for each in state.votes if each[0] > seen.now_s - self.stabilisation_s)
        votes = (*votes, (seen.now_s, wanted))
        if wanted < held:
            wanted = min(held, max(count for _, count in votes))
        return wanted, replace(state, votes=votes)
