"""The data of a diagnosis: windows of measured steps, and findings. A finding states a cause of
lost time and its cost.

`judge_plain` evaluates the measurements of a plain training loop. The parts of its step run one
after another on the host, so the cost of a part is the time that the part takes; no additional runs
are needed in which a part is omitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
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


def judge_plain(reports: Sequence[dict[str, Any]]) -> Diagnosis:
    """Return the costly parts of a step, from the reports of all ranks."""
    first = reports[0]
    step = fmean(fmean(each["steps"]) for each in reports)
    slowest = {name: max(each["parts"][name] for each in reports) for name in first["parts"]}
    if first["device"] == "cpu":  # On a CPU, Tensor.to only converts the batch.
        slowest["prepare"] += slowest["transfer"]
    batch = sum(each["batch"] for each in reports)
    facts = {**first, "global_batch": batch or 1}
    found = [_judge_data(first, slowest["data"]), *_judge_own(first, slowest)]
    found.append(
        _find(
            "slow checkpoint",
            slowest["checkpoint"],
            "the loop calls torch.save",
            "save less often, or in the background with cavvy.train",
        )
    )
    if first["device"] != "cpu":
        found.append(
            _find(
                "host-device copies",
                slowest["transfer"],
                "the loop waits while batches are copied",
                "DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
            )
        )
    return Diagnosis(facts, step, {"plain": list(first["steps"])}, rank_findings(found, step))


def _judge_data(facts: dict[str, Any], lost: float) -> CostFinding:
    workers, cores = facts["workers"], max(facts["cores"] // facts["ranks"], 1)
    evidence = f"the loop waits for its DataLoader, which has num_workers={workers}"
    if workers < cores:
        return _find("too few workers", lost, evidence, f"DataLoader(num_workers={cores})")
    fix = "convert the data once, before training, so that each sample needs less work"
    return _find("slow data", lost, evidence, fix)


def _judge_own(facts: dict[str, Any], parts: dict[str, float]) -> list[CostFinding]:
    lines = ", ".join(f"{line} ({share:.0%} of the time)" for line, share in facts["lines"][:2])
    where = lines or "the script's own code"
    return [
        _find(
            "batch preparation",
            parts["prepare"],
            f"code that runs before the first forward pass of a step: {where}",
            "prepare batches ahead in the workers of a DataLoader, or keep the data on the device "
            "in the type that the model uses",
        ),
        _find(
            "work between steps",
            parts["own"],
            f"other code of the loop: {where}",
            "vectorize this code over the whole batch, or run it less often",
        ),
    ]


def _find(cause: str, lost: float, evidence: str, fix: str) -> CostFinding:
    return CostFinding(cause, lost, 0.0, True, evidence, fix)
