"""One request and its response, from the client's connection to the replica's connection.

The sink receives the response, in parts or as one answer of the gateway. At any time, one owner
takes the next step of an exchange:

state    | shown by                | owner of the next step | the state ends
---------|-------------------------|------------------------|------------------------------------
reads    | not `admitted`          | client's connection    | with the part of the body on which
         |                         |                        | the batch or the replica depends
waits    | `timer`                 | queue                  | with a free slot, or after `wait_s`
connects | no `timer`, no `replica`| pool of the replica    | with a connection to the prepared
         |                         |                        | replica, or without one
joined   | `carrier`               | the carrier, which is  | with a part of the response, or
         |                         | an exchange, too       | when the batch is lost or spoiled
runs     | `replica`               | connection of the pool | with the response, or the connection

A pool reports each end of "connects" and "runs" once to the queue, with an `Outcome`; the queue
has the slot again, and decides whether the exchange has ended or waits again. If the client leaves,
`abort` tells the queue, which forgets the request or closes the connection to the replica.
"""

import re
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from cavvy.capabilities.serving.gateway.balancing import hash_key
from cavvy.capabilities.serving.gateway.batching import BatchPart
from cavvy.capabilities.serving.gateway.bodies import LAST_CHUNK, ChunkedBody, as_chunk
from cavvy.capabilities.serving.gateway.client_keys import KeyLimit
from cavvy.capabilities.serving.gateway.config import RoutingTerms, ServiceRoute
from cavvy.capabilities.serving.gateway.heads import NO_LENGTH, RequestHead
from cavvy.capabilities.serving.gateway.own_answers import OVERSIZED, OwnAnswer
from cavvy.capabilities.serving.gateway.seams import (
    OpenSpan,
    RequestAffinity,
    ResponseMeter,
    ResponseSink,
)
from cavvy.domain.values import Struct

_LENGTH = re.compile(rb"(?i)(\r\ncontent-length:[ \t]*)(\d+)")


class Outcome(Enum):
    """How an exchange with a replica has ended."""

    ANSWERED = auto()
    LOST = auto()  # the connection ended before the response was complete
    INVALID = auto()  # the response is not valid HTTP
    UNREACHABLE = auto()  # the replica accepts no connections
    ABORTED = auto()  # the client has disconnected
    UNSENT = auto()  # the client has disconnected before the replica got the request
    UNPREPARED = auto()  # the replica cannot be prepared for the request


class RepeatGuard(Protocol):
    """What can send a request elsewhere; see `fallbacks.py`."""

    def silence(self) -> bool:
        """Send the request elsewhere because no response begins; return False if this cannot be
        done now.
        """


class QueueEntry(Struct, frozen=True):
    """How exchanges enter the queue of a service and leave it."""

    route: ServiceRoute
    replay_bytes: int
    read_bytes: int  # the beginning of a body that is read before a replica is chosen
    enter: "Callable[[Exchange], None]"  # also called with each part of the body until it is queued
    leave: "Callable[[Exchange], None]"  # because the client has disconnected


class Exchange:
    """One exchange. Rarely changed values are class attributes until an object sets them."""

    started_at = 0.0
    held_bytes = 0
    attempts = 0
    tells = False  # whether the sink must be told when a replica takes the request
    avoid: object | None = None  # the pool of the replica that failed the request
    replica: Transport | None = None  # the connection to the replica that has the request
    responding = False
    failed = False  # the replica answers with a status of 500 or more
    gone = False  # the client has left
    timer: TimerHandle | None = None
    routing_key: int | None = None
    affinity: RequestAffinity | None = None  # what the service's scorer knows of the request
    model: str | None = None  # that the body names, as far as it was read
    fields = b""  # members of JSON that the replica gets at the beginning of the body
    unprepared = 0  # replicas that could not be prepared
    key_id = ""  # of the client's key
    places: frozenset[str] = frozenset()  # the replica must be in all of these places
    meter: ResponseMeter | None = None  # counts what the answer delivers
    guard: "RepeatGuard | None" = None  # sends the request elsewhere if the replica fails
    span: OpenSpan | None = None  # of a trace
    limit: KeyLimit | None = None  # of its key, if another service has the request
    fair_cost = 0.0  # what counts for its key until its tokens are known
    work_mark = 0.0  # when the replica got the request, in the replica's divided time
    admitted = False
    joins: bool | None = None  # whether it may be joined to a batch; None: not decided yet
    part: BatchPart | None = None  # the request's share of a batch, if it may be joined
    weight = 1  # when the replica's time is divided: the number of instances in `part`
    carrier: "Exchange | None" = None  # the batch in which the request was sent
    members: "Sequence[Exchange]" = ()  # if this request is a batch itself
    divides = False  # the response of the batch is complete, and its members get their parts
    spoiled = False  # the response of the batch could not be divided
    may_halve = False  # the replica refused the batch, perhaps because of one member
    _begun = False
    _forgot = False  # the held body was dropped
    size = 0  # bytes of the body that have arrived
    _read: "list[bytes] | None" = None  # the body, if the replica depends on it

    def __init__(
        self,
        sink: ResponseSink,
        entry: QueueEntry,
        head: RequestHead,
        out_head: bytes,
        arrived_at: float,
    ) -> None:
        self.sink = sink
        self.entry = entry
        self.head = head
        self.out_head = out_head
        self.arrived_at = arrived_at
        self.wait_s = entry.route.wait_s
        self.held: list[bytes] = []  # the body that a replica has yet to get, or may get again
        self.repeatable = head.idempotent
        self.keep_bytes = entry.replay_bytes if head.idempotent else 0
        self.body_done = head.length == 0
        if head.expect:
            self.tells = True
        if head.places:
            self.places = head.places

    def begin(self) -> None:
        self._begun = True
        self.entry.enter(self)

    def permit_repeat(self) -> None:
        """Let the request be repeated as if it were idempotent, because it has no effects."""
        self.repeatable, self.keep_bytes = True, self.entry.replay_bytes

    def feed(self, payload: bytes, done: bool) -> OwnAnswer | None:
        size = len(payload)
        self.size += size
        route = self.entry.route
        if self.size > route.body_max:
            return OVERSIZED
        self.body_done = done
        if self.entry.read_bytes and not self.admitted:
            if self._read is None:
                self._read = []
            self._read.append(payload)
        if self.head.length == NO_LENGTH:
            payload = as_chunk(payload) if payload else b""
            if done:
                payload += LAST_CHUNK
        replica = self.replica
        if replica is not None:
            replica.write(payload)
        if replica is None or self.keep_bytes:
            self.held.append(payload)
            self.held_bytes += len(payload)
            if replica is not None:
                self.forget_large_body()
        if self._begun and not self.admitted:
            self.entry.enter(self)
        return None

    def find_key(self, routing: RoutingTerms) -> None:
        """Find the key by which the replica is chosen."""
        key = self.head.get_header(routing.header.encode())
        if not key and routing.by == "session":
            key = self.key_id.encode()
        self.routing_key = hash_key(key) if key else None

    def read_beginning(self) -> bytes | None:
        """Return the beginning of the body, once, or None if a part of it has not arrived yet."""
        if not self.body_done and self.size < self.entry.read_bytes:
            self.sink.want_body()  # of a client that waits for "100 Continue"
            return None
        read, self._read = b"".join(self._read or ()), None
        return read

    def take_bytes(self) -> bytes:
        """Return the first bytes for a replica: the head and the body so far."""
        held = self.held
        if not held:
            return self.out_head
        out_head, pieces = self.add_fields(self.fields) if self.fields else (self.out_head, held)
        data = b"".join((out_head, *pieces))
        self.forget_large_body()
        return data

    def add_fields(self, fields: bytes) -> tuple[bytes, list[bytes]]:
        """Return the head and the body so far, with members at the beginning of the body's JSON
        object. Raises HeadError, ValueError."""
        body = self._join_held()
        at = body.index(b"{") + 1
        body = b"".join((body[:at], fields, body[at:]))
        if self.head.length == NO_LENGTH:
            return self.out_head, [as_chunk(body), LAST_CHUNK if self.body_done else b""]
        size = len(fields)
        out_head = _LENGTH.sub(lambda it: b"%b%d" % (it[1], int(it[2]) + size), self.out_head, 1)
        return out_head, [body]

    def forget_large_body(self) -> None:
        """Drop the held body if it is too large to keep, or if the request is not repeatable.
        Without its body, the request cannot be retried."""
        if self.held_bytes > self.keep_bytes:
            self.held.clear()
            self.keep_bytes = self.held_bytes = 0
            self._forgot = True

    @property
    def is_bound(self) -> bool:
        """Return whether the request is bound, which means that some replicas must not serve it.
        Later requests may start before a bound request.
        """
        bound = self.avoid is not None or bool(self.places)
        return bound or (self.affinity is not None and self.affinity.binds)

    @property
    def is_bare(self) -> bool:
        """Return whether the request holds nothing but a slot of its replica."""
        return not (self.members or self.affinity or self.limit)

    def read_body(self) -> bytes | None:
        """Return the body if it has arrived and is held as a whole. Raises HeadError."""
        if not self.body_done or (self.size and not self.held):
            return None
        return self._join_held()

    def replace_body(self, body: bytes) -> None:
        """Send another body in place of the whole body, which is held."""
        if self.head.length == NO_LENGTH:
            body = as_chunk(body) + LAST_CHUNK
        else:
            length = b"\\g<1>%d" % len(body)
            self.out_head = _LENGTH.sub(length, self.out_head, count=1)
        self.held, self.held_bytes = [body], len(body)

    def _join_held(self) -> bytes:
        """Raises HeadError."""
        body = b"".join(self.held)
        return ChunkedBody().feed(body) if self.head.length == NO_LENGTH else body

    def set_part(self, part: BatchPart | None) -> None:
        self.part = part
        self.weight = 1 if part is None else part.instances

    def is_taken(self) -> bool:
        """Return whether a replica is working on the request."""
        return (self.carrier or self).replica is not None

    def can_retry(self) -> bool:
        kept = not self._forgot and self.held_bytes <= self.keep_bytes
        return self.repeatable and self.attempts < 2 and kept

    def list_present(self) -> "list[Exchange]":
        """Return the members of the batch whose clients still wait."""
        return [each for each in self.members if not each.gone]

    def abort(self) -> None:
        """Release the place in the queue or the replica's slot, because the client has
        disconnected.
        """
        if self.span is not None:
            self.span.end("aborted")
        self.gone = True
        if self.timer is not None:
            self.timer.cancel()
        self.entry.leave(self)
