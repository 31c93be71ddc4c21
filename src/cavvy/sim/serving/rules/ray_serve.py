"""The autoscaler of Ray Serve."""

from math import ceil

from cavvy.domain.values import Struct, replace
from cavvy.sim.serving.history import LoadView, RuleState


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
