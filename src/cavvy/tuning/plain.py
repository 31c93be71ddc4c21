"""Evaluates the measurements of a script with a plain training loop. The parts of a step run one
after another on the host, so the cost of a part is the time that the part takes. Therefore the
measurement needs no additional runs in which a part is omitted.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from cavvy.tuning.findings import CostFinding, Diagnosis, rank_findings


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
