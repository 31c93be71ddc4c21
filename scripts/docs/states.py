"""Writes the state diagrams and tables in docs/concepts/jobs.md from the tables of state
transitions. Called by `make docs`.
"""

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from cavvy.domain.jobs import ATTEMPT_MOVES, JOB_ENDS, JOB_MOVES, AttemptPhase, JobPhase

T = TypeVar("T", bound=StrEnum)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "jobs.md"


def diagram(moves: Mapping[T, Mapping[T, str]], start: T, ends: Collection[T]) -> str:
    """A diagram (Mermaid), and a table with a row for each transition and its reason."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start}"]
    lines += [f"    {phase} --> {target}" for phase, to in moves.items() for target in to]
    lines += [f"    {phase} --> [*]" for phase in moves if phase in ends]
    lines += ["```", "", "| from | to | because |", "|---|---|---|"]
    lines += [
        f"| {phase} | {target} | {reason} |"
        for phase, to in moves.items()
        for target, reason in to.items()
    ]
    return "\n".join([*lines, ""])


def render(page: str) -> str:
    """The page, with the parts between its marks replaced."""
    tables = {
        "jobs": diagram(JOB_MOVES, JobPhase.QUEUED, JOB_ENDS),
        "attempts": diagram(ATTEMPT_MOVES, AttemptPhase.LAUNCHING, {AttemptPhase.ENDED}),
    }
    for name, made in tables.items():
        pattern = rf"(<!-- states: {name} -->\n).*?(\n<!-- end -->)"
        page, count = re.subn(
            pattern, lambda match, made=made: f"{match[1]}{made}{match[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{PAGE}: expected one place for the states of {name}, found {count}")
    return page


def main() -> None:
    PAGE.write_text(render(PAGE.read_text()))
    print(f"wrote the states of {PAGE.relative_to(PAGE.parents[2])}")


if __name__ == "__main__":
    main()
