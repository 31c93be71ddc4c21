"""LoRA adapters: which of them each replica has loaded, what another one costs, and the calls by
which engines load and unload them.

A replica has `slots` for adapters. If all are full, the adapter that was least recently used, and
that no request uses now, makes room. What the engine lists is the truth: it is read before each
load, because replicas restart, and because other gateways load adapters into the same replicas.

The cost of a load is a time, which `cache_routing` adds to its other costs. It is divided by the
number of requests that use the adapter now, because a copy of a hot adapter serves further ones
soon. So adapters that are seldom used have one copy, and hot ones spread as their replicas fill.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import Any, Protocol, TypeVar

import msgspec

from cavvy.capabilities.language_models.engine_calls import (
    EngineAnswer,
    EngineCallError,
    call_engine,
)
from cavvy.capabilities.serving.gateway.bodies import NO_JSON
from cavvy.capabilities.serving.gateway.config import AdapterTerms, ReplicaAddress, ServiceRoute
from cavvy.domain.values import Struct

_FIRST_LOAD_S = 1.0  # an estimate until a load was measured
# a load costs at least this, because it also takes time, memory and bandwidth from other requests
_LEAST_S = 1.0
_NEWEST = 0.2  # the share of the newest load in the mean
_FAILED_S = 10.0  # a failed load is not repeated at this replica for so long
_COPY = 0.5  # of a load, if another replica has the adapter already
_EVICTED = 0.5  # of a load, if the adapter that makes room was used most recently of all
# so many requests that need no load may pass a waiting one that needs one; so many are looked at.
# More passes save loads only under overload, where they delay the last requests.
_PASSES_MAX, _LOOKAHEAD = 1, 64
_TRIES = 3  # of a load for which another gateway takes the slot
# what an engine may list besides the service's adapters: those of earlier versions of the service.
# Each is unloaded with a call before it makes room, so an engine cannot cause many calls.
_OTHERS_MAX, _NAME_MAX = 100, 256
_TEXT_MAX = 300  # characters of an engine's error
_LISTED = "/v1/models"


class EngineApi(Struct, frozen=True):
    """An engine's routes for adapters, and the status with which it refuses a request for an
    adapter that is not loaded."""

    load: str
    unload: str
    unknown: int


# Other engines load all adapters when they start.
APIS: Mapping[str, EngineApi] = {
    "vllm": EngineApi("/v1/load_lora_adapter", "/v1/unload_lora_adapter", 404),
    "sglang": EngineApi("/load_lora_adapter", "/unload_lora_adapter", 400),
}


class AdapterError(Exception):
    """Raised if a replica cannot load an adapter. The text says why."""


class LoadTimes:
    """The mean time of a load at the replicas of a service."""

    def __init__(self) -> None:
        self.mean_s = _FIRST_LOAD_S
        self._measured = False

    def add(self, taken_s: float) -> None:
        share = _NEWEST if self._measured else 1.0
        self.mean_s += (taken_s - self.mean_s) * share
        self._measured = True

    @property
    def cost_s(self) -> float:
        return max(self.mean_s, _LEAST_S)


class ReplicaAdapters:
    """The adapters of one replica. `loaded` are their sources by their names, the least recently
    used first. The constructor does no I/O."""

    def __init__(self, terms: AdapterTerms, address: ReplicaAddress, times: LoadTimes) -> None:
        self.terms = terms
        self.loads = 0
        self.loaded: dict[str, str] = {}
        self.used_at: dict[str, float] = {}
        self.users: Counter[str] = Counter()  # requests that the replica has
        self.leaving = ""  # an adapter that gets no more requests, because another one needs a slot
        self._address = address
        self.times = times
        self._loading: dict[str, float] = {}  # since when
        self._failed: dict[str, tuple[float, str]] = {}  # when, and why
        self._turn = asyncio.Lock()
        self._is_sure = True  # the replica cannot have restarted since it stated what it has

    # the state

    def change(self, terms: AdapterTerms) -> None:
        """Replace the service's adapters."""
        if terms != self.terms:
            self.terms = terms
            self._failed.clear()
            self._set_loaded(self.loaded)

    def is_ready(self, name: str) -> bool:
        """Return whether a request for this adapter may be sent without a look at the engine."""
        return self._is_sure and self.holds(name)

    def holds(self, name: str) -> bool:
        return name in self.loaded and self.loaded[name] == self.terms.sources.get(name)

    def takes(self, name: str) -> bool:
        """Return whether a request for this adapter may be sent to the replica."""
        if self.users[name]:
            return name != self.leaving
        return len(self.users) < self.terms.slots

    def begin(self, name: str, now: float) -> None:
        self.users[name] += 1
        self._use(name, now)

    def end(self, name: str) -> None:
        if self.users[name] > 1:
            self.users[name] -= 1
            return
        self.users.pop(name, None)
        if name == self.leaving:
            self.leaving = ""

    def make_way(self) -> None:
        """Send no more requests for one of the adapters in use, because a request waits for a slot
        and all adapters are in use."""
        if not self.leaving and len(self.users) >= self.terms.slots:
            self.leaving = min(self.users, key=self.users.__getitem__)

    def doubt(self) -> None:
        """Look at the engine's list before the next request, because the replica has closed a
        connection and may have restarted."""
        self._is_sure = False

    def forget(self) -> None:
        """Forget what is loaded, because the replica has contradicted it."""
        self.loaded.clear()

    def wait_s(self, name: str, now: float) -> float:
        """Return how long a request would wait for this adapter."""
        if self.holds(name):
            return 0.0
        if name in self._loading:
            return max(0.0, self.times.mean_s - (now - self._loading[name]))
        failed_at, _ = self._failed.get(name, (now - _FAILED_S, ""))
        return self.times.cost_s + max(0.0, failed_at + _FAILED_S - now) * 10

    def is_coming(self, name: str) -> bool:
        """Return whether the replica has the adapter or loads it."""
        return name in self._loading or self.holds(name)

    def find_victim(self) -> str:
        """Return the adapter that would make room; "": there is room, or each one is in use."""
        if len(self.loaded) < self.terms.slots:
            return ""
        return next((each for each in self.loaded if each not in self.users), "")

    def _use(self, name: str, now: float) -> None:
        self.used_at[name] = now
        if name in self.loaded:
            self.loaded[name] = self.loaded.pop(name)

    # calls of the engine

    async def load(self, name: str) -> bool:
        """Load an adapter, unless the replica has it; return whether it was loaded now. Raises
        AdapterError, or OSError if the replica accepts no connections."""
        self._refuse_failed(name)
        self._loading.setdefault(name, monotonic())
        try:
            async with self._turn:
                if self.is_ready(name):
                    return False
                self._refuse_failed(name)  # while this call waited
                async with asyncio.timeout(self.terms.load_s):
                    return await self._load(name)
        except AdapterError as error:
            self._failed[name] = (monotonic(), str(error))
            raise
        except TimeoutError:
            text = f"the engine did not load it within {self.terms.load_s:g} s"
            self._failed[name] = (monotonic(), text)
            raise AdapterError(text) from None
        finally:
            self._loading.pop(name, None)

    async def refresh(self) -> None:
        """Read from the engine which adapters it has. If it does not tell, nothing changes."""
        try:
            async with asyncio.timeout(self.terms.load_s), self._turn:
                await self._list()
        except (AdapterError, OSError, TimeoutError):
            return  # the next load reads the list again, and reports what is wrong

    def _refuse_failed(self, name: str) -> None:
        failed_at, why = self._failed.get(name, (0.0, ""))
        if why and monotonic() - failed_at < _FAILED_S:
            raise AdapterError(why)
        self._failed.pop(name, None)

    async def _load(self, name: str) -> bool:
        """Other gateways may load the adapter, or take the slot, at the same time."""
        answer = _AdapterAnswer(0, b"")
        for _ in range(_TRIES):
            await self._list()
            if self.holds(name):
                return False
            source = self.terms.sources.get(name, "")
            if not source:
                raise AdapterError("the service does not have it any longer")
            await self._make_room(name)
            started_at = monotonic()
            load = APIS[self.terms.api].load
            answer = await self._call("POST", load, {"lora_name": name, "lora_path": source})
            if answer.status < 300 or name in answer.list_loaded():
                self.loads += answer.status < 300
                self.loaded[name] = source
                self._use(name, monotonic())
                self.times.add(monotonic() - started_at)
                return True
            await self._list()
            if len(self.loaded) < self.terms.slots:
                break  # it was not for lack of a slot
        if not self.holds(name):
            raise AdapterError(answer.explain(source))
        return True

    async def _make_room(self, name: str) -> None:
        if name in self.loaded:  # from another source
            await self._unload(name)
        while len(self.loaded) >= self.terms.slots and (victim := self.find_victim()):
            await self._unload(victim)

    async def _unload(self, name: str) -> None:
        """Unload an adapter. The engine may have unloaded it already."""
        self.loaded.pop(name, None)  # first, so that no request for it is sent meanwhile
        self.used_at.pop(name, None)
        await self._call("POST", APIS[self.terms.api].unload, {"lora_name": name})

    async def _list(self) -> None:
        answer = await self._call("GET", _LISTED)
        self._is_sure = True
        try:
            rows = msgspec.json.decode(answer.body, type=_Models).data
        except NO_JSON:
            return
        if answer.status != 200:
            return
        sources = self.terms.sources
        known_rows = [each for each in rows if each.id in sources]
        others = (each for each in rows if each.parent is not None and each.id not in sources)
        named = (each for each in others if len(each.id) <= _NAME_MAX)
        found = {
            each.id: each.root if each.root not in (None, each.id) else sources.get(each.id, "")
            for each in (*known_rows, *islice(named, _OTHERS_MAX))
        }
        # what this gateway has loaded keeps its order; the rest was loaded since the last list
        known = {name: source for name, source in self.loaded.items() if name in found}
        more = {name: root or "" for name, root in found.items() if name not in known}
        self._set_loaded(known | more)

    def _set_loaded(self, loaded: Mapping[str, str]) -> None:
        """Order what is loaded: adapters that the service does not have any longer leave first."""
        sources = self.terms.sources
        removed = {name: source for name, source in loaded.items() if name not in sources}
        self.loaded = {**removed, **{name: loaded[name] for name in loaded if name in sources}}

    async def _call(self, method: str, path: str, body: object = None) -> "_AdapterAnswer":
        try:
            answer = await call_engine(self._address, method, path, body)
        except EngineCallError as error:
            self.doubt()
            raise AdapterError(str(error)) from error
        return _AdapterAnswer(answer.status, answer.body)


class _ListedModel(Struct, frozen=True):
    id: str
    parent: str | None = None
    root: str | None = None


class _Models(Struct, frozen=True):
    data: list[_ListedModel]


class _Loaded(Struct, frozen=True):
    loaded_adapters: dict[str, str] = msgspec.field(default_factory=dict)


class _AdapterAnswer(EngineAnswer, frozen=True):
    def list_loaded(self) -> Mapping[str, str]:
        """Return the adapters that SGLang states with each load; some versions do not list them
        among their models."""
        try:
            return msgspec.json.decode(self.body, type=_Loaded).loaded_adapters
        except NO_JSON:
            return {}

    def explain(self, source: str) -> str:
        """Return what the engine says is wrong, without the adapter's source, which clients must
        not learn."""
        try:
            found: Any = msgspec.json.decode(self.body)
        except NO_JSON:
            found = self.body.decode(errors="replace").strip()
        for key in ("error", "message", "error_message", "detail"):
            found = found.get(key) or found if isinstance(found, dict) else found
        text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
        text = text.replace(source, "its source")[:_TEXT_MAX]
        return f"the engine answered {self.status}: {text}"


class AdapterRequest(Protocol):
    """A request that waits for a replica."""

    adapter: str
    passed: int  # how many requests behind it have started before it


T = TypeVar("T")


def choose_waiting(
    waiting: Iterator[T], adapters: ReplicaAdapters, find: Callable[[T], AdapterRequest | None]
) -> T | None:
    """Return the request that a free replica gets: the first one, unless it needs a load and
    another one does not. Few requests pass each other, so none waits much longer for this. `find`
    returns what is known of a request's adapter."""
    first = next(waiting, None)
    asked = None if first is None else find(first)
    if asked is None or not asked.adapter or adapters.holds(asked.adapter):
        return first
    if asked.passed >= _PASSES_MAX:
        return first
    for each in islice(waiting, _LOOKAHEAD):
        if (other := find(each)) is not None and adapters.holds(other.adapter):
            asked.passed += 1
            return each
    return first


def count_waits(
    replicas: Sequence[ReplicaAdapters | None], name: str, now: float
) -> Sequence[float]:
    """Return for each replica how many seconds it costs to send it a request for an adapter."""
    waits = [0.0 if each is None else each.wait_s(name, now) for each in replicas]
    copies = sum(each is not None and each.is_coming(name) for each in replicas)
    users = sum(each.users[name] for each in replicas if each is not None)
    heat = 1 + users / max(copies, 1)
    ages: dict[int, float] = {}
    for at, each in enumerate(replicas):
        if each is None or each.is_coming(name):
            continue
        if victim := each.find_victim():
            ages[at] = now - each.used_at.get(victim, 0.0)
    oldest = max(ages.values(), default=0.0)
    for at, each in enumerate(replicas):
        if each is not None and not each.is_coming(name):
            more = _COPY if copies else 0.0
            if at in ages:
                more += _EVICTED * (1 - ages[at] / max(oldest, 1e-9) / 2)
            waits[at] = (waits[at] + more * each.times.cost_s) / heat
    return waits


def find_refusal(route: ServiceRoute) -> int:
    """Return the status with which replicas refuse requests for adapters that are not loaded."""
    api = None if route.adapters is None else APIS.get(route.adapters.api)
    return 0 if api is None else api.unknown


def write_fields(terms: AdapterTerms, name: str) -> bytes:
    """Return what a body needs besides its `model` so that the engine uses the adapter: members of
    a JSON object, each with a comma."""
    if terms.api == "sglang":
        return b'"lora_path":%b,' % msgspec.json.encode(name)
    if terms.api == "llama.cpp":
        return b'"lora":[{"id":%d,"scale":1.0}],' % list(terms.sources).index(name)
    return b""
