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
from elastic_cluster.rounds import (
    SAMPLES,
    SlackFirst,
    Sliced,
    find_fairness,
    read_sliced,
    run_first,
    share_in_rounds,
)
from elastic_cluster.rules import Optimus, Tiresias, spread
from elastic_cluster.typed_rules import Gavel, Sia
from elastic_policies import (
    HOMOGENEOUS,
    SHOCKWAVE_GPUS,
    SHOCKWAVE_JOBS,
    find_times,
    make_pollux,
    play_shockwave,
    read_pollux,
)

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


def make_sliced(name: str, epochs: int, at: float = 0.0, **more: object) -> Sliced:
    """A job whose epoch takes 100 s with its batch of 10, and 50 s with one of 20 or more."""
    steps = -(-SAMPLES["LM"] // 10)
    rates = {batch: 59.675 * (1 if batch == 10 else 2) * 10 / batch for batch in (10, 20, 40, 80)}
    given = {"mode": "static", "gpus": 1, **more}
    return Sliced(name, "LM", 10, steps=steps * epochs, submitted=at, rates=rates, **given)  # type: ignore[arg-type]


def test_a_sliced_job_alone_takes_its_own_time() -> None:
    job = make_sliced("a", 7)
    assert job.alone_s == pytest.approx(700)
    assert share_in_rounds([job], 1, run_first) == pytest.approx(700)
    assert find_fairness(job, 1, 1) == pytest.approx(1)
    assert job.restarts == 0


def test_a_sliced_job_that_was_out_for_a_round_loses_20_seconds() -> None:
    jobs = [make_sliced("a", 6), make_sliced("b", 6)]

    def take_turns(now: float, number: int, waiting: Sequence[Sliced], _: int) -> Sequence[Sliced]:
        return [waiting[number % len(waiting)]]

    end = share_in_rounds(jobs, 1, take_turns)
    assert jobs[0].restarts > 0
    lost = end - 1200
    assert 100 <= lost <= 20 * sum(each.restarts for each in jobs)


def test_batches_grow_at_the_epochs_of_their_mode() -> None:
    measured = make_sliced("a", 60, mode="gns")
    assert [measured.find_batch(each) for each in (10, 11, 20, 21, 41)] == [10, 20, 20, 40, 80]
    critical = make_sliced("b", 60, mode="accordion")
    assert [critical.find_batch(each) for each in (9, 18, 19)] == [10, 10, 80]
    assert measured.alone_s == pytest.approx(11 * 100 + 49 * 50)


def test_a_job_that_would_be_late_for_its_fair_share_goes_first() -> None:
    rule = SlackFirst(contention=2.0, slack_s=600.0)
    long, short = make_sliced("long", 40), make_sliced("short", 10)
    long.arrived = short.arrived = 0.0
    assert rule(0.0, 0, [short, long], 1) == [long], "both have time"
    assert rule(500.0, 5, [short, long], 1) == [short], "it has 500 s of slack left"


def test_the_trace_of_shockwave_is_played_within_its_published_figures() -> None:
    folder = data("traces/shockwave")
    jobs = read_sliced(folder)
    lines = (folder / "tacc_120jobs_32gpu.trace").read_text().splitlines()
    stated = [float(line.split("\t")[10]) for line in lines]
    static = [job.steps / job.rates[job.batch] for job in jobs]
    assert static == pytest.approx(stated, abs=1), "with a fixed batch, as the trace states"
    rule = SlackFirst(SHOCKWAVE_JOBS / SHOCKWAVE_GPUS, 3000, foresees=False)
    end, mean, rhos, _ = play_shockwave(rule)
    assert end <= 24_197
    assert mean <= 9_958
    assert max(rhos) <= 1.78
    assert sum(each > 1.05 for each in rhos) / len(rhos) <= 0.05
