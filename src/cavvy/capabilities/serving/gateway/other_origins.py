"""Decides which pages may call a service, and permits this to pages of other origins (CORS, the
Fetch Standard, 3.3).

A page of any site can send requests from the browser of a user to services that only this user's
machine can reach. Therefore a service without keys gets only requests of its own pages, of pages
whose origins it names in `origins`, and requests that no page has sent. A service with keys gets
requests of all pages unless it names origins, because a page that can call it has a key.

Before a browser sends a key, it asks for permission with a request that has no key, called a
preflight. The gateway gives this permission itself: no request without a key reaches a replica. It
also does so for services that name origins. A browser sends no cookies with such calls.
"""

import re

from cavvy.capabilities.serving.gateway.config import ServiceRoute
from cavvy.capabilities.serving.gateway.heads import RequestHead
from cavvy.capabilities.serving.gateway.own_answers import WrittenAnswer
from cavvy.domain.targets import host_name

_ASKED_METHOD, _ASKED_FIELDS = b"access-control-request-method", b"access-control-request-headers"
_TOKENS = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z, ]+")
_MAX_AGE_S = 600
_PERMISSION = b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n"
_ORIGIN = re.compile(rb"(https?)://([^/?#@,\s]+)")
_USUAL_PORTS = {b"http": b":80", b"https": b":443"}
_OWN_SITES = frozenset({b"", b"none", b"same-origin"})  # values of Sec-Fetch-Site
_OWN = re.compile(rb"(?i)\r\naccess-control-allow-origin:")


def may_call(head: RequestHead, route: ServiceRoute, keyed: bool, names: tuple[str, ...]) -> bool:
    """Return whether the page that sent the request may call the service. Without `Origin` and
    `Sec-Fetch-Site`, no page of a browser has sent the request. `names` are the public host names
    of the gateway: a proxy in front of it may have replaced the Host.
    """
    is_foreign = head.fetch_site.lower() not in _OWN_SITES
    if route.origins:
        page = head.origin.lower()
        if (
            not page
            and is_foreign
            and (found := _ORIGIN.match(head.get_header(b"referer").lower()))
        ):
            page = found[0]
        if "*" in route.origins or page.decode("latin-1") in route.origins:
            return True
    elif keyed:
        return True
    if head.origin and not _is_own(head, names):
        return False
    return not is_foreign or _is_link(head)


def _is_own(head: RequestHead, names: tuple[str, ...]) -> bool:
    """Return whether the origin of a request is the one to which the request is sent."""
    found = _ORIGIN.fullmatch(head.origin.lower())
    if found is None:  # such as `null`
        return False
    usual = _USUAL_PORTS[found[1]]
    place = found[2].removesuffix(usual)
    if place == head.host.lower().removesuffix(usual):
        return True
    is_replaced = host_name(head.host.decode("latin-1")) not in names
    return is_replaced and place.decode("latin-1") in names


def _is_link(head: RequestHead) -> bool:
    """Return whether a user opens a page of the service by a link on another page."""
    if head.method not in (b"GET", b"HEAD") or head.origin or head.upgrade:
        return False
    if head.get_header(b"sec-purpose"):  # the browser loads it in advance, and no user opens it
        return False
    asked = (head.get_header(b"sec-fetch-mode"), head.get_header(b"sec-fetch-dest"))
    return asked == (b"navigate", b"document")


def is_preflight(head: RequestHead) -> bool:
    asked = head.method == b"OPTIONS" and head.origin
    return bool(asked and head.get_header(_ASKED_METHOD))


def write_permission(head: RequestHead) -> WrittenAnswer:
    """Return the response to a preflight, which lets pages of other origins send the request."""
    fields = b"HTTP/1.1 204 No Content\r\n" + _PERMISSION
    for permitted, asked in ((b"Methods", _ASKED_METHOD), (b"Headers", _ASKED_FIELDS)):
        value = head.get_header(asked)
        if _TOKENS.fullmatch(value):
            fields += b"Access-Control-Allow-%b: %b\r\n" % (permitted, value)
    return WrittenAnswer(fields + b"Access-Control-Max-Age: %d\r\n" % _MAX_AGE_S)


def share(response: bytes) -> bytes:
    """Return a response that pages of other origins may read. `response` begins with its head. A
    program's own permission stays as it is.
    """
    head, end, body = response.partition(b"\r\n\r\n")
    if _OWN.search(head):
        return response
    start, _, fields = head.partition(b"\r\n")
    return b"%b\r\n%b%b%b%b" % (start, _PERMISSION, fields, end, body)
