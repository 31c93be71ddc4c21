"""Which placements are rated better: what typical jobs cannot use, and what runs out first."""

from hypothesis import given
from hypothesis import strategies as st

from cavvy.scheduler.fragmentation import (
    FreeNode,
    NodeDemand,
    PlacementRater,
    find_largest,
    find_typical,
    list_placements,
    measure_fragments,
)

NODE = FreeNode(8, 64, (1000, 1000, 1000, 1000), "A100")
HALF = NodeDemand(1, 1, 1, 500)
TWO = NodeDemand(2, 1, 2)


def test_typical_are_the_most_frequent_demands() -> None:
    rare = [NodeDemand(cpus, 1, 1) for cpus in range(5)]
    assert find_typical([*[HALF] * 70, *[TWO] * 25, *rare]) == [(HALF, 70 / 95), (TWO, 25 / 95)]
    assert find_typical([]) == []


def test_fragments_are_what_typical_jobs_cannot_use() -> None:
    node = FreeNode(8, 64, (0, 300, 600, 1000))
    assert measure_fragments(node, [(HALF, 1.0)]) == 300
    assert measure_fragments(node, [(TWO, 1.0)]) == 1900  # only one is entirely free
    assert measure_fragments(node, [(NodeDemand(9, 1, 1, 100), 1.0)]) == 1900  # too few CPUs
    assert measure_fragments(node, [(NodeDemand(1, 99, 1, 100), 1.0)]) == 1900  # too little memory
    assert measure_fragments(node, [(NodeDemand(1, 1), 1.0)]) == 1900  # needs no accelerator
    assert measure_fragments(node, [(HALF, 0.5), (TWO, 0.5)]) == 1100
    other = NodeDemand(1, 1, 1, 100, ("H100",))
    assert measure_fragments(node, [(other, 1.0)]) == 1900  # of another kind


def test_a_part_may_come_from_any_accelerator_that_has_enough() -> None:
    node = FreeNode(8, 64, (300, 600, 600, 1000))
    assert [left.devices for left in list_placements(node, HALF)] == [
        (100, 300, 600, 1000),
        (300, 500, 600, 600),
    ]
    assert list_placements(node, TWO) == ()
    assert list_placements(NODE, NodeDemand(9, 1)) == ()
    (left,) = list_placements(NODE, TWO)
    assert left == FreeNode(6, 63, (0, 0, 1000, 1000), "A100")


def rate(before: FreeNode, demand: NodeDemand, typical: list[NodeDemand]) -> float:
    rater = PlacementRater(find_typical(typical), find_largest([NODE]))
    return min(rater.rate(before, after) for after in list_placements(before, demand))


def test_a_job_goes_where_it_breaks_least() -> None:
    one = NodeDemand(1, 1, 1)
    pairs = FreeNode(8, 64, (0, 0, 1000, 1000), "A100")
    odd = FreeNode(8, 64, (0, 1000, 1000, 1000), "A100")
    assert rate(odd, one, [TWO]) < rate(pairs, one, [TWO])
    part, full = FreeNode(8, 64, (500, 1000)), FreeNode(8, 64, (1000, 1000))
    assert rate(part, HALF, [TWO, HALF]) < rate(full, HALF, [TWO, HALF])


def test_of_equal_nodes_the_fullest_is_taken() -> None:
    assert rate(NODE._replace(cpus=2), NodeDemand(1, 1), []) < rate(NODE, NodeDemand(1, 1), [])


def test_jobs_without_accelerators_go_where_cpus_are_plentiful() -> None:
    """Else accelerators stay free because the CPUs beside them are gone."""
    typical = [NodeDemand(4, 1, 1)]
    rich, poor = NODE._replace(cpus=20), NODE._replace(cpus=16)
    assert rate(rich, NodeDemand(3, 1), typical) < rate(poor, NodeDemand(3, 1), typical)
    rich, poor = NODE._replace(memory_mib=20), NODE._replace(memory_mib=16)
    typical = [NodeDemand(0, 4, 1)]
    assert rate(rich, NodeDemand(0, 3), typical) < rate(poor, NodeDemand(0, 3), typical)


@given(
    st.lists(st.integers(0, 10).map(lambda tenths: 100 * tenths), max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 10)), max_size=5),
)
def test_no_more_is_a_fragment_than_is_free(
    devices: list[int], jobs: list[tuple[int, int, int]]
) -> None:
    node = FreeNode(8, 8, tuple(sorted(devices)))
    demands = [NodeDemand(cpus, 1, count, 100 * tenths) for cpus, count, tenths in jobs]
    found = measure_fragments(node, find_typical(demands))
    assert -1e-6 <= found <= sum(devices) + 1e-6
    for demand in demands:
        for left in list_placements(node, demand):
            assert sum(node.devices) - sum(left.devices) == demand.devices * demand.part
            assert min((left.cpus, left.memory_mib, *left.devices)) >= 0


def test_the_largest_node_has_the_most_of_each() -> None:
    found = find_largest([FreeNode(1, 9, (1000, 1000)), FreeNode(5, 2, (1000,))])
    assert found == FreeNode(5, 9, (1000, 1000))
