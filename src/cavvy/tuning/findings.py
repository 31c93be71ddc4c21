"""The diagnosis's measurement, a window of steps, and its findings: causes with their costs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CostFinding:
    """One cause. `lost_s` is seconds of each step, `half_s` half the width of its 95 % interval by
    Student's t, which does not include zero. If it does, but at least `AGREE` pairs all show a
    loss, `pairs_s` has the smallest and largest.
    """

    cause: str
    lost_s: float
    half_s: float
    sure: bool  # whether one of the two statistics exceeds noise
    evidence: str
    fix: str
    change: dict[str, Any] = field(default_factory=dict)  # a change of the plan, if that is the fix
    pairs_s: tuple[float, float] | None = None


@dataclass(slots=True)
class Diagnosis:
    facts: dict[str, Any]
    step_s: float
    seconds: dict[str, list[float]]  # seconds of a step, by mode, one for each round
    findings: list[CostFinding]

    @property
    def steps_per_epoch(self) -> float:
        return float(self.facts["samples"] / self.facts["global_batch"])

    def dollars(self, seconds: float, price: float) -> float:
        """Dollars per epoch for these seconds of each step, at a price per hour of all devices
        together.
        """
        return seconds * self.steps_per_epoch * price / 3600


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The same steps on all ranks. Lists are by step; the first step began while other
    ranks still reported.
    """

    ranks: list[dict[str, Any]]

    def steps(self, rank: int = 0) -> list[float]:
        return list(self.ranks[rank]["steps"][1:])

    def part(self, name: str, rank: int = 0) -> list[float]:
        return list(self.ranks[rank]["parts"][name][1:])

    def between(self, rank: int) -> list[float]:
        """The part of each step outside all measured parts: the user's own code."""
        parts = zip(*(self.part(name, rank) for name in self.ranks[rank]["parts"]), strict=True)
        return [step - sum(each) for step, each in zip(self.steps(rank), parts, strict=True)]

    def own(self, rank: int, saving: float) -> list[float]:
        """Each step of a rank without waits for others and without saves, also those outside the
        measured parts.
        """
        apart = zip(
            self.part("communication", rank),
            self.part("checkpoint", rank),
            self.between(rank),
            strict=True,
        )
        return [
            a - b - c - saving * d for a, (b, c, d) in zip(self.steps(rank), apart, strict=True)
        ]

    def shared(self) -> list[float]:
        """Communication of each step on the rank that waits least: the exchange itself, without
        waits.
        """
        by_rank = [self.part("communication", rank) for rank in range(len(self.ranks))]
        return [min(each) for each in zip(*by_rank, strict=True)]
