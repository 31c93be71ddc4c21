"""What SkyPilot or dstack itself makes of files; run by `compare.py` with the Python of an
environment that has it.

    PYTHON reference.py skypilot|dstack FILE...

prints one JSON object for each file: whether it is accepted, why not, and what was understood.
"""

import json
import os
import sys
from typing import Any

Facts = dict[str, Any]


def read_skypilot(path: str) -> Facts:
    """Load a file as `sky launch` does, with empty values for the variables that it must be
    given.
    """
    from sky.utils import dag_utils, yaml_utils

    with open(path, encoding="utf-8") as file:
        documents = [each for each in yaml_utils.read_yaml_all_str(file.read()) if each]
    given = [
        (str(name), "")
        for each in documents
        if isinstance(each, dict)
        for name, value in (each.get("envs") or {}).items()
        if value is None
    ]
    dag = dag_utils.load_dag_from_yaml(path, env_overrides=given or None)
    missing = {name for name, _ in given}
    return {"tasks": [_describe_skypilot(task, missing) for task in dag.tasks]}


def _describe_skypilot(task: Any, missing: set[str]) -> Facts:
    # What the file says: the properties without `_` ask the catalog too for what an instance type
    # has, or raise.
    resources = list(task.resources)
    return {
        "run": task.run or "",
        "setup": task.setup,
        "env": {name: value for name, value in task.envs.items() if name not in missing},
        "nodes": task.num_nodes,
        "accelerators": sorted(
            {(k, v) for each in resources for k, v in (each._accelerators or {}).items()}
        ),
        "cpus": sorted({str(each._cpus) for each in resources}),
        "memory": sorted({str(each._memory) for each in resources}),
        "spot": sorted({bool(each.use_spot) for each in resources}),
        "clouds": sorted({str(each.cloud).lower() for each in resources if each.cloud}),
        "regions": sorted({str(each.region) for each in resources if each.region}),
        "disk": sorted({each.disk_size for each in resources}),
    }


def read_dstack(path: str) -> Facts:
    """Parse a file as `dstack apply` does."""
    import yaml
    from dstack._internal.core.models.configurations import parse_apply_configuration

    with open(path, encoding="utf-8") as file:
        found = parse_apply_configuration(yaml.safe_load(file))
    if found.type not in ("task", "service", "dev-environment"):
        return {"tasks": []}
    need = found.resources
    env = {name: value for name, value in found.env.items() if isinstance(value, str)}
    return {
        "tasks": [
            {
                "commands": list(getattr(found, "commands", [])),
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


def _describe_gpus(gpu: Any) -> Facts | None:
    if gpu is None or gpu.count.max == 0 or (not gpu.count.min and gpu.count.max is None):
        return None
    memory = [gpu.memory.min, gpu.memory.max] if gpu.memory else [None, None]
    return {"names": gpu.name or [], "count": [gpu.count.min, gpu.count.max], "memory": memory}


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
