"""The interface between the control plane and the gateway on the same server."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from cavvy.capabilities.serving.bills import RequestWork
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.queued_calls import CallAnswer, QueuedCall
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.budgets import BudgetKeeper
from cavvy.control.clock import ControlClock
from cavvy.control.job_service import JobService
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.values import Struct
from cavvy.store.sql import Store


class ProbeRecord(Struct, frozen=True, kw_only=True):
    """How a replica answered its last probes. `failures` is the number of failures in a row, 0
    after an answer. `problem` says why the last probe failed. `reading` is the value of the metric
    by which the service is scaled, or None if the replica has not reported it. `keeps` is whether
    the replica keeps unused connections open for `gateway.config.KEPT_S`; False: not known yet.
    """

    answers: bool = False
    failures: int = 0
    problem: str = ""
    reading: float | None = None
    keeps: bool = False


class ServiceFront(Protocol):
    """Runs the gateway, and probes replicas."""

    def find_port(self) -> int:
        """Return a free port of this machine for a new replica."""

    def locate(self, service: StoredService) -> str:
        """Return the service's URL, or "" while the gateway does not run."""

    def find_problem(self) -> str:
        """Return why the gateway cannot listen, or "" if it listens or starts."""

    def permits(self, host: str) -> bool:
        """Return whether services may have this host name."""

    def watch(
        self, service: StoredService, replicas: Sequence[ServiceReplica], *, owns: bool = True
    ) -> None:
        """From now on, connect only to these running replicas of the service, and probe them. With
        `owns`, also give its routers their workers, which only one server does.
        """

    def probe(self, replica_id: str) -> ProbeRecord:
        """Return the last known state of a watched replica."""

    def list_joined(self, router_id: str) -> frozenset[str]:
        """Return the IDs of the workers to which a watched router sends requests."""

    async def publish(self, service: StoredService, replicas: Sequence[ServiceReplica]) -> None:
        """Let the gateway serve the service with these replicas. The gateway starts when its first
        service is published. A gateway that does not respond receives the change later.
        """

    async def await_published(self, service: StoredService, timeout_s: float) -> None:
        """Wait until the gateway has received this version of the service, at most `timeout_s`
        seconds. Return immediately if no gateway can listen.
        """

    async def withdraw(self, service: StoredService) -> None:
        """Stop serving the service. The gateway stops when its last service is withdrawn."""

    async def read_traffic(self, service: StoredService) -> ServiceTraffic | None:
        """Return the service's traffic since the last `publish`, or None if this `publish` has not
        reached the gateway yet.
        """

    async def read_work(self, service: StoredService) -> RequestWork | None:
        """Return the counts of the service's requests, including the counts of ended gateways, or
        None if the counts are unknown.
        """

    async def call(
        self, service: StoredService, call: QueuedCall, body: bytes, timeout: timedelta
    ) -> CallAnswer:
        """Send a call to the service through this server's gateway, which counts the call like all
        other requests. The call needs no key of the service.
        """

    async def run(
        self, published: Sequence[StoredService], wake: Callable[[StoredService], None]
    ) -> None:
        """Keep the gateway running until this task is cancelled. `published` contains the services
        at the start. `wake` is called when requests arrive for a service, or when the result of a
        replica's probe changes.
        """


class SuppliedFront(Struct, frozen=True, kw_only=True):
    """What a simulation has in place of a gateway, among what the server has for capabilities."""

    front: ServiceFront


class ServingParts(Struct, frozen=True, kw_only=True):
    """The dependencies of the reconciler of services and of the handlers of users' requests. If
    `front` is None, the server runs no services. `pool` supplies the offers for replicas. `hint` is
    a function: it asks the server that reconciles a key to do so soon.
    """

    store: Store
    clock: ControlClock
    jobs: JobService
    pool: ProviderPool
    budgets: BudgetKeeper
    front: ServiceFront | None
    hint: Callable[[str], None]
    # tells the other servers that the service of a key has changed
    announce: Callable[[str], None] = lambda key: None
    # whether this server reconciles a key, and not another one
    owns: Callable[[str], bool] = lambda key: True
