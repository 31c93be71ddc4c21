"""Who holds what on a shared host, in every store."""

import asyncio

import pytest
from tests.contract.store_suite import NOW, make_allocation, make_attempt, make_host, submit

from cavvy.domain.maintenance import NodeState
from cavvy.domain.values import replace
from cavvy.store.base import AllocationConflict, AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store


async def test_hosts_are_put_and_replaced(store: Store) -> None:
    await store.put_host(make_host("local/b"))
    await store.put_host(make_host("local/a", cpus=1))
    await store.put_host(make_host("local/a", cpus=2.5, devices=0))
    assert await store.hosts() == [make_host("local/a", cpus=2.5, devices=0), make_host("local/b")]


async def test_a_device_is_held_once(store: Store) -> None:
    await store.put_host(make_host())
    await store.put_host(make_host("local/other"))
    await store.commit(AtomicWrite(allocations=[make_allocation("g1", "GPU-0")]))
    with pytest.raises(AllocationConflict, match="GPU-0"):
        await store.commit(AtomicWrite(allocations=[make_allocation("g2", "GPU-1", "GPU-0")]))
    await store.commit(
        AtomicWrite(allocations=[make_allocation("g2", "GPU-0", host="local/other")])
    )
    assert await store.allocations("local/here") == [make_allocation("g1", "GPU-0")]
    assert await store.allocations() == [
        make_allocation("g1", "GPU-0"),
        make_allocation("g2", "GPU-0", host="local/other"),
    ]


async def test_a_release_makes_room_in_the_same_write(store: Store) -> None:
    await store.put_host(make_host())
    await store.commit(
        AtomicWrite(
            allocations=[make_allocation("g1", "GPU-0"), make_allocation("g1", "GPU-1", rank=1)]
        )
    )
    await store.commit(
        AtomicWrite(release=["g1", "never"], allocations=[make_allocation("g2", "GPU-0", "GPU-1")])
    )
    assert await store.allocations() == [make_allocation("g2", "GPU-0", "GPU-1")]
    assert await store.allocations_of("g2") == await store.allocations()
    assert await store.allocations_of("g1") == []


async def test_nothing_is_placed_on_a_cordoned_host(store: Store) -> None:
    """Also if it was decided before the host was cordoned."""
    await store.put_host(make_host())
    placed = AtomicWrite(allocations=[make_allocation("g1", "GPU-0")])
    state = NodeState(name="local/here", cordoned_at=NOW)
    state = await store.maintenance.put_state(state)
    with pytest.raises(AllocationConflict, match="local/here is cordoned"):
        await store.commit(placed)
    with pytest.raises(StaleVersion):
        await store.maintenance.put_state(replace(state, version=0))
    await store.maintenance.put_state(replace(state, cordoned_at=None, sick={"GPU-1": "fault"}))
    await store.commit(placed)
    assert len(await store.allocations()) == 1


async def test_the_parts_of_a_device_are_at_most_one_device(store: Store) -> None:
    await store.put_host(make_host())
    quarters = [make_allocation(f"q{n}", "GPU-0", cpus=0.1, part=1 / 3) for n in range(3)]
    await store.commit(AtomicWrite(allocations=quarters))
    for wrong in (
        make_allocation("more", "GPU-0", cpus=0.1, part=0.01),
        make_allocation("whole", "GPU-0", cpus=0.1),
    ):
        with pytest.raises(AllocationConflict, match="holds GPU-0"):
            await store.commit(AtomicWrite(allocations=[wrong]))
    await store.commit(AtomicWrite(release=["q0", "q1"]))
    with pytest.raises(AllocationConflict, match="q2 holds GPU-0"):
        await store.commit(AtomicWrite(allocations=[make_allocation("whole", "GPU-0", cpus=0.1)]))
    await store.commit(AtomicWrite(release=["q2"], allocations=[make_allocation("w", "GPU-0")]))
    with pytest.raises(AllocationConflict, match="w holds GPU-0"):
        await store.commit(
            AtomicWrite(allocations=[make_allocation("q", "GPU-0", cpus=0.1, part=0.01)])
        )


async def test_a_failed_write_releases_nothing(store: Store) -> None:
    await store.put_host(make_host())
    job = await submit(store, "j1")
    await store.commit(AtomicWrite(allocations=[make_allocation("g1", "GPU-0")]))
    with pytest.raises(AllocationConflict):
        await store.commit(
            AtomicWrite(
                release=["g1"],
                allocations=[make_allocation("g2", "GPU-9")],
                attempts=[make_attempt(job)],
            )
        )
    with pytest.raises(StaleVersion):
        await store.commit(AtomicWrite(release=["g1"], jobs=[replace(job, version=8)]))
    assert await store.allocations() == [make_allocation("g1", "GPU-0")]
    assert await store.attempts("j1") == []


@pytest.mark.parametrize(
    "allocation",
    [
        make_allocation("g2", cpus=1.001),
        make_allocation("g2", memory_mib=6001),
        make_allocation("g2", "GPU-7"),
        make_allocation("g2", "GPU-1", "GPU-1"),
        make_allocation("g1"),
    ],
    ids=["cpus", "memory", "unknown device", "device twice", "rank twice"],
)
async def test_what_does_not_fit_is_held(store: Store, allocation: object) -> None:
    await store.put_host(make_host(cpus=4, memory_mib=8192))
    standing = make_allocation("g1", cpus=3.0, memory_mib=2192)
    await store.commit(AtomicWrite(allocations=[standing]))
    with pytest.raises(AllocationConflict):
        await store.commit(AtomicWrite(allocations=[allocation]))  # type: ignore[list-item]
    assert await store.allocations() == [standing]
    await store.commit(AtomicWrite(allocations=[make_allocation("g2", cpus=1.0, memory_mib=6000)]))


async def test_tenths_of_a_cpu_fill_a_host(store: Store) -> None:
    await store.put_host(make_host(cpus=1, devices=0))
    for i in range(10):
        await store.commit(
            AtomicWrite(allocations=[make_allocation(f"g{i}", cpus=0.1, memory_mib=1)])
        )
    with pytest.raises(AllocationConflict):
        await store.commit(
            AtomicWrite(allocations=[make_allocation("more", cpus=0.1, memory_mib=1)])
        )


async def test_a_hold_needs_its_host(store: Store) -> None:
    with pytest.raises(RowNotFound):
        await store.commit(AtomicWrite(allocations=[make_allocation("g1")]))


async def test_a_host_may_shrink_under_its_holds(store: Store) -> None:
    await store.put_host(make_host())
    await store.commit(AtomicWrite(allocations=[make_allocation("g1", "GPU-1", cpus=3.0)]))
    await store.put_host(make_host(cpus=2, devices=1))
    assert await store.allocations() == [make_allocation("g1", "GPU-1", cpus=3.0)]
    with pytest.raises(AllocationConflict):
        await store.commit(AtomicWrite(allocations=[make_allocation("g2", cpus=0.5)]))


async def test_of_many_that_want_one_device_one_gets_it(store: Store) -> None:
    await store.put_host(make_host(cpus=100, memory_mib=100_000))
    wants = [
        store.commit(AtomicWrite(allocations=[make_allocation(f"g{i}", "GPU-0")]))
        for i in range(12)
    ]
    results = await asyncio.gather(*wants, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["AllocationConflict"] * 11 + [
        "NoneType"
    ]
    assert await store.allocations() == [make_allocation(f"g{results.index(None)}", "GPU-0")]


async def test_sums_never_pass_the_host(store: Store) -> None:
    await store.put_host(make_host(cpus=4, memory_mib=8192, devices=0))
    await store.put_host(make_host("local/there", cpus=2, memory_mib=8192, devices=0))
    wants = [
        store.commit(
            AtomicWrite(
                release=[f"g{i - 6}"],
                allocations=[
                    make_allocation(f"g{i}", cpus=0.7),
                    make_allocation(f"g{i}", host="local/there", rank=1, cpus=0.5),
                ][:: 1 if i % 2 else -1],
            )
        )
        for i in range(40)
    ]
    results = await asyncio.gather(*wants, return_exceptions=True)
    assert {type(result).__name__ for result in results} == {"AllocationConflict", "NoneType"}
    for name, cpus in (("local/here", 4), ("local/there", 2)):
        assert sum(allocation.cpus for allocation in await store.allocations(name)) <= cpus
