"""Applies values from the command line to a task. The values from the command line replace the
values in the task file. The task file may be written for any supported tool.

Suggests fixes for misplaced keys: keys that belong to another section, or that only other tools
have.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.fields.arrays import SWEEP, add_metric
from cavvy.spec.fields.kinds import (
    EitherKind,
    ListKind,
    MapKind,
    SectionReader,
    SectionSpec,
    ValueKind,
)
from cavvy.spec.fields.params import WrittenValue
from cavvy.spec.fields.task import TASK
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, check_single, compose_all


def _read_values(table: SectionReader) -> dict[str, Any]:
    """Return the task attributes that the given keys set. A section becomes a nested table of
    attributes.
    """
    values = table.values()
    for each in table.section.fields:
        node = table.node.get(each.name)
        if isinstance(each.kind, SectionSpec) and isinstance(node, MapNode):
            values[each.name] = SectionReader(each.kind, node, table.notes).values()
    return values


_OVERRIDES = replace(
    TASK,
    fields=tuple(
        replace(each, required=False)
        for each in TASK.fields
        if each.name not in ("params", "batch")
    ),
    build=_read_values,
)


def apply_overrides(task: TaskSpec, text: str, now: datetime | None = None) -> TaskSpec:
    """Replace values of a task with the values in `text`, a YAML table with keys of the task file.

    In a section such as `resources`, only the keys in `text` are replaced. The keys are replaced in
    every alternative of the resources. Variables, secrets and tags in `text` are added to those of
    the task. If `now` is given, times before `now` are refused. Raises SpecError for
    invalid values.
    """
    if not text:
        return task
    notes = ProblemNotes("the options", text, now)
    notes.place_key = elsewhere
    documents = compose_all(text, notes)
    root = check_single(documents, notes) if documents else None
    values = _OVERRIDES.read(root, notes) if root is not None else None
    notes.check()
    return add_metric(_merge(task, values or {}))


def read_sweep(text: str) -> Mapping[str, Sequence[WrittenValue]] | None:
    """Return the parameters that an override text sweeps, or None if it has no sweep. Raises
    SpecError for invalid values.
    """
    if '"sweep"' not in text and "sweep:" not in text:
        return None
    notes = ProblemNotes("the options", text)
    root = check_single(documents, notes) if (documents := compose_all(text, notes)) else None
    node = root.get("sweep") if isinstance(root, MapNode) else None
    found: Mapping[str, Sequence[WrittenValue]] | None = None
    if node is not None:
        found = SWEEP.read(node, notes)
    notes.check()
    return found


def list_overridden(text: str) -> frozenset[str]:
    """Return the keys in an override text, with dots between the parts, such as `nodes` and
    `resources.gpu`.
    """
    found: set[str] = set()
    for root in compose_all(text, ProblemNotes("the options", text)) if text else ():
        for key, value in root.entries if isinstance(root, MapNode) else ():
            inner = value.entries if isinstance(value, MapNode) else ()
            found |= {key.text, *(f"{key.text}.{each.text}" for each, _ in inner)}
    return frozenset(found)


def read_variables(text: str) -> Mapping[str, str]:
    """Return the environment variables that an override text sets. Raises SpecError for invalid
    values.
    """
    return apply_overrides(TaskSpec(name="", run=""), text).env


def _merge(task: TaskSpec, values: dict[str, Any]) -> TaskSpec:
    env, secrets = values.pop("env", {}), values.pop("secrets", ())
    for name, inner in values.items():
        old = getattr(task, name)
        if isinstance(inner, dict) and isinstance(old, Mapping):  # tags
            values[name] = {**old, **inner}
        elif isinstance(inner, dict):
            merge = _merge_needs if isinstance(old, ResourceSpec) else replace
            values[name] = merge(old, **inner)
    return replace(
        task,
        **values,
        env={name: value for name, value in task.env.items() if name not in secrets} | env,
        secrets=tuple(name for name in dict.fromkeys((*task.secrets, *secrets)) if name not in env),
    )


def _merge_needs(needs: ResourceSpec, **values: Any) -> ResourceSpec:
    """Set the attributes in every alternative of the resources. Alternatives that become equal are
    merged.
    """
    alone = (
        replace(
            each,
            **values,
            any_of=(),
            ordered=False,
            implied=tuple(name for name in each.implied if name not in values),
        )
        for each in needs.choices
    )
    found = tuple(dict.fromkeys(alone))
    return found[0] if len(found) < 2 else replace(found[0], any_of=found, ordered=needs.ordered)


def elsewhere(key: str, path: str) -> str:
    """Return a suggestion that names the section to which `key` belongs, or "" if no section has
    such a key.
    """
    if path == "resources.gpu":
        # The value has the form of another tool, such as {H100: 8}.
        return f"write `gpu: {key}:COUNT`"
    for section in sections(TASK):
        if (
            section.path != path
            and section.path.count(".") < 2
            and any(each.name == key for each in section.fields)
        ):
            if section.path == "":
                return f"`{key}` belongs at the top of the file"
            if "NAME" not in section.path:
                return f"`{key}` belongs under `{section.path}`"
    return ""


def sections(kind: ValueKind) -> list[SectionSpec]:
    """Return every section in `kind`, in the order of the fields. If `kind` is itself a section,
    the result begins with it.
    """
    match kind:
        case SectionSpec():
            inner = [each for field in kind.fields for each in sections(field.kind)]
            # Several fields can share a table, which must occur only once in the result.
            return list({id(each): each for each in (kind, *inner)}.values())
        case ListKind():
            return sections(kind.item)
        case MapKind():
            return sections(kind.value)
        case EitherKind():
            return [each for option in kind.kinds for each in sections(option)]
        case _:
            return []
