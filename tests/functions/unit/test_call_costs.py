"""What calls cost, what they wait for, and what is said if they cannot run."""

from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_offer

from cavvy.capabilities.functions import routes, spawned
from cavvy.capabilities.functions.call_costs import JobBill, add_up, divide, price_calls
from cavvy.capabilities.functions.errors import AppBroken
from cavvy.capabilities.functions.on_node.shares import SharedTime
from cavvy.capabilities.functions.waits import explain_wait
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def make_charge(hours: float, rate: int, kind: ChargeKind = ChargeKind.NODE) -> Charge:
    return Charge(
        project="p",
        job_id="j",
        attempt_id="a",
        rank=0,
        kind=kind,
        since=NOW,
        until=NOW + timedelta(hours=hours),
        rate=HourlyRate(rate),
        amount=Money(round(hours * rate)),
    )


async def test_the_newest_minutes_of_a_job_cost_too_before_they_are_written() -> None:
    offer = make_offer("fake/r/t", 1_000_000)
    made = make_attempt_record(NOW, offer, id="a", job_id="j")
    attempt = replace(made, phase=AttemptPhase.RUNNING, running_at=NOW)

    class Store:
        async def charges(self, job: str) -> list[Charge]:
            return [make_charge(1, 1_000_000)]

        async def attempts(self, job: str) -> list[Attempt]:
            return [attempt]

    state: Any = SimpleNamespace(store=Store(), now=lambda: NOW + timedelta(hours=1, minutes=3))
    bill = await routes._add_up(state, "j")
    assert bill.node_micros == bill.all_micros == 1_050_000
    assert bill.billed_us == 63 * 60_000_000


def test_calls_that_run_together_divide_the_time() -> None:
    shared = SharedTime(0.0)
    first = shared.begin(1.0)
    second = shared.begin(3.0)
    assert shared.end(7.0, second) == 2.0  # the half of 4 s
    assert shared.end(8.0, first) == 2.0 + 2.0 + 1.0
    shared.go(10.0)
    assert (shared.shared_s, shared.idle_s) == (7.0, 3.0)


@given(st.integers(0, 1 << 30), st.integers(1, 40))
@settings(deadline=None, max_examples=50)
def test_the_shares_and_the_idle_time_are_all_of_the_bill(seed: int, count: int) -> None:
    chance, now = Random(seed), 0.0
    shared, running, shares = SharedTime(0.0), list[float](), list[float]()
    while len(shares) < count:
        now += chance.random()
        if running and chance.random() < 0.5:
            shares.append(shared.end(now, running.pop(chance.randrange(len(running)))))
        elif len(shares) + len(running) < count:
            running.append(shared.begin(now))
    assert sum(shares) == pytest.approx(shared.shared_s)
    assert shared.shared_s + shared.idle_s == pytest.approx(now)
    bill = add_up([make_charge(now / 3600, 3_600_000_000)])
    calls = [(str(at), "j", round(each * 1e6)) for at, each in enumerate(shares)]
    costs = price_calls(calls, {"j": bill})
    parts = divide(bill, sum(us for _, _, us in calls), round(shared.shared_s * 1e6))
    assert parts.kept + parts.others + parts.rest == parts.bill == bill.all_micros
    assert 0 <= parts.kept - sum(costs.values()) <= 2 * count  # each is rounded down


def test_what_a_bill_has_besides_its_node_is_no_call() -> None:
    bill = add_up([make_charge(1, 3600), make_charge(1, 100, ChargeKind.DISK)])
    assert bill == JobBill(3600, 3700, 3_600_000_000)
    assert divide(bill, 600_000_000, 1_800_000_000) == (3700, 600, 1200, 1900)
    assert bill.price(10**15) == 3600  # a broker says anything
    assert divide(bill, 10**15, 0) == (3700, 3600, 0, 100)
    assert price_calls([("a", "", 5), ("b", "gone", 5)], {"gone": add_up([])}) == {}


@pytest.mark.parametrize(
    ("phase", "told", "text"),
    [
        (JobPhase.QUEUED, "it runs", "its job j1 is queued: no offer has an H100"),
        (JobPhase.STARTING, "", "its job j1 is starting: no offer has an H100"),
        (JobPhase.RUNNING, "it waits for the limit", "it waits for the limit"),
        (JobPhase.RUNNING, "", "its job j1 runs"),
        (JobPhase.FAILED, "it runs", "its job j1 has ended, and another one is about to be"),
    ],
)
def test_what_a_call_waits_for(phase: JobPhase, told: str, text: str) -> None:
    job: Any = SimpleNamespace(id="j1", phase=phase, reason="no offer has an H100")
    assert explain_wait(job, told).startswith(text)
    assert explain_wait(None, told) == "its job is about to be submitted"


def test_a_program_learns_that_what_it_has_started_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_failures", "_looks"):
        monkeypatch.setattr(spawned, name, [])
    monkeypatch.setattr(spawned, "_told", set())
    spawned.begin()
    assert spawned.is_watched()
    spawned.end("f", "", "")
    spawned.end("f", "error", "ValueError")  # the function itself has failed
    spawned.check()
    spawned.end("f", "AppBroken", "no module numpy")
    spawned.ask_with(lambda: spawned.note("g cannot run: no module torch"))
    with pytest.raises(AppBroken, match="f cannot run: no module numpy"):
        spawned.check()
    told = capsys.readouterr().err
    assert "cavvy: f cannot run: no module numpy" in told
    assert "cavvy: g cannot run: no module torch" in told
