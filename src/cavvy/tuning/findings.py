"""The data of a diagnosis: windows of measured steps, and findings. A finding states a cause of
lost time and its cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

LEAST = 0.03  # minimum cost that is reported, as a share of a step
MEMORY = (  # evidence and fix for slow data in memory
    "steps that reuse the last batch are faster: each batch is copied from tensors in memory",
    "keep the tensors in a smaller type, such as uint8, and convert each batch on the device; or "
    "keep the tensors on the device",
)


@dataclass(frozen=True, slots=True)
class CostFinding:
    """One cause of lost time. `lost_s` is the cost of the cause in seconds per step, and `half_s`
    is half the width of the 95 % confidence interval by Student's t. `pairs_s` contains the
    smallest and the largest loss that a pair of windows showed, in seconds per step. `pairs_s` is
    set only if the confidence interval includes zero although all measured pairs, at least `AGREE`,
    show a loss.
    """

    cause: str
    lost_s: float
    half_s: float
    sure: bool  # whether the interval excludes zero, or all pairs show a loss
    evidence: str
    fix: str
    # the change of the plan that fixes the cause
    change: dict[str, Any] = field(default_factory=dict)
    pairs_s: tuple[float, float] | None = None


def rank_findings(found: Iterable[CostFinding], step_s: float) -> list[CostFinding]:
    """Return the findings to report, the most expensive first. Each cost is limited to the time of
    one step, because a cost on a noisy machine can appear longer than a step.
    """
    sure = [each for each in found if each.sure and each.lost_s > LEAST * step_s]
    capped = [replace(each, lost_s=min(each.lost_s, step_s)) for each in sure]
    return sorted(capped, key=lambda each: -each.lost_s)


@dataclass(slots=True)
class Diagnosis:
    facts: dict[str, Any]
    step_s: float
    seconds: dict[str, list[float]]  # for each mode, the seconds per step in each round
    findings: list[CostFinding]

    @property
    def steps_per_epoch(self) -> float:
        return float(self.facts["samples"] / self.facts["global_batch"])

    def dollars(self, seconds: float, price: float) -> float:
        """Return the dollars per epoch that this many seconds per step cost. `price` is dollars per
        hour for all devices together.
        """
        return seconds * self.steps_per_epoch * price / 3600


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The records of the same steps on all ranks. The methods return one value per step. The first
    step is left out, because it started while other ranks were still sending their reports.
    """

    ranks: list[dict[str, Any]]

    def steps(self, rank: int = 0) -> list[float]:
        return list(self.ranks[rank]["steps"][1:])

    def part(self, name: str, rank: int = 0) -> list[float]:
        return list(self.ranks[rank]["parts"][name][1:])

    def between(self, rank: int) -> list[float]:
        """Return the seconds that the user's own code takes in each step, outside all measured
        parts.
        """
        parts = zip(*(self.part(name, rank) for name in self.ranks[rank]["parts"]), strict=True)
        return [step - sum(each) for step, each in zip(self.steps(rank), parts, strict=True)]

    def own(self, rank: int, saving: float) -> list[float]:
        """Return the seconds of each step of a rank, without waits for other ranks and without
        saves. `saving` is the share of the time outside the measured parts that is spent on saves.
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
        """Return how many seconds of each step are communication, without the time in which a rank
        waits for other ranks. In each step, the value comes from the rank with the least
        communication.
        """
        by_rank = [self.part("communication", rank) for rank in range(len(self.ranks))]
        return [min(each) for each in zip(*by_rank, strict=True)]
