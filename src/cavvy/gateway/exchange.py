"""One request and its response, from the client's connection to the replica's connection.

The client's connection supplies the body, and the replica's connection writes the response to the
sink. The service's queue assigns the replica to the request.
"""

from asyncio import TimerHandle
from typing import TYPE_CHECKING, Protocol

from cavvy.gateway.balancing import hash_key
from cavvy.gateway.bodies import LAST_CHUNK, as_chunk
from cavvy.gateway.config import Affinity
from cavvy.gateway.heads import NO_LENGTH, RequestHead, ResponseHead
from cavvy.gateway.own_answers import AnswerCode

if TYPE_CHECKING:
    from cavvy.gateway.batches import BatchPart, JoinedBatch
    from cavvy.gateway.service_queue import ServiceQueue
    from cavvy.gateway.upstream import ReplicaPool, UpstreamConnection


class ResponseSink(Protocol):
    """The receiver of an exchange's response."""

    @property
    def passes_chunks(self) -> bool:
        """Return whether `pass_chunk` may be called."""

    def respond(self, head: ResponseHead, payload: bytes, done: bool) -> None:
        """Receive the head of the response and the first bytes of its body."""

    def send(self, payload: bytes, done: bool) -> None:
        """Receive more bytes of the body."""

    def pass_chunk(self, data: bytes) -> None:
        """Receive a whole chunk of the body in the format that `as_chunk` writes."""

    def send_interim(self, head: ResponseHead) -> None:
        """Receive a response with a status below 200, except 101."""

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        """Switch the protocol: from now on, bytes are passed on unchanged."""

    def answer(self, status: int, code: AnswerCode, message: str, retry_s: int | None) -> None:
        """Receive a response that the gateway sends in place of a replica."""

    def cut(self) -> None:
        """Handle a response that was interrupted after its head."""

    def end(self) -> None:
        """Handle the end of the exchange, after which its replica is free again."""

    def want_body(self) -> None:
        """Continue to read the request's body after a replica has taken the request."""

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...


class Exchange:
    """One exchange. Rarely changed values are class attributes until an object sets them."""

    started_at = 0.0
    held_bytes = 0
    attempts = 0
    tells = False  # whether the sink must be told when a replica takes the request
    avoid: "ReplicaPool | None" = None  # this replica failed the request
    upstream: "UpstreamConnection | None" = None
    responding = False
    failed = False  # the replica answers with a status of 500 or more
    gone = False  # the client has left
    timer: TimerHandle | None = None
    affinity_key: int | None = None
    key_id = ""  # of the client's key
    places: frozenset[str] = frozenset()  # the replica must be in all of these places
    work_mark = 0.0  # when the replica got the request, in the replica's divided time
    price = b""  # a field of the response, if the service shows prices
    part: "BatchPart | None" = None  # the request's share of a batch, if it may be joined
    carrier: "Exchange | None" = None  # the batch in which the request was sent
    batch: "JoinedBatch | None" = None  # the members, if this request is a batch itself
    _begun = _admitted = False
    _joins = False
    _prefix = b""
    _size = 0

    def __init__(
        self,
        sink: ResponseSink,
        service: "ServiceQueue",
        head: RequestHead,
        out_head: bytes,
        arrived_at: float,
        keep_bytes: int,
    ) -> None:
        self.sink = sink
        self.service = service
        self.head = head
        self.out_head = out_head
        self.arrived_at = arrived_at
        self.wait_s = service.route.wait_s
        self.held: list[bytes] = []  # the body that a replica has yet to get, or may get again
        self.keep_bytes = keep_bytes if head.idempotent else 0
        self.body_done = head.length == 0
        self._framed = head.length == NO_LENGTH
        if head.places:
            self.places = head.places

    def begin(self) -> None:
        """Begin the exchange after the head has arrived, even if parts of the body are missing."""
        self.service = self.service.current
        if not self._begun:
            self._begun = True
            batches = self.service.batches
            self._joins = batches is not None and batches.may_join(self.head)
            if self._joins and not self.body_done:
                self.sink.want_body()  # of a client that waits for "100 Continue"
        if self._joins and not self._has_joinable_body():
            return
        affinity = self.service.route.affinity
        if affinity is None or self._find_key(affinity):
            self._admitted = True
            self.service.admit(self)

    def feed(self, payload: bytes, done: bool) -> bool:
        """Add bytes of the request's body; return False if the body is larger than permitted."""
        size = len(payload)
        self._size += size
        if self._size > self.service.route.body_max:
            return False
        self.body_done = done
        affinity = self.service.route.affinity
        if affinity is not None and len(self._prefix) < affinity.prefix_bytes:
            self._prefix = (self._prefix + payload)[: affinity.prefix_bytes]
        if self._framed:
            payload = as_chunk(payload) if payload else b""
            if done:
                payload += LAST_CHUNK
        upstream = self.upstream
        if upstream is not None:
            upstream.transport.write(payload)
        if upstream is None or self.keep_bytes:
            self.held.append(payload)
            self.held_bytes += len(payload)
            if upstream is not None:
                self.forget_large_body()
        if self._begun and not self._admitted:
            self.begin()
        return True

    def _find_key(self, affinity: Affinity) -> bool:
        """Set the affinity key. Return False if the key depends on a part of the body that has not
        arrived yet.
        """
        if affinity.by == "header":
            key = self.head.get_header(affinity.header.encode())
        elif self.body_done or len(self._prefix) >= affinity.prefix_bytes:
            key = self._prefix or self.head.target
        else:
            return False
        self.affinity_key = hash_key(key) if key else None
        return True

    def _has_joinable_body(self) -> bool:
        """If the body is complete, check whether it may be joined; return False if more of the body
        must arrive. A body that is too large for the gateway to hold is never joined into a batch.
        """
        if not self.body_done:
            return self.held_bytes > self.service.memo.limits.hold_bytes
        batches = self.service.batches
        if batches is not None:
            self.part = batches.read_part(self, self.arrived_at)
        return True

    def take_bytes(self) -> bytes:
        """Return the first bytes for a replica: the head and the body so far."""
        held = self.held
        if not held:
            return self.out_head
        data = b"".join((self.out_head, *held))
        self.forget_large_body()
        return data

    def forget_large_body(self) -> None:
        """Drop the held body if it is too large to keep, or if the request is not idempotent.
        Without its body, the request cannot be retried."""
        if self.held_bytes > self.keep_bytes:
            self.held.clear()
            self.keep_bytes = self.held_bytes = 0

    @property
    def is_bound(self) -> bool:
        """Return whether the request is bound, which means that some replicas must not serve it.
        Later requests may start before a bound request.
        """
        return self.avoid is not None or bool(self.places)

    @property
    def weight(self) -> int:
        """The weight of this exchange when the replica's time is divided: its number of instances
        in a batch, otherwise 1.
        """
        return 1 if self.part is None else self.part.instances

    def is_taken(self) -> bool:
        """Return whether a replica is working on the request."""
        return (self.carrier or self).upstream is not None

    def can_retry(self) -> bool:
        return self.head.idempotent and self.attempts < 2 and self.held_bytes <= self.keep_bytes

    def abort(self) -> None:
        """Release the place in the queue or the replica's slot, because the client has
        disconnected.
        """
        self.gone = True
        if self.timer is not None:
            self.timer.cancel()
        self.service.current.abort(self)
