"""The pod fields for the option `docker`: a container engine that runs next to the work. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cavvy.providers.kubernetes.pod_overlay import overlay_pod

Object = dict[str, Any]

_CLIENT_IMAGE = "docker:29-cli"
_TOOLS = "/cavvy/docker"  # the client, its plugins and its configuration
# The paths at which the work finds the client and its plugins, keyed by their names in `_TOOLS`
_CLIENT_PATHS = {
    "docker": "/usr/local/bin/docker",
    "cli-plugins": "/usr/local/libexec/docker/cli-plugins",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerEngine:
    """A container engine, which listens at a socket in a folder that the work shares."""

    image: str
    data: str  # the folder in which the engine stores images and layers
    socket_dir: str
    container: Object  # fields of the engine's container
    ready: tuple[str, ...]  # a command that fails until the engine answers
    variables: Mapping[str, str]  # environment variables that the work gets
    steps: tuple[str, ...] = field(default=())  # further commands that prepare the client


_DOCKER = "unix:///var/run/dind/docker.sock"
_BUILDKIT = "unix:///run/buildkit/buildkitd.sock"
_ENGINES = {
    "all": DockerEngine(
        image="docker:29-dind",
        data="/var/lib/docker",
        socket_dir="/var/run/dind",
        container={
            "args": [f"--host={_DOCKER}", "--group=1000"],
            "env": [{"name": "DOCKER_TLS_CERTDIR", "value": ""}],
            "securityContext": {"privileged": True},
        },
        ready=("docker", "--host", _DOCKER, "info"),
        variables={"DOCKER_HOST": _DOCKER},
    ),
    "build": DockerEngine(
        image="moby/buildkit:rootless",
        data="/home/user/.local/share/buildkit",
        socket_dir="/run/buildkit",
        container={
            "args": [f"--addr={_BUILDKIT}", "--oci-worker-no-process-sandbox"],
            "securityContext": {
                "seccompProfile": {"type": "Unconfined"},
                "appArmorProfile": {"type": "Unconfined"},
                "runAsUser": 1000,
                "runAsGroup": 1000,
            },
        },
        ready=("buildctl", f"--addr={_BUILDKIT}", "debug", "workers"),
        variables={
            "BUILDKIT_HOST": _BUILDKIT,
            "BUILDX_CONFIG": f"{_TOOLS}/buildx",
            "BUILDX_BUILDER": "cavvy",
        },
        steps=(
            f"export BUILDX_CONFIG={_TOOLS}/buildx",
            f"docker buildx create --name cavvy --driver remote {_BUILDKIT}",
            f"chmod -R a+rwX {_TOOLS}/buildx",
        ),
    ),
}


def find_fault(option: object) -> str | None:
    """Why the value of the option is invalid; None if it is valid."""
    mode, cache = _read(option)
    if mode not in _ENGINES or not isinstance(cache, str):
        return (
            "expected `all`, `build`, or a table with `mode` and `cache`, where `cache` is the "
            "name of a claim"
        )
    return None


def make_docker_fields(option: object) -> Object:
    """The fields of a pod whose work can call `docker` (mode `all`) or only `docker buildx build`
    (mode `build`). The engine is a sidecar, which starts before the work and ends with it; an init
    container provides the client. If the option names a claim as `cache`, the claim keeps the
    engine's data; otherwise the data is lost with the pod. Returns {} if the task does not set the
    option.
    """
    if option is None:
        return {}
    mode, cache = _read(option)
    engine = _ENGINES[mode]
    socket = {"name": "docker-socket", "mountPath": engine.socket_dir}
    tools = {"name": "docker-tools", "mountPath": _TOOLS}
    parts = [
        {"name": "docker-tools", "mountPath": path, "subPath": name}
        for name, path in _CLIENT_PATHS.items()
    ]
    copies = [f"cp -r {path} {_TOOLS}/" for path in _CLIENT_PATHS.values()]
    client = {
        "name": "docker-client",
        "image": _CLIENT_IMAGE,
        "command": ["sh", "-ec", "\n".join([*copies, *engine.steps])],
        "volumeMounts": [{**tools}],
    }
    variables = [{"name": name, "value": value} for name, value in engine.variables.items()]
    spec: Object = {
        "initContainers": [_make_sidecar(engine, mode, cache, socket), client],
        "containers": [{"env": variables, "volumeMounts": [{**socket}, tools, *parts]}],
        "volumes": [
            {"name": "docker-socket", "emptyDir": {}},
            {"name": "docker-tools", "emptyDir": {}},
            {
                "name": "docker-data",
                **({"persistentVolumeClaim": {"claimName": cache}} if cache else {"emptyDir": {}}),
            },
        ],
    }
    if cache and mode == "build":  # the engine's user must be able to write to the claim
        spec["securityContext"] = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"spec": spec}


def overlay_task(pod: Object, options: Mapping[str, Any]) -> Object:
    """The pod, merged with the fields that the task's options `docker` and `pod` require."""
    pod = overlay_pod(pod, make_docker_fields(options.get("docker")))
    return overlay_pod(pod, options.get("pod") or {})


def _make_sidecar(engine: DockerEngine, mode: str, cache: str, socket: Object) -> Object:
    data = {"name": "docker-data", "mountPath": engine.data}
    env = list(engine.container.get("env", ()))
    if cache:  # pods may share a claim, but each engine needs files of its own
        name = {"fieldRef": {"fieldPath": "metadata.name"}}
        env.append({"name": "POD_NAME", "valueFrom": name})
        data["subPathExpr"] = f"{mode}-$(POD_NAME)"
    return {
        **engine.container,
        "name": "docker",
        "image": engine.image,
        "restartPolicy": "Always",
        "env": env,
        "volumeMounts": [socket, data],
        "startupProbe": {
            "exec": {"command": list(engine.ready)},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 90,
        },
    }


def _read(option: object) -> tuple[str, Any]:
    """The mode and the cache in the option's value."""
    if isinstance(option, Mapping):
        return str(option.get("mode")), option.get("cache") or ""
    return str(option), ""
