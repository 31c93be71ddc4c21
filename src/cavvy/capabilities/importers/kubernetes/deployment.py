"""Translates a Deployment of Kubernetes, and what belongs to it, to a task with a service."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from math import ceil, isfinite
from shlex import quote
from typing import Any

from cavvy.capabilities.importers.common_fields import (
    UNBOUNDED,
    find_header_problem,
    is_variable_name,
)
from cavvy.capabilities.importers.kubernetes.objects import (
    FABRICS,
    ServiceObjects,
    Values,
    at,
    find_named_gpu,
    keep_unread,
)
from cavvy.catalog.accelerators import KnownAccelerator, find_accelerator
from cavvy.domain.services import (
    GPU_PERCENT,
    ReadinessProbe,
    ReplicaCount,
    ReplicaTarget,
    ServiceSpec,
    TargetKind,
)
from cavvy.domain.tasks import (
    AcceleratorNeed,
    NetworkNeed,
    ResourceSpec,
    TaskSpec,
    Volume,
    VolumeKind,
)
from cavvy.domain.values import Struct, replace
from cavvy.spec.engine_section import OWN_COMMAND, OWN_ENTRYPOINT
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import slug

_COUNT = "NPROC_PER_NODE"
# variables that the agent sets on each node, and for each replica of a service, also written by
# `cavvy export kubernetes`
_OF_NODE = frozenset(["MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", _COUNT, "CAVVY_HOSTS"])
_OF_REPLICA = _OF_NODE | {"PORT", "SERVE_HOST"}
# the source of a variable that a command of the job sets
ON_NODE: Mapping[str, bool] = {"isKnownOnNode": True}
_SHELLS = frozenset(f"{folder}{name}" for folder in ("", "/bin/") for name in ("sh", "bash"))
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_GRACE_S, _PERIOD_S, _TIMEOUT_S, _FAILURES = 30, 10, 1, 3  # Kubernetes' defaults
_KEY = "HorizontalPodAutoscaler.spec.metrics"
# names that adapters commonly give to the requests per second, to the requests in flight, and to
# the use of the GPUs in percent
_RATE = re.compile(r"requests?_per_sec(ond)?|request_rate|(^|_)[rq]ps($|_)")
_IN_FLIGHT = re.compile(r"in_?flight|concurren|active_requests|requests_active")
_GPU = re.compile(rf"{GPU_PERCENT.lower()}|duty_cycle|gpu_utili[sz]ation")
_PROMETHEUS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def read_service_task(objects: ServiceObjects, kept_keys: TranslationNotes) -> TaskSpec | None:
    container = objects.container
    keep_unread(objects, kept_keys)
    if len(objects.pod.get("containers") or ()) != 1:
        kept_keys.refuse(objects.mark, "spec.template.spec.containers", "expected one container")
    env, secrets = read_env(objects, kept_keys)
    service = _read_service(objects, kept_keys)
    run = read_command(objects)
    return TaskSpec(
        name=slug(str(at(objects.deployment, "metadata").get("name", ""))),
        run=read_own_count(objects) + run,
        image=read_image(container),
        env=env,
        secrets=secrets,
        resources=read_resources(objects, kept_keys),
        volumes=read_volumes(objects, kept_keys),
        service=service,
    )


def read_command(objects: ServiceObjects) -> str:
    """Return the container's command as a line of shell code. Without `command`, it is the image's
    own entry point, with the image's own arguments if `args` is absent too
    (https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container).
    """
    container = objects.container
    words = [
        str(each) for each in (*(container.get("command") or ()), *(container.get("args") or ()))
    ]
    scripts = [words[2]] if len(words) == 3 and _is_shell(words) else []
    if len(words) == 4 and _is_shell(words) and '$0"' in words[2]:
        scripts = [words[3]]  # a script for the image's shell, in the form that `export` writes
    names = {str(each.get("name")) for each in container.get("env") or ()}
    if scripts:
        run = _expand(scripts[0], names, lambda text: text).rstrip("\n")
        if len(words) == 3 and re.search(r"[;\n]", run):
            run = f"set +e\n{run}"  # unlike Cavvy's, this shell goes on after a failure
    else:
        line = [_expand(each, names, quote) for each in words]
        if not container.get("command"):
            line.insert(0, OWN_ENTRYPOINT if words else OWN_COMMAND)
        run = " ".join(["exec", *line])
    folder = container.get("workingDir")
    return run if folder is None else f"cd {quote(str(folder))}\n{run}"


def _is_shell(words: Sequence[str]) -> bool:
    return words[0] in _SHELLS and words[1] == "-c"


def _expand(text: str, names: Collection[str], write: Callable[[str], str]) -> str:
    """Replace the references to variables in a text with the shell's notation. As in Kubernetes,
    $(NAME) is a reference if a variable has this name, and $$ means $:
    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container
    """
    parts, plain, start = list[str](), "", 0
    for found in _REFERENCE.finditer(text):
        plain += text[start : found.start()]
        start = found.end()
        if found[1] in names:
            parts += [write(plain) if plain else "", f'"${{{found[1]}}}"']
            plain = ""
        else:
            plain += "$" if found[0] == "$$" else found[0]
    plain += text[start:]
    return "".join([*parts, write(plain) if plain or not parts else ""])


def read_env(
    objects: ServiceObjects,
    kept_keys: TranslationNotes,
    config_maps: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables of the container, and the names of those that are secrets.
    `config_maps` has the values of the ConfigMaps in the file, and is None for services.
    """
    own = _OF_REPLICA if config_maps is None else _OF_NODE
    env: dict[str, str] = {}
    secrets, later = list[str](), list[str]()
    for each in objects.container.get("env") or ():
        name, source = str(each.get("name")), at(each, "valueFrom")
        if not is_variable_name(name):
            reason = (
                "expected letters, digits and _ in the name of a variable: a shell has no other"
            )
            kept_keys.refuse(objects.mark, f"env.{name}", f"{reason}; rename it")
            continue
        if "secretKeyRef" in source:
            kept_keys.note(objects.mark, f"env.{name}", f"set it with `cavvy secret set {name}`")
            secrets.append(name)
        elif (value := _find_config(source, config_maps or {})) is not None:
            env[name] = value
        elif source == ON_NODE:
            later.append(name)
        elif source:
            reason = f"{next(iter(source))} has no equivalent; write a value"
            if (key := at(source, "configMapKeyRef")) and config_maps is not None:
                reason = f"no ConfigMap {key.get('name')} in this file has the key "
                reason += f"{key.get('key')}; put it there, or write a value"
            kept_keys.refuse(objects.mark, f"env.{name}", reason)
        elif name not in own:
            env[name] = _fill(str(each.get("value", "")), env)
            unknown = {found[1] for found in _REFERENCE.finditer(str(each.get("value", "")))}
            if unknown & {*secrets, *later, *own}:
                reason = "its value needs another variable that is known only on the node"
                kept_keys.refuse(objects.mark, f"env.{name}", f"{reason}; set it in `command`")
    return env, tuple(secrets)


def read_own_count(objects: ServiceObjects) -> str:
    """Return the command that sets the number of processes that the author states in a variable
    which each node sets to the number of its GPUs, or "" if it is this number.
    """
    container = objects.container
    asked = {**at(container, "resources", "requests"), **at(container, "resources", "limits")}
    gpus = next((asked[key] for key in asked if key in _GPUS or find_named_gpu(key)), 0)
    for each in container.get("env") or ():
        value = str(each.get("value", ""))
        if each.get("name") == _COUNT and value.isdecimal() and int(value) != (int(gpus) or 1):
            return f"export {_COUNT}={value}\n"
    return ""


def _find_config(source: Values, config_maps: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return the value that a variable takes from a ConfigMap of the file, or None."""
    key = at(source, "configMapKeyRef")
    return config_maps.get(str(key.get("name")), {}).get(str(key.get("key")))


def _fill(value: str, env: Mapping[str, str]) -> str:
    """Return a variable's value, with each reference to an earlier variable replaced by its
    value."""

    def find(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return _REFERENCE.sub(find, value)


def _read_service(objects: ServiceObjects, kept_keys: TranslationNotes) -> ServiceSpec | None:
    port = _find_port(objects)
    if port is None:
        reason = "no port is named by the container that gets the requests; write `containerPort`"
        kept_keys.refuse(objects.mark, "spec.template.spec.containers.ports", reason)
        return None
    if port in _OTHER_PROTOCOLS and not _names_http(objects):
        reason = f"port {port} speaks {_OTHER_PROTOCOLS[port]}, and the gateway calls services by "
        reason += "HTTP; start the program beside those that use it, as a job of a `group`"
        kept_keys.refuse(objects.mark, "ports", reason)
    own = {str(each.get("name")) for each in objects.container.get("env") or ()}
    grace_s = objects.pod.get("terminationGracePeriodSeconds", _GRACE_S)
    return ServiceSpec(
        port=port,
        fixed_port="PORT" not in own,
        replicas=_read_replicas(objects, kept_keys),
        concurrency=UNBOUNDED,
        probe=_read_probe(objects, port, kept_keys),
        drain=timedelta(seconds=int(grace_s)),
    )


def _names_http(objects: ServiceObjects) -> bool:
    """Return whether a probe or the name of a port says that the container speaks HTTP."""
    probes = ("readinessProbe", "livenessProbe", "startupProbe")
    if any("httpGet" in (objects.container.get(key) or {}) for key in probes):
        return True
    return any(name.startswith(("http", "web")) for name in _list_named_ports(objects))


def _find_port(objects: ServiceObjects) -> int | None:
    """Return the container's port to which the Service points, else the container's first port."""
    ports = objects.container.get("ports") or ()
    named = _list_named_ports(objects)
    fronts = at(objects.service, "spec").get("ports") or ()
    for front in fronts:
        target = front.get("targetPort", front.get("port"))
        found = named.get(str(target), target)
        if isinstance(found, int):
            return found
    numbers: Iterable[object] = (each.get("containerPort") for each in ports)
    return next((each for each in numbers if isinstance(each, int)), None)


def _list_named_ports(objects: ServiceObjects) -> dict[str, object]:
    ports = objects.container.get("ports") or ()
    return {str(each.get("name")): each.get("containerPort") for each in ports}


def _read_replicas(objects: ServiceObjects, kept_keys: TranslationNotes) -> ReplicaCount:
    spec = at(objects.scaler, "spec")
    if not spec:
        count = int(at(objects.deployment, "spec").get("replicas", 1))
        return ReplicaCount(least=count, most=max(1, count))
    return ReplicaCount(
        least=int(spec.get("minReplicas", 1)),
        most=int(spec["maxReplicas"]),
        target=read_target(objects, kept_keys),
    )


def _read_probe(objects: ServiceObjects, port: int, kept_keys: TranslationNotes) -> ReadinessProbe:
    container = objects.container
    probe: Values = container.get("readinessProbe") or container.get("startupProbe") or {}
    get = at(probe, "httpGet")
    if "exec" in probe or "grpc" in probe:
        reason = "only HTTP and TCP can be probed; write `httpGet`"
        kept_keys.refuse(objects.mark, "readinessProbe", reason)
    _check_probed(objects, probe, port, kept_keys)
    timeout_s = float(probe.get("timeoutSeconds", _TIMEOUT_S))
    every_s = max(float(probe.get("periodSeconds", _PERIOD_S)), timeout_s)
    return ReadinessProbe(
        path=str(get.get("path", "/")),
        every=timedelta(seconds=every_s),
        timeout=timedelta(seconds=timeout_s),
        start=_read_start(at(container, "startupProbe")),
        failures=int(probe.get("failureThreshold", _FAILURES)),
        any_status=not get,
        headers=_read_headers(objects, get, kept_keys),
    )


def _read_start(probe: Values) -> timedelta:
    """Return how long a replica may take to start: until the startup probe has failed too often."""
    failures = int(probe.get("failureThreshold", 0))
    if not failures:
        return ReadinessProbe().start
    wait_s = float(probe.get("initialDelaySeconds", 0))
    return timedelta(seconds=wait_s + failures * float(probe.get("periodSeconds", _PERIOD_S)))


def _check_probed(
    objects: ServiceObjects, probe: Values, port: int, kept_keys: TranslationNotes
) -> None:
    """Refuse probes of another port, and probes with TLS."""
    get = at(probe, "httpGet")
    target = (get or at(probe, "tcpSocket")).get("port", port)
    probed = _list_named_ports(objects).get(str(target), target)
    if str(probed) != str(port):
        reason = f"only the service's port {port} can be probed, not port {probed}"
        kept_keys.refuse(objects.mark, "readinessProbe", reason)
    if str(get.get("scheme", "HTTP")).upper() != "HTTP":
        reason = "replicas answer without TLS; the gateway adds TLS"
        kept_keys.refuse(objects.mark, "readinessProbe.httpGet.scheme", reason)


def _read_headers(
    objects: ServiceObjects, get: Values, kept_keys: TranslationNotes
) -> tuple[tuple[str, str], ...]:
    headers = {str(each["name"]): str(each["value"]) for each in get.get("httpHeaders") or ()}
    for name, value in headers.items():
        if problem := find_header_problem(name, value):
            kept_keys.refuse(objects.mark, "readinessProbe.httpGet.httpHeaders", problem)
    return tuple(headers.items())


def read_target(objects: ServiceObjects, kept_keys: TranslationNotes) -> ReplicaTarget:
    """Return the target of the first metric that a service can have, or the default target. Notes
    say which metrics have no effect.
    """
    spec = at(objects.scaler, "spec")
    found: ReplicaTarget | None = None
    for metric in spec.get("metrics") or ():
        target = _read_metric(metric)
        name = _name(metric)
        if target is None:
            reason = "no target of a service is like it; write `service.replicas.target`"
            kept_keys.note(objects.mark, _KEY, f"{name}: {reason}")
        elif found is not None:
            kept_keys.note(objects.mark, _KEY, f"{name}: a service has one target, the first")
        else:
            found = target
            if target.metric:
                reason = f"the program's /metrics must contain {target.metric}"
                kept_keys.note(objects.mark, _KEY, reason)
    if spec.get("targetCPUUtilizationPercentage"):
        reason = "no target of a service is like it; write `service.replicas.target`"
        kept_keys.note(
            objects.mark, "HorizontalPodAutoscaler.spec.targetCPUUtilizationPercentage", reason
        )
    return found or ReplicaTarget()


def _source(metric: Values) -> Values:
    """Return the table of the metric; its key is the metric's type, with a small first letter."""
    kind = str(metric.get("type", ""))
    return at(metric, kind[:1].lower() + kind[1:])


def _name(metric: Values) -> str:
    source = _source(metric)
    name = at(source, "metric").get("name") or source.get("name")
    return str(name or metric.get("type") or "a metric without a name")


def _read_metric(metric: Values) -> ReplicaTarget | None:
    """Return the target, or None if the metric is not an average over the pods that Cavvy can
    measure. The use of GPUs is one in each form, because it is a share.
    """
    source = _source(metric)
    name = at(source, "metric").get("name") or source.get("metricName")
    plain = re.sub(r"\W", "_", str(name or "").lower())
    is_share = bool(_GPU.search(plain))
    wanted = _read_wanted(source, is_share)
    if wanted is None or not name:
        return None
    value = read_quantity(wanted)
    if not isfinite(value) or value <= 0:
        return None
    if is_share:
        share = value / 100 if value > 1 else value
        return ReplicaTarget(kind=TargetKind.GPU_UTILISATION, value=share) if share <= 1 else None
    if _RATE.search(plain):
        return ReplicaTarget(kind=TargetKind.RATE, value=value)
    if _IN_FLIGHT.search(plain):
        return ReplicaTarget(kind=TargetKind.CONCURRENCY, value=value)
    if metric.get("type") != "Pods" or not _PROMETHEUS.fullmatch(str(name)):
        return None
    return ReplicaTarget(kind=TargetKind.METRIC, value=value, metric=str(name))


def _read_wanted(source: Values, is_share: bool) -> Any:
    """Return the value that a metric is to have for each pod, or None. In `v2beta1`, the values
    stand beside the name."""
    target = at(source, "target")
    found = target.get("averageValue") or source.get("targetAverageValue")
    if found is None and is_share:
        names = ("value", "averageUtilization")
        found = next((target[name] for name in names if target.get(name)), None)
        found = found or source.get("targetValue")
    return found


_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
# labels of nodes that name the GPU: of NVIDIA's device plugin, GKE, EKS with Karpenter, CoreWeave.
# Another label does so, too, if its value is a GPU of the catalog.
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "gpu.nvidia.com/class",
)
_SELECTOR, _AFFINITY = "nodeSelector", "affinity"
_BYTES: Mapping[str, float] = {
    **{unit: 1000.0 ** (power + 1) for power, unit in enumerate("kMGTPE")},
    **{f"{unit}i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")},
    "": 1.0,
}
_MIB, _GIB = 1 << 20, 1 << 30
# Ports that IANA has assigned to protocols other than HTTP, or that a program is known for.
_OTHER_PROTOCOLS = {
    **{3306: "MySQL", 5432: "PostgreSQL", 5672: "AMQP", 6379: "Redis", 9092: "Kafka"},
    **{2181: "ZooKeeper", 4222: "NATS", 11211: "memcached", 27017: "MongoDB"},
}


def read_resources(objects: ServiceObjects, kept_keys: TranslationNotes) -> ResourceSpec:
    """Return the container's resource requests, or else its limits. A job is stopped if it uses
    more memory than it asks for, as a container at its limit, so it asks for the limit.
    """
    container = objects.container
    limits, requests = at(container, "resources", "limits"), at(container, "resources", "requests")
    asked = {**limits, **requests}
    cpus, memory = asked.get("cpu"), limits.get("memory", asked.get("memory"))
    if "memory" in requests and memory != requests["memory"]:
        reason = f"the job gets at least its limit of memory, {memory}, at which it is stopped"
        kept_keys.note(objects.mark, "containers.resources.requests.memory", reason)
    disk = asked.get("ephemeral-storage")
    named = {key: found for key in asked if (found := find_named_gpu(key)) is not None}
    if len(named) > 1:
        reason = "a node has GPUs of one kind; write `resources.gpu` with the alternatives"
        kept_keys.refuse(objects.mark, f"containers.resources.limits.{list(named)[1]}", reason)
    gpus = int(next((asked[key] for key in (*_GPUS, *named) if key in asked), 0))
    kind = next(iter(named.values()), None)
    fitting = [_choose_labels(each, kind) for each in _list_fitting(objects)] if gpus else []
    chosen = {each.key for each in chain(*fitting) if each.where == _SELECTOR}
    for label in at(objects.pod, _SELECTOR):
        if label not in chosen:
            reason = "labels of nodes have no equivalent; `resources` determines which nodes fit"
            kept_keys.note(objects.mark, f"{_SELECTOR}.{label}", reason)
    needs = tuple(_need_gpus(gpus, kind, fitting, objects, kept_keys)) if gpus else ()
    fabric = next((FABRICS[key] for key in asked if key in FABRICS), None)
    return ResourceSpec(
        accelerators=needs,
        network=None if fabric is None else NetworkNeed(fabric=fabric),
        cpus_min=None if cpus is None else read_quantity(cpus) or None,
        memory_min_mib=None if memory is None else ceil(read_quantity(memory) / _MIB) or None,
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
            kind = next((key for key in source if key != "name"), "")
            reason = f"{kind} has no equivalent" if kind else "the pod has no volume of this name"
            where = f"volumes.{name}" if source else f"volumeMounts.{name}"
            kept_keys.refuse(objects.mark, where, reason)
    return tuple(found)


def read_image(container: Values) -> str | None:
    """Return the container's image. Raises TypeError."""
    image = container.get("image")
    if image is not None and not isinstance(image, str):
        raise TypeError(image)
    return image


def read_quantity(value: object) -> float:
    """Parse a quantity of Kubernetes, such as 500m, 16Gi or 2. Raises ValueError."""
    text = str(value).strip()
    number = text.rstrip("kKMGTPEim")
    unit = text[len(number) :]
    found = float(number) / 1000 if unit == "m" else float(number) * _BYTES[unit]
    if not (isfinite(found) and found >= 0):
        raise ValueError(text)
    return found


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


class _Label(Struct, frozen=True, kw_only=True):
    """A label of nodes with the values that it may have. `where` is the part of the pod that asks
    for it.
    """

    where: str
    key: str
    values: tuple[str, ...]


def _list_fitting(objects: ServiceObjects) -> Iterator[list[_Label]]:
    """Yield the labels of each sort of node that fits: those of the node selector, with those of
    one term of the required node affinity.
    """
    selector = [
        _Label(where=_SELECTOR, key=str(key), values=(str(value),))
        for key, value in at(objects.pod, _SELECTOR).items()
    ]
    affinity = at(objects.pod, _AFFINITY, "nodeAffinity")
    terms = at(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    every: Sequence[Any] = terms.get("nodeSelectorTerms") or ({},)
    for term in every:
        affine = [
            _Label(
                where=_AFFINITY,
                key=str(rule.get("key")),
                values=tuple(map(str, rule.get("values") or ())),
            )
            for rule in term.get("matchExpressions") or ()
            if rule.get("operator") == "In"
        ]
        yield [*selector, *affine]


def _choose_labels(labels: Sequence[_Label], kind: KnownAccelerator | None) -> list[_Label]:
    """Return the labels of a node that name its GPU. If none does so by its own name, and the
    resource is of no kind, these are the others with values that are GPUs, such as `pool: l4`.
    """
    precise = [each for each in labels if each.key in _PRODUCTS and each.values]
    if precise or kind is not None:
        return precise
    named = [
        replace(label, values=tuple(each for each in label.values if find_accelerator(each)))
        for label in labels
    ]
    return [each for each in named if each.values]


def _need_gpus(
    count: int,
    kind: KnownAccelerator | None,
    fitting: Sequence[Sequence[_Label]],
    objects: ServiceObjects,
    kept_keys: TranslationNotes,
) -> Iterator[AcceleratorNeed]:
    """Yield a request for `count` GPUs for each product that the resource (`kind`) and the labels
    of a sort of node that fits permit together, or for any GPU if none names a product.
    """
    products = {
        label: _find_products(label, objects, kept_keys) for label in dict.fromkeys(chain(*fitting))
    }
    found, clashes = list[KnownAccelerator](), list[_Clash]()
    for labels in fitting:
        permitted: Sequence[KnownAccelerator] = () if kind is None else (kind,)
        clash = None
        for label in labels:
            joined = _join_gpus(permitted, products[label])
            if permitted and products[label] and not joined:
                clash = clash or _Clash(label.where, permitted, products[label])
            permitted = joined or permitted
        if clash is None:
            found += [each for each in permitted if each not in found]
        else:
            clashes.append(clash)
    if clashes and len(clashes) == len(fitting):
        _refuse_clashes(clashes, objects, kept_keys)
    for known in found or (None,):
        yield AcceleratorNeed(
            name=None if known is None else known.accelerator.name,
            count_min=count,
            memory_min_mib=None if known is None else known.memory_mib,
            memory_max_mib=None if known is None else known.memory_mib,
        )


def _find_products(
    label: _Label, objects: ServiceObjects, kept_keys: TranslationNotes
) -> Sequence[KnownAccelerator]:
    """Return the GPUs that the values of a label mean. Refuse a value that is none."""
    found = list[KnownAccelerator]()
    for name in label.values:
        # such as A100_NVLINK_80GB at CoreWeave
        known = find_accelerator(name) or find_accelerator(name.replace("_NVLINK", ""))
        if known is None:
            reason = f"{name} is not a GPU of the catalog; write `resources.gpu`"
            kept_keys.refuse(objects.mark, label.where, reason)
        elif known not in found:
            found.append(known)
    return found


class _Clash(Struct, frozen=True):
    """GPUs of which a node cannot have both; `where` is the part of the pod that asks for `two`."""

    where: str
    one: Sequence[KnownAccelerator]
    two: Sequence[KnownAccelerator]


def _refuse_clashes(
    clashes: Sequence[_Clash], objects: ServiceObjects, kept_keys: TranslationNotes
) -> None:
    first, second = (
        ", ".join(dict.fromkeys(map(_name_gpu, chain(*each))))
        for each in ([each.one for each in clashes], [each.two for each in clashes])
    )
    reason = f"the pod asks for {first} and for {second}, and no node has both; name one GPU"
    kept_keys.refuse(objects.mark, clashes[0].where, reason)


def _join_gpus(
    found: Sequence[KnownAccelerator], named: Sequence[KnownAccelerator]
) -> Sequence[KnownAccelerator]:
    """Return the GPUs that both permit, as precisely as they name each together; () permits any."""
    if not found or not named:
        return found or named
    joined = list[KnownAccelerator]()
    for gpu in (_find_both(one, two) for one in found for two in named):
        if gpu is not None and gpu not in joined:
            joined.append(gpu)
    return joined


def _find_both(one: KnownAccelerator, two: KnownAccelerator) -> KnownAccelerator | None:
    """Return the GPU that both mean, as precisely as they name it together, or None."""
    if one == two:
        return one
    for wide, narrow in ((one, two), (two, one)):
        product = narrow.accelerator
        # `h100` is also what clusters call the other GPUs of the family, such as H100-NVL
        if wide.accelerator.name not in (product.name, product.family):
            continue
        named = {each.memory_mib for each in (one, two)} - {None}
        sold = {each.mib for each in product.memory} or named
        if len(named) <= 1 and named <= sold:
            return KnownAccelerator(product, next(iter(named), None))
    return None


def _name_gpu(known: KnownAccelerator) -> str:
    size = "" if known.memory_mib is None else f" with {known.memory_mib // 1024} GiB"
    return f"{known.accelerator.name}{size}"
