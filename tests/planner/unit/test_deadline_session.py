"""Other simulators drive the deadline policy as the guide shows."""

import re
from pathlib import Path

from cavvy.domain.markets import ObservationKind
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.deadline.session import start_session
from cavvy.planner.spot.view import JobTerms, PolicyMarket, PolicyView, RunMode, SpotQuote

GUIDE = Path(__file__).resolve().parents[3] / "docs/extend/spot-policy.md"


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


def test_a_zone_that_takes_each_launch_back_is_left_for_another_one() -> None:
    markets = tuple(PolicyMarket(name=name, on_demand_usd_hr=88.0) for name in "ab")
    terms = JobTerms(
        work_s=155_520.0,
        deadline_s=186_624.0,
        overhead_s=720.0,
        markets=markets,
        move_usd=((0.0, 1.0), (1.0, 0.0)),
    )
    session = start_session(terms, [14.9, 19.0], PolicyMargins(again_s=600.0))
    session.observe(0.0, 0, ObservationKind.GRANTED)
    now_s, launches = 63_000.0, 0
    session.observe(now_s, 0, ObservationKind.TAKEN)
    while True:
        decision = session.decide(PolicyView(now_s, 94_680.0, RunMode.IDLE, 0, 0.0))
        if decision.mode is RunMode.IDLE:
            now_s = min(decision.again_s, session.changes_at(now_s))
            continue
        if decision.market == 1:
            break
        session.observe(now_s, 0, ObservationKind.GRANTED)
        launches, now_s = launches + 1, now_s + 600.0
        session.observe(now_s, 0, ObservationKind.TAKEN)
    assert (decision.mode, launches) == (RunMode.SPOT, 3)  # 25 with rests of a minute
    assert session.resting(now_s)[0].count == 3
