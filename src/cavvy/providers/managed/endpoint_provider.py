"""The provider that all managed endpoints share, and how it sends requests to them. A gang is one
endpoint with one instance; the code in `vm` starts and removes the endpoint like a machine.

All managed endpoints have the same contract: the container answers POST /invocations and GET /ping
on port 8080. The provider's API forwards a request once the complete body has arrived.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cavvy.domain.gangs import GangState
from cavvy.domain.jobs import AttemptOutcome
from cavvy.domain.messages import (
    AgentCalls,
    AgentMessage,
    ClaimGranted,
    ClaimRefused,
    HostFacts,
    MessageKind,
)
from cavvy.domain.offers import Offer
from cavvy.domain.services import ServiceSpec, TargetKind
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.http_client import HttpClient, NoReply
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import GangSeen, GangSpec, Manifest, NotFound, ProviderContext, TryAgain
from cavvy.providers.managed.service import ManagedService, ServiceTraits
from cavvy.providers.vm.cloud import BillEnd

if TYPE_CHECKING:
    from cavvy.providers.vm.provider import VmProvider

AT_ONCE = 64  # requests to all endpoints of an account
# the answer to a request that the cloud does not accept now
TOO_MANY = ReplicaAnswer(status=429, headers={"retry-after": "1"}, body=b"")
_HEADERS = ("content-type", "accept")  # of a request, which the container gets


class EndpointThreads:
    """The threads in which the requests to one account's endpoints wait for their answers, so that
    slow requests do not delay the control plane.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, name)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class EndpointHttp(EndpointThreads):
    """Sends requests to endpoints that require a bearer token. Each request is sent only once,
    because a repeated request could do its work twice. A request times out after `read_s` seconds.
    """

    def __init__(self, name: str, read_s: float) -> None:
        super().__init__(name)
        self._http = HttpClient(idle_s=read_s, limit_s=read_s)

    async def post(
        self,
        url: str,
        read_token: Callable[[], str],
        request: ReplicaRequest,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> ReplicaAnswer:
        """Return the answer, with the names of its headers in lower case. `more` contains
        additional headers for the cloud. `read_token` may block. Raises TryAgain, and the errors of
        `read_token`.
        """
        answer: ReplicaAnswer = await self.run(
            lambda: self._post(url, request, {**more, "authorization": f"Bearer {read_token()}"})
        )
        return answer

    def _post(self, url: str, request: ReplicaRequest, more: Mapping[str, str]) -> ReplicaAnswer:
        headers = {each: request.headers[each] for each in _HEADERS if each in request.headers}
        headers = {"content-type": "application/json", **headers, **more}
        try:
            reply = self._http.send("POST", url, request.body, headers)
        except NoReply as error:
            raise TryAgain(f"no answer from {url}: {error}") from error
        return ReplicaAnswer(status=reply.status, headers=reply.headers, body=reply.body)


def read_error(answer: ReplicaAnswer) -> str | None:
    """Return the error message if the cloud sent the answer, or None if the container sent the
    answer. An error that the cloud itself sends has the format of the cloud's API.
    """
    try:
        told = json.loads(answer.body)["error"]
        return str(told["message"]) if "code" in told else None
    except (ValueError, LookupError, TypeError):
        return None


def keep_content_type(answer: ReplicaAnswer) -> Mapping[str, str]:
    """Return the answer's headers that are passed on to the caller."""
    return {each: answer.headers[each] for each in ("content-type",) if each in answer.headers}


_T = TypeVar("_T")
_LONG_POLL = timedelta(seconds=20)  # shorter than a lease
_PAUSE_S = 5.0  # seconds between requests while the control plane does not answer
_RANK = 0


class EndpointAgents:
    """The tasks of all endpoints, by gang. `note` starts a task for each running endpoint, and
    cancels the task when the endpoint ends.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._control_plane: AgentCalls | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def connect(self, control_plane: AgentCalls | None) -> None:
        """See `RunsAgentsHere.connect`. Cancels all tasks; the next call of `note` starts the tasks
        again.
        """
        self._control_plane = control_plane
        self.close()

    def note(self, seen: Sequence[GangSeen], name: str | None) -> None:
        """Start the tasks of running endpoints, and cancel the tasks of endpoints that no longer
        run. `seen` contains all endpoints, or only the endpoint named `name`.
        """
        running = {each.name for each in seen if each.state is GangState.RUNNING}
        known = self._tasks.keys() if name is None else self._tasks.keys() & {name}
        for gone in known - running:
            self._tasks.pop(gone).cancel()
        if self._control_plane is not None:
            for gang in running - self._tasks.keys():
                self._tasks[gang] = asyncio.create_task(self._live(gang, self._control_plane))

    def close(self) -> None:
        for each in self._tasks.values():
            each.cancel()
        self._tasks.clear()

    async def _live(self, gang: str, calls: AgentCalls) -> None:
        nonce = hashlib.sha256(gang.encode()).hexdigest()[:32]
        while True:
            claim = await _ask(lambda: calls.claim(gang, _RANK, nonce, "", HostFacts()))
            if isinstance(claim, ClaimRefused):
                return
            if isinstance(claim, ClaimGranted):
                break
            await _pause()
        await self._say(gang, nonce, calls, 1, MessageKind.RUNNING)
        after = 0
        while True:
            order = await _ask(partial(calls.wait_order, gang, _RANK, after, _LONG_POLL))
            if order is None:
                continue
            after = order.seq
            if order.kind == "stop":
                break
        outcome = AttemptOutcome.STOPPED
        await self._say(
            gang, nonce, calls, 2, MessageKind.EXITED, outcome=outcome, reason=order.reason
        )

    async def _say(
        self, gang: str, nonce: str, calls: AgentCalls, seq: int, kind: MessageKind, **more: Any
    ) -> None:
        message = AgentMessage(seq=seq, at=self._now(), kind=kind, **more)
        await _ask(lambda: calls.messages(gang, _RANK, nonce, [message]))


async def _ask(call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Repeat a call until it succeeds, and return the answer."""
    while True:
        asked = asyncio.ensure_future(call())
        try:
            await asyncio.wait([asked])
        finally:
            asked.cancel()
        if not asked.cancelled() and asked.exception() is None:
            return asked.result()
        await _pause()


async def _pause() -> None:
    # only the task of one endpoint waits, as an agent on a node does
    await asyncio.sleep(_PAUSE_S)  # noqa: TID251


ENDPOINT_TRAITS = ServiceTraits(
    agents=False,
    unique_names=True,
    single=True,
    bill_ends=BillEnd.REPORTED,
)
CALLED, PROBED, PORT = "/invocations", "/ping", 8080
_FROM_NODES = frozenset({TargetKind.GPU_UTILISATION, TargetKind.METRIC})


class EndpointCalls(Protocol):
    """Sends requests to the endpoints of a service. An endpoint is named by the id of its job."""

    async def answers(self, job: str) -> bool:
        """Return whether the endpoint can receive requests. Raises TryAgain, Refused."""

    async def invoke(self, job: str, request: ReplicaRequest) -> ReplicaAnswer:
        """See `AnswersRequests.invoke`."""

    def close(self) -> None:
        """Stop the threads that send requests."""


def make_provider(
    manifest: Manifest,
    context: ProviderContext,
    make_endpoints: Callable[[ProviderContext], tuple[ManagedService, EndpointCalls]],
) -> "EndpointProvider":
    """Create the provider. `make_endpoints` returns the service and the calls of its endpoints."""
    # commands that only read the manifest in a service's module do not need the layer
    from cavvy.providers.managed.provider import make_provider as make_service_provider

    service, calls = make_endpoints(context)
    inner = make_service_provider(manifest, context, lambda context: service)
    return EndpointProvider(inner, calls, context.now)


class EndpointProvider:
    """Implements `Provider` with the abilities of `EndpointManifest`."""

    def __init__(
        self, inner: "VmProvider", calls: EndpointCalls, now: Callable[[], datetime]
    ) -> None:
        self.manifest = inner.manifest
        self._inner, self._calls = inner, calls
        self._agents = EndpointAgents(now)

    async def offers(self) -> Sequence[Offer]:
        return await self._inner.offers()

    async def launch(self, gang: GangSpec) -> None:
        await self._inner.launch(gang)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        seen = await self._inner.gangs(name)
        self._agents.note(seen, name)
        return seen

    async def remove(self, name: str) -> None:
        await self._inner.remove(name)

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return self._inner.check(task)

    async def whoami(self) -> Sequence[tuple[str, str]]:
        return await self._inner.whoami()

    def connect(self, control_plane: AgentCalls | None) -> None:
        self._agents.connect(control_plane)

    async def answers(self, gang: str) -> bool:
        return await self._calls.answers(await self._find(gang))

    async def invoke(self, gang: str, request: ReplicaRequest) -> ReplicaAnswer:
        return await self._calls.invoke(await self._find(gang), request)

    async def close(self) -> None:
        self._agents.close()
        await self._inner.close()
        self._calls.close()

    async def _find(self, gang: str) -> str:
        """Return the id of the endpoint's job. Raises NotFound."""
        for machine in await self._inner.list_machines(gang):
            return machine.rpartition("#")[0]
        raise NotFound(f"{self.manifest.title}: the gang {gang} has no endpoint")


def object_to_endpoint(task: TaskSpec, title: str, docs: str) -> Sequence[Objection]:
    """Return the objections to a task that endpoints cannot run. `docs` is the provider's page
    about the contract of containers.
    """
    why = f"{title} run only the image, without Cavvy's agent ({docs})"
    given = (
        ("setup", task.setup, f"{why}; put it into the image"),
        ("workdir", task.workdir, f"{why}; put the files into the image"),
        ("secrets", task.secrets, f"{why}, and show the environment to all who may read the model"),
        ("outputs", task.outputs, why),
        ("checkpoint", task.checkpoint, why),
    )
    found = [Objection(field, reason) for field, value, reason in given if value]
    return found if task.service is None else [*found, *_list_unserved(task.service, title, docs)]


def object_to_program(
    task: TaskSpec,
    title: str,
    docs: str,
    starts: str = "starts the image with the argument `serve`",
) -> list[Objection]:
    """Return an objection if the service's field `run` is not `serve`. Such a service is
    impossible, because the provider always starts the image with the argument `serve`. `starts` is
    the text that says so.
    """
    if task.service is None or task.run.strip() == "serve":
        return []
    return [Objection("run", f"{title} {starts} ({docs}); write `run: serve`")]


def object_to_files(task: TaskSpec, reason: str, docs: str) -> list[Objection]:
    """Return the objection to inputs, for endpoints into which the provider copies no files."""
    if not task.inputs:
        return []
    why = f"{reason}; put the model into the image, or read it in the program ({docs})"
    return [Objection("inputs", why)]


def list_variables(gang: GangSpec) -> Mapping[str, str]:
    """Return the environment of a container. PORT is omitted, because an endpoint's container
    always listens on port 8080.
    """
    return {name: value for name, value in gang.env.items() if name != "PORT"}


def _list_unserved(spec: ServiceSpec, title: str, docs: str) -> Iterator[Objection]:
    if spec.port != PORT:
        yield Objection("service.port", f"{title} send requests to port {PORT} ({docs})")
    if spec.probe.path != PROBED or spec.probe.body is not None or spec.probe.headers:
        yield Objection("service.probe.path", f"{title} probe GET {PROBED} ({docs})")
    if spec.models:
        reason = f"{title} forward only POST {CALLED}, and no path of OpenAI's API ({docs})"
        yield Objection("service.models", reason)
    if spec.replicas.target.kind in _FROM_NODES:
        reason = (
            f"{title} forward only POST {CALLED}, so Cavvy can read no metrics on the node ({docs})"
        )
        yield Objection("service.replicas.target", reason)
    if any(each.path != CALLED for each in spec.events):
        yield Objection("service.events.path", f"{title} forward only POST {CALLED} ({docs})")
