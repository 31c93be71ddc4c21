"""Reads the file of a pool, in Cavvy's format or in that of `sky jobs pool apply`."""

from datetime import timedelta
from typing import Any

from cavvy.domain.node_pools import MOST_NODES, USUAL_IDLE, NodePool
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.fields.node_pool import SHORTEST_IDLE, parse_pool
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, compose_all, to_value
from cavvy.task_files import ReadOptions, parse_file

# Keys with which SkyPilot prepares the workers of a pool before their first job.
_OF_JOBS = ("setup", "run", "workdir", "file_mounts", "envs", "secrets", "volumes")


def read_pool(text: str, *, file: str, project: str) -> NodePool:
    """Read the pool that `text` describes. Raises SpecError with every problem."""
    notes = ProblemNotes(file, text.removeprefix("\ufeff"))
    documents = compose_all(notes.text, notes)
    root = documents[0] if len(documents) == 1 else None
    table = root.get("pool") if isinstance(root, MapNode) else None
    if not isinstance(root, MapNode) or not isinstance(table, MapNode):
        return parse_pool(text, file=file, project=project)
    for key, _ in root.entries:
        if key.text in _OF_JOBS:
            message = f"`{key.text}` of a pool is not supported: the jobs bring their own"
            hint = f"move `{key.text}` to the task files of the jobs"
            notes.add(key.mark, message, suggestion=hint)
    found = parse_file(text, file=file, options=ReadOptions(dialect="skypilot"))
    for each in found.refused:
        notes.outside(file, f"`{each.key}` of this pool is not supported: {each.reason}")
    task = found.tasks[0] if found.tasks else TaskSpec(name="", run="")
    if task.nodes > 1:
        message = f"workers of {task.nodes} nodes are not supported"
        hint = "delete `num_nodes`; a job with several nodes uses several nodes of the pool"
        notes.add(root.mark, message, suggestion=hint)
    least, most, idle = _read_sizes({key.text: to_value(value) for key, value in table.entries})
    if most < 1:
        hint = "write `max_workers`, or delete the pool with `cavvy pool rm`"
        notes.add(table.mark, "the pool has no workers", suggestion=hint)
    if most > MOST_NODES:
        expected = f"at most {MOST_NODES:,}"
        notes.add(table.mark, "the pool has too many workers", expected=expected)
    notes.check()
    spot = any(each.spot is not SpotPolicy.NEVER for each in task.resources.choices)
    return NodePool(
        project=project,
        name=task.name,
        resources=_without_spot(task.resources),
        image=task.image,
        image_login=task.image_login,
        min_nodes=least,
        max_nodes=most,
        idle=idle,
        spot_share=1.0 if spot else 0.0,
        text=text,
    )


def _read_sizes(table: dict[str, Any]) -> tuple[int, int, timedelta]:
    """Return the minimum and the maximum number of nodes, and how long idle nodes are kept."""
    workers = table.get("workers")
    most = table.get("max_workers", workers or 0)
    least = table.get("min_workers", workers if workers is not None else 0)
    idle_s = table.get("downscale_delay_seconds")
    idle = USUAL_IDLE if idle_s is None else timedelta(seconds=float(idle_s))
    return min(least, most), most, min(max(idle, SHORTEST_IDLE), timedelta(days=1))


def _without_spot(need: ResourceSpec) -> ResourceSpec:
    choices = tuple(replace(each, spot=SpotPolicy.NEVER) for each in need.any_of)
    return replace(need, spot=SpotPolicy.NEVER, any_of=choices)
