"""What is left of a budget, and when it will be gone."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from remuda.costs.budget import budget_of, burn_rate, weigh
from remuda.domain.jobs import Attempt, AttemptPhase, Job
from remuda.domain.offers import Offer
from remuda.domain.tasks import Limits, Task
from remuda.domain.units import HourlyRate, Money

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_rest_lasts_as_long_as_the_rate_says() -> None:
    state = weigh(Money(10_000_000), Money(4_000_000), HourlyRate(3_000_000), NOW)
    assert (state.left, state.exhausted) == (Money(6_000_000), False)
    assert state.runs_out_at == NOW + timedelta(hours=2)
    assert state.projected(timedelta(hours=1)) == Money(7_000_000)


def test_spent_is_exhausted_and_runs_out_at_once() -> None:
    for spent in (5, 6):
        state = weigh(Money(5), Money(spent), HourlyRate(1), NOW)
        assert (state.exhausted, state.left, state.runs_out_at) == (True, Money(0), NOW)


def test_no_budget_is_never_exhausted() -> None:
    state = weigh(None, Money(10**12), HourlyRate(10**9), NOW)
    assert (state.exhausted, state.left, state.runs_out_at) == (False, None, None)


def test_a_budget_of_nothing_allows_what_is_free() -> None:
    assert not weigh(Money(0), Money(0), HourlyRate(0), NOW).exhausted
    assert weigh(Money(0), Money(0), HourlyRate(1), NOW).exhausted
    assert weigh(Money(0), Money(1), HourlyRate(0), NOW).exhausted


def test_what_costs_nothing_or_next_to_it_never_runs_out() -> None:
    assert weigh(Money(5), Money(0), HourlyRate(0), NOW).runs_out_at is None
    assert weigh(Money(10**15), Money(0), HourlyRate(1), NOW).runs_out_at is None


def test_the_lower_of_budget_and_consent_counts() -> None:
    job = Job(id="j", project="p", name="n", task=Task(name="n", run="x"), submitted_at=NOW, since=NOW)
    assert budget_of(job) is None
    limited = replace(job, task=replace(job.task, limits=Limits(budget=Money(5))))
    assert budget_of(limited) == Money(5)
    assert budget_of(replace(limited, ceiling=Money(3))) == Money(3)
    assert budget_of(replace(job, ceiling=Money(3))) == Money(3)


def test_only_what_may_still_bill_burns() -> None:
    offer = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(7))
    open_one = Attempt(
        id="j-1", job_id="j", project="p", number=1, gang="g", offer=offer, nodes=3, created_at=NOW, since=NOW
    )
    ending = replace(open_one, nodes=1, phase=AttemptPhase.ENDING)
    assert burn_rate([open_one, ending, replace(open_one, phase=AttemptPhase.ENDED)]) == HourlyRate(28)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 10**9))
def test_the_money_lasts_until_it_runs_out_and_not_later(limit: int, spent: int, rate: int) -> None:
    state = weigh(Money(limit), Money(spent), HourlyRate(rate), NOW)
    assert state.left is not None
    if state.runs_out_at is not None and spent <= limit:
        lasts = state.runs_out_at - NOW
        assert HourlyRate(rate).over(lasts) <= state.left
        assert HourlyRate(rate).over(lasts + timedelta(microseconds=3_600_000_000 // rate + 1)) >= state.left
