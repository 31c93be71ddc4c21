"""Services, in every store."""

from datetime import UTC, datetime, timedelta

import pytest

from cavvy.capabilities.serving.replicas import CandidateRevision, ServiceReplica
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import ServiceKey, StoredService
from cavvy.control.restored import count_access, end_access
from cavvy.domain.accounts import Project
from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, ProjectArchived, ProjectBusy, RowNotFound, StaleVersion
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
    stored = await services_of(store).put(SERVICE)
    await services_of(store).put(replace(SERVICE, project="q", origin=RunOrigin()))
    assert stored == replace(SERVICE, version=1)
    assert [each.project for each in await services_of(store).list()] == ["p", "q"]
    assert await services_of(store).list("p") == [stored]
    with pytest.raises(StaleVersion):
        await services_of(store).put(SERVICE)
    replica = ServiceReplica(id="r", service="chat", revision=1, market="local", ordered_at=NOW)
    changed = await services_of(store).put(replace(stored, replicas=(replica,)))
    assert await services_of(store).get("p", "chat") == changed
    with pytest.raises(StaleVersion):
        await services_of(store).put(replace(stored, revision=2))
    with pytest.raises(StaleVersion):
        await services_of(store).delete(stored)
    assert "abc" in await store.snapshots(), "its files are kept, although no job uses them"
    tried = CandidateRevision(
        revision=2, task=SERVICE.task, origin=RunOrigin(snapshot="def"), created_at=NOW
    )
    changed = await services_of(store).put(replace(changed, candidate=tried))
    assert {"abc", "def"} <= set(await store.snapshots()), "nor those of its candidate"
    changed = await services_of(store).put(replace(changed, candidate=None, worked=tried))
    assert "def" in await store.snapshots(), "nor those of the last revision that worked"
    await services_of(store).delete(changed)
    with pytest.raises(RowNotFound):
        await services_of(store).get("p", "chat")
    assert "abc" not in await store.snapshots()


async def test_an_archived_project_has_no_service(store: Store) -> None:
    await store.add_project(Project(name="p"), adopt=False)
    stored = await services_of(store).put(SERVICE)
    with pytest.raises(ProjectBusy, match="service chat has not ended"):
        await store.archive.put(["p"], NOW)
    await services_of(store).delete(stored)
    await store.archive.put(["p"], NOW)
    with pytest.raises(ProjectArchived):
        await services_of(store).put(SERVICE)


async def test_keys_that_came_back_with_a_backup_are_counted_and_ended(store: Store) -> None:
    key = ServiceKey(id="k1", sha256="0" * 64, created_at=NOW)
    ended = replace(key, id="k2", expires_at=NOW)
    await services_of(store).put(replace(SERVICE, keys=(key, ended)))
    assert (await count_access(store, NOW)).keys == 1
    await end_access(store, NOW)
    assert (await services_of(store).get("p", "chat")).keys == ()


async def test_figures_go_with_their_service(store: Store) -> None:
    kept = await services_of(store).put(replace(SERVICE, name="other", id="s2"))
    gone = await services_of(store).put(SERVICE)
    minute = int(NOW.timestamp()) // 60
    column = FigureColumns(low=[1], mean=[2], high=[3])
    blocks = [
        FigureBlock(attempt_id=each.id, rank=0, minutes=[minute], columns={"waiting": column})
        for each in (kept, gone)
    ]
    await store.commit(AtomicWrite(figures=blocks))
    with pytest.raises(StaleVersion):
        await services_of(store).delete(replace(gone, version=9))
    await services_of(store).delete(gone)
    period = {"since": NOW - timedelta(days=1), "until": NOW + timedelta(days=1)}
    assert [len(await store.figures.list(each.id, 0, **period)) for each in (kept, gone)] == [1, 0]
