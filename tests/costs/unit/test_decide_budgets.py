"""What budgets permit, and what will have been spent at the end of the month."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from cavvy.control.budgets import filter_budget
from cavvy.control.decide.budgets import (
    BudgetState,
    SeenSpending,
    ServiceStop,
    find_allowance,
    find_block,
    find_service_stop,
    find_stop,
    list_alerts,
    month_limit,
)
from cavvy.costs.statements import forecast_month
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.ledger import month_of
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

NOW = datetime(2026, 11, 21, tzinfo=UTC)
HOUR = timedelta(hours=1)


def budget(**fields: object) -> SpendingBudget:
    return SpendingBudget(**{"name": "b", "limit": Money(1000), "since": NOW, **fields})  # type: ignore[arg-type]  # tests name valid fields


def seen(rate: int, spent: int = 0, posted: int = 0, ago: timedelta = timedelta(0)) -> SeenSpending:
    return SeenSpending(
        at=NOW - ago, spent=Money(spent), rate=HourlyRate(rate), posted=Money(posted)
    )


def state(posted: int, running: dict[str, SeenSpending], **fields: object) -> BudgetState:
    made = budget(**fields)
    month = month_of(NOW)
    return BudgetState(
        budget=made, month=month, limit=made.limit, posted=Money(posted), running=running
    )


def test_a_budget_counts_the_entries_of_the_projects_below_its_own() -> None:
    parents = {"team": None, "vision": "team", "ocr": "vision", "other": None}
    day = timedelta(days=1)
    found = filter_budget(budget(project="vision", user="ada"), parents, NOW, NOW + day)
    assert (found.projects, found.user) == ({"vision", "ocr"}, "ada")
    assert filter_budget(budget(), parents, NOW, NOW + day).projects is None


def test_a_budget_covers_the_jobs_that_match_all_it_names() -> None:
    made = budget(project="p", user="ada", tag="team=x=y")
    assert made.covers(["p", "above"], "ada", {"team": "x=y"})
    assert not made.covers(["q"], "ada", {"team": "x=y"})
    assert not made.covers(["p", "above"], "bob", {"team": "x=y"})
    assert not made.covers(["p", "above"], "ada", {})


def test_a_budget_of_a_service_covers_its_replicas() -> None:
    made = budget(service="chat")
    assert made.covers(["p"], "ada", {"service": "chat"})
    assert not made.covers(["p"], "ada", {"service": "other"})
    assert not made.covers(["p"], "ada", {})
    assert filter_budget(made, {}, NOW, NOW + HOUR).service == "chat"


def test_a_service_is_stopped_so_early_that_its_replicas_can_drain() -> None:
    running = {"a": seen(600)}

    def stop(posted: int, **fields: object) -> ServiceStop:
        made = state(posted, running, soft_percent=80, hard_percent=100, **fields)
        return find_service_stop([made], NOW, HOUR / 10)

    assert stop(799) == ServiceStop()
    assert stop(800) == ServiceStop(soft="b")
    assert stop(939) == ServiceStop(soft="b")
    assert stop(940) == ServiceStop(soft="b", hard="b")
    assert find_service_stop([], NOW, HOUR) == ServiceStop()


def test_spending_since_the_last_entry_counts() -> None:
    running = {"a": seen(100, spent=50, posted=20, ago=HOUR), "b": seen(0, spent=5, posted=9)}
    assert state(500, running).spent(NOW) == Money(500 + 50 - 20 + 100)


def test_spending_since_the_last_entry_counts_in_its_own_month() -> None:
    december = datetime(2026, 12, 1, tzinfo=UTC)
    running = {
        "silent": SeenSpending(
            at=december - HOUR,
            spent=Money(900),
            rate=HourlyRate(100),
            posted=Money(400),
            posted_until=december - 5 * HOUR,
        )
    }
    november = state(500, running)
    in_november = [november.spent(december + ahead) for ahead in (-HOUR, 0 * HOUR, HOUR)]
    assert in_november == [Money(500 + 500), Money(500 + 600), Money(500 + 583)]
    in_december = replace(november, month=december, posted=Money(0))
    assert [in_december.spent(december + ahead) for ahead in (0 * HOUR, HOUR)] == [
        Money(0),
        Money(117),  # a sixth of 700
    ]


def test_no_new_paid_work_starts_at_the_lower_of_the_two_shares() -> None:
    assert find_block([state(999, {})], "p", NOW) == ""
    assert "the budget b permits no new paid work" in find_block([state(1000, {})], "p", NOW)
    assert find_block([state(800, {}, soft_percent=None)], "p", NOW) == ""
    assert find_block([state(800, {}, soft_percent=None, hard_percent=80)], "p", NOW)
    assert find_block([state(800, {}), state(800, {}, soft_percent=80)], "p", NOW)


def test_the_rest_of_a_budget_is_divided_by_rate() -> None:
    running = {"a": seen(300, spent=10, posted=10), "b": seen(100)}
    made = state(600, running, hard_percent=100)
    allowed = [find_allowance([made], job, NOW) for job in ("a", "b")]
    assert [each and each.most for each in allowed] == [Money(10 + 300), Money(100)]
    assert find_allowance([state(600, running)], "a", NOW) is None
    assert find_allowance([made], "unknown", NOW) is None


@given(
    st.integers(0, 2000),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**9), max_size=4),
)
def test_allowances_never_exceed_the_rest_of_the_budget(posted: int, rates: dict[str, int]) -> None:
    made = state(posted, {job: seen(rate) for job, rate in rates.items()}, hard_percent=100)
    allowed = [find_allowance([made], job, NOW) for job in rates]
    assert sum(each.most.micros for each in allowed if each) <= max(0, 1000 - posted)


def test_alerts_are_due_at_their_shares() -> None:
    assert list_alerts(state(0, {}), Money(499)) == []
    assert list_alerts(state(0, {}), Money(800)) == [50, 80]


def test_what_the_last_month_left_is_carried_over() -> None:
    october = datetime(2026, 10, 3, tzinfo=UTC)
    carrying = budget(carry_over=True, since=october)
    assert month_limit(carrying, Money(300), NOW) == Money(1700)
    assert month_limit(carrying, Money(1300), NOW) == Money(1000)
    assert month_limit(budget(carry_over=True), Money(0), NOW) == Money(1000)  # set this month
    assert month_limit(budget(since=october), Money(0), NOW) == Money(1000)


def test_what_is_carried_over_is_left_of_the_amount_of_the_last_month() -> None:
    before = budget(carry_over=True, since=NOW - timedelta(days=40))
    raised = replace(before, limit=Money(5000)).replacing(before, NOW)
    again = replace(raised, limit=Money(2000)).replacing(raised, NOW + HOUR)
    assert month_limit(raised, Money(900), NOW) == Money(5000 + 100)
    assert month_limit(again, Money(900), NOW + HOUR) == Money(2000 + 100)
    december = NOW + timedelta(days=15)
    assert month_limit(again, Money(900), december) == Money(2000 + 1100)
    assert budget().replacing(None, NOW) == budget()


def test_the_forecast_follows_its_formula() -> None:
    found = forecast_month(Money(2000), [90, 110, 100], NOW)  # ten days remain
    assert found is not None
    assert found.expected == Money(3000)
    assert (found.low, found.high) == (Money(3000 - 41), Money(3000 + 41))  # 1.2816 * 10 * √10
    assert forecast_month(Money(2000), [90], NOW) is None


def test_a_forecast_is_never_below_what_was_spent() -> None:
    found = forecast_month(Money(2000), [0] * 9 + [9000], NOW)
    assert found is not None
    assert found.low == Money(2000)


def test_kept_nodes_are_released_at_the_hard_share_only() -> None:
    assert find_stop([state(999, {}, soft_percent=80, hard_percent=100)], "p", NOW) == ""
    reached = find_stop([state(0, {}), state(1000, {}, hard_percent=100)], "p", NOW)
    assert reached.startswith("the hard stop of the budget b is reached: <$0.01")
    assert find_stop([state(9000, {}, soft_percent=80, hard_percent=None)], "p", NOW) == ""
    late = state(900, {"a": seen(100, ago=HOUR)}, hard_percent=100)
    assert find_stop([late], "p", NOW)
    assert find_stop([late], "p", NOW - HOUR) == ""


def test_a_reason_says_what_the_own_project_has_spent_if_others_spent_too() -> None:
    """One project's spending uses up the budget of a tag, and stops another project's jobs."""
    running = {
        "a": replace(seen(200_000), project="ocr"),
        "b": replace(seen(100_000), project="vision"),
    }
    made = replace(
        state(5_000_000, running, limit=Money(1_000_000), hard_percent=100),
        by_project={"ocr": Money(4_750_000), "vision": Money(250_000)},
    )
    assert find_block([made], "vision", NOW + HOUR).endswith(
        "$5.30 of $1.00 spent this month, $0.35 of it in project vision"
    )
    assert find_stop([made], "ocr", NOW).endswith(", $4.75 of it in project ocr")
    assert find_stop([made], "new", NOW).endswith(", $0.00 of it in project new")
    allowed = find_allowance([made], "b", NOW)
    assert allowed is not None
    assert allowed.part == ", $0.25 of it in project vision"
    alone = replace(made, running={}, by_project={"ocr": Money(5_000_000)})
    assert find_stop([alone], "ocr", NOW).endswith("$5.00 of $1.00 spent this month")
