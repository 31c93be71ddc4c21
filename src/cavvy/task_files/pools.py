"""Reads the file of a pool: in Cavvy's format, in that of `sky jobs pool apply`, or dstack's file
of a fleet.

The keys of a pool's file, which `cavvy pool apply` reads.
"""

import re
from datetime import timedelta
from json import dumps
from pathlib import Path
from typing import Any

from cavvy.domain.node_pools import MOST_LABELS, MOST_NODES, USUAL_IDLE, NodePool
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.fields.image import COMMANDS, IMAGE
from cavvy.spec.fields.kinds import (
    NAME,
    FieldSpec,
    MapKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    matching,
    read_text,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.resources import RESOURCES
from cavvy.spec.fields.task import SECRETS
from cavvy.spec.fields.times import WINDOW, length_kind
from cavvy.spec.problems import ProblemNotes, shown, slug
from cavvy.spec.tree import MapNode, ScalarNode, check_single, compose_all, describe, to_value
from cavvy.task_files import ReadOptions, parse_file

LONGEST_IDLE = timedelta(days=1)
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

# what kubelet refuses in `--node-labels`, so that a node would be billed and never join
_RESERVED = re.compile(
    r"(?!([a-z0-9.-]+\.)?(node|kubelet)\.kubernetes\.io/|topology\.kubernetes\.io/(zone|region)$)"
    r"([a-z0-9.-]+\.)?(kubernetes|k8s)\.io/"
)
SHORTEST_IDLE = timedelta(minutes=1)


def read_pool(text: str, *, file: str, project: str) -> NodePool:
    """Read the pool that `text` describes. Raises SpecError with every problem."""
    notes = ProblemNotes(file, text.removeprefix("\ufeff"))
    documents = compose_all(notes.text, notes)
    root = documents[0] if len(documents) == 1 else None
    kind = root.get("type") if isinstance(root, MapNode) else None
    if isinstance(root, MapNode) and isinstance(kind, ScalarNode) and kind.value == "fleet":
        return _read_fleet(root, notes, file=file, project=project)
    table = root.get("pool") if isinstance(root, MapNode) else None
    if not isinstance(root, MapNode) or not isinstance(table, MapNode):
        return parse_pool(text, file=file, project=project)
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


def parse_pool(text: str, *, file: str, project: str) -> NodePool:
    """Read the pool that `text` describes. A pool without `name` is named after the file. Raises
    SpecError with every problem.
    """
    notes = ProblemNotes(file, text.removeprefix("\ufeff"))
    documents = compose_all(notes.text, notes)
    root = check_single(documents, notes) if documents else None
    pool: NodePool | None = None
    if isinstance(root, MapNode):
        pool = POOL.read(root, notes)
    elif root is not None:
        notes.add(root.mark, f"the file is {describe(root)}", expected=POOL.words)
    notes.check()
    assert pool is not None
    name = pool.name or slug(Path(file).stem) or "pool"
    return replace(pool, name=name, project=project, text=text)


def _build(table: SectionReader) -> NodePool | None:
    least, most = table.get("min", 0), table.get("max")
    if most is not None and least > most:
        table.wrong(
            "min", f"`min` {least:,} is more than `max` {most:,}", expected=f"0 to {most:,}"
        )
    need: ResourceSpec | None = table.get("resources")
    if need is not None and any(each.spot is not SpotPolicy.NEVER for each in need.choices):
        hint = "delete `spot`, and write beside `resources`, for example, `spot_share: 50%`"
        table.wrong("resources", "`spot` has no meaning in a pool", suggestion=hint)
    image, build, login = table.get("image") or (None, None, None)
    if build is not None:
        hint = "push the image to a registry and write its name"
        table.wrong("image", "a pool cannot build an image", suggestion=hint)
    if len(table.get("labels") or ()) > MOST_LABELS:
        table.wrong("labels", "the pool has too many labels", expected=f"at most {MOST_LABELS}")
    _check_join(table)
    return table.make(NodePool, name="", project="", image=image, image_login=login)


def _check_join(table: SectionReader) -> None:
    """Check the keys of a pool whose nodes belong to another cluster, which decides how many nodes
    it needs and which of them it no longer needs."""
    if table.get("join") is None:
        if table.get("secrets"):
            hint = "list them in the task files of the jobs"
            table.wrong("secrets", "`secrets` has no meaning without `join`", suggestion=hint)
        return
    if table.get("idle") is not None:
        hint = "delete `idle`: the cluster decides when a node is no longer needed"
        table.wrong("idle", "`idle` has no meaning with `join`", suggestion=hint)
    for name in filter(_RESERVED.match, table.get("labels") or ()):
        message = f"kubelet does not start with the label {shown(name)}"
        table.wrong("labels", message, expected="a name without the prefix of Kubernetes itself")


def _read_share(node: ScalarNode) -> float:
    text = read_text(node).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # a NaN is neither
        raise WrongValue(f"{shown(text)} is not a share")
    return share


# as in Kubernetes, where the prefix of Cavvy's own labels is taken
_WORD = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"


_LABELS = MapKind(
    "label names, each with a value, such as {rack: r1}",
    matching(
        rf"(?!cavvy/)([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_WORD}",
        "cannot be a label's name",
        expected="letters, digits and . _ -, at most 63, and in front PREFIX/ other than cavvy/",
    ),
    text_kind(
        "a value of at most 63 letters, digits and . _ -",
        matching(_WORD, "cannot be a label's value"),
        numbers=True,
    ),
)


POOL = section(
    "pool",
    _build,
    name=NAME,
    min=FieldSpec(whole(0, MOST_NODES), to=("min_nodes",)),
    max=FieldSpec(whole(1, MOST_NODES), required=True, to=("max_nodes",)),
    idle=length_kind(SHORTEST_IDLE, timedelta(hours=24)),
    spot_share=ScalarKind(
        "a share from 0 to 1 such as 0.5, or a percentage such as 50%",
        _read_share,
        {"type": ["number", "string"]},
    ),
    hours=WINDOW,
    image=FieldSpec(IMAGE, to=()),
    labels=_LABELS,
    join=COMMANDS,
    secrets=SECRETS,
    resources=FieldSpec(RESOURCES, required=True),
)
