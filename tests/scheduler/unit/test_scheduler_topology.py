"""Which hosts a gang gets by their racks and blocks, and in which order."""

from collections.abc import Sequence
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st
from tests.scheduler.unit.test_scheduler_queue import CPU, T0, plan_jobs, waiting_job

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import JobRecord
from cavvy.domain.tasks import ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.values import replace
from cavvy.planner.shared_hosts import object_to_topology
from cavvy.scheduler.queue import JobPlacement, JobWait, QueueCapacity
from cavvy.scheduler.topology import HostLabels, choose_hosts, explain_lack, spread_slices

GROUP = replace(CPU, provider="hall", region="a")


def make_hosts(racks: str, blocks: str = "") -> tuple[Host, ...]:
    """Return one host for each letter; hosts with the same letter are in one rack, and `-` is a
    host without a label."""
    return tuple(
        Host(
            name=f"hall/{at}",
            cpus=4,
            memory_mib=8192,
            group="hall/a",
            labels=tuple(
                (label, value)
                for label, value in (("rack", rack), ("block", blocks[at : at + 1]))
                if value not in ("-", "")
            ),
        )
        for at, rack in enumerate(racks)
    )


def choose(hosts: Sequence[Host], nodes: int, need: TopologyNeed | None, free: str = "") -> str:
    """Return the racks of the chosen hosts in the order of ranks, or what the racks lack. In
    `free`, a dot marks a host that is not free."""
    labels = HostLabels([host.labels for host in hosts])
    at = [n for n in range(len(hosts)) if free[n : n + 1] != "."]
    found = choose_hosts(labels, at, nodes, need)
    if found is None:
        return explain_lack(labels, at, nodes, need)
    assert len(set(found)) == nodes
    assert set(found) <= set(at)
    return "".join(dict(hosts[each].labels).get("rack", "-") for each in found)


def gang(name: str, nodes: int, need: TopologyNeed | None, cpus: float = 4) -> JobRecord:
    task = TaskSpec(
        name=name,
        run="x",
        nodes=nodes,
        topology=need,
        resources=ResourceSpec(cpus_min=cpus),
    )
    return JobRecord(id=name, project="p", name=name, task=task, submitted_at=T0, since=T0)


SAME, PREFER = TopologyNeed(same="rack"), TopologyNeed(prefer="rack")


def test_a_required_rack_is_the_one_with_the_fewest_free_hosts() -> None:
    hosts = make_hosts("aaaabbbcc")
    assert choose(hosts, 3, SAME) == "bbb"
    assert choose(hosts, 2, SAME) == "cc"
    assert choose(hosts, 3, SAME, "    .") == "aaa"


def test_a_wait_says_what_the_racks_lack() -> None:
    hosts = make_hosts("aaaabbbb-")
    assert choose(hosts, 5, SAME) == "needs 5 nodes of one rack; the best rack (a) has 4 free"
    lack = choose(hosts, 8, TopologyNeed(same="rack", slice=8))
    assert lack == "needs 8 nodes of one rack; the best rack (a) has 4 free"
    lack = choose(hosts, 6, TopologyNeed(same="rack", slice=3), "..")
    assert lack == "needs 2 slices of 3 nodes, each in one rack; there is room for 1 slice"
    assert choose(make_hosts("---"), 2, SAME) == "needs 2 nodes of one rack; none has any free"


def test_a_preferred_rack_is_left_only_if_none_holds_the_gang() -> None:
    hosts = make_hosts("aaabbbbccd-")
    assert choose(hosts, 4, PREFER) == "bbbb"
    assert choose(hosts, 6, PREFER) == "bbbbcc"  # the largest rack, and the smallest for the rest
    assert choose(hosts, 11, PREFER) == "-aaabbbbccd"
    assert choose(hosts, 12, PREFER) == ""


def test_slices_are_spread_evenly_over_few_racks() -> None:
    need = TopologyNeed(same="rack", slice=2)
    assert choose(make_hosts("aaaaaabbbbcccc"), 8, need) == "bbbbcccc"
    assert choose(make_hosts("aaaaaabbbbccc"), 10, need) == "aaaaaabbbb"
    assert choose(make_hosts("aaabbbccc"), 6, need) == "aabbcc"
    assert spread_slices([4, 4, 3], 1, 5) == [2, 0, 3]
    assert spread_slices([20, 3], 2, 11) == [10, 1]
    assert spread_slices([3, 1], 2, 2) is None


def test_a_block_is_required_and_a_rack_within_it_preferred() -> None:
    hosts = make_hosts("aabbccdd", "xxxxyyyy")
    need = TopologyNeed(same="block", prefer="rack")
    assert choose(hosts, 2, need, ".  ") == "bb"
    assert choose(hosts, 3, need, ".   .") == "abb"
    need = TopologyNeed(same="rack", slice=2, prefer="block")
    assert choose(hosts, 4, need, ".") == "ccdd"


def test_neighbours_in_rank_are_neighbours_in_the_network() -> None:
    hosts = make_hosts("abcdabcd", "xyxyxyxy")
    assert choose(hosts, 8, None) == "aaccbbdd"
    assert choose(hosts, 8, TopologyNeed(same="rack", slice=2)) == "aaccbbdd"
    crossing = make_hosts("abababab", "xxxxyyyy")  # racks that stand in several blocks
    assert choose(crossing, 8, TopologyNeed(same="rack", slice=4)) == "aaaabbbb"


def test_a_gang_waits_for_its_rack_and_a_later_one_takes_another() -> None:
    hosts = make_hosts("aabb")
    held = Allocation(host="hall/0", gang="g", rank=0, project="p", cpus=4, memory_mib=0)
    capacity = QueueCapacity(hosts=hosts, allocations=(held,))
    waits, place = plan_jobs(
        [
            waiting_job(gang("wide", 3, SAME), GROUP),
            waiting_job(gang("small", 2, SAME), GROUP),
        ],
        capacity,
    )
    assert isinstance(waits, JobWait)
    assert waits.reason == (
        "waits for free capacity at hall/a: needs 3 nodes of one rack; the best rack (b) has 2 free"
    )
    assert isinstance(place, JobWait)  # the earlier job may wait for these hosts
    (alone,) = plan_jobs([waiting_job(gang("small", 2, SAME), GROUP)], capacity)
    assert isinstance(alone, JobPlacement)
    assert [each.host for each in alone.allocations] == ["hall/2", "hall/3"]


def test_what_the_labels_can_never_give_is_said() -> None:
    hosts = make_hosts("aabb", "xxxx")
    task = gang("t", 3, SAME).task
    assert object_to_topology(task, GROUP, hosts, hosts).endswith(
        "topology: needs 3 nodes of one rack; the best rack (a) has 2 free, even if all nodes were "
        "idle"
    )
    for need in (TopologyNeed(same="rak"), TopologyNeed(prefer="rak")):
        told = object_to_topology(replace(task, topology=need), GROUP, hosts, hosts)
        assert told.endswith("topology: no node has the label rak; the labels are block, rack")
    none = make_hosts("----")
    assert object_to_topology(task, GROUP, none, none).endswith("the hosts have no labels")
    assert object_to_topology(replace(task, topology=PREFER), GROUP, none, none) == ""


def with_disk(name: str, nodes: int, gib: int) -> JobRecord:
    given = gang(name, nodes, None, cpus=1)
    return replace(
        given, task=replace(given.task, resources=ResourceSpec(cpus_min=1, disk_gib=gib))
    )


def test_each_rank_gets_a_host_with_enough_disk_beside_what_others_hold() -> None:
    hosts = [
        replace(host, disk_gib=gib)
        for host, gib in zip(make_hosts("----"), (100, 500, 900, 500), strict=True)
    ]
    first, second = plan_jobs(
        [
            waiting_job(with_disk("a", 2, 400), GROUP),
            waiting_job(with_disk("b", 2, 400), GROUP),
        ],
        QueueCapacity(hosts=hosts),
    )
    assert isinstance(first, JobPlacement)
    assert [each.host for each in first.allocations] == ["hall/1", "hall/2"]
    assert [each.disk_gib for each in first.allocations] == [400, 400]
    assert isinstance(second, JobPlacement)
    assert [each.host for each in second.allocations] == ["hall/2", "hall/3"]
    taken = QueueCapacity(hosts=hosts, allocations=first.allocations + second.allocations)
    (third,) = plan_jobs([waiting_job(with_disk("c", 2, 101), GROUP)], taken)
    assert isinstance(third, JobWait)
    (small,) = plan_jobs([waiting_job(with_disk("c", 2, 100), GROUP)], taken)
    assert isinstance(small, JobPlacement)
    (any_disk,) = plan_jobs([waiting_job(gang("d", 4, None, cpus=1), GROUP)], taken)
    assert isinstance(any_disk, JobPlacement)  # it requests no disk


_NEEDS = st.sampled_from(
    (
        None,
        SAME,
        PREFER,
        TopologyNeed(same="block", prefer="rack"),
        TopologyNeed(same="rack", slice=2),
        TopologyNeed(same="rack", slice=2, prefer="block"),
        TopologyNeed(prefer="rack", slice=2),
    )
)


@given(
    st.lists(st.sampled_from("abcd-"), min_size=1, max_size=14).map("".join),
    st.text("xy-", min_size=14, max_size=14),
    st.sets(st.integers(0, 13)),
    st.integers(1, 4).map(lambda half: 2 * half),
    _NEEDS,
)
def test_a_feasible_domain_is_found_and_never_left(
    racks: str, blocks: str, taken: set[int], nodes: int, need: TopologyNeed | None
) -> None:
    hosts = make_hosts(racks, blocks)
    free = [at for at in range(len(hosts)) if at not in taken]
    found = choose_hosts(HostLabels([host.labels for host in hosts]), free, nodes, need)
    same = None if need is None else need.same
    size = nodes if need is None or need.slice is None else need.slice
    names = [dict(hosts[at].labels).get(same or "") for at in free]
    room = [names.count(name) // size for name in set(names) - {None}]
    feasible = sum(room) * size >= nodes if same and size < nodes else max(room, default=0) >= 1
    assert (found is not None) == (feasible if same else len(free) >= nodes)
    if found is None:
        assert bool(
            explain_lack(HostLabels([host.labels for host in hosts]), free, nodes, need)
        ) == (same is not None)
        return
    assert len(set(found)) == nodes
    assert set(found) <= set(free)
    chosen = [dict(hosts[at].labels).get(same or "") for at in found]
    for start in range(0, nodes if same else 0, size):
        assert len(set(chosen[start : start + size])) == 1
        assert None not in chosen
    if need == SAME:  # best fit
        smallest = min(count for count in map(names.count, set(names) - {None}) if count >= nodes)
        assert names.count(chosen[0]) == smallest
    if same:  # neighbours in rank: each domain is one run
        assert len(list(groupby(chosen))) == len(set(chosen))
