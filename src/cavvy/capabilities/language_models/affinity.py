"""What a request to a language model needs of a replica: the response that it continues, its
adapter, and its prompt in the replica's cache.
"""

from time import monotonic
from typing import Protocol, cast

from cavvy.capabilities.language_models.adapters import AdapterError, ReplicaAdapters
from cavvy.capabilities.language_models.cache_routing import Visit
from cavvy.capabilities.language_models.prompts import Prompt
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.seams import BoundReplica, UnpreparedError


class ModelAffinity:
    """`serving.gateway.seams.RequestAffinity`. Values that rarely change are class attributes until
    an object sets them.
    """

    prompt: Prompt | None = None  # by which the replica is chosen
    visit: Visit | None = None  # of the prompt, at the replica that has it
    is_cut = False  # only the beginning of the body was read
    response_id = ""  # of a response that a replica has made, which the request continues or reads
    seeks: bool | None = None  # whether replicas are asked for this response; None: not yet
    holder: BoundReplica | None = None  # that holds this response
    adapter = ""  # the adapter among the service's models, if the replica must have loaded it
    misses = False  # the replica has answered that it does not have the adapter
    blames = False  # such an answer has another reason, because the engine lists the adapter
    passed = 0  # requests behind it that started before it, because their adapters were loaded

    @property
    def binds(self) -> bool:
        return self.holder is not None or bool(self.adapter)

    def permits(self, replica: BoundReplica) -> bool:
        """Return whether the replica has a slot for the adapter. Until the replica ends that holds
        the response, no other may serve the request.
        """
        holder = self.holder
        if holder is not None and holder is not replica and not holder.draining:
            return False
        adapters = get_adapters(replica) if self.adapter else None
        return adapters is None or adapters.takes(self.adapter)

    def make_way(self, replica: BoundReplica) -> None:
        """Let the replica free a slot for the adapter, because the request waits."""
        if self.holder is not None and not self.holder.draining:
            replica = self.holder
        if self.adapter and (adapters := get_adapters(replica)) is not None:
            adapters.make_way()

    def is_ready(self, replica: BoundReplica) -> bool:
        adapters = get_adapters(replica) if self.adapter else None
        return adapters is None or adapters.is_ready(self.adapter)

    async def prepare(self, replica: BoundReplica) -> None:
        """Load the adapter."""
        adapters = get_adapters(replica)
        assert adapters is not None
        try:
            self.blames = not await adapters.load(self.adapter)
        except AdapterError as error:
            text = f"the adapter {self.adapter!r} could not be loaded: {error}"
            raise UnpreparedError(text) from error
        if self.visit is not None:
            self.visit.restart(monotonic())

    def answer(self, now: float) -> None:
        if self.visit is not None:
            self.visit.answer(now)

    def end(self, replica: BoundReplica) -> None:
        if self.visit is not None:
            self.visit.end()
            self.visit = None
        if self.adapter and (adapters := get_adapters(replica)) is not None:
            adapters.end(self.adapter)

    def release(self) -> None:
        self.adapter = ""


class _WithAdapters(Protocol):
    adapters: ReplicaAdapters | None


def get_adapters(replica: BoundReplica) -> ReplicaAdapters | None:
    """Return the adapters of a replica, if it loads them on demand."""
    return None if replica.state is None else cast(_WithAdapters, replica.state).adapters


def find_affinity(exchange: Exchange) -> ModelAffinity | None:
    """Return what is known of a request, or None if it is none to a language model."""
    return cast(ModelAffinity | None, exchange.affinity)


def make_affinity(exchange: Exchange) -> ModelAffinity:
    """Return what is known of a request to a language model, at first nothing."""
    if exchange.affinity is None:
        exchange.affinity = ModelAffinity()
    return cast(ModelAffinity, exchange.affinity)
