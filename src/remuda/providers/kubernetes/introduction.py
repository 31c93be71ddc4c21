"""What `remuda check` shows of a context: as whom, what there is, what is limited and what is missing."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from remuda.providers.base import Refused
from remuda.providers.batch.shapes import identify_gpu
from remuda.providers.kubernetes.calls.api import Answered
from remuda.providers.kubernetes.cluster import ClusterNode
from remuda.providers.kubernetes.policy import CLUSTER, NAMESPACED
from remuda.providers.kubernetes.quota import list_quotas
from remuda.providers.kubernetes.site import Site
from remuda.providers.kubernetes.wishes import Wishes

_KUEUE = "/apis/kueue.x-k8s.io/v1beta1"


async def introduce(site: Site, wishes: Wishes) -> Sequence[tuple[str, str]]:
    """Raises TryAgain, Refused."""
    context = site.api.context
    try:
        version = (await site.api.get("/version")).get("gitVersion", "")
        missing = await _list_missing(site)
    except Answered as error:
        raise error.sorted from error
    facts = [
        ("context", f"{context.name}, {context.server}, Kubernetes {version}"),
        ("user", context.impersonate or context.user),
        ("namespace", context.namespace),
    ]
    if missing:
        facts.append(("missing rights", f"{', '.join(missing)}; `remuda check kubernetes --policy` prints them all"))
    try:
        facts += _say_nodes(await site.nodes())
    except Refused as error:
        facts.append(("nodes", str(error)))
    for name, used, hard in list_quotas(await site.quotas()):
        facts.append((f"quota {name}", f"{_plain(used)} of {_plain(hard)} used"))
    if wishes.queue:
        facts.append(("queue", await _say_queue(site, wishes.queue)))
    return facts


def _say_nodes(nodes: Sequence[ClusterNode]) -> list[tuple[str, str]]:
    usable = [node for node in nodes if not node.why_not]
    names = {node.name for node in nodes}
    facts = [("nodes", f"{len({node.name for node in usable})} of {len(names)} usable")]
    has, free = Counter[str](), Counter[str]()
    for node in usable:
        if node.resource:
            name, _ = identify_gpu(node.product)
            has[name] += node.shape.gpus
            free[name] += max(0, node.free.gpus)
    facts.append(("accelerators", ", ".join(f"{has[n]} x {n}, {free[n]} free" for n in sorted(has)) or "none"))
    for node in nodes:
        if node.why_not:
            facts.append((f"node {node.name}", node.why_not))
        elif node.broken > 0:
            facts.append((f"node {node.name}", f"{node.broken} of {node.shape.gpus} {node.resource} are unhealthy"))
    return facts


async def _list_missing(site: Site) -> list[str]:
    """The rights that are wanted and not given; () where the cluster does not say."""
    wanted = [(site.api.context.namespace, *right) for right in NAMESPACED] + [("", *right) for right in CLUSTER]
    asked = [
        (namespace, group, *resource.partition("/")[::2], verb)
        for namespace, group, resource, verbs in wanted
        for verb in verbs
    ]
    answers = await asyncio.gather(*(_may(site, *each) for each in asked))
    return [
        f"{verb} {resource}{'/' + sub if sub else ''}{'' if namespace else ' of all namespaces'}"
        for (namespace, _, resource, sub, verb), may in zip(asked, answers, strict=True)
        if not may
    ]


async def _may(site: Site, namespace: str, group: str, resource: str, sub: str, verb: str) -> bool:
    attributes = {"namespace": namespace, "group": group, "resource": resource, "subresource": sub, "verb": verb}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in attributes.items() if value}},
    }
    answer = await site.api.make("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(((answer or {}).get("status") or {}).get("allowed"))


async def _say_queue(site: Site, queue: str) -> str:
    try:
        found = await site.api.find(f"{_KUEUE}/namespaces/{site.api.context.namespace}/localqueues/{queue}")
    except Answered as error:
        return f"{queue}: cannot be looked at: {error}"
    return queue if found is not None else f"{queue}: there is no such local queue of Kueue in this namespace"


def _plain(value: object) -> str:
    number = float(str(float(value)))  # type: ignore[arg-type]  # a Fraction
    return f"{number:g}"
