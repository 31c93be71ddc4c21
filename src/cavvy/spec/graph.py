"""Several tasks that are submitted together. In `after`, the tasks name each other or jobs that
exist already.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from cavvy.domain.tasks import JobDependency, Scalar, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, Node

MOST_TASKS = 100


class GraphFault(Struct, frozen=True, kw_only=True):
    """Why tasks cannot be submitted together. `task` is the number of the task with the fault, and
    `key` the key to change.
    """

    task: int
    key: str
    message: str
    hint: str = ""


def find_fault(tasks: Sequence[TaskSpec]) -> GraphFault | None:
    """Return why the tasks cannot be submitted together, or None if they can."""
    if len(tasks) > MOST_TASKS:
        message, hint = f"{len(tasks)} tasks are too many", f"submit at most {MOST_TASKS}"
        return GraphFault(task=MOST_TASKS, key="name", message=message, hint=hint)
    names = [task.name for task in tasks]
    for number, task in enumerate(tasks):
        if task.name in names[:number]:
            message, hint = f"two tasks have the name {task.name}", "give each its own `name`"
            return GraphFault(task=number, key="name", message=message, hint=hint)
        if task.project != tasks[0].project:
            message, hint = "the tasks belong to different projects", "write a file for each"
            return GraphFault(task=number, key="project", message=message, hint=hint)
    if fault := _find_group_fault(tasks):
        return fault
    try:
        sort_tasks(tasks)
    except CycleError as error:
        first, *rest = reversed(error.args[1])  # each waits for the next
        path = ", which waits for ".join(rest)
        message = f"the tasks wait for each other: {first} waits for {path}"
        hint = "delete one of these conditions"
        number = [*map(_unit_of, tasks)].index(first)
        return GraphFault(task=number, key="after", message=message, hint=hint)
    return None


def _find_group_fault(tasks: Sequence[TaskSpec]) -> GraphFault | None:
    """Return why the groups of the tasks could not start, or None if they could."""
    groups = {task.name: task.group.name for task in tasks if task.group is not None}
    for number, task in enumerate(tasks):
        if task.group is None:
            continue
        name = task.group.name
        if any(name == each.name for each in tasks):
            message = f"{name} is the name of a group and of a task"
            hint = "choose another name for the group"
            return GraphFault(task=number, key="group", message=message, hint=hint)
        for each in task.after:
            if groups.get(each.job) == name or each.job == name:
                message = f"{task.name} waits for {each.job}, but starts together with it"
                hint = "delete this condition, or `group`"
                return GraphFault(task=number, key="after", message=message, hint=hint)
        if all(one.group.helper for one in tasks if one.group and one.group.name == name):
            message = f"all tasks of the group {name} are helpers, so that it would never end"
            hint = "delete `helper` from the task that the others serve"
            return GraphFault(task=number, key="group", message=message, hint=hint)
    return None


def sort_tasks(tasks: Sequence[TaskSpec]) -> Sequence[int]:
    """Return the numbers of the tasks, each after those that it waits for. Raises CycleError."""
    units = {task.name: _unit_of(task) for task in tasks}
    sorter = TopologicalSorter[str]()
    for task in tasks:
        before = (units[each.job] for each in task.after if each.job in units)
        sorter.add(units[task.name], *before)
    places = {unit: place for place, unit in enumerate(sorter.static_order())}
    return sorted(range(len(tasks)), key=lambda number: places[_unit_of(tasks[number])])


def _unit_of(task: TaskSpec) -> str:
    """Return the name of what starts as a whole: the task, or its group."""
    return task.name if task.group is None else task.group.name


# keys that are about one task; the command line cannot set them for several tasks
_OF_ONE = ("name", "run", "after", "group", "array", "sweep", "parallel", "session", "machine")


def split_params(
    documents: Sequence[Node], params: Mapping[str, Scalar]
) -> Sequence[Mapping[str, Scalar]]:
    """Return the parameters of each document. The first document gets those that none declares, so
    that they are reported.
    """
    declared = [_list_declared(each) for each in documents]
    every = set[str]().union(*declared)
    return [
        {
            name: value
            for name, value in params.items()
            if name in own or (not number and name not in every)
        }
        for number, own in enumerate(declared)
    ]


def _list_declared(document: Node) -> Collection[str]:
    params = document.get("params") if isinstance(document, MapNode) else None
    return {key.text for key, _ in params.entries} if isinstance(params, MapNode) else set()


def check_graph(
    tasks: Sequence[TaskSpec],
    documents: Sequence[Node],
    overridden: Collection[str],
    notes: ProblemNotes,
) -> None:
    """Add a problem if the tasks cannot be submitted together, or if the options are about one
    task. The documents are those of the tasks."""
    if fault := find_fault(tasks):
        document = documents[fault.task]
        keys = document.entries if isinstance(document, MapNode) else ()
        marks = {key.text: key.mark for key, _ in keys}
        notes.add(marks.get(fault.key, document.mark), fault.message, suggestion=fault.hint)
    for key in _OF_ONE:
        if key in overridden:
            message = f"the file has {len(tasks)} tasks, and this option is about one"
            notes.outside(f"--{key}", message, suggestion=f"set `{key}` in the file")


def chain(tasks: Sequence[TaskSpec], stem: str) -> Sequence[TaskSpec]:
    """Return tasks with different names, each of which waits until the one before it succeeds."""
    named: list[TaskSpec] = []
    for number, task in enumerate(tasks):
        name = task.name or stem
        if not task.name or name in (each.name for each in named):
            name = f"{name[:59]}-{number}"
        after = (JobDependency(named[-1].name),) if named else ()
        named.append(replace(task, name=name, after=after))
    return named


def split_text(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text of each document that is not empty: the text with empty lines above it, so
    that its lines keep their numbers, and the text alone.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events = list(yaml.parse(text, Loader=loader))
    starts, empty = list[int](), list[bool]()
    for event, inner in pairwise(events):
        if isinstance(event, yaml.DocumentStartEvent) and event.start_mark is not None:
            starts.append(event.start_mark.index)
            empty.append(
                isinstance(inner, yaml.ScalarEvent) and inner.value == "" and not inner.style
            )
    starts[:1] = [0]  # with the comments above
    for (start, end), skip in zip(pairwise([*starts, len(text)]), empty, strict=True):
        first = start + len("---\n") if text.startswith("---\n", start) else start
        if not skip:
            yield "\n" * text.count("\n", 0, first) + text[first:end], text[first:end]


def add_overrides(overrides: str, task: TaskSpec) -> str:
    """Return the overrides, with the name of a task, the jobs that it waits for, and its group."""
    import yaml

    table = yaml.safe_load(overrides) if overrides else {}
    after = [f"{each.job}:{each.on}" for each in task.after]
    more: dict[str, object] = {"name": task.name} | ({"after": after} if after else {})
    if task.group is not None:
        linger = (
            {"linger": f"{task.group.linger.total_seconds():.0f}s"} if task.group.linger else {}
        )
        more["group"] = {"name": task.group.name, "helper": task.group.helper, **linger}
    return json.dumps({**table, **more})
