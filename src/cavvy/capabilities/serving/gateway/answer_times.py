"""The times of streamed answers, which the autoscaler compares with a service's objectives."""

from math import inf
from operator import add

from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.capabilities.serving.loads import TokenTimes

_LEAST_SHARE = 10  # a tenth of an answer's time is at least spent on tokens, not on prompts


class AnswerTimes:
    """The times of the streamed answers of a service; see `TokenTimes`."""

    def __init__(self, ttft_s: float = inf, gap_s: float = inf) -> None:
        self.limits_s = (ttft_s, gap_s)  # that answers should not exceed
        self._sums = [0.0] * len(TokenTimes.__struct_fields__)

    def add(self, prompt: int, completion: int, first: "FirstToken", now: float) -> None:
        """Add an answer that has ended, and that had at least one token."""
        ttft_s, limit_s = self.limits_s
        x, y = float(prompt), first.taken_s
        late = first.after_s > ttft_s
        gap: tuple[float, ...] = (0.0,) * 8
        if completion > 1 and now > first.at:
            taken_s, work, n = now - first.at, first.work, completion - 1.0
            late = late or taken_s / n > limit_s
            # the harmonic mean: the divided time of the replica advances by dt / running
            r = taken_s / max(work.share_s(first.mark, now), 1e-9)
            others_s = work.count_prompts_s(now) - first.prompts_s
            g = max(taken_s - others_s, taken_s / _LEAST_SHARE) / n
            gap = (n, n * r, n * g, n * r * r, n * r * g, n * g * g, 1.0, 1 / n)
        new = (1.0, completion, x, y, x * x, x * y, y * y, *gap, float(late))
        self._sums = list(map(add, self._sums, new))

    def describe(self) -> TokenTimes:
        return TokenTimes(**dict(zip(TokenTimes.__struct_fields__, self._sums, strict=True)))


class FirstToken:
    """The first token of an answer. `taken_s` is the time in which the replica computed it, and
    `after_s` the time since the request arrived. `mark` and `prompts_s` are the divided time of the
    replica and the time in which it had prompts until then.
    """

    __slots__ = ("after_s", "at", "mark", "prompts_s", "taken_s", "work")

    def __init__(self, arrived_at: float, started_at: float, work: ReplicaWork, now: float) -> None:
        self.at, self.work = now, work
        self.mark = work.share_s(0.0, now)
        self.taken_s = now - max(started_at, work.first_token_at)
        self.after_s = now - arrived_at
        self.prompts_s = work.count_prompts_s(now)
        work.first_token_at = now
