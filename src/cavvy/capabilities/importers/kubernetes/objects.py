"""The objects of a Kubernetes file, as plain values, and their keys that have no equivalent."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from cavvy.capabilities.importers.readers import child, items, text_at
from cavvy.catalog.accelerators import KnownAccelerator, find_accelerator
from cavvy.domain.tasks import Fabric
from cavvy.domain.values import Struct, field
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import SourceMark
from cavvy.spec.tree import MapNode, Node, to_value

Values = dict[str, Any]

_SCALER, _CLAIM = "HorizontalPodAutoscaler", "PersistentVolumeClaim"
SERVICE_KINDS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "InferenceService")
_USED = (*SERVICE_KINDS, "Service", _SCALER, _CLAIM)
JOB_KINDS = (
    *("JobSet", "TrainJob", "PyTorchJob", "XGBoostJob", "TFJob", "MPIJob", "JAXJob"),
    *("RayJob", "RayCluster"),
    *("Job", "CronJob", "Pod"),
)
_CONFIG_MAP = "ConfigMap"
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


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


class JobObject(Struct, frozen=True, kw_only=True):
    """An object that describes a job, and what else of the file belongs to it. `mark` is its
    position in the file.
    """

    kind: str
    mark: SourceMark
    values: Values
    claims: Sequence[Values] = ()
    config_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    runtimes: Sequence[Values] = ()  # of the TrainJobs of Kubeflow


class FoundService(Struct, frozen=True, kw_only=True):
    """An object that describes a service, and the others of the file by their kinds."""

    kind: str
    mark: SourceMark
    values: Values
    others: Mapping[str, Sequence[Values]] = field(default_factory=dict)


def find_job(documents: Sequence[Node], kept_keys: TranslationNotes) -> JobObject | None:
    """Return the job of the file, or None if the file has a service or no job. More than one
    job is refused.
    """
    found = _read_kinds(documents)
    jobs = [(kind, each) for kind in JOB_KINDS for each in found.get(kind, ())]
    if not jobs or any(kind in found for kind in SERVICE_KINDS):
        return None
    runtimes = _RUNTIMES if jobs[0][0] == "TrainJob" else ()
    for kind, objects in found.items():
        if kind not in (*JOB_KINDS, _CLAIM, _CONFIG_MAP, *runtimes):
            reason = "`cavvy run` does not need or use objects of this kind"
            kept_keys.note(objects[0][0], kind, reason)
    kind, (mark, values) = jobs[0]
    if len(jobs) > 1:
        reason = f"expected one job in the file, not {len(jobs)}; `after` and `group` of Cavvy "
        kept_keys.refuse(jobs[1][1][0], "kind", f"{reason}files join several")
    return JobObject(
        kind=kind,
        mark=mark,
        values=values,
        claims=[each for _, each in found.get(_CLAIM, ())],
        config_maps={
            str(at(each, "metadata").get("name")): {
                str(key): str(value) for key, value in at(each, "data").items()
            }
            for _, each in found.get(_CONFIG_MAP, ())
        },
        runtimes=[each for kind in runtimes for _, each in found.get(kind, ())],
    )


def _read_kinds(documents: Sequence[Node]) -> dict[str, list[tuple[SourceMark, Values]]]:
    found: dict[str, list[tuple[SourceMark, Values]]] = {}
    for node in chain.from_iterable(map(list_objects, documents)):
        values = to_value(node)
        if isinstance(values, dict):
            found.setdefault(str(values.get("kind")), []).append((node.mark, values))
    return found


def read_objects(documents: Sequence[Node], kept_keys: TranslationNotes) -> FoundService | None:
    """Return the objects of the service, or None if the file does not contain exactly one object
    of `SERVICE_KINDS`."""
    found = _read_kinds(documents)
    deployments = [(kind, each) for kind in SERVICE_KINDS for each in found.get(kind, ())]
    if not deployments:
        mark, kinds = next(iter(documents)).mark, ", ".join(found) or "nothing"
        known = ", ".join((*SERVICE_KINDS, *JOB_KINDS))
        reason = f"Cavvy reads objects of the kinds {known}, and the "
        reason += f"file has {kinds}; write a Cavvy file with "
        reason += "the image and the command, and `resources` for the GPUs"
        kept_keys.refuse(mark, "kind", reason)
        return None
    for kind, objects in found.items():
        if kind not in _USED:
            kept_keys.note(
                objects[0][0], kind, "`cavvy serve` does not need or use objects of this kind"
            )
    if len(deployments) > 1:
        mark = deployments[1][1][0]
        kinds = " and ".join(dict.fromkeys(kind for kind, _ in deployments))
        reason = f"expected one {kinds} in the file, not {len(deployments)}"
        kept_keys.refuse(mark, "kind", reason)
        return None
    kind, (mark, values) = deployments[0]
    others = {kind: [each for _, each in found.get(kind, [])] for kind in _USED}
    return FoundService(kind=kind, mark=mark, values=values, others=others)


def list_objects(node: Node) -> Sequence[Node]:
    """Return the objects of a document. `kubectl get -o yaml` writes several as one List."""
    is_list = isinstance(node, MapNode) and text_at(node, "kind") == "List"
    return items(child(node, "items")) if is_list else (node,)


def join_service(
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


_BY_RESOURCES = "`resources` determines which nodes fit"
_NO_EQUIVALENT = "Cavvy has no equivalent of this key"
_POD = "`resources: {options: {kubernetes: {pod: …}}}` of a Cavvy file sets it"
_UPDATES = "`service.update` of a Cavvy file determines how replicas are replaced"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class PodKeys(Struct, frozen=True, kw_only=True):
    """The keys of one table of an object. `read` are translated or have no effect; `noted` and
    `refused` have a reason. All other keys are refused if `strict` is true, and noted otherwise,
    with the reason `other`.
    """

    read: Collection[str]
    noted: Mapping[str, str]
    refused: Mapping[str, str]
    other: str = _NO_EQUIVALENT
    strict: bool = True


_OF_POD = PodKeys(
    read=_words(
        "containers volumes nodeSelector terminationGracePeriodSeconds restartPolicy schedulerName "
        "enableServiceLinks automountServiceAccountToken preemptionPolicy"
    ),
    noted={
        **dict.fromkeys(
            ("affinity", "tolerations", "topologySpreadConstraints", "nodeName"), _BY_RESOURCES
        ),
        **dict.fromkeys(
            ("serviceAccountName", "serviceAccount"),
            "replicas do not get a Kubernetes service account",
        ),
        "priorityClassName": "write `priority`",
        "securityContext": "the image's user runs the program",
        "runtimeClassName": "the provider chooses the runtime of containers",
        "hostIPC": "a replica can use all of a node's shared memory",
        "shareProcessNamespace": "a replica has only one container",
        "dnsPolicy": "the provider determines how names of hosts are resolved",
    },
    refused={
        "initContainers": "write their commands in `setup`",
        "imagePullSecrets": "write the login into a Cavvy secret, and name the secret in "
        "`image_login`",
        "hostNetwork": "replicas cannot use the network of their host",
        "resourceClaims": "write the devices in `resources`",
    },
)
_OF_CONTAINER = PodKeys(
    read=_words(
        "name image command args workingDir env ports resources readinessProbe startupProbe "
        "volumeMounts imagePullPolicy terminationMessagePath terminationMessagePolicy"
    ),
    noted={
        "livenessProbe": "only `readinessProbe` and `startupProbe` are read; Cavvy replaces a "
        "replica whose program ends",
        **dict.fromkeys(("stdin", "stdinOnce", "tty"), "replicas have no terminal"),
        "securityContext": "the image's user runs the program",
    },
    refused={
        "envFrom": "write the variables in `env`",
        "lifecycle": "write the commands in `run`",
    },
)
_OF_DEPLOYMENT = PodKeys(
    read=("replicas", "selector", "template", "revisionHistoryLimit", "progressDeadlineSeconds"),
    noted={"strategy": _UPDATES, "minReadySeconds": _UPDATES},
    refused={"paused": "the replicas of a paused Deployment do not start; delete the key"},
    strict=False,
)
# resources of RDMA networks: of EKS, CoreWeave and AKS
FABRICS = {
    "vpc.amazonaws.com/efa": Fabric.EFA,
    "rdma/ib": Fabric.INFINIBAND,
    "rdma/shared_ib": Fabric.INFINIBAND,
}
_OF_RESOURCES = PodKeys(
    read=("cpu", "memory", "nvidia.com/gpu", "amd.com/gpu", "ephemeral-storage", *FABRICS),
    noted={},
    refused={},
    other="pods cannot request this resource; `resources.gpu` of a Cavvy file requests "
    "accelerators",
)
# the parts of a container's `securityContext` that give the program more rights
_PRIVILEGES = ("privileged", "capabilities.add")


def keep_unread(objects: ServiceObjects, kept_keys: TranslationNotes) -> None:
    """Note or refuse every key of a Deployment and its Service that the translation does not
    read.
    """
    under = "spec.template.spec"
    keep_table(objects.mark, at(objects.deployment, "spec"), _OF_DEPLOYMENT, "spec", kept_keys)
    keep_pod(objects.mark, objects.pod, under, kept_keys)
    keep_container(objects.mark, objects.container, f"{under}.containers", kept_keys)
    for where, reason in chain(_list_metadata(objects), _list_of_front(objects)):
        kept_keys.note(objects.mark, where, reason)


def keep_pod(mark: SourceMark, pod: Values, path: str, kept_keys: TranslationNotes) -> None:
    """Note or refuse every key of a pod, but for those of its containers, that the translation does
    not read.
    """
    keep_table(mark, pod, _OF_POD, path, kept_keys)


def keep_container(
    mark: SourceMark, container: Values, path: str, kept_keys: TranslationNotes
) -> None:
    """Note or refuse every key of a container that the translation does not read."""
    limits, requests = at(container, "resources", "limits"), at(container, "resources", "requests")
    only = {key: value for key, value in requests.items() if key not in limits}
    keep_table(mark, container, _OF_CONTAINER, path, kept_keys)
    for table, name in ((limits, "limits"), (only, "requests")):
        left = {key: value for key, value in table.items() if find_named_gpu(key) is None}
        keep_table(mark, left, _OF_RESOURCES, f"{path}.resources.{name}", kept_keys)
    security = at(container, "securityContext")
    rights = {**security, "capabilities.add": at(security, "capabilities").get("add")}
    for key in _PRIVILEGES:
        if rights.get(key):
            where, reason = f"{path}.securityContext.{key}", f"replicas get no privileges; {_POD}"
            kept_keys.refuse(mark, where, reason)


def find_named_gpu(resource: str) -> KnownAccelerator | None:
    """Return the GPU that the name of a resource is, such as nvidia.com/a100 on clusters that have
    one for each product, or None.
    """
    vendor, _, name = resource.partition("/")
    return find_accelerator(name) if vendor in ("nvidia.com", "amd.com") and name else None


def keep_table(
    mark: SourceMark, table: Values, keys: PodKeys, path: str, kept_keys: TranslationNotes
) -> None:
    """Note or refuse every key of a table that the translation does not read."""
    for key, value in table.items():
        if key in keys.read or value in (None, False, "", {}, []):
            continue
        where = f"{path}.{key}"
        if key in keys.noted:
            kept_keys.note(mark, where, keys.noted[key])
        elif keys.strict or key in keys.refused:
            kept_keys.refuse(mark, where, keys.refused.get(key, keys.other))
        else:
            kept_keys.note(mark, where, keys.other)


def _list_metadata(objects: ServiceObjects) -> Iterator[tuple[str, str]]:
    if at(objects.deployment, "metadata").get("namespace"):
        yield "metadata.namespace", "the settings of the provider determine the namespace"
    if at(objects.deployment, "spec", "template", "metadata").get("annotations"):
        yield "spec.template.metadata.annotations", f"pods get no annotations; {_POD}"


def _list_of_front(objects: ServiceObjects) -> Iterator[tuple[str, str]]:
    """Yield notes on the keys of the Service that the gateway does not follow."""
    front = at(objects.service, "spec")
    if len(front.get("ports") or ()) > 1:
        yield "Service.spec.ports", "a service has one port; Cavvy uses the first of the list"
    if front.get("sessionAffinity") not in (None, "None"):
        reason = "each request is sent to the replica with the fewest requests"
        yield "Service.spec.sessionAffinity", reason
