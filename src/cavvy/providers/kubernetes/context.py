"""One context as a place for gangs: launched under their names, looked at, remembered, given
back.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    NoCapacity,
    ProviderError,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.batch.shapes import NodeShape
from cavvy.providers.kubernetes import pods, status
from cavvy.providers.kubernetes.bundle import make_bundle
from cavvy.providers.kubernetes.calls.api import ApiServerRefused, KubernetesApi
from cavvy.providers.kubernetes.cluster import (
    KubernetesNode,
    ResourceAmount,
    count_fitting,
    nodes_for,
    part_of,
    promise,
    read_nodes,
    read_quantity,
)
from cavvy.providers.kubernetes.exec_tunnels import ExecTunnels
from cavvy.providers.kubernetes.kueue import find_kueue, probe_queue
from cavvy.providers.kubernetes.options import PodOptions
from cavvy.providers.kubernetes.status import PodGangRecord

Object = dict[str, Any]

_REMEMBERED = timedelta(hours=2)
_NODES_AGE = timedelta(seconds=10)
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"
_QUOTA = re.compile(r"requested: ([^,]+?)=([^,]+).*limited: [^,]*?=([^,]+)")
_DOOMED = {"gracePeriodSeconds": 0}
_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTerms:
    """What a site needs of its server. `mark` is what its objects carry."""

    mark: str
    options: PodOptions
    agent: Callable[[], bytes] | None
    now: Callable[[], datetime]
    changed: Callable[[str], None]  # is told of a gang that ended


class ClusterContext:
    """One namespace of one cluster. Methods raise ProviderErrors alone."""

    def __init__(self, api: KubernetesApi, lines: ExecTunnels, terms: ContextTerms) -> None:
        self.api = api
        self.lines = lines
        self._terms = terms
        self._nodes: tuple[datetime, Sequence[KubernetesNode]] | None = None
        self._launching: dict[str, asyncio.Lock] = {}
        self._promised: dict[
            str, tuple[Mapping[str, ResourceAmount], int]
        ] = {}  # room of gangs whose pods are being made
        self._placed_agent = ""
        self._last: dict[str, Object] = {}  # pods as they were last seen, by name

    @property
    def _core(self) -> str:
        return f"/api/v1/namespaces/{self.api.context.namespace}"

    def note(self, pod: Object, *, gone: bool) -> None:
        """A pod was seen by a watch; one that is gone is remembered until its gang's end is."""
        name = pod["metadata"]["name"]
        if gone or name in self._last:
            self._last[name] = pod

    async def nodes(self, age: timedelta = timedelta(0)) -> Sequence[KubernetesNode]:
        """What the cluster has, at most `age` old."""
        now = self._terms.now()
        if self._nodes is None or now - self._nodes[0] > age:
            async with _sorted("the nodes of the cluster cannot be listed"):
                raw, everybody = await asyncio.gather(
                    self.api.items("/api/v1/nodes"), self._everybody()
                )
            options = self._terms.options
            self._nodes = (now, read_nodes(raw, everybody, options.selector, options.tolerations))
        return self._nodes[1]

    def list_alike(self, offer: Offer) -> Sequence[KubernetesNode]:
        """The nodes that an offer is of, as they were last seen; asks nobody."""
        return nodes_for(self._nodes[1], offer) if self._nodes is not None else ()

    async def _everybody(self) -> Sequence[Object]:
        """Whoever holds a part of the nodes, as far as that may be seen."""
        try:
            return await self.api.items("/api/v1/pods", {"fieldSelector": _NOT_OVER})
        except ApiServerRefused as error:
            if error.status != 403:
                raise
        return await self.api.items(f"{self._core}/pods")

    async def quotas(self) -> Sequence[Object]:
        """The namespace's quotas that hold for every pod; () where they may not be seen."""
        async with _sorted("the namespace's quotas cannot be listed"):
            try:
                found = await self.api.items(f"{self._core}/resourcequotas")
            except ApiServerRefused as error:
                if error.status == 403:
                    return ()
                raise
        return [
            each
            for each in found
            if not each["spec"].get("scopes") and not each["spec"].get("scopeSelector")
        ]

    async def launch(self, spec: GangSpec) -> None:
        """As Provider.launch, for an offer of this site."""
        async with (
            self._launching.setdefault(spec.name, asyncio.Lock()),
            _sorted(f"{spec.name} cannot be launched"),
        ):
            try:
                await self._launch(spec)
            finally:
                self._launching.pop(spec.name, None)
                self._promised.pop(spec.name, None)

    async def gangs(self, name: str | None) -> Sequence[GangSeen]:
        """As Provider.gangs."""
        async with _sorted("pods cannot be listed"):
            query = {"labelSelector": f"{pods.INSTALLATION}={self._terms.mark}"}
            if name is None:
                raw = await self.api.items(
                    f"{self._core}/configmaps", query
                )  # before the pods, which are made later
            else:
                one = await self.api.find(f"{self._core}/configmaps/{name}")
                raw = [one] if one is not None and self._is_ours(one) else []
                query["labelSelector"] += f",{pods.GANG}={name}"
            records = [record for record in map(status.read_record, raw) if record is not None]
            if all(record.ended for record in records):
                found: Sequence[Object] = ()
            else:
                found = await self.api.items(f"{self._core}/pods", query)
            by_gang: dict[str, dict[str, Object]] = {}
            for pod in found:
                by_gang.setdefault(pod["metadata"]["labels"][pods.GANG], {})[
                    pod["metadata"]["name"]
                ] = pod
            return [
                seen
                for record in records
                if (seen := await self._see(record, by_gang.get(record.name, {}))) is not None
            ]

    async def remove(self, name: str) -> bool:
        """As Provider.remove; whether it is, or was, here."""
        async with _sorted(f"{name} cannot be removed"):
            raw = await self.api.find(f"{self._core}/configmaps/{name}")
            record = status.read_record(raw) if raw is not None and self._is_ours(raw) else None
            if record is None or record.ended is not None:
                return record is not None
            query = {"labelSelector": f"{pods.INSTALLATION}={self._terms.mark},{pods.GANG}={name}"}
            await self._remove(record, await self.api.items(f"{self._core}/pods", query))
            return True

    async def close(self) -> None:
        await self.lines.close()
        await self.api.close()

    # Launching

    async def _launch(self, spec: GangSpec) -> None:
        terms = self._terms
        if terms.agent is None:
            raise Refused("no agent can be started here: the server did not say how")
        path = f"{self._core}/configmaps"
        try:
            node = await self._find_room(spec)
            await self._look_at_queue()
        except (NoCapacity, Refused):
            known = await self.api.find(f"{path}/{spec.name}")
            if known is None or not self._is_ours(known):
                raise
            node = (await self._find_alike(spec))[0]  # it has its room already, or has ended
        agent = await self._place_agent(terms.agent)
        await self._claim_volumes(spec)
        made = await self.api.make(
            path, pods.make_record(spec, terms.mark, terms.now().isoformat())
        )
        raw = made or await self.api.get(f"{path}/{spec.name}")
        if not self._is_ours(raw):
            raise Refused(
                f"the name {spec.name} is taken by another installation in this namespace"
            )
        before = status.read_record(raw)
        if before is None or before.ended or before.removing_at or before.seen:
            return
        owner = pods.OwnerObject(name=spec.name, uid=before.uid)
        ranks = [
            pods.make_pod(spec, rank, terms.mark, owner, node, terms.options, agent)
            for rank in range(spec.nodes)
        ]
        try:
            # No kubelet asks for the secret before it has heard of its pod, which takes longer than
            # making both.
            results = await asyncio.gather(
                self.api.make(f"{self._core}/secrets", pods.make_secret(spec, terms.mark, owner)),
                *(self.api.make(f"{self._core}/pods", pod) for pod in ranks),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except ApiServerRefused as error:
            problem = _sort_refusal(error)
            if not isinstance(problem, TryAgain):
                await self._forget(before)
            raise problem from error
        self._nodes = None
        after = await self.api.find(f"{self._core}/configmaps/{spec.name}")
        if after is None or "removing_at" in (
            after.get("data") or {}
        ):  # removed by another server meanwhile
            await self._drop_pods(before)

    async def _look_at_queue(self) -> None:
        """Raises NoCapacity and Refused where Kueue's queue would keep the pods; who may not
        look finds out.
        """
        if not self._terms.options.queue:
            return
        try:
            await probe_queue(self.api, self._terms.options.queue)
        except ApiServerRefused as error:
            if error.status != 403:
                raise

    async def _find_room(self, spec: GangSpec) -> KubernetesNode:
        """One of the nodes that the offer is of. Raises NoCapacity where too few of them have room
        now.

        Until the gang's pods are made its room is promised: others that are launched meanwhile do
        not count on it.
        """
        part = part_of_offer(spec.offer)
        for age in (_NODES_AGE, timedelta(0)):
            alike = await self._find_alike(spec, age)
            room = sum(count_fitting(node, part) for node in alike)
            if self._terms.options.waits or room >= spec.nodes:
                node = next((node for node in alike if count_fitting(node, part)), alike[0])
                self._promised[spec.name] = (
                    {node.resource: part} if spec.offer.accelerator_count else {"": part},
                    spec.nodes,
                )
                return node
        raise NoCapacity(f"{spec.offer.key}: there is room for {room} of {spec.nodes} pods now")

    async def _find_alike(
        self, spec: GangSpec, age: timedelta = _NODES_AGE
    ) -> Sequence[KubernetesNode]:
        nodes = await self.nodes(age)
        for name, (parts, count) in self._promised.items():
            if name != spec.name:
                nodes = promise(nodes, parts, count)
        alike = nodes_for(nodes, spec.offer)
        if not alike:
            raise NoCapacity(f"{spec.offer.key}: the cluster has no such nodes now")
        return alike

    async def _place_agent(self, pack: Callable[[], bytes]) -> str:
        """Put what pods run into the namespace, once for each content."""
        if not self._placed_agent:
            bundle = await asyncio.to_thread(lambda: make_bundle(pack()))
            await self.api.make(f"{self._core}/configmaps", bundle)
            self._placed_agent = bundle["metadata"]["name"]
        return self._placed_agent

    async def _claim_volumes(self, spec: GangSpec) -> None:
        for volume in spec.volumes:
            if volume.kind is VolumeKind.NAMED:
                await self._claim(volume, spec.nodes)

    async def _claim(self, volume: Volume, nodes: int) -> None:
        if await self.api.find(f"{self._core}/persistentvolumeclaims/{volume.source}") is not None:
            return
        if volume.size_gib is None:
            where = self.api.context.namespace
            raise Refused(
                f"volumes: there is no claim {volume.source} in {where}; give a `size` to have it "
                "made"
            )
        await self.api.make(f"{self._core}/persistentvolumeclaims", pods.make_claim(volume, nodes))

    # Looking

    async def _see(self, record: PodGangRecord, found: Mapping[str, Object]) -> GangSeen | None:
        now = self._terms.now()
        if record.ended is not None:
            if now - record.ended.at >= _REMEMBERED:
                await self.api.drop(f"{self._core}/configmaps/{record.name}")
                return None
            return status.as_seen(record, record.ended)
        lost = await self._find_lost(list(found.values()))
        for name in found:
            self._last[name] = found[name]
        names = [pods.pod_name(record.name, rank) for rank in range(record.nodes)]
        gone = {
            name: self._last[name] for name in names if name not in found and name in self._last
        }
        look = status.look(record, found, gone, lost, now)
        if look.end is not None:
            for_sure = [
                name
                for name in found
                if name in look.stuck or found[name]["status"].get("phase") in _OVER
            ]
            return await self._end(record, look.end, look.seen, for_sure)
        if look.note is not None:
            await self._patch(record.name, {"seen": status.write_ranks(look.note)})
        hopeless = status.why_hopeless(list(found.values()), now, waits=self._terms.options.waits)
        if hopeless and record.removing_at is None:
            await self._remove(record, list(found.values()), hopeless)
        if record.removing_at is not None:
            for name in look.stuck:
                await self.api.drop(f"{self._core}/pods/{name}", _DOOMED)
        return look.seen

    async def _find_lost(self, found: Sequence[Object]) -> Mapping[str, str]:
        after = timedelta(seconds=self._terms.options.lost_after_s)
        lost = {}
        for name in status.suspects(found):
            try:
                node = await self.api.find(f"/api/v1/nodes/{name}")
            except ApiServerRefused:
                continue  # who may not look at nodes has to wait for Kubernetes' own conclusions
            if reason := status.why_lost(node, after, self._terms.now()):
                lost[name] = reason
        return lost

    async def _end(
        self,
        record: PodGangRecord,
        ended: status.PodGangEnd,
        seen: GangSeen,
        for_sure: Sequence[str],
    ) -> GangSeen:
        """Remember the end, then let the pods go; at once where nothing can work in them any more.

        Otherwise kubelets of old keep pods that have ended for up to a minute, and their names with
        them.
        """
        body = {
            "metadata": {"resourceVersion": record.version},
            "data": {"ended": status.write_ended(ended)},
        }
        try:
            if await self.api.patch(f"{self._core}/configmaps/{record.name}", body) is None:
                return seen
        except ApiServerRefused as error:
            if error.status == 409:
                raise TryAgain(f"{record.name} has changed; look again") from error
            raise
        for name in for_sure:
            await self.api.drop(f"{self._core}/pods/{name}", _DOOMED)
        if len(for_sure) < record.nodes:
            await self._drop_pods(record)
            await self._leave_queue(record)  # some may never have begun
        await self.api.drop(f"{self._core}/secrets/{record.name}")
        self._terms.changed(record.name)
        for rank in range(record.nodes):
            self._last.pop(pods.pod_name(record.name, rank), None)
        return seen

    # Removing

    async def _remove(
        self, record: PodGangRecord, found: Sequence[Object], refusal: str = ""
    ) -> None:
        data = {"removing_at": self._terms.now().isoformat()} if record.removing_at is None else {}
        begun = [
            rank
            for pod in found
            if (rank := status.read_pod(pod, {}, self._terms.now())).started_at
        ]
        if begun and not record.seen:
            data["seen"] = status.write_ranks(begun)
        if refusal:
            data["refusal"] = refusal
        if data:
            await self._patch(record.name, data)
        for pod in found:
            self._last[pod["metadata"]["name"]] = pod
        await self._drop_pods(record, hasty=not begun)
        if (
            not begun
        ):  # else Kueue would give the gang's quota to others while its pods still have their grace
            await self._leave_queue(record)

    async def _drop_pods(self, record: PodGangRecord, *, hasty: bool = False) -> None:
        """Ask for the pods' end; `hasty` where nothing works in them that has to be asked to stop.

        Kubelets of old get entangled in pods that end while their volumes are being mounted, for a
        minute.
        """
        names = [pods.pod_name(record.name, rank) for rank in range(record.nodes)]
        await asyncio.gather(*(self.lines.tell_removed(name) for name in names))
        options = _DOOMED if hasty else None
        await asyncio.gather(
            *(self.api.drop(f"{self._core}/pods/{name}", options) for name in names)
        )

    async def _leave_queue(self, record: PodGangRecord) -> None:
        """Kueue keeps pods that it has not admitted, and their place in the queue, until its own
        object goes.
        """
        if not self._terms.options.queue:
            return
        try:
            version = await find_kueue(self.api)
            await self.api.drop(
                f"{version}/namespaces/{self.api.context.namespace}/workloads/{record.name}"
            )
        except ApiServerRefused as error:
            if error.status not in (
                403,
                404,
            ):  # who may not has to wait for Kueue; a cluster without it keeps nothing
                raise

    async def _forget(self, record: PodGangRecord) -> None:
        """Nothing was started: leave nothing."""
        names = [pods.pod_name(record.name, rank) for rank in range(record.nodes)]
        await asyncio.gather(
            *(self.api.drop(f"{self._core}/pods/{name}", _DOOMED) for name in names)
        )
        await self._leave_queue(record)
        await self.api.drop(f"{self._core}/secrets/{record.name}")
        await self.api.drop(f"{self._core}/configmaps/{record.name}")

    async def _patch(self, name: str, data: Mapping[str, str]) -> None:
        await self.api.patch(f"{self._core}/configmaps/{name}", {"data": dict(data)})

    def _is_ours(self, raw: Object) -> bool:
        labels = raw["metadata"].get("labels") or {}
        return bool(labels.get(pods.INSTALLATION) == self._terms.mark)


def part_of_offer(offer: Offer) -> ResourceAmount:
    """What each pod of an offer asks for."""
    return part_of(
        NodeShape(
            cpus=int(offer.vcpus), memory_mib=offer.memory_mib, gpus=offer.accelerator_count, gpu=""
        )
    )


def _sort_refusal(error: ApiServerRefused) -> ProviderError:
    """A quota that others use up is no capacity; one that is too small for the gang is for a
    person to raise.
    """
    found = _QUOTA.search(str(error)) if "exceeded quota" in str(error) else None
    if found is None:
        return error.sorted
    too_small = read_quantity(found[2]) > read_quantity(found[3])
    return QuotaTooSmall(str(error)) if too_small else NoCapacity(str(error))


@asynccontextmanager
async def _sorted(what: str) -> AsyncIterator[None]:
    """Turns what an API server answers into what callers of a provider expect."""
    try:
        yield
    except ApiServerRefused as error:
        problem = error.sorted
        raise type(problem)(f"{what}: {problem}") from error
