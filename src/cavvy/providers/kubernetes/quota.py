"""Applies a namespace's quotas to offers. No I/O."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.kubernetes.cluster import KubernetesNode, nodes_for, read_quantity

Object = Mapping[str, Any]

_MIB = 1024 * 1024


class QuotaUse(NamedTuple):
    """One limit of a ResourceQuota, and the amount in use."""

    quota: str
    resource: str
    used: Fraction
    hard: Fraction

    def __str__(self) -> str:
        return (
            f"ResourceQuota {self.quota} ({self.resource}: {float(self.used):g} of "
            f"{float(self.hard):g} used)"
        )


def limit(offer: Offer, nodes: Sequence[KubernetesNode], quotas: Sequence[Object]) -> Offer:
    """Return the offer, with its capacity reduced to the amount that the quotas allow."""
    alike = nodes_for(nodes, offer)
    resource = alike[0].resource if alike and offer.accelerator_count else ""
    memory = Fraction(offer.memory_mib * _MIB)
    asked = {
        "pods": Fraction(1),
        "count/pods": Fraction(1),
        "cpu": Fraction(str(offer.vcpus)),
        "requests.cpu": Fraction(str(offer.vcpus)),
        "memory": memory,
        "requests.memory": memory,
        "limits.memory": memory,
    }
    if resource:
        asked[f"requests.{resource}"] = Fraction(offer.accelerator_count)
    rooms = [
        (max(0, int((each.hard - each.used) / asked[each.resource])), str(each))
        for each in list_quotas(quotas)
        if asked.get(each.resource)
    ]
    room, by = min(rooms, default=(None, ""))
    if room is None or (offer.capacity is not None and offer.capacity <= room):
        return offer
    if offer.capacity is None and room > 0:
        return offer  # the pods can wait for free quota, just as they wait for nodes
    return replace(offer, capacity=room, limited_by=by, source=f"{offer.source}, limited by quota")


def list_quotas(quotas: Sequence[Object]) -> Sequence[QuotaUse]:
    """Return the limits of all quotas."""
    return [
        QuotaUse(
            quota=(quota.get("metadata") or {}).get("name", ""),
            resource=name,
            used=read_quantity((quota.get("status") or {}).get("used", {}).get(name, 0)),
            hard=read_quantity(hard),
        )
        for quota in quotas
        for name, hard in (
            (quota.get("status") or {}).get("hard") or quota["spec"].get("hard") or {}
        ).items()
    ]
