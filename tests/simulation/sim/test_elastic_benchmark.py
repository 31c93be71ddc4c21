"""benchmarks/elastic_policies.py plays jobs as the authors' simulators do."""

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.public_data import data

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from elastic_cluster.cluster import Machines, Memory, Place, Rule, Run, simulate
from elastic_cluster.ours import Goodput, SizeTable
from elastic_cluster.profiles import Profile
from elastic_cluster.rules import Optimus, Tiresias, spread
from elastic_cluster.typed_rules import Gavel, Sia
from elastic_policies import HOMOGENEOUS, find_times, make_pollux, read_pollux

CLUSTER = {"gpu": Machines(nodes=2, gpus=4)}
PLACEMENTS = (1, 2, 4, 44)


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """A training of 2 epochs of 10 steps with 8 samples. Noise hides larger batches."""
    folder = tmp_path / "bert"
    folder.mkdir()
    rows = ["local_bsz,step_time,sync_time,placement"]
    for placement in PLACEMENTS:
        sync = 0.0 if placement == 1 else 0.1
        rows += [f"{n},{n * 0.25 + sync},{sync},{placement}" for n in (1, 4, 8)]
    (folder / "placements-gpu.csv").write_text("\n".join(rows))
    header = "local_bsz,step_time,sync_time,num_nodes,num_replicas"
    more = [f"{n},{n * 0.25 + 0.1},0.1,2,{r}" for n in (1, 8) for r in (2, 8)]
    (folder / "scalability-gpu.csv").write_text("\n".join([header, *more]))
    for batch in (8, 64):
        lines = ["progress,iteration,metric,grad_sqr,grad_var"]
        lines += [f"{10 * n},{80 * n // batch},0.5,1.0,70.0" for n in (1, 2)]
        (folder / f"validation-{batch}.csv").write_text("\n".join(lines))
    return Profile(folder, "gpu")


def make(profile: Profile, name: str = "a", at: float = 0.0, **more: object) -> Run:
    return Run(name, {"gpu": profile}, at, asked=1, batch=8, **more)  # type: ignore[arg-type]


def first_gpu(now: float, jobs: Sequence[Run], _: object) -> Mapping[str, Place]:
    return {jobs[0].name: Place("gpu", (0,))}


def test_a_step_is_interpolated_between_measured_batches(profile: Profile) -> None:
    assert profile.steps((1,), 6) == pytest.approx((1.5, 0.0))
    assert profile.steps((1,), 9) is None
    step = profile.steps((2, 2), 4)
    assert step == pytest.approx((1.1, 0.1)), "not measured: between 2 and 8 replicas on 2 nodes"
    assert profile.steps((4, 4), 4) == profile.steps((4, 4), 4)


def test_a_job_waits_for_its_restart_and_trains(profile: Profile) -> None:
    job = make(profile, tuned=False)
    held = simulate([job], CLUSTER, first_gpu, interval=60, always=True)
    # placed at 60 s, 30 s of restart, 2 epochs of 10 steps of 2 s
    assert job.finished == 60 + 30 + 40
    assert held["a"] == 120, "two intervals of a GPU"
    assert job.service == 70


def test_other_nodes_restart_a_job_only_where_the_paper_says_so(profile: Profile) -> None:
    def moving(now: float, jobs: Sequence[Run], _: object) -> Mapping[str, Place]:
        return {jobs[0].name: Place("gpu", (int(now // 10) % 2,))}

    slow = make(profile, restart_s=4.0, tuned=False)
    simulate([slow], CLUSTER, moving, interval=10, always=True)
    kept = make(profile, restart_s=4.0, tuned=False)
    simulate([kept], CLUSTER, moving, interval=10, always=False)
    assert (kept.restarts, kept.finished) == (0, 54)
    assert slow.restarts is not None
    assert slow.restarts > 3


def test_a_node_with_too_many_jobs_is_an_error(profile: Profile) -> None:
    def crowd(now: float, jobs: Sequence[Run], _: object) -> Mapping[str, Place]:
        return {job.name: Place("gpu", (0, 0, 0)) for job in jobs}

    with pytest.raises(AssertionError):
        simulate([make(profile), make(profile, "b")], CLUSTER, crowd, interval=60, always=True)


def test_jobs_are_spread_over_the_emptiest_nodes() -> None:
    places = spread({"a": 3, "b": 4}, {"a": Place("gpu", (0, 0, 0))}, CLUSTER, "gpu")
    assert places["b"] == Place("gpu", (1, 1, 1, 1))


def test_cavvy_grows_a_job_by_what_it_measures(profile: Profile) -> None:
    memory = Memory()
    alone = [make(profile, tuned=False)]
    simulate(alone, CLUSTER, first_gpu, interval=10, always=True)
    jobs = [make(profile, name, memory=memory, restart_s=1.0) for name in "abc"]
    simulate(jobs, CLUSTER, Goodput(), interval=10, always=True)
    assert memory.most_replicas("gpu") > 1
    assert all(job.finished for job in jobs)


@pytest.mark.parametrize(
    ("rule", "published"), [(Tiresias("aws"), 3469.7), (Optimus("aws"), 5301.9)]
)
def test_published_times_are_reproduced(rule: Rule, published: float) -> None:
    """Workload 6 of Pollux, with tuned jobs."""
    data("traces/pollux/workload-6.csv")
    data("traces/sia/model_profiles")
    jobs = make_pollux(read_pollux(), adaptive=False)
    simulate(jobs, HOMOGENEOUS, rule, interval=60, always=True)
    times = list(find_times(jobs))
    assert sum(times) / len(times) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("rule", [Gavel(10), Sia(SizeTable())])
def test_rules_that_know_types_give_each_job_gpus_of_one(profile: Profile, rule: Rule) -> None:
    cluster = {"gpu": Machines(nodes=2, gpus=4), "slow": Machines(nodes=1, gpus=1)}
    profiles = {"gpu": profile, "slow": profile}
    adaptive = isinstance(rule, Sia)
    jobs = [
        Run(name, profiles, 0.0, asked=1, batch=8, slowdown=1.2, tuned=adaptive, measures=adaptive)
        for name in "abc"
    ]
    places = rule(10.0, jobs, cluster)
    assert set(places) == {"a", "b", "c"}
    assert sum(len(each.nodes) for each in places.values() if each.kind == "slow") <= 1
    simulate(jobs, cluster, rule, interval=10, always=False)
    assert all(job.finished for job in jobs)


def test_gavel_gives_the_fast_type_to_the_job_that_makes_more_of_it(profile: Profile) -> None:
    """Both would be faster on the fast type, which has one GPU; throughput decides."""
    cluster = {"gpu": Machines(nodes=1, gpus=1), "slow": Machines(nodes=1, gpus=1)}
    slower = replace_steps(profile, 1.5)
    much_slower = replace_steps(profile, 8.0)
    jobs = [
        Run("little", {"gpu": profile, "slow": slower}, 0.0, asked=1, batch=8),
        Run("much", {"gpu": profile, "slow": much_slower}, 0.0, asked=1, batch=8),
    ]
    places = Gavel(10)(10.0, jobs, cluster)
    assert {name: each.kind for name, each in places.items()} == {"little": "slow", "much": "gpu"}


def replace_steps(profile: Profile, factor: float) -> Profile:
    """The same training on GPUs that need so many times as long."""
    other = copy.copy(profile)

    def slow_steps(placement: tuple[int, ...], samples: int) -> tuple[float, float] | None:
        steps = profile.steps(placement, samples)
        return None if steps is None else (steps[0] * factor, steps[1] * factor)

    other.steps = slow_steps  # type: ignore[assignment]
    return other
