"""Keeps the redirects, cookies and other fields of a response within their service. The replica of
a service below a path prefix does not know the prefix: a `Location` such as `/login` would lead out
of the service, and a cookie for `/` would be sent to all services.
"""

import re

from cavvy.capabilities.serving.gateway.config import ServiceRoute
from cavvy.capabilities.serving.gateway.heads import WHOLE_ORIGIN, RequestHead, ResponseHead
from cavvy.capabilities.serving.gateway.own_answers import WrittenAnswer
from cavvy.capabilities.serving.gateway.own_values import OWN_COOKIE

WITH_LOCATION = frozenset({201, 301, 302, 303, 307, 308})  # statuses
_LOCATION = re.compile(rb"\r\n(?i:location):[\t ]*((?i:https?)://([^/?#\r]*))?(/[^\r]*)")
_COOKIE = re.compile(rb"\r\n(?i:set-cookie):[^\r]*")
_COOKIE_PATH = re.compile(rb"(?i:;[\t ]*path[\t ]*=[\t ]*)(/[^;\r]*)")
_ANY_PATH = re.compile(rb"(?i:;[\t ]*path[\t ]*(?=[=;]|$))[^;]*")
_DOMAIN = re.compile(rb"(?i:;[\t ]*domain[\t ]*(?=[=;]|$))[^;]*")
_WHOLE_HOST = re.compile(rb"\r\n[^:]*:[\t =]*(?i:__host-)")  # such cookies must have the path `/`
_OWN_NAME = re.compile(rb"\r\n[^:]*:" + OWN_COOKIE)
_FOR_ORIGIN = re.compile(rb"\r\n(?i:" + b"|".join(WHOLE_ORIGIN) + rb"):[^\r]*")


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


def write_redirect(head: RequestHead, route: ServiceRoute) -> WrittenAnswer:
    """Return the response that adds the slash. The `Location` is
    relative, because a proxy in front of the gateway may also remove a part of the path.
    """
    prefix = route.removed_prefix.encode()
    last = prefix.rpartition(b"/")[2]
    fields = (
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: %b/%b\r\nVary: Accept\r\n"
        b"Content-Length: 0\r\n"
    ) % (last, head.target[len(prefix) :])
    return WrittenAnswer(fields)


def guard(head: ResponseHead, route: ServiceRoute, request: RequestHead) -> ResponseHead:
    """Return the head of a response so that it concerns only its own service, and so that its
    `Location` and its cookies are correct for the client.

    No cookie gets a name of the console's cookies, or a `Domain`, which would send the cookie to
    other services and to the console. If the service shares its origin with others, the fields
    for the whole origin are removed, and cookies get the prefix of the service. If the gateway
    removed this prefix from the path of the request, `Location` gets it, too. A `Location` that is
    on another host is not changed, nor is a path that already has the prefix.
    """
    removed = route.removed_prefix.encode()
    shares = bool(route.prefix) or not route.hosts
    fields = head.fields
    if removed and head.status in WITH_LOCATION:
        fields = _move_location(fields, removed, request.host)
    if head.wide:
        fields = _COOKIE.sub(lambda found: _guard_cookie(found[0], route, request, shares), fields)
        if shares:
            fields = _FOR_ORIGIN.sub(b"", fields)
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


def _guard_cookie(line: bytes, route: ServiceRoute, request: RequestHead, shares: bool) -> bytes:
    """Return the line of a cookie, or b"" if the program may not set this cookie."""
    if _OWN_NAME.match(line):
        return b""
    line = _DOMAIN.sub(b"", line)
    if not shares:
        return line
    if _WHOLE_HOST.match(line):
        return b""
    return _move_cookie(line, route.prefix.encode(), request.target)


def _move_cookie(line: bytes, prefix: bytes, target: bytes) -> bytes:
    """Add the prefix to the path of a cookie. Without a path, browsers use the folder of the
    request's path, which may be above the prefix.
    """

    def move(found: re.Match[bytes]) -> bytes:
        path = found[1].rstrip(b"\t ")
        moved = path if _has_prefix(path, prefix) else prefix + (b"" if path == b"/" else path)
        return found[0][: found.start(1) - found.start()] + moved

    paths = list(_ANY_PATH.finditer(line))
    is_stated = bool(paths) and bool(_COOKIE_PATH.match(paths[-1][0]))  # the last one holds
    line = _COOKIE_PATH.sub(move, line)
    if is_stated:
        return line
    folder = target.partition(b"?")[0].rpartition(b"/")[0]
    if prefix and not _has_prefix(folder, prefix):
        line += b"; Path=" + prefix
    return line


def _has_prefix(path: bytes, prefix: bytes) -> bool:
    after = path[len(prefix) : len(prefix) + 1]
    return path.startswith(prefix) and after in (b"", b"/", b"?", b"#")
