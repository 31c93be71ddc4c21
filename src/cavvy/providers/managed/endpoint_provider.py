"""The provider that all managed endpoints share. A gang is one endpoint with one instance; the code
in `vm` starts and removes the endpoint like a machine.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from cavvy.domain.messages import AgentCalls
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import GangSeen, GangSpec, Manifest, NotFound, ProviderContext
from cavvy.providers.managed.endpoint_agents import EndpointAgents
from cavvy.providers.managed.provider import make_provider as make_service_provider
from cavvy.providers.managed.service import ManagedService, ServiceTraits
from cavvy.providers.vm.cloud import BillEnd
from cavvy.providers.vm.provider import VmProvider

ENDPOINT_TRAITS = ServiceTraits(
    agents=False,
    unique_names=True,
    single=True,
    bill_ends=BillEnd.REPORTED,
)


class EndpointCalls(Protocol):
    """Sends requests to the endpoints of a service. An endpoint is named by the id of its job."""

    async def answers(self, job: str) -> bool:
        """Return whether the endpoint can receive requests. Raises TryAgain, Refused."""

    async def invoke(self, job: str, request: ReplicaRequest) -> ReplicaAnswer:
        """See `AnswersRequests.invoke`."""

    def close(self) -> None:
        """Stop the threads that send requests."""


def make_provider(
    manifest: Manifest,
    context: ProviderContext,
    make_endpoints: Callable[[ProviderContext], tuple[ManagedService, EndpointCalls]],
) -> "EndpointProvider":
    """Create the provider. `make_endpoints` returns the service and the calls of its endpoints."""
    service, calls = make_endpoints(context)
    inner = make_service_provider(manifest, context, lambda context: service)
    return EndpointProvider(inner, calls, context.now)


class EndpointProvider:
    """Implements `Provider` with the abilities of `EndpointManifest`."""

    def __init__(
        self, inner: VmProvider, calls: EndpointCalls, now: Callable[[], datetime]
    ) -> None:
        self.manifest = inner.manifest
        self._inner, self._calls = inner, calls
        self._agents = EndpointAgents(now)

    async def offers(self) -> Sequence[Offer]:
        return await self._inner.offers()

    async def launch(self, gang: GangSpec) -> None:
        await self._inner.launch(gang)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        seen = await self._inner.gangs(name)
        self._agents.note(seen, name)
        return seen

    async def remove(self, name: str) -> None:
        await self._inner.remove(name)

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return self._inner.check(task)

    async def whoami(self) -> Sequence[tuple[str, str]]:
        return await self._inner.whoami()

    def connect(self, control_plane: AgentCalls | None) -> None:
        self._agents.connect(control_plane)

    async def answers(self, gang: str) -> bool:
        return await self._calls.answers(await self._find(gang))

    async def invoke(self, gang: str, request: ReplicaRequest) -> ReplicaAnswer:
        return await self._calls.invoke(await self._find(gang), request)

    async def close(self) -> None:
        self._agents.close()
        await self._inner.close()
        self._calls.close()

    async def _find(self, gang: str) -> str:
        """Return the id of the endpoint's job. Raises NotFound."""
        for machine in await self._inner.list_machines(gang):
            return machine.rpartition("#")[0]
        raise NotFound(f"{self.manifest.title}: the gang {gang} has no endpoint")
