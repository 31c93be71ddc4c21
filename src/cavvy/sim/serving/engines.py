"""Simulated engines of language models: what requests on one replica do to each other.

An engine computes one prompt after the other, and generates no tokens meanwhile. Then all requests
whose prompts are computed get a token in each step; a step takes longer the more of them there are.
The answers are measured with the code of the gateway.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from cavvy.domain.service_loads import TokenTimes
from cavvy.gateway.kept_counts import KeptCounts
from cavvy.gateway.token_meter import AnswerTimes, FirstToken
from cavvy.gateway.work import ReplicaWork
from cavvy.sim.serving.requests import RequestTrace, TokenSpeed


class EngineAnswers:
    """The times of all answers of a simulated service. `first_s` and `gaps_s` contain each answer's
    time to the first token and mean time between tokens.
    """

    def __init__(self, trace: RequestTrace, ttft_s: float, token_gap_s: float) -> None:
        self.trace = trace
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self._times = AnswerTimes(ttft_s, token_gap_s)

    def add(self, request: int, first: FirstToken, now_s: float) -> None:
        prompt, answer = self.trace.tokens[request]
        self._times.add(round(prompt), round(answer), first, now_s)
        self.first_s.append(first.after_s)
        if answer > 1:
            self.gaps_s.append((now_s - first.at) / (answer - 1))

    def describe(self) -> TokenTimes:
        return self._times.describe()


class SimulatedEngine:
    """The engine of one replica. `version` is the number of the last plan for its next step."""

    def __init__(self, answers: EngineAnswers, speed: TokenSpeed) -> None:
        self.version = 0
        self._answers, self._speed = answers, speed
        self._work = ReplicaWork(KeptCounts())
        self._prompts: deque[tuple[int, float]] = deque()  # with the time at which they were sent
        self._prompt_ends_s = inf  # the end of the first prompt
        self._now_s = 0.0
        # how many tokens each request that has run since the start would have got; a request ends
        # when this number reaches its own
        self._made = 0.0
        self._running: list[tuple[float, int, FirstToken]] = []

    def add(self, request: int, now_s: float) -> None:
        self._pass(now_s)
        self._work.begin("", now_s)
        self._work.change_prompts(1, now_s)
        self._prompts.append((request, now_s))
        if len(self._prompts) == 1:
            self._begin_prompt(now_s)

    def find_next(self) -> float:
        """Return when the next prompt or answer ends."""
        if self._prompts or not self._running:
            return self._prompt_ends_s
        return self._now_s + max(0.0, self._running[0][0] - self._made) * self._step_s

    def advance(self, now_s: float) -> Iterator[int]:
        """Take the next step, which ends now; yield the requests whose answers are complete."""
        self._pass(now_s)
        if self._prompts and now_s >= self._prompt_ends_s:
            request, started_at = self._prompts.popleft()
            arrived_at = self._answers.trace.arrivals_s[request]
            self._work.change_prompts(-1, now_s)
            first = FirstToken(arrived_at, started_at, self._work, now_s)
            more = max(0.0, self._answers.trace.tokens[request][1] - 1)
            heappush(self._running, (self._made + more, request, first))
            self._prompt_ends_s = inf
            if self._prompts:
                self._begin_prompt(now_s)
        while self._running and self._running[0][0] <= self._made + 1e-6:
            _, request, first = heappop(self._running)
            self._answers.add(request, first, now_s)
            self._work.end("", now_s)
            yield request

    @property
    def _step_s(self) -> float:
        return (self._speed.answer_ms + self._speed.running_ms * len(self._running)) / 1e3

    def _begin_prompt(self, now_s: float) -> None:
        prompt = self._answers.trace.tokens[self._prompts[0][0]][0]
        taken_s = (self._speed.base_ms + self._speed.prompt_ms * prompt) / 1e3
        self._prompt_ends_s = now_s + taken_s

    def _pass(self, now_s: float) -> None:
        if self._running and not self._prompts and self._step_s:
            self._made += (now_s - self._now_s) / self._step_s
        self._now_s = now_s
