"""Reads files with SkyPilot or dstack itself. `compare.py` runs this program with the Python of an
environment in which that tool is installed.

    PYTHON reference.py skypilot|dstack FILE...

prints one JSON object for each file: whether the tool accepts the file, or why not, and what the
tool understood.
"""

import json
import os
import sys
from typing import Any

Facts = dict[str, Any]


def read_skypilot(path: str) -> Facts:
    """Load a file as `sky launch --env NAME=given` does. Each variable that is empty in the file
    gets the value `given`.
    """
    from sky.utils import dag_utils, yaml_utils

    with open(path, encoding="utf-8") as file:
        documents = [each for each in yaml_utils.read_yaml_all_str(file.read()) if each]
    given = [
        (str(name), "given")
        for each in documents
        if isinstance(each, dict)
        for name, value in (each.get("envs") or {}).items()
        if value is None
    ]
    dag = dag_utils.load_dag_from_yaml(path, env_overrides=given or None)
    secrets = {
        str(name): value
        for each in documents
        if isinstance(each, dict) and isinstance(each.get("secrets"), dict)
        for name, value in each["secrets"].items()
    }
    missing = {name for name, _ in given} | {name for name, value in secrets.items() if value != ""}
    empty = {name: "" for name in secrets.keys() - missing}
    tasks = [_describe_skypilot(task, missing, empty) for task in dag.tasks]
    if "accelerator_args" not in yaml_utils.dump_yaml_str(documents):  # SkyPilot's own defaults
        for need in (need for task in tasks for need in task["resources"]):
            need["tpu"] = {}
    return {"tasks": tasks, "given": [name for name, _ in given]}


def _describe_skypilot(task: Any, missing: set[str], empty: dict[str, str]) -> Facts:
    # The attributes with `_` contain what the file states. The properties without `_` also look
    # up the
    # instance type in the catalog, or raise.
    mounts = {path: each.to_yaml_config() for path, each in task.storage_mounts.items()}
    return {
        "name": task.name,
        "run": task.run or "",
        "setup": task.setup,
        "env": {
            **empty,
            **{name: value for name, value in task.envs.items() if name not in missing},
        },
        "secrets": sorted({*task.secrets, *missing} - empty.keys()),
        "nodes": task.num_nodes,
        "workdir": task.workdir,
        "files": {**(task.file_mounts or {}), **mounts},
        "volumes": {
            path: each if isinstance(each, str) else each.get("name")
            for path, each in (task.volumes or {}).items()
        },
        "ordered": isinstance(task.resources, list),
        "resources": [_describe_resources(each) for each in task.resources],
    }


def _describe_resources(each: Any) -> Facts:
    return {
        "cloud": str(each.cloud).lower() if each.cloud else "",
        "region": (each.region or "").removeprefix("ssh-"),
        "zone": each.zone or "",
        "instance": each.instance_type,
        "accelerators": dict(each._accelerators or {}),
        "cpus": each._cpus,
        "memory": each._memory,
        "spot": bool(each.use_spot),
        "disk": each.disk_size,
        "tier": each.disk_tier.value if each.disk_tier else None,
        "price": each.max_hourly_cost,
        "image": {region or "": image for region, image in (each.image_id or {}).items()},
        "docker": each._docker_image,
        "tpu": each.accelerator_args or {},
        "pod": each.cluster_config_overrides.get("kubernetes", {}).get("pod_config"),
        "containers": each.cluster_config_overrides.get("kubernetes", {}).get("enable_docker"),
        "labels": each.labels or {},
        "priority": each.priority or 0,
        "recovery": each.job_recovery or {},
    }


def read_dstack(path: str) -> Facts:
    """Parse a file as `dstack apply` does."""
    import yaml
    from dstack._internal.core.models.configurations import parse_apply_configuration
    from dstack._internal.server.services.resources import set_default_gpu_spec_vendor

    with open(path, encoding="utf-8") as file:
        found = parse_apply_configuration(yaml.safe_load(file))
    if found.type not in ("task", "service", "dev-environment"):
        return {"tasks": []}
    need = found.resources
    if need.gpu is not None and not need.gpu.name:
        set_default_gpu_spec_vendor(need.gpu, found.image, found.docker)
    env = {name: value for name, value in found.env.items() if isinstance(value, str)}
    return {
        "tasks": [
            {
                "name": found.name,
                "session": found.type == "dev-environment",
                "image": found.image,
                "login": found.registry_auth is not None,
                "secrets": sorted(name for name in found.env if name not in env),
                "priority": found.priority or 0,
                "tags": found.tags or {},
                "volumes": [_describe_mount(each) for each in found.volumes],
                "folder": found.working_dir,
                "files": [[each.local_path, each.path] for each in found.files],
                "repos": [
                    [each.local_path or each.url, each.hash or each.branch, each.path]
                    for each in found.repos
                ],
                "price": found.max_price,
                "instances": list(found.instance_types or []),
                "duration": _seconds(found.max_duration),
                "grace": _seconds(found.stop_duration),
                "retry": _describe_retry(found.retry),
                "cron": list(found.schedule.crons) if found.schedule else [],
                "idle": found.utilization_policy.time_window
                if found.utilization_policy
                else _seconds(getattr(found, "inactivity_duration", None)),
                "commands": list(getattr(found, "commands", [])),
                "init": list(getattr(found, "init", [])),
                "entrypoint": found.entrypoint,
                "env": env,
                "nodes": getattr(found, "nodes", None) or 1,
                "cpus": [need.cpu.count.min, need.cpu.count.max],
                "memory": [need.memory.min, need.memory.max],
                "disk": need.disk.size.min if need.disk else None,
                "gpus": _describe_gpus(need.gpu),
                "spot": found.spot_policy.value if found.spot_policy else None,
                "backends": [each.value for each in found.backends or []],
                "regions": list(found.regions or []),
            }
        ]
    }


def _describe_mount(mount: Any) -> list[Any]:
    name = getattr(mount, "name", None) or mount.instance_path
    return [name, mount.path, bool(getattr(mount, "optional", False))]


def _seconds(length: Any) -> Any:
    return "off" if length in (False, "off") else int(length) if length else None


def _describe_retry(retry: Any) -> list[str]:
    if not retry:
        return []
    events = getattr(retry, "on_events", None) or ("no-capacity", "interruption", "error")
    return [getattr(each, "value", each) for each in events]


def _describe_gpus(gpu: Any) -> Facts | None:
    if gpu is None or gpu.count.max == 0 or (not gpu.count.min and gpu.count.max is None):
        return None
    memory = [gpu.memory.min, gpu.memory.max] if gpu.memory else [None, None]
    return {
        "vendor": gpu.vendor and gpu.vendor.value,
        "names": gpu.name or [],
        "count": [gpu.count.min, gpu.count.max],
        "memory": memory,
    }


def main() -> None:
    """Print one line for each file."""
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    kind, *files = sys.argv[1:]
    read = read_skypilot if kind == "skypilot" else read_dstack
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tools' own output goes elsewhere
    for path in files:
        try:
            facts = {"accepted": True, **read(path)}
        except Exception as error:  # noqa: BLE001  # whatever the tool raises is its answer
            facts = {"accepted": False, "reason": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"file": path, **facts}, default=str), file=out, flush=True)


if __name__ == "__main__":
    main()
