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

import msgspec

from cavvy.capabilities.language_models.model_list import MODEL, MODELS, answer_rows, describe_model
from cavvy.capabilities.language_models.response_holders import PATH as RESPONSE
from cavvy.capabilities.language_models.response_holders import read_response_id
from cavvy.capabilities.language_models.scorer import ModelScorer
from cavvy.capabilities.language_models.upload_form import find_boundary
from cavvy.capabilities.serving.gateway.bodies import NO_JSON
from cavvy.capabilities.serving.gateway.config import USUAL_PROJECT, ClientKey, GatewayLimits
from cavvy.capabilities.serving.gateway.heads import RequestHead
from cavvy.capabilities.serving.gateway.other_origins import (
    is_preflight,
    may_call,
    write_permission,
)
from cavvy.capabilities.serving.gateway.own_answers import ANSWERS, Answer, AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.seams import ClientRequest, OpenRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.domain.values import Struct

_PATH = re.compile(rb"(?:/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?))?(/v1/[^?]*)")
# the routes for files and batches
_STORED = re.compile(rb"/v1/(?:files|batches)(?:/[^/]+(?:/(?:content|cancel))?)?/?")
_STORED_METHODS = (b"GET", b"HEAD", b"POST", b"DELETE", b"OPTIONS")  # also of responses
_CALLS = frozenset(
    {
        b"/v1/audio/speech",
        b"/v1/audio/transcriptions",
        b"/v1/audio/translations",
        b"/v1/chat/completions",
        b"/v1/classify",
        b"/v1/completions",
        b"/v1/detokenize",
        b"/v1/embeddings",
        b"/v1/images/edits",
        b"/v1/images/generations",
        b"/v1/images/variations",
        b"/v1/messages",
        b"/v1/messages/count_tokens",
        b"/v1/moderations",
        b"/v1/pooling",
        b"/v1/rerank",
        b"/v1/responses",
        b"/v1/responses/compact",
        b"/v1/responses/input_tokens",
        b"/v1/score",
        b"/v1/tokenize",
    }
)
_OTHER_PROJECTS = (
    f"without a key, /v1 has only the models of the project {USUAL_PROJECT}; "
    "for the models of another project, use its base URL /PROJECT/v1"
)
_UNKNOWN_KEY = OwnAnswer(
    401,
    AnswerCode.NO_KEY,
    "no service knows this key; it may be revoked, expired, or the key of a service that has ended "
    "or belongs to another project; send keys as `Authorization: Bearer KEY`",
)
# of all bodies whose model is unknown; if they hold more, no body is read beyond `hold_bytes`
_UNROUTED_BYTES_MAX = 256 << 20
# A string that is not closed matches up to the end of the body. Otherwise, the search would begin
# again at each quotation mark inside the string.
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.?)*+)("(\s*:)?)?|[{}\[\]]', re.DOTALL)
_MODEL_FIELD = re.compile(rb'(?i)\r\ncontent-disposition:[^\r]*;\s*name="?model"?(?:;|\r|$)')
_FIELDS_MAX = 1000  # of a form before `model`

Open = Callable[[ClientRequest, ServiceQueue], OpenRequest | Answer]
OpenStored = Callable[[ClientRequest, tuple[str, ...]], OpenRequest | Answer]


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
    if found[2] == MODELS or found[2].startswith(MODEL):
        handled = head.method in (b"GET", b"HEAD", b"OPTIONS")
    elif _STORED.fullmatch(found[2]) or RESPONSE.fullmatch(found[2]):
        handled = head.method in _STORED_METHODS
    else:
        handled = found[2] in _CALLS and head.method in (b"POST", b"OPTIONS")
    if not handled:
        return None
    return ModelPath(found[1].decode() if found[1] else None, found[2])


def explain_path(head: RequestHead) -> OwnAnswer | None:
    """Return the answer to a request below /v1 that no route for models handles, or None for other
    paths."""
    found = _PATH.match(head.target)
    if found is None:
        return None
    if found[2] in _CALLS:
        allowed = b"Allow: POST, OPTIONS\r\n"
        return OwnAnswer(405, AnswerCode.BAD_REQUEST, "this route takes POST only", fields=allowed)
    why = "this route is none that finds its service by the `model` of the body"
    hint = "put the service's path before /v1: /PROJECT/SERVICE/v1/..."
    return OwnAnswer(404, AnswerCode.NO_SERVICE, f"{why}; {hint}")


class _Body(Struct, frozen=True):
    model: str


_decode = msgspec.json.Decoder(_Body).decode


class _Reach(Struct, frozen=True):
    """What a request may call: the services that know its key, and services of `projects` that need
    no key."""

    projects: frozenset[str]
    known: tuple[ServiceQueue, ...] = ()


class ModelRoutes:
    """Maps each model to the services that serve it."""

    def __init__(self, admit: Open, limits: GatewayLimits, open_stored: OpenStored) -> None:
        self.admit = admit
        self._open_stored = open_stored  # requests for files and batches, with their owners
        self.limits = limits
        self.held_bytes = 0  # of all bodies whose model is not known yet
        self.set_services(())

    def set_services(self, services: Iterable[ServiceQueue]) -> None:
        every = tuple(services)
        self._services: dict[str, list[ServiceQueue]] = {}
        for service in every:
            for name in service.route.models:
                self._services.setdefault(name, []).append(service)
        self._keyed = [each for each in every if each.keys]
        self._keyless = [each for each in every if each.route.models and not each.keys]
        self._open = {each.route.project for each in every if each.route.models and not each.keys}
        self._named = [each.route for each in every if each.route.models and each.route.origins]
        # whether a key may help. Whether this holds for a single project is not disclosed.
        self._may_need_key = any(each.route.models for each in self._keyed)

    def open_request(
        self, request: ClientRequest, at: ModelPath, clock: float
    ) -> OpenRequest | Answer | None:
        """Return the open request of a model, or the answer to the request, or None if the request
        is handled like one of an unknown path.
        """
        head = request.head
        # whether pages of any origin may call the route: each of its services needs a key
        shares = self._may_need_key and (at.project or USUAL_PROJECT) not in self._open
        request.shares = shares and bool(head.origin)
        if head.method == b"OPTIONS":
            asked = at.project or USUAL_PROJECT
            named = (each for each in self._named if each.project == asked)
            permitted = shares or any(may_call(head, each, False, ()) for each in named)
            if not (permitted and is_preflight(head)):
                return None
            request.shares = False  # the permission is written already
            return write_permission(head)
        reach = self.find_reach(at, head, clock)
        if reach is None:
            return _UNKNOWN_KEY
        if _STORED.fullmatch(at.path):
            return self._open_file(request, at, reach, clock)
        if RESPONSE.fullmatch(at.path):
            return self._open_response(request, at, reach)
        if head.method != b"POST":
            return self._describe(at, reach)
        if shares and not reach.known:  # the body is not read
            return OwnAnswer(401, AnswerCode.NO_KEY, _say_keyless(at))
        if head.length == 0:
            return _bad_request("the request has no body with a `model`")
        return ModelRequest(self, request, at)

    def find_reach(self, at: ModelPath, head: RequestHead, clock: float) -> _Reach | None:
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

    def find(self, name: str, reach: _Reach) -> list[ServiceQueue]:
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

    def _open_response(
        self, request: ClientRequest, at: ModelPath, reach: _Reach
    ) -> OpenRequest | Answer:
        """Open a request for a response that a replica has made: at the service whose replica holds
        it, or at the only service that the request may call."""
        open_ones = (each for each in self._keyless if each.route.project in reach.projects)
        services = [*(each for each in reach.known if each.route.models), *open_ones]
        if not services and self._may_need_key:
            return OwnAnswer(401, AnswerCode.NO_KEY, _say_keyless(at))
        made = read_response_id(at.path)
        found = [each for each in services if _holds(each, made)] or services
        if len(found) != 1:
            where = f"ask its service, such as at {at.root or '/PROJECT'}/SERVICE/v1/responses/ID"
            text = f"no replica is known to hold the response {made[:80]!r}; {where}"
            return OwnAnswer(404, AnswerCode.NO_OBJECT, text)
        request.target = request.below = request.head.target[len(at.root) :]
        return self.admit(request, found[0])

    def _open_file(
        self, request: ClientRequest, at: ModelPath, reach: _Reach, clock: float
    ) -> OpenRequest | Answer | None:
        """Open a request for files or batches. They belong to keys, or to the project whose models
        need no key.
        """
        head, services = request.head, reach.known
        owners = tuple(f"{each.route.name}/{each.keys.name(head, clock)}" for each in services)
        if not services:
            services = tuple(s for s in self._keyless if s.route.project in reach.projects)
            owners = tuple(f"/{each}" for each in reach.projects)
        if not services:
            needs_key = self._may_need_key
            return OwnAnswer(401, AnswerCode.NO_KEY, _say_keyless(at)) if needs_key else None
        is_of_page = head.origin or head.fetch_site
        if is_of_page and not all(may_call(head, s.route, bool(s.keys), ()) for s in services):
            text = "a page of another site may not use the files and batches of these models"
            return OwnAnswer(403, AnswerCode.OTHER_ORIGIN, text)
        request.shares = bool(head.origin)
        return self._open_stored(request, owners)

    def find_owned(
        self, owners: tuple[str, ...], model: str
    ) -> tuple[ServiceQueue, ClientKey | None] | None:
        """Return the service with a model for the owners of a batch, and the key of its requests.
        Return None if no service or several services may be meant.
        """
        clock, keys = time.time(), {}
        for each in self._keyed:
            start = f"{each.route.name}/"
            ids = [owner[len(start) :] for owner in owners if owner.startswith(start)]
            found = [key for name in ids if (key := each.keys.recall(name, clock))]
            if found:
                keys[each] = found[0]
        projects = {owner[1:] for owner in owners if owner.startswith("/")}
        projects |= {each.route.project for each in keys}
        services = self.find(model, _Reach(frozenset(projects), tuple(keys)))
        return (services[0], keys.get(services[0])) if len(services) == 1 else None

    def explain_missing(self, name: str, at: ModelPath, reach: _Reach) -> OwnAnswer:
        """Return the answer for a model that the request may not call."""
        if reach.known:
            message = f"the key may not use a model {name!r}; see {at.root}/v1/models"
        elif self._may_need_key:
            return OwnAnswer(401, AnswerCode.NO_KEY, _say_keyless(at, f"the model {name!r}"))
        else:
            message = f"no service has the model {name!r}; see {at.root}/v1/models"
            message += "" if at.project else f"; {_OTHER_PROJECTS}"
        return OwnAnswer(404, AnswerCode.NO_MODEL, message)

    def _describe(self, at: ModelPath, reach: _Reach) -> Answer:
        """Answer with the models that the request may use, or with one of them."""
        found = ((each, self.find(each, reach)) for each in sorted(self._services))
        rows = {name: describe_model(name, each[0].route) for name, each in found if each}
        return answer_rows(at.path, rows, at.root)

    def may_hold(self, size: int, length: int) -> bool:
        """Return whether the gateway may read more of a request's body. `size` is the number of
        bytes that have arrived, and `length` is the length in the request's head.
        """
        limits = self.limits
        if size < limits.hold_bytes:
            return True
        return max(size, length) <= limits.model_bytes and self.held_bytes <= _UNROUTED_BYTES_MAX


class ModelRequest:
    """A request that Cavvy can assign to a service only after it has read the `model` in the
    request's body.
    """

    held_bytes = 0  # the connection never stops reading: `may_hold` limits what is held

    def __init__(self, routes: ModelRoutes, request: ClientRequest, at: ModelPath) -> None:
        self._routes = routes
        self._request = request
        self._at = at
        self._held: list[bytes] = []
        self._size = 0
        self._searched = False  # whether the first bytes of the body do not name a model

    def begin(self) -> None:
        self._request.sink.want_body()

    def feed(self, payload: bytes, done: bool) -> OpenRequest | Answer | None:
        self._held.append(payload)
        self._size += len(payload)
        self._routes.held_bytes += len(payload)
        first = self._routes.limits.hold_bytes
        if not done and (self._searched or self._size < first):
            return self._refuse_late(first)
        body, self._searched = b"".join(self._held), True
        boundary = find_boundary(self._request.head.get_header(b"content-type"))
        name = read_form(body, boundary) if boundary else read_model(body, done)
        if name is not None:
            return self._select(name, body, done)
        if done:
            wrong = "the body is neither JSON with a string `model` nor a form with `model`"
            return _bad_request(f"{wrong}; JSON is UTF-8, nested less than 1,000 levels deep")
        return self._refuse_late(first)

    def abort(self) -> None:
        self._release()

    def _release(self) -> None:
        self._held.clear()
        self._routes.held_bytes -= self._size
        self._size = 0

    def _select(self, name: str, body: bytes, done: bool) -> OpenRequest | Answer:
        """Return the request of the service that has the model. Keys may have been revoked while
        the body arrived."""
        request = self._request
        reach = self._routes.find_reach(self._at, request.head, time.time())
        if reach is None:
            return _UNKNOWN_KEY
        found = self._routes.find(name, reach)
        if not found:
            return self._routes.explain_missing(name, self._at, reach)
        if len(found) > 1:
            why = f"several services of the project have the model {name!r}; use a service's URL"
            return OwnAnswer(404, AnswerCode.NO_MODEL, why)
        self._release()
        request.model = name
        request.target = request.below = request.head.target[len(self._at.root) :]
        opened = self._routes.admit(request, found[0])
        if isinstance(opened, ANSWERS):
            return opened
        if refused := opened.feed(body, done):
            opened.abort()
            return refused
        return opened

    def _refuse_late(self, first: int) -> OwnAnswer | None:
        """Refuse a request that names no model in the part of its body that the gateway holds."""
        if self._routes.may_hold(self._size, self._request.head.length):
            return None
        text = f"the body's first {first} bytes have no `model`; move `model` to the start"
        return _bad_request(text)


def read_model(body: bytes, whole: bool) -> str | None:
    """Return the string `model` of a JSON object, of which perhaps only the beginning has
    arrived."""
    if whole:
        try:
            return _decode(body).model
        except NO_JSON:
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
            except NO_JSON:
                return None
        named = depth == 1 and bool(token[3]) and token[1] == b"model"
    return None


def read_form(body: bytes, boundary: bytes) -> str | None:
    """Return the field `model` of a form, of which perhaps only the beginning has arrived."""
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary, _FIELDS_MAX + 1)
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        if _MODEL_FIELD.search(head):
            return value.decode(errors="replace")
    return None


def _bad_request(text: str) -> OwnAnswer:
    return OwnAnswer(400, AnswerCode.BAD_REQUEST, text)


def _say_keyless(at: ModelPath, what: str = "these models") -> str:
    message = f"{what} cannot be called without a key; send a key as `Authorization: Bearer KEY`"
    return message if at.project else f"{message}; {_OTHER_PROJECTS}"


def _holds(service: ServiceQueue, response_id: str) -> bool:
    scorer = service.scorer
    return isinstance(scorer, ModelScorer) and scorer.holds(response_id)
