"""Values of steps are packed into few bytes without loss."""

from math import exp, inf, isnan, nan, sin
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cavvy.capabilities.curves.briefs import BriefTable, is_brief, read_brief_names, shorten, thin
from cavvy.capabilities.curves.kept import KeptBriefs
from cavvy.capabilities.curves.packing import Columns, join, pack, read_names, unpack
from cavvy.capabilities.curves.reduce import Piece, find_whole, make_curves
from cavvy.capabilities.curves.wire import Window

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.just(nan)


def same(one: list[float], two: list[float]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(a == b or (isnan(a) and isnan(b)) for a, b in pairs)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 1 << 45), NUMBERS, NUMBERS), min_size=1))
def test_all_that_is_packed_comes_back(rows: list[tuple[float, int, float, float]]) -> None:
    steps, times, one, two = (
        [float(each) for each in column] for column in zip(*rows, strict=True)
    )
    [found] = unpack(pack([Columns(("a", "b"), steps, times, [one, two])]))
    assert found.names == ("a", "b")
    assert same(found.steps, steps)
    assert same(found.times, times)
    assert same(found.values[0], one)
    assert same(found.values[1], two)


def test_infinity_is_kept_as_a_float() -> None:
    [found] = unpack(pack([Columns(("a",), [1.0], [2.0], [[inf]])]))
    assert found.values == [[inf]]


def test_a_point_of_a_smooth_curve_takes_at_most_two_bytes() -> None:
    count = 20_000
    steps = [float(each) for each in range(count)]
    times = [1.7e12 + 250 * each for each in range(count)]
    loss = [round(2 * exp(-each / 4000) + 0.01 * sin(each / 50), 4) for each in range(count)]
    acc = [round(1 - exp(-each / 3000), 3) for each in range(count)]
    rate = [round(1e-3 * (1 - each / count), 7) for each in range(count)]
    packed = pack([Columns(("loss", "acc", "lr"), steps, times, [loss, acc, rate])])
    assert len(packed) <= 2 * 3 * count


def test_pieces_are_joined_by_what_was_reported_together() -> None:
    one = [Columns(("a",), [1.0], [10.0], [[0.5]]), Columns(("b",), [1.0], [11.0], [[7.0]])]
    two = [Columns(("a",), [2.0], [20.0], [[0.4]])]
    assert join([one, two]) == [
        Columns(("a",), [1.0, 2.0], [10.0, 20.0], [[0.5, 0.4]]),
        Columns(("b",), [1.0], [11.0], [[7.0]]),
    ]
    assert one[0].steps == [1.0], "the pieces stay as they are"


def test_a_peak_stays_where_values_are_left_out() -> None:
    values = [0.0] * 100_000
    values[54_321], values[65_432] = 9.0, -9.0
    kept = thin(values, 200)
    assert len(kept) <= 200
    assert {0, 54_321, 65_432, 99_999} <= {*kept}
    assert [*thin(values[:50], 200)] == [*range(50)]


def test_values_without_a_step_are_counted() -> None:
    piece = pack([Columns(("a",), [nan, nan, nan], [30.0, 10.0, 20.0], [[3.0, 1.0, 2.0]])])
    [curve] = make_curves([Piece(1, piece, None)], 1, 0, (), 100)
    assert (curve.steps, curve.values, curve.count) == ([0, 1, 2], [1.0, 2.0, 3.0], 3)
    assert (curve.low, curve.high, curve.last) == (1.0, 3.0, 3.0)


def test_brief_pieces_show_the_same_curve() -> None:
    """A long run is drawn from the lowest and highest values of its pieces."""
    pieces, random = [], Random(1)
    for number in range(3):
        count = 20_000
        steps = [nan if number == 1 else float(number * count + each) for each in range(count)]
        times = [1e12 + (number * count + each) * 100 for each in range(count)]
        columns = [
            Columns(("a", "b"), steps, times, [[random.random() for _ in steps], [1.0] * count])
        ]
        pieces.append(Piece(len(pieces), pack(columns), BriefTable(shorten(columns))))
    whole = [each._replace(brief=None) for each in pieces]
    for names in ((), {"a"}):
        found, expected = (make_curves(each, 1, 0, names, 600) for each in (pieces, whole))
        assert [each.name for each in found] == [each.name for each in expected]
        for brief, each in zip(found, expected, strict=True):
            assert (brief.count, brief.low, brief.high) == (60_000, each.low, each.high)
            assert (brief.last, brief.steps[-1]) == (each.last, each.steps[-1])
            assert brief.steps == sorted(brief.steps)
            assert len(brief.values) <= 600
    [curve, _] = make_curves(pieces, 1, 0, (), 20_000)
    assert len(curve.values) > 10_000, "many values come from the whole pieces"


def test_few_large_differences_cost_little() -> None:
    values = [float(each % 3) for each in range(5_000)]
    values[700] = 3.0e9
    columns = [Columns(("a",), [*values], [*values], [values])]
    assert len(pack(columns)) < 5_000
    assert unpack(pack(columns)) == columns


def test_the_begin_of_a_brief_version_has_the_names() -> None:
    names = tuple(f"name-{number}" * 8 for number in range(256))
    columns = [Columns(names, [nan] * 9, [2.0] * 9, [[0.5] * 9] * 256)]
    brief = shorten(columns)
    assert is_brief(brief)
    assert not is_brief(pack(columns))
    assert read_brief_names(brief[: 64 << 10]) == [*names]


def long_pieces(count: int) -> list[Piece]:
    """Return pieces of 4,000 rows each, of which only the brief versions were read."""
    pieces = []
    for number in range(count):
        steps = [float(4_000 * number + each) for each in range(4_000)]
        values = [each % 7 + (100.0 if each == 6_001 else 0.0) for each in steps]
        columns = [Columns(("loss", "acc"), steps, [each * 10 for each in steps], [values, values])]
        pieces.append(Piece(number, pack(columns), BriefTable(shorten(columns))))
    return pieces


def test_a_small_window_needs_a_few_whole_pieces() -> None:
    pieces = long_pieces(6)
    brief = [each._replace(whole=None) for each in pieces]
    window = Window("step", 6_000, 6_100)
    assert find_whole(brief, ("loss",), window, 800) == [1]
    assert find_whole(brief, ("loss",), Window("time", 119_000, 121_000), 800) == [2, 3]
    assert find_whole(brief, ("loss",), Window("step", 10, None), 800) == [], (
        "its brief versions do"
    )
    assert find_whole(brief, ("loss",), Window(), 800) == []
    read = [each if each.number == 1 else each._replace(whole=None) for each in pieces]
    [curve] = make_curves(read, 1, 0, ("loss",), 800, window)
    assert curve.steps == [*range(6_000, 6_101)]
    assert (curve.high, curve.count) == (100 + 6_001 % 7, 24_000)


def test_a_wide_window_keeps_the_peaks() -> None:
    brief = [each._replace(whole=None) for each in long_pieces(6)]
    [curve] = make_curves(brief, 1, 0, ("loss",), 800, Window("step", 4_000, 23_999))
    assert curve.high == 100 + 6_001 % 7
    assert min(curve.steps) >= 4_000
    assert len(curve.values) <= 802


def test_names_are_read_without_values() -> None:
    names = tuple(f"name-{number}" * 20 for number in range(100))
    columns = [Columns(names, [1.0], [2.0], [[0.5]] * 100), Columns(("x",), [1.0], [2.0], [[1.0]])]
    assert read_names(pack(columns)) == [*names, "x"]


def test_the_brief_versions_that_were_used_last_are_kept() -> None:
    tables = [each.brief for each in long_pieces(3)]
    assert all(tables)
    kept = KeptBriefs(most=2 * max(each.size for each in tables if each))
    for number, table in enumerate(tables):
        assert table is not None
        assert kept.keep(("a", 0, number), table) is table
        assert kept.find(("a", 0, 0)) is tables[0], "it is used each time"
    assert [kept.find(("a", 0, number)) is None for number in range(3)] == [False, True, False]
