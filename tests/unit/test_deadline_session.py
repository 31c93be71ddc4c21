"""Other simulators drive the deadline policy as the guide shows."""

import re
from pathlib import Path

from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.deadline.session import start_session
from cavvy.planner.spot.view import JobTerms, PolicyMarket, PolicyView, RunMode, SpotQuote

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/simulate.md"


def test_the_example_of_the_guide_runs() -> None:
    [example] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(compile(example, GUIDE.name, "exec"), {})


def test_a_job_with_full_information_decides_from_the_quotes_shown_last() -> None:
    terms = JobTerms(
        work_s=3600.0, deadline_s=36_000.0, overhead_s=60.0, markets=(PolicyMarket(name="a"),)
    )
    session = start_session(terms, [0.3], PolicyMargins())
    waits = PolicyView(0.0, 3600.0, RunMode.IDLE, 0, 0.0)
    for up, mode in ((False, RunMode.IDLE), (True, RunMode.SPOT)):
        session.show(0.0, (SpotQuote(up, 0.3),))
        assert session.decide(waits).mode is mode
