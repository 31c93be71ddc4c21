"""Discounts are spread over what was charged, to the micro-dollar."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.costs.discounts import (
    Discount,
    DiscountBase,
    parse_discounts,
    spread,
    spread_discounts,
)
from cavvy.domain.units import Money, UnitError


def base(subject: str, micros: int, account: str = "aws") -> DiscountBase:
    return DiscountBase(subject=subject, account=account, micros=micros)


def test_discounts_are_read_from_the_setting() -> None:
    percent, scoped, credit = parse_discounts("aws:12.5%, gcp@vision:5% ,aws:$1500")
    assert percent == Discount(account="aws", millionths=125_000)
    assert scoped == Discount(account="gcp@vision", millionths=50_000)
    assert credit == Discount(account="aws", credit=Money(1_500_000_000))
    assert [each.name for each in (percent, scoped, credit)] == [
        "aws:12.5%",
        "gcp@vision:5%",
        "aws:$1500",
    ]
    assert parse_discounts("") == ()


@pytest.mark.parametrize("wrong", ["aws", "aws:12", "aws:101%", "aws:$x", "aws:5%,aws:5%"])
def test_wrong_discounts_are_refused(wrong: str) -> None:
    with pytest.raises(UnitError):
        parse_discounts(wrong)


def test_what_is_left_by_rounding_goes_to_the_largest_remainders() -> None:
    assert spread(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert spread(10, {"a": 5, "b": 19}) == {"a": 2, "b": 8}  # 2.08 and 7.92
    assert spread(5, {"a": 0}) == {"a": 0}


def test_credits_pay_what_percentages_leave() -> None:
    charged = [base("a", 1000), base("b", 500), base("c", 70, "gcp")]
    discounts = parse_discounts("aws:$0.001, aws:10%, gcp:20%")
    assert spread_discounts(discounts, charged) == {
        "aws:10%": {"a": 100, "b": 50},
        "gcp:20%": {"c": 14},
        "aws:$0.001": {"a": 667, "b": 333},  # 1000 in proportion to 900 and 450
    }


def test_a_discount_of_the_server_is_not_one_of_a_projects_own_account() -> None:
    charged = [base("a", 1000), base("b", 500, "aws@vision")]
    assert spread_discounts(parse_discounts("aws:10%, aws@vision:20%"), charged) == {
        "aws:10%": {"a": 100},
        "aws@vision:20%": {"b": 100},
    }


@given(
    st.dictionaries(st.text("abc", min_size=1), st.integers(0, 10**12), max_size=6),
    st.lists(
        st.builds(
            Discount,
            account=st.just("aws"),
            millionths=st.integers(1, 1_000_000),
        )
        | st.builds(Discount, account=st.just("aws"), credit=st.builds(Money, st.integers(1))),
        max_size=4,
        unique_by=lambda each: each.name,
    ),
)
def test_discounts_never_exceed_what_was_charged(
    charged: dict[str, int], discounts: list[Discount]
) -> None:
    found = spread_discounts(discounts, [base(*each) for each in charged.items()])
    for subject, micros in charged.items():
        taken = sum(parts.get(subject, 0) for parts in found.values())
        assert 0 <= taken <= micros
    for discount in discounts:
        if not discount.millionths and len(discounts) == 1:
            most = min(discount.credit.micros, sum(charged.values()))
            assert sum(found[discount.name].values()) == most
