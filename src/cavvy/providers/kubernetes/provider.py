"""The Kubernetes provider: each context is a region, and each gang is a group of bare pods. The
prices of a cluster's machines are those of the cloud that provides the machines.

A node's machine is identified by the provider ID that the cloud's controller sets
(https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/node-v1) and the label
`node.kubernetes.io/instance-type`. CoreWeave's nodes are recognized by their labels. CoreWeave's
price list and CoreWeave's nodes use different names for machines, so a price is looked up by the
machine's accelerators.

Watches the pods of one context: reports changed gangs, and keeps a tunnel to each running
pod.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import HourlyRate, UnitError, parse_rate
from cavvy.domain.values import replace
from cavvy.providers.abilities import REPLACES_NODES
from cavvy.providers.base import (
    Feature,
    GangSeen,
    GangSpec,
    Manifest,
    NoCapacity,
    ProviderContext,
    ProviderError,
    Refused,
)
from cavvy.providers.batch.fan_out import FanOut, look_at_all, remove_from_all, whoami_all
from cavvy.providers.batch.shapes import AcceleratorRates, identify_gpu
from cavvy.providers.hosts.changed_gangs import ChangedGangs
from cavvy.providers.kubernetes import pods
from cavvy.providers.kubernetes.api import ApiServerRefused, KubernetesApi
from cavvy.providers.kubernetes.cluster import KubernetesNode, NodeMachine, list_offers
from cavvy.providers.kubernetes.context import ClusterContext, ContextTerms
from cavvy.providers.kubernetes.docker_sidecar import find_fault
from cavvy.providers.kubernetes.exec_tunnels import ExecTunnels
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.kubeconfig import KubeContext, KubeLogin, read_contexts
from cavvy.providers.kubernetes.options import object_to_tunnel, read_options
from cavvy.providers.kubernetes.quota import limit
from cavvy.providers.kubernetes.topology import object_to_labels
from cavvy.providers.kubernetes.whoami import make_policy, whoami
from cavvy.spec.support import read_options as read_task_options

# the catalog's on-demand and spot offers of a provider, and of one of its instance types
ListPrices = Callable[[str], Sequence[Offer]]
ListInstance = Callable[[str, str], Sequence[Offer]]

# time after which prices are read again, because the catalog may be newer
_PRICE_AGE = timedelta(hours=1)
_COREWEAVE = "coreweave"

Object = dict[str, Any]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0
_OVER = ("Succeeded", "Failed")


class KubernetesProvider:
    """Implements `Provider`, and the abilities listed in the manifest."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self._context = context
        self._settings = context.settings
        self.mark = hashlib.sha256(context.installation.encode()).hexdigest()[:12]
        self._options = read_options(context.settings)
        self.manifest = _without_repairs(manifest) if self._options.queue else manifest
        try:
            self._gpu_rate = AcceleratorRates(self._text("price_usd_gpu_hr") or "0")
        except (UnitError, ValueError) as error:
            raise Refused(f"[providers.kubernetes] price_usd_gpu_hr: {error}") from error
        self._prices = MachinePrices(context.list_instance, context.list_prices, context.now)
        self._clusters: dict[str, ClusterContext] = {}
        self._parts = FanOut[Sequence[Offer]]()
        self._watches: dict[str, PodWatch] = {}
        self._changes = ChangedGangs()

    async def offers(self) -> Sequence[Offer]:
        told = await self._parts.ask(
            {name: partial(self._offers_of, cluster) for name, cluster in self.clusters().items()}
        )
        return [offer for offers in told.values() for offer in offers]

    def silent(self) -> Sequence[str]:
        return self._parts.silent

    async def launch(self, gang: GangSpec) -> None:
        await self._find_cluster(gang).launch(gang)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        await self._find_cluster(gang).replace(gang, ranks)

    def _find_cluster(self, gang: GangSpec) -> ClusterContext:
        """Return the context of the gang's offer. Raises NoCapacity."""
        cluster = self.clusters().get(gang.offer.region)
        if cluster is None or gang.offer.provider != self.manifest.name:
            raise NoCapacity(f"{gang.offer.key}: Cavvy no longer uses the context of this offer")
        if gang.offer.zone not in (None, cluster.api.context.namespace):
            raise NoCapacity(
                f"{gang.offer.key}: the context now uses the namespace "
                f"{cluster.api.context.namespace}"
            )
        return cluster

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return await look_at_all(
            (cluster.gangs(name) for cluster in self.clusters().values()), name
        )

    async def remove(self, name: str) -> None:
        await remove_from_all(cluster.remove(name) for cluster in self.clusters().values())

    async def changed(self) -> str:
        self._watch()
        return await self._changes.get()

    async def relay(self) -> None:
        """Keep a tunnel open to each running pod of every gang."""
        self._watch()
        for watch in self._watches.values():
            watch.relay()
        try:
            await asyncio.Event().wait()
        finally:
            for watch in self._watches.values():
                watch.stop_relaying()

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        if any(volume.options for volume in task.volumes):
            reason = "pods mount NFS exports with the node's mount options; remove `options`"
            return [Objection("volumes", reason)]
        if any(not volume.keep for volume in task.volumes):
            reason = (
                "a volume claim outlives its pods; remove `keep: false`, and delete the claim "
                "yourself"
            )
            return [Objection("volumes", reason)]
        given = read_task_options(task.resources, self.manifest.name)
        labels = [each.labels for each in self.clusters().values()]
        known = frozenset[str]().union(*labels) if all(labels) else frozenset[str]()
        if unknown := object_to_labels(task, self._options.topology, known):
            return [unknown]
        if tunnel := object_to_tunnel(task, given.get("pod") or self._options.pod):
            return [tunnel]
        docker = given.get("docker")
        fault = None if docker is None else find_fault(docker)
        return [Objection("resources.options.kubernetes.docker", fault)] if fault else []

    async def whoami(self) -> Sequence[tuple[str, str]]:
        clusters = self.clusters().items()
        return await whoami_all(
            {
                name: partial(whoami, cluster, self._options, self.mark, self._prices.put)
                for name, cluster in clusters
            }
        )

    def policy(self) -> str:
        return make_policy(self._namespace(None), self._options.queue)

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        cluster = self._clusters.get(offer.region) if offer is not None else None
        alike = cluster.list_alike(offer) if cluster is not None and offer is not None else ()
        return make_export(task, offer, nodes, self._options, alike[0] if alike else None)

    async def close(self) -> None:
        await self._parts.close()
        for watch in self._watches.values():
            await watch.close()
        for cluster in self._clusters.values():
            await cluster.close()

    def clusters(self) -> Mapping[str, ClusterContext]:
        """Return the contexts in use, by name. Raises Refused."""
        if not self._clusters:
            wanted = [name.strip() for name in self._text("contexts").split(",") if name.strip()]
            for context in read_contexts(self._text("kubeconfig"), wanted):
                self._clusters[context.name] = self._make_cluster(context)
        return self._clusters

    def _make_cluster(self, context: KubeContext) -> ClusterContext:
        context = replace(context, namespace=self._namespace(context))
        api = KubernetesApi(context, KubeLogin(context, self._context.home, self._context.now))
        terms = ContextTerms(
            mark=self.mark,
            options=self._options,
            agent=self._context.agent_archive,
            now=self._context.now,
            find_instance=self._context.find_instance,
            changed=self._changes.put,
        )
        return ClusterContext(
            api, ExecTunnels(api, self._context.server_address, self._context.home), terms
        )

    async def _offers_of(self, cluster: ClusterContext) -> Sequence[Offer]:
        nodes, quotas = await asyncio.gather(cluster.nodes(), cluster.quotas())
        priced = nodes
        if self._settings.get("catalog_prices", True):
            priced = await asyncio.to_thread(self._prices.put, nodes)
        offers = list_offers(
            priced,
            region=cluster.api.context.name,
            zone=cluster.api.context.namespace,
            gpu_rate=self._gpu_rate,
            node_rate=parse_rate(str(self._settings.get("price_usd_node_hr", 0))),
            waits=self._options.waits,
        )
        return [limit(offer, nodes, quotas) for offer in offers]

    def _watch(self) -> None:
        for name, cluster in self.clusters().items():
            if name not in self._watches:
                self._watches[name] = PodWatch(cluster, self.mark, self._changes.put)

    def _namespace(self, context: KubeContext | None) -> str:
        return self._text("namespace") or (context.namespace if context else "default")

    def _text(self, name: str) -> str:
        return str(self._settings.get(name, "")).strip()


class MachinePrices:
    """Looks up the hourly prices of the machines on which nodes run."""

    def __init__(
        self, list_instance: ListInstance, list_prices: ListPrices, now: Callable[[], datetime]
    ) -> None:
        self._list_instance, self._list_prices, self._now = list_instance, list_prices, now
        self._known: dict[tuple[NodeMachine, str, int, bool], HourlyRate | None] = {}
        self._known_since = now()

    def put(self, nodes: Sequence[KubernetesNode]) -> Sequence[KubernetesNode]:
        """Return the nodes, with the known prices of the nodes' machines. A node that a pool can
        add is assumed to be in the region of the existing nodes. May block.
        """
        now = self._now()
        if not timedelta(0) <= now - self._known_since < _PRICE_AGE:
            self._known, self._known_since = {}, now
        home = next((node.machine.region for node in nodes if node.machine.region), "")
        return [replace(node, rate=self._rate(node, home)) for node in nodes]

    def _rate(self, node: KubernetesNode, home: str) -> HourlyRate:
        if not node.machine.cloud:
            return node.rate
        machine = node.machine._replace(region=node.machine.region or home)
        key = machine, node.product, node.shape.gpus, node.spot
        if key not in self._known:
            self._known[key] = self._find(machine, node)
        return self._known[key] or node.rate

    def _find(self, machine: NodeMachine, node: KubernetesNode) -> HourlyRate | None:
        """Return the machine's hourly price in its region. If prices differ between zones, the
        highest price is returned. If the region is unknown, the price of the cheapest region is
        returned. A spot node without a spot price in the catalog, which knows few of those of AWS
        and Azure, has the price on demand: such a node is not free.
        """
        offers, choose = self._list(machine, node), min
        if machine.cloud != _COREWEAVE and machine.region:
            offers, choose = [each for each in offers if each.region == machine.region], max
        for purchase in (Purchase.SPOT, Purchase.ON_DEMAND)[not node.spot :]:
            if rates := [each.rate for each in offers if each.purchase is purchase]:
                return choose(rates)
        return None

    def _list(self, machine: NodeMachine, node: KubernetesNode) -> Sequence[Offer]:
        """Return the catalog's offers of this machine."""
        name, _ = identify_gpu(node.product)
        gpus = node.shape.gpus
        if machine.cloud == _COREWEAVE:
            return [
                each
                for each in self._list_prices(_COREWEAVE)
                if gpus and (each.accelerator, each.accelerator_count) == (name, gpus)
            ]
        offers = self._list_instance(machine.cloud, machine.instance)
        if gpus and not any(each.accelerator_count for each in offers):
            # Google attaches GPUs to N1 machines; the catalog has one name for both
            attached = f"{machine.instance}-{name.lower()}x{gpus}"
            offers = self._list_instance(machine.cloud, attached)
        alike = [each for each in offers if bool(each.accelerator_count) == bool(gpus)]
        return alike if gpus else alike or offers  # GPUs without a driver are paid for, too


def _without_repairs(manifest: Manifest) -> Manifest:
    """Return the manifest for a cluster with Kueue, which admits all pods of a gang together."""
    kept = tuple(each for each in manifest.abilities if each is not REPLACES_NODES)
    reason = "Kueue, which the setting `queue` names, admits all pods of a gang together"
    unsupported = {**manifest.unsupported, Feature.REPAIR: reason}
    return replace(manifest, abilities=kept, unsupported=unsupported)


class PodWatch:
    """Runs a task that watches the pods until `close` is called. When the API server ends a watch,
    the task starts a new watch.
    """

    def __init__(self, cluster: ClusterContext, mark: str, changed: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._mark = mark
        self._changed = changed
        self._carrying = False
        self._known: dict[str, Object] = {}
        self._task = asyncio.create_task(self._run())

    def relay(self) -> None:
        """From now on, keep a tunnel to each running pod, including the pods that are already
        known.
        """
        self._carrying = True
        for pod in self._known.values():
            self._follow(pod)

    def stop_relaying(self) -> None:
        self._carrying = False
        for name in self._known:
            self._cluster.tunnels.let_go(name)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async for _ in self._watch():
                    pause = _FIRST_PAUSE_S
            except (ProviderError, ApiServerRefused, OSError):
                # until the next watch, the regular polls find changes
                pause = min(_LAST_PAUSE_S, pause * 2)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await asyncio.Event().wait()

    async def _watch(self) -> "Any":
        """List all pods, then watch them. Yields once after the initial list, and then after every
        change."""
        path = f"/api/v1/namespaces/{self._cluster.api.context.namespace}/pods"
        query = {"labelSelector": f"{pods.INSTALLATION}={self._mark}"}
        listed = await self._cluster.api.get(path, query)
        found = {pod["metadata"]["name"]: pod for pod in listed.get("items") or ()}
        for name in set(self._known) - set(found):
            self._take(self._known[name], gone=True)
        for pod in found.values():
            self._take(pod, gone=False)
        yield len(found)
        version = listed["metadata"]["resourceVersion"]
        async for event in self._cluster.api.watch(
            path, {**query, "resourceVersion": version, "timeoutSeconds": "600"}
        ):
            if event["type"] == "ERROR":
                return  # the resource version is too old for a watch, so list the pods again
            if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                self._take(event["object"], gone=event["type"] == "DELETED")
            yield 1

    def _take(self, pod: Object, *, gone: bool) -> None:
        name = pod["metadata"]["name"]
        self._cluster.note(pod, gone=gone)
        before = self._known.pop(name, None)
        if not gone:
            self._known[name] = pod
        if gone or before is None or _mark_of(before) != _mark_of(pod):
            self._follow(pod, gone=gone)
            self._changed(pod["metadata"]["labels"][pods.GANG])

    def _follow(self, pod: Object, *, gone: bool = False) -> None:
        if not self._carrying:
            return
        name = pod["metadata"]["name"]
        if gone or (pod.get("status") or {}).get("phase") in _OVER:
            self._cluster.tunnels.let_go(name)
        elif pod["spec"].get("nodeName"):
            self._cluster.tunnels.follow(
                name, runs=(pod.get("status") or {}).get("phase") == "Running"
            )


def _mark_of(pod: Object) -> object:
    """Return the fields of a pod that are compared to detect changes."""
    status = pod.get("status") or {}
    states = [
        sorted((each.get("state") or {}).keys()) for each in status.get("containerStatuses") or ()
    ]
    waits = [
        (each.get("type"), each.get("status"), each.get("reason"))
        for each in status.get("conditions") or ()
    ]
    return (
        status.get("phase"),
        status.get("reason"),
        states,
        waits,
        pod["spec"].get("nodeName"),
        pod["metadata"].get("deletionTimestamp"),
    )
