"""What the tests of who may see what know of a project's services."""

from datetime import datetime

from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.store.sql import Store


async def add_rows(store: Store, project: str, now: datetime) -> str:
    """Add a service."""
    service = make_service(project, now)
    await services_of(store).put(service)
    return service.name


def make_service(project: str, now: datetime) -> StoredService:
    name = f"service-of-{project}-mark"
    task = TaskSpec(name=name, project=project, run="true", service=ServiceSpec(port=80))
    return StoredService(project=project, name=name, id=f"s-{project}", created_at=now, task=task)
