"""One Kubernetes context: launches, finds, records and removes the context's gangs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    NoCapacity,
    ProviderError,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.batch.shapes import NodeShape
from cavvy.providers.kubernetes import pods, status
from cavvy.providers.kubernetes.api import ApiServerRefused, KubernetesApi
from cavvy.providers.kubernetes.cluster import (
    FindInstance,
    KubernetesNode,
    ResourceAmount,
    add_catalog,
    count_fitting,
    list_labels,
    nodes_for,
    part_of,
    promise,
    read_nodes,
    read_quantity,
    share_service,
)
from cavvy.providers.kubernetes.device_claims import (
    GROUP,
    DraObjects,
    add_devices,
    choose_version,
    claims_path,
)
from cavvy.providers.kubernetes.exec_tunnels import ExecTunnels
from cavvy.providers.kubernetes.node_pools import (
    LISTS,
    PoolTemplate,
    make_nodes,
    read_declared,
    read_templates,
)
from cavvy.providers.kubernetes.obstacles import (
    explain_wait,
    find_kueue,
    find_obstacle,
    is_gated,
    probe_queue,
)
from cavvy.providers.kubernetes.options import PodOptions
from cavvy.providers.kubernetes.pod_fields import find_refused
from cavvy.providers.kubernetes.pods import make_bundle
from cavvy.providers.kubernetes.status import PodGangRecord

Object = dict[str, Any]

_REMEMBERED = timedelta(hours=2)
_NODES_AGE = timedelta(seconds=10)
_POOLS_AGE = timedelta(minutes=2)
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"
_QUOTA = re.compile(r"exceeded quota: ([^,]+), requested: [^,]+?=([^,]+).*limited: [^,]*?=([^,]+)")
# The wording of the API server's plugin LimitRanger.
_LIMIT_RANGE = re.compile(
    r"(maximum|minimum) \S+ (usage|limit|request) per (Pod|Container)|limit to request ratio per"
)
_AT_ONCE = {"gracePeriodSeconds": 0}


class ContextTerms(Struct, frozen=True, kw_only=True):
    """The server's functions and options that a context uses. `mark` is the value of the label that
    all objects of this installation have.
    """

    mark: str
    options: PodOptions
    agent: Callable[[], bytes] | None
    now: Callable[[], datetime]
    find_instance: FindInstance
    changed: Callable[[str], None]  # called with the name of each gang that has ended


class ClusterContext:
    """One namespace of one cluster. Methods raise only ProviderErrors."""

    def __init__(self, api: KubernetesApi, tunnels: ExecTunnels, terms: ContextTerms) -> None:
        self.api = api
        self.tunnels = tunnels
        self._terms = terms
        self._nodes: tuple[datetime, Sequence[KubernetesNode]] | None = None
        self.labels: frozenset[str] = frozenset()  # the labels that any node can have, if known
        self._pools: tuple[datetime, Sequence[PoolTemplate]] | None = None
        # the version and the device classes of Dynamic Resource Allocation
        self._classes: tuple[datetime, str, Sequence[Object]] | None = None
        self._launching: dict[str, asyncio.Lock] = {}
        self._promised: dict[
            str, tuple[Mapping[str, ResourceAmount], int]
        ] = {}  # gang -> the size and the number of the pods that are being created for it
        self._placed_agent = ""
        self._accepted: set[str] = set()  # pod fields that the API server has accepted
        self._last: dict[str, Object] = {}  # pod name -> the last known state of the pod

    def _path(self, kind: str, name: str = "") -> str:
        """Return the API path of one object in the namespace, or of all objects of the kind if
        `name` is "".
        """
        path = f"/api/v1/namespaces/{self.api.context.namespace}/{kind}"
        return f"{path}/{name}" if name else path

    def _labelled(self, gang: str | None) -> dict[str, str]:
        """Return the label selector for the objects of one gang, or of all gangs if `gang` is
        None."""
        mark = f"{pods.INSTALLATION}={self._terms.mark}"
        return {"labelSelector": mark if gang is None else f"{mark},{pods.GANG}={gang}"}

    def note(self, pod: Object, *, gone: bool) -> None:
        """Handle a pod reported by a watch. A deleted pod is remembered until the record of its
        gang states that the gang has ended.
        """
        name = pod["metadata"]["name"]
        if gone or name in self._last:
            self._last[name] = pod

    async def nodes(self, age: timedelta = timedelta(0)) -> Sequence[KubernetesNode]:
        """Return the nodes of the cluster. A cached response is used if it is at most `age` old."""
        now = self._terms.now()
        if self._nodes is None or now - self._nodes[0] > age:
            async with _sorted("the nodes of the cluster cannot be listed"):
                raw, everybody = await asyncio.gather(
                    self.api.items("/api/v1/nodes"), self._everybody()
                )
            options = self._terms.options
            devices = await self._list_devices()
            names = devices.list_nodes()
            live = read_nodes(raw, everybody, options.selector, options.tolerations, names)
            live = add_devices(live, devices)
            live = await asyncio.to_thread(add_catalog, live, self._terms.find_instance)
            pools = make_nodes(await self._list_pools(), options.selector, options.tolerations)
            self._nodes = (now, share_service([*live, *pools]))
            # nodes that an autoscaler adds may have other labels
            self.labels = frozenset() if pools else frozenset(list_labels(raw))
        return self._nodes[1]

    async def _list_devices(self) -> DraObjects:
        """Return the devices that drivers publish, and the claims on them. The result is empty if
        the cluster has no device classes, or if the user has no permission to read the objects."""
        now = self._terms.now()
        try:
            if self._classes is None or now - self._classes[0] > _POOLS_AGE:
                version = choose_version(await self.api.find(GROUP) or {})
                path = f"{GROUP}/{version}/deviceclasses"
                self._classes = (now, version, await self.api.items(path) if version else [])
            _, version, classes = self._classes
            if not classes:
                return DraObjects()
            path = f"{GROUP}/{version}"
            slices, claims = await asyncio.gather(
                self.api.items(f"{path}/resourceslices"), self.api.items(f"{path}/resourceclaims")
            )
        except ApiServerRefused as error:
            if error.status in (403, 404):
                self._classes = (now, "", [])
                return DraObjects()
            raise
        return DraObjects(version=version, classes=classes, slices=slices, claims=claims)

    async def _list_pools(self) -> Sequence[PoolTemplate]:
        """Return the nodes that autoscalers can add; the responses may be up to _POOLS_AGE old. A
        kind of pool is omitted if the cluster does not support this kind, or if the user has no
        permission to read the pools.
        """
        now, find = self._terms.now(), self._terms.find_instance
        if self._pools is None or now - self._pools[0] > _POOLS_AGE:
            found: list[PoolTemplate] = []
            if path := self._terms.options.pools:
                found += await asyncio.to_thread(read_declared, path, find)
            for source in LISTS:
                with suppress(ApiServerRefused, KeyError, TypeError):
                    for item in await self.api.items(f"/apis/{source}"):
                        found += await asyncio.to_thread(read_templates, source, item, find)
            self._pools = (now, found)
        return self._pools[1]

    def list_alike(self, offer: Offer) -> Sequence[KubernetesNode]:
        """Return the last known nodes that match an offer. Makes no request."""
        return nodes_for(self._nodes[1], offer) if self._nodes is not None else ()

    async def _everybody(self) -> Sequence[Object]:
        """Return the pods of all namespaces, or of this namespace if the user has no permission to
        list the pods of all namespaces.
        """
        try:
            return await self.api.items("/api/v1/pods", {"fieldSelector": _NOT_OVER})
        except ApiServerRefused as error:
            if error.status != 403:
                raise
        return await self.api.items(self._path("pods"))

    async def quotas(self) -> Sequence[Object]:
        """Return the namespace's quotas that apply to every pod, or () if the user has no
        permission to list quotas.
        """
        async with _sorted("the namespace's quotas cannot be listed"):
            try:
                found = await self.api.items(self._path("resourcequotas"))
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
        """Launch the gang; see `Provider.launch`. The offer must belong to this context."""
        async with (
            self._launching.setdefault(spec.name, asyncio.Lock()),
            _sorted(f"{spec.name} cannot be launched"),
        ):
            try:
                await self._launch(spec)
            finally:
                self._launching.pop(spec.name, None)
                self._promised.pop(spec.name, None)

    async def replace(self, spec: GangSpec, ranks: Sequence[int]) -> None:
        """Replace single pods; see `ReplacesNodes.replace`."""
        async with (
            self._launching.setdefault(spec.name, asyncio.Lock()),
            _sorted(f"the pods of {spec.name} cannot be replaced"),
        ):
            try:
                await self._replace(spec, ranks)
            finally:
                self._launching.pop(spec.name, None)
                self._promised.pop(spec.name, None)

    async def gangs(self, name: str | None) -> Sequence[GangSeen]:
        """See `Provider.gangs`."""
        async with _sorted("pods cannot be listed"):
            if name is None:
                # List records before pods, since pods are created after their record.
                raw = await self.api.items(self._path("configmaps"), self._labelled(None))
                records = [record for record in map(status.read_record, raw) if record is not None]
            else:
                one = await self._find_record(name)
                records = [one] if one is not None else []
            found: Sequence[Object] = ()
            if not all(record.ended for record in records):
                found = await self.api.items(self._path("pods"), self._labelled(name))
            by_gang: dict[str, dict[str, Object]] = {}
            for pod in found:
                of_gang = by_gang.setdefault(pod["metadata"]["labels"][pods.GANG], {})
                of_gang[pod["metadata"]["name"]] = pod
            looks = [await self._see(each, by_gang.get(each.name, {})) for each in records]
            return [
                await self._explain(seen, by_gang.get(seen.name, {}))
                for seen in looks
                if seen is not None
            ]

    async def remove(self, name: str) -> bool:
        """Remove the gang; see `Provider.remove`. Return whether this context has a record of the
        gang."""
        async with _sorted(f"{name} cannot be removed"):
            record = await self._find_record(name)
            if record is not None and record.ended is None:
                found = await self.api.items(self._path("pods"), self._labelled(name))
                await self._remove(record, found)
            return record is not None

    async def close(self) -> None:
        await self.tunnels.close()
        await self.api.close()

    # Launching

    async def _launch(self, spec: GangSpec) -> None:
        terms = self._terms
        if terms.agent is None:
            raise Refused(
                "no agent can be started: the server has no agent that it could copy into pods"
            )
        try:
            node = await self._find_room(spec, spec.nodes)
            await self._check_queue()
        except (NoCapacity, Refused):
            if await self._find_record(spec.name) is None:
                raise
            # the gang already has its pods, or it has ended
            node = (await self._find_alike(spec))[0]
        agent = await self._place_agent(terms.agent)
        await self._check_fields(spec, node, agent)
        await self._claim_volumes(spec)
        record = await self._make_record(spec, node.pool)
        if record is None or record.ended or record.removing_at or record.seen:
            return
        owner = pods.OwnerObject(name=spec.name, uid=record.uid)
        await self._make_pods(spec, record, owner, node, agent)
        self._nodes = None
        after = await self._find_record(spec.name)
        # another server has removed the gang in the meantime
        if after is None or after.removing_at:
            await self._drop_pods(record)

    async def _replace(self, spec: GangSpec, ranks: Sequence[int]) -> None:
        """Note in the record which pods are replaced, delete what is left of them, and create the
        new ones, once they fit. The note is written first, so a repeated call creates none twice.
        """
        record, terms = await self._find_record(spec.name), self._terms
        if record is None or record.ended or record.removing_at:
            return
        if terms.agent is None:
            raise Refused("the server has no agent that it could copy into pods")
        found = await self.api.items(self._path("pods"), self._labelled(spec.name))
        by_name = {pod["metadata"]["name"]: pod for pod in found}
        record = await self._note_replaced(spec, ranks, record, by_name)
        names, known = record.pods, {each.rank for each in record.seen}
        missing = [
            rank
            for rank, name in enumerate(names)
            if record.turn(rank).number and rank not in known and name not in by_name
        ]
        if not missing:
            return
        node = await self._find_room(spec, len(missing), waits=False)
        agent = await self._place_agent(terms.agent)
        if node.pool:  # the pods wait until the pool has a node for them
            data = {"pool": node.pool, "asked_at": terms.now().isoformat()}
            await self._patch(spec.name, data)
        owner = pods.OwnerObject(name=spec.name, uid=record.uid)
        await self.api.make(self._path("secrets"), pods.make_secret(spec, terms.mark, owner))
        for rank in missing:
            turn = record.turn(rank).number
            pod = pods.make_pod(spec, rank, terms.mark, owner, node, terms.options, agent, turn)
            try:
                await self.api.make(self._path("pods"), pod)
            except ApiServerRefused as error:
                raise _sort_refusal(error, await self._list_limits(error)) from error
        self._nodes = None
        after = await self._find_record(spec.name)
        if after is None or after.removing_at:  # by another server, in the meantime
            await self._drop_pods(record)

    async def _note_replaced(
        self,
        spec: GangSpec,
        ranks: Sequence[int],
        record: PodGangRecord,
        found: Mapping[str, Object],
    ) -> PodGangRecord:
        """Store that the pods of these ranks are replaced, and delete them; return the record. Pods
        in which nothing runs any more are deleted without a grace period.
        """
        now, lost = self._terms.now(), await self._find_lost(list(found.values()))
        gone = {name: self._last[name] for name in record.pods if name in self._last}
        states = status.read_ranks(record, status.FoundPods(found, gone), lost, now)
        after = status.take_out(record, [each for each in states if each.rank in ranks], spec.round)
        if after != record:
            data = {
                "turns": status.write(after.turns),
                "replaced": status.write(after.replaced),
                "seen": status.write(after.seen),
            }
            await self._swap(record, data)
        for each in after.replaced:
            await self.tunnels.tell_removed(each.pod)
            await self._drop([each.pod], _AT_ONCE if each.ended_at else None)
        return after

    async def _check_fields(self, spec: GangSpec, node: KubernetesNode, agent: str) -> None:
        """Raise Refused if the API server refuses pod fields from the settings or the task. Fields
        that the API server has accepted once are not checked again.
        """
        wanted = {
            "[providers.kubernetes] pod": self._terms.options.pod,
            "resources.options.kubernetes.pod": spec.options.get("pod") or {},
        }
        for where, fields in wanted.items():
            key = json.dumps([fields, node.resource], sort_keys=True, default=str)
            if not fields or key in self._accepted:
                continue
            others = {name: value for name, value in spec.options.items() if name != "pod"}
            plain = pods.make_pod(
                replace(spec, options=others),
                0,
                self._terms.mark,
                pods.OwnerObject(name=spec.name, uid="trial"),
                node,
                replace(self._terms.options, pod={}),
                agent,
            )
            if refused := await find_refused(self.api, self._path("pods"), plain, fields):
                raise Refused(f"{where}: {'; '.join(refused)}")
            self._accepted.add(key)

    async def _make_record(self, spec: GangSpec, pool: str) -> PodGangRecord | None:
        """Return the gang's record, creating it if it does not exist. Raises Refused."""
        record = pods.make_record(spec, self._terms.mark, self._terms.now().isoformat(), pool)
        made = await self.api.make(self._path("configmaps"), record)
        raw = made or await self.api.get(self._path("configmaps", spec.name))
        if not self._is_ours(raw):
            raise Refused(
                f"the name {spec.name} is taken by another installation in this namespace"
            )
        return status.read_record(raw)

    async def _make_pods(
        self,
        spec: GangSpec,
        record: PodGangRecord,
        owner: pods.OwnerObject,
        node: KubernetesNode,
        agent: str,
    ) -> None:
        """Create the gang's secret and pods. If the API server permanently refuses an object,
        delete all objects of the gang.
        """
        mark, options = self._terms.mark, self._terms.options
        made = [self.api.make(self._path("secrets"), pods.make_secret(spec, mark, owner))]
        if node.claim and spec.offer.accelerator_count:
            template = pods.make_claim_template(spec, mark, owner, node.claim)
            path = claims_path(node.claim, self.api.context.namespace)
            made.append(self.api.make(path, template))
        # The secret and the pods are created concurrently to save time: a kubelet reads the secret
        # only after it has seen the pod.
        results = await asyncio.gather(
            *made,
            *(
                self.api.make(
                    self._path("pods"),
                    pods.make_pod(spec, rank, mark, owner, node, options, agent),
                )
                for rank in range(spec.nodes)
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, ApiServerRefused):
                problem = _sort_refusal(result, await self._list_limits(result))
                if not isinstance(problem, TryAgain):
                    await self._forget(record)
                raise problem from result
            if isinstance(result, BaseException):
                raise result

    async def _list_limits(self, error: ApiServerRefused) -> Sequence[str]:
        """Return the names of the namespace's LimitRanges if one of them caused the error, else
        ()."""
        if _LIMIT_RANGE.search(str(error)) is None:
            return ()
        try:
            found = await self.api.items(self._path("limitranges"))
        except ApiServerRefused:  # the user may not list LimitRanges
            return ("of the namespace",)
        return [each["metadata"]["name"] for each in found] or ("of the namespace",)

    async def _find_record(self, name: str) -> PodGangRecord | None:
        """Return the gang's record, or None if this installation has no such gang."""
        raw = await self.api.find(self._path("configmaps", name))
        return status.read_record(raw) if raw is not None and self._is_ours(raw) else None

    async def _check_queue(self) -> None:
        """Raise NoCapacity or Refused if Kueue's queue would not admit the pods. If the user has no
        permission to read queues, the queue is not checked.
        """
        if not self._terms.options.queue:
            return
        try:
            await probe_queue(self.api, self._terms.options.queue)
        except ApiServerRefused as error:
            if error.status != 403:
                raise

    async def _find_room(self, spec: GangSpec, count: int, *, waits: bool = True) -> KubernetesNode:
        """Return one of the offer's nodes. Raises NoCapacity if this number of the gang's pods no
        longer fits on the nodes, unless the settings and the caller let them wait.

        The resources are reserved for the gang until its pods exist, so that concurrent launches do
        not count these resources as free.
        """
        part = part_of_offer(spec.offer)
        for age in (_NODES_AGE, timedelta(0)):
            alike = await self._find_alike(spec, age)
            fitting = [node for node in alike if count_fitting(node, part)]
            room = sum(count_fitting(node, part) for node in fitting if not node.pool)
            pool = next((node for node in fitting if node.pool), None)
            waits = waits and self._terms.options.waits
            if waits or room >= count or pool is not None:
                live = [node for node in fitting if not node.pool]
                node = pool if pool is not None and room < count else [*live, *alike][0]
                self._promised[spec.name] = (
                    {node.resource: part} if spec.offer.accelerator_count else {"": part},
                    count,
                )
                same = all(each.rdma == node.rdma for each in alike)
                return node if same else replace(node, rdma="")  # pods may use any of the nodes
        raise NoCapacity(f"{spec.offer.key}: only {room} of {count} pods fit now")

    async def _find_alike(
        self, spec: GangSpec, age: timedelta = _NODES_AGE
    ) -> Sequence[KubernetesNode]:
        nodes = await self.nodes(age)
        for name, (parts, count) in self._promised.items():
            if name != spec.name:
                nodes = promise(nodes, parts, count)
        alike = nodes_for(nodes, spec.offer)
        if not alike:
            raise NoCapacity(f"{spec.offer.key}: the cluster no longer has nodes of this kind")
        return alike

    async def _place_agent(self, pack: Callable[[], bytes]) -> str:
        """Create the config map with the files that pods run, unless it exists, and return its
        name.
        """
        if not self._placed_agent:
            bundle = await asyncio.to_thread(lambda: make_bundle(pack()))
            await self.api.make(self._path("configmaps"), bundle)
            self._placed_agent = bundle["metadata"]["name"]
        return self._placed_agent

    async def _claim_volumes(self, spec: GangSpec) -> None:
        for volume in spec.volumes:
            if volume.kind is VolumeKind.NAMED:
                await self._claim(volume, spec.nodes)

    async def _claim(self, volume: Volume, nodes: int) -> None:
        if await self.api.find(self._path("persistentvolumeclaims", volume.source)) is not None:
            return
        if volume.size_gib is None:
            where = self.api.context.namespace
            raise Refused(
                f"volumes: the claim {volume.source} does not exist in {where}; set a `size` to "
                "create it"
            )
        await self.api.make(self._path("persistentvolumeclaims"), pods.make_claim(volume, nodes))

    # Polling

    async def _see(self, record: PodGangRecord, found: Mapping[str, Object]) -> GangSeen | None:
        now = self._terms.now()
        if record.ended is not None:
            if now - record.ended.at >= _REMEMBERED:
                await self.api.drop(self._path("configmaps", record.name))
                return None
            return status.as_seen(record, record.ended)
        exist = list(found.values())
        lost = await self._find_lost(exist)
        self._last.update(found)
        gone = {name: self._last[name] for name in record.all_pods if name in self._last}
        look = status.look(record, status.FoundPods(found, gone), lost, now)
        if look.replaced is not None:
            await self._patch(record.name, {"replaced": status.write(look.replaced)})
            record = await self._find_record(record.name) or record
        if look.end is not None:
            stopped = [name for name in found if name in look.stuck or status.is_over(found[name])]
            return await self._end(record, look.end, look.seen, stopped)
        if look.note is not None:
            await self._patch(record.name, {"seen": status.write(look.note)})
        if record.removing_at is not None:
            await self._drop(look.stuck, _AT_ONCE)
        elif hopeless := status.why_hopeless(
            [found[name] for name in record.pods if name in found],
            now,
            waits=self._terms.options.waits or record.waits_at(now),
        ):
            await self._remove(record, exist, hopeless)
        return look.seen

    async def _explain(self, seen: GangSeen, found: Mapping[str, Object]) -> GangSeen:
        """Add the reason of a starting gang if the status of its pods does not contain it, and the
        reason of a gang that Kueue has not admitted.
        """
        queue = self._terms.options.queue
        if queue and seen.state is GangState.QUEUED and any(map(is_gated, found.values())):
            why = await explain_wait(self.api, seen.name)
            return replace(seen, reason=f"waits in Kueue's queue {queue}: {why}") if why else seen
        if seen.state is not GangState.STARTING or seen.reason:
            return seen
        waiting = list(found.values())
        why = await find_obstacle(self.api, self._path("events"), waiting, self._terms.now())
        return replace(seen, reason=why)

    async def _find_lost(self, found: Sequence[Object]) -> Mapping[str, str]:
        after = timedelta(seconds=self._terms.options.lost_after_s)
        lost = {}
        for name in status.list_suspects(found):
            try:
                node = await self.api.find(f"/api/v1/nodes/{name}")
            except ApiServerRefused:
                # the user may not read nodes, so Cavvy waits until Kubernetes deletes the pods of a
                # lost node
                continue
            if reason := status.why_lost(node, after, self._terms.now()):
                lost[name] = reason
        return lost

    async def _end(
        self,
        record: PodGangRecord,
        ended: status.PodGangEnd,
        seen: GangSeen,
        stopped: Sequence[str],
    ) -> GangSeen:
        """Record that the gang has ended, then delete its pods.

        Pods in which nothing runs are deleted without a grace period. With a grace period, old
        kubelets keep ended pods for up to a minute, during which the pods' names cannot be used
        again.
        """
        if not await self._swap(record, {"ended": status.write(ended)}):
            return seen
        await self._drop(stopped, _AT_ONCE)
        if len(stopped) < record.nodes:
            await self._drop_pods(record)
            await self._leave_queue(record)  # some pods may never have started
        for number in {0, *(turn.round for turn in record.turns.values())}:
            await self.api.drop(self._path("secrets", pods.secret_name(record.name, number)))
        self._terms.changed(record.name)
        for name in record.all_pods:
            self._last.pop(name, None)
        return seen

    # Removing

    async def _remove(
        self, record: PodGangRecord, found: Sequence[Object], refusal: str = ""
    ) -> None:
        now = self._terms.now()
        data = {"removing_at": now.isoformat()} if record.removing_at is None else {}
        begun = [rank for pod in found if (rank := status.read_pod(pod, {}, now)).started_at]
        if begun and not record.seen:
            data["seen"] = status.write(begun)
        if refusal:
            data["refusal"] = refusal
        if data:
            await self._patch(record.name, data)
        for pod in found:
            self._last[pod["metadata"]["name"]] = pod
        # If no pod has started, delete the pods without a grace period: old kubelets need a minute
        # to end a pod while its volumes are being mounted.
        await self._drop_pods(record, None if begun else _AT_ONCE)
        if not begun:  # for started pods, this would free the quota before they have ended
            await self._leave_queue(record)

    async def _drop_pods(self, record: PodGangRecord, options: Object | None = None) -> None:
        await asyncio.gather(*(self.tunnels.tell_removed(name) for name in record.all_pods))
        await self._drop(record.all_pods, options)

    async def _drop(self, names: Sequence[str], options: Object | None) -> None:
        await asyncio.gather(*(self.api.drop(self._path("pods", name), options) for name in names))

    async def _leave_queue(self, record: PodGangRecord) -> None:
        """Delete Kueue's workload object, because the object keeps the gang's place in the queue
        and prevents the deletion of pods that Kueue has not admitted.
        """
        if not self._terms.options.queue:
            return
        namespace = self.api.context.namespace
        try:
            version = await find_kueue(self.api)
            await self.api.drop(f"{version}/namespaces/{namespace}/workloads/{record.name}")
        except ApiServerRefused as error:
            # If the user may not delete the workload object, Kueue decides when to free the quota.
            # Without Kueue, there is no such object.
            if error.status not in (403, 404):
                raise

    async def _forget(self, record: PodGangRecord) -> None:
        """Delete all objects of a gang in which no pod has started."""
        await self._drop(record.pods, _AT_ONCE)
        await self._leave_queue(record)
        await self.api.drop(self._path("secrets", record.name))
        await self.api.drop(self._path("configmaps", record.name))

    async def _swap(self, record: PodGangRecord, data: Mapping[str, str]) -> bool:
        """Change the record; return False if it no longer exists. Raises TryAgain if it has changed
        since it was read.
        """
        body = {"metadata": {"resourceVersion": record.version}, "data": dict(data)}
        try:
            return await self.api.patch(self._path("configmaps", record.name), body) is not None
        except ApiServerRefused as error:
            if error.status == 409:
                raise TryAgain(
                    f"the record of {record.name} has changed in the meantime; read it again"
                ) from error
            raise

    async def _patch(self, name: str, data: Mapping[str, str]) -> None:
        await self.api.patch(self._path("configmaps", name), {"data": dict(data)})

    def _is_ours(self, raw: Object) -> bool:
        labels = raw["metadata"].get("labels") or {}
        return bool(labels.get(pods.INSTALLATION) == self._terms.mark)


def part_of_offer(offer: Offer) -> ResourceAmount:
    """Return the resource requests of each pod of an offer."""
    return part_of(
        NodeShape(
            cpus=int(offer.vcpus), memory_mib=offer.memory_mib, gpus=offer.accelerator_count, gpu=""
        )
    )


def _sort_refusal(error: ApiServerRefused, limits: Sequence[str]) -> ProviderError:
    """Return the provider error for a refusal. Return NoCapacity if other pods use too much of a
    quota, and QuotaTooSmall if a quota or LimitRange is too small even without other pods. `limits`
    are the names of the LimitRanges that may have caused the refusal.
    """
    if limits:
        return QuotaTooSmall(f"LimitRange {' or '.join(limits)}: {error}")
    found = _QUOTA.search(str(error))
    if found is None:
        return error.provider_error
    text = f"ResourceQuota {found[1]}: {error}"
    too_small = read_quantity(found[2]) > read_quantity(found[3])
    return QuotaTooSmall(text) if too_small else NoCapacity(text)


@asynccontextmanager
async def _sorted(what: str) -> AsyncIterator[None]:
    """Convert the errors of the API server to provider errors whose messages start with `what`."""
    try:
        yield
    except ApiServerRefused as error:
        problem = error.provider_error
        raise type(problem)(f"{what}: {problem}") from error
