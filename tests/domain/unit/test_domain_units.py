"""Money, lengths of time and memory: read from what people write, and never wrong by a
micro-dollar.
"""

import re
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cavvy
from cavvy.domain.units import (
    HourlyRate,
    Money,
    UnitError,
    count_decimals,
    format_count,
    format_duration,
    format_measure,
    format_memory,
    format_price,
    format_rate,
    format_usd,
    parse_duration,
    parse_memory_mib,
    parse_rate,
    parse_usd,
)


@given(st.integers(0, (1 << 63) - 1))
def test_money_is_read_back_as_it_is_written(micros: int) -> None:
    assert parse_usd(str(Money(micros).usd)) == Money(micros)
    assert parse_usd(f"${Money(micros).usd:,.6f}") == Money(micros)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_length_costs_its_share_of_the_hour_rounded_half_up(
    rate: int, seconds: int, micros: int
) -> None:
    length = timedelta(seconds=seconds, microseconds=micros)
    exact = Fraction(rate * (length // timedelta(microseconds=1)), 3_600_000_000)
    cost = HourlyRate(rate).over(length).micros
    assert cost - Fraction(1, 2) <= exact < cost + Fraction(1, 2)


@pytest.mark.parametrize(
    ("text", "micros"),
    [("3.60", 3_600_000), ("$15", 15_000_000), (2.5, 2_500_000), ("1,000 USD", 10**9), ("5e-7", 1)],
)
def test_dollars(text: str | float, micros: int) -> None:
    assert parse_usd(text).micros == micros
    assert parse_rate(f"{text}").micros_per_hour == micros


@pytest.mark.parametrize(
    "text", ["", "cheap", "-1", "NaN", "sNaN", "inf", "1e999999999", "9223372036854.775808", "1/h"]
)
def test_what_is_no_money(text: str) -> None:
    with pytest.raises(UnitError):
        parse_usd(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        ("90s", 90),
        ("1h30m", 5400),
        ("1 hour 30 minutes", 5400),
        ("2D", 172800),
        ("1.5h", 5400),
        ("5ms", 0.005),
    ],
)
def test_lengths_of_time(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "5 parsecs",
        "-5s",
        "5",
        "1h!",
        True,
        -1,
        float("nan"),
        float("inf"),
        "9" * 400 + "d",
    ],
)
def test_what_is_no_length_of_time(text: str | float) -> None:
    with pytest.raises(UnitError) as caught:
        parse_duration(text)
    assert len(str(caught.value)) < 600


@given(st.integers(0, 10**9))
def test_whole_seconds_survive(seconds: int) -> None:
    assert parse_duration(f"{seconds}s") == parse_duration(seconds) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("16GB", 16384),
        ("512MiB", 512),
        ("1.5TB", 1572864),
        (64, 65536),
        ("0.5", 512),
        ("8 g", 8192),
    ],
)
def test_memory(text: str | int, mib: int) -> None:
    assert parse_memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "much", "-4", "16XB", True, "1e3GB", "9" * 5000])
def test_what_is_no_memory(text: str | bool) -> None:
    with pytest.raises(UnitError):
        parse_memory_mib(text)


@pytest.mark.parametrize(
    ("micros", "decimals"),
    [
        ((), 2),
        ((1_000_000, 250_000), 2),
        ((0, 1_200_000), 2),
        ((74_000, 23_000), 3),  # $0.07 + $0.02 is not $0.10
        ((500, 1_200_000), 4),  # "$0.00" is no part of a bill
        ((1, 2), 6),
    ],
)
def test_printed_amounts_add_up_to_their_printed_sum(
    micros: tuple[int, ...], decimals: int
) -> None:
    assert count_decimals([Money(each) for each in micros]) == decimals


def test_shown_to_people() -> None:
    assert format_usd(Money(97_000), 3) == "$0.097"
    assert format_usd(Money(-1_234_500_000)) == "-$1,234.50"
    assert format_usd(Money(500), 4) == "$0.0005"
    assert [format_usd(Money(micros)) for micros in (0, 500, 1_200_000, 1_234_567_890_000)] == [
        "$0.00",
        "<$0.01",
        "$1.20",
        "$1,234,567.89",
    ]
    lengths = (0.42, 5, 42, 185, 7800, 273600)
    shown = [format_duration(timedelta(seconds=each)) for each in lengths]
    assert shown == ["0.4s", "5s", "42s", "3m05s", "2h10m", "3d04h"]
    assert [format_memory(mib) for mib in (512, 1536, 81920)] == ["512 MiB", "1.5 GiB", "80 GiB"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("gpu_memory_mib", 7123.5, "GPU memory 7.0 GiB"),
        ("memory_mib", 3.2, "memory 3 MiB"),
        ("cpu_percent", 24.71, "CPU 24.7%"),
        ("cpu_percent", 1590.2, "CPU 1590%"),
        ("done", 1234567.0, "done 1,234,567"),
        ("done", 4e7, "done 40,000,000"),
        ("tokens_s", 512.0, "tokens s 512"),
        ("loss", 2.34567891, "loss 2.34568"),
        ("lr", 0.0003, "lr 0.0003"),
        ("loss", float("nan"), "loss nan"),
        ("loss", float("inf"), "loss inf"),
        ("eta", "soon", "eta soon"),
        ("disk_mib", "none", "disk none"),
    ],
)
def test_values_of_nodes_are_shown_with_units(name: str, value: float | str, shown: str) -> None:
    assert format_measure(name, value) == shown


@pytest.mark.parametrize(
    ("micros", "shown"),
    [
        (0, "0.00"),
        (1, "0.000001"),
        (49, "0.000049"),
        (300, "0.0003"),
        (1_500, "0.0015"),
        (42_000, "0.0420"),
        (1_200_000, "1.20"),
    ],
)
def test_no_rate_above_zero_is_shown_as_zero(micros: int, shown: str) -> None:
    assert format_rate(HourlyRate(micros)) == f"${shown}/h"
    assert format_price(micros / 1e6) == f"${shown}"


def test_no_price_or_amount_is_shown_as_zero() -> None:
    assert format_price(4e-9) == "<$0.000001"
    assert format_price(1234.5) == "$1,234.50"
    assert format_usd(Money(-500)) == ">-$0.01"
    for micros in (10**digits * first for digits in range(10) for first in (1, 4, 9)):
        for shown in (format_price(Money(micros).usd), format_usd(Money(micros))):
            assert re.search(r"[1-9]", shown), micros


def test_dollars_are_formatted_in_one_place() -> None:
    """A fixed number of decimals shows a small price as $0.00."""
    fixed = re.compile(r"\$\{[^{}]*:,?\.[1-5]f\}")
    folder = Path(cavvy.__file__).parent
    found = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if fixed.search(path.read_text("utf-8"))
    }
    assert found == set()


def test_one_thing_is_not_named_in_the_plural() -> None:
    counts: tuple[float, ...] = (0, 1, 2, 1200, 1.0, 0.5)
    shown = [format_count(each, "line") for each in counts]
    assert shown == ["0 lines", "1 line", "2 lines", "1,200 lines", "1 line", "0.5 lines"]
