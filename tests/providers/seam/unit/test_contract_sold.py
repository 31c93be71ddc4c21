"""The comparison of offers with what a cloud sells names each difference and its likely cause."""

import re
from collections.abc import Mapping

import pytest
from tests.records import make_offer

from cavvy.domain.offers import Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import replace
from cavvy.providers.contract.sold import compare, read_table

TABLE = """
# type  places                accelerators  CPUs  memory  disk    price  spot
eight   north/n-1,north/n-2   8xH100/80GiB  192   2TiB    100GiB  23.20  9.10
small   south                 -             4     16GiB   -       0.03   -
part    south                 1/6xA10/4GiB  6     55GiB   -       0.454  -
"""
H100S = {"accelerator": "H100", "accelerator_count": 8, "accelerator_memory_mib": 81920}
SIZE = {"vcpus": 192, "memory_mib": 2 * 2**20, "disk_gib": 100}
EIGHT = make_offer("prairie/north/n-1/eight", 23_200_000, **H100S, **SIZE)
SPOT = replace(EIGHT, purchase=Purchase.SPOT, rate=parse_rate("9.10"))
SMALL = make_offer("prairie/south/small", 30_000, vcpus=4, memory_mib=16384, disk_gib=50)
PART = replace(
    SMALL,
    instance_type="part",
    accelerator="A10",
    accelerator_count=1,
    accelerator_part=1 / 6,
    accelerator_memory_mib=4096,
    vcpus=6,
    memory_mib=55 * 1024,
    rate=parse_rate("0.454"),
)
OFFERS = [EIGHT, SPOT, replace(EIGHT, zone="n-2"), replace(SPOT, zone="n-2"), SMALL, PART]


def test_offers_that_are_sold_do_not_differ() -> None:
    assert compare(read_table(TABLE), OFFERS) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": parse_rate(23.20 * 730)}, "not $16936: the right number, times the hours of a m"),
        ({"rate": parse_rate(23.20 / 3600)}, "divided by the seconds of an hour?"),
        ({"rate": parse_rate(23.20 / 60)}, "divided by the minutes of an hour?"),
        ({"rate": parse_rate(23.20 / 8)}, "0.125 times the right number"),
        ({"rate": HourlyRate(0)}, "the price is $23.2 an hour, not $0"),
        ({"rate": HourlyRate(-23_200_000)}, "-1 times the right number"),
        ({"accelerator_count": 1}, "the number of GPUs is 8, not 1: 0.125 times"),
        ({"accelerator": "H200"}, "the accelerator is H100, but the offer has H200"),
        ({"accelerator_memory_mib": 80}, "divided by the MiB of a GiB?"),
        ({"accelerator_memory_mib": 640 * 1024}, "8 times the right number"),
        ({"memory_mib": 2 * 2**20 * 1_000_000 // 1048576}, "divided by the MiB of a million bytes"),
        ({"memory_mib": 2048}, "the number of MiB of memory is 2097152, not 2048"),
        ({"vcpus": 96}, "the number of CPUs is 192, not 96"),
        ({"disk_gib": None}, "the number of GiB of disk is 100, not 0"),
    ],
)
def test_a_difference_is_named_with_its_likely_cause(
    changes: Mapping[str, object], words: str
) -> None:
    wrong = replace(EIGHT, **changes)  # type: ignore[arg-type]  # of any type
    (difference,) = compare(read_table(TABLE), [wrong, *OFFERS[1:]])
    assert difference.startswith("eight in north/n-1, on-demand: ")
    assert words in difference


def test_missing_offers_and_offers_of_what_is_not_sold_are_named() -> None:
    moved = replace(EIGHT, zone=None)
    assert compare(read_table(TABLE), [moved, *OFFERS[1:]]) == [
        "eight in north, on-demand is offered, but not sold",
        "eight in north/n-1, on-demand is sold, but not offered",
    ]


def test_a_price_in_another_currency_is_converted() -> None:
    table = "small  south  -  4  16GiB  -  0.03EUR  -"
    assert compare(read_table(table), [replace(SMALL, rate=parse_rate("0.034821"))]) == []
    assert compare(read_table(table), [SMALL]) == [
        "small in south, on-demand: the price is $0.034821 an hour (0.03EUR), not $0.03: 0.862 "
        "times the right number"
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("small south - 4 16GiB 0.03", "expected the columns type, places, accelerators, CPUs"),
        ("small south 8 4 16GiB - 0.03 -", "expected accelerators such as 8xH100/80GiB, not '8'"),
        ("small south - 4 16GiB - $0.03 -", "expected a price such as 0.84 or 0.84EUR"),
    ],
)
def test_a_wrong_table_says_what_is_expected(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_table(line)
