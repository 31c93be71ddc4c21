"""The deadline policy decides as it did when `recorded_decisions.jsonl` was written. A change that
should only make the policy faster must not change this file. To write it again:

    python tests/simulation/sim/test_recorded_decisions.py
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from tests.simulation.spot_worlds import random_world, terms

from cavvy.capabilities.simulation.traces.driver import NO_MARGINS, Knows, run_job
from cavvy.planner.deadline.policy import DeadlinePolicy, PolicyMargins
from cavvy.planner.spot.view import PolicyDecision, PolicyView

RECORD = Path(__file__).parents[1] / "recorded_decisions.jsonl"
COLUMNS = (
    (Knows.EVERYTHING, NO_MARGINS),
    (Knows.LAUNCHES, NO_MARGINS),
    (Knows.LAUNCHES, PolicyMargins(again_s=600.0)),
)
# the number of markets, and the deadline divided by the work
JOBS = [
    (markets, factor, seed)
    for seed, markets in enumerate((1, 1, 2, 3, 5, 8, 13))
    for factor in (1.05, 1.3, 2.0, 5.0)
]


class LoggedPolicy(DeadlinePolicy):
    """The production policy; it keeps the time of each question, and the answer without its
    sentence.
    """

    log: list[tuple[object, ...]]

    def decide(self, view: PolicyView) -> PolicyDecision:
        decision = super().decide(view)
        mode, market, again_s, _ = decision
        self.log.append((f"{view.now_s:.3f}", mode.value, market, f"{again_s:.3f}"))
        return decision


def play() -> Iterator[dict[str, object]]:
    """One line for each job and column: the launches, and a digest of all decisions."""
    for markets, factor, seed in JOBS:
        world = random_world(seed, markets)
        job = terms(world, 10, 10 * factor + 0.5, 0.2)
        for knows, margins in COLUMNS:
            policy: type[LoggedPolicy] = type("_Logged", (LoggedPolicy,), {"log": []})
            run = run_job(world, 0.0, job, policy, knows=knows, margins=margins)
            yield {
                "markets": markets,
                "factor": factor,
                "knows": knows.value,
                "margins": margins is not NO_MARGINS,
                "usd": f"{run.usd:.4f}",
                "launches": run.launches,
                "decisions": len(policy.log),
                "sha256": sha256(json.dumps(policy.log).encode()).hexdigest(),
            }


def test_the_policy_decides_as_recorded() -> None:
    recorded = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert list(play()) == recorded


if __name__ == "__main__":
    RECORD.write_text("".join(json.dumps(line) + "\n" for line in play()))
