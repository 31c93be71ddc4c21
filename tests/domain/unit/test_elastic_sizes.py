"""The sizes of an elastic job."""

from itertools import pairwise

from cavvy.domain.elastic import MOST_SIZES, ElasticSize, NodeRange, fit_sizes


def test_a_range_has_both_of_its_ends() -> None:
    both = NodeRange(least=2, most=4)
    assert [nodes for nodes in range(7) if nodes in both] == [2, 3, 4]
    assert str(both) == "2..4"


def test_of_a_wide_range_few_sizes_are_tried_from_end_to_end() -> None:
    assert NodeRange(least=3, most=18).list_sizes() == [*range(18, 2, -1)]
    for least, most in [(1, 17), (1, 64), (7, 300), (1, 10_000), (9_000, 10_000), (5, 10**6)]:
        sizes = NodeRange(least=least, most=most).list_sizes()
        assert (sizes[0], sizes[-1], len(sizes)) == (most, least, MOST_SIZES), sizes
        even = (most / least) ** (1 / (MOST_SIZES - 1))
        pairs = [*pairwise(sizes)]
        assert all(1 <= more - less <= max(1, 1.1 * even * less - less) for more, less in pairs)
    assert NodeRange(least=2, most=10_000).list_sizes(3) == [3, 2]
    assert NodeRange(least=2, most=10_000).list_sizes(1) == [2]


def test_the_sizes_between_two_that_were_tried() -> None:
    wide = NodeRange(least=1, most=64)
    assert wide.list_sizes()[:4] == [64, 51, 40, 32]
    assert wide.find_finer(40) == NodeRange(least=40, most=50)
    assert wide.find_finer(64) is None
    assert wide.find_finer(40, most=40) is None
    assert NodeRange(least=1, most=16).find_finer(4) is None


def test_the_best_size_that_fits_is_first() -> None:
    sizes = [
        ElasticSize(nodes=nodes, accelerator=name, accelerators_per_node=8, throughput=speed)
        for name, nodes, speed in (
            ("H100", 2, 20.0),
            ("H100", 4, 30.0),
            ("H100", 8, 30.0),
            ("A100", 4, 90.0),
        )
    ]
    assert [each.nodes for each in fit_sizes(sizes, 8, "H100")] == [4, 8, 2]
    assert [each.nodes for each in fit_sizes(sizes, 3, "H100")] == [2]
    assert fit_sizes(sizes, 1, "H100") == []
    assert sizes[1].accelerators == 32


def test_a_larger_batch_that_learns_less_from_each_sample_counts_less() -> None:
    fast = ElasticSize(nodes=4, throughput=40.0, efficiency=0.5)
    slow = ElasticSize(nodes=2, throughput=25.0)
    assert fit_sizes([fast, slow], 4) == [slow, fast]
