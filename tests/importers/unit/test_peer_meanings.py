"""Files of SkyPilot and dstack for each kind of key, and what each means to Cavvy.

The files of `peer_files.yaml` were written for this test after the tools' public documentation.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.task_files import parse_file

FILES = yaml.safe_load((Path(__file__).parents[2] / "unit" / "peer_files.yaml").read_text())
_PLAIN = TaskSpec(name="t", run="x")


def tell_resources(need: ResourceSpec) -> dict[str, Any]:
    facts = {
        "gpus": [f"{each.name}:{each.count_min}" for each in need.accelerators],
        "gpu_gib": sorted({(each.memory_min_mib or 0) // 1024 for each in need.accelerators} - {0}),
        "cpus": [need.cpus_min, need.cpus_max] if need.cpus_min else None,
        "memory_gib": need.memory_min_mib and need.memory_min_mib // 1024,
        "memory_per_cpu_mib": need.memory_per_cpu_mib,
        "disk": [need.disk_gib, need.disk_type] if need.disk_gib or need.disk_type else None,
        "spot": str(need.spot) if need.spot != "never" else None,
        "instance": need.instance,
        "providers": list(need.providers),
        "regions": list(need.regions),
        "max_micros": need.max_rate and need.max_rate.micros_per_hour,
        "options": [f"{each.provider} {each.values}" for each in need.options],
    }
    return {name: value for name, value in facts.items() if value}


def tell(task: TaskSpec) -> dict[str, Any]:
    """What a task asks for, without what it leaves open."""
    retry, limits = task.retry, task.limits
    facts = {
        "resources": [told for each in task.resources.choices if (told := tell_resources(each))],
        "ordered": task.resources.ordered,
        "nodes": task.nodes if task.nodes > 1 else None,
        "image": task.image,
        "login": task.image_login,
        "workdir": task.workdir
        and (task.workdir.path or f"{task.workdir.git}@{task.workdir.commit}"),
        "env": dict(task.env),
        "secrets": list(task.secrets),
        "tags": dict(task.tags),
        "priority": task.priority,
        "inputs": [
            f"{each.source} > {each.target}"
            + (f", {each.mount}, {'writable' if each.writable else 'read-only'}" * bool(each.mount))
            for each in task.inputs
        ],
        "outputs": [f"{each.source} > {each.target} every {each.every}" for each in task.outputs],
        "volumes": [f"{each.kind} {each.source} at {each.path}" for each in task.volumes],
        "retry": [retry.preemption, retry.node, retry.exit] if retry != _PLAIN.retry else None,
        "idle": limits.idle and [limits.idle.total_seconds(), limits.idle_gpu_percent],
        "duration_s": limits.duration and limits.duration.total_seconds(),
        "cron": task.schedule and task.schedule.cron,
        "session": task.session,
        "grace_s": task.grace.total_seconds() if task.grace != _PLAIN.grace else None,
    }
    return {name: value for name, value in facts.items() if value}


@pytest.mark.parametrize("name", FILES)
def test_a_peer_s_file_is_run_with_equal_meaning(name: str) -> None:
    found = parse_file(FILES[name]["file"], file=f"{name}.yaml")
    assert found.refused == ()
    assert found.kind == ("SkyPilot" if name.startswith("skypilot") else "dstack")
    assert found.task is not None
    assert tell(found.task) == FILES[name]["means"]
