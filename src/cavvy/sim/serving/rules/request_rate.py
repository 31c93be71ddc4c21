"""The rules that divide the requests per second by a target: SkyServe's and dstack's."""

from math import ceil

from cavvy.domain.values import Struct, replace
from cavvy.sim.serving.history import LoadView, RuleState


def _divide(rate: float, share: float, seen: LoadView) -> int:
    """Return the number of replicas that serve a request rate if each replica runs at this share of
    its maximum rate."""
    return ceil(rate * seen.service_s / (share * seen.slots) - 1e-9)


class SkyServeRule(Struct, frozen=True, kw_only=True):
    """SkyServe's request-rate autoscaler (skypilot 0.14.1, sky/serve/autoscalers.py).

    Every 20 s: wanted = ceil(requests per second over 60 s / target). The number of replicas grows
    once the rule has wanted a higher number for 300 s, and shrinks once the rule has wanted a lower
    number for 1200 s. If no replica exists, new replicas are added immediately. `target` is the
    share of a replica's maximum rate. While no replica is ready, SkyServe's load balancer answers
    503.
    """

    target: float = 0.7
    window_s: float = 60.0
    upscale_s: float = 300.0
    downscale_s: float = 1200.0
    least: int = 1
    interval_s: int = 20
    holds: bool = False

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        held, now_s = seen.held, seen.now_s
        rate = seen.history.rate(self.window_s)
        wanted = max(self.least, _divide(rate, self.target, seen))
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


class DstackRule(Struct, frozen=True, kw_only=True):
    """dstack's autoscaler (dstackai/dstack at 511c318, services/services/autoscalers.py).

    Every 15 s: wanted = ceil(requests per second over 60 s / target). After a change of the number
    of replicas, the autoscaler waits 300 s before it adds a replica, and 600 s before it removes a
    replica. If no replica exists, new replicas are added immediately. `target` is the share of a
    replica's maximum rate. While no replica is ready, dstack's gateway answers 503.
    """

    target: float = 0.7
    window_s: float = 60.0
    upscale_s: float = 300.0
    downscale_s: float = 600.0
    least: int = 1
    interval_s: int = 15
    holds: bool = False

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        held, now_s = seen.held, seen.now_s
        rate = seen.history.rate(self.window_s)
        wanted = max(self.least, _divide(rate, self.target, seen))
        since_s = now_s - state.scaled_s if state.scaled_s is not None else now_s
        if wanted == held or (
            held and since_s < (self.upscale_s if wanted > held else self.downscale_s)
        ):
            return held, state
        return wanted, replace(state, scaled_s=now_s)
