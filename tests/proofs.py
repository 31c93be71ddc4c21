"""What a run of the tests proves about each provider, written to the folder that `CAVVY_PROOFS`
names, one file for each provider.

A contract test says by the module's `PROOF` what its place is; any other test says by the mark
`proves` which features of which provider it shows; the provider "agent" stands for what the agent
does in the same way everywhere. scripts/docs/providers.py makes pages from the files.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Features that a check of the contract suite shows by itself.
SHOWN_BY = {
    "test_spot_can_be_launched_where_it_is_sold": ("spot",),
    "test_all_nodes_end_with_their_gang": ("gang",),
    "test_a_lost_node_is_replaced_alone": ("repair",),
    "test_capacity_that_is_used_is_not_offered": ("capacity",),
    "test_an_end_is_remembered_and_never_changes[True]": ("self-end",),
    # building and logging in are the agent's work, with the engine that this check is about
    "test_a_machine_prepares_an_engine_for_an_image": ("image", "build", "login"),
}


class Proof(NamedTuple):
    """What the place under test is: `real` is the thing itself, run here; otherwise a stand-in."""

    provider: str
    real: bool
    by: str  # "OpenSSH servers in network namespaces"


ALONE = Proof("agent", True, "the agent alone, on this machine")


def note(item: pytest.Item) -> None:
    """Make the test's report carry what the test is about; reports travel between processes,
    items do not.
    """
    proof = getattr(getattr(item, "module", None), "PROOF", None)
    if isinstance(proof, Proof) and item.path.parent.name == "contract":
        item.user_properties.append(("contract", [*proof, SHOWN_BY.get(item.name, ())]))
    for mark in item.iter_markers("proves"):
        item.user_properties.append(("proves", [*Proof(*mark.args[0]), mark.args[1:]]))


class Notary:
    """Collects the reports of a run and writes the files at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.skipped and not report.failed:
            return
        for kind, value in report.user_properties:
            if kind not in ("contract", "proves"):
                continue
            provider, real, by, features = value
            facts = self._found.setdefault(
                provider, {"place": by, "passed": 0, "skipped": {}, "failed": 0, "features": {}}
            )
            if kind == "contract":
                self._count(facts, report, by)
            for feature in features if report.passed else ():
                best = facts["features"].get(feature)
                if best is None or (real and not best["real"]):
                    facts["features"][feature] = {"real": real, "by": by}

    def _count(self, facts: dict[str, Any], report: pytest.TestReport, by: str) -> None:
        facts["place"] = by
        if report.passed:
            facts["passed"] += 1
        elif report.skipped:
            reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            )
            reason = reason.removeprefix("Skipped: ")
            facts["skipped"][reason] = facts["skipped"].get(reason, 0) + 1
        elif report.outcome != "rerun":
            facts["failed"] += 1

    def pytest_sessionfinish(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for provider, facts in self._found.items():
            text = json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False)
            (self._folder / f"{provider}.json").write_text(text + "\n", encoding="utf-8")
