"""The rules of Knative's Pod Autoscaler (KPA) and of AIBrix's autoscaler, which is derived from
KPA."""

from math import ceil, floor

from cavvy.domain.values import Struct, replace
from cavvy.sim.serving.history import LoadView, RuleState


class KnativeRule(Struct, frozen=True, kw_only=True):
    """Knative's Pod Autoscaler (knative/serving, pkg/autoscaler/scaling/autoscaler.go at 98e5ef9).

    Every 2 s: wanted = ceil(mean concurrency over 60 s / target), target = 0.7 of the slots of a
    replica. If the number computed over 6 s is at least twice the number of ready replicas, the
    rule panics. During a panic, the rule uses the higher of two numbers, computed from the last 6 s
    and from the last 60 s, and never removes replicas. The panic ends when the condition for a
    panic has not been met for 60 s. The result is the highest number of the last `delay_s` seconds.
    After a window and further 30 s without load, the result is 0.
    """

    target: float = 0.7
    stable_s: float = 60.0
    panic_share: float = 0.1
    panic_at: float = 2.0
    most_down: float = 2.0
    most_up: float = 1000.0
    delay_s: float = 0.0
    grace_s: float = 30.0
    interval_s: int = 2
    holds: bool = True

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        ready = max(1, seen.ready)
        stable = self._count(seen, self.stable_s)
        panicked = self._count(seen, self.stable_s * self.panic_share)
        busy_s = seen.now_s if seen.history.concurrency(self.stable_s) else state.busy_s
        panic_s = seen.now_s if panicked / ready >= self.panic_at else state.panic_s
        peak, wanted = state.peak, stable
        if panic_s is not None and seen.now_s - panic_s > self.stable_s:
            panic_s, peak = None, 0
        if panic_s is not None:
            peak = wanted = max(peak, stable, panicked)
        votes = tuple(each for each in state.votes if each[0] > seen.now_s - self.delay_s)
        votes = (*votes, (seen.now_s, wanted)) if self.delay_s else ()
        wanted = max((count for _, count in votes), default=wanted)
        if not wanted and seen.now_s - busy_s < self.grace_s:
            wanted = min(1, seen.held)
        return wanted, replace(state, votes=votes, peak=peak, panic_s=panic_s, busy_s=busy_s)

    def _count(self, seen: LoadView, window_s: float) -> int:
        ready = max(1, seen.ready)
        wanted = ceil(seen.history.concurrency(window_s) / (self.target * seen.slots))
        return min(ceil(ready * self.most_up), max(floor(ready / self.most_down), wanted))


class AibrixRule(Struct, frozen=True, kw_only=True):
    """AIBrix's autoscaler (vllm-project/aibrix, pkg/controller/podautoscaler at e3e10f9).

    The rule is like Knative's, with windows of 180 s and 60 s, and one decision can at most double
    the number of ready replicas. A change of up to 10 % is ignored, replicas are removed only 300 s
    after they were last needed, and one replica always remains.
    """

    target: float = 0.7
    stable_s: float = 180.0
    panic_s: float = 60.0
    panic_at: float = 2.0
    most_up: float = 2.0
    tolerance: float = 0.1
    cooldown_s: float = 300.0
    interval_s: int = 10
    holds: bool = True

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        ready, held = max(1, seen.ready), max(1, seen.held)
        target = self.target * seen.slots
        stable_load = seen.history.concurrency(self.stable_s)
        panic_load = seen.history.concurrency(self.panic_s)
        panicked = ceil(panic_load / target) / ready >= self.panic_at
        panic_s = seen.now_s if panicked else state.panic_s
        if panic_s is not None and seen.now_s - panic_s > self.stable_s:
            panic_s = None
        load = max(stable_load, panic_load) if panic_s is not None else stable_load
        wanted = min(ceil(load / target), ceil(ready * self.most_up))
        if abs(load / (target * held) - 1) <= self.tolerance:
            wanted = held
        if panic_s is not None:
            wanted = max(wanted, seen.held)
        votes = tuple(each for each in state.votes if each[0] > seen.now_s - self.cooldown_s)
        votes = (*votes, (seen.now_s, wanted))
        if wanted < seen.held:
            wanted = min(seen.held, max(count for _, count in votes))
        return max(1, wanted), replace(state, votes=votes, panic_s=panic_s)
