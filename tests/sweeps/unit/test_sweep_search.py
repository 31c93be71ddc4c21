"""Sweeps whose values are chosen when their jobs start."""

import asyncio
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.records import FIXED, make_attempt_record, make_job_record
from tests.sweeps.unit.test_early_stopping import NOW
from tests.waits import PATIENCE_S

from cavvy.capabilities.sweeps.choices import (
    SweepSearcher,
    TriedPoint,
    choose_by_optuna,
    choose_untried,
)
from cavvy.cli.main import cli
from cavvy.domain.arrays import choose_values, count_members, make_member
from cavvy.domain.events import Event
from cavvy.domain.jobs import JobPhase, JobRecord, Node, StopCause
from cavvy.domain.tasks import SweepSearch, SweptParam, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.spec.overrides import apply_overrides
from cavvy.store.base import AtomicWrite, StaleVersion
from cavvy.store.open import MemoryStore
from cavvy.store.sql import Store
from cavvy.task_files import parse_task

TEXT = """
run: train ${{ params.lr }} ${{ params.kind }}
params: {lr: 1, kind: a}
sweep: {lr: '0..199', kind: [a, b]}
best: loss:min
"""


def test_the_keys_are_read() -> None:
    task = parse_task(TEXT + "search: {seed: 7}\ntrials: 5", file="t.yaml")
    assert task.search == SweepSearch(metric="loss", seed=7)
    assert count_members(task) == 5
    for more in ("search: tpe\ntrials: 3", "trials: 3"):
        assert parse_task(TEXT + more, file="t.yaml").search == SweepSearch(metric="loss")
    whole = parse_task(TEXT, file="t.yaml")
    assert whole.search is None
    found = apply_overrides(whole, '{"trials": "3"}')  # the option --trials
    assert (found.search, found.trials) == (SweepSearch(metric="loss"), 3)
    for wrong, told in (
        (TEXT + "search: grid\ntrials: 3", "write `tpe`"),
        (TEXT + "search: tpe", "`trials` is missing"),
        (TEXT + "trials: 401", "only 400 combinations"),
        (TEXT + "trials: 0", "from 1 to 1,000"),
        (TEXT.replace("best: loss:min", "trials: 3"), "`best` is missing"),
        ("{run: x, trials: 3}", "only the jobs of a sweep"),
        ("{run: x, search: tpe}", "only the jobs of a sweep"),
        ("{run: x, array: 0-3, best: 'a:min', trials: 3}", "use `sweep`"),
    ):
        with pytest.raises(SpecError, match=told):
            parse_task(wrong, file="t.yaml")


def test_a_job_has_no_values_before_they_are_chosen() -> None:
    task = parse_task(TEXT + "trials: 5", file="t.yaml")
    waiting, chosen = make_member(task, 3), make_member(task, 3, point=399)
    assert "lr" not in waiting.params
    assert chosen.run == "train 199 b"
    assert (chosen.params["lr"], chosen.params["kind"]) == (199, "b")


def make_task(search: SweepSearch, sizes: Sequence[int] = (40, 3)) -> TaskSpec:
    sweep = tuple(
        SweptParam(f"p{at}", tuple(range(size)), tuple(map(str, range(size))))
        for at, size in enumerate(sizes)
    )
    return TaskSpec(name="tune", run="x", sweep=sweep, search=search, trials=10, best="loss:min")


@pytest.mark.parametrize("highest", [False, True])
def test_the_search_comes_close_to_the_best_values(highest: bool) -> None:
    pytest.importorskip("optuna", reason="needs the extra `tuning`")
    sign = -1 if highest else 1
    task = make_task(SweepSearch(metric="loss", highest=highest))

    def measure(point: int) -> float:
        lr, kind = (at for _, at in choose_values(task.sweep, point))
        return sign * ((lr - 31) ** 2 + 50 * (kind != 1))

    tried: list[TriedPoint] = []
    for index in range(40):
        point = choose_by_optuna(task, index, tried)
        assert point == choose_by_optuna(task, index, tried)
        tried.append(TriedPoint(point=point, value=measure(point), ended=True))
    assert len({each.point for each in tried}) == 40
    late = sum(sign * measure(each.point) for each in tried[20:])
    assert late < sum(sign * measure(each.point) for each in tried[:20]) / 2
    assert min(sign * measure(each.point) for each in tried) <= 4


def test_jobs_that_run_or_failed_take_their_values_from_others() -> None:
    pytest.importorskip("optuna", reason="needs the extra `tuning`")
    task = make_task(SweepSearch(metric="loss"), (3, 2))
    tried: list[TriedPoint] = []
    for index in range(6):
        point = choose_by_optuna(task, index, tried)
        tried.append(TriedPoint(point=point, value=None, ended=index % 2 == 0))
    assert {each.point for each in tried} == set(range(6))


def test_any_untried_values_are_found() -> None:
    task = make_task(SweepSearch(metric="loss", seed=3), (2, 2))
    assert {choose_untried(task, 0, set(range(4)) - {left}) for left in range(4)} == set(range(4))
    assert choose_untried(task, 0, set(range(4))) in range(4)
    assert choose_untried(make_task(SweepSearch(metric="loss"), (10_000,) * 3), 1, set()) >= 0


class Sweep:
    """A sweep in a store, whose jobs start."""

    def __init__(self, name: str = "j", store: Store | None = None) -> None:
        self.name, self.store, self.calls = name, store or MemoryStore(), list[int]()
        self.searcher = SweepSearcher(self.store, self.choose)
        self.task = replace(make_task(SweepSearch(metric="loss")), name=name)

    def choose(self, task: TaskSpec, index: int, tried: Sequence[TriedPoint]) -> int:
        self.calls.append(len(tried))
        return 10 + index

    async def submit(self) -> None:
        first = f"{self.name}0"
        job = make_job_record(
            NOW, id=first, name=self.name, array_id=f"{self.name}s", task=self.task
        )
        event = Event(project=job.project, job_id=first, at=NOW, kind="queued", text="")
        members = {f"{self.name}{at}": at for at in range(3)}
        await self.store.arrays.submit(job, event, members, None)

    async def start(self, job_id: str) -> None:
        job = await self.store.job(job_id)
        started = replace(job, phase=JobPhase.STARTING, attempt=job.attempt + 1)
        await self.store.commit(AtomicWrite(jobs=[started]))

    async def settle(self, job_id: str) -> JobRecord:
        return await self.searcher.settle(await self.store.job(job_id), NOW)


def test_values_are_chosen_once() -> None:
    async def run() -> None:
        sweep = Sweep()
        await sweep.submit()
        for name in ("j1", "j0", "j1"):  # the second time, the job is retried
            await sweep.start(name)
            job = await sweep.searcher.settle(await sweep.store.job(name), NOW)
            assert job.point == 10 + int(name[1])
            assert job.task.params == {"p0": job.point // 3, "p1": job.point % 3}
        assert sweep.calls == [0, 1]
        assert await sweep.store.arrays.list_points("js") == {"j0": 10, "j1": 11}
        # another server has chosen meanwhile: nothing is changed, and the agent asks again
        await sweep.start("j2")
        stale = await sweep.store.job("j2")
        await SweepSearcher(sweep.store, lambda *_: 99).settle(stale, NOW)
        with pytest.raises(StaleVersion):
            await sweep.searcher.settle(stale, NOW)
        assert (await sweep.store.job("j2")).point == 99
        assert sweep.calls == [0, 1]

    asyncio.run(run())


def test_only_jobs_that_are_done_or_were_stopped_early_have_results() -> None:
    ends = {"j0": JobPhase.DONE, "j1": JobPhase.FAILED, "j2": JobPhase.STOPPED}

    async def end(sweep: Sweep, early: bool) -> list[float | None]:
        await sweep.submit()
        for job_id, phase in ends.items():
            await sweep.start(job_id)
            job = await sweep.settle(job_id)
            attempt = make_attempt_record(
                NOW, FIXED, id=f"{job_id}-1", job_id=job_id, gang=f"g-{job_id}"
            )
            node = Node(attempt_id=attempt.id, rank=0, project="p", progress={"loss": 0.5})
            cause = StopCause.EARLY if early and phase is JobPhase.STOPPED else None
            ended = replace(job, phase=phase, stop_cause=cause, version=job.version + 1)
            for changed in (job, ended):
                await sweep.store.commit(AtomicWrite(jobs=[changed]))
            await sweep.store.commit(AtomicWrite(attempts=[attempt], nodes=[node]))
        return [each.value for each in await sweep.searcher._list_tried("js", "loss")]

    assert asyncio.run(end(Sweep(), early=False)) == [0.5, None, None]
    assert asyncio.run(end(Sweep(), early=True)) == [0.5, None, 0.5]


def test_ranks_wait_for_one_choice_and_other_sweeps_do_not() -> None:
    other_chosen = threading.Event()

    class Waiting(Sweep):
        def choose(self, task: TaskSpec, index: int, tried: Sequence[TriedPoint]) -> int:
            if self.name == "b":
                other_chosen.set()
            assert other_chosen.wait(PATIENCE_S)
            return super().choose(task, index, tried)

    async def run() -> None:
        first = Waiting("a")
        second = Waiting("b", first.store)
        sweeps = {"a": first, "b": second}
        first.searcher = second.searcher = SweepSearcher(
            first.store, lambda task, *rest: sweeps[task.name].choose(task, *rest)
        )
        for each in (first, second):
            await each.submit()
            await each.start(f"{each.name}0")
        ranks = [first.settle("a0") for _ in range(4)]
        found = await asyncio.gather(*ranks, second.settle("b0"), return_exceptions=True)
        assert sum(isinstance(each, StaleVersion) for each in found) == 3  # these ranks ask again
        assert (first.calls, second.calls) == ([0], [0])

    asyncio.run(run())


def test_many_values_without_an_order_are_no_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna compares all categories for each job that was tried, while an agent waits."""
    pytest.importorskip("optuna", reason="needs the extra `tuning`")
    from optuna import distributions

    sizes = list[int]()

    class Counted(distributions.CategoricalDistribution):
        def __init__(self, choices: Sequence[int]) -> None:
            sizes.append(len(choices))
            super().__init__(choices)

    monkeypatch.setattr(distributions, "CategoricalDistribution", Counted)
    texts = [tuple(f"{name}{at}" for at in range(size)) for name, size in (("a", 3000), ("b", 64))]
    sweep = [SweptParam(each[0], each, each) for each in (*texts, ("alone",), ("last",))]
    task = replace(make_task(SweepSearch(metric="loss")), sweep=tuple(sweep))
    tried: list[TriedPoint] = []
    for index in range(12):
        point = choose_by_optuna(task, index, tried)
        tried.append(TriedPoint(point=point, value=float(index), ended=True))
    assert all(0 <= each.point < 3000 * 64 for each in tried)
    assert set(sizes) == {64}


def test_a_server_that_lost_optuna_goes_on() -> None:
    def fail(*_: object) -> int:
        raise ImportError

    async def run() -> None:
        sweep = Sweep()
        await sweep.submit()
        await sweep.start("j0")
        job = await SweepSearcher(sweep.store, fail).settle(await sweep.store.job("j0"), NOW)
        assert job.point is not None
        told = [each.text for each in await sweep.store.events("j0")]
        assert any("at random, because this server has no Optuna" in each for each in told)

    asyncio.run(run())


def test_a_plan_says_that_the_server_which_it_would_start_lacks_optuna(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "task.yaml"
    sweep = "sweep: {lr: [1, 2, 3]}\nrun: echo ${{ params.lr }}\nbest: loss:min\n"
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "settings.toml"))
    (tmp_path / "settings.toml").write_text("")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optuna" else found(name)
    )
    file.write_text(f"name: a\n{sweep}search: tpe\ntrials: 2\n")
    told = CliRunner().invoke(cli, ["validate", str(file)])
    assert told.exit_code != 0
    assert "Optuna" in told.output + str(told.exception)
    file.write_text(f"name: a\n{sweep}stop_early: asha\n")
    told = CliRunner().invoke(cli, ["validate", str(file)])
    assert told.exit_code == 0, told.output
