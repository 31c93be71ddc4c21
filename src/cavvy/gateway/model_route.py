"""The routes of OpenAI's API for all services with models: the body's `model` selects the service.
The body is JSON, or a form with files.

The gateway looks for `model` in the first `limits.hold_bytes` of a body. If a body has at most
`limits.model_bytes`, the gateway looks in the whole body, because OpenAI's Python client writes
`messages`, which can contain images, before `model`.
"""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from cavvy.domain.values import Struct
from cavvy.gateway.client_keys import read_secret
from cavvy.gateway.config import GatewayLimits
from cavvy.gateway.heads import RequestHead
from cavvy.gateway.other_origins import is_preflight
from cavvy.gateway.own_answers import AnswerCode

if TYPE_CHECKING:
    from cavvy.gateway.inbound import InboundConnection, OpenRequest
    from cavvy.gateway.service_queue import ServiceQueue

_ROOT = b"/v1/"
_LIST = b"/v1/models"
_ABOUT = b"/v1/models/"  # and the name of a model
_CALLS = frozenset(
    {
        b"/v1/audio/speech",
        b"/v1/audio/transcriptions",
        b"/v1/audio/translations",
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/images/edits",
        b"/v1/images/generations",
        b"/v1/images/variations",
        b"/v1/messages",
        b"/v1/moderations",
        b"/v1/rerank",
        b"/v1/responses",
        b"/v1/score",
    }
)
# bytes of all bodies whose model is unknown; if they hold more, no body is read beyond `hold_bytes`
_HELD_MAX = 256 << 20
# A string that is not closed matches up to the end of the body. Otherwise, the search would begin
# again at each quotation mark inside the string.
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.?)*+)("(\s*:)?)?|[{}\[\]]', re.DOTALL)
_FORM = re.compile(rb'(?i)multipart/form-data\s*;.*?\bboundary=(?:"([^"]+)"|([^\s;"]+))')
_MODEL_FIELD = re.compile(rb'(?i)\r\ncontent-disposition:[^\r]*;\s*name="?model"?(?:;|\r|$)')
_MOST_FIELDS = 1000  # of a form before `model`

Open = Callable[["InboundConnection", "ServiceQueue", RequestHead, float], "OpenRequest | None"]


def is_model_path(head: RequestHead) -> bool:
    """Return whether the routes for models handle the request. The routes for models take
    precedence over a service whose path prefix matches the request."""
    if not head.target.startswith(_ROOT):
        return False
    path = head.target.partition(b"?")[0]
    if path == _LIST or path.startswith(_ABOUT):
        return head.method in (b"GET", b"HEAD", b"OPTIONS")
    return path in _CALLS and head.method in (b"POST", b"OPTIONS")


class _Body(Struct, frozen=True):
    model: str


_decode = msgspec.json.Decoder(_Body).decode


class ModelRoutes:
    """Maps each model to the services that serve it."""

    def __init__(
        self, services: Iterable["ServiceQueue"], open_request: Open, limits: GatewayLimits
    ) -> None:
        self.open_request = open_request
        self.limits = limits
        self.held_bytes = 0  # of all bodies whose model is not known yet
        self._services: dict[str, list[ServiceQueue]] = {}
        for service in services:
            for name in service.route.models:
                self._services.setdefault(name, []).append(service)
        # services without keys first, since each client may call these
        every = {id(each): each for found in self._services.values() for each in found}
        self._callable = sorted(every.values(), key=lambda each: bool(each.keys))
        # whether pages of any origin may call the routes
        self._shares = bool(every) and all(each.keys for each in every.values())

    def answer(
        self, connection: "InboundConnection", head: RequestHead, now: float, clock: float
    ) -> "OpenRequest | bool | None":
        """Handle a request whose path belongs to no single service; `head` contains its path and
        headers. If the request must be passed on, the result is the open request. If the method has
        already answered the request, the result is None. If the path is not one of the routes for
        models, the result is False.
        """
        if not is_model_path(head):
            return False
        connection.shares = self._shares and bool(head.origin)
        if head.method == b"OPTIONS":
            if not (self._shares and is_preflight(head)):
                return False
            connection.permit(head)
            return None
        if head.method == b"POST":
            if self._callable and not any(_may_call(each, head, clock) for each in self._callable):
                message = "requests for models need a key of the service that serves the model"
                connection.refuse(401, AnswerCode.NO_KEY, message, head)  # the body is not read
                return None
            return ModelRequest(self, connection, head, now, clock)
        rows = {name: _describe(name) for name in self._list_names(head, clock)}
        path = head.target.partition(b"?")[0]
        name = unquote(path[len(_ABOUT) :])
        if path == _LIST:
            listed = {"object": "list", "data": list(rows.values())}
            connection.reply(msgspec.json.encode(listed), head)
        elif name in rows:
            connection.reply(msgspec.json.encode(rows[name]), head)
        else:
            connection.refuse(404, AnswerCode.NO_MODEL, _say_missing(name), head)
        return None

    def find(self, name: str, head: RequestHead, clock: float) -> "list[ServiceQueue]":
        """Return the services with this model. If several services have this model, return the
        services that accept the request's key or, if no service accepts it, the services without
        keys. A service without keys never receives a request that is meant for a service with keys.
        """
        found = self._services.get(name, [])
        if len(found) < 2:
            return found
        own = [each for each in found if each.keys and _may_call(each, head, clock)]
        return own or [each for each in found if not each.keys]

    def may_hold(self, size: int, length: int) -> bool:
        """Return whether the gateway may read more of a request's body. `size` is the number of
        bytes that have arrived, and `length` is the length in the request's head.
        """
        limits = self.limits
        if size < limits.hold_bytes:
            return True
        return max(size, length) <= limits.model_bytes and self.held_bytes <= _HELD_MAX

    def _list_names(self, head: RequestHead, clock: float) -> list[str]:
        """Return the models that the request's key may use."""
        return [
            name
            for name, services in sorted(self._services.items())
            if any(_may_call(each, head, clock) for each in services)
        ]


class ModelRequest:
    """A request that Cavvy can assign to a service only after it has read the `model` in the
    request's body.
    """

    held_bytes = 0  # the connection never stops reading: `may_hold` limits what is held

    def __init__(
        self,
        routes: ModelRoutes,
        connection: "InboundConnection",
        head: RequestHead,
        now: float,
        clock: float,
    ) -> None:
        self.head = head
        self._routes = routes
        self._connection = connection
        self._now, self._clock = now, clock
        self._held: list[bytes] = []
        self._size = 0
        self._searched = False  # whether the first bytes of the body do not name a model

    def begin(self) -> None:
        if self.head.length == 0:
            self._refuse(400, AnswerCode.BAD_REQUEST, "the request has no body with a `model`")
        else:
            self._connection.want_body()

    def feed(self, payload: bytes, done: bool) -> bool:
        self._held.append(payload)
        self._size += len(payload)
        self._routes.held_bytes += len(payload)
        first = self._routes.limits.hold_bytes
        if not done and (self._searched or self._size < first):
            if not self._routes.may_hold(self._size, self.head.length):
                self._refuse_late(first)
            return True
        body, self._searched = b"".join(self._held), True
        form = _FORM.match(self.head.get_header(b"content-type"))
        name = read_form(body, form[1] or form[2]) if form else read_model(body, done)
        if name is not None:
            return self._select(name, body, done)
        if done:
            wrong = "the body is neither JSON with a string `model` nor a form with `model`"
            self._refuse(400, AnswerCode.BAD_REQUEST, wrong)
        elif not self._routes.may_hold(self._size, self.head.length):
            self._refuse_late(first)
        return True

    def abort(self) -> None:
        self._release()

    def _release(self) -> None:
        self._held.clear()
        self._routes.held_bytes -= self._size
        self._size = 0

    def _select(self, name: str, body: bytes, done: bool) -> bool:
        """Pass the request on to the service that has the model."""
        found = self._routes.find(name, self.head, self._clock)
        if len(found) == 1:
            return self._pass_on(found[0], body, done)
        self._refuse(404, AnswerCode.NO_MODEL, _say_missing(name, several=bool(found)))
        return True

    def _pass_on(self, service: "ServiceQueue", body: bytes, done: bool) -> bool:
        """Convert the connection's request into a request of the service."""
        self._release()
        self._connection.exchange_request(None)
        request = self._routes.open_request(self._connection, service, self.head, self._now)
        if request is None:  # refused, and answered
            return True
        self._connection.exchange_request(request)
        if not request.feed(body, done):
            return False
        request.begin()
        return True

    def _refuse_late(self, first: int) -> None:
        message = f"the body's first {first} bytes have no `model`; move `model` to the start"
        self._refuse(400, AnswerCode.BAD_REQUEST, message)

    def _refuse(self, status: int, code: AnswerCode, message: str) -> None:
        self._release()
        self._connection.exchange_request(None)
        self._connection.refuse(status, code, message, self.head)


def read_model(body: bytes, whole: bool) -> str | None:
    """Return the string `model` of a JSON object, of which perhaps only the beginning has
    arrived."""
    if whole:
        try:
            return _decode(body).model
        except msgspec.DecodeError:
            return None
    depth = 0
    named = False  # the last token was the key `model` of the outermost object
    for token in _TOKEN.finditer(body):
        mark = token[0][:1]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
        elif named and token[2]:
            try:
                return msgspec.json.decode(b'"%b"' % token[1], type=str)
            except msgspec.DecodeError:
                return None
        named = depth == 1 and bool(token[3]) and token[1] == b"model"
    return None


def read_form(body: bytes, boundary: bytes) -> str | None:
    """Return the field `model` of a form, of which perhaps only the beginning has arrived."""
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary, _MOST_FIELDS + 1)
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        if _MODEL_FIELD.search(head):
            return value.decode(errors="replace")
    return None


def _describe(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "cavvy"}


def _say_missing(name: str, *, several: bool = False) -> str:
    why = "several services have" if several else "no service has"
    return f"{why} the model {name!r}; see /v1/models"


def _may_call(service: "ServiceQueue", head: RequestHead, clock: float) -> bool:
    if not service.keys:
        return True
    return bool(read_secret(head)) and service.keys.knows(head, clock)
