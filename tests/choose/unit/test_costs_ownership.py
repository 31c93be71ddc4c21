"""Costs of ownership: published break-evens are reproduced, and the arithmetic is that of the
formulas."""

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cavvy.capabilities.choose.cost_plan import (
    CostPlanError,
    complete_plan,
    make_assumption,
    read_cost_plan,
)
from cavvy.capabilities.choose.ownership import (
    HOURS_PER_MONTH,
    OwnershipPlan,
    find_change,
    forecast_ownership,
    list_assumptions,
    make_tornado,
    simulate_ownership,
)
from cavvy.domain.values import replace
from cavvy.spec import SpecError

# one own machine that costs nothing but its price: the publications below state all other costs as
# one amount per hour
BARE: Mapping[str, float] = {
    "machines": 1,
    "use": 1,
    "years": 5,
    "mixed.machines": 0,
    "owned.life_years": 15,
    "owned.capital_rate": 0,
    "owned.residual": 0,
    "owned.availability": 1,
    "owned.power_kw": 0,
    "owned.network_usd_year": 0,
    "owned.staff_per_machine": 0,
    "owned.maintenance": 0,
    "owned.spares": 0,
    "cloud.spot_overhead": 0,
    "cloud.egress_usd_gb": 0,
}


def change_plan(plan: OwnershipPlan, **changes: float) -> OwnershipPlan:
    """Return the plan with other values; a dot in a name is written as two underscores."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    changed = {
        name: replace(each, value=named[name], low=named[name], high=named[name])
        if name in named
        else each
        for name, each in plan.assumptions.items()
    }
    return replace(plan, assumptions=changed)


def make_plan(**values: float) -> OwnershipPlan:
    """A bare plan with these values; a dot in a name is written as two underscores."""
    named = {**BARE, **{name.replace("__", "."): value for name, value in values.items()}}
    given = {name: make_assumption(name, value, "a test") for name, value in named.items()}
    return OwnershipPlan(
        name="test",
        assumptions={
            name: each for name, each in {**list_assumptions(), **given}.items() if each is not None
        },
    )


# "On-Premise vs Cloud: Generative AI Total Cost of Ownership", Lenovo Press LP2225, 2025-05-23:
# a ThinkSystem SR675 V3 with 8 H100 NVL for $833,806, $0.87 an hour for its operation, against
# p5.48xlarge on demand and with commitments of one and three years.
@pytest.mark.parametrize(("usd_hr", "hours"), [(98.32, 8_556), (77.43, 10_890), (53.95, 15_710)])
def test_lenovo_s_break_evens_are_reproduced(usd_hr: float, hours: float) -> None:
    plan = make_plan(
        owned__price_usd=833_806,
        owned__cooling_usd_year=0.87 * 8760,
        cloud__on_demand_usd_hr=usd_hr,
    )
    months = forecast_ownership(plan).break_even_months
    assert months is not None
    assert months * HOURS_PER_MONTH == pytest.approx(hours, rel=0.01)


# The same paper's machine at fewer hours a day: 8,556 hours of work, while the own machine costs
# $0.87 in each hour of the day, as its operation does not stop.
@pytest.mark.parametrize(("use", "years"), [(4 / 24, 5.9), (8 / 24, 2.9), (12 / 24, 1.96)])
def test_the_break_even_comes_later_at_lower_use(use: float, years: float) -> None:
    plan = make_plan(
        use=use,
        years=8,
        owned__price_usd=833_806,
        owned__cooling_usd_year=0.87 * 8760,
        cloud__on_demand_usd_hr=98.32,
    )
    months = forecast_ownership(plan).break_even_months
    assert months is not None
    assert months / 12 == pytest.approx(years, rel=0.05)


def test_the_break_even_of_a_book_is_reproduced() -> None:
    """ "The Economics of Compute" (github.com/ttsugriy/distributed-training-book,
    docs/foundations/05-economics-of-compute.md): an H100 for $30,000 against $4 an hour breaks even
    after 7,500 hours, 10.4 months of 720 hours."""
    months = forecast_ownership(
        make_plan(owned__price_usd=30_000, cloud__on_demand_usd_hr=4)
    ).break_even_months
    assert months is not None
    assert months * HOURS_PER_MONTH == pytest.approx(7_500, rel=0.001)
    assert months == pytest.approx(10.4, rel=0.05)


def test_a_calculator_that_counts_the_price_twice_differs_by_that_alone() -> None:
    """randomcalculators.com, "AI infrastructure total cost of ownership": 8 GPUs for $35,000 each
    and 40 % for the rest, 4 years, 0.7 kW, PUE 1.4, $0.12, 400 hours a month, $3,000 a month for the
    data center, against $4.50 an hour. Its formula divides the price by what owning saves a month
    after a part of the price has been subtracted already, so that nothing breaks even in 4 years
    (137 months). Without this amortization in the divisor, the months are ours."""
    price, power = 8 * 35_000 * 1.4, 8 * 0.7 * 400 * 1.4 * 0.12
    cloud, amortized = 8 * 400 * 4.5, price / 48
    theirs = price / (cloud - (amortized + power + 3_000))
    assert theirs > 48
    plan = make_plan(
        machines=8,
        use=400 / HOURS_PER_MONTH,
        owned__price_usd=35_000 * 1.4,
        owned__power_kw=0.7,
        owned__idle_share=0,
        owned__pue=1.4,
        owned__tariff_usd_kwh=0.12,
        owned__space_usd_kw_year=0,
        owned__cooling_usd_year=3_000 * 12 / 8,
        cloud__on_demand_usd_hr=4.5,
    )
    ours = forecast_ownership(plan).break_even_months
    assert ours == pytest.approx(price / (cloud - power - 3_000), rel=0.001)
    assert 1 / theirs == pytest.approx(1 / ours - amortized / price, rel=0.001)


def test_each_kind_of_cost_is_that_of_its_formula() -> None:
    plan = make_plan(
        machines=2,
        use=0.5,
        years=2,
        owned__price_usd=100_000,
        owned__life_years=1,
        owned__residual=0.25,
        owned__power_kw=10,
        owned__idle_share=0.2,
        owned__pue=1.5,
        owned__tariff_usd_kwh=0.1,
        owned__space_usd_kw_year=600,
        owned__staff_per_machine=0.1,
        owned__staff_usd_year=100_000,
        owned__maintenance=0.05,
        owned__spares=0.1,
        cloud__on_demand_usd_hr=20,
    )
    kinds = forecast_ownership(plan).find("owned").kinds
    assert kinds["purchase"] == 2 * 2 * 100_000  # bought again after a year
    assert kinds["sale of old machines"] == -2 * 25_000
    assert kinds["sale at the end"] == pytest.approx(-2 * 25_000)
    assert kinds["spares"] == 20_000
    energy = 2 * 10 * (0.2 + 0.8 * 0.5) * 1.5 * 8760 * 2
    assert kinds["power"] == pytest.approx(energy * 0.1)
    assert kinds["space"] == pytest.approx(2 * 10 * 600 * 2)
    assert kinds["staff"] == pytest.approx(2 * 0.1 * 100_000 * 2)
    assert kinds["maintenance"] == pytest.approx(2 * 5_000 * 2)
    cloud = forecast_ownership(plan).find("cloud")
    assert cloud.total == pytest.approx(2 * 0.5 * 20 * 8760 * 2)


def test_a_mix_rents_what_own_machines_cannot_do_and_pays_for_idle_commitments() -> None:
    plan = make_plan(
        machines=4,
        use=0.5,
        years=1,
        mixed__machines=1,
        owned__price_usd=1,
        cloud__on_demand_usd_hr=10,
        cloud__spot_usd_hr=4,
        cloud__spot_share=0.5,
        cloud__spot_overhead=0.1,
        cloud__reserved_machines=0,
    )
    mixed = forecast_ownership(plan).find("mixed")
    assert mixed.rented == pytest.approx(0.5)
    assert mixed.kinds["machines on demand"] == pytest.approx(0.5 * 10 * 8760)
    assert mixed.kinds["spot machines"] == pytest.approx(0.5 * 1.1 * 4 * 8760)
    reserved = change_plan(plan, cloud__reserved_machines=4, cloud__reserved_usd_hr=3)
    cloud = forecast_ownership(reserved).find("cloud")
    assert cloud.kinds["reserved machines"] == pytest.approx(4 * 3 * 8760)
    assert cloud.kinds["machines on demand"] == 0
    assert forecast_ownership(reserved).find("owned").kinds["reserved machines"] == 0


def test_own_machines_do_less_when_they_are_away_and_have_their_own_price_of_egress() -> None:
    plan = make_plan(
        machines=2,
        use=1,
        years=1,
        owned__price_usd=1,
        owned__availability=0.75,
        owned__egress_usd_gb=0.01,
        cloud__egress_usd_gb=0.09,
        cloud__egress_gb_month=100,
        cloud__on_demand_usd_hr=10,
        mixed__machines=1,
    )
    found = forecast_ownership(plan)
    assert found.find("owned").rented == pytest.approx(0.25)
    egress = [found.find(name).kinds["egress"] for name in ("cloud", "owned", "mixed")]
    assert egress == pytest.approx([12 * 9, 12 * 1, 12 * 9])


@settings(max_examples=25)
@given(
    use=st.floats(0.05, 1),
    price=st.floats(1_000, 1_000_000),
    rate=st.floats(0.1, 200),
    capital=st.floats(0, 0.3),
)
def test_at_the_break_even_use_both_cost_the_same(
    use: float, price: float, rate: float, capital: float
) -> None:
    plan = make_plan(
        use=use,
        years=3,
        owned__price_usd=price,
        owned__capital_rate=capital,
        cloud__on_demand_usd_hr=rate,
    )
    found = forecast_ownership(plan)
    own, rent = found.find("owned"), found.find("cloud")
    if found.break_even_use is None:
        assert own.present > rent.present
    else:
        equal = forecast_ownership(change_plan(plan, use=found.break_even_use))
        sums = [equal.find(name).present for name in ("owned", "cloud")]
        assert sums[0] == pytest.approx(sums[1], rel=1e-6)
        assert (own.present < rent.present) == (use > found.break_even_use) or (
            own.present == pytest.approx(rent.present, rel=1e-9)
        )
        at = find_change(plan, "use")
        assert at is None or at == pytest.approx(found.break_even_use, rel=1e-6)


def test_the_tornado_and_the_spread_follow_the_ranges() -> None:
    plan = make_plan(owned__price_usd=200_000, cloud__on_demand_usd_hr=20, use=0.5, years=3)
    wide = make_assumption("cloud.on_demand_usd_hr", 20, "a test", low=10, high=30)
    narrow = make_assumption("owned.price_usd", 200_000, "a test", low=190_000, high=210_000)
    changed = {
        name: make_assumption(name, each.value, each.source)
        for name, each in plan.assumptions.items()
    }
    plan = OwnershipPlan(
        name="test",
        assumptions={**changed, "cloud.on_demand_usd_hr": wide, "owned.price_usd": narrow},
    )
    rows = make_tornado(plan)
    assert [row.assumption.name for row in rows] == ["cloud.on_demand_usd_hr", "owned.price_usd"]
    assert rows[0].span == pytest.approx(20 * 0.5 * 8760 * 3)
    assert rows[1].span == pytest.approx(20_000)
    spread = simulate_ownership(plan, Random(7), range(400))
    low, half, high = spread.percentiles["cloud"]
    assert 10 * 13_140 < low < half < high < 30 * 13_140
    assert half == pytest.approx(20 * 13_140, rel=0.05)
    assert simulate_ownership(plan, Random(7), range(400)) == spread
    assert 0 < spread.owning_wins < 1


PLAN = """
machines: 2
use: 60%
owned: {price_usd: 300000, power_kw: 10}
cloud: {on_demand_usd_hr: {value: 24, low: 20, high: 30, source: an offer, as_of: 2026-11-20}}
"""
FOUND = {
    name: make_assumption(name, 0.0, "a test")
    for name in ("cloud.spot_overhead", "cloud.egress_usd_gb")
}


def test_a_plan_states_values_with_ranges_sources_and_days() -> None:
    plan = complete_plan(read_cost_plan(PLAN, "plan.yaml"), FOUND)
    price = plan.assumptions["cloud.on_demand_usd_hr"]
    assert (price.low, price.value, price.high, price.source) == (20, 24, 30, "an offer")
    assert str(price.as_of) == "2026-11-20"
    assert plan.values["use"] == 0.6
    assert plan.values["mixed.machines"] == 1
    assert all(each.source for each in plan.assumptions.values())


def test_a_tariff_by_hour_counts_as_its_mean() -> None:
    tariff = "[{from: 8, to: 20, usd_kwh: 0.2}, {from: 20, to: 8, usd_kwh: 0.1}]"
    text = PLAN.replace("power_kw: 10", f"power_kw: 10, tariff_usd_kwh: {tariff}")
    plan = complete_plan(read_cost_plan(text, "plan.yaml"), FOUND)
    assert plan.values["owned.tariff_usd_kwh"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("machines: 2", "machines: 0", "machines: expected 1 to 100000"),
        ("machines: 2", "machines: 1e99", "machines: expected 1 to 100000"),
        ("machines: 2", "machines: true", "machines: expected a number"),
        ("machines: 2", "", "machines is missing"),
        ("machines: 2", "machines: 2.5", "machines: expected a whole number, not 2.5"),
        ("machines: 2", "machines: 2\nmixed: {machines: 1.5}", "mixed.machines: expected a whole"),
        ("price_usd: 300000", "price_usd: 0", "owned.price_usd: expected 1 to"),
        ("value: 24, low: 20", "value: 0, low: 0", "cloud.on_demand_usd_hr: expected 0.0001 to"),
        ("use: 60%", "use: 100%", "use is 1, but own machines can work in 0.95"),
        ("use: 60%", "use: 160%", "use: expected 0 to 1"),
        ("use: 60%", "use: .nan", "use: expected a number"),
        ("use: 60%", "use: {jobs: a.csv}", "use: expected a number, `recorded`, or a table"),
        ("price_usd: 300000", "price_usd: 1000000000000", "owned.price_usd: expected 1 to 5e+07"),
        ("price_usd: 300000", "price_usd: -1", "owned.price_usd: expected 1 to 5e+07"),
        ("price_usd: 300000", "price_usd: [1]", "owned.price_usd: expected a number"),
        ("price_usd: 300000", "price: 300000", "there is no value 'owned.price'"),
        ("value: 24", "value: 35", "35 is not between low (20) and high (30)"),
        ("value: 24", "usd: 24", "there is no 'usd'"),
        ("as_of: 2026-11-20", "as_of: soon", "as_of: expected a day such as"),
        ("power_kw: 10", "power_kw: 10, capital_rate: -0.1", "owned.capital_rate: expected 0 to 1"),
        (
            "power_kw: 10",
            "power_kw: 10, tariff_usd_kwh: [{from: 0, to: 12, usd_kwh: 0.2}]",
            "the hour 12 has no price",
        ),
        (
            "power_kw: 10",
            "power_kw: 10, tariff_usd_kwh: [{from: 0, to: 0, usd_kwh: 1}, {from: 3, to: 4, usd_kwh: 1}]",
            "the hour 3 has two prices",
        ),
        ("machines: 2", "machines: 2\nmixed: {machines: 3}", "mixed.machines is 3, but the plan"),
        ("machines: 2", "machines: 2\nmixed: 3", "mixed: expected a table"),
        ("on_demand_usd_hr", "spot_share: 0.5, on_demand_usd_hr", "cloud.spot_usd_hr is missing"),
        ("machines: 2", "machines: 2\ngpu: {a: 1}", "gpu: expected a name"),
    ],
)
def test_odd_plans_get_clear_errors(old: str, new: str, said: str) -> None:
    assert old in PLAN
    with pytest.raises(CostPlanError) as caught:
        complete_plan(read_cost_plan(PLAN.replace(old, new), "plan.yaml"), FOUND)
    assert said in str(caught.value)


def test_sent_data_without_a_price_does_not_count_as_free() -> None:
    text = PLAN.replace("cloud: {", "cloud: {egress_gb_month: 50, ")
    found = {"cloud.spot_overhead": FOUND["cloud.spot_overhead"]}
    with pytest.raises(CostPlanError, match=r"the price of the egress .* is unknown"):
        complete_plan(read_cost_plan(text, "plan.yaml"), found)
    complete_plan(read_cost_plan(text, "plan.yaml"), FOUND)


def test_one_machine_has_no_mix() -> None:
    plan = complete_plan(read_cost_plan(PLAN.replace("machines: 2", "machines: 1"), "p"), FOUND)
    assert [each.name for each in forecast_ownership(plan).options] == ["cloud", "owned"]
    assert set(simulate_ownership(plan, Random(1), range(20)).percentiles) == {"cloud", "owned"}


@settings(max_examples=40)
@example(years=0.5, life=1.0, trend=2.0**-23, capital=0.0, residual=0.0, mixed=0)
@given(
    years=st.floats(0.25, 12),
    life=st.floats(0.5, 6),
    trend=st.floats(-0.5, 1),
    capital=st.sampled_from([0.0, 0.07]),
    residual=st.floats(0, 0.9),
    mixed=st.integers(0, 4),
)
def test_the_spread_is_that_of_the_forecasts(
    years: float, life: float, trend: float, capital: float, residual: float, mixed: int
) -> None:
    plan = make_plan(
        machines=4,
        use=0.7,
        years=years,
        mixed__machines=mixed,
        owned__price_usd=100_000,
        owned__setup_usd=5_000,
        owned__life_years=life,
        owned__residual=residual,
        owned__capital_rate=capital,
        owned__power_kw=8,
        owned__spares=0.1,
        cloud__on_demand_usd_hr=20,
        cloud__spot_usd_hr=5,
        cloud__spot_share=0.3,
        cloud__price_trend=trend,
        cloud__egress_usd_gb=0.1,
        cloud__egress_gb_month=200,
    )
    certain = {
        name: make_assumption(name, each.value, each.source)
        for name, each in plan.assumptions.items()
    }
    plan = OwnershipPlan(name="test", assumptions=certain)
    spread = simulate_ownership(plan, Random(1), range(1))
    for option in forecast_ownership(plan).options:
        assert spread.percentiles[option.name][1] == pytest.approx(option.present, rel=1e-9)


@pytest.mark.parametrize("text", ["", "- a\n", "{}"])
def test_a_file_without_values_is_refused(text: str) -> None:
    with pytest.raises(CostPlanError, match="expected a table of values"):
        read_cost_plan(text, "plan.yaml")


@pytest.mark.parametrize("text", ["a: b: c\n", "&a [*a]\n", "[1, 2\n"])
def test_a_file_that_is_no_yaml_is_shown_with_its_line(text: str) -> None:
    with pytest.raises(SpecError, match=r"plan\.yaml:1:\d"):
        read_cost_plan(text, "plan.yaml")
