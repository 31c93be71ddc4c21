"""Services, in every store."""

from datetime import UTC, datetime, timedelta

import pytest

from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.service_updates import CandidateRevision
from cavvy.domain.services import ServiceReplica, ServiceSpec
from cavvy.domain.stored_services import StoredService
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVICE = StoredService(
    project="p",
    name="chat",
    id="s",
    created_at=NOW,
    task=TaskSpec(name="chat", run="serve", service=ServiceSpec(port=80)),
    origin=RunOrigin(snapshot="abc"),
)


async def test_a_service_is_written_by_version_and_read_by_project(store: Store) -> None:
    stored = await store.services.put(SERVICE)
    await store.services.put(replace(SERVICE, project="q", origin=RunOrigin()))
    assert stored == replace(SERVICE, version=1)
    assert [each.project for each in await store.services.list()] == ["p", "q"]
    assert await store.services.list("p") == [stored]
    with pytest.raises(StaleVersion):
        await store.services.put(SERVICE)
    replica = ServiceReplica(id="r", service="chat", revision=1, market="local", ordered_at=NOW)
    changed = await store.services.put(replace(stored, replicas=(replica,)))
    assert await store.services.get("p", "chat") == changed
    with pytest.raises(StaleVersion):
        await store.services.put(replace(stored, revision=2))
    with pytest.raises(StaleVersion):
        await store.services.delete(stored)
    assert "abc" in await store.snapshots(), "its files are kept, although no job uses them"
    tried = CandidateRevision(
        revision=2, task=SERVICE.task, origin=RunOrigin(snapshot="def"), created_at=NOW
    )
    changed = await store.services.put(replace(changed, candidate=tried))
    assert {"abc", "def"} <= set(await store.snapshots()), "nor those of its candidate"
    changed = await store.services.put(replace(changed, candidate=None, worked=tried))
    assert "def" in await store.snapshots(), "nor those of the last revision that worked"
    await store.services.delete(changed)
    with pytest.raises(RowNotFound):
        await store.services.get("p", "chat")
    assert "abc" not in await store.snapshots()


async def test_figures_go_with_their_service(store: Store) -> None:
    kept = await store.services.put(replace(SERVICE, name="other", id="s2"))
    gone = await store.services.put(SERVICE)
    minute = int(NOW.timestamp()) // 60
    column = FigureColumns(low=[1], mean=[2], high=[3])
    blocks = [
        FigureBlock(attempt_id=each.id, rank=0, minutes=[minute], columns={"waiting": column})
        for each in (kept, gone)
    ]
    await store.commit(AtomicWrite(figures=blocks))
    with pytest.raises(StaleVersion):
        await store.services.delete(replace(gone, version=9))
    await store.services.delete(gone)
    period = {"since": NOW - timedelta(days=1), "until": NOW + timedelta(days=1)}
    assert [len(await store.figures.list(each.id, 0, **period)) for each in (kept, gone)] == [1, 0]
