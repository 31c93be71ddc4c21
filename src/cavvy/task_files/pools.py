"""Reads the file of a pool. The keys of a pool's file, which `cavvy pool apply` reads."""

import re
from datetime import timedelta
from pathlib import Path

from cavvy.domain.node_pools import MOST_LABELS, MOST_NODES, NodePool
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
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
from cavvy.spec.tree import MapNode, ScalarNode, check_single, compose_all, describe
from cavvy.task_files.foreign import list_readers

LONGEST_IDLE = timedelta(days=1)

# what kubelet refuses in `--node-labels`, so that a node would be billed and never join
_RESERVED = re.compile(
    r"(?!([a-z0-9.-]+\.)?(node|kubelet)\.kubernetes\.io/|topology\.kubernetes\.io/(zone|region)$)"
    r"([a-z0-9.-]+\.)?(kubernetes|k8s)\.io/"
)
SHORTEST_IDLE = timedelta(minutes=1)


def read_pool(text: str, *, file: str, project: str) -> NodePool:
    """Read the pool that a file of Cavvy or of another tool describes. Raises SpecError with every
    problem.
    """
    for reader in list_readers():
        if (pool := reader.read_pool(text, file=file, project=project)) is not None:
            return pool
    return parse_pool(text, file=file, project=project)


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
