"""A database of yesterday meets the providers of today."""

from datetime import timedelta
from functools import partial

from tests.control.sim.test_control_services import ControlHarness, in_harness

from cavvy.control.clock import VirtualClock
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.decide.restored import RestoreComparison
from cavvy.control.job_service import gang_name
from cavvy.control.restored import compare_with_providers, mark_restored, read_restored_at
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore
from cavvy.store.table_copy import copy_rows

NAME_GANG = partial(gang_name, "test")


def back_up(store: MemoryStore) -> MemoryStore:
    """A store with the rows that `store` has now."""
    copy = MemoryStore(make_id=lambda: "test")
    copy_rows(store._session, copy._session)
    return copy


def make_plane(store: MemoryStore, cloud: FakeCloud, clock: VirtualClock) -> ControlPlane:
    async def no_secrets(project: str, names: object) -> dict[str, str]:
        return {}

    dependencies = ControlPlaneDependencies(
        agent_endpoint=lambda gang: AgentEndpoint(address="a", token=gang),
        open_secrets=no_secrets,
        storage=lambda job: f"/storage/{job.id}",
    )
    return ControlPlane(
        store, {"fake": cloud}, clock, installation="test", dependencies=dependencies
    )


async def attempts_of(store: MemoryStore, name: str) -> list[Attempt]:
    return list(await store.attempts((await store.find_job("default", name)).id))


def running(cloud: FakeCloud) -> set[str]:
    return {each.spec.name for each in cloud.gang_list if each.ended_at is None}


async def make_history(harness: ControlHarness) -> MemoryStore:
    """Three jobs run at the backup. Then one is preempted and placed again, one is stopped, and a
    new one starts. Returns the backup."""
    for name in ("kept", "moved", "stopped"):
        await harness.submit(name=name, secrets=())
    await harness.wait(30)
    backup = back_up(harness.store)
    (first,) = await attempts_of(harness.store, "moved")
    await harness.cloud.remove(first.gang)
    stopped = await harness.store.find_job("default", "stopped")
    await harness.control_plane.jobs.stop("default", stopped.id)
    await harness.submit(name="new", secrets=())
    await harness.wait(120)
    assert len(await attempts_of(harness.store, "moved")) == 2
    assert (await harness.store.job(stopped.id)).phase is JobPhase.STOPPED
    await harness.control_plane.stop()
    return backup


async def check_comparison(harness: ControlHarness, found: RestoreComparison) -> None:
    second = (await attempts_of(harness.store, "moved"))[1]
    (new,) = await attempts_of(harness.store, "new")
    assert {each.gang: each.attempt and (each.attempt.job, each.attempt.number)
            for each in found.unknown} == {second.gang: ("moved", 2), new.gang: None}  # fmt: skip
    assert {each.rate for each in found.unknown} == {new.offer.rate, second.offer.rate}
    assert [(each.attempt.job, each.attempt.number) for each in found.lost] == [
        ("moved", 1),
        ("stopped", 1),
    ]
    assert found.found == 1


def test_what_runs_is_spared_and_what_is_gone_is_run_again() -> None:
    async def scenario(harness: ControlHarness) -> None:
        store = await make_history(harness)
        plane = make_plane(store, harness.cloud, harness.clock)
        found, silent = await compare_with_providers(store, plane.pool, NAME_GANG)
        assert silent == []
        await check_comparison(harness, found)
        await mark_restored(store, found, harness.clock.now())
        await plane.start()
        await harness.wait(700)  # one garbage collection; the gangs are old enough for it
        unknown = {each.gang for each in found.unknown}
        assert unknown <= running(harness.cloud), "a person decides on them"
        first, third = await attempts_of(store, "moved")
        assert (first.phase, third.number) == (AttemptPhase.ENDED, 3)
        assert len(await attempts_of(store, "stopped")) == 2
        assert len(await attempts_of(store, "kept")) == 1
        listed = await plane.garbage_collector.sweep(remove=False)
        assert {each.gang for each in listed.orphans} == unknown
        assert all("restored at" in each.why for each in listed.orphans)
        removed = await plane.garbage_collector.sweep(remove=True)
        assert all(each.removed for each in removed.orphans)
        await harness.wait(60)
        assert not unknown & running(harness.cloud)
        launched = [name for _, name in harness.cloud.launch_calls]
        assert len(launched) == len(set(launched)), "no name is used twice"
        await plane.stop()

    in_harness(scenario)


def test_garbage_collection_is_complete_again_after_a_day_without_unknown_gangs() -> None:
    async def scenario(harness: ControlHarness) -> None:
        await mark_restored(
            harness.store,
            RestoreComparison(unknown=[], lost=[], found=0, used={}),
            harness.clock.now(),
        )
        await harness.wait(timedelta(hours=23).total_seconds())
        assert await read_restored_at(harness.store) is not None
        await harness.wait(timedelta(hours=2).total_seconds())
        assert await read_restored_at(harness.store) is None

    in_harness(scenario)


def test_nothing_is_concluded_about_a_provider_that_does_not_answer() -> None:
    async def scenario(harness: ControlHarness) -> None:
        store = await make_history(harness)
        plane = make_plane(store, harness.cloud, harness.clock)
        plane.pool.providers = {}  # its settings are missing
        found, _ = await compare_with_providers(store, plane.pool, NAME_GANG)
        assert (found.unknown, found.lost) == ([], [])

    in_harness(scenario)


def test_attempts_on_a_projects_account_are_compared_with_that_account() -> None:
    async def scenario(harness: ControlHarness) -> None:
        store = await make_history(harness)
        for name in ("moved", "stopped"):
            (attempt,) = await attempts_of(store, name)
            offer = replace(attempt.offer, credential="p")
            await store.commit(AtomicWrite(attempts=[replace(attempt, offer=offer)]))
        plane = make_plane(store, harness.cloud, harness.clock)
        plane.pool.unusable["fake@p"] = "its key cannot be read"
        found, silent = await compare_with_providers(store, plane.pool, NAME_GANG)
        assert found.lost == []
        assert [each.provider for each in silent] == ["fake@p"]

        plane.pool.unusable.clear()
        plane.pool.providers["fake@p"] = FakeCloud(MANIFEST, DEFAULT, harness.clock.now)
        found, _ = await compare_with_providers(store, plane.pool, NAME_GANG)
        assert [each.provider for each in found.lost] == ["fake@p", "fake@p"]

    in_harness(scenario)


def test_bills_that_cannot_be_written_keep_no_unwanted_gang_alive() -> None:
    async def scenario(harness: ControlHarness) -> None:
        store = await make_history(harness)
        plane = make_plane(store, harness.cloud, harness.clock)
        found, _ = await compare_with_providers(store, plane.pool, NAME_GANG)
        unknown = {each.gang for each in found.unknown}
        assert unknown & running(harness.cloud)
        store._session.run("DROP TABLE volume_bills")
        await plane.start()
        await harness.wait(3000)
        assert not unknown & running(harness.cloud)
        await plane.stop()

    in_harness(scenario)
