"""Translates the resources and volumes of a pod."""

from collections.abc import Iterator, Mapping

from cavvy.catalog.accelerators import find_accelerator
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, Volume, VolumeKind
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.kubernetes.objects import ServiceObjects, Values, at

_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
# labels of nodes that name the GPU: of NVIDIA's device plugin, GKE, and EKS with Karpenter
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
_BYTES: Mapping[str, float] = {
    **{unit: 1000.0 ** (power + 1) for power, unit in enumerate("kMGTPE")},
    **{f"{unit}i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")},
    "": 1.0,
}
_MIB, _GIB = 1 << 20, 1 << 30


def read_resources(objects: ServiceObjects, kept_keys: TranslationNotes) -> ResourceSpec:
    """Return the container's resource requests, or else its limits."""
    container = objects.container
    limits, requests = at(container, "resources", "limits"), at(container, "resources", "requests")
    asked = {**limits, **requests}
    cpus, memory = asked.get("cpu"), asked.get("memory")
    disk = asked.get("ephemeral-storage")
    gpus = next((asked[key] for key in _GPUS if key in asked), None)
    needs = () if gpus is None else tuple(_need_gpus(objects, int(gpus), kept_keys))
    return ResourceSpec(
        accelerators=needs,
        cpus_min=None if cpus is None else read_quantity(cpus),
        memory_min_mib=None if memory is None else round(read_quantity(memory) / _MIB),
        disk_gib=None if disk is None else max(1, round(read_quantity(disk) / _GIB)),
    )


def read_volumes(objects: ServiceObjects, kept_keys: TranslationNotes) -> tuple[Volume, ...]:
    """Return the mounted claims, folders of the node and NFS exports."""
    sources = {each.get("name"): each for each in objects.pod.get("volumes") or ()}
    found = []
    for mount in objects.container.get("volumeMounts") or ():
        name = mount.get("name")
        source = sources.get(name, {})
        read_only = bool(mount.get("readOnly", False))
        if mount.get("subPath") or mount.get("subPathExpr"):
            reason = "a folder of a volume cannot be mounted; mount the volume"
            kept_keys.refuse(objects.mark, f"volumeMounts.{name}.subPath", reason)
        made = next(_list_volumes(objects, source, str(mount.get("mountPath")), read_only), None)
        if made is not None:
            found.append(made)
        elif "emptyDir" in source:
            kept_keys.note(objects.mark, f"volumes.{name}", "a folder of the container is used")
        else:
            kind = next((key for key in source if key != "name"), "nothing")
            kept_keys.refuse(objects.mark, f"volumes.{name}", f"{kind} has no equivalent")
    return tuple(found)


def read_quantity(value: object) -> float:
    """Parse a quantity of Kubernetes, such as 500m, 16Gi or 2. Raises ValueError."""
    text = str(value).strip()
    number = text.rstrip("kKMGTPEim")
    unit = text[len(number) :]
    return float(number) / 1000 if unit == "m" else float(number) * _BYTES[unit]


def _list_volumes(
    objects: ServiceObjects, source: Values, path: str, read_only: bool
) -> Iterator[Volume]:
    """Yield the volume for this source, or nothing if Cavvy has no equivalent."""
    if claim := at(source, "persistentVolumeClaim"):
        name = str(claim.get("claimName"))
        spec = next(
            (
                at(each, "spec")
                for each in objects.claims
                if at(each, "metadata").get("name") == name
            ),
            {},
        )
        size = at(spec, "resources", "requests").get("storage")
        yield Volume(
            kind=VolumeKind.NAMED,
            source=name,
            path=path,
            read_only=read_only,
            size_gib=None if size is None else max(1, round(read_quantity(size) / _GIB)),
            type=str(spec.get("storageClassName") or ""),
        )
    if host := at(source, "hostPath"):
        kind, where = VolumeKind.HOST, str(host.get("path"))
        yield Volume(kind=kind, source=where, path=path, read_only=read_only)
    if nfs := at(source, "nfs"):
        where = f"{nfs.get('server')}:{nfs.get('path')}"
        yield Volume(kind=VolumeKind.NFS, source=where, path=path, read_only=read_only)


def _need_gpus(
    objects: ServiceObjects, count: int, kept_keys: TranslationNotes
) -> Iterator[AcceleratorNeed]:
    """Yield a request for `count` GPUs for each product that the node selector or the required node
    affinity names, or for any GPU if neither names a product."""
    labels = at(objects.pod, "nodeSelector")
    named = [str(labels[each]) for each in _PRODUCTS if each in labels]
    for label in labels.keys() - set(_PRODUCTS):
        reason = "labels of nodes have no equivalent; `resources` determines which nodes fit"
        kept_keys.note(objects.mark, f"nodeSelector.{label}", reason)
    for product in named[:1] or dict.fromkeys(_list_affine(objects)) or ("",):
        known = find_accelerator(product) if product else None
        if product and known is None:
            reason = f"{product} is not a GPU of the catalog; write `resources.gpu`"
            kept_keys.refuse(objects.mark, "nodeSelector" if named else "affinity", reason)
        yield AcceleratorNeed(
            name=None if known is None else known.accelerator.name,
            count_min=count,
            memory_min_mib=None if known is None else known.memory_mib,
            memory_max_mib=None if known is None else known.memory_mib,
        )


def _list_affine(objects: ServiceObjects) -> Iterator[str]:
    """Yield the GPU products that the required node affinity permits."""
    affinity = at(objects.pod, "affinity", "nodeAffinity")
    terms = at(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    for term in terms.get("nodeSelectorTerms") or ():
        for rule in term.get("matchExpressions") or ():
            if rule.get("key") in _PRODUCTS and rule.get("operator") == "In":
                yield from map(str, rule.get("values") or ())
