"""Shapes of the console's charts."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from tests.console_rig import NOW, CannedClient, spent

from cavvy.client.wire import StretchView
from cavvy.console import charts
from cavvy.console.charts import (
    OTHERS,
    PLOT_PX,
    DailySpending,
    day_of,
    spending_by_day,
    stacked_days,
    timeline,
)
from cavvy.console.memory import Memory

DAYS = [day_of(NOW) + timedelta(days=number) for number in range(3)]


def stretch(begin_s: float, end_s: float, attempt: int, spell: str = "running") -> StretchView:
    return StretchView(
        spell=spell,
        since=NOW + timedelta(seconds=begin_s),
        until=NOW + timedelta(seconds=end_s),
        attempt=attempt,
    )


def test_a_timeline_has_a_row_for_each_attempt() -> None:
    chart = timeline(
        [stretch(0, 25, 0, "queued"), stretch(25, 50, 1, "starting"), stretch(50, 100, 2)]
    )
    assert chart is not None
    assert [(bar.x, bar.width, bar.kind) for bar in chart.bars] == [
        (0, 25, "queued"),
        (25, 25, "starting"),
        (50, 50, "running"),
    ]
    assert chart.rows == ["before", "attempt 1", "attempt 2"]
    assert len({bar.y for bar in chart.bars}) == 3
    assert [mark.label for mark in chart.marks] == [
        "0s",
        "15s",
        "30s",
        "45s",
        "1m00s",
        "1m15s",
        "1m30s",
    ]


def test_nothing_has_no_chart() -> None:
    assert timeline([]) is None
    assert stacked_days(DailySpending(DAYS, {"a": [0, 0, 0]})) is None


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 40)), min_size=1, max_size=30
    )
)
def test_every_period_lies_within_the_chart(parts: list[tuple[float, float, int]]) -> None:
    chart = timeline([stretch(begin, begin + length, attempt) for begin, length, attempt in parts])
    assert chart is not None
    assert all(0 <= bar.x <= 100 and 0 < bar.width <= 100 for bar in chart.bars)
    assert all(bar.y >= 0 and bar.y + bar.height <= chart.height for bar in chart.bars)
    assert 1 <= len(chart.marks) <= 40
    assert all(0 <= mark.at <= 100 for mark in chart.marks)


def test_the_parts_of_a_day_are_stacked_to_its_sum() -> None:
    chart = stacked_days(
        DailySpending(DAYS, {"a": [1_000_000, 0, 3_000_000], "b": [1_000_000, 0, 2_000_000]})
    )
    assert chart is not None
    assert [level.label for level in chart.levels] == ["$0", "$2.50", "$5.00"]
    assert [bar.height for bar in chart.bars] == [32, 32, 96, 64]
    assert [bar.y for bar in chart.bars] == [PLOT_PX - 32, PLOT_PX - 64, PLOT_PX - 96, 0]
    assert chart.kinds == [("series-0", "a"), ("series-1", "b")]


@given(st.lists(st.integers(-10_000_000, 10**13), min_size=3, max_size=3))
def test_any_amounts_fit_into_the_plot(amounts: list[int]) -> None:
    chart = stacked_days(DailySpending(DAYS, {"a": amounts, "b": [5, 5, 5]}))
    assert chart is None or all(-0.1 <= bar.y <= PLOT_PX and bar.height > 0 for bar in chart.bars)


def test_spending_is_read_for_each_day_and_the_rest_is_added_up() -> None:
    rows = [spent(number + 1, user=f"u{number}") for number in range(9)]
    client = CannedClient({"/v1/ledger/sums": [*rows, spent(100, user="")]})
    spending = spending_by_day(client, Memory(), "user", NOW, 2)
    assert list(spending.days) == [day_of(NOW) - timedelta(days=1), day_of(NOW)]
    assert list(spending.series) == ["no user", "u8", "u7", "u6", "u5", "u4", OTHERS]
    assert list(spending.series[OTHERS]) == [1 + 2 + 3 + 4] * 2
    assert spending.totals == [145, 145]
    assert "since=2026-03-03T00%3A00%3A00%2B00%3A00" in client.asked[0]
    assert "until=2026-03-04T00%3A00%3A00%2B00%3A00" in client.asked[0]


def test_a_group_with_the_name_of_the_others_is_not_lost() -> None:
    rows = [spent(number + 1, project=f"p{number}") for number in range(7)]
    client = CannedClient({"/v1/ledger/sums": [*rows, spent(100, project=OTHERS)]})
    spending = spending_by_day(client, Memory(), "project", NOW, 1)
    assert list(spending.series) == ["p6", "p5", "p4", "p3", "p2", OTHERS]
    assert spending.totals == [128]


def test_curves_have_gaps_bands_and_a_summary() -> None:
    line = charts.Line(
        "rank 0", 0, 60, [1.0, None, 3.0, 2.0], [1.0, None, 2.0, 2.0], [1.0, None, 4.0, 2.0]
    )
    chart = charts.curves([line], "gpu_percent", datetime(2026, 3, 4, 23, 58, tzinfo=UTC))
    assert chart is not None
    band, curve = chart.curves
    assert curve.path.count("M") == 2, "a gap where nothing is known"
    assert band.kind == "band"
    assert [each.label for each in chart.levels] == ["0%", "50%", "100%"]
    assert [each.label for each in chart.marks] == ["23:58", "23:59", "00:00", "00:01"]
    assert chart.lines == [("rank 0", "1%", "2%", "4%", "2%")]


def test_the_chart_of_a_short_job_has_content() -> None:
    """A job of a few seconds has one value, which is drawn as long as its minute."""
    chart = charts.curves([charts.Line("node 0", 0, 60, [40.0])], "cpu_percent", NOW)
    assert chart is not None
    assert "h1000" in chart.curves[-1].path
    assert len({each.label for each in chart.marks}) == len(chart.marks)


def test_a_chart_of_what_differs_by_rounding_begins_at_zero() -> None:
    line = charts.Line("chat", 0.0, 60.0, [1.0, 0.999961, 1.0])
    chart = charts.curves([line], "replicas")
    assert chart is not None
    assert chart.levels[0].label == "0"
    far = charts.curves([charts.Line("chat", 0.0, 60.0, [90.0, 100.0])], "replicas")
    assert far is not None
    assert far.levels[0].label != "0"


def test_curves_of_several_lines_have_colors_and_lengths_of_time() -> None:
    lines = [charts.Line(f"job {each}", each * 60.0, 60, [1000.0, 1001.0]) for each in range(2)]
    chart = charts.curves(lines, "loss")
    assert chart is not None
    assert [kind for kind, _ in chart.kinds] == ["series-0", "series-1"]
    assert chart.marks[0].label == "0s"
    assert float(chart.levels[0].label.replace(",", "")) > 900, "far from 0, the axis begins there"
    assert charts.curves([charts.Line("x", 0, 60, [None])], "loss") is None
    zero = charts.curves([charts.Line("x", 0, 60, [0.0])], "net_in_mib_s")
    assert zero is not None
    assert zero.levels[0].label == "0 MiB/s"


def test_a_plot_of_offers_has_two_logarithmic_axes() -> None:
    points = [
        charts.Point(x=x, y=y, group=group, label=group, number=number)
        for number, (x, y, group) in enumerate([(0.5, 100, "a"), (5, 1000, "b"), (50, 2000, "b")])
    ]
    chart = charts.scatter(points)
    assert chart is not None
    assert [each.x for each in chart.dots] == [0.0, 50.0, 100.0]
    assert [each.kind for each in chart.dots] == ["series-1", "series-0", "series-0"]
    assert {"$0.50", "$5.00", "$50"} <= {each.label for each in chart.marks}
    assert charts.scatter([]) is None
    assert charts.scatter(points[:1]) is not None
