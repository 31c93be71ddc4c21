"""Keeps the workers of a service's routers: adds each worker that answers to the routers of its
revision, and removes it when it leaves.

The API is that of SGLang's router: GET, POST and DELETE of /workers. vLLM's router has it for
workers of one kind, and names them by their URLs instead of IDs. A router that is started again
has forgotten its workers, so the list is read and compared again and again.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import quote

from cavvy.capabilities.serving.decide.replica_groups import url_of
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.server.probes import ask_program
from cavvy.domain.services import ReplicaRole
from cavvy.domain.values import Struct

_FIRST_S, _EVERY_S, _TIMEOUT_S = 0.2, 2.0, 5.0
_ANSWER_MAX = 16 << 20
# what a list raises that is no list of workers
_ODD = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_TYPES = {ReplicaRole.PREFILL: "prefill", ReplicaRole.DECODE: "decode"}


class RouterTarget(Struct, frozen=True):
    """A router, and the workers that it should have. `find` returns the port of this machine that
    leads to the router, or 0, and `answers` returns whether a worker answers.
    """

    find: Callable[[], int]
    members: tuple[ServiceReplica, ...]
    answers: Callable[[str], bool]


class RouterMembers:
    """The routers of all services, keyed by the ID of the replica."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, asyncio.Task[None]]] = {}  # by service
        self._targets: dict[str, RouterTarget] = {}
        self._joined: dict[str, frozenset[str]] = {}

    def keep(
        self, service: str, routers: Mapping[str, RouterTarget], changed: Callable[[], None]
    ) -> None:
        """Keep exactly these routers of the service. `changed` is called when a router has other
        workers than before."""
        tasks = self._tasks.setdefault(service, {})
        for gone in tasks.keys() - routers.keys():
            tasks.pop(gone).cancel()
            self._targets.pop(gone, None)
            self._joined.pop(gone, None)
        for router, target in routers.items():
            self._targets[router] = target
            if router not in tasks:
                tasks[router] = asyncio.create_task(self._keep(router, changed))
        if not tasks:
            del self._tasks[service]

    def joined(self, router: str) -> frozenset[str]:
        """Return the IDs of the workers to which the router sends requests."""
        return self._joined.get(router, frozenset())

    def close(self) -> None:
        for service in list(self._tasks):
            self.keep(service, {}, lambda: None)

    async def _keep(self, router: str, changed: Callable[[], None]) -> None:
        while True:
            target = self._targets[router]
            joined = frozenset[str]()
            if port := target.find():
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        joined = await _update(port, target)
                except (OSError, *_ODD):  # includes TimeoutError
                    joined = frozenset()
            if joined != self.joined(router):
                self._joined[router] = joined
                changed()
            complete = {each.id for each in target.members} <= joined
            await asyncio.sleep(_EVERY_S if complete and joined else _FIRST_S)


async def _update(port: int, target: RouterTarget) -> frozenset[str]:
    """Add the workers that the router lacks, and remove those that it should not have. Returns the
    IDs of the workers to which it sends requests. A worker that the router refuses does not keep
    the others away. Raises OSError, and what is in `_ODD`.
    """
    known = {each["url"].rstrip("/"): each for each in (await _ask(port, "GET", ""))["workers"]}
    wanted = {url_of(each): each for each in target.members}
    for url, each in wanted.items():
        if url not in known and target.answers(each.id):
            with suppress(ValueError):
                await _ask(port, "POST", "", _describe(each, url))
    for url, found in known.items():
        if url not in wanted:
            with suppress(ValueError):
                await _ask(port, "DELETE", f"/{quote(found.get('id') or url, safe='')}")
    healthy = (url for url, each in known.items() if each.get("is_healthy", True))
    return frozenset(wanted[url].id for url in healthy if url in wanted)


def _describe(worker: ServiceReplica, url: str) -> Mapping[str, object]:
    found: dict[str, object] = {"url": url}
    if worker.role in _TYPES:
        found["worker_type"] = _TYPES[worker.role]
    if worker.role is ReplicaRole.PREFILL:
        found["bootstrap_port"] = worker.second_port
    return found


async def _ask(
    port: int, method: str, below: str, body: Mapping[str, object] | None = None
) -> Mapping[str, Sequence[Mapping[str, str]]]:
    """Return the router's answer. Raises OSError, ValueError."""
    data = None if body is None else json.dumps(body).encode()
    status, text = await ask_program(port, method, f"/workers{below}", data, most=_ANSWER_MAX)
    if not 200 <= status < 300:
        raise ValueError(f"the router refused {method}: {status}")
    return json.loads(text) if text else {}
