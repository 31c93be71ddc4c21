"""The top-level keys of a task file, and the conversion of a file to a `TaskSpec`.

The JSON Schema of a task file, for editors; `cavvy validate --schema` prints it.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from cavvy.catalog.residency import OUTSIDE_HINT, list_outside
from cavvy.domain.elastic import NodeRange
from cavvy.domain.tasks import JobLimits, LossPolicy, NotifyTarget, ResourceSpec, TaskSpec, Workload
from cavvy.domain.units import format_duration
from cavvy.domain.values import replace
from cavvy.spec.batch_section import BATCH
from cavvy.spec.fields.after import AFTER, GROUP, check_after, check_group
from cavvy.spec.fields.arrays import (
    ARRAY,
    BEST,
    SEARCH,
    STOP_EARLY,
    SWEEP,
    TRIALS,
    add_metric,
    check_early,
)
from cavvy.spec.fields.edge_step import EDGE, check_edge
from cavvy.spec.fields.image import COMMANDS, IMAGE, SETUP
from cavvy.spec.fields.kinds import (
    FLAG,
    NAME,
    FieldSpec,
    ListKind,
    MapKind,
    ScalarKind,
    Schema,
    SectionReader,
    WrongValue,
    choice,
    list_kinds,
    matching,
    named_texts,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.params import PARAMS
from cavvy.spec.fields.resources import (
    MOST_ALTERNATIVES,
    RESOURCES,
    TOPOLOGY,
    TOPOLOGY_HINT,
    check_count,
    count_alternatives,
    name_device,
    object_to_topology,
)
from cavvy.spec.fields.service import SERVICE, names_port
from cavvy.spec.fields.times import SCHEDULE, WINDOW, length_kind
from cavvy.spec.fields.transfers import (
    CHECKPOINT,
    INPUTS,
    OUTPUTS,
    VOLUMES,
    check_mounts,
    check_volumes,
)
from cavvy.spec.fields.work import LIMITS, RETRY, WEBHOOKS, WORK
from cavvy.spec.fields.workdir import WORKDIR
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cavvy.spec.keys import (
        Checkpoint,
        EdgeWork,
        GitWorkdir,
        Group,
        Image,
        Input,
        Label,
        Length,
        Limits,
        LocalPath,
        Moment,
        Output,
        Param,
        Resources,
        Retry,
        RowBatch,
        Scalar,
        Schedule,
        Search,
        Service,
        Setup,
        StopEarly,
        Switch,
        Topology,
        VolumeMount,
        Webhook,
        Whole,
        Work,
    )


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

EXPRESSION = {
    "type": "string",
    "pattern": r"\$\{\{\s*params\.[A-Za-z_][A-Za-z0-9_-]*\s*\}\}",
    "description": "A parameter's value, as in ${{ params.lr }}.",
}


def check_variable(name: str) -> str:
    """Check that a string is a valid name of an environment variable and is not reserved for Cavvy.
    Returns the string. Raises WrongValue.
    """
    if not _VARIABLE.fullmatch(name):
        close = re.sub(r"[^A-Za-z0-9_]", "_", name)
        close = f"_{close}" if close[:1].isdigit() else close
        usable = _VARIABLE.fullmatch(close) and close.strip("_")
        raise WrongValue(
            f"{shown(name)} cannot be an environment variable",
            expected="letters, digits and _, beginning with a letter or _",
            suggestion=f"write {close}" if usable else "",
        )
    if name.upper().startswith("CAVVY_"):
        raise WrongValue(f"{name} is reserved for Cavvy", suggestion="choose a name without CAVVY_")
    return name


# What a task chooses of how its programs stay on a node (`agent/work/environment.py`).
_CHOICES = {"CAVVY_REJOINS", "CAVVY_FORK_RANKS"}


def _check_set(name: str) -> str:
    """Check that a task may set a variable, and return its name. Raises WrongValue."""
    return name if name in _CHOICES else check_variable(name)


# The variables of a gang, which each node sets itself after those of the task.
_OF_GANG = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE")
# The variables that each node sets itself, because its programs need them.
_OWN_VARIABLES = {
    "PATH",
    "HOME",
    "SHELL",
    "USER",
    "LOGNAME",
    "PWD",
    "TMPDIR",
    *_OF_GANG,
}


def list_without_effect(task: TaskSpec) -> list[str]:
    """Return a note on each variable of the task that the nodes set to values of their own."""
    reason = "each node sets it, so its value in the file has no effect; set it in the command"
    return [f"{name}: {reason}" for name in _OF_GANG if name in task.env]


def check_secret(name: str) -> str:
    """Check that a string is a valid name of a secret, and return it. Raises WrongValue."""
    if name in _OWN_VARIABLES:
        raise WrongValue(
            f"{name} cannot be set, because each node sets it", suggestion="choose another name"
        )
    return check_variable(name)


def _check_tag_value(text: str) -> str:
    if len(text) > 200:
        raise WrongValue("a tag's value has more than 200 characters")
    return text


_MOST_ENTRIES = {"after": 100, "inputs": 1000, "outputs": 1000, "volumes": 100, "webhooks": 100}


def list_excess(task: TaskSpec) -> Iterator[tuple[str, int, int]]:
    """Yield each list of a task that is too long, with its number of entries and the maximum."""
    counts = {
        "after": len(task.after),
        "inputs": len(task.inputs),
        "outputs": len(task.outputs),
        "volumes": len(task.volumes),
        "webhooks": len(task.webhooks),
        "resources": count_alternatives(task.resources.choices),
    }
    for name, count in counts.items():
        most = _MOST_ENTRIES.get(name, MOST_ALTERNATIVES)
        if count > most:
            yield name, count, most


def _build(table: SectionReader) -> TaskSpec | None:
    env = table.get("env", {})
    for name in _CHOICES & env.keys():
        if env[name] not in ("0", "1"):
            table.wrong("env", f"{name} is {shown(env[name])}", expected="0 or 1")
    for name in table.get("secrets", ()):
        if name in env:
            table.wrong(
                "secrets",
                f"{name} is in `env` and in `secrets`",
                suggestion="delete the name from one of the two sections",
            )
    for name, most in _MOST_ENTRIES.items():
        check_count(table, name, most)
    limits: JobLimits = table.get("limits", JobLimits())
    _check_uses(table)
    _check_start(table, limits.deadline)
    _check_keep(table, limits)
    _, build, _ = table.get("image", (None, None, None))
    if build is not None and not table.has("workdir"):
        table.wrong(
            "image",
            "the image is built from the working folder, but `workdir` is missing",
            suggestion="add `workdir: .`",
        )
    _check_service(table)
    check_after(table)
    check_group(table)
    check_edge(table)
    if table.has("pool"):
        table.reject_beside("pool", ("machine", "keep"))
    _check_shares(table)
    _check_elastic(table)
    if problem := object_to_topology(table.get("topology"), _most_nodes(table)):
        table.wrong("topology", problem, suggestion=TOPOLOGY_HINT)
    check_volumes(table)
    check_mounts(table)
    for outside in list_outside(
        table.get("inputs", ()),
        table.get("outputs", ()),
        table.get("resources", ResourceSpec()),
        table.get("checkpoint"),
    ):
        table.wrong(outside.field, str(outside), suggestion=OUTSIDE_HINT)
    task = table.make(TaskSpec, name="")
    check_early(table)
    if task is None:
        return None
    task = replace(add_metric(task), work=_with_device(table, task.work, task.resources))
    if task.service and names_port(task.run or "", task.env, task.service.port):
        task = replace(task, service=replace(task.service, fixed_port=True))
    return task


def _with_device(
    table: SectionReader, work: Workload | None, needs: ResourceSpec
) -> Workload | None:
    """Return the amount of work. If the work states a duration without `measured_on`, `measured_on`
    becomes the device that `needs` requests.
    """
    if work is None or work.duration is None or work.measured_on is not None:
        return work
    asked = dict.fromkeys(need for each in needs.choices for need in each.accelerators)
    device = name_device(tuple(asked))
    if asked and device is None:
        message = "the task accepts several accelerators, so `measured_on` is needed"
        named = filter(None, (name_device([need]) for need in asked))
        example = next(named, "A100:8")
        hint = (
            "state the accelerators on which the duration was measured, for example `measured_on: "
            f"{example}`"
        )
        table.wrong("work", message, suggestion=hint)
    return replace(work, measured_on=device)


def _check_keep(table: SectionReader, limits: JobLimits) -> None:
    if not table.get("keep") or table.has("machine"):
        return
    if table.has("volumes"):
        hint = "delete `keep`, or copy the data with `inputs` instead"
        table.wrong("keep", "nodes with `volumes` cannot be kept", suggestion=hint)
    if limits.duration is not None:
        message = (
            "nodes cannot be kept with `limits.duration`: the provider may reclaim the nodes when "
            "the duration ends"
        )
        table.wrong("keep", message, suggestion="delete `keep` or `limits.duration`")


def _most_nodes(table: SectionReader) -> int:
    nodes, elastic = table.get("nodes", (1, None))
    return int(nodes if elastic is None else elastic.most)


def _check_elastic(table: SectionReader) -> None:
    """Refuse a range of nodes for work whose number of nodes others rely on."""
    nodes, elastic = table.get("nodes", (1, None))
    if elastic is None:
        return
    for name, why in _FIXED.items():
        if table.has(name):
            hint = f"write one number, such as `nodes: {nodes}`, or delete `{name}`"
            table.wrong("nodes", f"the range {elastic} cannot be used: {why}", suggestion=hint)


# The keys beside which `nodes` must be one number, and why.
_FIXED = {
    "service": "replicas, not their nodes, follow the load of a service",
    "session": "a session stays on its nodes",
    "machine": "the nodes of a machine are as many as the machine has",
    "pool": "gangs of a pool have fixed sizes",
    "group": "the jobs of a group know each other's nodes",
    "topology": "the nodes of a topology are chosen together",
}


def _check_shares(table: SectionReader) -> None:
    needs, nodes = table.get("resources", ResourceSpec()), _most_nodes(table)
    if problem := object_to_parts(needs, nodes):
        table.wrong("nodes", problem, suggestion=PARTS_HINT)


def object_to_parts(needs: ResourceSpec, nodes: int) -> str:
    """Return what is wrong if several nodes request parts of GPUs, or "": two nodes on one GPU
    would wait for each other, and NCCL refuses them."""
    parts = [each for need in needs.choices for each in need.accelerators if each.part < 1]
    return (
        f"a task of {nodes} nodes needs whole GPUs, not parts of them"
        if parts and nodes > 1
        else ""
    )


PARTS_HINT = "set `nodes: 1`, or request whole GPUs (`gpu: 1`)"


def _check_service(table: SectionReader) -> None:
    """Add a problem for each key that ends, starts or repeats a job, because a service runs until
    it is stopped.
    """
    if not table.has("service"):
        return
    ends = ("after", "schedule", "window", "work", "keep", "session", "machine", "pool")
    table.reject_beside("service", ends)


def _check_uses(table: SectionReader) -> None:
    """Add a problem if `setup.uses` has no effect."""
    _, uses = table.get("setup", (None, None))
    if uses and not table.has("workdir"):
        hint = "add `workdir: .`, or delete `uses`"
        table.wrong("setup", "`setup.uses` names files, but `workdir` is missing", suggestion=hint)
    if uses is not None and table.has("image"):
        table.wrong(
            "setup",
            "`setup.uses` is not supported with an `image`: in a container, every attempt runs the "
            "setup again",
            suggestion="delete `uses`, or build an image that contains the setup's results",
        )


def _check_start(table: SectionReader, deadline: datetime | None) -> None:
    schedule, now = table.get("schedule"), table.notes.now
    start: datetime | None = schedule.at if schedule else None
    if start is not None and now is not None and start <= now:
        message = f"the start was {format_duration(now - start)} ago"
        hint = "omit `schedule` to start as soon as nodes are available"
        table.wrong("schedule", message, suggestion=hint)
    if start is not None and deadline is not None and deadline <= start:
        message = "the start must be before the deadline"
        table.wrong("schedule", message, suggestion="change `schedule` or the deadline")


_TAGS = MapKind(
    "tag names, each with a string value",
    matching(
        r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?",
        "cannot be a tag's name",
        expected="letters, digits and . _ / -, at most 63",
    ),
    text_kind("a string", _check_tag_value, numbers=True),
)


_ENV = named_texts(
    "variable names, each with a string value",
    _check_set,
    {"pattern": f"^{_VARIABLE.pattern}$"},
    missing="the variable has no value",
    hint="write '' for an empty value, or list the name under `secrets`",
)


SECRETS = ListKind(text_kind("a secret's name such as HF_TOKEN", check_secret), single=True)


_MOST_NODES = 10_000


def _read_nodes(node: ScalarNode) -> tuple[int, NodeRange | None]:
    """Return the number of nodes, or the least of a range such as 2..16, and the range."""
    least, dots, most = node.text.strip().partition("..")
    ends = [each.strip() for each in ((least, most) if dots else (least,))]
    if not all(re.fullmatch(r"[+]?[0-9]{1,18}", each) for each in ends):
        raise WrongValue(f"{describe(node)} is not a whole number, nor a range of them")
    numbers = [int(each) for each in ends]
    for each in numbers:
        if not 1 <= each <= _MOST_NODES:
            raise WrongValue(f"{each:,} is too {'small' if each < 1 else 'large'}")
    if numbers[-1] < numbers[0]:
        turned = f"{numbers[1]}..{numbers[0]}"
        raise WrongValue(f"{numbers[0]} is above {numbers[1]}", suggestion=f"write {turned}")
    if len(set(numbers)) == 1:
        return numbers[0], None
    return numbers[0], NodeRange(least=numbers[0], most=numbers[1])


NODES = ScalarKind(
    f"a whole number from 1 to {_MOST_NODES:,}, or a range such as 2..16",
    _read_nodes,
    {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": _MOST_NODES},
            {"type": "string", "pattern": r"^[0-9]+ *\.\. *[0-9]+$"},
            EXPRESSION,
        ]
    },
)


class TaskKeys(TypedDict, total=False):
    """All keys of a task except `run`: their types in Python, and how the parser reads them."""

    name: Annotated["str", NAME]
    project: Annotated["str", NAME]
    tags: Annotated["Mapping[str, Label]", _TAGS]
    priority: Annotated["Whole", whole(-100, 100)]
    params: Annotated["Mapping[str, Scalar | Param]", FieldSpec(PARAMS, to=())]
    array: Annotated["str", ARRAY]
    sweep: Annotated["Mapping[str, Scalar | Sequence[Scalar]]", FieldSpec(SWEEP, to=())]
    parallel: Annotated["Whole", whole(1, 10_000)]
    batch: Annotated["RowBatch", FieldSpec(BATCH, to=())]
    best: Annotated["str", BEST]
    stop_early: Annotated["str | StopEarly", STOP_EARLY]
    search: Annotated["str | Search", SEARCH]
    trials: Annotated["Whole", TRIALS]
    after: Annotated["str | Mapping[str, str] | Sequence[str | Mapping[str, str]]", AFTER]
    group: Annotated["str | Group", GROUP]
    resources: Annotated["Resources", RESOURCES]
    nodes: Annotated["Whole | str", FieldSpec(NODES, to=("nodes", "elastic"))]
    topology: Annotated["Topology", TOPOLOGY]
    encrypt: Annotated["Switch", FLAG]
    image: Annotated[
        "str | Image | Mapping[str, Any]",
        FieldSpec(IMAGE, to=("image", "image_build", "image_login")),
    ]
    workdir: Annotated["LocalPath | GitWorkdir", WORKDIR]
    setup: Annotated["str | Setup", FieldSpec(SETUP, to=("setup", "setup_uses"))]
    env: Annotated["Mapping[str, Scalar]", _ENV]
    secrets: Annotated["str | Sequence[str]", SECRETS]
    inputs: Annotated["Sequence[Input]", INPUTS]
    outputs: Annotated["Sequence[Output]", OUTPUTS]
    volumes: Annotated["Sequence[str | VolumeMount]", VOLUMES]
    checkpoint: Annotated["str | Checkpoint", CHECKPOINT]
    limits: Annotated["Limits", LIMITS]
    retry: Annotated["Retry", RETRY]
    on_loss: Annotated['Literal["repair", "restart"]', choice(LossPolicy)]
    schedule: Annotated["Moment | Schedule", SCHEDULE]
    window: Annotated["str", WINDOW]
    work: Annotated["Work", WORK]
    webhooks: Annotated["str | Webhook | Sequence[str | Webhook]", WEBHOOKS]
    service: Annotated["Service", FieldSpec(SERVICE, to=("service", "replica_groups"))]
    grace: Annotated["Length", length_kind(timedelta(0), timedelta(hours=1))]
    notify: Annotated[
        'Literal["handlers", "main", "all"]', choice(NotifyTarget, {"group": NotifyTarget.ALL})
    ]
    keep: Annotated["Length", length_kind(timedelta(0), timedelta(hours=24))]
    machine: Annotated["str", NAME]
    pool: Annotated["str", NAME]
    session: Annotated["Switch", FLAG]
    edge: Annotated["EdgeWork", EDGE]


TASK = section("", _build, run=FieldSpec(COMMANDS, required=True), **list_kinds(TaskKeys))


def make_schema() -> Schema:
    """Build the JSON Schema (2020-12) from the table of fields that the parser uses.

    Some values that the parser accepts do not match the schema: for example, the parser reads "8"
    as a number. The schema checks neither names of accelerators nor dates.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cavvy task file",
        "description": TASK.help,
        **{name: value for name, value in TASK.schema.items() if name != "required"},
        # An image and an engine name their own commands.
        "anyOf": [{"required": [name]} for name in ("run", "image", "service", "batch", "edge")],
        "$defs": {"expression": EXPRESSION},
    }
