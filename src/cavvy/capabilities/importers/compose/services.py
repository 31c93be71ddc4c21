"""Makes a task of one service of a Compose file, by
https://docs.docker.com/reference/compose-file/services and
https://docs.docker.com/reference/compose-file/deploy.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from shlex import quote

from cavvy.capabilities.importers.compose.mounts import inside, read_files, read_hosts
from cavvy.capabilities.importers.compose.values import ComposeReader
from cavvy.domain.tasks import (
    AcceleratorNeed,
    ImageBuild,
    ResourceSpec,
    RetryPolicy,
    TaskSpec,
    Volume,
    VolumeKind,
    Workdir,
)
from cavvy.spec.problems import SourceMark, nearest, slug
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

_COMMAND, _ENTRY = "${{ image.command }}", "${{ image.entrypoint }}"
_MANY = 65_536
_NETWORK = "the services reach each other by their names; Cavvy makes no other networks"
_POD = "`resources: {options: …}` of a Cavvy file sets what one provider has"
_LEFT_OUT = {
    **dict.fromkeys(("networks", "network_mode", "links", "mac_address", "dns"), _NETWORK),
    **dict.fromkeys(("labels", "annotations", "label_file"), "`tags` describe a job"),
    **dict.fromkeys(("logging", "attach"), "`cavvy logs` shows what the service prints"),
    **dict.fromkeys(("tty", "stdin_open"), "the work of a job has no terminal"),
    **dict.fromkeys(("shm_size", "ipc"), "a container can use all of a node's shared memory"),
    **dict.fromkeys(("ulimits", "sysctls", "oom_score_adj"), "the node determines limits"),
    **dict.fromkeys(("mem_swappiness", "memswap_limit", "mem_reservation"), "nodes do not swap"),
    **dict.fromkeys(("platform", "pull_policy"), "the node pulls the image for its own processor"),
    **dict.fromkeys(("user", "security_opt", "read_only"), "the image's user runs the program"),
    **dict.fromkeys(("cpu_shares", "cpu_quota", "cpuset", "cpu_count"), "`cpus` asks for CPUs"),
    **dict.fromkeys(("cap_drop", "pids_limit", "cgroup", "cgroup_parent"), "the node limits jobs"),
    "init": "the agent waits for the processes of the container",
    "stop_signal": "a service gets SIGTERM before it must end",
    "develop": "`cavvy dev --sync .` sends changed files",
    "runtime": "the node's engine gives the container the GPUs that it asks for",
    "scale": "`deploy.replicas` is read",
    "tmpfs": "a folder of the container is used",
    "group_add": "the image's user runs the program",
}
_REFUSED = {
    "extends": "write the keys of the other service here",
    "privileged": f"jobs get no privileges; {_POD}",
    "cap_add": f"jobs get no privileges; {_POD}",
    "pid": "a job sees its own processes only",
    "volumes_from": "name the volume in both services",
    "post_start": "write the commands in `command`",
    "pre_stop": "write the commands in `command`",
    "provider": "the program that it names does not exist here",
    "models": "`engine` and `model` under `service` of a Cavvy file serve a model",
}
_READ = (
    *("image", "build", "command", "entrypoint", "working_dir", "environment", "env_file"),
    *("ports", "expose", "volumes", "deploy", "gpus", "cpus", "mem_limit", "healthcheck"),
    *("depends_on", "profiles", "restart", "stop_grace_period", "container_name", "hostname"),
    *("secrets", "configs", "extra_hosts", "devices"),
)
_EVERY = (*_READ, *_LEFT_OUT, *_REFUSED)
# devices that are all GPUs of a machine: of the engine, by CDI, and of the kernel
_CDI = re.compile(r"(?:nvidia|amd)\.com/gpu=(.+)")
_NODES = re.compile(r"/dev/(?:nvidia(?P<number>\d+)|nvidiactl|nvidia-\w+|dri(?:/.*)?|kfd)(?::.*)?")
_CACHES = re.compile(r"~/\.cache(?:/[\w./-]*)?")
_BUILD = {"context", "dockerfile", "target", "args"}
_BUILD_LEFT_OUT = ("cache_from", "cache_to", "labels", "network", "tags", "platforms", "no_cache")
_RESTARTS = {"no": 0, "": 0, "always": None, "unless-stopped": None, "on-failure": None}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_service(name: str, table: MapNode, mark: SourceMark, reader: ComposeReader) -> TaskSpec:
    """Return the task of a service. Its commands do not know the other services yet."""
    _sort_keys(name, table, reader)
    image, build = reader.text(table.get("image")), _read_build(table.get("build"), reader)
    if not image and build is None:
        hint = "a file that changes another one is read with compose.yaml or docker-compose.yml "
        hint += "beside it; join others first: `docker compose -f A -f B config`"
        message = f"{name} has neither `image` nor `build`"
        reader.notes.add(mark, message, suggestion=hint)
    volumes = [*_read_volumes(name, table, reader)]
    files = read_files(name, table, reader)
    volumes += files.volumes
    beside = build is not None or any(each.kind is VolumeKind.FOLDER for each in volumes)
    grace = table.get("stop_grace_period")
    return TaskSpec(
        name=slug(name) or "service",
        run=read_hosts(table, reader) + files.commands + _read_command(table, reader),
        secrets=files.secrets,
        image=None if build else image or None,
        image_build=build,
        workdir=Workdir(path=".") if beside else None,
        env=_read_env(table, reader),
        resources=_read_resources(table, reader),
        volumes=tuple(dict.fromkeys(volumes)),
        retry=_read_restart(table, reader),
        grace=timedelta(seconds=read_seconds(grace, reader) if grace is not None else 10),
    )


def _sort_keys(name: str, table: MapNode, reader: ComposeReader) -> None:
    """Say what becomes of every key that is not read."""
    for key, _ in table.entries:
        where = f"services.{name}.{key.text}"
        if key.text in _REFUSED:
            message = f"`{where}` is not supported"
            reader.notes.add(key.mark, message, suggestion=_REFUSED[key.text])
        elif key.text in _LEFT_OUT:
            reader.kept.note(key.mark, where, _LEFT_OUT[key.text])
        elif key.text not in _READ and not key.text.startswith("x-"):
            near = nearest(key.text, _EVERY)
            hint = f"did you mean {near}?" if near else "delete the key"
            reader.notes.add(key.mark, f"a service has no key {key.text!r}", suggestion=hint)
    network = table.get("network_mode")
    mode = reader.text(network)
    if network is not None and mode.startswith(("service:", "container:")):
        message = f"`network_mode: {mode}` is not supported: each service has its own addresses"
        reader.notes.add(network.mark, message, suggestion="use the name of the other service")


def _child(node: Node | None, *keys: str) -> Node | None:
    for key in keys:
        node = node.get(key) if isinstance(node, MapNode) else None
    return node


def _read_build(node: Node | None, reader: ComposeReader) -> ImageBuild | None:
    if node is None:
        return None
    if not isinstance(node, MapNode):
        return ImageBuild(path=inside(reader.text(node), node.mark, reader))
    for key, _ in node.entries:
        if key.text in _BUILD_LEFT_OUT:
            reader.kept.note(key.mark, f"build.{key.text}", "each node builds the image itself")
        elif key.text not in _BUILD:
            message = f"`build.{key.text}` is not supported"
            hint = "build the image yourself, push it, and name it in `image`"
            reader.notes.add(key.mark, message, suggestion=hint)
    args: dict[str, str] = {}
    for name, value, mark in reader.pairs(node.get("args")):
        args[name] = reader.find(name, mark) or "" if value is None else value
    return ImageBuild(
        path=inside(reader.text(node.get("context")) or ".", node.mark, reader),
        dockerfile=reader.text(node.get("dockerfile")) or "Dockerfile",
        target=reader.text(node.get("target")),
        args=args,
    )


def _read_command(table: MapNode, reader: ComposeReader) -> str:
    """Return the commands of the container. Without `entrypoint`, the image's own one starts."""
    entry = _read_words(table.get("entrypoint"), reader)
    words = _read_words(table.get("command"), reader)
    if entry is None:
        line = [_ENTRY, *map(quote, words)] if words else [_COMMAND]
    else:
        line = [*map(quote, entry), *map(quote, words or [])]
    folder = reader.text(table.get("working_dir"))
    before = f"cd {quote(folder)}\n" if folder else ""
    if folder and entry is None:
        # the image's entry point starts in its own folder, so that it is left again
        line = [_ENTRY, "sh", "-c", quote(f'cd {quote(folder)} && exec "$@"'), "sh", *line[1:]]
        before = ""
        if not words:
            message = "`working_dir` needs `command` or `entrypoint`"
            reader.notes.add(table.mark, message, suggestion="write the command of the image")
    return f"{before}exec {' '.join(line)}"


def _read_words(node: Node | None, reader: ComposeReader) -> list[str] | None:
    if node is None or (isinstance(node, ScalarNode) and node.value is None):
        return None
    if isinstance(node, ListNode):
        return reader.texts(node)
    text = reader.text(node)
    try:
        return shlex.split(text)
    except ValueError as error:
        reader.notes.add(node.mark, f"the command cannot be read: {error}")
        return []


def _read_env(table: MapNode, reader: ComposeReader) -> dict[str, str]:
    env: dict[str, str] = {}
    node = table.get("env_file")
    for each in node.items if isinstance(node, ListNode) else (node,):
        if each is None:
            continue
        required = reader.text(_child(each, "required")) != "false"
        path = reader.text(each.get("path") if isinstance(each, MapNode) else each)
        env |= reader.read_env_file(path, each.mark, required=required)
    for name, value, mark in reader.pairs(table.get("environment")):
        found = reader.find(name, mark) if value is None else value
        if found is None:
            reason = "the variable has no value here, so it is not set"
            reader.kept.note(mark, f"environment.{name}", reason)
        else:
            env[name] = found
    return env


def _read_resources(table: MapNode, reader: ComposeReader) -> ResourceSpec:
    limits = _child(table, "deploy", "resources", "limits")
    asked = _child(table, "deploy", "resources", "reservations")
    cpus = _read_number(
        _child(asked, "cpus") or _child(limits, "cpus") or table.get("cpus"), reader
    )
    memory = _child(asked, "memory") or _child(limits, "memory") or table.get("mem_limit")
    for key in ("cpus", "memory"):
        most, least = _child(limits, key), _child(asked, key)
        if most is not None and least is not None and reader.text(most) != reader.text(least):
            reason = "the job has what it reserves, at least; no other limit is set"
            reader.kept.note(most.mark, f"deploy.resources.limits.{key}", reason)
    _sort_deploy(_child(table, "deploy"), reader)
    return ResourceSpec(
        accelerators=tuple(_read_gpus(table, asked, reader)),
        cpus_min=cpus,
        memory_min_mib=None if memory is None else _read_mib(memory, reader),
    )


def _sort_deploy(deploy: Node | None, reader: ComposeReader) -> None:
    for key, value in deploy.entries if isinstance(deploy, MapNode) else ():
        if key.text == "replicas" and reader.text(value) not in ("", "1"):
            message = "several replicas of a service are not supported"
            hint = "write the service once for each, or `cavvy serve` a Cavvy file with `service`"
            reader.notes.add(key.mark, message, suggestion=hint)
        elif key.text not in ("resources", "restart_policy", "replicas"):
            reader.kept.note(key.mark, f"deploy.{key.text}", "it is for Docker's own swarm")


def _read_gpus(
    table: MapNode, asked: Node | None, reader: ComposeReader
) -> Iterator[AcceleratorNeed]:
    given = _read_devices(table, reader)
    node = _child(asked, "devices") or table.get("gpus")
    if node is None and given is not None:
        yield given
        return
    all_of_them = node is None and reader.text(table.get("runtime")) == "nvidia"
    if isinstance(node, ScalarNode) and node.text != "all":
        reader.notes.add(node.mark, f"gpus: {node.text} is no list", expected="all, or a list")
        return
    if all_of_them or isinstance(node, ScalarNode):
        yield AcceleratorNeed(count_max=_MANY)
        return
    wanted = (
        [each for each in node.items if isinstance(each, MapNode)]
        if isinstance(node, ListNode)
        else []
    )
    if len(wanted) > 1:
        message = "several reservations of devices are not supported"
        reader.notes.add(wanted[1].mark, message, suggestion="ask for all GPUs in one")
    for each in wanted[:1]:
        names = set(reader.texts(each.get("capabilities")))
        driver = reader.text(each.get("driver"))
        ids = reader.texts(each.get("device_ids"))
        if driver == "cdi" and ids and all(map(_CDI.fullmatch, ids)):
            yield _count_cdi(each, ids, reader)
            continue
        if driver not in ("", "nvidia", "amd") or (names and not names & {"gpu", "nvidia"}):
            message = f"devices of {driver or ', '.join(sorted(names))} are not supported"
            reader.notes.add(each.mark, message, expected="GPUs")
            continue
        yield _read_device(each, reader)


def _read_devices(table: MapNode, reader: ComposeReader) -> AcceleratorNeed | None:
    """Return the GPUs that `devices` passes to the container, or None. Refuses other devices."""
    node, cdi, numbers = table.get("devices"), list[str](), set[str]()
    for each in node.items if isinstance(node, ListNode) else ():
        name = reader.text(each.get("source") if isinstance(each, MapNode) else each)
        if found := _NODES.fullmatch(name):
            numbers |= {found["number"]} - {None}
        elif _CDI.fullmatch(name):
            cdi.append(name)
        else:
            message = f"the device {name} is not supported"
            reader.notes.add(each.mark, message, expected="GPUs, such as nvidia.com/gpu=all")
    if cdi and node is not None:
        return _count_cdi(node, cdi, reader)
    if node is None or not numbers:
        return None
    reason = f"the job gets {len(numbers)}; which ones is chosen on the node"
    reader.kept.note(node.mark, "devices", reason)
    return AcceleratorNeed(count_min=len(numbers))


def _count_cdi(node: Node, names: list[str], reader: ComposeReader) -> AcceleratorNeed:
    """Return the GPUs of names such as nvidia.com/gpu=0."""
    if any(name.endswith("=all") for name in names):
        return AcceleratorNeed(count_max=_MANY)
    reason = f"the job gets {len(names)}; which ones is chosen on the node"
    reader.kept.note(node.mark, "devices", reason)
    return AcceleratorNeed(count_min=len(names))


def _read_device(each: MapNode, reader: ComposeReader) -> AcceleratorNeed:
    count, ids = reader.text(each.get("count")), reader.texts(each.get("device_ids"))
    for key, _ in each.entries:
        if key.text not in ("driver", "count", "device_ids", "capabilities"):
            reason = "the node's engine gives the container its GPUs"
            reader.kept.note(key.mark, f"devices.{key.text}", reason)
    if count and ids:
        message = "`count` and `device_ids` exclude each other"
        reader.notes.add(each.mark, message, suggestion="keep one of them")
    ids = [part.strip() for each_id in ids for part in each_id.split(",") if part.strip()]
    if "all" in ids:
        return AcceleratorNeed(count_max=_MANY)
    if ids:
        reason = f"the job gets {len(ids)}; which ones is chosen on the node"
        reader.kept.note(each.mark, "device_ids", reason)
        return AcceleratorNeed(count_min=len(ids))
    if count in ("", "all", "-1"):
        return AcceleratorNeed(count_max=_MANY)
    if not count.isdecimal() or not int(count):
        reader.notes.add(each.mark, f"count: {count} is no number of GPUs", expected="1, 2 or all")
        return AcceleratorNeed()
    return AcceleratorNeed(count_min=int(count))


def _read_number(node: Node | None, reader: ComposeReader) -> float | None:
    text = reader.text(node)
    if node is None or not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text):
        reader.notes.add(node.mark, f"{text!r} is no number of CPUs", expected="such as 2 or 0.5")
        return None
    return round(float(text), 3)


def _read_mib(node: Node, reader: ComposeReader) -> int | None:
    text = reader.text(node).lower()
    found = re.fullmatch(r"([0-9]{1,15})(\.[0-9]+)?\s*([kmgt]?)i?b?", text)
    if found is None:
        expected = "a size such as 512m or 16g"
        reader.notes.add(node.mark, f"{text!r} is no size of memory", expected=expected)
        return None
    power = " kmgt".index(found[3] or " ")
    size = float(found[1] + (found[2] or "")) * float(1024**power)
    return max(1, round(size / float(1 << 20)))


def _read_volumes(name: str, table: MapNode, reader: ComposeReader) -> Iterator[Volume]:
    node = table.get("volumes")
    for each in node.items if isinstance(node, ListNode) else ():
        found = _read_volume(name, each, reader)
        if found is not None:
            yield found


def _read_volume(name: str, node: Node, reader: ComposeReader) -> Volume | None:
    """Return the volume of one entry, or None if the container's own folder is used."""
    if isinstance(node, MapNode):
        kind, source = reader.text(node.get("type")), reader.text(node.get("source"))
        target = reader.text(node.get("target"))
        read_only = reader.text(node.get("read_only")) == "true"
        if kind not in ("volume", "bind", "tmpfs"):
            message = f"a volume of type {kind or 'nothing'} is not supported"
            reader.notes.add(node.mark, message, expected="volume, bind or tmpfs")
            return None
    else:
        parts = reader.text(node).split(":")
        source, target = ("", parts[0]) if len(parts) == 1 else (parts[0], parts[1])
        options = parts[2].split(",") if len(parts) > 2 else []
        read_only = "ro" in options
        kind = "bind" if source.startswith((".", "/", "~")) else "volume"
    where = f"services.{name}.volumes"
    if kind == "tmpfs" or not source:
        reader.kept.note(node.mark, where, f"{target} is a folder of the container")
        return None
    if kind == "volume":
        return Volume(kind=VolumeKind.NAMED, source=source, path=target, read_only=read_only)
    if source.endswith("docker.sock"):
        message = "jobs do not get the engine of their node"
        reader.notes.add(node.mark, message, suggestion="delete the line")
        return None
    if source.startswith("/"):
        return Volume(kind=VolumeKind.HOST, source=source, path=target, read_only=read_only)
    if _CACHES.fullmatch(source) and ".." not in source:
        reason = f"{source} is a cache: {target} is a folder of the container, which is empty first"
        reader.kept.note(node.mark, where, reason)
        return None
    if source.startswith("~"):
        message = f"{source} is in your home folder, which a node does not have"
        hint = "copy it into the folder of this file, or use a volume with a name"
        reader.notes.add(node.mark, message, suggestion=hint)
        return None
    inner = inside(source, node.mark, reader)
    place = reader.folder / inner
    is_empty = place.is_dir() and not any(place.iterdir())
    is_folder = source.endswith("/") or not posixpath.splitext(inner)[1]
    if is_empty or (not place.exists() and is_folder):
        reason = f"{source} is empty here, so {target} is a folder of the container"
        reader.kept.note(node.mark, where, reason)
        return None
    if not read_only:
        reason = f"the service has a copy of {source}; what it writes there stays on the node"
        reader.kept.note(node.mark, where, reason)
    return Volume(kind=VolumeKind.FOLDER, source=inner, path=target, read_only=read_only)


def _read_restart(table: MapNode, reader: ComposeReader) -> RetryPolicy:
    policy, node = _child(table, "deploy", "restart_policy"), table.get("restart")
    text = reader.text(node)
    if policy is not None and node is None:
        condition = reader.text(_child(policy, "condition")) or "any"
        most = reader.text(_child(policy, "max_attempts"))
        text = {"none": "no", "any": "always"}.get(condition, condition)
        text += f":{most}" if most and text != "no" else ""
    name, _, most = text.partition(":")
    if isinstance(node, ScalarNode) and node.value is False:
        name = "no"
    if name not in _RESTARTS or (most and not most.isdecimal()):
        mark = (node or policy or table).mark
        expected = "no, always, unless-stopped, on-failure or on-failure:3"
        reader.notes.add(mark, f"restart: {text} is unknown", expected=expected)
        return RetryPolicy()
    if name in ("always", "unless-stopped") and node is not None:
        reason = "a service that ends with exit code 0 is not started again"
        reader.kept.note(node.mark, "restart", reason)
    tries = int(most) if most else _RESTARTS[name]
    return RetryPolicy(exit=tries, delay=timedelta(seconds=1 if tries != 0 else 0))


def read_seconds(node: Node, reader: ComposeReader) -> float:
    """Return a length of time such as 1m30s in seconds."""
    text = reader.text(node)
    parts = re.findall(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|h|m|s)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        expected = "a length of time such as 30s or 1m30s"
        reader.notes.add(node.mark, f"{text!r} is no length of time", expected=expected)
        return 0
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def list_ports(table: MapNode, reader: ComposeReader) -> list[tuple[int, str]]:
    """Return the ports of the container, each with the port of the host, or ""."""
    found: list[tuple[int, str]] = []
    for key in ("ports", "expose"):
        node = table.get(key)
        for each in node.items if isinstance(node, ListNode) else ():
            if isinstance(each, MapNode):
                inner, outer = reader.text(each.get("target")), reader.text(each.get("published"))
            else:
                *hosts, inner = reader.text(each).partition("/")[0].split(":")
                outer = hosts[-1] if hosts else ""
            protocol = (
                reader.text(each.get("protocol"))
                if isinstance(each, MapNode)
                else reader.text(each).partition("/")[2]
            )
            if protocol.lower() not in ("", "tcp"):
                reason = f"`cavvy forward` forwards TCP, and not {protocol.upper()}"
                reader.kept.note(each.mark, key, reason)
                continue
            first = inner.partition("-")[0]
            if not first.isdecimal() or not 0 < int(first) < 65_536:
                expected = "a port such as 8080:80"
                reader.notes.add(each.mark, f"{inner!r} is no port", expected=expected)
                continue
            at = outer.partition("-")[0]
            if key == "ports" and at and not (at.isdecimal() and int(at) < 65_536):
                expected = "a port such as 8080:80"
                reader.notes.add(each.mark, f"{outer!r} is no port", expected=expected)
                continue
            found.append((int(first), outer.partition("-")[0] if key == "ports" else ""))
    return found
