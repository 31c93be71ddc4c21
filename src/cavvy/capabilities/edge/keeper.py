"""What the core asks of the devices at the edge (`control.parts.DeviceKeeper`)."""

from datetime import timedelta
from functools import partial

from cavvy.capabilities.edge.paths import view_paths
from cavvy.capabilities.edge.service import EdgeService, is_edge_key
from cavvy.capabilities.edge.steps import EdgeSteps
from cavvy.capabilities.models.registry import ModelUser
from cavvy.client.service_wire import EdgePathView
from cavvy.control.parts import ControlParts, KnownService
from cavvy.domain.jobs import JobRecord
from cavvy.domain.tasks import EdgeStep, TaskSpec
from cavvy.store.blobs import BlobStore


class EdgeKeeper(EdgeService):
    """The devices of an installation."""

    waits_outside = False

    def __init__(self, parts: ControlParts) -> None:
        super().__init__(
            parts.store,
            parts.clock,
            parts.hint_after,
            parts.list_services,
            parts.open_secrets,
            partial(parts.list_own, ModelUser),  # type: ignore[type-abstract]
        )
        self._steps = EdgeSteps(parts.store, parts.clock, self, parts.checkpoints, parts.keeper)

    def owns(self, key: str) -> bool:
        return is_edge_key(key)

    async def step(self, job: JobRecord, step: EdgeStep) -> timedelta:
        return await self._steps.step(job, step)

    async def find_bound(
        self, task: TaskSpec, blobs: BlobStore, snapshot: str, rerun_of: str | None
    ) -> tuple[str, str] | None:
        if (model := await self.find_confined(task, blobs, snapshot)) is not None:
            return model.name, model.residency
        job = await self.find_collector(task, blobs, snapshot, rerun_of)
        if job is None or job.task.edge is None:
            return None
        return f"the samples of {job.name}", job.task.edge.residency

    async def list_paths(self, service: KnownService) -> list[EdgePathView]:
        if not service.rules:
            return []
        return await view_paths(self, self._store, service, self._clock.now())
