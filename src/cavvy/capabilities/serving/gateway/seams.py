"""What the steps of the gateway hand to each other: the request, and some interfaces.

`inbound` parses the head of a request, `door` and `admission` turn it into an open request, which
collects the body, and the receiver of the response goes with the request from step to step.
"""

from collections.abc import Collection
from typing import Any, Protocol

from cavvy.capabilities.serving.gateway.client_keys import KeyLimit
from cavvy.capabilities.serving.gateway.config import ReplicaAddress
from cavvy.capabilities.serving.gateway.heads import RequestHead, ResponseHead
from cavvy.capabilities.serving.gateway.own_answers import Answer, OwnAnswer
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.domain.ledger import TokenUse


class ResponseSink(Protocol):
    """The receiver of a response."""

    @property
    def passes_chunks(self) -> bool:
        """Return whether `pass_chunk` may be called."""

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        """Receive the head of the response and the first bytes of its body. `more` are further
        fields of the head.
        """

    def send(self, payload: bytes, done: bool) -> None:
        """Receive more bytes of the body."""

    def pass_chunk(self, data: bytes) -> None:
        """Receive a whole chunk of the body in the format that `as_chunk` writes."""

    def send_interim(self, head: ResponseHead) -> None:
        """Receive a response with a status below 200, except 101."""

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        """Switch the protocol: from now on, bytes are passed on unchanged."""

    def answer(self, answer: OwnAnswer) -> None:
        """Receive a response that the gateway sends in place of a replica."""

    def cut(self) -> None:
        """Handle a response that was interrupted after its head."""

    def end(self) -> None:
        """Handle the end of the exchange, after which its replica is free again."""

    def want_body(self) -> None:
        """Continue to read the request's body after a replica has taken the request."""

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...


class PassingSink:
    """Passes what it does not handle itself on to the receiver `_sink`."""

    _sink: ResponseSink

    def pass_chunk(self, data: bytes) -> None:
        self._sink.pass_chunk(data)

    def send_interim(self, head: ResponseHead) -> None:
        self._sink.send_interim(head)

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        self._sink.switch(head, payload)

    def want_body(self) -> None:
        self._sink.want_body()

    def pause_body(self) -> None:
        self._sink.pause_body()

    def resume_body(self) -> None:
        self._sink.resume_body()


class ResponseMeter(Protocol):
    """Counts what a response delivers. It stands between the replica and the receiver."""

    def is_read(self) -> bool:
        """Return whether the queue may take the request, or False if more of the body must arrive
        first.
        """

    @property
    def asked(self) -> TokenUse:
        """The tokens that the request may need, by estimate."""

    @property
    def used(self) -> TokenUse:
        """The tokens that were counted."""

    def limit_by(self, limit: KeyLimit) -> None:
        """Correct what was counted in the limit for this request when its response ends."""

    def begin(self, work: ReplicaWork) -> None:
        """Prepare for the response of a replica, which is about to get the request."""

    def move(self, meters: Any, model: str = "") -> None:
        """Count the answer of another service or API from now on, by its meters
        (`extensions.ServiceMeters`). `model` is the one that it is asked for, if this is not the
        client's.
        """

    def withdraw(self) -> None:
        """Restore the request as the client sent it, because the replica has refused it."""

    def close(self) -> None:
        """Count what was delivered of a response that ended early."""


class ScoredReplica(Protocol):
    """What a scorer (`extensions.ServiceScorer`) knows of one replica."""

    @property
    def loaded(self) -> Collection[str]:
        """The names of what the replica has loaded for requests."""

    @property
    def loads(self) -> int:
        """How often it has loaded something."""

    def doubt(self) -> None:
        """The replica has closed a connection, and may have started again."""

    def forget(self) -> None:
        """The replica has lost what it had loaded."""


class BoundReplica(Protocol):
    """A replica to which requests may be bound."""

    address: ReplicaAddress
    draining: bool
    state: ScoredReplica | None


class UnpreparedError(Exception):
    """Raised if a replica cannot be prepared for a request. The text says why."""


class RequestAffinity(Protocol):
    """What binds a request to replicas, as a scorer has found out."""

    misses: bool  # the replica has answered that it lacks what the request needs

    @property
    def binds(self) -> bool:
        """Whether some replicas must not serve the request."""

    def permits(self, replica: BoundReplica) -> bool:
        """Return whether the replica may serve the request."""

    def make_way(self, replica: BoundReplica) -> None:
        """Let a replica with room prepare for the request, which no replica may serve now."""

    def is_ready(self, replica: BoundReplica) -> bool:
        """Return whether the request may be sent without `prepare`."""

    async def prepare(self, replica: BoundReplica) -> None:
        """Prepare the replica. Raises UnpreparedError, or OSError or TimeoutError if the replica
        accepts no connections.
        """

    def answer(self, now: float) -> None:
        """The body of the response has begun; may be called again."""

    def end(self, replica: BoundReplica) -> None:
        """The exchange with the replica has ended."""

    def release(self) -> None:
        """Something that is no replica of a service gets the request."""


class OpenSpan(Protocol):
    """The span of a request in a trace."""

    def end(self, problem: str = "") -> None:
        """End the span; only the first call counts."""


class OpenRequest(Protocol):
    """A request that reads its body, and that ends with a response to its sink."""

    held_bytes: int

    def begin(self) -> None:
        """Begin the request after its head has arrived, even if parts of the body are missing."""

    def feed(self, payload: bytes, done: bool) -> "OpenRequest | Answer | None":
        """Add decoded bytes of the body. Return None to go on, the answer that refuses the request,
        or the request that takes the place of this one and has not begun yet.
        """

    def abort(self) -> None:
        """Abort the request, because the client has disconnected."""


class ClientRequest:
    """A request whose head has been read. Each step adds what it finds out. Rarely changed values
    are class attributes until they are set.
    """

    id = b""
    key_id = ""  # of the client's key
    model = ""  # that the body names, if it has selected the service
    shares = False  # pages of other origins may read the response

    def __init__(
        self, sink: ResponseSink, head: RequestHead, arrived_at: float, client: bytes
    ) -> None:
        self.sink = sink
        self.head = head
        self.arrived_at = arrived_at
        self.client = client  # its address
        # what the replica receives, and the part of the path after the prefix of the service
        self.target = self.below = head.target
