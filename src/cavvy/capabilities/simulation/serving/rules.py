"""The scaling rules of other systems, as simplified re-implementations with the constants of their
sources, and the load of a simulated service, second by second, as these rules read it. Each rule is
a pure function of a state and a view.
"""

from collections.abc import Mapping
from math import ceil, floor
from typing import NamedTuple, Protocol

from cavvy.domain.values import Struct, replace


class LoadHistory:
    """Sums of the arrivals and of the requests in the service, so that a mean over any period takes
    two look-ups.
    """

    def __init__(self) -> None:
        self._arrivals = [0]
        self._requests = [0]

    def add(self, arrived: int, requests: int) -> None:
        """Add the counts of one second. `arrived` is the number of arrivals since the beginning,
        and `requests` is the number of requests that wait or are being processed now.
        """
        self._arrivals.append(arrived)
        self._requests.append(self._requests[-1] + requests)

    def rate(self, window_s: float) -> float:
        """Return the mean number of arrivals per second."""
        return self._mean(self._arrivals, window_s)

    def concurrency(self, window_s: float) -> float:
        """Return the mean number of requests that wait or are being processed."""
        return self._mean(self._requests, window_s)

    def _mean(self, sums: list[int], window_s: float) -> float:
        seconds = min(len(sums) - 1, max(1, round(window_s)))
        return (sums[-1] - sums[-1 - seconds]) / seconds if seconds else 0.0


class LoadView(NamedTuple):
    """The inputs of a scaling rule. `slots` is the number of requests that a replica can process at
    the same time. `service_s` is the true mean service time. Rules that count requests per second
    compute their target from this time.
    """

    now_s: float
    ready: int
    starting: int
    history: LoadHistory
    slots: int
    service_s: float

    @property
    def held(self) -> int:
        return self.ready + self.starting


class RuleState(Struct, frozen=True, kw_only=True):
    """The state of the rules between decisions. No rule uses all of the fields.

    `votes` contains (time, replicas) of past decisions. `since_s` is the time at which the rule
    began to want more or fewer replicas. `panic_s` is the last time at which there was a reason to
    panic.
    """

    votes: tuple[tuple[float, int], ...] = ()
    peak: int = 0
    panic_s: float | None = None
    grow_since_s: float | None = None
    shrink_since_s: float | None = None
    scaled_s: float | None = None
    busy_s: float = 0.0


class ScalingRule(Protocol):
    """A rule by which another system sets the number of replicas. `holds` is true if the system's
    gateway queues requests while no replica is ready, and false if the gateway answers 503.
    """

    @property
    def interval_s(self) -> int: ...

    @property
    def holds(self) -> bool: ...

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        """Return the wanted number of replicas and the next state."""
        ...


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


class RayServeRule(Struct, frozen=True, kw_only=True):
    """Ray Serve's policy (ray 2.60.0, serve/autoscaling_policy.py, replica_queue_length policy).

    wanted = ceil(mean requests over 30 s / target). The number of replicas grows once the rule has
    wanted a higher number for 30 s without a break, and shrinks once the rule has wanted a lower
    number for 600 s. The last replica is removed only in a step that removes no other replica. If
    no replica exists, new replicas are added immediately. Ray decides every 0.1 s with values that
    arrive every 10 s; this rule decides every 2 s.
    """

    target: float = 0.4  # 2 of the 5 requests that a replica takes by default
    look_back_s: float = 30.0
    upscale_s: float = 30.0
    downscale_s: float = 600.0
    interval_s: int = 2
    holds: bool = True

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        held, now_s = seen.held, seen.now_s
        load = seen.history.concurrency(self.look_back_s)
        wanted = ceil(load / (self.target * seen.slots))
        if not held:
            return wanted, RuleState()
        if not wanted and held > 1:
            wanted = 1
        if wanted > held:
            since_s = now_s if state.grow_since_s is None else state.grow_since_s
            if now_s - since_s >= self.upscale_s:
                return wanted, RuleState()
            return held, replace(state, grow_since_s=since_s, shrink_since_s=None)
        if wanted < held:
            since_s = now_s if state.shrink_since_s is None else state.shrink_since_s
            if now_s - since_s >= self.downscale_s:
                return wanted, RuleState()
            return held, replace(state, shrink_since_s=since_s, grow_since_s=None)
        return held, RuleState()


class RequestRateRule(Struct, frozen=True, kw_only=True):
    """What the rules by request rate share. `target` is the share of a replica's maximum rate."""

    target: float = 0.7
    window_s: float = 60.0
    upscale_s: float = 300.0
    least: int = 1
    holds: bool = False

    def wanted(self, seen: LoadView) -> int:
        """Return the number of replicas that serve the request rate."""
        rate = seen.history.rate(self.window_s)
        return max(self.least, ceil(rate * seen.service_s / (self.target * seen.slots) - 1e-9))


class SkyServeRule(RequestRateRule, frozen=True, kw_only=True):
    """SkyServe's request-rate autoscaler (skypilot 0.14.1, sky/serve/autoscalers.py).

    Every 20 s: wanted = ceil(requests per second over 60 s / target). The number of replicas grows
    once the rule has wanted a higher number for 300 s, and shrinks once the rule has wanted a lower
    number for 1200 s. If no replica exists, new replicas are added immediately. `target` is the
    share of a replica's maximum rate. While no replica is ready, SkyServe's load balancer answers
    503.
    """

    downscale_s: float = 1200.0
    interval_s: int = 20

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        held, now_s = seen.held, seen.now_s
        wanted = self.wanted(seen)
        if not held:
            return wanted, RuleState()
        grow_s = shrink_s = None
        if wanted > held:
            grow_s = now_s if state.grow_since_s is None else state.grow_since_s
        if wanted < held:
            shrink_s = now_s if state.shrink_since_s is None else state.shrink_since_s
        due = (grow_s is not None and now_s - grow_s >= self.upscale_s) or (
            shrink_s is not None and now_s - shrink_s >= self.downscale_s
        )
        if due:
            return wanted, RuleState()
        return held, replace(state, grow_since_s=grow_s, shrink_since_s=shrink_s)


class DstackRule(RequestRateRule, frozen=True, kw_only=True):
    """dstack's autoscaler (dstackai/dstack at 511c318, services/services/autoscalers.py).

    Every 15 s: wanted = ceil(requests per second over 60 s / target). After a change of the number
    of replicas, the autoscaler waits 300 s before it adds a replica, and 600 s before it removes a
    replica. If no replica exists, new replicas are added immediately. `target` is the share of a
    replica's maximum rate. While no replica is ready, dstack's gateway answers 503.
    """

    downscale_s: float = 600.0
    interval_s: int = 15

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        held, now_s = seen.held, seen.now_s
        wanted = self.wanted(seen)
        since_s = now_s - state.scaled_s if state.scaled_s is not None else now_s
        if wanted == held or (
            held and since_s < (self.upscale_s if wanted > held else self.downscale_s)
        ):
            return held, state
        return wanted, replace(state, scaled_s=now_s)


# each with the default parameters of its system
RULES: Mapping[str, ScalingRule] = {
    "knative": KnativeRule(),
    "keda": KedaRule(),
    "ray-serve": RayServeRule(),
    "skyserve": SkyServeRule(),
    "dstack": DstackRule(),
    "aibrix": AibrixRule(),
}
