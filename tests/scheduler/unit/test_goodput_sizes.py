"""Elastic jobs get the sizes and types that make the most progress."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.elastic import ElasticJob, ElasticSize
from cavvy.domain.values import replace
from cavvy.scheduler.goodput import GrowthRules, Room, choose_sizes


def size(nodes: int, speed: float, kind: str | None = "H100", gpus: int = 1) -> ElasticSize:
    return ElasticSize(nodes=nodes, accelerator=kind, accelerators_per_node=gpus, throughput=speed)


def job(name: str, speeds: dict[int, float] | None = None, **more: object) -> ElasticJob:
    sizes = tuple(size(n, s) for n, s in (speeds or {1: 10, 2: 19, 4: 34, 8: 50}).items())
    return ElasticJob(**{"id": name, "sizes": sizes, "remaining": 36000.0, **more})  # type: ignore[arg-type]


def nodes(jobs: list[ElasticJob], free: int, **rules: float) -> dict[str, int]:
    chosen = choose_sizes(jobs, Room(free={"H100": free}), GrowthRules(**rules))
    return {name: each.nodes for name, each in chosen.items()}


def test_each_job_has_its_least_size_before_one_grows() -> None:
    jobs = [job("a", remaining=10.0), job("b"), job("c", remaining=1e9)]
    assert nodes(jobs, 3) == {"a": 1, "b": 1, "c": 1}
    assert nodes(jobs, 2) == {"a": 1, "b": 1}, "the longest one waits"


def test_more_nodes_go_where_they_make_more_progress() -> None:
    flat = {1: 10.0, 2: 12.0, 4: 13.0}
    assert nodes([job("flat", flat), job("steep")], 5) == {"flat": 1, "steep": 4}


def test_a_job_that_would_end_sooner_grows_first() -> None:
    jobs = [job("long", remaining=360_000.0), job("short", remaining=9000.0)]
    assert nodes(jobs, 5) == {"long": 1, "short": 4}
    even = [job("b", remaining=3600.0), job("a", remaining=3600.0)]
    assert sorted(nodes(even, 4).values()) == [2, 2]


def test_a_job_of_unknown_length_is_expected_to_run_as_long_again() -> None:
    jobs = [job("old", remaining=None, done=1e7), job("new", remaining=None, done=0.0)]
    assert nodes(jobs, 5) == {"old": 1, "new": 4}


def test_growth_must_be_efficient() -> None:
    poor = {1: 10.0, 2: 11.0, 4: 12.0}
    assert nodes([job("a", poor)], 4, least_efficiency=0.2) == {"a": 1}
    assert nodes([job("a", poor)], 4, least_efficiency=0.0) == {"a": 4}


def test_growth_must_earn_its_restart() -> None:
    running = job("a")
    running = replace(running, current=running.sizes[0], resize_s=60.0)
    assert nodes([running], 8) == {"a": 8}
    flat = job("a", {1: 10.0, 8: 12.0})
    flat = replace(flat, current=flat.sizes[0], resize_s=60.0)
    rules = {"least_efficiency": 0.0}
    assert nodes([flat], 8, **rules) == {"a": 1}, "240 seconds at 12 are less than 300 at 10"
    assert nodes([flat], 8, horizon_s=3600.0, **rules) == {"a": 8}
    # a slow restart counts for the longer time that a size then lasts
    assert nodes([replace(running, resize_s=400.0)], 8) == {"a": 8}
    # a job that ends soon is left alone
    assert nodes([replace(running, remaining=600.0)], 8) == {"a": 1}


def test_a_new_job_takes_nodes_from_one_that_has_grown() -> None:
    grown = job("grown")
    grown = replace(grown, current=grown.sizes[3], resize_s=30.0)
    assert nodes([grown, job("new")], 8) == {"grown": 4, "new": 4}


def test_types_go_to_the_jobs_that_need_them() -> None:
    both = (size(1, 40, "A100"), size(1, 10, "T4"))
    same = (size(1, 11, "A100"), size(1, 10, "T4"))
    jobs = [
        ElasticJob(id="any", sizes=same, remaining=3600.0),
        ElasticJob(id="fast", sizes=both, remaining=3600.0),
    ]
    chosen = choose_sizes(jobs, Room(free={"A100": 1, "T4": 1}))
    assert {name: each.accelerator for name, each in chosen.items()} == {
        "any": "T4",
        "fast": "A100",
    }


def test_what_a_job_leaves_for_a_faster_type_goes_to_one_that_waits() -> None:
    """The urgent job gets the T4 first, as all others do, and then the A100 that nobody needs."""
    both = (size(1, 10, "T4"), size(1, 40, "A100", 4))
    jobs = [
        ElasticJob(id="urgent", sizes=both, remaining=600.0),
        ElasticJob(id="waits", sizes=(size(1, 1, "T4"),), remaining=1e6),
    ]
    chosen = choose_sizes(jobs, Room(free={"A100": 4, "T4": 1}))
    assert {name: each.accelerator for name, each in chosen.items()} == {
        "urgent": "A100",
        "waits": "T4",
    }


def test_what_a_job_leaves_of_its_quota_goes_to_one_of_the_same_project() -> None:
    """One A100 does what two T4 do for the urgent job, so half of the quota becomes free."""
    jobs = [
        ElasticJob(
            id="urgent",
            owner="x",
            sizes=(size(1, 10, "T4", 2), size(1, 40, "A100")),
            remaining=600.0,
        ),
        ElasticJob(
            id="fast", sizes=(size(1, 0.1, "T4"), size(1, 100, "A100")), remaining=600.0
        ),  # so T4 are cheap at first
        ElasticJob(id="waits", owner="x", sizes=(size(1, 1, "L4"),), remaining=1e6),
    ]
    chosen = choose_sizes(jobs, Room(free={"A100": 2, "T4": 2, "L4": 1}, quotas={"x": 2}))
    assert {name: each.accelerator for name, each in chosen.items()} == {
        "urgent": "A100",
        "fast": "A100",
        "waits": "L4",
    }


def test_nodes_without_accelerators_are_counted_themselves() -> None:
    sizes = tuple(size(n, 10.0 * n, None, 0) for n in (1, 2, 4))
    jobs = [ElasticJob(id=name, sizes=sizes, remaining=3600.0) for name in "ab"]
    chosen = choose_sizes(jobs, Room(free={None: 5}))
    assert sorted(each.nodes for each in chosen.values()) == [1, 4]


def test_the_weight_of_a_share_counts() -> None:
    assert nodes([job("a"), job("b", weight=8.0)], 9) == {"a": 1, "b": 8}


def test_quotas_hold() -> None:
    jobs = [job("a", owner="x"), job("b", owner="x"), job("c", owner="y")]
    chosen = choose_sizes(jobs, Room(free={"H100": 64}, quotas={"x": 3}))
    assert sorted(chosen[name].nodes for name in "ab") == [1, 2]
    assert chosen["c"].nodes == 8


def test_no_room_and_no_sizes() -> None:
    assert nodes([job("a")], 0) == {}
    assert nodes([ElasticJob(id="a", sizes=())], 4) == {}
    assert nodes([], 4) == {}


KINDS = ("H100", "A100", None)
speeds = st.floats(0.01, 1e6)
sizes = st.builds(
    ElasticSize,
    nodes=st.integers(1, 8),
    accelerator=st.sampled_from(KINDS),
    accelerators_per_node=st.sampled_from((1, 4, 8)),
    throughput=speeds,
    efficiency=st.floats(0.01, 1),
)


@st.composite
def workloads(draw: st.DrawFn) -> list[ElasticJob]:
    jobs = []
    for number in range(draw(st.integers(0, 8))):
        own = tuple(draw(st.lists(sizes, max_size=8)))
        jobs.append(
            ElasticJob(
                id=str(number),
                sizes=own,
                current=draw(st.sampled_from((None, *own))),
                resize_s=draw(st.floats(0, 1000)),
                remaining=draw(st.none() | st.floats(0, 1e9)),
                done=draw(st.floats(0, 1e9)),
                weight=draw(st.floats(0.1, 10)),
                owner=draw(st.sampled_from(("x", "y", ""))),
            )
        )
    return jobs


@given(workloads(), st.dictionaries(st.sampled_from(KINDS), st.integers(0, 64)), st.integers(0, 32))
def test_nothing_is_given_twice(
    jobs: list[ElasticJob], free: dict[str | None, int], quota: int
) -> None:
    chosen = choose_sizes(jobs, Room(free=free, quotas={"x": quota}))
    used: Counter[str | None] = Counter()
    of_owner: Counter[str] = Counter()
    for each in jobs:
        if (own := chosen.get(each.id)) is not None:
            assert own in each.sizes
            units = own.accelerators if own.accelerator else own.nodes
            used[own.accelerator] += units
            of_owner[each.owner] += units
    assert all(count <= free.get(kind, 0) for kind, count in used.items())
    assert of_owner["x"] <= quota
    # nobody waits for what is free
    for each in jobs:
        if each.id not in chosen and each.owner != "x":
            for one in each.sizes:
                units = one.accelerators if one.accelerator else one.nodes
                assert units > free.get(one.accelerator, 0) - used[one.accelerator]
