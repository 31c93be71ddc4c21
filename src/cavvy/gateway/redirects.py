"""Redirects, cookies and pages of services below a path prefix. The replica does not know the
prefix: a `Location` such as `/login` would lead out of the service, and a cookie for `/` would be
sent to all services.
"""

import re

from cavvy.gateway.config import ServiceRoute
from cavvy.gateway.heads import RequestHead, ResponseHead

WITH_LOCATION = frozenset({201, 301, 302, 303, 307, 308})  # statuses
_LOCATION = re.compile(rb"\r\n(?i:location):[\t ]*((?i:https?)://([^/?#\r]*))?(/[^\r]*)")
_COOKIE = re.compile(rb"\r\n(?i:set-cookie):[^\r]*")
_COOKIE_PATH = re.compile(rb"(?i:;[\t ]*path[\t ]*=[\t ]*)(/[^;\r]*)")
_WHOLE_HOST = re.compile(rb"\r\n[^:]*:[\t ]*(?i:__host-)")  # such cookies must have the path `/`


def misses_slash(head: RequestHead, route: ServiceRoute) -> bool:
    """Return whether a browser requests the page of a service at the URL of the service without its
    last slash. At this URL, relative links of the page would lead out of the service.
    """
    rest = head.target[len(route.removed_prefix) :]
    return (
        not rest.startswith(b"/")
        and head.method in (b"GET", b"HEAD")
        and not head.upgrade
        and b"text/html" in head.get_header(b"accept").lower()
    )


def write_redirect(head: RequestHead, route: ServiceRoute) -> bytes:
    """Return the status line and the fields of the response that adds the slash. The `Location` is
    relative, because a proxy in front of the gateway may also remove a part of the path.
    """
    prefix = route.removed_prefix.encode()
    last = prefix.rpartition(b"/")[2]
    return (
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: %b/%b\r\nVary: Accept\r\n"
        b"Content-Length: 0\r\n"
    ) % (last, head.target[len(prefix) :])


def keep_below(head: ResponseHead, route: ServiceRoute, host: bytes) -> ResponseHead:
    """Return the head of a response so that its `Location` and its cookies are correct for the
    client. If the gateway removed a prefix from the path of the request, it adds this prefix to
    their paths. A `Location` that is on another host is not changed, nor is a path that already has
    the prefix. `host` is the request's Host.
    """
    prefix = route.removed_prefix.encode()
    if not prefix:
        return head
    fields = head.fields
    if head.status in WITH_LOCATION:
        fields = _move_location(fields, prefix, host)
    if head.cookies:
        fields = _COOKIE.sub(lambda found: _move_cookie(found[0], prefix), fields)
    if fields == head.fields:
        return head
    kept = ResponseHead(head.status, head.close)
    kept.fields = fields
    kept.length, kept.upgrade = head.length, head.upgrade
    return kept


def _move_location(fields: bytes, prefix: bytes, host: bytes) -> bytes:
    found = _LOCATION.search(fields)
    if found is None:
        return fields
    authority, path = found[2], found[3]
    elsewhere = path.startswith(b"//") if authority is None else authority.lower() != host.lower()
    if elsewhere or _has_prefix(path, prefix):
        return fields
    at = found.start(3)
    return fields[:at] + prefix + fields[at:]


def _move_cookie(line: bytes, prefix: bytes) -> bytes:
    """Add the prefix to the path of a cookie. Without a path, browsers use the path of the request,
    which has the prefix.
    """
    if _WHOLE_HOST.match(line):
        return line

    def move(found: re.Match[bytes]) -> bytes:
        path = found[1].rstrip(b"\t ")
        moved = path if _has_prefix(path, prefix) else prefix + (b"" if path == b"/" else path)
        return found[0][: found.start(1) - found.start()] + moved

    return _COOKIE_PATH.sub(move, line)


def _has_prefix(path: bytes, prefix: bytes) -> bool:
    after = path[len(prefix) : len(prefix) + 1]
    return path.startswith(prefix) and after in (b"", b"/", b"?", b"#")
