"""Arrays of jobs in every kind of store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.contract.store_suite import NOW, after, make_attempt, make_event, make_job, submit

from cavvy.domain.arrays import StoredArray
from cavvy.domain.jobs import AttemptPhase, JobPhase, JobRecord, RunOrigin
from cavvy.domain.tasks import IndexRange, JobGroup, SweptParam, TaskSpec
from cavvy.domain.values import replace
from cavvy.store.arrays import NewJob
from cavvy.store.base import AtomicWrite, DependencyMissing, RowNotFound, StaleVersion
from cavvy.store.job_search import JobSearch
from cavvy.store.queue import PlacedRow, sort_rows
from cavvy.store.sql import Store

RANGE = (IndexRange(0, 2),)
ORIGIN = RunOrigin(task_text="run: echo", snapshot="a" * 64)


@dataclass
class Spec:
    """What an array is submitted with."""

    array_id: str = "a0"
    name: str = "train"
    parallel: int | None = None
    count: int = 3

    async def submit(self, store: Store, **task: Any) -> StoredArray:
        wanted = task or {"array": RANGE}
        spec = TaskSpec(name=self.name, run="echo", **wanted)
        job = make_job(
            self.array_id, name=self.name, array_id=self.array_id, task=spec, origin=ORIGIN
        )
        members = {f"{self.array_id}-{index:05}": index for index in range(self.count)}
        return await store.arrays.submit(job, make_event(job), members, self.parallel)


async def test_the_members_are_jobs_with_their_own_names_and_variables(store: Store) -> None:
    array = await Spec().submit(store)
    assert (array.name, array.counts) == ("train", {"queued": 3})
    job = await store.find_job("p", "train.2")
    assert job == await store.job("a0-00002")
    with pytest.raises(RowNotFound):  # this may be the name of another array
        await store.find_job("p", "train-2")
    assert (job.array_id, job.member, job.origin) == ("a0", 2, ORIGIN)
    assert job.task.env["CAVVY_ARRAY_INDEX"] == "2"
    assert job.task.env["CAVVY_ARRAY_COUNT"] == "3"
    events = await store.events(job.id)
    assert [(each.text, each.job_id) for each in events] == [("submitted", job.id)]
    assert await store.snapshots() == {"a" * 64}


async def test_a_service_is_one_of_the_found_jobs(store: Store) -> None:
    for number, (name, tags) in enumerate(
        (
            ("chat.1", {"kind": "x", "service": "chat"}),
            ("chat.2", {"service": "chat"}),
            ("chat.10", {"service": "chat"}),
            ("other.1", {"service": "other"}),
            ("tagged", {"service": "chat"}),  # a job with a tag of this name
            ("chat", {}),
        )
    ):
        task = TaskSpec(name=name, run="true", tags=tags)
        job = make_job(f"j{number}", name=name, task=task)
        await store.submit(job, make_event(job))
    await Spec().submit(store)
    found = await store.search_jobs(JobSearch(arrays=True), NOW)
    names = {each.name for each in found.jobs}
    assert names == {"chat.10", "other.1", "tagged", "chat", "train.2"}
    assert found.total == 5
    services = {each.name: found.services.get(each.id) for each in found.jobs}
    chat, other = services["chat.10"], services["other.1"]
    assert chat is not None
    assert (chat.name, chat.counts, chat.spent_micros) == ("chat", {"queued": 3}, 0)
    assert other is not None
    assert (other.name, other.counts) == ("other", {"queued": 1})
    assert len(found.services) == 2
    tagged = await store.search_jobs(JobSearch(arrays=True, tag="kind"), NOW)
    assert [each.name for each in tagged.jobs] == ["chat.1"]
    assert [each.counts for each in tagged.services.values()] == [{"queued": 1}]
    alone = await store.search_jobs(JobSearch(), NOW)
    assert (alone.services, alone.total) == ({}, 9)
    ended = await store.search_jobs(JobSearch(arrays=True, phases=(JobPhase.DONE,)), NOW)
    assert (ended.services, ended.total) == ({}, 0)


async def test_an_array_is_one_of_the_found_jobs(store: Store) -> None:
    await Spec().submit(store)
    alone = make_job("j9", name="alone", user="bob")
    await store.submit(alone, make_event(alone))
    found = await store.search_jobs(JobSearch(arrays=True), NOW)
    assert (len(found.jobs), found.total) == (2, 2)
    assert [(each.id, each.name) for each in found.arrays.values()] == [("a0", "train")]
    assert found.arrays.keys() <= {each.id for each in found.jobs}
    assert (await store.search_jobs(JobSearch(), NOW)).total == 4
    of_bob = await store.search_jobs(JobSearch(arrays=True, user="bob"), NOW)
    assert ([each.name for each in of_bob.jobs], of_bob.arrays) == (["alone"], {})


async def test_the_members_of_a_sweep_have_their_own_values(store: Store) -> None:
    sweep = (SweptParam("lr", (0.001, 0.1), ("1e-3", "0.1")), SweptParam("n", (1, 2), ("1", "2")))
    task = {"params": {"lr": 0.001, "n": 1, "x": "y"}, "sweep": sweep}
    await Spec(count=4).submit(store, **task)
    jobs = [await store.find_job("p", f"train.{index}") for index in range(4)]
    assert [(job.task.params["lr"], job.task.params["n"]) for job in jobs] == [
        (0.001, 1),
        (0.001, 2),
        (0.1, 1),
        (0.1, 2),
    ]


async def test_a_change_of_a_member_leaves_the_task_of_the_array(store: Store) -> None:
    await Spec().submit(store)
    job = await store.find_job("p", "train.1")
    await store.commit(AtomicWrite(jobs=[replace(job, phase=JobPhase.RUNNING)]))
    await submit(store, "j1", name="other")
    assert (await store.find_job("p", "train.1")).task == job.task
    assert (await store.find_job("p", "train.2")).task.env["CAVVY_ARRAY_INDEX"] == "2"
    assert (await store.arrays.find("p", "train")).counts == {"queued": 2, "running": 1}


async def test_an_array_and_a_job_never_share_a_name(store: Store) -> None:
    await submit(store, "j0", name="train")
    assert (await Spec().submit(store)).name == "train-2"
    assert (await submit(store, "j1", name="train")).name == "train-3"
    assert (await submit(store, "j2", name="train-2")).name == "train-2-2"
    assert (await Spec(array_id="a1").submit(store)).name == "train-4"


async def test_a_name_of_a_member_that_is_taken_gives_the_array_another_name(store: Store) -> None:
    await submit(store, "j0", name="web.1")
    array = await Spec(name="web").submit(store)
    assert (array.name, array.counts) == ("web-2", {"queued": 3})
    assert (await store.find_job("p", "web.1")).array_id is None
    assert (await store.find_job("p", "web-2.1")).array_id == "a0"


async def test_a_repeated_submission_makes_no_second_array(store: Store) -> None:
    await Spec().submit(store)
    with pytest.raises(StaleVersion):
        await Spec().submit(store)
    assert len((await store.list_jobs("p")).jobs) == 3


async def test_the_array_is_removed_with_its_last_member(store: Store) -> None:
    await Spec().submit(store)
    for index in range(3):
        assert (await store.arrays.find("p", "train")).id == "a0"
        job = await store.find_job("p", f"train.{index}")
        await store.remove_job(job)
        with pytest.raises(RowNotFound):
            await store.job(job.id)
    with pytest.raises(RowNotFound):
        await store.arrays.find("p", "train")
    assert await store.snapshots() == set()


async def test_members_are_removed_together_or_not_at_all(store: Store) -> None:
    await Spec().submit(store)
    jobs = [await store.find_job("p", f"train.{index}") for index in range(3)]
    await store.commit(AtomicWrite(jobs=[replace(jobs[2], phase=JobPhase.RUNNING)]))
    with pytest.raises(StaleVersion):
        await store.remove_jobs(jobs)
    assert len(await store.arrays.members("a0")) == 3
    await store.remove_jobs([*jobs[:2], await store.job("a0-00002")])
    with pytest.raises(RowNotFound):
        await store.arrays.find("p", "train")


async def test_arrays_are_listed_newest_first(store: Store) -> None:
    for number in range(3):
        await Spec(array_id=f"a{number}").submit(store)
    found = await store.arrays.list("p", limit=2)
    assert [each.name for each in found] == ["train-3", "train-2"]
    assert [each.name for each in await store.arrays.list("p", before="a1")] == ["train"]
    assert await store.arrays.list("q") == []


async def run(store: Store, job: JobRecord) -> None:
    """Let a job run."""
    attempt = make_attempt(job, phase=AttemptPhase.RUNNING)
    running = replace(job, phase=JobPhase.RUNNING, attempt=1)
    await store.commit(AtomicWrite(jobs=[running], attempts=[attempt]))


async def test_the_queue_reads_some_members_of_each_array_beside_other_jobs(store: Store) -> None:
    await Spec(parallel=2).submit(store)
    await submit(store, "b0", name="other")
    await run(store, await store.find_job("p", "train.0"))
    rows = await store.queue.heads(NOW, 1)
    assert [(each.id, each.array, each.parallel) for each in rows] == [
        ("a0-00001", "a0", 2),
        ("b0", None, None),
    ]
    assert [each.array for each in await store.queue.rows(NOW)] == ["a0", "a0", None]
    assert (await store.queue.held())[1] == {"a0": 1}
    assert await store.arrays.holds_nodes("a0")
    assert not await store.arrays.holds_nodes("b0")


async def test_the_queue_reads_the_first_jobs_of_each_line(store: Store) -> None:
    """A line is an array, or the jobs of a project beside arrays."""
    await Spec(parallel=2).submit(store)
    waiting: Mapping[str, Any] = {
        "j0": {"not_before": after(60)},
        "j1": {"stop_reason": "asked"},
        "j2": {"user": "ann"},
        "j3": {"user": "ann", "priority": -1},
        "j4": {"user": "bob", "priority": -2},
        "j5": {"task": TaskSpec(name="m", run="x", machine="m")},
    }
    for name, more in waiting.items():
        await submit(store, name, name=name, **more)
    await submit(store, "j6", project="q")
    await submit(store, "j7", project="r", not_before=after(60))

    def list_ids(found: Sequence[PlacedRow]) -> list[str]:
        return [row.id for row in sort_rows(found)]

    queue = store.queue
    assert list_ids(await queue.firsts(NOW)) == ["a0-00000", "j2", "j6"]
    assert list_ids(await queue.firsts(after(60))) == ["a0-00000", "j0", "j6", "j7"]
    assert [row.parallel for _, row in await queue.firsts(NOW) if row.array] == [2]
    assert list_ids(await queue.more(NOW, 2, arrays=["a0"])) == ["a0-00000", "a0-00001"]
    assert list_ids(await queue.more(NOW, 2, projects=["p"])) == ["j2", "j3"]
    assert list_ids(await queue.more(NOW, 1, users_of=["p", "q"])) == ["j2", "j6", "j4"]
    assert await queue.more(NOW, 9) == []
    everything = await queue.more(NOW, 9, arrays=["a0"], projects=["p", "q", "r"])
    assert sort_rows(everything) == await queue.rows(NOW) == await queue.heads(NOW, 9)


async def test_the_members_of_an_array_have_what_they_reported(store: Store) -> None:
    await Spec().submit(store)
    found = await store.arrays.members("a0")
    assert [(each.index, each.job.name, each.progress) for each in found] == [
        (index, f"train.{index}", {}) for index in range(3)
    ]


def make_group(group_id: str, *names: str) -> list[NewJob]:
    """New jobs of a new group `rl`, with the IDs `group_id`-0 and so on."""
    jobs = []
    for place, name in enumerate(names):
        task = TaskSpec(name=name, run=f"echo {name}", group=JobGroup(name="rl"))
        job = make_job(
            f"{group_id}-{place}", name=name, array_id=group_id, task=task, origin=ORIGIN
        )
        jobs.append(NewJob(job=job, event=make_event(job), group="" if place else "rl"))
    return jobs


async def test_the_jobs_of_a_group_have_tasks_of_their_own(store: Store) -> None:
    await store.submit_all(make_group("g0", "trainer", "reward"))
    await store.submit_all(make_group("g1", "trainer", "reward"))
    group = await store.arrays.find("p", "rl")
    assert (group.id, group.started, group.counts) == ("g0", False, {"queued": 2})
    assert (await store.arrays.find("p", "rl-2")).id == "g1"
    assert await store.arrays.jobs("g0") == ["g0-0", "g0-1"]
    found = await store.find_jobs(["g0-0", "g0-1", "g1-1"])
    assert [(job.name, job.task.run) for job in found] == [
        ("trainer", "echo trainer"),
        ("reward", "echo reward"),
        ("reward-2", "echo reward"),
    ]
    many = [f"{number:05}" for number in range(70_000)]  # more than a statement can have values
    assert await store.find_jobs([*many, "g1-1", "g0-0"]) == [found[2], found[0]]
    assert [each.index for each in await store.arrays.members("g0")] == [0, 1]
    await store.commit(AtomicWrite(jobs=[replace(found[1], consented=True)]))
    assert (await store.job("g0-1")).task == found[1].task
    await store.arrays.start("g0", NOW)
    await store.arrays.start("g0", NOW)
    assert (await store.arrays.get("g0")).started is True
    await store.arrays.restart("g0")
    assert (await store.arrays.get("g0")).started is False
    assert (await Spec().submit(store)).started is None
    with pytest.raises(StaleVersion):
        await store.submit_all(make_group("g0", "trainer"))
    [late] = make_group("g9", "late")
    with pytest.raises(DependencyMissing, match="project p has no group rl"):
        await store.submit(late.job, late.event)
    await store.submit(replace(late.job, array_id="g0"), late.event)
    assert (await store.arrays.find("p", "rl")).counts == {"queued": 3}
