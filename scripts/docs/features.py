"""Writes docs/reference/features.md: which features of each provider were tested, and on what, from
the results that one run of the tests recorded.

CAVVY_PROOFS=docs/reference/features.json make test && .venv/bin/python scripts/docs/features.py
"""

import json
from pathlib import Path
from typing import Any

from cavvy.providers.base import Feature
from cavvy.providers.registry import manifests as list_manifests

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
_INTRO = """# What was tested for each provider

`scripts/docs/features.py` writes this page from `features.json`, which a run of the tests wrote; a test fails if the page is out of date.
To repeat the run: `CAVVY_PROOFS=docs/reference/features.json make test && make docs`.

## The contract suite
Every provider passes the same checks (`cavvy.providers.contract`). Skipped checks are counted below, each with its reason.

| provider | the system under test | checks passed | skipped |
|---|---|---|---|
"""
_FEATURES = """
## Features
* **real**: tested with the real system
* *stand-in*: tested with a program that simulates the system
* agent: the agent does this in the same way on every provider; tested with the agent alone, without this provider
* **not verified**: the code exists, but no test covers it, or the test was skipped because a program or right was missing
* lacking: the provider does not support it; see [providers](providers.md) for the reason

"""


def make_page(found: dict[str, Any]) -> str:
    manifests = {manifest.name: manifest for manifest in list_manifests()}
    rows = []
    for name in manifests:
        facts = found.get(name)
        if facts is None:
            rows.append(f"| {name} | none: the suite was not run on it | 0 | |")
            continue
        skipped = "; ".join(
            f"{reason} ({count})" for reason, count in sorted(facts["skipped"].items())
        )
        passed = str(facts["passed"]) + (f", {facts['failed']} failed" if facts["failed"] else "")
        rows.append(f"| {name} | {facts['place']} | {passed} | {skipped} |")
    head = "| feature | " + " | ".join(manifests) + " |\n|---" + "|---" * len(manifests) + "|\n"
    table = []
    for feature in Feature:
        cells = []
        for name, manifest in manifests.items():
            shown = found.get(name, {}).get("features", {}).get(str(feature))
            alone = (
                None
                if manifest.only_services
                else found.get("agent", {}).get("features", {}).get(str(feature))
            )
            if feature in manifest.unsupported:
                cells.append("lacking")
            elif shown is None and alone is not None:
                cells.append("agent")
            elif shown is None:
                cells.append("**not verified**")
            else:
                cells.append("**real**" if shown["real"] else "*stand-in*")
        table.append(f"| {feature} | " + " | ".join(cells) + " |")
    return _INTRO + "\n".join(rows) + "\n" + _FEATURES + head + "\n".join(table) + "\n"


def main() -> None:
    found = json.loads((FOLDER / "features.json").read_text(encoding="utf-8"))
    (FOLDER / "features.md").write_text(make_page(found), encoding="utf-8")
    print("wrote docs/reference/features.md")


if __name__ == "__main__":
    main()
