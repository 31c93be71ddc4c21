"""Files with several tasks, one in each document: their documents, and the task of each."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from cavvy.domain.tasks import JobDependency, Scalar, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.graph import find_fault
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, Node, ScalarNode

# keys that are about one task; the command line cannot set them for several tasks
_OF_ONE = ("name", "run", "after", "group", "array", "sweep", "parallel", "session", "machine")


def list_filled(documents: Sequence[Node]) -> Sequence[Node]:
    """Return the documents that are not empty."""
    return [each for each in documents if not (isinstance(each, ScalarNode) and each.value is None)]


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
