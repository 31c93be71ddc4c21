"""The objects of a Kubernetes file, as plain values."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from cavvy.domain.values import Struct, field
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.readers import child, items, text_at
from cavvy.spec.problems import SourceMark
from cavvy.spec.tree import MapNode, Node, to_value

Values = dict[str, Any]

_SCALER, _CLAIM = "HorizontalPodAutoscaler", "PersistentVolumeClaim"
_USED = ("Deployment", "Service", _SCALER, _CLAIM)


class ServiceObjects(Struct, frozen=True, kw_only=True):
    """The objects that describe one service; {} stands for an object that the file does not
    contain. `mark` is the position of the Deployment in the file.
    """

    mark: SourceMark
    deployment: Values = field(default_factory=dict)
    service: Values = field(default_factory=dict)
    scaler: Values = field(default_factory=dict)
    claims: Sequence[Values] = ()

    @property
    def pod(self) -> Values:
        return at(self.deployment, "spec", "template", "spec")

    @property
    def container(self) -> Values:
        return dict(next(iter(self.pod.get("containers") or ()), {}))


def read_objects(documents: Sequence[Node], kept_keys: TranslationNotes) -> ServiceObjects | None:
    """Return the objects of the service, or None if the file does not contain exactly one
    Deployment."""
    found: dict[str, list[tuple[SourceMark, Values]]] = {}
    for node in chain.from_iterable(map(_list_objects, documents)):
        values = to_value(node)
        if isinstance(values, dict):
            found.setdefault(str(values.get("kind")), []).append((node.mark, values))
    deployments = found.get("Deployment", [])
    if not deployments:
        mark, kinds = next(iter(documents)).mark, ", ".join(found) or "nothing"
        reason = f"Cavvy reads only Deployments, and the file has {kinds}; write a Cavvy file with "
        reason += "the image and the command, and `resources` for the GPUs"
        kept_keys.refuse(mark, "kind", reason)
        return None
    for kind, objects in found.items():
        if kind not in _USED:
            kept_keys.note(
                objects[0][0], kind, "`cavvy serve` does not need or use objects of this kind"
            )
    if len(deployments) > 1:
        mark = deployments[1][0]
        reason = f"expected one Deployment in the file, not {len(deployments)}"
        kept_keys.refuse(mark, "kind", reason)
        return None
    mark, deployment = deployments[0]
    others = {kind: [each for _, each in found.get(kind, [])] for kind in _USED}
    return _join(mark, deployment, others)


def _list_objects(node: Node) -> Sequence[Node]:
    """Return the objects of a document. `kubectl get -o yaml` writes several as one List."""
    is_list = isinstance(node, MapNode) and text_at(node, "kind") == "List"
    return items(child(node, "items")) if is_list else (node,)


def _join(
    mark: SourceMark, deployment: Values, others: Mapping[str, Sequence[Values]]
) -> ServiceObjects:
    """Return the Deployment with the objects that belong to it."""
    labels = at(deployment, "spec", "template", "metadata", "labels")
    name = at(deployment, "metadata").get("name")
    services = (each for each in others["Service"] if _selects(each, labels))
    scalers = (
        each for each in others[_SCALER] if at(each, "spec", "scaleTargetRef").get("name") == name
    )
    return ServiceObjects(
        mark=mark,
        deployment=deployment,
        service=next(services, {}),
        scaler=next(scalers, {}),
        claims=others[_CLAIM],
    )


def at(values: Values, *keys: str) -> Values:
    """Return the table at this path, or {} if the path does not exist."""
    for key in keys:
        found = values.get(key)
        values = found if isinstance(found, dict) else {}
    return values


def _selects(service: Values, labels: Values) -> bool:
    selector = at(service, "spec", "selector")
    return bool(selector) and selector.items() <= labels.items()
