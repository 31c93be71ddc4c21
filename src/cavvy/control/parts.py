"""What the control plane gives to the reconcilers of capabilities, and what they are."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Protocol

from cavvy.control.clock import ControlClock
from cavvy.control.job_service import JobService
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.values import Struct
from cavvy.store.sql import Store

# returns the private targets that users may name in URLs
ReadTargets = Callable[[], Awaitable[str]]
# decrypts a value: its project, the name that its encryption includes, and the encrypted value;
# raises KeyUnusable
OpenSealed = Callable[[str, str, bytes], Awaitable[str]]


class ControlParts(Struct, frozen=True, kw_only=True):
    """What the control plane gives to the reconcilers of capabilities."""

    store: Store
    clock: ControlClock
    hint: Callable[[str], None]  # reconciles a key now
    jobs: JobService
    pool: ProviderPool
    read_targets: ReadTargets
    open_sealed: OpenSealed | None  # None: this control plane opens no secrets, as in simulations


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
