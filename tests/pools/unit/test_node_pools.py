"""The decisions about elastic pools, and the keys of a pool's file."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.own_parts import reads_other_tools
from tests.records import make_job_record

from cavvy.control.decide.node_pools import (
    complete_pool_task,
    follow_pool,
    make_node_labels,
    opens_at,
)
from cavvy.domain.node_pools import NodePool
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import (
    AcceleratorNeed,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
    TopologyNeed,
)
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.scheduler.node_pools import (
    GrowPool,
    PoolGang,
    WaitForPool,
    count_missing,
    count_nodes,
    decide_growth,
    decide_idle,
)
from cavvy.spec.problems import SpecError
from cavvy.task_files.pools import parse_pool, read_pool

NOW = datetime(2030, 1, 7, 9, tzinfo=UTC)  # a Monday
NEED = ResourceSpec(accelerators=(AcceleratorNeed(name="A100-80GB", count_min=8),))
POOL = NodePool(project="p", name="gpus", resources=NEED, max_nodes=4)
RESERVED, SPOT, ON_DEMAND = Purchase.RESERVED, Purchase.SPOT, Purchase.ON_DEMAND


def gang(id: str, idle_min: float | None = None, **facts: object) -> PoolGang:
    since = None if idle_min is None else NOW - timedelta(minutes=idle_min)
    usual = PoolGang(id=id, nodes=1, purchase=ON_DEMAND, idle_since=since)
    return replace(usual, **facts)  # type: ignore[arg-type]


def keeps(pool: NodePool | None, gangs: list[PoolGang], closed: datetime | None = None) -> str:
    """Return the IDs of the idle gangs that stay."""
    return "".join(
        each.id
        for each in gangs
        if each.idle_since and decide_idle(pool, gangs, each, closed, NOW).until > NOW
    )


def test_a_pool_grows_up_to_its_maximum() -> None:
    busy = [gang("a"), gang("b"), gang("c")]
    assert isinstance(decide_growth(POOL, busy, 1, None), GrowPool)
    assert isinstance(decide_growth(POOL, busy, 2, None), WaitForPool)
    # a node that is being removed still exists
    assert isinstance(decide_growth(POOL, [*busy, gang("d", leaving=True)], 1, None), WaitForPool)
    too_large = decide_growth(POOL, [], 5, None)
    assert isinstance(too_large, WaitForPool)
    assert "at most 4 nodes; the job needs 5" in too_large.reason


def test_idle_gangs_of_another_shape_make_room_and_no_more_than_needed() -> None:
    gangs = [gang("a"), gang("b", 5, purchase=SPOT), gang("c", 1), gang("d", 3)]
    decision = decide_growth(POOL, gangs, 2, None)
    assert isinstance(decision, WaitForPool)
    assert decision.release == ("d", "c"), "on demand before spot, idle longest first"
    decision = decide_growth(POOL, [*gangs[:3], gang("d", leaving=True)], 2, None)
    assert isinstance(decision, WaitForPool)
    assert decision.release == ("c",), "the room of a leaving gang counts"
    full = decide_growth(POOL, [gang("a", nodes=4)], 1, None)
    assert full == WaitForPool(reason="pool gpus uses all of its 4 nodes")


@pytest.mark.parametrize(
    ("share", "held", "nodes", "spot"),
    [
        (0.0, [], 1, False),
        (1.0, [], 1, True),
        (0.5, [], 1, False),
        (0.5, [ON_DEMAND], 1, True),
        (0.5, [ON_DEMAND, SPOT], 1, False),
        (0.5, [RESERVED], 1, False),
        (0.5, [ON_DEMAND], 2, False),
        (2 / 3, [ON_DEMAND, SPOT], 1, True),
    ],
)
def test_spot_nodes_have_at_most_their_share(
    share: float, held: list[Purchase], nodes: int, spot: bool
) -> None:
    gangs = [gang(str(at), purchase=each) for at, each in enumerate(held)]
    decision = decide_growth(replace(POOL, spot_share=share), gangs, nodes, None)
    assert isinstance(decision, GrowPool)
    assert decision.markets == ((RESERVED, SPOT, ON_DEMAND) if spot else (RESERVED, ON_DEMAND))


def test_idle_gangs_stay_for_a_while_and_for_the_minimum() -> None:
    gangs = [gang("a"), gang("b", 11), gang("c", 12, purchase=SPOT), gang("d", 2)]
    assert keeps(POOL, gangs) == "d"
    assert keeps(replace(POOL, min_nodes=2), gangs) == "cd", "the cheaper one stays"
    assert keeps(replace(POOL, min_nodes=4), gangs) == "bcd"
    assert keeps(replace(POOL, max_nodes=3, min_nodes=1), gangs) == "d"
    assert keeps(replace(POOL, max_nodes=3, idle=timedelta(hours=1)), gangs) == "cd"
    wide = [gang("e", 11, nodes=2), gang("f", 30)]
    assert keeps(replace(POOL, min_nodes=2), wide) == "e", "a gang goes as a whole or not at all"


@st.composite
def held_gangs(draw: st.DrawFn) -> list[PoolGang]:
    found = []
    for at in range(draw(st.integers(0, 6))):
        idle, leaving = draw(st.sampled_from([None, 1, 30])), draw(st.booleans())
        facts = {"nodes": draw(st.integers(1, 3)), "purchase": draw(st.sampled_from(Purchase))}
        found.append(gang(str(at), idle, leaving=leaving and idle is None, **facts))
    return found


@given(held_gangs(), st.integers(1, 9), st.integers(0, 9), st.integers(1, 4), st.floats(0, 1))
def test_no_decision_breaks_a_limit(
    gangs: list[PoolGang], most: int, least: int, nodes: int, share: float
) -> None:
    pool = replace(POOL, max_nodes=most, min_nodes=min(least, most), spot_share=share)
    held = count_nodes(gangs)
    match decide_growth(pool, gangs, nodes, None):
        case GrowPool(markets=markets):
            assert held + nodes <= most
            if SPOT in markets:
                rented = [each for each in gangs if each.purchase is not RESERVED]
                spot = count_nodes([each for each in rented if each.purchase is SPOT]) + nodes
                assert spot <= share * (count_nodes(rented) + nodes) + 1e-6
        case WaitForPool(release=release):
            assert held + nodes > most
            idle = {each.id for each in gangs if each.idle_since}
            gone = [each for each in gangs if each.id in release or each.leaving]
            assert idle >= {*release}
            assert not release or held - count_nodes(gone) + nodes <= most
    idle_gangs = [each for each in gangs if each.idle_since]
    kept = [each for each in idle_gangs if decide_idle(pool, gangs, each, None, NOW).until > NOW]
    staying = count_nodes([each for each in gangs if not each.leaving])
    left = staying - count_nodes(idle_gangs) + count_nodes(kept)
    assert left >= min(pool.min_nodes, staying)
    assert all(
        decide_idle(pool, gangs[::-1], each, None, NOW) == decide_idle(pool, gangs, each, None, NOW)
        for each in idle_gangs
    ), "each gang asks alone, so the order does not matter"


def test_a_closed_stopped_or_removed_pool_keeps_nothing_and_starts_nothing() -> None:
    gangs, closed = [gang("a"), gang("b", 1)], NOW + timedelta(hours=1)
    pool = parse_pool(
        "{max: 4, min: 2, hours: '10:00-11:00', resources: {cpu: 1}}", file="x", project="p"
    )
    for told, opens in ((pool, closed), (replace(POOL, min_nodes=2, stopped=True), None)):
        assert keeps(told, gangs, opens) == ""
        assert count_missing(told, gangs, 3, opens) == -3
        assert isinstance(decide_growth(told, gangs, 1, opens), WaitForPool)
    assert keeps(None, gangs) == ""
    assert opens_at(pool, NOW) == closed
    assert opens_at(pool, closed) is None


def test_the_minimum_counts_what_starts_and_not_what_leaves() -> None:
    pool = replace(POOL, min_nodes=3)
    assert count_missing(pool, [gang("a"), gang("b", leaving=True)], 1, None) == 1
    assert count_missing(pool, [gang("a", nodes=2)], 2, None) == -1


def test_a_pool_completes_the_tasks_of_its_jobs() -> None:
    bare = TaskSpec(name="t", run="x", pool="gpus", retry=RetryPolicy(parallel=3))
    task = complete_pool_task(bare, replace(POOL, spot_share=0.5))
    assert (task.resources, task.keep) == (replace(NEED, spot=SpotPolicy.AUTO), POOL.idle)
    assert task.retry.parallel == 1
    other = replace(bare, resources=ResourceSpec(cpus_min=2, spot=SpotPolicy.ONLY))
    assert complete_pool_task(other, POOL).resources == ResourceSpec(cpus_min=2)
    # so that jobs with other requests can use the same nodes
    large = replace(POOL, resources=replace(NEED, disk_gib=500), image="own:1", image_login="KEY")
    task = complete_pool_task(other, large)
    assert (task.resources.disk_gib, task.image, task.image_login) == (500, "own:1", "KEY")
    assert complete_pool_task(replace(other, image="theirs:1"), large).image_login is None
    # a task that was completed before gets the values of the present file, and no other
    labelled = replace(large, labels={"rack": "r1"}, idle=timedelta(hours=1))
    for asked in (
        bare,
        other,
        replace(other, image="theirs:1", topology=TopologyNeed(same="rack")),
    ):
        before = complete_pool_task(asked, labelled)
        assert complete_pool_task(before, POOL) == complete_pool_task(asked, POOL)
        assert complete_pool_task(before, labelled) == before
        job = make_job_record(NOW, task=before)
        assert follow_pool(job, POOL).task == complete_pool_task(asked, POOL)
        member = follow_pool(replace(job, member=3), POOL).task
        assert (member.resources, member.image) == (
            complete_pool_task(asked, POOL).resources,
            before.image,
        )


def test_the_consent_to_a_pool_is_not_for_a_job_that_may_spend_nothing() -> None:
    pool, job = replace(POOL, consented=True), make_job_record(NOW)
    assert follow_pool(job, pool).consented
    assert follow_pool(replace(job, ceiling=Money(1)), pool).consented
    assert not follow_pool(replace(job, ceiling=Money(0)), pool).consented
    assert follow_pool(replace(job, ceiling=Money(0), consented=True), POOL).consented


def test_all_nodes_of_a_pool_have_its_labels() -> None:
    text = "max: 4\nlabels: {rack: r1, example.com/block: 7}\nresources: {gpu: A100}\n"
    pool = parse_pool(text, file="pool.yaml", project="p")
    assert pool.labels == {"rack": "r1", "example.com/block": "7"}
    labels = {"rack": "r1", "example.com/block": "7", "cavvy/pool": "pool", "cavvy/gpu": "A100"}
    assert make_node_labels(pool) == labels

    def left(need: TopologyNeed) -> TopologyNeed | None:
        task = TaskSpec(name="t", run="x", nodes=4, topology=need)
        return complete_pool_task(task, pool).topology

    assert left(TopologyNeed(same="rack")) is None
    assert left(TopologyNeed(same="rack", prefer="hall", slice=2)) is None
    assert left(TopologyNeed(prefer="rack")) is None
    assert left(TopologyNeed(same="hall", prefer="rack")) == TopologyNeed(same="hall")
    assert left(TopologyNeed(same="hall", slice=2)) == TopologyNeed(same="hall", slice=2)
    many = ", ".join(f"l{each}: x" for each in range(17))
    for labels_of, problem in (
        ("{cavvy/pool: other}", "'cavvy/pool' cannot be a label's name"),
        ("{rack: 'r1,cavvy/pool=x'}", "cannot be a label's value"),
        ("{'rack=r1': x}", "cannot be a label's name"),
        ("[rack]", "a list where a table was expected"),
        (f"{{{many}}}", "the pool has too many labels"),
    ):
        with pytest.raises(SpecError, match=re.escape(problem)):
            parse_pool(f"max: 1\nlabels: {labels_of}\nresources: {{cpu: 1}}", file="x", project="p")


def test_a_pool_takes_no_label_with_which_kubelet_does_not_start() -> None:
    # IsKubeletLabel of Kubernetes' pkg/kubelet/apis/well_known_labels.go decides
    for name, starts in (
        ("node-role.kubernetes.io/control-plane", False),
        ("node-restriction.kubernetes.io/tenant", False),
        ("kubernetes.io/rack", False),
        ("topology.k8s.io/rack", False),
        ("topology.kubernetes.io/rack", False),
        ("topology.kubernetes.io/zone", True),
        ("site.node.kubernetes.io/rack", True),
        ("my-kubernetes.io/rack", True),
        ("rack", True),
    ):
        text = f"max: 1\nlabels: {{{name}: x}}\nresources: {{cpu: 1}}\n"
        assert parse_pool(text, file="x", project="p").labels == {name: "x"}
        text += "join: kubeadm join\n"
        if starts:
            assert parse_pool(text, file="x", project="p").labels == {name: "x"}
        else:
            with pytest.raises(SpecError, match="kubelet does not start with the label"):
                parse_pool(text, file="x", project="p")


def test_a_file_of_a_pool() -> None:
    text = "min: 1\nmax: 4\nidle: 20m\nspot_share: 25%\nhours: Mon-Fri 08:00-20:00 Europe/Berlin\n"
    pool = parse_pool(
        f"{text}resources: {{gpu: A100:8, max_price: 15}}", file="my pool.yaml", project="p"
    )
    assert (pool.name, pool.project, pool.min_nodes, pool.max_nodes) == ("my-pool", "p", 1, 4)
    assert (pool.idle, pool.spot_share) == (timedelta(minutes=20), 0.25)
    assert pool.hours is not None
    assert pool.hours.time_zone == "Europe/Berlin"
    assert pool.resources.max_rate is not None


@reads_other_tools
def test_a_pool_of_skypilot() -> None:
    text = "pool: {min_workers: 1, max_workers: 3, downscale_delay_seconds: 1200}\n"
    text += "resources: {accelerators: 'A100-80GB:8', use_spot: true, cloud: aws}"
    pool = read_pool(text, file="gpus.sky.yaml", project="p")
    assert (pool.name, pool.min_nodes, pool.max_nodes) == ("gpus", 1, 3)
    assert (pool.idle, pool.spot_share) == (timedelta(minutes=20), 1.0)
    assert pool.resources.providers == ("aws",)
    assert (pool.resources.accelerators[0].count_min, pool.resources.spot) == (8, SpotPolicy.NEVER)
    fixed = read_pool("pool: {workers: 2}\nresources: {cpus: 4}", file="x.yaml", project="p")
    assert (fixed.min_nodes, fixed.max_nodes, fixed.idle) == (2, 2, timedelta(minutes=10))
    own = "max: 2\nresources: {cpu: 1}"
    assert read_pool(own, file="x", project="p") == parse_pool(own, file="x", project="p")


@reads_other_tools
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pool: {workers: 2}\nsetup: pip install x", "move `setup` to the task files"),
        ("pool: {workers: 0}", "the pool has no workers"),
        ("pool: {}", "the pool has no number of workers"),
        ("pool: {min_workers: 3, max_workers: 1}", "max_workers"),
        ("pool: {workers: 2}\nnum_nodes: 2", "workers of 2 nodes are not supported"),
        ("pool: {workers: many}", "workers"),
    ],
)
def test_a_wrong_pool_of_skypilot(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        read_pool(text, file="pool.yaml", project="p")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("[1]", "the file is a list"),
        ("min: 5\nmax: 4\nresources: {cpu: 1}", "`min` 5 is more than `max` 4"),
        ("max: 0\nresources: {cpu: 1}", "0 is too small"),
        ("max: 2.5\nresources: {cpu: 1}", "not a whole number"),
        ("max: 1", "`pool.resources` is missing"),
        ("resources: {cpu: 1}", "`pool.max` is missing"),
        ("max: 1\nidle: -5m\nresources: {cpu: 1}", "cannot use the text '-5m'"),
        ("max: 1\nidle: 5s\nresources: {cpu: 1}", "too short"),
        ("max: 1\nspot_share: 150%\nresources: {cpu: 1}", "'150%' is not a share"),
        ("max: 1\nspot_share: nan\nresources: {cpu: 1}", "'nan' is not a share"),
        ("max: 1\nhours: 25:00-26:00\nresources: {cpu: 1}", "outside of 00:00-24:00"),
        ("max: 1\nhours: Mon 08:00-20:00 Mars/Base\nresources: {cpu: 1}", "Mars/Base"),
        ("max: 1\nresources: {cpu: 1, spot: only}", "`spot_share: 50%`"),
        ("max: 1\nresources: {any_of: [{cpu: 1, spot: auto}, {cpu: 2}]}", "`spot_share: 50%`"),
        ("max: 1\nimage: {build: .}\nresources: {cpu: 1}", "a pool cannot build an image"),
        ("max: 1\nworkers: 3\nresources: {cpu: 1}", "write `min` and `max`"),
        ("max: 1\nprice_cap: 3\nresources: {cpu: 1}", "`resources: {max_price: …}`"),
        ("max: 1\nresources: {cpu: 1}\n---\nmax: 2", "a second document"),
        ("max: 1\nmax: 2\nresources: {cpu: 1}", "max"),
    ],
)
def test_a_wrong_file_of_a_pool(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        parse_pool(text, file="pool.yaml", project="p")


@reads_other_tools
def test_a_fleet_of_dstack_is_a_pool() -> None:
    text = "type: fleet\nname: gpus\nnodes: 1..4\nplacement: cluster\nidle_duration: 1h\n"
    text += "resources: {gpu: A100:80GB:8}\nspot_policy: auto\nbackends: [aws]\nmax_price: 30"
    pool = read_pool(text, file="x.dstack.yml", project="p")
    assert (pool.name, pool.project, pool.min_nodes, pool.max_nodes) == ("gpus", "p", 1, 4)
    assert (pool.idle, pool.spot_share, pool.text) == (timedelta(hours=1), 1.0, text)
    assert (pool.resources.providers, pool.resources.spot) == (("aws",), SpotPolicy.NEVER)
    assert pool.resources.accelerators[0].count_min == 8
    assert pool.resources.max_rate is not None
    for nodes, idle, sizes in (
        ("2", "", (2, 2, timedelta(minutes=10))),
        ("..3", "idle_duration: off", (0, 3, timedelta(days=1))),
        ("{min: 1, target: 2, max: 3}", "idle_duration: 3d", (1, 3, timedelta(days=1))),
        ("0..1", "idle_duration: -1", (0, 1, timedelta(days=1))),
        ("0..1", "idle_duration: 5", (0, 1, timedelta(minutes=1))),
    ):
        pool = read_pool(f"type: fleet\nnodes: {nodes}\n{idle}", file="f.yml", project="p")
        assert (pool.min_nodes, pool.max_nodes, pool.idle) == sizes
        assert pool.spot_share == 0


@reads_other_tools
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: 0..", "a maximum from 1 to"),
        ("nodes: 0", "a maximum from 1 to"),
        ("name: a", "nodes"),
        ("nodes: 1..99999", "a maximum from 1 to"),
        ("nodes: 3..1", "cannot use '3..1'"),
        ("nodes: 2\nblocks: 4", "each job of a pool has whole nodes"),
        ("nodes: 2\nblocks: auto", "each job of a pool has whole nodes"),
        ("nodes: 2\nworkers: 4", "workers"),
        ("nodes: 2\nidle_duration: soon", "idle_duration"),
        ("nodes: 2\nresources: {gpu: 3x}", "gpu"),
        ("ssh_config: {user: ann, hosts: [a]}", "SSH hosts are a setting"),
    ],
)
def test_a_wrong_fleet_of_dstack(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        read_pool(f"type: fleet\n{text}", file="fleet.yml", project="p")


@reads_other_tools
@pytest.mark.parametrize("key", ["workers: ", "min_workers: 1, max_workers: "])
@pytest.mark.parametrize("count", [str(10**4 + 1), "9" * 23])
def test_a_pool_of_skypilot_has_a_largest_size(key: str, count: str) -> None:
    """Its minimum is ordered at once, so a huge one would keep the server busy for ever."""
    with pytest.raises(SpecError, match="the pool has too many workers"):
        read_pool(f"pool: {{{key}{count}}}\nresources: {{cpus: 1}}\n", file="x", project="p")
