"""Places the pods of a gang close to each other. Kueue gets annotations and places all pods at once
(https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/). Without Kueue, pods have an
affinity to the pods of their own gang, or of their own slice of it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from cavvy.domain.tasks import Objection, TaskSpec, TopologyNeed
from cavvy.spec.problems import nearest

Object = dict[str, Any]

SLICE, _RANK = "cavvy/slice", "cavvy/rank"
# Labels that Kubernetes and NVIDIA's GPU feature discovery give to nodes, by their names in tasks.
_LABELS = {
    "zone": "topology.kubernetes.io/zone",
    "region": "topology.kubernetes.io/region",
    "host": "kubernetes.io/hostname",
    "nvlink": "nvidia.com/gpu.clique",
}
_KUEUE = "kueue.x-k8s.io"
_HINTS = ("rack", "block", "zone", "topology", "clique", "switch", "pod-slice", "domain")


def find_label(name: str, own: Mapping[str, str]) -> str:
    """Return the label of nodes that a task calls `name`. `own` are the names of the settings."""
    return own.get(name) or _LABELS.get(name, name)


def object_to_labels(
    task: TaskSpec, own: Mapping[str, str], known: Collection[str]
) -> Objection | None:
    """Return why no node of the clusters has the labels that the task requires, or None. `known`
    are the labels of all nodes, or empty if they have not been read."""
    need = task.topology
    for key, name in (("same", need.same), ("prefer", need.prefer)) if need is not None else ():
        label = find_label(name or "", own)
        if name is None or not known or label in known:
            continue
        telling = sorted(each for each in known if any(hint in each for hint in _HINTS))
        close = nearest(label, known)
        named = ", ".join(telling[:8]) or "none that names a place"
        hint = f"did you mean {close}?" if close else f"labels of places are {named}"
        setting = "" if label != name else "; the setting `topology` gives labels shorter names"
        return Objection(f"topology.{key}", f"no node has the label {label}; {hint}{setting}")
    return None


def place_together(
    pod: Object, need: TopologyNeed, rank: int, gang: Mapping[str, str], own: Mapping[str, str]
) -> None:
    """Add to a pod where it is placed. `gang` are labels of all pods of the gang."""
    if f"{_KUEUE}/queue-name" in pod["metadata"]["labels"]:
        pod["metadata"]["labels"].setdefault(_RANK, str(rank))
        pod["metadata"]["annotations"] |= _annotate(need, own)
        return
    affinity = pod["spec"].setdefault("affinity", {}).setdefault("podAffinity", {})
    part: Mapping[str, str] = {}
    if need.slice is not None:
        part = {SLICE: str(rank // need.slice)}
        pod["metadata"]["labels"] |= part
    if need.same is not None:
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = [
            _term(find_label(need.same, own), {**gang, **part})
        ]
        part = {}
    if need.prefer is not None:
        term = _term(find_label(need.prefer, own), {**gang, **part})
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "podAffinityTerm": term}
        ]


def _term(label: str, pods: Mapping[str, str]) -> Object:
    return {"topologyKey": label, "labelSelector": {"matchLabels": dict(pods)}}


def _annotate(need: TopologyNeed, own: Mapping[str, str]) -> Mapping[str, str]:
    """Return Kueue's annotations. Kueue accepts one of required and preferred for all pods, and
    needs one of them beside that of slices."""
    same = find_label(need.same, own) if need.same else ""
    prefer = find_label(need.prefer, own) if need.prefer else ""
    found = {f"{_KUEUE}/pod-group-pod-index-label": _RANK}
    if same and need.slice is not None:
        found[f"{_KUEUE}/podset-slice-required-topology"] = same
        found[f"{_KUEUE}/podset-slice-size"] = str(need.slice)
        found[f"{_KUEUE}/podset-preferred-topology"] = prefer or same
    elif same:
        found[f"{_KUEUE}/podset-required-topology"] = same
    else:
        found[f"{_KUEUE}/podset-preferred-topology"] = prefer
    return found
