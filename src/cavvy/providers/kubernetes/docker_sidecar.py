"""Builds the pod fields for the option `docker`, which runs a container engine next to the work.
No I/O.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.values import Struct, field
from cavvy.providers.kubernetes.pod_fields import overlay_pod

Object = dict[str, Any]

_CLIENT_IMAGE = "docker:29-cli"
_CACHE = "/cavvy/docker-cache"
# Starts an engine in the first folder of the cache that no other engine uses. The engine inherits
# the lock on its folder, so the lock ends with the engine, even after a crash. Before the start,
# the script removes the restart policy from the containers of earlier pods, because Docker would
# start these containers again.
TAKE_FOLDER = """\
flag=$1; shift
n=0
until mkdir -p "$0/$n" && exec 9> "$0/$n.lock" && flock -n 9; do
    n=$((n + 1))
    if [ $n = 64 ]; then
        echo "no free folder: 64 engines use the cache, or its file system has no locks" >&2
        exit 1
    fi
done
if [ -d "$0/$n/containers" ]; then
    find "$0/$n/containers" -name hostconfig.json -exec sed -i \
        's/"RestartPolicy":{"Name":"[^"]*"/"RestartPolicy":{"Name":"no"/' {} +
fi
exec "$@" "$flag=$0/$n"
"""
# the client, its plugins and its configuration
_TOOLS = "/cavvy/docker"
# file name in `_TOOLS` -> path at which the work finds the client or the plugin
_CLIENT_PATHS = {
    "docker": "/usr/local/bin/docker",
    "cli-plugins": "/usr/local/libexec/docker/cli-plugins",
}


class DockerEngine(Struct, frozen=True, kw_only=True):
    """A container engine that listens at a socket in a folder which the work can also access."""

    image: str
    data: str  # the folder where the engine stores images and layers
    program: tuple[str, ...]  # the command of the engine's image
    root: str  # the name of the engine's option that sets the data folder
    socket_dir: str
    container: Object  # fields of the engine's container
    ready: tuple[str, ...]  # a command that fails until the engine answers
    variables: Mapping[str, str]  # environment variables that the work gets
    steps: tuple[str, ...] = field(default=())  # commands that prepare the client
    # commands that remove data of earlier work from the cache that would disturb this work
    clean: tuple[str, ...] = field(default=())


_DOCKER = "unix:///var/run/dind/docker.sock"
_BUILDKIT = "unix:///run/buildkit/buildkitd.sock"
_ENGINES = {
    "all": DockerEngine(
        image="docker:29-dind",
        data="/var/lib/docker",
        program=("dockerd-entrypoint.sh",),
        root="--data-root",
        socket_dir="/var/run/dind",
        container={
            "args": [f"--host={_DOCKER}", "--group=1000"],
            "env": [{"name": "DOCKER_TLS_CERTDIR", "value": ""}],
            "securityContext": {"privileged": True},
        },
        ready=("docker", "--host", _DOCKER, "info"),
        variables={"DOCKER_HOST": _DOCKER},
        clean=(
            f"containers=$(docker -H {_DOCKER} ps -aq)",
            f'[ -z "$containers" ] || docker -H {_DOCKER} rm -fv $containers',
        ),
    ),
    "build": DockerEngine(
        image="moby/buildkit:rootless",
        data="/home/user/.local/share/buildkit",
        program=("rootlesskit", "buildkitd"),
        root="--root",
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
    """Return the reason why the value of the option is invalid, or None if it is valid."""
    mode, cache = _read(option)
    if mode not in _ENGINES or not isinstance(cache, str):
        return (
            "expected `all`, `build`, or a table with `mode` and `cache`, where `cache` is the "
            "name of a claim"
        )
    return None


def make_docker_fields(option: object, project: str) -> Object:
    """Return the fields of a pod whose work can call `docker` (mode `all`) or only `docker buildx
    build` (mode `build`). The engine is a sidecar, which starts before the work and stops after the
    work; an init container provides the client. If the option names a claim as `cache`, the claim
    keeps the engine's data for the project's later pods; otherwise the data is deleted with the
    pod. Returns {} if the task does not set the option.
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
    steps = (*engine.steps, *engine.clean) if cache else engine.steps
    sidecar = _make_sidecar(engine, f"{mode}/{project}" if cache else "", socket)
    client = _make_client(steps, [{**tools}, {**socket}])
    variables = [{"name": name, "value": value} for name, value in engine.variables.items()]
    spec: Object = {
        "initContainers": [sidecar, client],
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


def overlay_task(pod: Object, options: Mapping[str, Any], project: str) -> Object:
    """Return the pod, merged with the fields that the task's options `docker` and `pod` require."""
    pod = overlay_pod(pod, make_docker_fields(options.get("docker"), project))
    return overlay_pod(pod, options.get("pod") or {})


def _make_sidecar(engine: DockerEngine, cached: str, socket: Object) -> Object:
    """Return the engine's container. `cached` is the project's folder in the volume claim of the
    cache, or "" if there is no cache. Two engines must not share a data folder, so each engine
    takes a free subfolder.
    """
    data = {"name": "docker-data", "mountPath": engine.data}
    command: Object = {}
    if cached:
        data = {"name": "docker-data", "mountPath": _CACHE, "subPath": cached}
        command["command"] = ["sh", "-ec", TAKE_FOLDER, _CACHE, engine.root, *engine.program]
    return {
        **engine.container,
        **command,
        "name": "docker",
        "image": engine.image,
        "restartPolicy": "Always",
        "volumeMounts": [socket, data],
        "startupProbe": {
            "exec": {"command": list(engine.ready)},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 90,
        },
    }


def _make_client(steps: Sequence[str], mounts: Sequence[Object]) -> Object:
    """Return the init container that copies docker's client for the work and then runs the shell
    commands `steps`.
    """
    copies = [f"cp -r {path} {_TOOLS}/" for path in _CLIENT_PATHS.values()]
    return {
        "name": "docker-client",
        "image": _CLIENT_IMAGE,
        "command": ["sh", "-ec", "\n".join([*copies, *steps])],
        "volumeMounts": mounts,
    }


def _read(option: object) -> tuple[str, Any]:
    """Return the mode and the cache in the option's value."""
    if isinstance(option, Mapping):
        return str(option.get("mode")), option.get("cache") or ""
    return str(option), ""
