"""The routes of OpenAI's API for all services with models: the body's `model` selects the service.
The body is JSON, or a form with files.

Names of models belong to projects. `/PROJECT/v1` reaches the models of a project. At `/v1`, a key
selects the project of the service that knows the key; without a key, the project is `default`. The
gateway answers a request that finds no service as if the services of other projects did not exist.

The gateway looks for `model` in the first `limits.hold_bytes` of a body. If a body has at most
`limits.model_bytes`, the gateway looks in the whole body, because OpenAI's Python client writes
`messages`, which can contain images, before `model`.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from cavvy.domain.values import Struct
from cavvy.gateway.config import USUAL_PROJECT, GatewayLimits
from cavvy.gateway.heads import RequestHead
from cavvy.gateway.other_origins import is_preflight, may_call
from cavvy.gateway.own_answers import AnswerCode

if TYPE_CHECKING:
    from cavvy.gateway.inbound import InboundConnection, OpenRequest
    from cavvy.gateway.service_queue import ServiceQueue

_PATH = re.compile(rb"(?:/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?))?(/v1/[^?]*)")
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
_OTHER_PROJECTS = (
    f"without a key, /v1 has only the models of the project {USUAL_PROJECT}; "
    "for the models of another project, use its base URL /PROJECT/v1"
)
_UNKNOWN_KEY = (
    "no service knows this key; it may be revoked, expired, or the key of a service that has ended "
    "or belongs to another project; send keys as `Authorization: Bearer KEY`"
)
# bytes of all bodies whose model is unknown; if they hold more, no body is read beyond `hold_bytes`
_HELD_MAX = 256 << 20
# A string that is not closed matches up to the end of the body. Otherwise, the search would begin
# again at each quotation mark inside the string.
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.?)*+)("(\s*:)?)?|[{}\[\]]', re.DOTALL)
_FORM = re.compile(rb'(?i)multipart/form-data\s*;.*?\bboundary=(?:"([^"]+)"|([^\s;"]+))')
_MODEL_FIELD = re.compile(rb'(?i)\r\ncontent-disposition:[^\r]*;\s*name="?model"?(?:;|\r|$)')
_MOST_FIELDS = 1000  # of a form before `model`

# opens a request whose head has been read; the bytes are the target that the replica receives
Open = Callable[
    ["InboundConnection", "ServiceQueue", RequestHead, bytes, float], "OpenRequest | None"
]


class ModelPath(Struct, frozen=True):
    """The path of a request for models. `project` is None at `/v1`. `path` begins with `/v1/`."""

    project: str | None
    path: bytes

    @property
    def root(self) -> str:
        return "" if self.project is None else f"/{self.project}"


def read_model_path(head: RequestHead) -> ModelPath | None:
    """Return the path of a request that the routes for models handle, or None. These routes take
    precedence over a service whose path prefix matches the request."""
    found = _PATH.match(head.target)
    if found is None:
        return None
    if found[2] == _LIST or found[2].startswith(_ABOUT):
        handled = head.method in (b"GET", b"HEAD", b"OPTIONS")
    else:
        handled = found[2] in _CALLS and head.method in (b"POST", b"OPTIONS")
    if not handled:
        return None
    return ModelPath(found[1].decode() if found[1] else None, found[2])


class _Body(Struct, frozen=True):
    model: str


_decode = msgspec.json.Decoder(_Body).decode


class _Reach(Struct, frozen=True):
    """What a request may call: the services that know its key, and services of `projects` that need
    no key."""

    projects: frozenset[str]
    known: "tuple[ServiceQueue, ...]" = ()


class ModelRoutes:
    """Maps each model to the services that serve it."""

    def __init__(self, open_request: Open, limits: GatewayLimits) -> None:
        self.open_request = open_request
        self.limits = limits
        self.held_bytes = 0  # of all bodies whose model is not known yet
        self.set_services(())

    def set_services(self, services: Iterable["ServiceQueue"]) -> None:
        every = tuple(services)
        self._services: dict[str, list[ServiceQueue]] = {}
        for service in every:
            for name in service.route.models:
                self._services.setdefault(name, []).append(service)
        self._keyed = [each for each in every if each.keys]
        self._open = {each.route.project for each in every if each.route.models and not each.keys}
        self._named = [each.route for each in every if each.route.models and each.route.origins]
        # whether a key may help. Whether this holds for a single project is not disclosed.
        self._may_need_key = any(each.route.models for each in self._keyed)

    def answer(
        self, connection: "InboundConnection", head: RequestHead, now: float, clock: float
    ) -> "OpenRequest | bool | None":
        """Handle a request whose path belongs to no single service; `head` contains its path and
        headers. If the request must be passed on, the result is the open request. If the method has
        already answered the request, the result is None. If the path is not one of the routes for
        models, the result is False.
        """
        at = read_model_path(head)
        if at is None:
            return False
        # whether pages of any origin may call the route: each of its services needs a key
        shares = self._may_need_key and (at.project or USUAL_PROJECT) not in self._open
        connection.shares = shares and bool(head.origin)
        if head.method == b"OPTIONS":
            asked = at.project or USUAL_PROJECT
            named = (each for each in self._named if each.project == asked)
            permitted = shares or any(may_call(head, each, False, ()) for each in named)
            if not (permitted and is_preflight(head)):
                return False
            connection.permit(head)
            return None
        reach = self.find_reach(at, head, clock)
        if reach is None:
            connection.refuse(401, AnswerCode.NO_KEY, _UNKNOWN_KEY, head)
        elif head.method == b"POST":
            if shares and not reach.known:  # the body is not read
                connection.refuse(401, AnswerCode.NO_KEY, _say_keyless(at), head)
                return None
            return ModelRequest(self, connection, head, at, now)
        else:
            self._describe(connection, head, at, reach)
        return None

    def find_reach(self, at: ModelPath, head: RequestHead, clock: float) -> "_Reach | None":
        """Return what a request may call, or None if the request has a key that no service knows. A
        request with a key is never treated like a request without a key.
        """
        asked = at.project
        known = tuple(
            each
            for each in self._keyed
            if asked in (None, each.route.project) and each.keys.knows(head, clock)
        )
        if known:
            return _Reach(frozenset(each.route.project for each in known), known)
        if head.carries_key:
            return None
        return _Reach(frozenset({asked or USUAL_PROJECT}))

    def find(self, name: str, reach: _Reach) -> "list[ServiceQueue]":
        """Return the services with this model that a request may call: the services that know the
        request's key or, if none of these has the model, the services without keys. A service
        without keys never receives a request that is meant for a service with keys.
        """
        if own := [each for each in reach.known if name in each.route.models]:
            return own
        found = self._services.get(name, ())
        found = [each for each in found if each.route.project in reach.projects]
        if reach.known and any(each.keys for each in found):
            return []  # the model's service does not know the key
        return [each for each in found if not each.keys]

    def explain_missing(
        self, name: str, at: ModelPath, reach: _Reach
    ) -> tuple[int, AnswerCode, str]:
        """Return the status, code and message for a model that the request may not call."""
        if reach.known:
            message = f"the key may not use a model {name!r}; see {at.root}/v1/models"
        elif self._may_need_key:
            return 401, AnswerCode.NO_KEY, _say_keyless(at, f"the model {name!r}")
        else:
            message = f"no service has the model {name!r}; see {at.root}/v1/models"
            message += "" if at.project else f"; {_OTHER_PROJECTS}"
        return 404, AnswerCode.NO_MODEL, message

    def _describe(
        self, connection: "InboundConnection", head: RequestHead, at: ModelPath, reach: _Reach
    ) -> None:
        """Answer with the models that the request may use, or with one of them."""
        names = (each for each in sorted(self._services) if self.find(each, reach))
        rows = {name: _describe(name) for name in names}
        name = unquote(at.path[len(_ABOUT) :])
        if at.path == _LIST:
            listed = {"object": "list", "data": list(rows.values())}
            connection.reply(msgspec.json.encode(listed), head)
        elif name in rows:
            connection.reply(msgspec.json.encode(rows[name]), head)
        else:
            message = f"no model {name!r} may be used; see {at.root}/v1/models"
            connection.refuse(404, AnswerCode.NO_MODEL, message, head)

    def may_hold(self, size: int, length: int) -> bool:
        """Return whether the gateway may read more of a request's body. `size` is the number of
        bytes that have arrived, and `length` is the length in the request's head.
        """
        limits = self.limits
        if size < limits.hold_bytes:
            return True
        return max(size, length) <= limits.model_bytes and self.held_bytes <= _HELD_MAX


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
        at: ModelPath,
        now: float,
    ) -> None:
        self.head = head
        self._routes = routes
        self._connection = connection
        self._at, self._now = at, now
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
        """Pass the request on to the service that has the model. Keys may have been revoked while
        the body arrived."""
        reach = self._routes.find_reach(self._at, self.head, time.time())
        if reach is None:
            self._refuse(401, AnswerCode.NO_KEY, _UNKNOWN_KEY)
            return True
        found = self._routes.find(name, reach)
        if len(found) == 1:
            return self._pass_on(found[0], body, done)
        if found:
            why = f"several services of the project have the model {name!r}; use a service's URL"
            self._refuse(404, AnswerCode.NO_MODEL, why)
        else:
            self._refuse(*self._routes.explain_missing(name, self._at, reach))
        return True

    def _pass_on(self, service: "ServiceQueue", body: bytes, done: bool) -> bool:
        """Convert the connection's request into a request of the service."""
        self._release()
        self._connection.exchange_request(None)
        target = self.head.target[len(self._at.root) :]
        request = self._routes.open_request(self._connection, service, self.head, target, self._now)
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


def _say_keyless(at: ModelPath, what: str = "these models") -> str:
    message = f"{what} cannot be called without a key; send a key as `Authorization: Bearer KEY`"
    return message if at.project else f"{message}; {_OTHER_PROJECTS}"
