"""What other modules give to the service for agents."""

from collections.abc import Awaitable, Callable
from datetime import date, timedelta

from cavvy.agent.documents import CheckpointConfig
from cavvy.control.agents.work import OpenSecrets
from cavvy.control.sweep_keeper import SweepKeeper
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.units import Money
from cavvy.domain.values import Struct
from cavvy.planner.risk import CheckpointInterval

# reads a manifest by project and hash; raises RowNotFound
ReadBlob = Callable[[str, str], Awaitable[bytes]]


async def no_save_interval(job: JobRecord, attempt: Attempt) -> CheckpointInterval | None:
    """Return None: Cavvy does not choose a checkpoint interval for the job."""
    return None


async def no_losses(attempt: Attempt) -> None:
    """Return None, the default for `losses`, which means that the loss rate is not known."""


async def no_egress(url: str | None, offer: Offer) -> tuple[None, None]:
    """The default for `egress`: return None for the price and for its date, which are unknown."""
    return None, None


class AgentDependencies(Struct, frozen=True, kw_only=True):
    """Services of other modules that are needed to build work documents and to judge reports."""

    open_secrets: OpenSecrets
    checkpoint: Callable[
        [JobRecord, Attempt], Awaitable[CheckpointConfig | None]
    ]  # returns None if the task saves no checkpoints
    accelerators: Callable[[JobRecord, Attempt], int]  # per node
    save_interval: Callable[[JobRecord, Attempt], Awaitable[CheckpointInterval | None]] = (
        no_save_interval  # None if Cavvy does not choose the interval
    )
    losses: Callable[[Attempt], Awaitable[float | None]] = (
        no_losses  # expected losses of nodes per hour, for the whole gang
    )
    # seconds for which an agent waits for the server before it stores results in a bucket; 0: never
    deposit_after_s: Callable[[JobRecord], float] = lambda job: 0
    # The price of a GB that a node of the offer sends to the URL, or to the server if this is None,
    # and the date of the price; None if it is unknown.
    egress: Callable[[str | None, Offer], Awaitable[tuple[Money | None, date | None]]] = no_egress
    notice: Callable[[Attempt], timedelta | None] = lambda attempt: (
        None
    )  # the provider's notice before it reclaims a node
    read_blob: ReadBlob | None = None  # None if this server has no frozen folders
    # what chooses values and judges reports of sweeps; None if no capability does
    sweeps: Callable[[], SweepKeeper | None] = lambda: None
    # whether the attempt's provider can replace single nodes of its gang
    replaces: Callable[[Attempt], bool] = lambda attempt: False
    traced: bool = False  # whether the server sends traces, so that work learns its span
