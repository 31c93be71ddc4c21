"""Looks up the prices of a cluster's machines in the catalog of the cloud that provides the
machines. The caller passes the functions that read the catalog.

A node's machine is identified by the provider ID that the cloud's controller sets
(https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/node-v1) and the label
`node.kubernetes.io/instance-type`. CoreWeave's nodes are recognized by their labels. CoreWeave's
price list and CoreWeave's nodes use different names for machines, so a price is looked up by the
machine's accelerators.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.batch.shapes import identify_gpu
from cavvy.providers.kubernetes.cluster import KubernetesNode, NodeMachine

# the catalog's on-demand and spot offers of a provider, and of one of its instance types
ListPrices = Callable[[str], Sequence[Offer]]
ListInstance = Callable[[str, str], Sequence[Offer]]

# time after which prices are read again, because the catalog may be newer
_AGE = timedelta(hours=1)
_COREWEAVE = "coreweave"


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
        if not timedelta(0) <= now - self._known_since < _AGE:
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
        returned.
        """
        purchase = Purchase.SPOT if node.spot else Purchase.ON_DEMAND
        offers = [each for each in self._list(machine, node) if each.purchase is purchase]
        if machine.cloud != _COREWEAVE and machine.region:
            offers = [each for each in offers if each.region == machine.region]
            return max((each.rate for each in offers), default=None)
        return min((each.rate for each in offers), default=None)

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
        return [each for each in offers if bool(each.accelerator_count) == bool(gpus)]
