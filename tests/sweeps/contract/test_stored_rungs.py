"""What jobs of a sweep had reported is stored once, and goes with them."""

from tests.scheduler.contract.test_store_arrays import Spec

from cavvy.capabilities.sweeps.rungs import RungValue, StoredRungs, insert_rung
from cavvy.domain.jobs import JobPhase, StopCause
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import Store


async def test_what_members_reported_goes_with_them(store: Store) -> None:
    await Spec().submit(store)
    stored = StoredRungs(*store.database)

    def make(index: int, rung: int, value: float, stopped: bool = False) -> RungValue:
        job_id = f"a0-0000{index}"
        return RungValue(array_id="a0", job_id=job_id, rung=rung, value=value, stopped=stopped)

    rungs = [make(0, 0, 0.5), make(0, 1, 1e300), make(1, 0, -0.25, stopped=True)]
    await store.commit(AtomicWrite(own=[*map(insert_rung, rungs)]))
    await store.commit(
        AtomicWrite(own=[insert_rung(make(0, 0, 9.0))])
    )  # a repeated report changes nothing
    assert [await stored.count(f"a0-0000{index}") for index in range(3)] == [2, 1, 0]
    values = {"a0-00000": {0: 0.5, 1: 1e300}, "a0-00001": {0: -0.25}}
    assert await stored.list_of_array("a0") == values
    job = await store.job("a0-00001")
    done = replace(job, phase=JobPhase.DONE, stop_cause=StopCause.EARLY)
    await store.commit(AtomicWrite(jobs=[done]))
    assert [each.early for each in await store.arrays.members("a0")] == [False, True, False]
    await store.remove_job(await store.job("a0-00001"))
    assert await stored.list_of_array("a0") == {"a0-00000": values["a0-00000"]}
