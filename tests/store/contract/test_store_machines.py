"""Named machines, in every store."""

import pytest
from tests.contract.store_suite import begin, make_charge, submit

from cavvy.domain.jobs import JobPhase
from cavvy.domain.machines import NamedMachine
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store

TASK = TaskSpec(name="first", run="true", machine="dev")
MACHINE = NamedMachine(project="p", name="dev", task=TASK)


async def test_a_machine_is_written_by_version_and_read_by_project(store: Store) -> None:
    await store.commit(AtomicWrite(machines=[MACHINE, replace(MACHINE, project="q")]))
    read = await store.machine("p", "dev")
    assert read == replace(MACHINE, version=1)
    assert [each.project for each in await store.machines()] == ["p", "q"]
    assert [each.project for each in await store.machines("q")] == ["q"]
    with pytest.raises(StaleVersion):
        await store.commit(AtomicWrite(machines=[MACHINE]))
    await store.commit(AtomicWrite(machines=[replace(read, user="ada")]))
    with pytest.raises(StaleVersion):
        await store.delete_machine(read)
    await store.delete_machine(await store.machine("p", "dev"))
    with pytest.raises(RowNotFound):
        await store.machine("p", "dev")


async def test_a_machines_unfinished_jobs_are_found(store: Store) -> None:
    first = await submit(store, "1", task=TASK)
    await submit(store, "2", name="second", task=TASK)
    await submit(store, "3", name="loose")
    await submit(store, "4", project="q", task=TASK)
    await store.commit(AtomicWrite(jobs=[replace(first, phase=JobPhase.DONE)]))
    assert await store.jobs_of_machine("p", "dev") == ["2"]
    page = await store.list_jobs("p")
    assert [each.machine for each in page.jobs] == [None, "dev", "dev"]


async def test_the_cost_of_a_gang_covers_every_job_that_had_it(store: Store) -> None:
    attempt = await begin(store, await submit(store, "1"))
    other = await begin(store, await submit(store, "2", name="second"))
    charges = [make_charge(attempt, 1000), make_charge(other, 200)]
    handed = replace(attempt, gang=f"{attempt.gang}@{attempt.id}")
    taken = replace(other, gang=attempt.gang)
    await store.commit(AtomicWrite(attempts=[handed, taken], charges=charges))
    assert (await store.gang_spent(attempt.gang)).micros == 1200
    assert (await store.gang_spent(other.gang)).micros == 0
