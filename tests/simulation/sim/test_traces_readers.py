"""The readers of the public trace formats: what they read, and what they say of what they
cannot.
"""

from pathlib import Path

import pytest
from tests.simulation.spot_worlds import write_trace

from cavvy.capabilities.simulation.traces.readers import (
    TraceError,
    list_traces,
    make_world,
    move_prices,
    read_egress,
    read_prices,
    read_series,
    region_of,
)


def test_a_trace_is_its_changes(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "us-east-1a_v100_1.json", [0, 0, 1, 4, 4, 0])
    series = read_series(path, spot_ratio=0.25, on_demand_usd_hr=2.0)
    made = make_world([series])
    assert made.times_s == (0.0, 1200.0, 3000.0)
    assert [quotes[0].up for quotes in made.quotes] == [False, True, False]
    assert made.quotes[1][0].usd_hr == 0.5
    assert made.end_s == 3600.0
    assert (made.markets[0].name, made.markets[0].region) == ("us-east-1a_v100_1", "us-east-1")
    assert make_world([series], nodes=3).times_s == (0.0, 1800.0, 3000.0)


def test_prices_make_changes_too(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", [1, 1, 1, 1])
    made = make_world([read_series(path, prices=[1.0, 1.0, 2.0, 1.0])])
    assert made.times_s == (0.0, 1200.0, 1800.0)


def test_traces_are_found_below_folders(tmp_path: Path) -> None:
    one, two = (
        write_trace(tmp_path / "x" / "a.json", [1]),
        write_trace(tmp_path / "x" / "y" / "b.json", [1]),
    )
    assert list_traces([tmp_path]) == [one, two]
    assert list_traces([two]) == [two]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "expected an object"),
        ("{", "not a JSON file"),
        ('{"data": [1]}', "metadata.gap_seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "above 0"),
        ('{"metadata": {"gap_seconds": 9}, "data": []}', "expected a list with"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [1]}', "above 0"),
        ('{"metadata": {"gap_seconds": 9}, "data": [1, -1]}', r"data\[1\]"),
        ('{"metadata": {"gap_seconds": 9}, "data": [1, 1], "prices": [0.3]}', "expected 2 prices"),
        ('{"metadata": {"gap_seconds": 9}, "data": [1], "prices": ["dear"]}', "expected 1 prices"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_series(path)


def test_a_missing_place_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        list_traces([tmp_path / "none"])
    with pytest.raises(TraceError, match="no trace in"):
        list_traces([tmp_path])


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("us-east-1a_v100_1", "us-east-1"),
        ("us-central1-a_a100_40gb_8", "us-central1"),
        ("here", "here"),
    ],
)
def test_regions_of_zones(name: str, region: str) -> None:
    assert region_of(name) == region


def test_egress_and_prices(tmp_path: Path) -> None:
    egress, prices = tmp_path / "egress.csv", tmp_path / "prices.json"
    egress.write_text("from_region,to_region,price_usd_per_gb\na-1,b-1,0.02\n")
    prices.write_text('{"a-1a": [0.5, 0.25]}')
    assert read_prices(prices) == {"a-1a": [0.5, 0.25]}
    names = ["a-1a", "a-1b", "b-1a"]
    markets = [read_series(write_trace(tmp_path / f"{name}.json", [1])).market for name in names]
    assert move_prices(markets, read_egress(egress), 50.0) == (
        (0.0, 0.0, 1.0),
        (0.0, 0.0, 1.0),
        (0.0, 0.0, 0.0),
    )
    egress.write_text("from,to\na,b\n")
    with pytest.raises(TraceError, match="expected the columns"):
        read_egress(egress)
