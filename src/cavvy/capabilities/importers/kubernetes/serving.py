"""Reads objects of Kubernetes that serve requests as Deployments: a StatefulSet, a LeaderWorkerSet
(https://lws.sigs.k8s.io) and an InferenceService (https://kserve.github.io).
"""

import json
import re
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from cavvy.capabilities.importers.kubernetes.deployment import (
    read_command,
    read_env,
    read_service_task,
)
from cavvy.capabilities.importers.kubernetes.objects import (
    PodKeys,
    ServiceObjects,
    Values,
    at,
    keep_table,
)
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import SourceMark

_UPDATES = "`service.update` of a Cavvy file determines how replicas are replaced"
_ALIKE = "replicas of a service are alike and have no names of their own"
_OF_STATEFUL_SET = PodKeys(
    read=("replicas", "selector", "template", "revisionHistoryLimit"),
    noted={
        "serviceName": _ALIKE,
        "podManagementPolicy": "replicas start as they are needed",
        **dict.fromkeys(("updateStrategy", "minReadySeconds"), _UPDATES),
        "persistentVolumeClaimRetentionPolicy": "volumes stay until they are removed",
    },
    refused={
        "volumeClaimTemplates": "replicas have no volumes of their own; mount one claim, or write "
        "`inputs` in a Cavvy file",
        "ordinals": _ALIKE,
    },
)
_OWN_NAME = re.compile(r"\bHOSTNAME\b|\bhostname\b")
_OF_LEADER_WORKER_SET = PodKeys(
    read=("replicas", "leaderWorkerTemplate"),
    noted={
        "startupPolicy": "the nodes of a replica start together",
        "networkConfig": "the nodes of a replica have addresses, and no names",
        "rolloutStrategy": _UPDATES,
    },
    refused={},
)
_OF_GROUP = PodKeys(
    read=("size", "leaderTemplate", "workerTemplate"),
    noted={"restartPolicy": "if a node of a replica is lost, the replica is replaced"},
    refused={"subGroupPolicy": "the nodes of a replica have no parts"},
)
_LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
_LWS_LINES = """\
export LWS_LEADER_ADDRESS="$MASTER_ADDR" LWS_GROUP_SIZE="$NNODES" LWS_WORKER_INDEX="$NODE_RANK"
if [ "$NODE_RANK" != 0 ]; then
{worker}
fi
{leader}"""
_OF_INFERENCE_SERVICE = PodKeys(
    read=("predictor",),
    noted={},
    refused={
        "transformer": "a step before the model is a service of its own; write its Cavvy file",
        "explainer": "Cavvy has no explainers",
        "default": "a form of KFServing that KServe has removed; write `predictor`",
    },
)
_OF_PREDICTOR = (
    *("minReplicas", "maxReplicas", "scaleTarget", "scaleMetric", "containerConcurrency", "model"),
    *("timeout", "canaryTrafficPercent", "logger", "batcher", "labels", "annotations"),
    *("deploymentStrategy", "scaleMetricType", "workerSpec"),
)
_REFUSED_OF_PREDICTOR = {
    "canaryTrafficPercent": "write `service.update: canary` in a Cavvy file",
    "batcher": "write `service.batch` in a Cavvy file",
    "workerSpec": "write `nodes` in a Cavvy file",
}
_NOTED_OF_PREDICTOR = {
    "timeout": "`service.timeouts` of a Cavvy file limits requests",
    "logger": "`cavvy logs` has what replicas write",
    "deploymentStrategy": _UPDATES,
}
# metrics of KServe, and how a metric of an autoscaler names the same
_METRICS = {"concurrency": "concurrency", "rps": "requests_per_second"}
_USUAL_PORT = 8080  # KServe's
_SERVED = ("huggingface", "vllm")  # the formats of models that vLLM serves
_OF_MODEL = ("modelFormat", "storageUri", "storage", "runtime", "runtimeVersion", "protocolVersion")
_OF_SERVER = ("model_name", "model_id", "model_dir", "http_port", "backend", "task")


def make_deployment(kind: str, mark: SourceMark, values: Values, kept: TranslationNotes) -> Values:
    """Return the Deployment that says the same as an object of another kind."""
    spec = at(values, "spec")
    if kind == "StatefulSet":
        is_alone = int(spec.get("replicas", 1)) == 1
        stated = {key: spec[key] for key in spec if key != "volumeClaimTemplates" or not is_alone}
        keep_table(mark, stated, _OF_STATEFUL_SET, "spec", kept)
        _check_names(mark, values, kept)
        keys = {key: spec[key] for key in ("replicas", "selector", "template") if key in spec}
        name = str(at(values, "metadata").get("name"))
        template = _claim_own_volumes(spec, name) if is_alone else _drop_own_volumes(spec)
        return {**values, "spec": {**keys, "template": template}}
    if kind == "LeaderWorkerSet":
        keep_table(mark, spec, _OF_LEADER_WORKER_SET, "spec", kept)
        group = at(spec, "leaderWorkerTemplate")
        keep_table(mark, group, _OF_GROUP, "spec.leaderWorkerTemplate", kept)
        template = at(group, "leaderTemplate") or at(group, "workerTemplate")
        return {**values, "spec": {"replicas": spec.get("replicas", 1), "template": template}}
    keep_table(mark, spec, _OF_INFERENCE_SERVICE, "spec", kept)
    return _read_predictor(mark, values, at(spec, "predictor"), kept)


def read_service(
    kind: str, objects: ServiceObjects, origin: Values, kept: TranslationNotes
) -> TaskSpec | None:
    """Return the task of the object `origin`, which `objects` describes as a Deployment."""
    if kind == "InferenceService":
        return _read_inference(objects, at(origin, "spec", "predictor"), kept)
    if kind != "LeaderWorkerSet":
        return read_service_task(objects, kept)
    group = at(origin, "spec", "leaderWorkerTemplate")
    leader = at(group, "leaderTemplate") or at(group, "workerTemplate")
    worker = at(group, "workerTemplate")
    task = read_service_task(_add_lws(objects, leader), kept)
    if task is None:
        return None
    of_worker = _add_lws(objects, worker)
    for key in ("image", "resources"):
        if objects.container.get(key) != of_worker.container.get(key):
            reason = f"leader and workers differ in `{key}`, and the nodes of a replica are alike"
            kept.refuse(objects.mark, f"spec.leaderWorkerTemplate.workerTemplate.{key}", reason)
    env, secrets = read_env(of_worker, kept)
    task = replace(task, secrets=tuple(dict.fromkeys((*task.secrets, *secrets))))
    env = {name: value for name, value in env.items() if task.env.get(name) != value}
    lines = [f"export {name}={quote(value)}" for name, value in env.items() if name not in _LWS]
    command = "\n".join((*lines, read_command(of_worker)))
    if not command.startswith("exec"):
        command += "\nexit"
    run = _LWS_LINES.format(worker=command, leader=task.run)
    left = {name: value for name, value in task.env.items() if name not in _LWS}
    return replace(task, run=run, env=left, nodes=int(group.get("size", 1)))


def _add_lws(objects: ServiceObjects, template: Values) -> ServiceObjects:
    """Return the objects with a template whose commands may name what LWS sets."""
    pod = dict(at(template, "spec"))
    containers = [dict(each) for each in pod.get("containers") or ()]
    for each in containers:
        own: Sequence[Values] = each.get("env") or ()
        each["env"] = [*({"name": name, "value": ""} for name in _LWS), *own]
    pod["containers"] = containers
    spec = {**at(objects.deployment, "spec"), "template": {**template, "spec": pod}}
    return replace(objects, deployment={**objects.deployment, "spec": spec})


def _claim_own_volumes(spec: Values, name: str) -> Values:
    """Return the template with the claims that Kubernetes makes for a replica that is the only
    one."""
    template = at(spec, "template")
    pod = dict(at(template, "spec"))
    claims = [at(each, "metadata").get("name") for each in spec.get("volumeClaimTemplates") or ()]
    pod["volumes"] = [
        *(pod.get("volumes") or ()),
        *(
            {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}-0"}}
            for claim in claims
        ),
    ]
    return {**template, "spec": pod}


def _drop_own_volumes(spec: Values) -> Values:
    """Return the template without the mounts of the volumes that each replica has for itself."""
    claims: Sequence[Values] = spec.get("volumeClaimTemplates") or ()
    own = {at(each, "metadata").get("name") for each in claims}
    template = at(spec, "template")
    pod = dict(at(template, "spec"))
    pod["containers"] = [
        {
            **each,
            "volumeMounts": [
                mount for mount in each.get("volumeMounts") or () if mount.get("name") not in own
            ],
        }
        for each in pod.get("containers") or ()
    ]
    return {**template, "spec": pod}


def _check_names(mark: SourceMark, values: Values, kept: TranslationNotes) -> None:
    """Refuse a StatefulSet whose program tells its replicas apart."""
    pod, name = at(values, "spec", "template", "spec"), at(values, "metadata").get("name")
    text = json.dumps(pod.get("containers"), default=str)
    if int(at(values, "spec").get("replicas", 1)) > 1 and (
        _OWN_NAME.search(text) or f"{name}-0" in text
    ):
        reason = f"the program uses the names of its replicas, but {_ALIKE}; nodes of one job "
        kept.refuse(mark, "spec.replicas", f"{reason}(`nodes`) have ranks")


def _read_predictor(
    mark: SourceMark, values: Values, predictor: Values, kept: TranslationNotes
) -> Values:
    """Return the Deployment of a predictor."""
    for key in predictor:
        where = f"spec.predictor.{key}"
        if key in _REFUSED_OF_PREDICTOR:
            kept.refuse(mark, where, _REFUSED_OF_PREDICTOR[key])
        elif key in _NOTED_OF_PREDICTOR:
            kept.note(mark, where, _NOTED_OF_PREDICTOR[key])
        elif key != "model" and "storageUri" in at(predictor, key):
            reason = "a form that names its server; write `model` with `modelFormat`, or "
            kept.refuse(mark, where, f"{reason}`containers` with the image of a server")
    pod = {key: value for key, value in predictor.items() if key not in _OF_PREDICTOR}
    pod = {key: value for key, value in pod.items() if not at({"x": value}, "x").get("storageUri")}
    if model := at(predictor, "model"):
        pod["containers"] = [{**model, "image": None}]
    containers = [dict(each) for each in pod.get("containers") or ()]
    for each in containers:
        each["ports"] = each.get("ports") or [{"containerPort": _USUAL_PORT}]
        if any(variable.get("name") == "STORAGE_URI" for variable in each.get("env") or ()):
            reason = "KServe copies what it names to /mnt/models; write `inputs` in a Cavvy file, "
            kept.refuse(mark, "env.STORAGE_URI", f"{reason}or mount a claim with `volumes`")
    pod["containers"] = containers
    return {**values, "spec": {"template": {"spec": pod}}}


def make_scaler(values: Values, mark: SourceMark, kept: TranslationNotes) -> Values:
    """Return the autoscaler that a predictor describes."""
    predictor = at(values, "spec", "predictor")
    least = int(predictor.get("minReplicas", 1))
    metric = str(predictor.get("scaleMetric") or "concurrency")
    metrics: list[dict[str, Any]] = []
    if target := predictor.get("scaleTarget"):
        if metric in _METRICS:
            named = {"metric": {"name": _METRICS[metric]}, "target": {"averageValue": target}}
            metrics.append({"type": "Pods", "pods": named})
        else:
            reason = "no target of a service is like it; write `service.replicas.target`"
            kept.note(mark, "spec.predictor.scaleMetric", reason)
    most = max(1, least, int(predictor.get("maxReplicas") or 0))
    return {"spec": {"minReplicas": least, "maxReplicas": most, "metrics": metrics}}


def _read_inference(
    objects: ServiceObjects, predictor: Values, kept: TranslationNotes
) -> TaskSpec | None:
    """Return the service of a predictor."""
    if not objects.pod.get("containers"):
        if not any("storageUri" in at({"x": each}, "x") for each in predictor.values()):
            kept.refuse(objects.mark, "spec.predictor", "expected `model` or `containers`")
        return None
    models: tuple[str, ...] = ()
    if model := at(predictor, "model"):
        server = _make_server(objects, model, kept)
        if server is None:
            return None
        container, models = server
        pod = {**objects.pod, "containers": [container]}
        spec = {"template": {"spec": pod}}
        objects = replace(objects, deployment={**objects.deployment, "spec": spec})
    task = read_service_task(objects, kept)
    if task is None or task.service is None:
        return task
    at_once = int(predictor.get("containerConcurrency") or 0)
    service = replace(task.service, models=models)
    return replace(task, service=replace(service, concurrency=at_once) if at_once else service)


def _make_server(
    objects: ServiceObjects, model: Values, kept: TranslationNotes
) -> tuple[Values, tuple[str, ...]] | None:
    """Return the container that serves a language model with vLLM, and the model's names. Other
    servers, and stores of models, are parts of KServe.
    """
    where, mark = "spec.predictor.model", objects.mark
    form = str(at(model, "modelFormat").get("name") or "").lower()
    options = _read_arguments(model.get("args") or ())
    source = str(options.get("model_id") or model.get("storageUri") or "").removeprefix("hf://")
    if form not in _SERVED or not source or "://" in source:
        reason = "the server and the storage of this model are parts of KServe; write "
        reason += "`predictor.containers` with the image of a server, or a Cavvy file with "
        kept.refuse(mark, f"{where}.modelFormat", f"{reason}`service: {{engine: …, model: …}}`")
        return None
    reason = "vLLM serves the model, at /v1 and not at /openai/v1"
    kept.note(mark, f"{where}.modelFormat", reason)
    for key in ("runtime", "protocolVersion", "runtimeVersion"):
        if model.get(key):
            kept.note(mark, f"{where}.{key}", "vLLM serves the model")
    if model.get("command"):
        kept.refuse(mark, f"{where}.command", "write `predictor.containers` with the image")
    name = str(options.get("model_name") or at(objects.deployment, "metadata").get("name"))
    words = ["vllm", "serve", source, "--host", "0.0.0.0", "--port", str(_USUAL_PORT)]
    words += ["--served-model-name", name]
    for option, value in options.items():
        if option in _OF_SERVER:
            if option not in ("model_name", "model_id", "model_dir", "http_port"):
                kept.note(mark, f"{where}.args", f"--{option} is an option of KServe's server")
            continue
        words.append(f"--{option.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    container = {key: each for key, each in objects.container.items() if key not in _OF_MODEL} | {
        "image": "vllm/vllm-openai",
        "command": words,
        "args": None,
        "readinessProbe": {"httpGet": {"path": "/health", "port": _USUAL_PORT}},
    }
    return container, (name,)


def _read_arguments(words: Sequence[object]) -> Mapping[str, Any]:
    """Return the arguments of a server: --name=value, --name value, or a switch."""
    found: dict[str, Any] = {}
    left = [str(word) for word in words]
    while left:
        word = left.pop(0)
        name, given, value = word.lstrip("-").partition("=")
        if given:
            found[name] = value
        elif left and not left[0].startswith("--"):
            found[name] = left.pop(0)
        else:
            found[name] = True
    return {name.replace("-", "_"): value for name, value in found.items()}
