"""Parses the heads of HTTP/1.1 messages by a strict grammar, and extracts the fields that the
gateway uses.

A head is refused unless it has only one interpretation (RFC 9112). Every line must end with CRLF,
no line may be folded, no space may precede a colon, and at most one field may state the length of
the body. The gateway writes a new head from the parsed fields, so that the next server cannot
interpret the head differently. The contract suite tests the parser with both data planes,
`tests/serving/hostile` tests it with hostile input, and `tests/serving/unit/test_gateway_rules.py`
compares it with httptools.
"""

import re
from collections.abc import Iterable

from cavvy.capabilities.serving.gateway.config import GatewayLimits
from cavvy.capabilities.serving.gateway.own_values import OwnValues

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELDS = rb"((?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*)\r\n"
_REQUEST = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) HTTP/1\.([01])\r\n" + _FIELDS)
_RESPONSE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?\r\n" + _FIELDS)
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#@]+)(/[^#]*)?")
_HOST_VALUE = re.compile(rb"[A-Za-z0-9._-]*(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?")
_PLACE_VALUE = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_LENGTH_VALUE = re.compile(rb"\d{1,18}")
# The line of a request whose target is a path, and the digits of a field Content-Length. Heads that
# match are still parsed; what differs in no other part may use the result.
_LINE = re.compile(rb"(" + _TOKEN + rb") (/[!\"$-~]*) HTTP/1\.([01])\r\n")
_DIGITS = re.compile(rb"\r\n(?i:content-length): ([1-9]\d{0,17})\r\n")

_WITHOUT_BODY = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"TRACE"})
IDEMPOTENT = frozenset({b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE"})
NO_LENGTH = -1  # the body is chunked
_MEMO_BYTES, _MEMO_HEADS = 1024, 512
UNTIL_CLOSE = -2  # the body of a response ends with its connection

# How the gateway treats a field. Fields without a role are passed on unchanged. (Members of an enum
# would take a third of the parsing time.)
_DROP, _LENGTH, _CODING, _CONNECTION, _UPGRADE, _HOST, _EXPECT = range(7)
_AUTHORIZATION, _API_KEY, _IDEMPOTENCY, _PREFER, _FORWARDED_FOR, _RESIDENCY = range(7, 13)
_FORWARDED_PROTO, _REQUEST_ID, _ORIGIN, _FETCH_SITE, _WIDE = range(13, 18)
# fields with other roles are removed
_STAY = frozenset({_LENGTH, _HOST, _IDEMPOTENCY, _PREFER, _RESIDENCY, _ORIGIN, _FETCH_SITE})

_COMMON = {
    b"connection": _CONNECTION,
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"upgrade": _UPGRADE,
    b"trailer": _DROP,  # trailers are not passed on
    b"x-request-id": _REQUEST_ID,  # the gateway sets its own value
}
# Fields by which a client could state another address, user, certificate or URL than its own:
# programs behind a proxy trust these fields. `*` stands for any end of the name.
CLAIMS = (
    b"akamai-client-ip",
    b"ali-cdn-real-ip",
    b"cdn-*",
    b"cf-access-*",
    b"cf-connecting-*",
    b"cf-ip*",
    b"cf-pseudo-ipv4",
    b"client-cert*",
    b"client-ip",
    b"cloudfront-viewer-*",
    b"do-connecting-ip",
    b"eo-client-ip",
    b"eo-connecting-ip",
    b"fastly-client-*",
    b"fastly-ssl",
    b"fly-client-ip",
    b"forwarded",
    b"front-end-https",
    b"gcore-client-ip",
    b"http-client-ip",
    b"http-forwarded*",
    b"http-remote-*",
    b"http-x-*",
    b"incap-client-ip",
    b"kubeflow-*",
    b"mellon-*",
    b"oidc-*",
    b"proxy",  # programs with CGI's variables would use it as their own proxy
    b"proxy-client-ip",
    b"proxy-remote-user",
    b"proxy-user",
    b"remote-*",
    b"script-name",
    b"shib-*",
    b"sm-user*",
    b"ssl-client-*",
    b"tailscale-user-*",
    b"true-client-ip",
    b"wl-proxy-*",
    b"x-accel-*",
    b"x-akamai-client-ip",
    b"x-amzn-mtls-*",
    b"x-amzn-oidc-*",
    b"x-anonymous-consumer",
    b"x-apigateway-api-userinfo",
    b"x-appengine-*",
    b"x-arr-*",
    b"x-auth-email",
    b"x-auth-group*",
    b"x-auth-name",
    b"x-auth-request-*",
    b"x-auth-role*",
    b"x-auth-user*",
    b"x-authelia-*",
    b"x-authenticated-*",
    b"x-authentik-*",
    b"x-azure-*",
    b"x-client-cert*",
    b"x-client-dn",
    b"x-client-ip",
    b"x-client-ssl-*",
    b"x-client-verify",
    b"x-cluster-client-ip",
    b"x-coming-from",
    b"x-connecting-ip",
    b"x-consumer-*",
    b"x-credential-*",
    b"x-custom-ip-authorization",
    b"x-endpoint-api-userinfo",
    b"x-envoy-*",
    b"x-forward*",
    b"x-from-ip",
    b"x-goog-authenticated-user-*",
    b"x-goog-iap-*",
    b"x-host",
    b"x-http-host-override",
    b"x-incap-client-ip",
    b"x-jwt-claim*",
    b"x-jwt-payload",
    b"x-ms-client-principal*",
    b"x-ms-token-*",
    b"x-mtls-*",
    b"x-nf-client-*",
    b"x-oidc-*",
    b"x-original-*",
    b"x-originating-*",
    b"x-peer-ip",
    b"x-pomerium-*",
    b"x-proxy-remote-user",
    b"x-proxy-user",
    b"x-proxyuser*",
    b"x-qcloud-real-ip",
    b"x-real-*",
    b"x-remote*",
    b"x-rewrite-*",
    b"x-saml-*",
    b"x-scheme",
    b"x-script-name",
    b"x-source-ip",
    b"x-ssl-*",
    b"x-sso-*",
    b"x-sucuri-*",
    b"x-tencent-real-ip",
    b"x-tls-*",
    b"x-token-subject",
    b"x-true-*",
    b"x-trusted-*",
    b"x-url-scheme",
    b"x-user-ip",
    b"x-vercel-*",
    b"x-vouch-*",
    b"x-webauth-*",
)
_OF_REQUESTS = {
    **_COMMON,
    **dict.fromkeys(CLAIMS, _DROP),
    b"te": _DROP,
    b"proxy-authorization": _DROP,
    b"http2-settings": _DROP,
    b"x-forwarded-proto": _FORWARDED_PROTO,
    b"x-forwarded-for": _FORWARDED_FOR,
    b"host": _HOST,
    b"origin": _ORIGIN,
    b"sec-fetch-site": _FETCH_SITE,
    b"expect": _EXPECT,
    b"authorization": _AUTHORIZATION,
    b"x-api-key": _API_KEY,
    b"idempotency-key": _IDEMPOTENCY,
    b"prefer": _PREFER,
    b"cavvy-residency": _RESIDENCY,
}
# the attribute that stores the value of the last field with the role
_KEPT = {
    _UPGRADE: "upgrade",
    _PREFER: "prefer",
    _FORWARDED_PROTO: "forwarded_proto",
    _REQUEST_ID: "request_id",
    _ORIGIN: "origin",
    _FETCH_SITE: "fetch_site",
}
# fields that are not passed on -> the attribute that stores the value
_NEEDED = {
    b"authorization": "authorization",
    b"x-api-key": "api_key",
    b"x-forwarded-for": "forwarded_for",
}
# fields of responses that hold for the whole origin or host; `redirects.guard` decides on them
WHOLE_ORIGIN = (
    b"alt-svc",
    b"expect-ct",
    b"nel",
    b"public-key-pins",
    b"public-key-pins-report-only",
    b"report-to",
    b"sec-session-registration",
    b"secure-session-registration",
    b"service-worker-allowed",
    b"set-login",
    b"strict-transport-security",
    b"use-as-dictionary",
)
# fields of responses that no program may send
REFUSED = (
    b"clear-site-data",  # browsers clear the cookies of the whole domain
    b"proxy-authenticate",
    b"set-cookie2",
    # commands to a proxy in front of the gateway, which would send its own files
    b"x-accel-redirect",
    b"x-lighttpd-send-file",
    b"x-reproxy-url",
    b"x-sendfile",
)
_OF_RESPONSES = {
    **_COMMON,
    **dict.fromkeys(REFUSED, _DROP),
    **dict.fromkeys(WHOLE_ORIGIN, _WIDE),
    b"set-cookie": _WIDE,
    b"cavvy-served-by": _DROP,  # the gateway states it
}


def _compile_search(names: Iterable[bytes]) -> re.Pattern[bytes]:
    """Compile a search for the fields with these names, or with any end in place of `*`. The search
    ignores case and treats `_` and `-` as equal, because some servers do so. The regular expression
    is a tree of the names' letters, so it finds the fields faster than a comparison of each field
    with each name.
    """
    tree = _write_tree([name.decode() for name in names])
    return re.compile(rb"\n(" + tree.encode() + rb"):([^\r]*)\r")


def _write_tree(names: list[str]) -> str:
    rests: dict[str, list[str]] = {}
    for name in names:
        rests.setdefault(name[:1], []).append(name[1:])
    branches = [_write_letter(each) + (_write_tree(rests[each]) if each else "") for each in rests]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _write_letter(letter: str) -> str:
    match letter:
        case "*":
            return "[^:\\r]*+"
        case "-":
            return "[-_]"
        case _:
            return f"[{letter}{letter.upper()}]" if letter.isalpha() else letter


_SEARCH_REQUEST = _compile_search(_OF_REQUESTS)
_SEARCH_RESPONSE = _compile_search(_OF_RESPONSES)


class HeadError(Exception):
    """Raised if a message is refused. If a client sent the message, the gateway answers with
    `status`."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what


class RequestHead:
    """The head of a request. `fields` are the fields that are passed on to the replica, each with
    its CRLF.

    Requests whose heads have the same bytes share one object, which does not change after parsing.
    Values that few requests have are class attributes until they are set on an object.
    """

    length = 0  # length of the body; NO_LENGTH if the body is chunked
    connection = b""
    upgrade = b""
    host = b""
    expect = False
    authorization = b""
    api_key = b""
    prefer = b""
    forwarded_for = b""
    forwarded_proto = b""
    request_id = b""
    origin = b""  # of the page whose program sends the request
    fetch_site = b""  # what the browser says about this page
    carries_key = False  # whether the client sent a key of a service anywhere in the head
    found_key = b""  # the first such key, except those that a browser sends by itself
    places: frozenset[str] = frozenset()  # the request must stay in all of them
    plain = False  # whether it has no field that the gateway treats in a special way

    def __init__(self, method: bytes, target: bytes, version: int, fields: bytes) -> None:
        self.method = method
        self.target = target
        self.version = version  # 1.x
        self.close = version == 0
        self.idempotent = method in IDEMPOTENT
        self.fields = fields

    def with_target(self, target: bytes) -> "RequestHead":
        """Return the same head with another target."""
        head = RequestHead.__new__(RequestHead)
        head.__dict__.update(self.__dict__)
        head.target = target
        return head

    def get_header(self, name: bytes) -> bytes:
        """Return the value of the first field with this name, which must be in lower case. The
        field may be one that is passed on to the replica, or one that the gateway has removed
        because only the gateway needs it.
        """
        if name in _NEEDED:
            return bytes(getattr(self, _NEEDED[name]))
        for line in self.fields.split(b"\r\n"):
            found, _, value = line.partition(b":")
            if found.lower() == name:
                return value.strip(b" \t")
        return b""

    def without(self, names: frozenset[bytes]) -> bytes:
        """Return the header fields, without the fields that have these names."""
        return b"".join(
            line + b"\r\n"
            for line in self.fields.split(b"\r\n")[:-1]
            if line.partition(b":")[0].lower() not in names
        )


# the attributes that are set on the head of a request without a field that is treated specially
_PLAIN = {*vars(RequestHead(b"GET", b"/", 1, b"")), "connection", "host", "length"}


class ResponseHead:
    """The head of a response. `fields` is the status line and the fields that are passed on to the
    client, each with its CRLF. Responses whose heads have the same bytes share one object.
    """

    __slots__ = ("close", "fields", "length", "status", "upgrade", "wide")

    def __init__(self, status: int, close: bool) -> None:
        self.status = status
        self.fields = b""
        self.length = UNTIL_CLOSE
        self.close = close
        self.wide = False  # whether it sets cookies, or has a field for the whole origin
        self.upgrade = b""


class _Fields:
    """The parsed head of a request, for those that differ from it only in the target and the length
    of the body. `before` and `after` are the fields around the digits of this length.
    """

    __slots__ = ("after", "before", "head")

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        digits = _DIGITS.search(b"\r\n" + head.fields) if head.length > 0 else None
        self.before = self.after = b""
        if digits is not None:
            self.before = head.fields[: digits.start(1) - 2]
            self.after = head.fields[digits.end(1) - 2 :]

    def make_head(self, target: bytes, digits: bytes) -> RequestHead:
        head = self.head.with_target(target)
        if digits:
            head.fields = self.before + digits + self.after
            head.length = int(digits)
        return head


class HeadMemo:
    """Caches parsed heads: clients and replicas repeat heads, and a look-up takes a tenth of the
    time that parsing takes. Heads with credentials are not cached. The heads of a client's requests
    often differ only in the target and the length of the body, so the rest is cached, too.
    """

    def __init__(self, limits: GatewayLimits, own: OwnValues | None = None) -> None:
        self.limits = limits
        self.own = own or OwnValues()
        self._requests: dict[bytes, RequestHead] = {}
        # by the method, the version, and all fields without the digits of the body's length
        self._fields: dict[tuple[bytes, bytes, bytes, bytes], _Fields] = {}
        self._responses: dict[bytes, ResponseHead] = {}

    def parse_request(self, data: bytes) -> RequestHead:
        """Raises HeadError."""
        head = self._requests.get(data)
        if head is not None:
            return head
        key = digits = None
        if len(data) <= _MEMO_BYTES and (line := _LINE.match(data)) is not None:
            method, target, minor = line.groups()
            at, length = line.end() - 2, None
            if method not in _WITHOUT_BODY:
                length = _DIGITS.search(data, at)
            if length is None:
                key, digits = (method, minor, data[at:], b""), b""
            else:
                key = (method, minor, data[at : length.start(1)], data[length.end(1) :])
                digits = length[1]
            known = self._fields.get(key)
            if known is not None and not self.own.may_hold(target):
                return known.make_head(target, digits)
        return self._parse_request(data, key, bool(digits))

    def _parse_request(
        self, data: bytes, key: tuple[bytes, bytes, bytes, bytes] | None, states_length: bool
    ) -> RequestHead:
        """Parse a head that is not cached, and cache it if it may be."""
        kept, keys, carries = self.own.remove(data)
        head = parse_request(kept, self.limits)
        if carries:
            head.carries_key = True
            head.found_key = keys[0] if keys else b""
        elif key is not None and kept is data and not (head.authorization or head.api_key):
            if len(self._requests) >= _MEMO_HEADS:
                self._requests.clear()
            self._requests[data] = head
            if not states_length or head.length > 0:
                if len(self._fields) >= _MEMO_HEADS:
                    self._fields.clear()
                self._fields[key] = _Fields(head)
        return head

    def parse_response(self, data: bytes, method: bytes) -> ResponseHead:
        """Raises HeadError."""
        head = self._responses.get(data)
        if head is None or method == b"HEAD":  # statuses whose responses have no body
            head = parse_response(data, method)
            if len(data) <= _MEMO_BYTES and method != b"HEAD":
                if len(self._responses) >= _MEMO_HEADS:
                    self._responses.clear()
                self._responses[data] = head
        return head


def parse_request(head: bytes, limits: GatewayLimits) -> RequestHead:
    """Parse a head, which includes its empty line. Raises HeadError."""
    match = _REQUEST.fullmatch(head)
    if match is None:
        raise _explain_mismatch(head)
    if head.count(b"\n") > limits.headers + 2:
        raise HeadError(431, f"the request has more than {limits.headers} header fields")
    method, target, minor, fields = match.groups()
    request = RequestHead(method, target, 0 if minor == b"0" else 1, fields)
    length = coding = host = None
    start = at = match.start(4)
    parts = []
    for found in _SEARCH_REQUEST.finditer(head, start - 1):
        name, value = found.groups()
        role = _OF_REQUESTS.get(name.lower(), _DROP)  # others are claims or have a `_`
        value = value.strip(b" \t")
        if role == _HOST:
            host = _read_host(host, value)
        elif role == _LENGTH:
            length = _read_length(length, value)
        elif role == _CODING:
            coding = _read_coding(coding, value)
        elif role != _DROP:
            _keep_value(request, role, value)
        if role not in _STAY:
            parts.append(head[at : found.start() + 1])
            at = found.end() + 1
    if parts:
        request.fields = b"".join((*parts, head[at:-2]))
    _settle_host(request, host)
    if request.connection or request.upgrade:
        _read_connection(request)
    _settle_length(request, length, coding)
    request.plain = request.__dict__.keys() <= _PLAIN
    return request


def _explain_mismatch(head: bytes) -> HeadError:
    if head.startswith(b"PRI * HTTP/2.0"):
        return HeadError(
            505, "this gateway supports only HTTP/1.1, so not gRPC; HAProxy supports HTTP/2"
        )
    return HeadError(400, "the head of the request is not valid HTTP/1.1")


def _keep_value(request: RequestHead, role: int, value: bytes) -> None:
    if role == _CONNECTION:
        request.connection += b"," + value
    elif role in _KEPT:
        setattr(request, _KEPT[role], value)
    elif role == _EXPECT:
        if value.lower() != b"100-continue":
            raise HeadError(417, "the only supported expectation is 100-continue")
        request.expect = request.version == 1
    elif role == _AUTHORIZATION:
        if request.authorization:
            raise HeadError(400, "the request has two Authorization fields")
        request.authorization = value
    elif role == _API_KEY:
        if request.api_key:
            raise HeadError(400, "the request has two X-API-Key fields")
        request.api_key = value
    elif role == _FORWARDED_FOR:
        before = request.forwarded_for
        request.forwarded_for = before + b", " + value if before else value
    elif role == _RESIDENCY:
        request.places |= read_places(value)
    else:
        request.idempotent = True


def read_places(value: bytes) -> frozenset[str]:
    """Return the places that a field Cavvy-Residency names. Raises HeadError."""
    text = value.decode("latin-1").lower()
    places = frozenset(each.strip(" \t") for each in text.split(","))
    if not all(_PLACE_VALUE.fullmatch(each) for each in places):
        raise HeadError(400, "each value of Cavvy-Residency must be a place, such as eu")
    return places


def _settle_host(request: RequestHead, host: bytes | None) -> None:
    target = request.target
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is not None:  # RFC 9112, 3.2.2: the authority in the target replaces Host
            host = absolute[1]
            request.target = absolute[2] or b"/"
            rest = request.without(frozenset({b"host"}))
            request.fields = b"Host: %b\r\n%b" % (host, rest)
        elif target != b"*" or request.method != b"OPTIONS":
            raise HeadError(400, "the target of the request is not a path")
    elif b"#" in target:
        raise HeadError(400, "the target of the request has a fragment")
    if request.method == b"CONNECT":
        raise HeadError(405, "the gateway is not a forward proxy")
    if host is None:
        if request.version == 1:
            raise HeadError(400, "the request has no Host field")
        host = b""
        request.fields = b"Host: \r\n" + request.fields
    if _HOST_VALUE.fullmatch(host) is None:
        raise HeadError(400, "the Host field is not valid")
    request.host = host


def _read_connection(request: RequestHead) -> None:
    """Read the field Connection. Fields whose names are listed in Connection are not passed on,
    unless the gateway itself uses them.
    """
    names = {option.strip(b" \t") for option in request.connection.lower().split(b",")}
    if b"close" in names:
        request.close = True
    others = frozenset(names - {b"", b"close", b"keep-alive", b"upgrade"} - _OF_REQUESTS.keys())
    if others:
        request.fields = request.without(others)
    if request.version == 0 or b"upgrade" not in names or b"h2c" in request.upgrade.lower():
        # an upgrade to unencrypted HTTP/2 would let later requests bypass these checks
        request.upgrade = b""


def _settle_length(request: RequestHead, length: int | None, coding: bytes | None) -> None:
    if coding is None:
        request.length = length or 0
        return
    if length is not None:
        raise HeadError(400, "the request has both Content-Length and Transfer-Encoding")
    if request.version == 0:
        raise HeadError(400, "HTTP/1.0 has no Transfer-Encoding")
    request.length = NO_LENGTH


def _read_host(before: bytes | None, value: bytes) -> bytes:
    if before is not None:
        raise HeadError(400, "the request has two Host fields")
    return value


def _read_length(before: int | None, value: bytes) -> int:
    if before is not None:
        raise HeadError(400, "the message has two Content-Length fields")
    if _LENGTH_VALUE.fullmatch(value) is None:
        raise HeadError(400, "Content-Length is not a number")
    return int(value)


def _read_coding(before: bytes | None, value: bytes) -> bytes:
    if before is not None or value.lower() != b"chunked":
        raise HeadError(501, "the only supported Transfer-Encoding is a single `chunked`")
    return value


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """Parse the head of a response to a request with this method. Raises HeadError."""
    match = _RESPONSE.fullmatch(head)
    if match is None:
        raise HeadError(502, "the head of the response is not valid HTTP/1.1")
    minor, digits, _ = match.groups()
    response = ResponseHead(int(digits), minor == b"0")
    length = coding = None
    at = 0
    parts = []
    for found in _SEARCH_RESPONSE.finditer(head):
        name, value = found.groups()
        role = _OF_RESPONSES.get(name.lower(), _DROP)
        value = value.strip(b" \t")
        if role == _LENGTH:
            length = _read_length(length, value)
            continue
        if role == _WIDE:
            response.wide = True
            continue
        if role == _CONNECTION:
            response.close = response.close or b"close" in value.lower()
        elif role == _CODING:
            coding = _read_coding(coding, value)
        elif role == _UPGRADE:
            response.upgrade = value
        parts.append(head[at : found.start() + 1])
        at = found.end() + 1
    response.fields = b"".join((*parts, head[at:-2])) if parts else head[:-2]
    if minor == b"0":
        response.fields = b"HTTP/1.1" + response.fields[8:]
    if coding is not None and (length is not None or minor == b"0"):
        raise HeadError(502, "the response has both Content-Length and Transfer-Encoding")
    _settle_response_length(response, method, length, coding is not None)
    return response


def _settle_response_length(
    response: ResponseHead, method: bytes, length: int | None, chunked: bool
) -> None:
    status = response.status
    if status < 200 or status == 204:  # RFC 9112, 6.3: such responses have no body
        response.length = 0
        if length is not None:  # many programs state the length 0
            response.fields = _without_length(response.fields)
        # bytes that the replica sends all the same must not begin the next response
        response.close = response.close or chunked or bool(length)
    elif method == b"HEAD" or status == 304:
        response.length = 0
        if chunked:
            response.fields += b"Transfer-Encoding: chunked\r\n"
    elif chunked:
        response.length = NO_LENGTH
    elif length is not None:
        response.length = length
    else:
        response.close = True


def _without_length(fields: bytes) -> bytes:
    lines = fields.splitlines(keepends=True)
    return b"".join(each for each in lines if not each.lower().startswith(b"content-length:"))


def may_begin_response(data: bytes) -> bool:
    """Return whether `data` can be the beginning of the head of a response."""
    return b"HTTP/".startswith(data[:5]) and data.count(b"\n") == data.count(b"\r\n")
