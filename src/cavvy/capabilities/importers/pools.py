"""Reads pools of other tools: those of `sky jobs pool apply`, and fleets of dstack."""

from datetime import timedelta
from json import dumps
from typing import Any

from cavvy.domain.node_pools import MOST_NODES, USUAL_IDLE, NodePool
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, ScalarNode, compose_all, to_value
from cavvy.task_files import ReadOptions, parse_file
from cavvy.task_files.pools import LONGEST_IDLE, SHORTEST_IDLE

_OF_FLEET = (  # keys that a fleet of dstack has in common with its jobs
    "name",
    "resources",
    "backends",
    "regions",
    "availability_zones",
    "instance_types",
    "reservation",
    "spot_policy",
    "max_price",
    "backend_options",
)
# Keys with which SkyPilot prepares the workers of a pool before their first job.
_OF_JOBS = ("setup", "run", "workdir", "file_mounts", "envs", "secrets", "volumes")


def read_pool(text: str, *, file: str, project: str) -> NodePool | None:
    """Return the pool of a file of another tool, or None. Raises SpecError with every problem."""
    notes = ProblemNotes(file, text.removeprefix("\ufeff"))
    documents = compose_all(notes.text, notes)
    root = documents[0] if len(documents) == 1 else None
    kind = root.get("type") if isinstance(root, MapNode) else None
    if isinstance(root, MapNode) and isinstance(kind, ScalarNode) and kind.value == "fleet":
        return _read_fleet(root, notes, file=file, project=project)
    table = root.get("pool") if isinstance(root, MapNode) else None
    if not isinstance(root, MapNode) or not isinstance(table, MapNode):
        return None
    for key, _ in root.entries:
        if key.text in _OF_JOBS:
            message = f"`{key.text}` of a pool is not supported: the jobs bring their own"
            hint = f"move `{key.text}` to the task files of the jobs"
            notes.add(key.mark, message, suggestion=hint)
    task = _translate(text, "skypilot", notes, file)
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
    return _make_pool(task, least, most, idle, text=text, project=project)


def _read_fleet(root: MapNode, notes: ProblemNotes, *, file: str, project: str) -> NodePool:
    """A fleet's minimum is that of the pool; its target is only the size at its creation. Idle
    nodes are kept for a day at most, and without `idle_duration` as in other pools."""
    checked = parse_file(notes.text, file=file, options=ReadOptions(dialect="dstack"))
    table = {key.text: to_value(value) for key, value in root.entries}
    if "ssh_config" in table:
        notes.outside(file, "; ".join(each.reason for each in checked.refused))
    if table.get("blocks", 1) != 1:
        message = "`blocks` is not supported: each job of a pool has whole nodes"
        notes.add(root.mark, message, suggestion="delete `blocks`")
    least, most = _read_nodes(table.get("nodes"))
    if "ssh_config" not in table and not 1 <= most <= MOST_NODES:
        expected = f"a maximum from 1 to {MOST_NODES:,}, such as `nodes: 0..4`"
        notes.add(root.mark, "the fleet has no usable maximum of nodes", expected=expected)
    idle = table.get("idle_duration", f"{USUAL_IDLE // timedelta(seconds=1)}s")
    run = {"type": "task", "commands": ["true"], **{k: table[k] for k in _OF_FLEET if k in table}}
    if str(idle).lower() not in ("off", "false", "no", "-1"):
        run["max_duration"] = idle  # read as dstack reads lengths of time
    task = _translate(dumps(run), "dstack", notes, file)
    notes.check()
    kept = task.limits.duration or LONGEST_IDLE
    return _make_pool(task, min(least, most), most, kept, text=notes.text, project=project)


def _read_nodes(nodes: Any) -> tuple[int, int]:
    """Return the minimum and the maximum of a fleet, 0 if it has none."""
    if isinstance(nodes, dict):
        return int(nodes.get("min") or 0), int(nodes.get("max") or 0)
    low, dots, high = str(nodes if nodes is not None else "").partition("..")
    return int(low or 0), int((high if dots else low) or 0)


def _translate(text: str, dialect: str, notes: ProblemNotes, file: str) -> TaskSpec:
    """Return the task of another tool's file, and note what is not supported. Raises SpecError."""
    found = parse_file(text, file=file, options=ReadOptions(dialect=dialect))
    for each in found.refused:
        notes.outside(file, f"`{each.key}` of this pool is not supported: {each.reason}")
    return found.tasks[0] if found.tasks else TaskSpec(name="", run="")


def _make_pool(
    task: TaskSpec, least: int, most: int, idle: timedelta, *, text: str, project: str
) -> NodePool:
    spot = any(each.spot is not SpotPolicy.NEVER for each in task.resources.choices)
    return NodePool(
        project=project,
        name=task.name,
        resources=_without_spot(task.resources),
        image=task.image,
        image_login=task.image_login,
        min_nodes=least,
        max_nodes=most,
        idle=min(max(idle, SHORTEST_IDLE), LONGEST_IDLE),
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
    return min(least, most), most, idle


def _without_spot(need: ResourceSpec) -> ResourceSpec:
    choices = tuple(replace(each, spot=SpotPolicy.NEVER) for each in need.any_of)
    return replace(need, spot=SpotPolicy.NEVER, any_of=choices)
