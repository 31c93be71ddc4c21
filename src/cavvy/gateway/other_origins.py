"""Permits pages of other origins to call services with keys (CORS, the Fetch Standard, 3.3).

Before a browser sends a key, it asks for permission with a request that has no key, called a
preflight. The gateway gives this permission itself: no request without a key reaches a replica. The
permission holds for each origin, because a page that can call the service has a key of the service.
A browser sends no cookies with such calls. Services without keys answer preflights themselves,
because a page of any origin could call services to which only the user's machine can connect.
"""

import re

from cavvy.gateway.heads import RequestHead

_ASKED_METHOD, _ASKED_FIELDS = b"access-control-request-method", b"access-control-request-headers"
_TOKENS = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z, ]+")
_MAX_AGE_S = 600
_PERMISSION = b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n"
_OWN = re.compile(rb"(?i)\r\naccess-control-allow-origin:")


def is_preflight(head: RequestHead) -> bool:
    asked = head.method == b"OPTIONS" and head.origin
    return bool(asked and head.get_header(_ASKED_METHOD))


def write_permission(head: RequestHead) -> bytes:
    """Return the status line and the fields of the response to a preflight."""
    fields = b"HTTP/1.1 204 No Content\r\n" + _PERMISSION
    for permitted, asked in ((b"Methods", _ASKED_METHOD), (b"Headers", _ASKED_FIELDS)):
        value = head.get_header(asked)
        if _TOKENS.fullmatch(value):
            fields += b"Access-Control-Allow-%b: %b\r\n" % (permitted, value)
    return fields + b"Access-Control-Max-Age: %d\r\n" % _MAX_AGE_S


def share(response: bytes) -> bytes:
    """Return a response that pages of other origins may read. `response` begins with its head. A
    program's own permission stays as it is.
    """
    head, end, body = response.partition(b"\r\n\r\n")
    if _OWN.search(head):
        return response
    start, _, fields = head.partition(b"\r\n")
    return b"%b\r\n%b%b%b%b" % (start, _PERMISSION, fields, end, body)
