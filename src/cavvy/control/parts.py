"""What the control plane gives to the reconcilers of capabilities, and what they are."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, runtime_checkable

from cavvy.client.service_wire import EdgePathView
from cavvy.control.agents.checkpoints import Checkpoints
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.agents.transfers import Transfers
from cavvy.control.agents.work import OpenSecrets
from cavvy.control.budgets import BudgetKeeper
from cavvy.control.clock import ControlClock
from cavvy.control.job_service import JobService
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.start_trials import StartTrials
from cavvy.domain.jobs import JobRecord
from cavvy.domain.services import EdgeRule
from cavvy.domain.tasks import EdgeStep, TaskSpec
from cavvy.domain.values import Struct
from cavvy.store.base import ProjectFilter
from cavvy.store.blobs import BlobStore
from cavvy.store.secrets import SecretSealer
from cavvy.store.sql import Store
from cavvy.telemetry import Figures

_T = TypeVar("_T")
# returns the private targets that users may name in URLs
ReadTargets = Callable[[], Awaitable[str]]
# decrypts a value: its project, the name that its encryption includes, and the encrypted value;
# raises KeyUnusable
OpenSealed = Callable[[str, str, bytes], Awaitable[str]]


# why what needs devices at the edge cannot be done
NO_DEVICES = "this installation has no capability that knows devices at the edge"


class KnownService(Struct, frozen=True, kw_only=True):
    """A service, as other capabilities know it. `url` is "" while it takes no requests."""

    id: str
    task: TaskSpec
    url: str

    @property
    def rules(self) -> tuple[EdgeRule, ...]:
        """The devices that are a part of the service."""
        return () if self.task.service is None else self.task.service.edge


class FileKeeper(Struct, frozen=True, kw_only=True):
    """Where the files of projects are stored, and what seals and opens values of projects."""

    blobs: Callable[[str], BlobStore]
    sealer: SecretSealer


class ControlParts(Struct, frozen=True, kw_only=True):
    """What the control plane gives to the reconcilers of capabilities."""

    store: Store
    clock: ControlClock
    hint: Callable[[str], None]  # reconciles a key now
    hint_after: Callable[[str, timedelta], None]  # reconciles a key after a time
    jobs: JobService
    pool: ProviderPool
    agents: AgentSessions
    data: Transfers  # the buckets of projects
    budgets: BudgetKeeper
    checkpoints: Checkpoints
    # tells the servers that share the work that what a key names has changed
    announce: Callable[[str], None]
    owns_key: Callable[[str], bool]  # whether this server reconciles a key, and not another one
    # the services of a project; none while no capability runs services
    list_services: Callable[[str], Awaitable[Sequence[KnownService]]]
    open_secrets: OpenSecrets
    read_targets: ReadTargets
    open_sealed: OpenSealed | None  # None: this control plane opens no secrets, as in simulations
    keeper: FileKeeper | None  # None: this control plane keeps no files, as in simulations
    outside: Sequence[object]  # what the server has for capabilities
    trials: StartTrials | None = None  # whether jobs could start; None in some tests
    # the reconcilers of all capabilities, once they are made
    list_reconcilers: Callable[[], Sequence[object]] = tuple

    def find(self, kind: type[_T]) -> _T | None:
        """Return what the server has of this type, such as `server.parts.ServerParts`, or None, as
        in simulations."""
        return next((each for each in self.outside if isinstance(each, kind)), None)

    def list_own(self, kind: type[_T]) -> Sequence[_T]:
        """Return the reconcilers of this type, also those of other capabilities. There are none
        before all are made."""
        return [each for each in self.list_reconcilers() if isinstance(each, kind)]


class OwnReconciler(Protocol):
    """The reconciler of a capability. It observes the store, decides and acts, and never sleeps:
    each call returns after how long the key is looked at again, or None if only a hint does so.
    """

    # whether it waits for servers that users chose; then its work delays no other work
    waits_outside: bool

    def owns(self, key: str) -> bool:
        """Return whether this reconciler is for the key. Keys begin with the capability's name."""
        ...

    async def unfinished(self) -> Sequence[str]:
        """Return the keys to reconcile when the server starts."""
        ...

    async def reconcile(self, key: str) -> timedelta | None: ...


class StandingReconciler(OwnReconciler):
    """The base class of reconcilers that also work besides their keys. `unfinished` is asked from
    time to time as well, if servers share the work.
    """

    waits_outside = False

    def open(self, app_state: object) -> None:
        """Get what the routes of this server use (`api.app_state.AppState`), before they answer.
        Simulations have none."""

    async def run(self) -> None:
        """Work until this task is cancelled. After an error it is called again, with growing
        pauses: at its end it must leave nothing that keeps it from beginning anew.
        """

    def follows(self, key: str) -> bool:
        """Return whether each server looks at the key, also those that do not reconcile it."""
        return False

    async def follow(self, key: str) -> timedelta | None:
        """Look at a key that another server reconciles."""
        return None

    async def note_job(self, job_id: str) -> None:
        """Learn that a job was reconciled."""

    async def sweep(self) -> None:
        """Remove and settle what is left over. Called at every garbage collection."""

    async def is_needed(self) -> bool:
        """Return whether the server must not exit for want of work."""
        return False

    async def end_all(self, project: str | None) -> None:
        """End what runs in a project, or in all, since the project or all jobs are removed."""

    async def add_figures(self, figures: Figures, projects: ProjectFilter) -> None:
        """Add figures to those that the server exports, of these projects."""

    def find_problem(self) -> str:
        """Return what cannot be done now and why, for the server's status, or ""."""
        return ""


@runtime_checkable
class ServiceKeeper(Protocol):
    """A reconciler that knows services: what the core asks it, since names of jobs may be those of
    services, and devices send their requests to services.
    """

    async def list_known(self, project: str) -> list[KnownService]:
        """Return the services of a project."""
        ...


@runtime_checkable
class DeviceKeeper(Protocol):
    """A reconciler that knows the devices at the edge: what the core asks it, since task files name
    devices (`edge`, `service.edge`) and their models and samples may be bound to a place.
    """

    async def step(self, job: JobRecord, step: EdgeStep) -> timedelta:
        """Look at a job that is a step. Return the time until the next look. Raises
        StaleVersion."""
        ...

    async def find_bound(
        self, task: TaskSpec, blobs: BlobStore, snapshot: str, rerun_of: str | None
    ) -> tuple[str, str] | None:
        """Return what in a working folder must not leave a place, in which the task might not run,
        and the place. Raises NotManifest.
        """
        ...

    async def list_paths(self, service: KnownService) -> list[EdgePathView]:
        """Return the devices of each of a service's rules."""
        ...

    def secret_changed(self, project: str) -> None:
        """Let devices get another value of a secret, or none, at their next check-in."""
        ...
