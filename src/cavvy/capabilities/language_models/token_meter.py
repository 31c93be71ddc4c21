"""Counts the tokens of a request to a language model while its answer passes.

The meter stands between the replica and the receiver of the response. It counts tokens as soon as
the engine states them, before it passes on the bytes that state them, so a killed gateway has
counted each answer that it had forwarded. If a client asks for a stream without its usage, the
meter asks the engine for it and removes the event that states it. If the engine refuses this
question, the meter sends the request again as it was. What an answer does not state, in a form that
the meter knows, counts by an estimate, as does the delivered part of answers that end early: an
event is a token, and so are four bytes of the request, or of an answer that is no stream.
"""

import re
from math import inf
from operator import add, sub
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from cavvy.capabilities.language_models.adapters import find_refusal
from cavvy.capabilities.language_models.affinity import find_affinity, make_affinity
from cavvy.capabilities.language_models.prompts import BYTES_PER_TOKEN
from cavvy.capabilities.language_models.response_holders import (
    UNREADABLE,
    ResponseHolders,
    ResponseIdReader,
    read_response_id,
)
from cavvy.capabilities.language_models.token_usage import (
    GENERATE,
    LLAMA,
    OLLAMA,
    USAGE,
    UsageReader,
)
from cavvy.capabilities.serving.gateway.answer_times import AnswerTimes, FirstToken
from cavvy.capabilities.serving.gateway.bodies import NO_JSON
from cavvy.capabilities.serving.gateway.client_keys import KeyLimit
from cavvy.capabilities.serving.gateway.config import ServiceRoute
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.extensions import ServiceMeters
from cavvy.capabilities.serving.gateway.heads import HeadError, ResponseHead
from cavvy.capabilities.serving.gateway.kept_counts import TokenCount
from cavvy.capabilities.serving.gateway.own_answers import (
    CUT,
    ErrorForm,
    OwnAnswer,
    write_error_event,
)
from cavvy.capabilities.serving.gateway.rates import make_plain
from cavvy.capabilities.serving.gateway.seams import PassingSink, ResponseSink
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.capabilities.serving.loads import TokenTimes
from cavvy.domain.ledger import TokenUse
from cavvy.domain.values import Struct

_OPTIONS = b'"stream_options":{"include_usage":true},'
_ENCODINGS = re.compile(rb"(?i)\r\naccept-encoding:[^\r]*")
_CODED = re.compile(rb"(?i)\r\ncontent-encoding:[ \t]*(?!identity)")
_MEDIA = re.compile(rb"(?i)\r\ncontent-type:[ \t]*(?:(text/event-stream)|application/[^;\r]*json)")
_REQUEST_ID = re.compile(rb"(?i)\r\nx-request-id:[ \t]*([^\r]*)")
_NO_CHOICES = re.compile(rb'"choices"\s*+:\s*+\[\s*+\]')
_EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n)", re.DOTALL)
_ENDS = (b"\n\n", b"\r\n\r\n")  # of events
_EVENT_MAX = 65_536  # bytes of an event that are held until it is complete
_CHOICES_MAX, _ASKED_MAX = 128, 1 << 40  # what a request can ask for
_REFUSALS = (400, 422)  # of a question that the engine does not know
_REPEATS_MAX = 5  # of a request whose adapter another gateway has unloaded


class TokenRoute(Struct, frozen=True, kw_only=True):
    """A route of engines. `token` marks each event of a stream that delivers a part of the text."""

    name: bytes = USAGE  # the key that states tokens
    token: bytes = b'"delta"'
    asks: bool = False  # whether streams state their usage only if the request asks for it
    holds: bool = False  # whether the replica keeps what it has answered
    # whether prompts and answers of which a language model states no tokens are estimated
    reads: bool = True
    writes: bool = True
    errors: ErrorForm = ErrorForm.OPENAI  # of events that end a stream


_USAGE_ONLY = TokenRoute(writes=False)
_CHAT = TokenRoute(asks=True)
_TEXT = TokenRoute(token=b'"text"', asks=True)
_LLAMA = TokenRoute(name=LLAMA, token=b'"content"')
_GENERATE = TokenRoute(name=GENERATE, token=b'"token"')
_OLLAMA = TokenRoute(name=OLLAMA)
_OTHER = TokenRoute(token=b"data:", reads=False, writes=False)  # an event is a token
_ROUTES = {
    b"/chat/completions": _CHAT,
    b"/completions": _TEXT,
    b"/responses": TokenRoute(token=b'.delta"', holds=True, errors=ErrorForm.RESPONSES),
    b"/messages": TokenRoute(token=b'"content_block_delta"', errors=ErrorForm.ANTHROPIC),
    b"/completion": _LLAMA,
    b"/infill": _LLAMA,
    b"/generate": _GENERATE,
    b"/generate_stream": _GENERATE,
    b"/api/chat": _OLLAMA,
    b"/api/generate": _OLLAMA,
    **dict.fromkeys(
        (
            *(b"/embeddings", b"/rerank", b"/score", b"/audio/transcriptions", b"/pooling"),
            *(b"/audio/translations", b"/images/generations", b"/images/edits", b"/embed"),
        ),
        _USAGE_ONLY,
    ),
}
ROUTES = {
    version + path: route for version in (b"", b"/v1", b"/v2") for path, route in _ROUTES.items()
}


class _EngineRequest(Struct, frozen=True):
    """What the meter reads in a request's body."""

    model: Any = None
    stream: Any = None
    stream_options: Any = msgspec.UNSET
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    previous_response_id: Any = None

    @property
    def completion(self) -> int:
        """The number of tokens that the request asks for at most, or 0 if it does not say."""
        limits = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens)
        most = next((each for each in limits if type(each) is int and each > 0), 0)
        times = self.n if type(self.n) is int and 0 < self.n <= _CHOICES_MAX else 1
        return min(most * times, _ASKED_MAX)


_decode = msgspec.json.Decoder(_EngineRequest).decode


class EngineTerms(ServiceMeters):
    """What meters know of the engine of a service."""

    counts_tokens = True

    def __init__(self, route: ServiceRoute, hold_bytes: int, state: Path | None = None) -> None:
        self.models = route.models
        # whether a response may be another key's: what it continues must then be known
        self.shared = len(route.keys) > 1
        self.base_models = len(route.models) - len(route.adapters.sources if route.adapters else ())
        self.hold_bytes = hold_bytes  # of a body that is read before a replica gets it
        # whether keys may use only so many tokens
        self.limited = any(key.tokens_per_min is not None for key in route.keys)
        self.times = AnswerTimes(
            inf if route.ttft_s is None else route.ttft_s,
            inf if route.token_gap_s is None else route.token_gap_s,
        )
        self.asks_usage = True  # of streams, because the engine has not refused to state it
        self.holders = ResponseHolders(state if route.models else None, route.name)
        self._route = route

    def open(self, exchange: Exchange, target: bytes, model: str = "") -> None:
        """Count the tokens of a request if its target is a route of engines, or any route if tokens
        are limited: engines have further routes for prompts, such as vLLM's `/invocations`. A
        request for a response that a replica keeps gets the ID of this response.
        """
        target = make_plain(target)
        if b"/responses/" in target and (response_id := read_response_id(target)):
            make_affinity(exchange).response_id = response_id
        if exchange.head.method != b"POST":
            return
        route = ROUTES.get(target.partition(b"?")[0], _OTHER if self.limited else None)
        if route is not None and exchange.entry.route.batch is None:
            if route is not _OTHER and self.models:  # nothing remains of what a lost replica did
                exchange.permit_repeat()
            TokenMeter(exchange, self, route, model)

    def derive(self, model: str) -> "EngineTerms":
        terms = EngineTerms(self._route, 0)
        terms.models, terms.base_models = (model,), 1
        return terms

    def may_take(self, exchange: Exchange) -> bool:
        """Return whether the request continues no response, or one of this API and its key."""
        affinity = find_affinity(exchange)
        made = "" if affinity is None else affinity.response_id
        return not made or bool(self.holders.owns(exchange.key_id, made))

    def describe(self) -> TokenTimes:
        return self.times.describe()

    def adopt(self, old: "EngineTerms") -> None:
        limits_s, self.times = self.times.limits_s, old.times
        self.times.limits_s = limits_s
        self.holders = old.holders

    def remove(self) -> None:
        self.holders.remove()


class TokenMeter(PassingSink):
    """The receiver of a response between the replica and the actual receiver `sink`."""

    def __init__(
        self, exchange: Exchange, engine: EngineTerms, route: TokenRoute, model: str
    ) -> None:
        self._exchange = exchange
        self._sink: ResponseSink = exchange.sink
        self._engine = engine
        self._route = route
        self._asked: object = model  # the model that the client names
        self._model = self._name_model(model)
        self._prompt = self._completion = 0  # estimated
        self._limit: KeyLimit | None = None
        self._limited = 0  # the tokens that are counted in the limit
        self._ready = self._wanted = False
        self._asks_stream = False
        self._work: ReplicaWork | None = None  # of the replica that computes the prompt of a stream
        self._replica = ""  # that has the request
        self._former: tuple[bytes, list[bytes]] | None = None  # head and body without the question
        self._withdrawn = False
        self._whole: tuple[bytes, list[bytes]] | None = None  # if it may be sent again unchanged
        self._repeats = 0
        self._again = False  # the response is dropped, and the request is sent again
        self._events: _WholeEvents | None = None  # also removes the answer to the question
        self._begin_try()
        exchange.sink = exchange.meter = self
        # compressed answers cannot be searched
        exchange.out_head = _ENCODINGS.sub(b"\r\nAccept-Encoding: identity", exchange.out_head)

    def _begin_try(self) -> None:
        self._count: TokenCount | None = None
        self._first: FirstToken | None = None
        self._reader = UsageReader(self._route.name)
        self._id_reader = ResponseIdReader() if self._route.holds else None
        self._counted = TokenUse()
        self._reads = self._streams = False
        self._delivered = 0  # tokens since the last statement of the engine
        self._seen = 0  # bytes of the answer
        self._cut = b""  # the end of the last bytes, where a token's mark may have begun
        self._open = (0, 0)  # what is counted as begun
        self._total = TokenUse()

    # what the queue and the pool call

    def is_read(self) -> bool:
        """Return whether the queue may take the request. The meter reads bodies in JSON that the
        gateway can hold.
        """
        exchange = self._exchange
        if self._ready:
            return True
        if not exchange.body_done and _holds_json(exchange):
            if not self._wanted:
                self._wanted = True
                self._sink.want_body()  # of a client that waits for "100 Continue"
            if exchange.held_bytes <= self._engine.hold_bytes:
                return False
        self._ready = True
        if exchange.body_done and exchange.held:
            self._read_body(exchange)
            return True
        self._hide_response()
        if not exchange.head.get_header(b"content-type").lower().startswith(b"multipart/"):
            self._prompt = max(exchange.head.length, exchange.held_bytes) // BYTES_PER_TOKEN
        return True

    @property
    def asked(self) -> TokenUse:
        return TokenUse(prompt=self._prompt, completion=self._completion)

    @property
    def used(self) -> TokenUse:
        return self._total

    def move(self, meters: EngineTerms, model: str = "") -> None:
        """Count the answer of another engine from now on, which has not refused any question."""
        self._engine, self._withdrawn = meters, False
        self._model = self._name_model(model or self._asked)

    def limit_by(self, limit: KeyLimit) -> None:
        self._limit, self._limited = limit, self._prompt + self._completion

    def begin(self, work: ReplicaWork) -> None:
        """Prepare for the response of a replica, which is about to get the request."""
        exchange, affinity = self._exchange, find_affinity(self._exchange)
        adapter = "" if affinity is None else affinity.adapter
        if affinity and adapter and exchange.body_done and self._repeats < _REPEATS_MAX:
            again = self._repeats and affinity.blames
            self._whole = None if again else (exchange.out_head, list(exchange.held))
        self._begin_try()
        self._replica = work.replica
        if self._asks_stream:
            self._end_prompt()
            self._work = work
            work.change_prompts(1, monotonic())
        self._count = work.find_tokens(self._exchange.key_id, self._model)

    def withdraw(self) -> None:
        """Restore the request as the client sent it, because the engine may refuse the question for
        its usage."""
        exchange, former = self._exchange, self._former
        affinity = find_affinity(exchange)
        if affinity is not None and affinity.misses:  # the adapter is the reason
            former, self._repeats = self._whole, self._repeats + 1
            affinity.misses = False
        else:
            self._former = self._events = None
            self._withdrawn = True
        self._whole = None
        if former is not None:
            exchange.out_head, exchange.held = former
            exchange.held_bytes = sum(map(len, exchange.held))
        exchange.spoiled = exchange.responding = False

    def close(self) -> None:
        """Count what was delivered of an answer that ended early, and the prompt of a request whose
        client has left a replica that computes it. Clients of OpenAI leave at `[DONE]`, maybe
        before the replica has ended the answer: its times count if the engine has stated its
        tokens.
        """
        if self._first is not None and self._reader.use is not None:
            self._add_times(self._first)
        self._end_prompt()
        prompt, completion = self._open
        begun = self._reads or not self._exchange.responding
        if self._exchange.gone and begun and self._count is not None and not self._total:
            prompt = self._prompt
        if prompt or completion:
            more = TokenUse(prompt=prompt, completion=completion, estimated=prompt + completion)
            self._set_open(0, 0)
            self._add(more)
        self._reads = False
        self._correct_limit()

    # what the replica's connection calls

    @property
    def passes_chunks(self) -> bool:
        asks = self._events is not None and self._events.drops
        return not (asks or self._again) and self._sink.passes_chunks

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        exchange = self._exchange
        if self._whole is not None and head.status == find_refusal(exchange.entry.route):
            make_affinity(exchange).misses = self._again = exchange.spoiled = True
            return
        self._whole = None
        if self._former is not None and head.status in _REFUSALS:
            self._again = exchange.spoiled = True
            return
        if self._withdrawn and head.status < 300:
            self._engine.asks_usage = False
        self._begin_answer(head)
        if payload:
            payload = self._see(payload)
        if done:
            payload += self._finish()
        if self._limit is not None:
            more += self._limit.write_fields(monotonic())
        self._sink.respond(head, payload, done, more)

    def send(self, payload: bytes, done: bool) -> None:
        if self._again:
            return
        if payload:
            payload = self._see(payload)
        if done:
            payload += self._finish()
        if payload or done:
            self._sink.send(payload, done)

    def pass_chunk(self, data: bytes) -> None:
        if self._reads:
            payload = data[data.index(b"\n") + 1 : -2]
            passed = self._see(payload)
            if passed is not payload:  # a line is held until it is complete
                if passed:
                    self._sink.send(passed, False)
                return
        self._sink.pass_chunk(data)

    def answer(self, answer: OwnAnswer) -> None:
        self._correct_limit()
        self._sink.answer(answer)

    def cut(self) -> None:
        self.close()
        if not (self._streams and self._sink.passes_chunks):
            self._sink.cut()
            return
        exchange = self._exchange
        if exchange.span is not None:
            exchange.span.end("cut")
        found = _REQUEST_ID.search(exchange.out_head)
        request_id = found[1].decode("latin-1") if found else ""
        # the empty line ends an event whose last lines are missing
        event = b"\n" + write_error_event(CUT, request_id, self._route.errors)
        self._sink.send(event, True)
        self._sink.end()

    def end(self) -> None:
        if self._again:
            self._again = False
            return
        self.close()
        self._sink.end()

    # the request

    def _name_model(self, model: object) -> str:
        """Return the model by which tokens are counted. Clients cannot add names."""
        engine = self._engine
        if model in engine.models:
            return str(model)
        return engine.models[0] if engine.base_models == 1 else ""

    def _read_body(self, exchange: Exchange) -> None:
        try:
            body = exchange.read_body() or b""
            self._prompt = len(body) // BYTES_PER_TOKEN
            asked = _decode(body)
        except (HeadError, *NO_JSON):
            self._hide_response()
            return  # the engine says what is wrong
        self._asked, self._model = asked.model, self._name_model(asked.model)
        self._completion = asked.completion
        self._asks_stream = asked.stream is True
        if self._route.holds and isinstance(asked.previous_response_id, str):
            make_affinity(exchange).response_id = asked.previous_response_id
        if asked.stream is not True or asked.stream_options is not msgspec.UNSET:
            return
        if self._route.asks and self._engine.asks_usage:
            self._ask(exchange, body)

    def _hide_response(self) -> None:
        """Treat a request whose body the gateway cannot read as one that continues a response of
        which nothing is known: engines may read what the gateway does not, such as NaN."""
        if self._route.holds and self._engine.shared:
            make_affinity(self._exchange).response_id = UNREADABLE

    def _ask(self, exchange: Exchange, body: bytes) -> None:
        self._former = (exchange.out_head, exchange.held)
        at = body.index(b"{") + 1
        exchange.replace_body(b"".join((body[:at], _OPTIONS, body[at:])))
        self._events = _WholeEvents(drops=True)

    # the answer

    def _begin_answer(self, head: ResponseHead) -> None:
        media = _MEDIA.search(head.fields) if 200 <= head.status < 300 else None
        if media is None or _CODED.search(head.fields):
            self._events = None
            return
        self._reads, self._streams = True, bool(media[1])
        if not self._streams or head.length >= 0:
            self._events = None
        elif self._events is None:
            self._events = _WholeEvents(drops=False)
        if self._streams:
            self._set_open(self._prompt, 0)
        if self._reader.read_head(head.fields):
            self._count_stated()

    def _see(self, data: bytes) -> bytes:
        """Count what the next bytes state; return those that are passed on."""
        if not self._reads:
            return data
        self._seen += len(data)
        if self._id_reader is not None and (made := self._id_reader.feed(data)) is not None:
            self._id_reader = None
            if made:
                self._engine.holders.add(made, self._replica, self._exchange.key_id)
        tokens = self._count_tokens(data) if self._streams else 0
        if tokens and self._first is None and self._work is not None:
            exchange, work = self._exchange, self._work
            self._first = FirstToken(
                exchange.arrived_at, exchange.started_at, work, self._end_prompt()
            )
        if self._reader.feed(data):
            self._count_stated()
        elif tokens:
            self._delivered += tokens
            self._set_open(self._open[0], self._delivered)
        return data if self._events is None else self._events.feed(data)

    def _count_tokens(self, data: bytes) -> int:
        mark = self._route.token
        whole = self._cut + data
        self._cut = b"" if data.endswith(b"\n") else whole[1 - len(mark) :]
        return whole.count(mark)

    def _finish(self) -> bytes:
        """Count the tokens of an answer that is complete; return bytes that were held back."""
        if self._first is not None:
            self._add_times(self._first)
        self._estimate_rest()
        self.close()
        return b"" if self._events is None else self._events.flush()

    def _estimate_rest(self) -> None:
        """Count what the engine has not stated of a complete answer as begun."""
        route, reader = self._route, self._reader
        prompt, completion = self._open
        if self._reads and not self._streams and self._engine.models:
            prompt = self._prompt if route.reads else 0
            completion = self._seen // BYTES_PER_TOKEN if route.writes else 0
        if reader.use is not None:
            prompt = 0  # an engine that states something means it all, as events of Anthropic do
            completion = completion if reader.completion is None and route.writes else 0
        self._set_open(prompt, completion)

    def _end_prompt(self) -> float:
        """The replica no longer computes the prompt; return the time."""
        now = monotonic()
        if self._work is not None:
            self._work.change_prompts(-1, now)
            self._work = None
        return now

    def _add_times(self, first: FirstToken) -> None:
        use = self._reader.use
        prompt = self._prompt if use is None or not use.prompt else use.prompt - use.cached
        completion = self._total.completion + self._open[1]
        self._engine.times.add(prompt, completion, first, monotonic())
        self._first = None

    def _count_stated(self) -> None:
        use, counted = self._reader.use, self._counted
        if use is None:
            return
        self._delivered = 0
        self._set_open(self._open[0] if self._reader.prompt is None else 0, 0)
        self._counted = counted.combine(max, use)
        self._add(self._counted.combine(sub, counted))

    def _correct_limit(self) -> None:
        """Replace the estimate in the key's limit by the tokens that were counted or, if an answer
        states none, by an estimate of them."""
        if self._limit is not None:
            used = self._total.prompt + self._total.completion
            if self._seen and not used:
                used = self._prompt + self._seen // BYTES_PER_TOKEN
            self._limit.correct(used - self._limited)
            self._limited = used

    def _add(self, use: TokenUse) -> None:
        self._total = self._total.combine(add, use)
        if self._count is not None:
            self._count.add(use)

    def _set_open(self, prompt: int, completion: int) -> None:
        before, self._open = self._open, (prompt, completion)
        if self._count is not None:
            self._count.begin(prompt - before[0], completion - before[1])


class _WholeEvents:
    """Holds the end of a stream until it is a whole line, so that an event can follow if the
    replica is lost. With `drops`, holds whole events, and removes those that state usage and
    nothing else.
    """

    def __init__(self, *, drops: bool) -> None:
        self.drops = drops
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what is complete of the held and the next bytes."""
        drops = self.drops
        if self._held:
            data, self._held = self._held + data, b""
        elif data.endswith(b"\n\n" if drops else b"\n") and not (
            drops and _NO_CHOICES.search(data)
        ):
            return data
        if drops:
            end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
        else:
            end = data.rfind(b"\n") + 1
        data, rest = data[:end], data[end:]
        if drops and _NO_CHOICES.search(data):
            data = b"".join(each for each in _EVENT.findall(data) if not _states_usage(each))
        if len(rest) > _EVENT_MAX:
            return data + rest
        self._held = rest
        return data

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held


def _states_usage(event: bytes) -> bool:
    return bool(_NO_CHOICES.search(event)) and UsageReader().feed(event)


def _holds_json(exchange: Exchange) -> bool:
    media = exchange.head.get_header(b"content-type").partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json")
