"""Redirects of services below a path prefix. The replica does not know the prefix, so a `Location`
such as `/login` would lead out of the service.
"""

import re

from cavvy.gateway.config import ServiceRoute
from cavvy.gateway.heads import ResponseHead

WITH_LOCATION = frozenset({201, 301, 302, 303, 307, 308})  # statuses
_LOCATION = re.compile(rb"\r\n(?i:location):[\t ]*((?i:https?)://([^/?#\r]*))?(/[^\r]*)")


def keep_below(head: ResponseHead, route: ServiceRoute, host: bytes) -> ResponseHead:
    """Return the head of a response so that its `Location` is correct for the client. If the
    gateway removed a prefix from the path of the request, it adds this prefix to the path of the
    `Location`. A `Location` that is on another host or already has the prefix is not changed.
    `host` is the request's Host.
    """
    prefix = route.removed_prefix.encode()
    found = _LOCATION.search(head.fields) if prefix else None
    if found is None:
        return head
    authority, path = found[2], found[3]
    elsewhere = path.startswith(b"//") if authority is None else authority.lower() != host.lower()
    if elsewhere or re.match(re.escape(prefix) + rb"(?:[/?#]|$)", path):
        return head
    kept = ResponseHead(head.status, head.close)
    at = found.start(3)
    kept.fields = head.fields[:at] + prefix + head.fields[at:]
    kept.length, kept.upgrade = head.length, head.upgrade
    return kept
