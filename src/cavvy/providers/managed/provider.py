"""The provider that all managed services share."""

import asyncio
from collections.abc import Callable, Sequence

from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.providers.base import GangSpec, Manifest, ProviderContext
from cavvy.providers.managed.cloud import ManagedCloud
from cavvy.providers.managed.container import make_container_script
from cavvy.providers.managed.image import object_to_missing_image
from cavvy.providers.managed.options import object_to_options
from cavvy.providers.managed.service import ManagedService
from cavvy.providers.notices import NoticeSource
from cavvy.providers.vm.provider import Release, VmProvider

_NOTHING = "#!/bin/sh\n"


def make_provider(
    manifest: Manifest,
    context: ProviderContext,
    make_service: Callable[[ProviderContext], ManagedService],
) -> VmProvider:
    """Return a `VmProvider` whose machines are the instances of the service's jobs. Besides the six
    calls, a service may have these methods: `close` closes the service's connections.
    `list_placed` returns the targets of the inputs that the service itself places on a gang's
    nodes. `list_notices` returns the addresses that a gang's agents poll for notices; without it,
    the agents poll the manifest's addresses. Agents also treat the service's SIGTERM as a notice.
    `release` ends the instances that the service keeps after a job.
    """
    service = make_service(context)
    list_placed: Callable[[GangSpec], Sequence[str]] | None = getattr(service, "list_placed", None)
    list_notices: Callable[[GangSpec], Sequence[NoticeSource]] | None = getattr(
        service, "list_notices", None
    )
    release: Release | None = getattr(service, "release", None)

    async def release_machine(machine: str) -> None:
        job, _, place = machine.rpartition("#")
        if release is not None and place == "0":
            await release(job)

    async def make_script(gang: GangSpec, rank: int) -> str:
        if context.node_endpoint is None or not service.traits.has_script(rank):
            return _NOTHING
        return await asyncio.to_thread(
            make_container_script,
            gang,
            context.node_endpoint,
            service.traits,
            manifest.title,
            manifest.notices if list_notices is None else list_notices(gang),
            () if list_placed is None else list_placed(gang),
        )

    def object_to(task: TaskSpec) -> Sequence[Objection]:
        return [
            *service.check(task),
            *object_to_options(manifest.name, task),
            *object_to_missing_image(manifest, task, context.settings),
        ]

    cloud = ManagedCloud(service)
    provider = VmProvider(
        manifest,
        context,
        cloud,
        identity=service.identity,
        make_script=make_script,
        object_to=object_to,
        close=getattr(service, "close", lambda: None),
    )
    if release is not None:
        provider.let_release(release_machine)
    return provider
