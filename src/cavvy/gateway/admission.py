"""Decides whether a request may enter a service's queue. The decision to admit a request depends on
the request's key, the rate of requests, and the places in which the request must stay."""

import time
from typing import TYPE_CHECKING

from cavvy.gateway.config import RateLimit
from cavvy.gateway.heads import RequestHead
from cavvy.gateway.other_origins import is_preflight
from cavvy.gateway.own_answers import AnswerCode

if TYPE_CHECKING:
    from cavvy.gateway.inbound import InboundConnection
    from cavvy.gateway.service_queue import ServiceQueue


def admit_client(
    connection: "InboundConnection",
    service: "ServiceQueue",
    head: RequestHead,
    target: bytes,
    now: float,
) -> str | None:
    """Return the ID of the request's key, "" if the service needs no key, or None if the request
    was refused. `target` is the request target as the replica receives it.
    """
    key_id = ""
    if service.keys:
        key = service.keys.find(head, time.time())
        if key is None and is_preflight(head):
            connection.permit(head)
            return None
        if key is None:
            service.refuse()
            connection.refuse(401, AnswerCode.NO_KEY, "the service needs one of its keys", head)
            return None
        key_id = key.id
        if wait_s := service.keys.wait_s(key, now):
            message = f"the key {key.id} may make {key.per_s:g} requests a second"
            _refuse_rate(connection, service, head, message, wait_s)
            return None
    if service.rates and (full := service.rates.take(head, target, key_id, connection.peer, now)):
        limit, wait_s = full
        _refuse_rate(connection, service, head, _describe_limit(limit), wait_s)
        return None
    return key_id


def refuse_residency(
    connection: "InboundConnection",
    service: "ServiceQueue",
    head: RequestHead,
    places: frozenset[str],
) -> None:
    """Refuse a request because the service's replicas cannot run in all places in which the request
    must stay.
    """
    service.refuse()
    never = " and ".join(sorted(places.difference(service.route.places or ())))
    message = f"the service has no replicas in {never}, and the request must stay there"
    connection.refuse(403, AnswerCode.RESIDENCY, message, head)


def refuse_page(
    connection: "InboundConnection", service: "ServiceQueue", head: RequestHead
) -> None:
    """Refuse a request of a page whose origin may not call the service."""
    service.refuse()
    origin = head.origin.decode("latin-1") or "another site"
    message = (
        f"a page of {origin} may not call this service; to permit it, add its origin to "
        "`origins` in the service's file"
    )
    connection.refuse(403, AnswerCode.OTHER_ORIGIN, message, head)


def refuse_closed(
    connection: "InboundConnection", service: "ServiceQueue", head: RequestHead
) -> None:
    """Refuse a request because the service is closed."""
    service.refuse()
    connection.refuse(402, AnswerCode.BUDGET, service.route.closed, head)


def refuse_size(
    connection: "InboundConnection", service: "ServiceQueue", head: RequestHead
) -> None:
    """Refuse a request because its body is too large."""
    service.refuse()
    message = f"the request's body is too large; the limit is {service.route.body_max} bytes"
    connection.refuse(413, AnswerCode.TOO_LARGE, message, head)


def _refuse_rate(
    connection: "InboundConnection",
    service: "ServiceQueue",
    head: RequestHead,
    message: str,
    wait_s: int,
) -> None:
    service.refuse()
    connection.refuse(429, AnswerCode.TOO_MANY, message, head, wait_s)


def _describe_limit(limit: RateLimit) -> str:
    whose = {
        "client": "each client may make",
        "address": "each address may make",
        "header": f"requests with the same {limit.header} may be",
        "service": "the service takes",
    }[limit.each]
    below = f" for paths below {limit.prefix}" if limit.prefix else ""
    return f"{whose} {limit.per_s:g} requests a second{below}"
